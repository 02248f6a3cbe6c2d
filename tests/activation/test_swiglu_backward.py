"""What is special about the SwiGLU gradients: bits, sums for the weights, straddling groups, autograd."""

import pytest
import torch

from tile_kernels import ArgumentError, QuantFormat, knobs
from tile_kernels.activation._samples import random_halves, random_map, random_rows
from tile_kernels.activation.swiglu_backward import swiglu_backward
from tile_kernels.activation.swiglu_backward_and_per_token_cast import swiglu_backward_and_per_token_cast
from tile_kernels.activation.swiglu_backward_kernels import swiglu_backward_kernel
from tile_kernels.activation.swiglu_forward import swiglu_forward
from tile_kernels.core.launch import forced_config
from tile_kernels.reference import quant as twin
from tile_kernels.reference.activation._common import fused_multiply_add
from tile_kernels.testing.numeric import assert_equal


def assert_gradients(actual: tuple, expected: tuple, sums: int) -> None:
    """All results bit for bit, except the sums for the weights."""
    for index, (result, reference) in enumerate(zip(actual, expected, strict=True)):
        if index == sums:
            torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-4)
        else:
            assert_equal(result, reference)


def compare(arguments: dict, **config) -> tuple:
    expected = twin.swiglu_backward(**arguments)
    with knobs(interpret=True):
        if config:
            with forced_config(swiglu_backward_kernel, **config):
                actual = swiglu_backward.call(**arguments)
        else:
            actual = swiglu_backward.call(**arguments)
    assert_gradients(actual, expected, 1)
    return actual


@pytest.mark.parametrize('clamp_value', [None, 1.0])
@pytest.mark.parametrize('rows', ['', 'row', 'map', 'psum'])
def test_gradients_have_the_bits_of_the_definition(rows, clamp_value):
    x = random_rows(9, 136, torch.bfloat16, rows)
    dy = torch.randn(9, 136).bfloat16()
    compare(dict(dy=dy, **x, clamp_value=clamp_value, weight_scale=1.7, dx_dtype=torch.float32, recompute=True))


@pytest.mark.parametrize('rows', [1, 2])
@pytest.mark.parametrize('hidden', [24, 264, 2056])
def test_short_rows_share_a_block_and_long_rows_take_turns(hidden, rows):
    x = random_rows(5, hidden, torch.bfloat16, 'row')
    arguments = dict(dy=torch.randn(5, hidden).bfloat16(), **x)
    compare(arguments, rows=rows, block_threads=128, resident_threads=512)


def test_any_width_and_stride():
    dy, x = torch.randn(4, 50)[:, 3:40], torch.randn(4, 90)[:, 5:79]
    compare(dict(dy=dy, x=x))


def test_extreme_gates():
    gate = torch.tensor([[0.0, -0.0, 90.0, -90.0, 200.0, -200.0, 1e-30, -1e-42]])
    x = torch.cat((gate, torch.full_like(gate, 1.5)), dim=1)
    dx, _, y = compare(dict(dy=torch.ones(1, 8), x=x, recompute=True))
    assert dx.isfinite().all() and y.isfinite().all()


def test_clamped_elements_have_no_gradient():
    x = torch.tensor([[3.0, 1.0, 1.0, 1.0, 3.0, -3.0]])
    dx = compare(dict(dy=torch.ones(1, 3), x=x, clamp_value=1.0))[0]
    assert (dx != 0).tolist() == [[False, True, True, True, False, False]]


def test_the_sum_for_a_weight_is_the_same_in_every_run_and_zero_without_a_row():
    pos_to_expert, pos_to_token_topk, token_topk_to_pos = random_map(9)
    arguments = dict(
        dy=torch.randn(9, 64),
        x=torch.randn(9, 128),
        topk_weights=torch.rand(token_topk_to_pos.shape),
        pos_to_token_topk=pos_to_token_topk,
        pos_to_expert=pos_to_expert,
    )
    zeroed = compare(arguments)[1]
    told = compare(dict(arguments, token_topk_to_pos=token_topk_to_pos))[1]
    assert_equal(told, zeroed)
    assert not told[token_topk_to_pos < 0].any() and told[token_topk_to_pos >= 0].all()


def test_no_rows_still_clear_the_gradient_of_the_weights():
    empty = torch.empty(0, dtype=torch.int32)
    arguments = dict(
        dy=torch.empty(0, 16),
        x=torch.empty(0, 32),
        topk_weights=torch.rand(300, 2),
        pos_to_token_topk=empty,
        token_topk_to_pos=torch.full((300, 2), -1, dtype=torch.int32),
    )
    assert not compare(arguments)[1].any()


# Quantised ----------------------------------------------------------------------------------


