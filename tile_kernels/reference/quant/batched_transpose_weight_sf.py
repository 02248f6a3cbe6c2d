"""What packing the scale factors of several weights means, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tile_kernels.reference.quant.transpose_weight_sf import transpose_weight_sf


def batched_transpose_weight_sf(
    sf: Sequence[Tensor],
    block_size: int,
    transpose_sf1s: Sequence[bool],
    outs: Sequence[tuple[Tensor, Tensor] | None] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Packed scale factors of weights for both of their GEMM operands; see `tile_kernels.quant`."""
    results = []
    for weight_sf, transposed, out in zip(sf, transpose_sf1s, outs or [None] * len(sf), strict=True):
        batched = weight_sf if weight_sf.dim() == 3 else weight_sf.unsqueeze(0)
        row_sf, col_sf = (
            side.view(*weight_sf.shape[:-2], *side.shape[1:]) for side in transpose_weight_sf(batched, block_size)
        )
        pair = row_sf.mT, col_sf if transposed else col_sf.mT
        results.append(pair if out is None else (out[0].copy_(pair[0]), out[1].copy_(pair[1])))
    return results
