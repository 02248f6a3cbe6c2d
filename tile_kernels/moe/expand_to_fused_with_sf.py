"""Expand quantized rows: copy codes and scale factors of every token to each of its positions in expert order.

    y[p, h]    = x[t, h]                                    p = token_topk_to_pos[t, k] >= 0
    y_sf[p, g] = x_sf[t, g]
    y[p, h]    = y_sf[p, g] = 0                             where pos_to_expert[p] < 0

Codes and row-major scale factors move like the rows of `expand_to_fused`, by the same threads. Column-major ones of
many rows are gathered by other blocks, after a small launch that finds the token of every position.
Memory bound: the floor is one read of x and x_sf and one write of y and y_sf.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.moe._checks import BITS, bits_of, check_places, row_width
from tile_kernels.moe._samples import random_places
from tile_kernels.moe.expand_to_fused_with_sf_kernels import empty_sf, expand_with_sf_kernel

# Op -----------------------------------------------------------------------------------------


@op(outputs='y y_sf', twin='expand_with_sf')
def _expand_to_fused_with_sf(
    x: Tensor, x_sf: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor, col: bool = False
) -> tuple[Tensor, Tensor]:
    """Copy codes and scale factors of every token to each of its positions in expert order.

    Args:
        x: (num_tokens, stored) codes of any format in their container; rows may be strided.
        x_sf: (num_tokens, num_groups) scale factors, row-major, packed or not; rows may be strided.
        token_topk_to_pos: (num_tokens, num_topk) int32, negative where a slot has no position.
        pos_to_expert: (num_expanded,) int32; negative means padding.
        col: whether the result's scale factors are column-major with 16-byte aligned columns.

    Returns:
        Codes (num_expanded, stored) and scale factors (num_expanded, num_groups), bits unchanged, 0 where
        pos_to_expert is negative.
    """
    num_tokens, hidden = check.shape(x, 'x', 'num_tokens hidden')
    _, num_groups = check.shape(x_sf, 'x_sf', 'num_tokens num_groups', num_tokens=num_tokens)
    num_topk, num_expanded = check_places(token_topk_to_pos, pos_to_expert, num_tokens)
    check.at_least(hidden, 1, 'hidden')
    check.unit_stride(x, 'x')
    check.unit_stride(x_sf, 'x_sf')
    check.same_device(x=x, x_sf=x_sf, token_topk_to_pos=token_topk_to_pos, pos_to_expert=pos_to_expert)
    y = torch.empty((num_expanded, hidden), dtype=x.dtype, device=x.device)
    y_sf = empty_sf(num_expanded, num_groups, x_sf.dtype, col, x.device)
    sf_width = 1 if col else row_width(num_groups, x_sf, y_sf)
    rows = (hidden, x.element_size(), row_width(hidden, x, y), num_topk)
    static = (*rows, num_groups, x_sf.element_size(), sf_width, col)
    pos_to_token = torch.empty_like(pos_to_expert) if col else None
    maps = (token_topk_to_pos, pos_to_expert, pos_to_token)
    launch(
        expand_with_sf_kernel, static, bits_of(x), bits_of(x_sf), *maps, bits_of(y), bits_of(y_sf), size=num_expanded
    )
    return y, y_sf


@_expand_to_fused_with_sf.public
@check.names(x_sf='x[1]')
def expand_to_fused_with_sf(
    x: tuple[Tensor, Tensor],
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[Tensor, Tensor]:
    """Expand a quantized tensor with one scale factor for each token and `num_per_channels` channels.

    Args:
        x: codes (num_tokens, stored) and row-major scale factors (num_tokens, num_groups), float32 or packed int32.
        num_per_channels: channels per scale factor.
        token_topk_to_pos: (num_tokens, num_topk) int32, negative where a slot has no position.
        pos_to_expert: (num_expanded,) int32; negative means padding.
        use_tma_aligned_col_major_sf: whether the result's scale factors are column-major, columns 16-byte aligned.

    Returns:
        Codes (num_expanded, stored) and scale factors (num_expanded, num_groups); 0 where pos_to_expert is negative.
    """
    data, sf = check.pair(x, 'x')
    check.at_least(num_per_channels, 1, 'num_per_channels')
    _, stored = check.shape(data, 'x[0]', 'num_tokens stored')
    num_groups = -(-stored * (2 if data.dtype is torch.int8 else 1) // num_per_channels)
    packed = sf.dtype is torch.int32
    check.shape(sf, 'x[1]', 'num_tokens num_groups', num_groups=-(-num_groups // 4) if packed else num_groups)
    return expand_to_fused_with_sf.call(data, sf, token_topk_to_pos, pos_to_expert, use_tma_aligned_col_major_sf)


# Cases --------------------------------------------------------------------------------------


def _make(
    num_tokens: int,
    num_topk: int,
    hidden: int,
    dtype: torch.dtype,
    num_groups: int,
    sf_dtype: torch.dtype,
    col: bool,
    num_experts: int = 8,
    padding: int = 3,
    unrouted: float = 0.2,
) -> dict:
    token_topk_to_pos, pos_to_expert = random_places(num_tokens, num_topk, num_experts, unrouted, padding)
    return dict(
        x=torch.randint(0, 127, (num_tokens, hidden), dtype=torch.uint8).view(dtype),
        x_sf=torch.randint(0, 127, (num_tokens, num_groups), dtype=BITS[sf_dtype.itemsize]).view(sf_dtype),
        token_topk_to_pos=token_topk_to_pos,
        pos_to_expert=pos_to_expert,
        col=col,
    )


E4M3, F32, PACKED = torch.float8_e4m3fn, torch.float32, torch.int32
BENCH: dict[str, list] = dict(
    num_tokens=[4096, 21913], num_topk=[8], hidden=[7168], dtype=[E4M3], num_experts=[32], padding=[0]
)

expand_to_fused_with_sf.cases(
    make=_make,
    match='bitwise',
    smoke=grid(
        num_tokens=[0, 1, 37],
        num_topk=[6],
        hidden=[256],
        dtype=[E4M3],
        num_groups=[8],
        sf_dtype=[F32, PACKED],
        col=[False, True],
    )
    + grid(  # a tail of groups, several chunks of them, one byte each
        num_tokens=[5],
        num_topk=[9],
        hidden=[67],
        dtype=[torch.int8],
        num_groups=[5, 131],
        sf_dtype=[E4M3],
        col=[False, True],
    )
    + grid(  # more padding than rows
        num_tokens=[6],
        num_topk=[2],
        hidden=[64],
        dtype=[E4M3],
        num_groups=[1],
        sf_dtype=[F32],
        col=[False, True],
        padding=[70],
    )
    + grid(  # enough positions for the gather of tiles, one and several chunks of groups
        num_tokens=[37],
        num_topk=[6],
        hidden=[64],
        dtype=[E4M3],
        num_groups=[5, 70],
        sf_dtype=[F32],
        col=[True],
        padding=[240],
    ),
    full=grid(
        num_tokens=[4001],
        num_topk=[2, 8, 9],
        hidden=[576, 2048, 7168],
        dtype=[E4M3],
        num_groups=[18, 56, 224],
        sf_dtype=[F32, PACKED],
        col=[False, True],
    )
    + grid(  # more than 2^31 codes
        num_tokens=[100003],
        num_topk=[3],
        hidden=[7168],
        dtype=[E4M3],
        num_groups=[56],
        sf_dtype=[F32],
        col=[False, True],
    ),
    bench=grid(**BENCH, num_groups=[56], sf_dtype=[F32], col=[False, True], unrouted=[0.7])
    + grid(**BENCH, num_groups=[14], sf_dtype=[PACKED], col=[True], unrouted=[0.7])
    + grid(
        num_tokens=[64], num_topk=[8], hidden=[7168], dtype=[E4M3], num_groups=[56], sf_dtype=[F32], col=[False, True]
    ),
)