@pytest.mark.parametrize('rows', ['row', 'psum'])
@pytest.mark.parametrize(
    ('hidden', 'x_fmt', 'fmt'),
    [
        (256, 'e4m3_1x128_f32', 'e4m3_1x128_f32'),
        (192, 'e4m3_1x128_f32', 'e4m3_1x128_f32'),  # a group holds the end of dgate and the beginning of dup
        (40, 'e4m3_1x16_f32_col', 'e5m2_1x32_e4m3_col'),  # also within a warp
        (96, 'e4m3_1x32_ue8m0x4', 'e4m3_1x32_ue8m0x4_col'),
        (2304, 'e4m3_1x128_f32', 'e4m3_1x128_f32p2'),  # two turns
    ],
)
def test_quantised_gradients_have_the_bits_of_the_definition(hidden, x_fmt, fmt, rows):
    arguments = random_rows(7, hidden, torch.float32, rows)
    arguments['x'] = twin.per_token_cast(arguments['x'], QuantFormat.parse(x_fmt))
    arguments.update(dy=torch.randn(7, hidden).bfloat16(), fmt=QuantFormat.parse(fmt), clamp_value=2.0, recompute=True)
    expected = twin.swiglu_backward_and_per_token_cast(**arguments)
    with knobs(interpret=True):
        actual = swiglu_backward_and_per_token_cast.call(**arguments)
    assert_gradients(actual, expected, 3)
    if rows == 'psum':
        padding = expected[2].eq(0).all(dim=1)
        assert padding.any() and not actual[1][padding].any(), 'scale factors of padding rows are 0'


def test_long_rows_need_whole_groups():
    x = random_halves(1, 2 * 8200, torch.float32)
    quantised = twin.per_token_cast(x, QuantFormat.parse('e4m3_1x32_f32'))
    with pytest.raises(ArgumentError, match='columns of x must be a multiple of 256, got 16400'):
        swiglu_backward_and_per_token_cast.call(quantised, torch.randn(1, 8200), QuantFormat.parse('e4m3_1x128_f32'))


# Autograd -----------------------------------------------------------------------------------


@pytest.mark.parametrize('interpret', [False, True])
@pytest.mark.parametrize('rows', ['', 'row', 'map', 'psum'])
@pytest.mark.parametrize('clamp_value', [None, 1.5])
def test_autograd_agrees_with_float64(rows, clamp_value, interpret):
    arguments = random_rows(9, 40, torch.float32, rows)
    options = dict(weight_scale=1.3, clamp_value=clamp_value, dtype=torch.float32)
    leaves = [arguments[name].requires_grad_() for name in ('x', 'topk_weights') if name in arguments]
    dy = torch.randn(9, 40)
    with knobs(interpret=interpret):
        gradients = torch.autograd.grad(swiglu_forward.call(**arguments, **options), leaves, dy)

    gate, up = arguments['x'].double().chunk(2, dim=1)
    if clamp_value is not None:
        gate, up = gate.clamp(max=clamp_value), up.clamp(-clamp_value, clamp_value)
    y = torch.nn.functional.silu(gate) * up
    if rows:
        weights, slots = arguments['topk_weights'].double(), arguments.get('pos_to_token_topk')
        y = y * 1.3 * (weights if slots is None else weights.flatten()[slots.long()])[:, None]
    if rows == 'map':
        y = y * (arguments['pos_to_expert'] >= 0)[:, None]
    if rows == 'psum':
        y = y * twin.get_mapping_from_psum(y, arguments['psum'], arguments['alignment'])[:, None]
    for gradient, expected in zip(gradients, torch.autograd.grad(y, leaves, dy.double()), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_only_the_weights_may_need_a_gradient():
    x, weights = torch.randn(3, 32), torch.rand(3, requires_grad=True)
    swiglu_forward.call(x, weights).sum().backward()
    assert weights.grad.shape == (3,)


def test_the_fused_multiply_add_rounds_once():
    a = torch.tensor([1 + 2**-12, 1.0, -(1 + 2**-23), 3.0])
    b = torch.tensor([1 + 2**-12, 2.0**-25, 1 - 2**-23, -1 / 3])
    exact = [1 + 2**-11 + 2**-24 + 1, 1 + 2**-25, 2**-46, 1 - 3 * float(torch.tensor(1 / 3))]
    assert fused_multiply_add(a, b, 1.0).tolist() == [float(torch.tensor(e, dtype=torch.float32)) for e in exact]
    just_below_a_tie = fused_multiply_add(torch.tensor([2.0**-24]), torch.tensor([1 - 2.0**-24]), 1.0)
    assert just_below_a_tie.item() == 1.0
    just_above_a_tie = fused_multiply_add(torch.tensor([2.0**-24]), torch.tensor([1 + 2.0**-23]), 1.0)
    assert just_above_a_tie.item() == 1 + 2**-23
