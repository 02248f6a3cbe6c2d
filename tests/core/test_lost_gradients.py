"""No gradient is lost without a word: an op has one, or refuses arguments that need one."""

import pytest
import torch

import tile_kernels
from tile_kernels import activation, engram, gemm, moe, norm, quant
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.op import op, ops
from tile_kernels.core.registry import load_ops

BF16, F32 = torch.bfloat16, torch.float32


def rows(*shape, dtype=BF16):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize('dtype', [F32, torch.float16, torch.float8_e4m3fn])
def test_cast_has_the_gradient_of_to(dtype):
    x = rows(4, 8)
    (expected,) = torch.autograd.grad((x + x.to(dtype).to(BF16)).sum(), x)
    (found,) = torch.autograd.grad((x + quant.cast(x, dtype).to(BF16)).sum(), x)
    assert torch.equal(found, expected)


def test_norm_and_cast_keeps_the_gradients_of_what_is_not_quantized():
    x, residual, weight = rows(4, 256), rows(4, 256), rows(256, dtype=F32)
    options = dict(residual=residual, out_scale=1.5)
    (data, sf), y, _, z = norm.norm_forward_and_per_token_cast(
        x, weight, 1e-6, 'e4m3', 128, with_out_bf16=True, **options
    )
    other, _, total = norm.norm_forward(x, weight, 1e-6, **options)
    found = torch.autograd.grad(y.float().square().sum() + z.float().sum(), (x, residual, weight))
    expected = torch.autograd.grad(other.float().square().sum() + total.float().sum(), (x, residual, weight))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with torch.no_grad():
        codes, *_ = norm.norm_forward_and_per_token_cast(x, weight, 1e-6, 'e4m3', 128, **options)
    assert torch.equal(data.view(torch.uint8), codes.data.view(torch.uint8)) and torch.equal(sf, codes.sf)
    assert not data.requires_grad and not sf.requires_grad


def test_swiglu_that_counts_keeps_its_gradient():
    x, counts = rows(5, 64), torch.zeros(3, dtype=torch.int64)
    (expected,) = torch.autograd.grad(activation.swiglu_forward(x, 'fp32', clamp_value=0.5).sum(), x)
    y = activation.swiglu_forward(x, 'fp32', clamp_value=0.5, clamped_count=counts)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    assert counts[0] == (x[:, :32] > 0.5).sum()


def test_codes_and_scale_factors_have_no_gradient():
    q = quant.per_token_cast(rows(4, 128), 'e4m3', 128)
    assert not q.data.requires_grad and not q.sf.requires_grad


REFUSED = {
    'a name of what has one': (
        lambda: gemm.grouped_gemm_swiglu(
            rows(4, 64), torch.randn(2, 64, 64, dtype=BF16), torch.tensor([2, 4], dtype=torch.int32)
        ),
        'a must not require a gradient, since this op has no gradient.*use gemm.grouped_gemm',
    ),
    'a weight': (
        lambda: engram.fused_weight(rows(4, 128, dtype=BF16), torch.randn(4, 128, dtype=BF16)),
        'must not require a gradient, since this op has no gradient',
    ),
    'memory of the caller': (
        lambda: norm.norm_forward(rows(4, 64), None, 1e-6, out=torch.empty(4, 64, dtype=BF16)),
        'x must not require a gradient, since this op has no gradient.*without out',
    ),
}


@pytest.mark.parametrize('case', REFUSED)
def test_an_op_without_a_gradient_refuses_what_needs_one(case):
    call, sentence = REFUSED[case]
    with pytest.raises(ArgumentError, match=sentence):
        call()
    with torch.no_grad():
        call()


def test_an_input_without_a_gradient_is_refused_but_a_bias_that_only_selects_is_not():
    assert moe.topk_gating.constant == {'bias'}

    known = dict(ops)

    @op(outputs='dx', twin=lambda dy, scale: dy * scale)
    def stretch_bwd(dy: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(dy)

    @op(outputs='y', backward=stretch_bwd, twin=lambda x, scale: x * scale)
    def stretch(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    ops.clear()
    ops.update(known)  # generic tests see the library's ops only
    x, scale = rows(3), rows(3)
    with pytest.raises(ArgumentError, match='scale must not require a gradient, since this op has none for it'):
        stretch(x, scale)
    with pytest.raises(ArgumentError, match='scale must not require a gradient'):
        stretch.operator(x, scale)
    assert torch.equal(torch.autograd.grad(stretch(x, scale.detach()).sum(), x)[0], scale.detach())


def numbers(made, outputs):
    """The results of a call that are neither codes nor scale factors."""
    results = made if isinstance(made, tuple) else (made,)
    named = zip(outputs, results, strict=True)
    return [x for name, x in named if x.is_floating_point() and x.dtype.itemsize > 1 and name.split('_')[-1] != 'sf']


def losses_of(found):
    """The arguments whose gradient an op drops without an error, tried one after the other on a small case."""
    cases = sorted(found.case_set.smoke, key=lambda case: 0 in case.values())
    given = found.case_set.arguments(found.name, cases[0])
    for name, x in given.items():
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype.itemsize == 1:
            continue
        leaf = x.detach().clone().requires_grad_()
        try:
            results = numbers(found.call(**(given | {name: leaf})), found.outputs)
        except ArgumentError as error:
            assert 'must not require a gradient' in str(error)
            continue
        if results and name not in found.constant:
            heads = [y for y in results if y.requires_grad]
            if not heads or torch.autograd.grad([y.sum() for y in heads], leaf, allow_unused=True)[0] is None:
                yield name


@pytest.mark.parametrize('family', tile_kernels.FAMILIES)
def test_no_op_drops_a_gradient_without_a_word(family):
    tried = [found for found in load_ops().values() if found.family == family and found.case_set and found.outputs]
    assert tried or family == 'rand'
    assert {found.name: lost for found in tried if (lost := list(losses_of(found)))} == {}


def test_the_operator_refuses_too():
    with pytest.raises(ArgumentError, match='must not require a gradient'):
        engram.fused_weight.operator(rows(4, 128), torch.randn(4, 128, dtype=BF16))
