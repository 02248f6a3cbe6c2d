"""Scale factors of block-scaled products: where they lie, and how they apply to the operands."""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame, agreed
from tile_kernels.interpreter.engine.lanes import Mask
from tile_kernels.interpreter.engine.translate import Compiler
from tile_kernels.interpreter.meaning.cluster_ops import Pair
from tile_kernels.interpreter.meaning.tile_ops import Region, Scaling
from tile_kernels.interpreter.memory.dtypes import decoder, dtype_of

SCALE_HINTS = frozenset({'sf_a_granularity_k', 'sf_b_granularity_k', 'sf_layout'})
_BYTES = 4  # scale factors in a word
_ROW_MAJOR, _CHUNKS = 'rowmajor', 'blockscaled_chunk_kmajor'


def scales_in_tensor_memory(compiler: Compiler, call: Any, pair: Pair | None) -> Scaling:
    """E8M0 factors: row r is in lane r % 32 and column r // 32, and four groups along K are the bytes of a word."""
    regions, groups, start = _operands(compiler, call, pair)
    if any(group % 32 for group in groups):
        raise compiler.unsupported(f'scale factors for {groups} elements in tensor memory')
    decode = decoder(dtype_of('float8_e8m0fnu'))

    def words(frame: Frame, mask: Mask, region: Region, rows: int) -> np.ndarray:
        cells = region.load_matrix(frame, mask)
        row = np.arange(rows)
        return cells[:, row % 32, row // 32]

    def scale(frame: Frame, mask: Mask, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        depth = np.arange(a.shape[-1]).reshape(1, 1, -1) + _first(frame, start, pair)
        found = []
        for region, group, rows in zip(regions, groups, (a.shape[-2], b.shape[-1]), strict=True):
            word = words(frame, mask, region, rows)[:, :, None]
            byte = (word >> (depth // group % _BYTES * 8).astype(np.uint32)) & np.uint32(255)
            found.append(decode(byte.astype(np.uint8)))
        return a * found[0], b * found[1].swapaxes(-1, -2)

    return scale


def scales_in_shared(compiler: Compiler, call: Any, pair: Pair | None) -> Scaling:
    """UE4M3 factors for 16 elements: words of a row-major matrix, or of one with groups of 32 rows along K."""
    regions, groups, start = _operands(compiler, call, pair)
    layout = str(_note(call, 'sf_layout') or _ROW_MAJOR)
    if set(groups) != {16} or layout not in (_ROW_MAJOR, _CHUNKS):
        raise compiler.unsupported(f'scale factors for {groups} elements in layout {layout}')
    decode = decoder(dtype_of('float8_e4m3fn'))

    def words(frame: Frame, mask: Mask, region: Region, rows: int, depth: int) -> np.ndarray:
        cells = region.load_matrix(frame, mask)
        cells = cells.reshape(-1, *cells.shape[-2:])
        row, word = np.arange(rows)[:, None], np.arange(depth // 64)
        if layout == _CHUNKS:
            number = word * rows + row % 32 * (rows // 32) + row // 32
            return cells[:, number // len(word), number % len(word)]
        column = word + np.asarray(_first(frame, start, pair)) // 64
        column = column.reshape(-1, 1, len(word))
        return cells[np.arange(len(cells))[:, None, None], row, column]

    def scale(frame: Frame, mask: Mask, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        depth = np.arange(a.shape[-1])
        found = []
        for region, rows in zip(regions, (a.shape[-2], b.shape[-1]), strict=True):
            word = words(frame, mask, region, rows, a.shape[-1])[:, :, depth // 64]
            byte = (word >> (depth // 16 % _BYTES * 8).astype(np.uint32)) & np.uint32(127)  # the sign does not count
            found.append(decode(byte.astype(np.uint8)))
        return a * found[0], b * found[1].swapaxes(-1, -2)

    return scale


def _operands(compiler: Compiler, call: Any, pair: Pair | None) -> tuple[list[Region], list[int], Any]:
    regions = [Region(compiler, call.args[position]) for position in (13, 14)]
    for region in regions:
        region.access.everyone = True
        region.pair = pair
    groups = [int(_note(call, f'sf_{side}_granularity_k')) for side in 'ab']
    return regions, groups, compiler.expr(call.args[15])


def _note(call: Any, name: str) -> Any:
    value = dict(call.annotations).get(name)
    return getattr(value, 'value', value)


def _first(frame: Frame, start: Any, pair: Pair | None) -> Any:
    """The first element along K, per block."""
    found = agreed(frame, start(frame))
    found = found if pair is None else pair.of_first(frame, found)
    return found.reshape(-1, 1, 1) if isinstance(found, np.ndarray) else int(found)
