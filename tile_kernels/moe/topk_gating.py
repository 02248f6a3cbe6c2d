"""Top-k gating: choose the experts of every token and weigh them, with gradients.

    u[t, e] = score of logits[t, e]                softmax over e, or of one logit: sigmoid, sqrt(softplus), identity
    r[t, e] = u[t, e] + bias[e]                    what ranks; softmax ranks by logits[t, e] + bias[e]
    i[t, :] = the top_k experts of largest r, best first, in the num_topk_groups groups of largest top-2 sum
    w[t, k] = s u[t, i[t, k]] / sum_j u[t, i[t, j]]       renormalized; otherwise s u[t, i[t, k]]

One warp owns one or two tokens and keeps their logits in registers, so logits are read once. `topk_gate_kernels` finds
the experts. Where scores rise with logits, only the few candidates are scored.

Gradient, with g[k] = s dweights[t, k], x[k] the chosen logits and u[k] their scores:

    softmax over the chosen     p = softmax(x)              dx[k] = p[k] (g[k] - sum_j g[j] p[j])
    softmax over all            p = softmax(logits[t])      the same; -p[e] sum_j g[j] p[j] for the other experts e
    others, renormalized        D = sum_j u[j]              dx[k] = u'(x[k]) / D (g[k] - sum_j g[j] u[j] / D)
    others                                                  dx[k] = u'(x[k]) g[k]

One warp owns one token. It writes the gradient of all experts first (mostly zeros), then that of the chosen ones.

Both are memory bound for many tokens. The floor of the forward is reading logits and writing weights and indices. The
floor of the backward is writing dlogits, and reading logits where all of them have a gradient.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.moe._checks import DTYPES, MAX_EXPERTS, MAX_TOPK, check_groups
from tile_kernels.moe.scoring import SCORINGS, ScoringFunc
from tile_kernels.moe.topk_gating_kernels import topk_gating_bwd_kernel, topk_gating_kernel

# Ops ----------------------------------------------------------------------------------------


@op(outputs='dlogits')
def topk_gating_bwd(
    dweights: Tensor,
    logits: Tensor,
    indices: Tensor,
    scoring: str = 'softmax',
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
) -> Tensor:
    """Gradient of the logits of `topk_gating`.

    Args:
        dweights: (num_tokens, top_k) float32, contiguous; gradient of the weights.
        logits: (num_tokens, num_experts), as given to `topk_gating`.
        indices: (num_tokens, top_k) int64 or int32, as returned by it; the experts of a token are distinct.
        scoring: as given to `topk_gating`.
        renormalize: as given to `topk_gating`.
        routed_scaling_factor: as given to `topk_gating`.

    Returns:
        (num_tokens, num_experts) in the dtype of logits; zero for experts that do not affect the weights.
    """
    num_tokens, num_experts = check.shape(logits, 'logits', 'num_tokens num_experts', dtype=DTYPES)
    _, top_k = check.shape(
        indices, 'indices', 'num_tokens top_k', dtype=(torch.int64, torch.int32), num_tokens=num_tokens
    )
    check.shape(dweights, 'dweights', 'num_tokens top_k', dtype=torch.float32, num_tokens=num_tokens, top_k=top_k)
    check.one_of(scoring, SCORINGS, 'scoring')
    check.contiguous(dweights, 'dweights')
    check.contiguous(indices, 'indices')
    check.unit_stride(logits, 'logits')
    check.same_device(logits=logits, indices=indices, dweights=dweights)
    dlogits = logits.new_empty(num_tokens, num_experts)
    static = (
        num_experts,
        top_k,
        logits.dtype,
        indices.dtype,
        ScoringFunc.from_str(scoring),
        renormalize,
        check.vector_bytes(logits),
        logits.is_contiguous(),
    )
    launch(topk_gating_bwd_kernel, static, dweights, logits, indices, dlogits, routed_scaling_factor)
    return dlogits


@op(outputs='weights indices', backward=topk_gating_bwd, constant='bias')
def _topk_gating(
    logits: Tensor,
    top_k: int = 8,
    *,
    scoring: str = 'softmax',
    renormalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int | None = None,
    num_topk_groups: int | None = None,
    routed_scaling_factor: float = 1.0,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """The gate of a matrix of logits; see the public function."""
    num_tokens, num_experts = check.shape(logits, 'logits', 'num_tokens num_experts', dtype=DTYPES)
    check.at_least(top_k, 1, 'top_k')
    check.at_most(top_k, min(num_experts, MAX_TOPK), 'top_k')
    check.at_most(num_experts, MAX_EXPERTS, 'num_experts')
    check.one_of(scoring, SCORINGS, 'scoring')
    check.one_of(index_dtype, (torch.int64, torch.int32), 'index_dtype')
    check.unit_stride(logits, 'logits')
    if bias is not None:
        check.shape(bias, 'bias', 'num_experts', dtype=torch.float32, num_experts=num_experts)
        check.contiguous(bias, 'bias')
        check.same_device(logits=logits, bias=bias)
    num_groups, num_topk_groups = check_groups(num_experts, top_k, num_groups, num_topk_groups)
    weights = logits.new_empty(num_tokens, top_k, dtype=torch.float32)
    indices = logits.new_empty(num_tokens, top_k, dtype=index_dtype)
    static = (
        num_experts,
        top_k,
        logits.dtype,
        index_dtype,
        ScoringFunc.from_str(scoring),
        renormalize,
        bias is not None,
        num_groups,
        num_topk_groups,
        check.vector_bytes(logits, bias),
        logits.is_contiguous(),
    )
    launch(topk_gating_kernel, static, logits, bias, weights, indices, routed_scaling_factor)
    return weights, indices


@_topk_gating.public
def topk_gating(
    logits: Tensor,
    top_k: int = 8,
    *,
    scoring: str = 'softmax',
    renormalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int | None = None,
    num_topk_groups: int | None = None,
    routed_scaling_factor: float = 1.0,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts per token and weigh them; differentiable in `logits`.

    Experts are in descending order of score (softmax: of logit) plus bias. Of equal ones the smaller comes first. NaN
    ranks below everything, including -inf.

    Args:
        logits: (num_tokens, num_experts) float32, bfloat16 or float16; rows may be strided; 1 to 4096 experts. More
            leading dimensions are allowed; the results have them too.
        top_k: experts per token, from 1 to min(num_experts, 64).
        scoring: 'softmax' over the experts, or 'sigmoid', 'sqrtsoftplus', 'identity' of every logit.
        renormalize: whether to divide the weights of a token by their sum. Softmax is then over the chosen logits.
        bias: (num_experts,) float32; changes the choice, not the weights.
        num_groups: number of equal groups of neighboring experts; only experts of the best groups are chosen.
        num_topk_groups: number of groups to choose from: those with the largest sum of their two best scores, or of
            their only one, the first among equals. Needs num_groups.
        routed_scaling_factor: multiplies the weights.
        index_dtype: torch.int64 or torch.int32.

    Returns:
        weights (num_tokens, top_k) float32 and indices (num_tokens, top_k).
    """
    options: dict[str, Any] = dict(
        scoring=scoring,
        renormalize=renormalize,
        bias=bias,
        num_groups=num_groups,
        num_topk_groups=num_topk_groups,
        routed_scaling_factor=routed_scaling_factor,
        index_dtype=index_dtype,
    )
    if check.tensor(logits, 'logits').dim() <= 2:
        return topk_gating.call(logits, top_k, **options)
    weights, indices = topk_gating.call(logits.flatten(0, -2), top_k, **options)
    return weights.unflatten(0, logits.shape[:-1]), indices.unflatten(0, logits.shape[:-1])


