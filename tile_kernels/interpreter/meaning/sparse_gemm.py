"""Products with a 2:4 sparse left operand: two of four adjacent elements are kept, and metadata says which."""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.lanes import Mask
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op
from tile_kernels.interpreter.meaning.tile_ops import Region, matrix_product

_SLOTS = (0, 2, 3, 4, 6, 11)  # arguments with A, B, C, the two transposes and clear_accum
_BITS = 4  # of metadata for each group of elements


@op('tl.tileop.gemm_sp', 'tl.tileop.wgmma_gemm_sp')
def _gemm_sparse(compiler: Compiler, call: Any) -> Closure:
    """`C += A @ B`; each 4 bits of E hold the positions of two elements of A in a group of four.

    Elements of 32 bits are pairs of positions: 0b0100 and 0b1110 mean the first and the second of two.
    """
    metadata = Region(compiler, call.args[1])
    metadata.access.everyone = True
    kept = compiler.dtype(call.args[0].args[0].buffer)
    transposed = bool(call.args[5])
    word = np.dtype(f'uint{metadata.buffer.dtype.bits}')
    codes_per_word = metadata.buffer.dtype.bits // _BITS
    wide = kept.bits == 32  # one of two elements
    if not wide and kept.bits not in (8, 16):
        raise compiler.unsupported(f'T.gemm_sp of {kept.name}')

    def expand(frame: Frame, mask: Mask, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        words = metadata.load_matrix(frame, mask)
        words = words.reshape(-1, *words.shape[-2:])
        words = (words.swapaxes(-1, -2) if transposed else words).astype(word).astype(np.uint32)
        group = np.arange(a.shape[-1] if wide else a.shape[-1] // 2)
        codes = words[:, :, group // codes_per_word] >> (group % codes_per_word * _BITS).astype(np.uint32)
        if wide:
            places = (codes & 3)[..., None] // 2
        else:
            places = np.stack([codes & 3, codes >> 2 & 3], axis=-1)
        size = 2 if wide else 4
        shape = np.broadcast_shapes(a.shape[:1], codes.shape[:1]) + a.shape[1:2]
        dense = np.zeros((*shape, len(group), size), a.dtype)
        values = a.reshape(*a.shape[:-1], len(group), -1)
        np.put_along_axis(
            dense,
            np.broadcast_to(places, (*dense.shape[:-1], places.shape[-1])).astype(np.intp),
            np.broadcast_to(values, (*dense.shape[:-1], values.shape[-1])),
            axis=-1,
        )
        return dense.reshape(*shape, -1), b

    return matrix_product(compiler, call, scaling=expand, slots=_SLOTS)
