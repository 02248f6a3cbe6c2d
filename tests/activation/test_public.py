"""The public SwiGLU functions: both argument forms of TileKernels, the friendly name, errors, the token alignment."""

import pytest
import torch

from tile_kernels import ArgumentError, QuantFormat, config, knobs, quant
from tile_kernels.activation._samples import random_halves, random_map
from tile_kernels.reference import quant as twin
from tile_kernels.reference.activation.swiglu_backward import swiglu_backward_reference
from tile_kernels.reference.activation.swiglu_forward import swiglu_forward_reference
from tile_kernels.testing.numeric import assert_equal


@pytest.fixture(autouse=True)
def default_alignment():
    yield
    config.reset_runtime_config()


@pytest.fixture(params=[False, True], ids=['twin', 'interpreter'])
def interpret(request):
    with knobs(interpret=request.param):
        yield


PSUM = torch.tensor([3, 6], dtype=torch.int32)  # rows 0..2 and 4..5 with an alignment of 4


# Forward ------------------------------------------------------------------------------------


def test_forward_by_maps(interpret):
    x = random_halves(10, 2 * 256, torch.bfloat16)
    pos_to_expert, pos_to_token_topk, token_topk_to_pos = random_map(10)
    weights, counts, reference_counts = (
        torch.rand(token_topk_to_pos.shape),
        torch.zeros(3).long(),
        torch.zeros(3).long(),
    )
    y, sf = quant.swiglu_forward_and_per_token_cast(
        x, 'e4m3', 128, pos_to_token_topk, weights, pos_to_expert, True, True, True, 0.5, counts, 1e-3
    )
    real = pos_to_expert >= 0
    act = swiglu_forward_reference(x[real], pos_to_token_topk[real], weights, 0.5, reference_counts)
    expected, expected_sf = twin.per_token_cast(act, QuantFormat.parse('e4m3_1x128_ue8m0x4_col'), 1e-3)
    assert_equal(y[real], expected)
    assert torch.equal(sf[real], expected_sf) and sf.stride() == (1, 12)
    assert torch.equal(counts, reference_counts) and counts.sum() > 0


def test_forward_by_prefix_sums(interpret):
    config.set_token_alignment(4)
    x, weights, counts = random_halves(8, 2 * 64, torch.bfloat16), torch.rand(8), torch.zeros(4).long()
    rows = dict(psum_num_tokens_per_expert=PSUM, topk_weights=weights, routed_scaling_factor=2.5, clamp_value=1.0)
    y = quant.swiglu_forward(x, 'fp32', **rows)
    assert_equal(quant.swiglu_forward(x, 'fp32', PSUM, weights, 2.5, 1.0, counts), y)
    assert_equal(swiglu_forward_reference(x, **rows), y)
    assert y.any(dim=1).tolist() == [True] * 3 + [False] + [True] * 2 + [False] * 2
    assert counts[3] == 5 * 64
    codes, sf = quant.swiglu_forward_and_per_token_cast(x, 'e4m3', 32, round_sf=True, **rows)
    real = y.any(dim=1)
    expected = twin.per_token_cast(y[real], QuantFormat.parse('e4m3_1x32_f32p2'))
    assert_equal(codes[real], expected.data)
    assert_equal(sf[real], expected.sf)


@pytest.mark.parametrize('hidden', [200, 300])
def test_one_factor_for_a_row(hidden, interpret):
    x = random_halves(3, 2 * hidden, torch.bfloat16)
    sf = quant.swiglu_forward_and_per_token_cast(x, 'e4m3', hidden).sf
    assert sf.shape == (3, 1)
    assert_equal(quant.swiglu_forward_and_per_token_cast(x, 'e4m3_1xall_f32').sf, sf)


@pytest.mark.parametrize('round_sf', [False, True])
def test_per_channel(round_sf, interpret):
    x = random_halves(128, 2 * 72, torch.bfloat16)
    act = swiglu_forward_reference(x, swiglu_clamp_value=0.5).bfloat16()
    y, sf = quant.swiglu_forward_and_per_channel_cast_and_transpose(x, 'e4m3', 32, round_sf, False, 0.5)
    expected, expected_sf = twin.cast(act, 'e4m3', (32, 1), round_sf=round_sf)
    assert_equal(y, expected.t().contiguous())
    assert_equal(sf, expected_sf)
    y, _ = quant.swiglu_forward_and_per_channel_cast_and_transpose(x, 'e4m3', 32, round_sf, True, 0.5)
    assert_equal(y, expected)


@pytest.mark.parametrize(('group_size', 'columns'), [(None, 1), (128, 3)])
def test_friendly_name(group_size, columns, interpret):
    gate, up = torch.randn(2, 5, 300).bfloat16()
    out_fp8, scale = quant.fused_swiglu_quant_fp8(gate, up, group_size=group_size)
    assert (out_fp8.dtype, scale.shape) == (torch.float8_e4m3fn, (5, columns))
    back = out_fp8.float() * scale.repeat_interleave(group_size or 300, 1)[:, :300]
    torch.testing.assert_close(back, torch.nn.functional.silu(gate.float()) * up.float(), rtol=2**-4, atol=2e-2)
    for actual, expected in zip((out_fp8, scale), twin.fused_swiglu_quant_fp8(gate, up, group_size), strict=True):
        assert_equal(actual, expected)


