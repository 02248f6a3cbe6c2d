"""Gate logits: the scores of all experts for every token, a matrix product with float32 sums, and its gradients.

    logits[t, e] = sum_h hidden[t, h] gate_weight[e, h]
    dhidden[t, h] = sum_e dlogits[t, e] gate_weight[e, h]
    dgate_weight[e, h] = sum_t dlogits[t, e] hidden[t, h]

A block owns a tile of the result and walks along the sum. Few tokens make few tiles, so their sum over h is split over
several blocks. A second launch adds these parts in their order, so the result is deterministic. Gradients are float32.
Each is split into two bfloat16 numbers that together hold 16 of its bits, and both are multiplied.
Compute bound for many tokens; for few, the floor is reading gate_weight.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.moe._checks import MAX_EXPERTS
from tile_kernels.moe.gate_logits_kernels import (
    gate_logits_dhidden_kernel,
    gate_logits_dweight_kernel,
    gate_logits_halve_kernel,
    gate_logits_kernel,
    gate_logits_unaligned_kernel,
    num_parts_for,
)

# Ops ----------------------------------------------------------------------------------------


def _check(hidden_states: Tensor, gate_weight: Tensor) -> tuple[int, int, int, int]:
    """Sizes, and elements of the widest access to rows."""
    num_tokens, hidden = check.shape(hidden_states, 'hidden_states', 'num_tokens hidden', dtype=torch.bfloat16)
    num_experts, _ = check.shape(gate_weight, 'gate_weight', 'num_experts hidden', dtype=torch.bfloat16, hidden=hidden)
    check.at_least(hidden, 1, 'hidden')
    check.at_least(num_experts, 1, 'num_experts')
    check.at_most(num_experts, MAX_EXPERTS, 'num_experts')
    check.unit_stride(hidden_states, 'hidden_states')
    check.contiguous(gate_weight, 'gate_weight')
    check.same_device(hidden_states=hidden_states, gate_weight=gate_weight)
    return num_tokens, num_experts, hidden, check.vector_bytes(hidden_states, gate_weight) // 2


@op(outputs='dhidden_states dgate_weight')
def gate_logits_bwd(dlogits: Tensor, hidden_states: Tensor, gate_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `gate_logits`, with float32 sums; deterministic.

    Args:
        dlogits: (num_tokens, num_experts) float32, contiguous.
        hidden_states: (num_tokens, hidden) bfloat16; rows may be strided.
        gate_weight: (num_experts, hidden) bfloat16, contiguous.

    Returns:
        Gradients of hidden_states and of gate_weight, bfloat16.
    """
    num_tokens, num_experts, hidden, vec = _check(hidden_states, gate_weight)
    known = dict(num_tokens=num_tokens, num_experts=num_experts)
    check.packed(dlogits, 'dlogits', 'num_tokens num_experts', torch.float32, **known)
    check.same_device(hidden_states=hidden_states, dlogits=dlogits)
    dhidden = hidden_states.new_empty(num_tokens, hidden)
    dgate_weight = torch.empty_like(gate_weight) if num_tokens else torch.zeros_like(gate_weight)
    upper, lower = (dlogits.new_empty(num_tokens, num_experts, dtype=torch.bfloat16) for _ in range(2))
    launch(gate_logits_halve_kernel, (), dlogits.view(-1), upper.view(-1), lower.view(-1))
    launch(gate_logits_dhidden_kernel, (num_experts, hidden), upper, lower, gate_weight, dhidden)
    static = (num_experts, hidden, vec, hidden_states.is_contiguous())
    launch(gate_logits_dweight_kernel, static, hidden_states, upper, lower, dgate_weight)
    return dhidden, dgate_weight


@op(outputs='logits', backward=gate_logits_bwd)
def gate_logits(hidden_states: Tensor, gate_weight: Tensor) -> Tensor:
    """Scores of all experts for every token, `hidden_states @ gate_weight.T` in float32; differentiable.

    Args:
        hidden_states: (num_tokens, hidden) bfloat16; rows may be strided.
        gate_weight: (num_experts, hidden) bfloat16, contiguous; up to 4096 experts.

    Returns:
        (num_tokens, num_experts) float32; deterministic.
    """
    num_tokens, num_experts, hidden, vec = _check(hidden_states, gate_weight)
    num_parts = num_parts_for(num_tokens, hidden)
    logits = hidden_states.new_empty(num_tokens, num_experts, dtype=torch.float32)
    parts = logits.new_empty(num_parts, num_tokens, num_experts) if num_parts > 1 else None
    sizes, tensors = (num_experts, hidden, num_parts), (hidden_states, gate_weight, parts, logits)
    if vec == 8:
        launch(gate_logits_kernel, (*sizes, hidden_states.is_contiguous()), *tensors)
    else:
        launch(gate_logits_unaligned_kernel, (*sizes, vec), *tensors)
    return logits


# Cases --------------------------------------------------------------------------------------


def make(num_tokens: int, num_experts: int, hidden: int, is_strided: bool = False) -> dict:
    """Weights that keep logits near 1."""
    wide = torch.randn(num_tokens, hidden + 8 * is_strided, dtype=torch.bfloat16)
    gate_weight = torch.randn(num_experts, hidden).mul(hidden**-0.5).to(torch.bfloat16)
    return dict(hidden_states=wide[:, :hidden], gate_weight=gate_weight)


def make_bwd(num_tokens: int, num_experts: int, hidden: int, is_strided: bool = False) -> dict:
    """Gradients with many zeros, as after top-k."""
    dlogits = torch.randn(num_tokens, num_experts) * (torch.rand(num_tokens, num_experts) < 0.25)
    return dict(dlogits=dlogits, **make(num_tokens, num_experts, hidden, is_strided))


def count(hidden_states: Tensor, gate_weight: Tensor, **others: Tensor) -> int:
    """Operations of the product."""
    return 2 * hidden_states.shape[0] * gate_weight.numel()


SMOKE = grid(num_tokens=[0, 5], num_experts=[64], hidden=[192]) + grid(
    num_tokens=[70], num_experts=[72], hidden=[1032, 130], is_strided=[True]
)
FULL = grid(num_tokens=[1, 65, 1001], num_experts=[8, 72, 256], hidden=[100, 129, 7168])

BENCH = grid(num_tokens=[64, 1000, 4096, 16384], num_experts=[256], hidden=[7168]) + grid(
    num_tokens=[4001], num_experts=[160], hidden=[5124]
)
gate_logits.cases(make=make, match=dict(rtol=1e-4, atol=2e-4), smoke=SMOKE, full=FULL, bench=BENCH, flops=count)

gate_logits_bwd.cases(
    make=make_bwd,
    match=dict(rtol=1e-2, atol=1e-2),
    smoke=SMOKE + grid(num_tokens=[300], num_experts=[8], hidden=[64]),  # two runs of steps
    full=FULL + grid(num_tokens=[4001], num_experts=[72], hidden=[7168]),
    bench=BENCH[:3],
    flops=lambda dlogits, **given: 2 * count(**given),
)
