"""What is special about rotary embedding: one launch, strided heads in place, positions, gradients."""

import pytest
import torch

from tile_kernels import ArgumentError, knobs
from tile_kernels.reference.transform import rotary_embedding_ref
from tile_kernels.testing.numeric import assert_equal, calc_diff
from tile_kernels.transform import apply_rotary, rotary_embedding
from tile_kernels.transform.rotary_embedding_kernels import rotary_kernel


@pytest.fixture(autouse=True)
def interpreting():
    """Run the kernels, not the twins."""
    with knobs(interpret=True):
        yield


def table(length, rotary):
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    return torch.cat((angle.cos(), angle.sin()), dim=1)


def complex_turn(x, cache, positions, interleaved):
    """The same with complex numbers in float64."""
    rotary = cache.shape[1]
    cos, sin = cache.double()[positions].chunk(2, dim=-1)
    turn = torch.complex(cos, sin).unsqueeze(-2)
    x = x.double()[..., :rotary]
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else torch.stack(x.chunk(2, dim=-1), dim=-1)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    return turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), dim=-1)


@pytest.mark.parametrize('interleaved', [False, True])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
def test_is_a_turn_in_the_complex_plane(interleaved, dtype):
    x, cache, positions = torch.randn(5, 3, 64).to(dtype), table(40, 64), torch.tensor([0, 39, 7, 7, 1])
    turned = x.clone()
    apply_rotary(turned, cache, positions=positions, interleaved=interleaved)
    assert calc_diff(turned, complex_turn(x, cache, positions, interleaved).to(dtype)) <= 1e-8


def test_query_and_key_go_in_one_launch():
    query, key, cache = torch.randn(4, 3, 64), torch.randn(4, 1, 64), table(4, 64)
    launches = apply_rotary.trace(query, cache, key)
    assert [launch.kernel for launch in launches] == [rotary_kernel]


def test_strided_heads_are_turned_in_place_and_nothing_else():
    memory = torch.randn(4, 3, 192)
    before = memory.clone()
    apply_rotary(memory[..., 128:], table(9, 64), positions=torch.tensor([1, 2, 3, 8]))
    assert_equal(memory[..., :128].contiguous(), before[..., :128].contiguous())
    expected = rotary_embedding(before[..., 128:], table(9, 64), positions=torch.tensor([1, 2, 3, 8]))
    assert_equal(memory[..., 128:].contiguous(), expected)


def test_channels_behind_the_turned_ones_stay():
    x = torch.randn(3, 2, 100)
    turned = rotary_embedding(x, table(3, 36), interleaved=True)
    assert_equal(turned[..., 36:].contiguous(), x[..., 36:].contiguous())
    assert calc_diff(turned[..., :36], complex_turn(x, table(3, 36), torch.arange(3), True)) <= 1e-8


def test_turning_back_undoes_the_turn():
    x, cache = torch.randn(2, 5, 3, 64), table(12, 64)
    query = x.clone()
    apply_rotary(query, cache, seqlen_offset=4)
    apply_rotary(query, cache, seqlen_offset=4, conjugate=True)
    torch.testing.assert_close(query, x)


def test_offsets_and_positions_agree():
    x, cache = torch.randn(2, 5, 3, 32), table(12, 32)
    counted = rotary_embedding(x, cache, seqlen_offset=3)
    placed = rotary_embedding(x, cache, positions=torch.arange(3, 8).expand(2, 5).contiguous())
    assert_equal(counted, placed)
    assert_equal(counted, rotary_embedding_ref(x, *cache.chunk(2, dim=1), seqlen_offsets=3))


def test_positions_outside_of_the_cache_give_nan():
    x = torch.randn(4, 2, 16)
    turned = rotary_embedding(x, table(4, 16), positions=torch.tensor([0, 4, -1, 3], dtype=torch.int32))
    assert turned[[1, 2]].isnan().all() and turned[[0, 3]].isfinite().all()


@pytest.mark.parametrize('with_key', [False, True])
def test_gradients_against_float64(with_key):
    cache = table(5, 32)
    leaves = [torch.randn(5, heads, 40).requires_grad_() for heads in (3, 1)][: 1 + with_key]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    turned = rotary_embedding(leaves[0], cache, *leaves[1:], interleaved=True)
    for own, leaf, reference in zip(turned if with_key else (turned,), leaves, exact, strict=True):
        factor = torch.randn_like(leaf)
        (own * factor).sum().backward(retain_graph=True)
        expected = torch.cat((complex_turn(reference, cache, torch.arange(5), True), reference[..., 32:]), dim=-1)
        (expected * factor).sum().backward()
        torch.testing.assert_close(leaf.grad.double(), reference.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    'call, sentence',
    [
        (lambda x: apply_rotary(x[0], table(4, 8)), 'query must be \\(tokens, heads, channels\\) or'),
        (lambda x: apply_rotary(x, table(4, 32)), 'channels of query must be at least 32, got 16'),
        (lambda x: apply_rotary(x, table(4, 8)[:, :7].contiguous()), 'cos_sin_cache must have an even number'),
        (lambda x: apply_rotary(x, table(4, 8), x.half()), 'key must be float32'),
        (lambda x: apply_rotary(x, table(4, 8), x[:3]), 'key must be \\(4, num_heads, channels\\), got'),
        (lambda x: apply_rotary(x, table(4, 8), positions=torch.arange(3)), 'positions must be \\(4,\\)'),
        (lambda x: apply_rotary(x, table(4, 8), positions=torch.ones(4)), 'positions must be int32 or int64'),
        (lambda x: apply_rotary(x, table(4, 8), positions=torch.arange(8)[::2]), 'positions must be contiguous'),
        (lambda x: apply_rotary(x.transpose(1, 2), table(4, 2)), 'query must have stride 1 in the last dimension'),
    ],
)
def test_errors_name_what_is_wrong(call, sentence):
    with pytest.raises(ArgumentError, match=f'transform.apply_rotary: {sentence}'):
        call(torch.randn(4, 2, 16))


def test_no_angles_at_all_give_nan():
    query = torch.randn(3, 2, 64)
    apply_rotary(query, torch.zeros(0, 64))
    assert bool(query.isnan().all())