# Backward -----------------------------------------------------------------------------------


def test_backward_by_maps(interpret):
    pair = tuple(twin.per_token_cast(random_halves(10, 2 * 256, torch.float32), QuantFormat.parse('e4m3_1x128_f32')))
    _, pos_to_token_topk, token_topk_to_pos = random_map(10)
    weight, grad_out = torch.rand(token_topk_to_pos.shape), torch.randn(10, 256).bfloat16()
    maps = (weight, pos_to_token_topk, token_topk_to_pos, 128)
    out, x_grad_fp8, x_grad, weight_grad = quant.swiglu_backward_and_per_token_cast(
        pair, grad_out, *maps, round_sf=True, swiglu_clamp_value=0.5
    )
    expected = swiglu_backward_reference(pair, grad_out, *maps, swiglu_clamp_value=0.5)
    assert_equal(out, expected[0].bfloat16())
    assert_equal(x_grad, expected[1].bfloat16())
    torch.testing.assert_close(weight_grad, expected[2], rtol=1e-4, atol=1e-4)
    for actual, reference in zip(x_grad_fp8, twin.cast(expected[1], 'e4m3', (1, 128), round_sf=True), strict=True):
        assert_equal(actual, reference)
    cubes = tuple(part.view(2, 5, -1) for part in pair)
    by_name = dict(zip(('weight', 'pos_to_token_topk', 'token_topk_to_pos', 'num_per_channels'), maps, strict=True))
    again = quant.swiglu_backward_and_per_token_cast(cubes, grad_out=grad_out, swiglu_clamp_value=0.5, **by_name)
    assert_equal(again[2], x_grad)


def test_backward_by_prefix_sums(interpret):
    config.set_token_alignment(4)
    x, grad, weights = random_halves(8, 2 * 64, torch.float32), torch.randn(8, 64), torch.rand(8)
    results = quant.swiglu_backward(x, grad, 'fp32', PSUM, weights, 2.5, 1.0, do_recompute=True)
    expected = swiglu_backward_reference(x, grad, PSUM, weights, 2.5, 1.0, 4)
    assert_equal(results[0], expected[0])
    torch.testing.assert_close(results[1], expected[1], rtol=1e-4, atol=1e-4)
    assert_equal(results[2], expected[2])
    assert [
        len(quant.swiglu_backward(x, grad, 'bf16')),
        len(quant.swiglu_backward(x, grad, 'bf16', PSUM, weights)),
    ] == [1, 2]

    quantised = twin.per_token_cast(x, QuantFormat.parse('e4m3_1x32_f32'))
    flags = dict(use_tma_aligned_col_major_sf=True, round_sf=True, use_packed_ue8m0=True)
    rows = dict(psum_num_tokens_per_expert=PSUM, topk_weights=weights, do_recompute=True)
    dx, (codes, sf), dweights, out = quant.swiglu_backward_and_per_token_cast(
        tuple(quantised), grad, 'e4m3', 32, **rows, **flags
    )
    assert (dx.dtype, codes.dtype, sf.dtype, dweights.shape, out.shape) == (
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int32,
        (8,),
        (8, 64),
    )
    assert not sf[3].any() and not sf[6:].any() and not dx[3].any() and sf[0].all()
    short = quant.swiglu_backward_and_per_token_cast(quantised, act_x_grad=grad, fmt='e4m3', num_per_channels=32)
    assert len(short) == 2


# Settings and errors ------------------------------------------------------------------------


def test_token_alignment_is_checked():
    assert config.get_token_alignment() == 128
    config.set_token_alignment(1)
    assert config.get_token_alignment() == 1
    for wrong in (0, -4):
        with pytest.raises(ValueError, match='token_alignment must be at least 1'):
            config.set_token_alignment(wrong)
    for wrong in (2.0, '4', True):
        with pytest.raises(TypeError, match='token_alignment must be an int'):
            config.set_token_alignment(wrong)
    config.reset_runtime_config()
    assert config.get_token_alignment() == 128


@pytest.mark.parametrize(
    ('call', 'sentence'),
    [
        (lambda x: quant.swiglu_forward(x, 'e4m3'), 'fmt must be one of bf16, fp16, fp32'),
        (lambda x: quant.swiglu_forward(x, 'bf16', routed_scaling_factor=2.0), 'must come with topk_weights'),
        (lambda x: quant.swiglu_forward_and_per_token_cast(x, 'e4m3', 100), 'num_per_channels must be one of'),
        (lambda x: quant.swiglu_forward_and_per_token_cast(x, 'e4m3', 32, use_packed_ue8m0=True), 'round_sf=True'),
        (
            lambda x: quant.swiglu_forward_and_per_token_cast(x, 'e4m3', 32, swiglu_clamp_value=1.0, clamp_value=2.0),
            'must not both be given',
        ),
        (lambda x: quant.swiglu_forward_and_per_channel_cast_and_transpose(x, 'e4m3', 64), 'num_per_tokens must be'),
        (lambda x: quant.fused_swiglu_quant_fp8(x, x[:, 1:]), 'up must be'),
        (lambda x: quant.swiglu_backward_and_per_token_cast(x, x, 'e4m3', 32), 'x must be a pair'),
    ],
)
def test_errors_are_sentences(call, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        call(torch.zeros(4, 64))
