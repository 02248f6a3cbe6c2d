"""What the ops of `tile_kernels.moe` that map and move rows mean, in plain PyTorch."""

from collections.abc import Callable

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.moe.routing import RoutingMap
from tile_kernels.reference.quant import per_token_cast

FP8 = {'e4m3': torch.float8_e4m3fn}


# Mapping ------------------------------------------------------------------------------------


def fused_mapping(
    topk_idx: Tensor, num_experts: int, num_expanded: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Place every slot (token, k) among the rows of its expert: sort slots by expert, keeping their order."""
    num_tokens, num_topk = topk_idx.shape
    expert = topk_idx.flatten().long()
    slot = ((expert >= 0) & (expert < num_experts)).nonzero().flatten()
    slot = slot[expert[slot].argsort(stable=True)]
    expert = expert[slot]

    count = torch.zeros(num_experts, dtype=torch.int64, device=expert.device)
    count.scatter_add_(0, expert, torch.ones_like(expert))
    rows = -(-count // alignment) * alignment
    end = rows.cumsum(0)
    start = end - rows
    earlier = torch.arange(slot.numel(), device=slot.device) - (count.cumsum(0) - count)[expert]
    pos = start[expert] + earlier
    fits = pos < num_expanded
    pos, slot, expert = pos[fits], slot[fits], expert[fits]

    def scattered(size: int, index: Tensor, values: Tensor) -> Tensor:
        return torch.full((size,), -1, dtype=torch.int32, device=index.device).scatter_(0, index, values.int())

    return (
        scattered(num_expanded, pos, expert),
        scattered(num_expanded, pos, slot // max(num_topk, 1)),
        scattered(num_expanded, pos, slot),
        scattered(num_tokens * num_topk, slot, pos).view(num_tokens, num_topk),
        start.clamp(max=num_expanded).int(),
        end.clamp(max=num_expanded).int(),
        rows.int(),
        (end[-1:] - num_expanded).clamp(min=0).int(),
    )


def get_fused_mapping(
    topk_idx: Tensor, num_experts: int, num_expanded_tokens: int, alignment: int, force_no_sync: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[int]]:
    """Map tokens to experts, with the places in use and the rows of each expert as a list unless a number is given."""
    if num_expanded_tokens or force_no_sync:
        return *fused_mapping(topk_idx, num_experts, num_expanded_tokens, alignment)[:-1], []
    enough = (topk_idx.numel() + (alignment - 1) * num_experts) // alignment * alignment
    *maps, _ = fused_mapping(topk_idx, num_experts, enough, alignment)
    rows = maps[-1].tolist()
    return *(pos_map[: sum(rows)] for pos_map in maps[:3]), *maps[3:], rows


def token_to_expert_map(
    topk_indices: Tensor, num_experts: int, alignment: int = 1, *, num_expanded: int | None = None
) -> RoutingMap:
    """Map tokens to experts, with as many places as any choice can need unless a number is given."""
    if num_expanded is None:
        num_expanded = (topk_indices.numel() + (alignment - 1) * num_experts) // alignment * alignment
    pos_to_expert, pos_to_token, *rest = fused_mapping(topk_indices, num_experts, num_expanded, alignment)
    return RoutingMap(pos_to_token, pos_to_expert, *rest)


# Counting, masking, normalising -------------------------------------------------------------


def group_count(group_idx: Tensor, num_groups: int) -> Tensor:
    """Count how often each group occurs."""
    groups = group_idx[(group_idx >= 0) & (group_idx < num_groups)].long()
    counts = torch.zeros(num_groups, dtype=torch.int32, device=group_idx.device)
    return counts.scatter_add_(0, groups, torch.ones_like(groups, dtype=torch.int32))


def aux_fi(topk_idx: Tensor, num_experts: int, num_aux_topk: int) -> Tensor:
    """Load fraction of each expert."""
    even = torch.tensor(max(topk_idx.shape[0] * num_aux_topk, 1), dtype=torch.float32, device=topk_idx.device)
    return group_count(topk_idx, num_experts).float() * num_experts / even


def inplace_unique_group_indices(group_indices: Tensor, num_groups: int) -> None:
    """Keep the first of equal indices in a row, turn the others into -1."""
    equal = group_indices.unsqueeze(2) == group_indices.unsqueeze(1)
    seen_before = equal.tril(diagonal=-1).any(dim=2)
    group_indices[seen_before & (group_indices >= 0)] = -1


def mask_indices_by_tp(indices: Tensor, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int) -> Tensor:
    """Local numbers of the experts that this tensor-parallel rank holds, -1 for all others."""
    per_gpu = n // num_ep_ranks
    per_dp = num_tp_ranks * per_gpu
    mine = (indices >= 0) & ((indices // per_gpu) % num_tp_ranks == tp_rank)
    local = indices - tp_rank * per_gpu
    local = local - local // per_dp * (per_dp - per_gpu)
    return torch.where(mine, local, -1)


def normalize_weight(topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each row by its sum, added up from 1e-20 one weight after another."""
    denominator = torch.full(topk_weights.shape[:1], 1e-20, device=topk_weights.device)
    for k in range(topk_weights.shape[1]):
        denominator = denominator + topk_weights[:, k]
    return denominator, topk_weights / denominator.unsqueeze(1)


def normalize_weight_bwd(ddenominator: Tensor, dnormalized: Tensor, denominator: Tensor, normalized: Tensor) -> Tensor:
    """Gradient of `normalize_weight`."""
    mean = (dnormalized.double() * normalized.double()).sum(1, keepdim=True)
    quotient = (dnormalized.double() - mean) / denominator.double().unsqueeze(1)
    return (quotient + ddenominator.double().unsqueeze(1)).float()


def weight_normalize(topk_weights: Tensor) -> Tensor:
    """Weights divided by their row sum; a zero row stays zero."""
    return normalize_weight(topk_weights)[1]


# Expand and reduce --------------------------------------------------------------------------


def expand_to_fused(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> Tensor:
    """Copy the row of every token to each of its places; places of no expert are zero."""
    num_expanded = pos_to_expert.shape[0]
    token, _, pos = _placed(token_topk_to_pos, num_expanded)
    row_of_pos = pos.new_full((num_expanded,), x.shape[0])  # a row of zeros behind the last token
    row_of_pos[pos] = token
    rows = x.float() if x.requires_grad else x  # gradients of a token's places add up in float32
    return torch.cat([rows, rows.new_zeros(1, x.shape[1])])[row_of_pos].to(x.dtype)


def expand_to_fused_bwd(dy: Tensor, token_topk_to_pos: Tensor) -> Tensor:
    """Gradient of `expand_to_fused`."""
    return reduce_rows(dy, token_topk_to_pos)


def expand_with_sf(
    x: Tensor, x_sf: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor, col: bool = False
) -> tuple[Tensor, Tensor]:
    """Copy codes and scale factors of every token to each of its places."""
    y = expand_to_fused(x, token_topk_to_pos, pos_to_expert)
    y_sf = expand_to_fused(x_sf, token_topk_to_pos, pos_to_expert)
    return y, _column_major(y_sf) if col else y_sf


def expand_to_fused_with_sf(
    x: tuple[Tensor, Tensor],
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[Tensor, Tensor]:
    """Expand a quantised tensor with one scale factor for each token and `num_per_channels` channels."""
    return expand_with_sf(*x, token_topk_to_pos, pos_to_expert, use_tma_aligned_col_major_sf)


def expand_and_per_token_cast(
    x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor, fmt: QuantFormat
) -> QuantTensor:
    """Quantise every token, then copy its codes and scale factors to each of its places."""
    q = per_token_cast(x, QuantFormat.parse(fmt.name.removesuffix('_col')))
    return QuantTensor(*expand_with_sf(*q, token_topk_to_pos, pos_to_expert, fmt.col), fmt)


def _column_major(sf: Tensor) -> Tensor:
    """The same factors with columns that begin at multiples of 16 bytes."""
    aligned = 16 // sf.element_size()
    pitch = -(-sf.shape[0] // aligned) * aligned
    columns = torch.empty_strided((pitch, sf.shape[1]), (1, pitch), dtype=sf.dtype, device=sf.device)
    return columns[: sf.shape[0]].copy_(sf)


def reduce_rows(
    x: Tensor,
    token_topk_to_pos: Tensor,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
    fp8_format: str = '',
) -> Tensor:
    """Sum the rows of each token's places."""
    return _reduce(x, token_topk_to_pos, None, x_sf, sf, FP8[fp8_format] if fp8_format else x.dtype)


def weighted_reduce_rows(
    x: Tensor,
    topk_weights: Tensor,
    token_topk_to_pos: Tensor,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
    fp8_format: str = '',
) -> Tensor:
    """Sum the rows of each token's places, each times its weight."""
    return _reduce(x, token_topk_to_pos, topk_weights, x_sf, sf, FP8[fp8_format] if fp8_format else x.dtype)


def reduce_rows_(
    out: Tensor,
    x: Tensor,
    token_topk_to_pos: Tensor,
    topk_weights: Tensor | None = None,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
) -> None:
    """Reduce into memory of the caller."""
    out.copy_(_reduce(x, token_topk_to_pos, topk_weights, x_sf, sf, out.dtype))


def reduce_fused(
    x: Tensor | tuple[Tensor, Tensor],
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str = '',
    sf: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Bring expanded rows back to their tokens: the weighted sum over the places of each token."""
    x, x_sf = x if isinstance(x, tuple) else (x, None)
    y = _reduce(x, token_topk_to_pos, topk_weights, x_sf, sf, FP8[fp8_format] if fp8_format else x.dtype)
    return y if out is None else out.copy_(y)


def reduce_rows_bwd(
    dy: Tensor, x: Tensor, token_topk_to_pos: Tensor, x_sf: Tensor | None = None, sf: Tensor | None = None
) -> Tensor:
    """Gradient of `reduce_rows`."""
    ones = torch.ones(token_topk_to_pos.shape, device=x.device)
    return weighted_reduce_rows_bwd(dy, x, ones, token_topk_to_pos, x_sf, sf)[0]


def weighted_reduce_rows_bwd(
    dy: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    token_topk_to_pos: Tensor,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of `weighted_reduce_rows`."""
    token, k, pos = _placed(token_topk_to_pos, x.shape[0])
    given = torch.ones(pos.shape, device=x.device)
    if x_sf is not None:
        given = given * x_sf[pos]
    if sf is not None:
        given = given * sf
    upstream = dy.float()[token] * given.unsqueeze(1)
    dx = torch.zeros_like(x)
    dx[pos] = (upstream * topk_weights[token, k].unsqueeze(1)).to(x.dtype)
    dtopk_weights = torch.zeros_like(topk_weights)
    dtopk_weights[token, k] = (upstream.double() * x[pos].double()).sum(1).float()
    return dx, dtopk_weights


def _placed(token_topk_to_pos: Tensor, num_expanded: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token, k and place of every slot that has a place."""
    token, k = ((token_topk_to_pos >= 0) & (token_topk_to_pos < num_expanded)).nonzero(as_tuple=True)
    return token, k, token_topk_to_pos[token, k].long()


def _reduce(
    x: Tensor,
    token_topk_to_pos: Tensor,
    topk_weights: Tensor | None,
    x_sf: Tensor | None,
    sf: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """One fused multiply-add after another, k ascending."""
    num_tokens, num_topk = token_topk_to_pos.shape
    total = torch.zeros(num_tokens, x.shape[1], device=x.device)
    for k in range(num_topk):
        pos = token_topk_to_pos[:, k].long()
        token = ((pos >= 0) & (pos < x.shape[0])).nonzero().flatten()
        pos = pos[token]
        factor = torch.ones(pos.shape, device=x.device) if topk_weights is None else topk_weights[token, k]
        if x_sf is not None:
            factor = factor * x_sf[pos]
        row = FusedMultiplyAdd.apply(x[pos].float(), factor.unsqueeze(1), total[token])
        total = total.index_copy(0, token, row)
    if sf is not None:
        total = total * sf
    if dtype.itemsize == 1:
        total = total.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return total.to(dtype)


def fused_expand_reduce(
    hidden: Tensor,
    routing_map: RoutingMap,
    expert_fn: Callable[[Tensor, RoutingMap], Tensor],
    topk_weights: Tensor | None = None,
) -> Tensor:
    """Expand rows to expert order, apply the experts, and sum the results back to tokens."""
    expanded = expand_to_fused(hidden, routing_map.token_topk_to_pos, routing_map.pos_to_expert)
    return reduce_fused(expert_fn(expanded, routing_map), topk_weights, routing_map.token_topk_to_pos)


class FusedMultiplyAdd(torch.autograd.Function):
    """`a * b + c` in float32, rounded once."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """The product is exact in float64; the sum is rounded to odd there, which makes the second rounding right."""
        ctx.save_for_backward(a, b)
        product, addend = a.double() * b.double(), c.double()
        total = product + addend
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)  # of the float64 sum, exact
        bits = total.view(torch.int64)
        odd = torch.where((error > 0) == (total > 0), bits + 1, bits - 1)
        inexact = (error != 0) & total.isfinite() & (bits % 2 == 0)
        return torch.where(inexact, odd, bits).view(torch.float64).float()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Plain product rule; factors may broadcast."""
        a, b = ctx.saved_tensors
        return grad * b, (grad * a).sum_to_size(b.shape), grad
