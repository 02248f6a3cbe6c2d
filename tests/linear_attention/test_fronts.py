"""What the fronts of linear attention share: states of every token and chunk, arguments of the chunk forms, strides.

Twins run here; the contract compares the kernels with them.
"""

import pytest
import torch
from torch import Tensor

from tile_kernels import ArgumentError
from tile_kernels.core.registry import load_ops
from tile_kernels.linear_attention import (
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_kda,
    chunk_simple_gla,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gla,
    fused_recurrent_kda,
    fused_recurrent_simple_gla,
    mamba_chunk_scan_combined,
)
from tile_kernels.testing.contract import check_kernel

BF16, F32 = torch.bfloat16, torch.float32
#: Recurrent and chunk form, and whether they take beta and gates of every channel.
FRONTS = {
    'gated_delta_rule': (fused_recurrent_gated_delta_rule, chunk_gated_delta_rule, True, False),
    'kda': (fused_recurrent_kda, chunk_kda, True, True),
    'simple_gla': (fused_recurrent_simple_gla, chunk_simple_gla, False, False),
    'gla': (fused_recurrent_gla, chunk_gla, False, True),
}


def operands(name: str, tokens: int, batch: int = 1) -> dict[str, Tensor]:
    """q, k, v, g and, for delta rules, beta: 2 heads of 16 x 32."""
    _, _, with_beta, channels = FRONTS[name]
    q, k = (torch.randn(batch, tokens, 2, 16).to(BF16) / 4 for _ in range(2))
    v = torch.randn(batch, tokens, 2, 32).to(BF16)
    g = -torch.rand(batch, tokens, 2, 16) if channels else -torch.rand(batch, tokens, 2)
    return dict(q=q, k=k, v=v, g=g) | (dict(beta=torch.rand(batch, tokens, 2)) if with_beta else {})


@pytest.mark.parametrize('name', FRONTS)
def test_the_state_after_every_token_is_the_final_one_of_fewer_tokens(name):
    """Also from a pool, which goes on; sequences that are skipped leave their rows alone."""
    steps = FRONTS[name][0]
    given = operands(name, 3, batch=2)
    state = torch.randn(2, 2, 16, 32)
    after = torch.full((2, 3, 2, 16, 32), torch.nan)
    steps(**given, initial_state=state, intermediate_states=after)
    for t in range(3):
        fewer = {key: x[:, : t + 1] for key, x in given.items()}
        assert torch.equal(after[:, t], steps(**fewer, initial_state=state, output_final_state=True)[1])
    pool, own = torch.cat((state, state)).mT.contiguous(), torch.full((2, 3, 2, 32, 16), torch.nan).to(BF16)
    options = dict(state_indices=torch.tensor([3, -1]), state_v_first=True, output_final_state=True)
    _, same = steps(**given, initial_state=pool, intermediate_states=own, **options)
    first = {key: x[:1] for key, x in given.items()}
    alone = torch.full((1, 3, 2, 16, 32), torch.nan)
    steps(**first, initial_state=state[1:], intermediate_states=alone)
    assert same is pool and own[1].isnan().all()
    torch.testing.assert_close(own[0].float(), alone[0].mT, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(pool[3], alone[0, -1].mT)


@pytest.mark.parametrize('name', FRONTS)
def test_recurrent_forms_take_the_arguments_of_chunk_forms(name):
    steps, chunks, *_ = FRONTS[name]
    given = operands(name, 2)
    expected, _ = steps(**given)
    hints = dict(cu_seqlens_cpu=None, chunk_indices=None)
    assert torch.equal(steps(**given, chunk_size=32, **hints)[0], expected)
    wide = {key: x.double() if key in ('g', 'beta') else x for key, x in given.items()}
    assert torch.equal(steps(**wide)[0], expected)
    assert torch.equal(chunks(**wide)[0], chunks(**given)[0])
    slices = torch.randn(1, 2, 16, 64)[..., ::2]
    assert torch.equal(chunks(**given, initial_state=slices)[0], chunks(**given, initial_state=slices.contiguous())[0])
    with pytest.raises(ArgumentError, match='chunk_size must be None or 16 or 32 or 64'):
        steps(**given, chunk_size=48)
    with pytest.raises(ArgumentError, match='intermediate_states must be an argument of the function'):
        chunks(**given, intermediate_states=torch.empty(0))
    with pytest.raises(ArgumentError, match=r'intermediate_states must be \(batch, tokens, heads, dim, value_dim\)'):
        steps(**given, intermediate_states=torch.empty(1, 2, 2, 32, 16))


@pytest.mark.parametrize('v_first', [False, True])
def test_chunks_of_kda_tell_the_states_before_them(v_first):
    """Those of packed sequences follow one another; they are the final states of the tokens before."""
    given, cuts = operands('kda', 40), torch.tensor([0, 20, 20, 37])
    options = dict(chunk_size=16, state_v_first=v_first, output_final_state=True)
    state = torch.randn(3, 2, *((32, 16) if v_first else (16, 32)))
    o, final, h = chunk_kda(**given, initial_state=state, cu_seqlens=cuts, return_intermediate_states=True, **options)
    assert h.shape == (1, 40 // 16 + 3, *state.shape[1:]) and h.dtype is BF16 and not h[0, 4:].any()
    torch.testing.assert_close(h[0, [0, 2]].float(), state[[0, 2]], rtol=1e-2, atol=1e-2)
    for number, first, sequence in ((1, 0, 0), (3, 20, 2)):
        before = {key: x[:, first : first + 16] for key, x in given.items()}
        expected = chunk_kda(**before, initial_state=state[sequence : sequence + 1], **options)[1]
        torch.testing.assert_close(h[0, number].float(), expected[0], rtol=2e-2, atol=2e-2)
    plain, last = chunk_kda(**given, initial_state=state, cu_seqlens=cuts, **options)
    assert torch.equal(plain, o) and torch.equal(last, final)
    dense = chunk_kda(**given, return_intermediate_states=True, **options)[2]
    assert dense.shape == (1, 3, *state.shape[1:]) and not dense[0, 0].any() and dense[0, 1].any()


def test_mamba_returns_states_as_often_as_they_are_asked_for():
    x, dt, B = torch.randn(1, 5, 2, 16).to(BF16), torch.rand(1, 5, 2), torch.randn(1, 5, 1, 16).to(BF16)
    cuts = torch.tensor([0, 2, 5])
    both = mamba_chunk_scan_combined(
        x, dt, -torch.ones(2), B, B, cu_seqlens=cuts, return_final_states=True, return_varlen_states=True
    )
    assert len(both) == 3 and both[1].shape == (2, 2, 16, 16) and torch.equal(both[1], both[2])


@pytest.mark.parametrize(
    'case',
    [
        dict(tokens=200, dims=(32, 48), chunk=64, gate='weak', state=F32),
        dict(tokens=140, dims=(32, 32), chunk=64, gate='weak', channels=True),
    ],
    ids=['heads', 'channels'],
)
def test_pieces_of_a_sequence_are_joined_exactly(case, monkeypatch):
    op = load_ops()['linear_attention.delta_rule']
    monkeypatch.setitem(op.fn.__globals__, 'LEAST_CHUNKS', 1)
    launches = op.trace_case(case | dict(output_final_state=True))
    check_kernel(op, case | dict(output_final_state=True))
    assert [launch.kernel.name for launch in launches].count('delta_states_sm90_kernel') == 2
