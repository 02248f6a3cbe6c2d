"""Scale factors of several weights, packed for both of their GEMM operands: `transpose_weight_sf` of each."""

from collections.abc import Sequence

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.quant._checks import Block, Pair, into
from tile_kernels.quant.transpose_weight_sf import transpose_weight_sf


def batched_transpose_weight_sf(
    sf: Sequence[Tensor],
    block_size: int | Block,
    transpose_sf1s: Sequence[bool],
    outs: Sequence[Pair | None] | None = None,
) -> list[Pair]:
    """Packed scale factors of weights for both of their GEMM operands.

    Args:
        sf: for each weight (n / b, k / b) or (batch, n / b, k / b) float32 powers of two, contiguous.
        block_size: b, 32 or 128.
        transpose_sf1s: for each weight whether the second result is stored (ceil(n / b / 4), k).
        outs: for each weight where to write the two results, or None.

    Returns:
        For each weight `(sf0, sf1)`, int32: sf0 (..., n, ceil(k / b / 4)) with stride 1 along n, four blocks of k to a
        word; sf1 (..., k, ceil(n / b / 4)) with stride 1 along k, four blocks of n to a word.
    """
    for name, values in (('sf', sf), ('transpose_sf1s', transpose_sf1s), ('outs', outs)):
        if not isinstance(values, Sequence) and not (name == 'outs' and values is None):
            check.fail(name, 'must be a sequence with an entry for each weight', check.describe(values))
    check.one_of(block_size, (32, 128, (32, 32), (128, 128)), 'block_size')
    block = block_size if isinstance(block_size, int) else block_size[0]
    targets = outs if outs is not None else [None] * len(sf)
    if not len(sf) == len(transpose_sf1s) == len(targets):
        lengths = f'{len(sf)}, {len(transpose_sf1s)} and {len(targets)}'
        check.fail('sf, transpose_sf1s and outs', 'must have the same length', lengths)
    results = []
    for weight_sf, transposed, out in zip(sf, transpose_sf1s, targets, strict=True):
        single = check.tensor(weight_sf, 'sf').dim() == 2
        row_sf, col_sf = transpose_weight_sf(weight_sf.unsqueeze(0) if single else weight_sf, block)
        if single:
            row_sf, col_sf = row_sf.squeeze(0), col_sf.squeeze(0)
        pair = row_sf.mT, col_sf if transposed else col_sf.mT
        results.append(pair if out is None else (into(out[0], pair[0], 'outs[0]'), into(out[1], pair[1], 'outs[1]')))
    return results
