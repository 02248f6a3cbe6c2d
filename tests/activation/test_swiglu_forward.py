"""What is special about SwiGLU: exact divisions, clamps and counts, routing weights, padding rows, layouts."""

import pytest
import torch

from tile_kernels import ArgumentError, QuantFormat, knobs
from tile_kernels.activation._samples import random_halves, random_rows, sample_psum
from tile_kernels.activation.swiglu_forward import swiglu_forward
from tile_kernels.activation.swiglu_forward_and_count import swiglu_forward_and_count
from tile_kernels.activation.swiglu_forward_and_per_channel_cast_and_transpose import (
    swiglu_forward_and_per_channel_cast_and_transpose,
)
from tile_kernels.activation.swiglu_forward_and_per_channel_cast_and_transpose_kernels import (
    swiglu_forward_and_per_channel_cast_kernel,
    swiglu_forward_and_transposed_cast_kernel,
)
from tile_kernels.activation.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast
from tile_kernels.activation.swiglu_forward_kernels import swiglu_forward_kernel
from tile_kernels.core.launch import forced_config
from tile_kernels.reference import quant as twin
from tile_kernels.testing.numeric import assert_equal

NAN, INF = float('nan'), float('inf')
FMT = QuantFormat.parse('e4m3_1x128_f32')


def assert_same(actual: tuple, expected: tuple) -> None:
    for result, reference in zip(actual, expected, strict=True):
        assert_equal(result, reference)