# Cases --------------------------------------------------------------------------------------


def make(num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype, scoring: str, **options: object) -> dict:
    """Logits on a grid: scores either tie or differ by more than the error of exp and log.

    Models rarely have ties, so timed cases have none: evenly spread logits in random order.
    """
    biased = options.pop('biased', False)
    if options.pop('ties', True):
        logits = torch.randn(num_tokens, num_experts).mul(64).round().div(64).to(dtype)
        logits = logits.abs() if scoring == 'identity' else logits  # a sum near zero makes weights meaningless
    else:
        logits = torch.rand(num_tokens, num_experts).argsort(-1).sub(num_experts // 2).div(num_experts / 8).to(dtype)
    bias = torch.randn(num_experts).mul(4).round().div(64) if biased else None
    return dict(logits=logits, top_k=top_k, scoring=scoring, bias=bias, **options)


def make_bwd(
    num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype, scoring: str, renormalize: bool
) -> dict:
    """Random distinct experts are the chosen ones."""
    logits = torch.randn(num_tokens, num_experts, dtype=dtype)
    indices = torch.rand(num_tokens, num_experts).topk(top_k).indices
    return dict(
        dweights=torch.randn(num_tokens, top_k),
        logits=logits,
        indices=indices,
        scoring=scoring,
        renormalize=renormalize,
        routed_scaling_factor=2.5,
    )


FLOAT32, PAIR = DTYPES[:1], dict(num_experts=[256], top_k=[8])
GROUPS: dict[str, list] = dict(
    num_groups=[8], num_topk_groups=[3], routed_scaling_factor=[2.5], index_dtype=[torch.int32]
)
BOTH = dict(renormalize=[False, True])
DISTINCT = dict(ties=[False])

topk_gating.cases(
    make=make,
    match=dict(rtol=2e-6, atol=1e-7),
    smoke=grid(num_tokens=[0, 5], **PAIR, dtype=FLOAT32, scoring=SCORINGS)
    + grid(num_tokens=[3], num_experts=[72], top_k=[6], dtype=DTYPES, scoring=SCORINGS, renormalize=[False])
    + grid(num_tokens=[3], num_experts=[64], top_k=[6], dtype=FLOAT32, scoring=SCORINGS, biased=[True])
    + grid(num_tokens=[3], num_experts=[64], top_k=[6], dtype=FLOAT32, scoring=SCORINGS[:2], **GROUPS),
    full=grid(num_tokens=[4001], **PAIR, dtype=DTYPES, scoring=SCORINGS, biased=[False, True], **BOTH)
    + grid(num_tokens=[1001], num_experts=[36, 130, 1000, 4096], top_k=[1, 17, 36], dtype=FLOAT32, scoring=SCORINGS)
    + grid(num_tokens=[1001], **PAIR, dtype=FLOAT32, scoring=SCORINGS, biased=[False, True], **GROUPS),
    bench=grid(num_tokens=[1, 64, 4096, 16384], **PAIR, dtype=FLOAT32, scoring=SCORINGS, **DISTINCT)
    + grid(num_tokens=[16384], **PAIR, dtype=[torch.bfloat16], scoring=['softmax', 'sigmoid'], **DISTINCT)
    + grid(
        num_tokens=[4096, 16384], **PAIR, dtype=FLOAT32, scoring=['sigmoid', 'sqrtsoftplus'], biased=[True], **DISTINCT
    )
    + grid(num_tokens=[8192], num_experts=[128], top_k=[6], dtype=FLOAT32, scoring=['softmax'], **DISTINCT)
    + grid(num_tokens=[4001], num_experts=[72], top_k=[6], dtype=FLOAT32, scoring=['softmax'], **DISTINCT)
    + grid(num_tokens=[4096], num_experts=[384], top_k=[8], dtype=FLOAT32, scoring=['softmax'], **DISTINCT),
)

topk_gating_bwd.cases(
    make=make_bwd,
    match=dict(rtol=1e-4, atol=1e-6),
    smoke=grid(
        num_tokens=[0, 5], num_experts=[64], top_k=[6], dtype=DTYPES[:1], scoring=SCORINGS, renormalize=[False, True]
    )
    + grid(num_tokens=[3], num_experts=[36], top_k=[36], dtype=DTYPES[:1], scoring=SCORINGS, renormalize=[True]),
    full=grid(
        num_tokens=[4001],
        num_experts=[256, 72],
        top_k=[8, 40],
        dtype=DTYPES[:1],
        scoring=SCORINGS,
        renormalize=[False, True],
    ),
    bench=grid(
        num_tokens=[4096, 16384],
        num_experts=[256],
        top_k=[8],
        dtype=DTYPES[:1],
        scoring=['softmax', 'sigmoid'],
        renormalize=[True],
    ),
)
