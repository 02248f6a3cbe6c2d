"""The twins of the public functions in `tile_kernels.torch`: same arguments, same results as the functions on a CPU."""

import inspect

import pytest
import tile_kernels.torch as twins
import torch
import torch.nn.functional as F

from tile_kernels import linear_attention
from tile_kernels.core.registry import load_ops

HALF = torch.bfloat16

#: Ops whose public function has arguments of its own.
FRONTS = ('causal_conv1d', 'chunk_gla', 'chunk_simple_gla', 'fused_recurrent_gla')


def random(*shape, dtype=HALF):
    return torch.randn(*shape).to(dtype)


def inputs(tokens=20, heads=2, value_heads=4, dim=32, value_dim=16, channels=False, batch=1):
    q, k = (F.normalize(torch.randn(batch, tokens, heads, dim), dim=-1).to(HALF) for _ in range(2))
    shape = (batch, tokens, value_heads, *([dim] if channels else []))
    gates = -torch.rand(shape)
    return q, k, random(batch, tokens, value_heads, value_dim), gates, torch.rand(batch, tokens, value_heads)


def states(value_heads=4, dim=32, value_dim=16, number=1):
    return torch.randn(number, value_heads, dim, value_dim)


CUTS = torch.tensor([0, 0, 3, 17])
DELTA = {
    'plain': {},
    'packed': dict(cu_seqlens=CUTS, initial_state=states(number=3)),
    'raw': dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, scale=0.3),
    'first': dict(initial_state=states().mT.contiguous(), state_v_first=True),
}


def agree(name, *given, bound=3e-2, **options):
    """Results of a function and of its twin, and the gradients of the first result, agree to bfloat16 rounding."""
    found = []
    for function in (getattr(linear_attention, name), getattr(twins, name)):
        own = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in given]
        result = function(*own, output_final_state=True, **options)
        grads = torch.autograd.grad(result[0].float().square().sum(), [x for x in own if isinstance(x, torch.Tensor)])
        found.append((*result, *grads))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        torch.testing.assert_close(
            ours.float(), theirs.float(), rtol=bound, atol=bound * theirs.float().abs().max().item()
        )


@pytest.mark.parametrize('options', DELTA.values(), ids=DELTA)
def test_gated_delta_rule(options):
    agree('chunk_gated_delta_rule', *inputs(), **options)


@pytest.mark.parametrize('bounded', [False, True])
def test_kda_with_gate(bounded):
    gate = dict(use_gate_in_kernel=True, A_log=torch.randn(4), dt_bias=torch.randn(4 * 32), safe_gate=bounded)
    agree('chunk_kda', *inputs(channels=True), **gate)


def test_forms_of_one_decay():
    q, k, v, g, beta = inputs()
    agree('chunk_delta_rule', q, k, v, beta)
    agree('chunk_simple_gla', q, k, v, g, initial_state=states())
    agree('chunk_retention', q, k, v)
    agree('chunk_linear_attn', q.abs(), k.abs(), v, bound=8e-2)  # the first gradients of q nearly cancel
    q, k, v, g, _ = inputs(heads=4, channels=True)
    agree('chunk_gla', q, k, v, g)


@pytest.mark.parametrize(
    ('name', 'channels', 'forgets'),
    [
        ('fused_recurrent_gated_delta_rule', False, True),
        ('fused_recurrent_kda', True, True),
        ('fused_recurrent_simple_gla', False, False),
        ('fused_recurrent_gla', True, False),
    ],
)
def test_pools_and_intermediate_states(name, channels, forgets):
    q, k, v, g, beta = inputs(tokens=2, heads=4, channels=channels, batch=3)
    given, slots, found = (q, k, v, g, beta) if forgets else (q, k, v, g), torch.tensor([4, -1, 0]), []
    start = states(number=5)
    for function in (getattr(linear_attention, name), getattr(twins, name)):
        pool, each = start.clone(), torch.zeros(3, 2, 4, 32, 16)
        o, _ = function(*given, initial_state=pool, state_indices=slots.int(), intermediate_states=each)
        found.append((o.float(), pool, each))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    assert torch.equal(found[1][1][1:4], start[1:4]) and not found[1][0][1].any()


def test_mamba():
    x, dt, A = random(1, 20, 4, 16), torch.rand(1, 20, 4), -torch.rand(4)
    B, C, D, z = random(1, 20, 2, 32), random(1, 20, 2, 32), torch.randn(4), random(1, 20, 4, 16)
    options = dict(D=D, z=z, dt_bias=torch.randn(4), dt_softplus=True, return_final_states=True)
    for more in ({}, dict(seq_idx=torch.tensor([[0] * 7 + [1] * 13]))):
        ours = linear_attention.mamba_chunk_scan_combined(x, dt, A, B, C, **options, **more)
        theirs = twins.mamba_chunk_scan_combined(x, dt, A, B, C, **options, **more)
        for own, twin in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, twin, rtol=2e-2, atol=2e-2)
    found = []
    start = torch.randn(3, 4, 16, 32)
    for package in (linear_attention, twins):
        state = start.clone()
        slots = torch.tensor([2], dtype=torch.int32)
        step = (x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, z[:, 0], None, True, slots)
        found.append((package.selective_state_update(state, *step), state))
    for own, twin in zip(*found, strict=True):
        torch.testing.assert_close(own, twin, rtol=2e-2, atol=2e-2)


def test_short_convolution():
    x, weight = random(1, 20, 32), random(32, 4)
    ours = linear_attention.causal_conv1d(x, weight, output_final_state=True, cu_seqlens=CUTS)
    theirs = twins.causal_conv1d(x, weight, output_final_state=True, cu_seqlens=CUTS)
    for own, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, twin, rtol=1e-2, atol=1e-2)


def test_every_function_for_callers_has_a_twin_with_its_arguments():
    operators = set(load_ops())  # their twins are in the package of the family
    names = [name for name in linear_attention.__all__ if f'linear_attention.{name}' not in operators or name in FRONTS]
    for name in names:
        public = inspect.signature(getattr(linear_attention, name)).parameters
        twin = inspect.signature(getattr(twins, name)).parameters
        any_names = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in twin.values())
        assert any_names or set(public) <= set(twin), name