def assert_bits_or_nan(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit; of a NaN neither sign nor payload counts."""
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_equal(actual.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))


def interpreted(op, *args, **kwargs):
    with knobs(interpret=True):
        return op(*args, **kwargs)


# Arithmetic ---------------------------------------------------------------------------------


def every_bf16() -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, 1024)


@pytest.mark.parametrize('up', [1.0, -0.37])
def test_every_bf16_gate_is_divided_exactly(up):
    gate = every_bf16()
    x = torch.cat((gate, torch.full_like(gate, up)), dim=1)
    y = interpreted(swiglu_forward.call, x, dtype=torch.float32)
    assert_bits_or_nan(y, gate.float() / (1 + torch.exp(-gate.float())) * torch.tensor(up).bfloat16().float())


def test_float32_gates_of_every_magnitude_are_divided_exactly():
    gate = torch.randn(64, 1024) * torch.exp2(torch.randint(-140, 10, (64, 1024)))
    x = torch.cat((gate, torch.ones_like(gate)), dim=1)
    y = interpreted(swiglu_forward.call, x, dtype=torch.float32)
    assert_bits_or_nan(y, gate / (1 + torch.exp(-gate)))
    assert (y == 0).any() and (gate.abs() > 100).any(), 'both ways to divide must have been used'


def test_numbers_that_are_not_finite():
    gate = torch.tensor([[NAN, INF, -INF, 0.0, -0.0, -100.0, 100.0, 2.0]])
    up = torch.tensor([[1.0, 2.0, 1.0, -1.0, 1.0, -INF, 1.0, NAN]])
    y = interpreted(swiglu_forward.call, torch.cat((gate, up), dim=1), dtype=torch.float32)[0]
    assert y[0].isnan() and y[1] == INF and y[2].isnan() and y[7].isnan()
    assert y[3].signbit() and y[3] == 0 and y[4].signbit() and y[4] == 0


def test_a_nan_is_not_clamped_away():
    x = torch.tensor([[NAN, 1.0, 1.0, NAN]])
    for op in (interpreted, lambda op, *args, **kwargs: op(*args, **kwargs)):
        assert op(swiglu_forward.call, x, clamp_value=0.5, dtype=torch.float32).isnan().all()


def test_clamps_bound_the_gate_above_and_up_on_both_sides():
    x = torch.tensor([[9.0, -9.0, 1.0, 9.0, -9.0, 1.0]])
    y = interpreted(swiglu_forward.call, x, clamp_value=2.0, dtype=torch.float32)
    silu = torch.nn.functional.silu(torch.tensor([2.0, -9.0, 1.0]))
    torch.testing.assert_close(y[0], silu * torch.tensor([2.0, -2.0, 1.0]))


# Counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize('fmt', ['e4m3_1x32_f32', 'e4m3_1xall_f32'])
def test_counts_are_strict_and_add_up(fmt):
    x = torch.zeros(3, 2 * 264)
    x[0, 0], x[0, 1], x[1, 264], x[1, 265], x[2, 266] = 2.0, 1.0, 1.5, 1.0, -7.0
    counts = torch.tensor([10, 20, 30, 40])
    for times in (1, 2):
        interpreted(swiglu_forward_and_count, x, counts, clamp_value=1.0)
        assert counts.tolist() == [10 + times, 20 + times, 30 + times, 40 + times * x.shape[0] * 264]
    interpreted(
        swiglu_forward_and_per_token_cast.call, x, QuantFormat.parse(fmt), clamp_value=1.0, clamped_count=counts[:3]
    )
    assert counts.tolist() == [13, 23, 33, 40 + 2 * x.shape[0] * 264]


def test_padding_rows_are_not_counted():
    x, counts = torch.full((4, 32), 9.0), torch.zeros(4, dtype=torch.int64)
    pos_to_expert = torch.tensor([0, -1, 3, -1], dtype=torch.int32)
    interpreted(swiglu_forward_and_count, x, counts, pos_to_expert=pos_to_expert, clamp_value=1.0)
    assert counts.tolist() == [32, 32, 0, 32]


# Rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize('fmt', ['e4m3_1x128_f32', 'e4m3_1x32_ue8m0x4_col', 'e4m3_1xall_f32'])
@pytest.mark.parametrize('rows', ['map', 'psum'])
def test_padding_rows_are_not_read_and_come_out_as_zero(rows, fmt):
    arguments = random_rows(11, 264, torch.bfloat16, rows)
    real = twin.swiglu_forward(**dict(arguments, x=torch.ones_like(arguments['x']))).ne(0).any(dim=1)
    assert 0 < real.sum() < 11
    expected = twin.swiglu_forward_and_per_token_cast(**arguments, fmt=QuantFormat.parse(fmt))
    arguments['x'][~real] = NAN
    y, sf = interpreted(swiglu_forward_and_per_token_cast.call, **arguments, fmt=QuantFormat.parse(fmt))
    assert_same((y, sf), expected)
    assert not y[~real].view(torch.uint8).any() and not sf[~real].any() and sf[real].ne(0).all()
    assert not interpreted(swiglu_forward.call, **arguments)[~real].any()


@pytest.mark.parametrize('alignment', [1, 3, 128])
def test_an_expert_owns_the_rows_from_its_aligned_start_to_its_end(alignment):
    psum = [2, 2, 140, 0]
    psum[3] = -(-140 // alignment) * alignment + 1
    owned = torch.zeros(300, dtype=torch.bool)
    start = 0
    for end in psum:
        owned[start:end] = True
        start = -(-end // alignment) * alignment
    x = torch.ones(300, 16)
    y = interpreted(swiglu_forward.call, x, psum=torch.tensor(psum, dtype=torch.int32), alignment=alignment)
    assert torch.equal(y[:, 0] != 0, owned) and torch.equal(
        twin.get_mapping_from_psum(x, torch.tensor(psum), alignment), owned
    )


def test_more_experts_than_threads():
    ends, alignment = sample_psum(900)
    assert len(ends) > 128
    arguments = dict(x=torch.randn(900, 16), psum=torch.tensor(ends, dtype=torch.int32), alignment=alignment)
    assert_equal(interpreted(swiglu_forward.call, **arguments), twin.swiglu_forward(**arguments))


def test_without_experts_every_row_is_padding():
    arguments = dict(x=torch.randn(3, 16), psum=torch.empty(0, dtype=torch.int32))
    assert not interpreted(swiglu_forward.call, **arguments).any()


def test_a_row_without_a_slot_has_weight_zero():
    x, weights = torch.ones(4, 16), torch.tensor([[1.0, 2.0]])
    slots = torch.tensor([1, -1, 0, 2], dtype=torch.int32)  # 2 is past the end
    y = interpreted(swiglu_forward.call, x, weights, slots, dtype=torch.float32)
    one = torch.nn.functional.silu(torch.tensor(1.0))
    torch.testing.assert_close(y[:, 0], torch.tensor([2.0, 0.0, 1.0, 0.0]) * one)
    assert_equal(y, twin.swiglu_forward(x, weights, slots, dtype=torch.float32))


# Shapes and configs -------------------------------------------------------------------------


@pytest.mark.parametrize('vectors', [1, 2, 4])
@pytest.mark.parametrize('num_threads', [128, 256])
def test_every_config_gives_the_same(vectors, num_threads):
    x = random_rows(9, 144, torch.bfloat16, 'psum')
    expected = twin.swiglu_forward_and_per_token_cast(**x, fmt=FMT)
    config = dict(vectors=vectors, num_threads=num_threads, resident_threads=1024)
    with forced_config(swiglu_forward_kernel, **config):
        assert_same(interpreted(swiglu_forward_and_per_token_cast.call, **x, fmt=FMT), expected)


@pytest.mark.parametrize(('vectors', 'hidden'), [(1, 264), (2, 1000), (4, 264), (1, 4104)])
def test_whole_rows_in_every_config_and_in_several_passes(vectors, hidden):
    fmt = QuantFormat.parse('e4m3_1xall_f32')
    x = random_rows(2, hidden, torch.bfloat16, 'row')
    with forced_config(swiglu_forward_kernel, vectors=vectors, num_threads=512, resident_threads=1024):
        y = interpreted(swiglu_forward_and_per_token_cast.call, **x, fmt=fmt)
    assert_same(y, twin.swiglu_forward_and_per_token_cast(**x, fmt=fmt))


def test_gate_and_up_may_be_strided_and_misaligned():
    halves = torch.randn(5, 300).bfloat16()
    gate, up = halves[:, 1:100], halves[:, 150:249]
    y = interpreted(swiglu_forward_and_per_token_cast.call, gate, FMT, up)
    assert_same(y, twin.swiglu_forward_and_per_token_cast(gate.clone(), FMT, up.clone()))


@pytest.mark.parametrize('num_tokens', [129, 132, 136, 144])
@pytest.mark.parametrize('transpose', [True, False])
def test_per_channel_factors_come_from_the_rounded_activation(num_tokens, transpose):
    x, fmt = random_halves(num_tokens, 2 * 24, torch.bfloat16), QuantFormat.parse('e4m3_128x1_f32')
    y, sf = interpreted(swiglu_forward_and_per_channel_cast_and_transpose.call, x, fmt, 1.0, transpose)
    act = twin.swiglu_forward(x, clamp_value=1.0).float()
    assert torch.equal(sf[0], act[:128].abs().amax(0).clamp(min=1e-4) / torch.tensor(448.0))
    assert_same((y, sf), twin.swiglu_forward_and_per_channel_cast_and_transpose(x, fmt, 1.0, transpose))


def test_flat_tiles_of_channels():
    x, fmt = random_halves(70, 2 * 136, torch.bfloat16), QuantFormat.parse('e4m3_32x1_f32p2')
    expected = twin.swiglu_forward_and_per_channel_cast_and_transpose(x, fmt, transpose=False)
    for rows, num_threads in ((4, 128), (8, 512)):
        config = dict(rows=rows, num_threads=num_threads, resident_threads=512, row_lanes=16)
        with forced_config(swiglu_forward_and_per_channel_cast_kernel, **config):
            assert_same(
                interpreted(swiglu_forward_and_per_channel_cast_and_transpose.call, x, fmt, transpose=False), expected
            )


@pytest.mark.parametrize('num_tokens', [48, 37])
@pytest.mark.parametrize('hidden', [256, 136])
def test_small_tiles_are_turned(num_tokens, hidden):
    x, fmt = random_halves(num_tokens, 2 * hidden, torch.bfloat16), QuantFormat.parse('e4m3_32x1_f32')
    expected = twin.swiglu_forward_and_per_channel_cast_and_transpose(x, fmt)
    for rows, row_lanes in ((2, 2), (4, 4)):
        config = dict(rows=rows, num_threads=128, resident_threads=512, row_lanes=row_lanes)
        with forced_config(swiglu_forward_and_per_channel_cast_kernel, **config):
            assert_same(interpreted(swiglu_forward_and_per_channel_cast_and_transpose.call, x, fmt), expected)


@pytest.mark.parametrize('num_tokens', [400, 397])
@pytest.mark.parametrize(('hidden', 'clamp_value'), [(128, None), (72, 1.0)])
def test_strips_ask_for_the_next_tile_early(num_tokens, hidden, clamp_value):
    x, fmt = random_halves(num_tokens, 2 * hidden, torch.bfloat16), QuantFormat.parse('e4m3_128x1_f32')
    expected = twin.swiglu_forward_and_per_channel_cast_and_transpose(x, fmt, clamp_value)
    for blocks in (1, 4):
        with forced_config(swiglu_forward_and_transposed_cast_kernel, row_lanes=8, resident_threads=512, blocks=blocks):
            result = interpreted(swiglu_forward_and_per_channel_cast_and_transpose.call, x, fmt, clamp_value)
        assert_same(result, expected)


def test_numbers_are_no_compile_keys():
    def key(num_tokens: int, pitch: int, weight_scale: float, clamp_value: float, alignment: int, floor: float):
        x = random_halves(num_tokens, 256, torch.bfloat16, pitch)
        psum, weights = torch.tensor([1], dtype=torch.int32), torch.rand(num_tokens)
        (launch,) = swiglu_forward_and_per_token_cast.trace(
            x, FMT, None, weights, None, None, psum, weight_scale, clamp_value, None, alignment, floor
        )
        return launch.kernel, launch.static, launch.config

    assert key(5, 256, 1.0, 10.0, 128, 1e-4) == key(7, 512, 2.5, 0.5, 16, 1e-2)


def test_loads_are_16_bytes_wide_and_come_before_any_arithmetic():
    static = (2048, FMT, torch.bfloat16, 16, False, '', '', False, 0)
    source = swiglu_forward_kernel.source(static, vectors=2, num_threads=256, resident_threads=1024)
    body = source[source.rindex('__global__') :]
    loads, arithmetic = body.split('expf', 1)
    assert loads.count('= *(uint4*)(x +') == 2 and '(x +' not in arithmetic  # gate and up, in a loop over rows


# Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('change', 'sentence'),
    [
        (dict(x=torch.zeros(4, 33)), 'columns of x must be a multiple of 2, got 33'),
        (dict(x=torch.zeros(4, 32, dtype=torch.int32)), 'x must be bfloat16 or float16 or float32'),
        (dict(topk_weights=torch.ones(3)), 'topk_weights must be'),
        (dict(pos_to_token_topk=torch.zeros(4, dtype=torch.int32)), 'pos_to_token_topk must come with topk_weights'),
        (dict(pos_to_expert=torch.zeros(4)), 'pos_to_expert must be int32'),
        (dict(psum=torch.zeros(4, dtype=torch.int32), alignment=0), 'alignment must be at least 1, got 0'),
        (dict(clamp_value=-1.0), 'clamp_value must not be negative, got -1.0'),
        (dict(clamp_value=NAN), 'clamp_value must not be negative, got nan'),
        (dict(dtype=torch.float64), 'dtype must be one of'),
    ],
)
def test_errors_are_sentences(change, sentence):
    with pytest.raises(ArgumentError, match=sentence.replace('(', r'\(')):
        swiglu_forward.call(**dict(dict(x=torch.zeros(4, 32)), **change))


def test_both_layouts_at_once_are_refused():
    rows = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ArgumentError, match='psum_num_tokens_per_expert must not be combined with pos_to_expert'):
        swiglu_forward.call(torch.zeros(4, 32), pos_to_expert=rows, psum=rows)


def test_counts_need_a_clamp():
    with pytest.raises(ArgumentError, match='clamped_count must come with clamp_value'):
        swiglu_forward_and_count(torch.zeros(4, 32), torch.zeros(3, dtype=torch.int64))
