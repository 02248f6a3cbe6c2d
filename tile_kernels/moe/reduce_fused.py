"""Reduce expanded rows, with or without weights: the public function over `reduce_rows` and `weighted_reduce_rows`."""

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.moe.reduce_rows import reduce_rows
from tile_kernels.moe.weighted_reduce_rows import weighted_reduce_rows


@check.names(x_sf='x[1]', y='out')
def reduce_fused(
    x: Tensor | tuple[Tensor, Tensor],
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str = '',
    sf: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Reduce expanded rows to tokens: the weighted sum over the positions of each token.

    Differentiable in x and topk_weights (without `out`).

    Args:
        x: (num_expanded, hidden) bfloat16, float16 or float32, contiguous; or a pair of it and (num_expanded,) float32
            factors of its rows.
        topk_weights: (num_tokens, num_topk) float32, or None for a plain sum.
        token_topk_to_pos: (num_tokens, num_topk) int32, negative where a slot has no position.
        fp8_format: '' keeps the dtype of x, 'e4m3' rounds to fp8 (saturating).
        sf: (1,) float32 factor of the result, only with an fp8 format.
        out: memory for the result, or None.

    Returns:
        (num_tokens, hidden), `out` if given; 0 in rows of tokens without a position.
    """
    x, x_sf = check.pair(x, 'x') if isinstance(x, tuple) else (check.tensor(x, 'x'), None)
    if sf is not None and not fp8_format:
        check.fail('sf', "must be None unless fp8_format is 'e4m3'", "fp8_format ''")
    if topk_weights is None:
        if out is None:
            return reduce_rows(x, token_topk_to_pos, x_sf, sf, fp8_format)
        reduce_rows.out(x, token_topk_to_pos, x_sf, sf, fp8_format, y=out)
        return out
    if out is None:
        return weighted_reduce_rows(x, topk_weights, token_topk_to_pos, x_sf, sf, fp8_format)
    weighted_reduce_rows.out(x, topk_weights, token_topk_to_pos, x_sf, sf, fp8_format, y=out)
    return out
