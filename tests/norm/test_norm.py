"""What is special about RMS norm: one order of every sum, the same bits fused or not, aliasing, accumulation."""

import pytest
import torch

from tile_kernels import ArgumentError, QuantFormat, knobs, quant
from tile_kernels.core.launch import forced_config, launch
from tile_kernels.norm.add_norm_forward import add_norm_forward
from tile_kernels.norm.norm_backward import norm_backward
from tile_kernels.norm.norm_backward_kernels import norm_backward_kernel
from tile_kernels.norm.norm_forward import norm_forward, norm_forward_
from tile_kernels.norm.norm_forward_and_per_token_cast import norm_forward_and_per_token_cast
from tile_kernels.norm.norm_forward_kernels import norm_forward_kernel
from tile_kernels.quant.per_token_cast import per_token_cast
from tile_kernels.reference import norm as twin
from tile_kernels.testing.numeric import assert_equal


@pytest.fixture(autouse=True)
def interpreting():
    """Run the kernels, not the twins."""
    with knobs(interpret=True):
        yield


def rows(num_tokens, hidden, dtype=torch.bfloat16, seed=0):
    return torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Forward ------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
def test_is_as_exact_as_float32_allows(dtype):
    x, weight = rows(3, 2304, dtype), rows(1, 2304, dtype, 1)[0]
    y, rstd = norm_forward.call(x, weight, 1e-6, 0.5)
    exact = (x.double().square().mean(dim=1) + 1e-6).rsqrt()
    torch.testing.assert_close(rstd.double(), exact, rtol=2e-7, atol=0)
    expected = x.double() * exact[:, None] * weight.double() * 0.5
    torch.testing.assert_close(y, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_bits_do_not_depend_on_the_config():
    x, weight = rows(3, 2304), rows(1, 2304, seed=1)[0]
    results = []
    for warps in (1, 2, 4, 8, 16):
        with forced_config(norm_forward_kernel, warps=warps, resident_threads=1024):
            results.append(norm_forward.call(x, weight))
    for y, rstd in results[1:]:
        assert_equal(y, results[0][0])
        assert_equal(rstd, results[0][1])


def test_bits_of_a_row_do_not_depend_on_its_batch():
    x = rows(9, 160)
    y, rstd = norm_forward.call(x)
    for i in (0, 4, 8):
        alone, own = norm_forward.call(x[i : i + 1])
        assert_equal(alone, y[i : i + 1])
        assert_equal(own, rstd[i : i + 1])


@pytest.mark.parametrize('fmt', ['e4m3_1x128_f32', 'e2m1_1x32_ue8m0x4', 'e4m3_1xall_f32p2'])
def test_fused_cast_equals_the_cast_of_the_norm(fmt):
    fmt = QuantFormat.parse(fmt)
    x, residual, weight = rows(3, 1344), rows(3, 1344, seed=1), rows(1, 1344, torch.float32, 2)[0]
    y, rstd, z = add_norm_forward(x, residual, weight)
    expected = (*per_token_cast.call(y, fmt), y, rstd, z)
    for warps in (1, 8):
        with forced_config(norm_forward_kernel, warps=warps, resident_threads=1024):
            fused = norm_forward_and_per_token_cast.call(x, fmt, weight, residual, with_y=True)
        for actual, reference in zip(fused, expected, strict=True):
            assert_equal(actual, reference)


def test_results_may_overwrite_the_inputs():
    x, residual = rows(4, 264), rows(4, 264, seed=1)
    y, rstd, z = add_norm_forward(x, residual)
    into_x, into_residual = x.clone(), residual.clone()
    assert_equal(norm_forward_(into_x, into_x, None, into_residual, into_residual), rstd)
    assert_equal(into_x, y)
    assert_equal(into_residual, z)


def test_three_dimensions_of_any_strides():
    x = rows(4 * 3, 320).view(4, 3, 320).transpose(0, 1)[..., :264]
    weight = rows(1, 264, seed=1)[0]
    y, rstd, normalised = quant.norm_forward(x, weight, 1e-6, with_rstd=True)
    flat, flat_rstd = norm_forward.call(x.reshape(-1, 264), weight, 1e-6)
    assert_equal(y, flat.view(3, 4, 264))
    assert_equal(rstd, flat_rstd.view(3, 4))
    assert normalised is x
    assert quant.norm_forward(x, weight, 1e-6)[1] is None


def test_scale_factors_of_every_batch_stand_apart():
    x = rows(2 * 5, 160).view(2, 5, 160)
    (data, sf), y, rstd, _ = quant.norm_forward_and_per_token_cast(
        x, None, 1e-6, 'e4m3', 32, use_tma_aligned_col_major_sf=True, with_out_bf16=True
    )
    assert sf.shape == (2, 5, 5) and sf.stride() == (40, 1, 8) and rstd is None
    for i in range(2):
        codes, factors = per_token_cast.call(y[i], QuantFormat.parse('e4m3_1x32_f32_col'))
        assert_equal(data[i], codes)
        assert_equal(sf[i].contiguous(), factors.contiguous())


def test_scale_factors_in_tiles():
    x, block = rows(300, 128), 200
    storage = torch.zeros(1, 512, dtype=torch.int32)
    (_, sf), *_ = quant.norm_forward_and_per_token_cast(
        x, None, 1e-6, 'e4m3_1x32_ue8m0x4', mega_moe_sf=storage.t()[:300], mega_moe_block_m=block
    )
    expected = torch.zeros(512, dtype=torch.int32)
    for token in range(300):
        i = token % block
        expected[token // block * 256 + i // 128 * 128 + i % 32 * 4 + i % 128 // 32] = sf[token, 0]
    assert_equal(storage[0], expected)
    with pytest.raises(ArgumentError, match='mega_moe_sf must have memory for 512 rows'):
        quant.norm_forward_and_per_token_cast(
            x, None, 1e-6, 'e4m3_1x32_ue8m0x4', mega_moe_sf=storage.t()[:300, :].clone(), mega_moe_block_m=block
        )


# Backward -----------------------------------------------------------------------------------


def test_gradients_of_everything_against_float64():
    leaves = [rows(5, 264, torch.float32, seed) for seed in range(2)] + [rows(1, 264, torch.float32, 2)[0]]
    mine, exact = ([t.clone().to(kind).requires_grad_() for t in leaves] for kind in (torch.float32, torch.float64))
    y, _, z = quant.norm_forward(mine[0], mine[2], 1e-5, residual=mine[1], out_scale=0.5)
    total = exact[0] + exact[1]
    expected = total * (total.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt() * exact[2] * 0.5
    factor = rows(5, 264, torch.float32, 3)
    (y * factor + z).sum().backward()
    (expected * factor + total).sum().backward()
    for leaf, reference in zip(mine, exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
def test_gradients_do_not_depend_on_how_rows_arrive(dtype):
    dy, x, weight = rows(9, 520, dtype), rows(9, 520, dtype, 1), rows(1, 520, dtype, 2)[0]
    _, rstd = norm_forward.call(x, weight)
    results = []
    for stages, kept in ((0, 0), (2, 1), (3, 2)):
        with forced_config(norm_backward_kernel, warps=2, block_warps=16, stages=stages, kept=kept):
            results.append(norm_backward.call(dy, x, rstd, weight))
    for first, second, third in zip(*results, strict=True):
        assert_equal(first, second)
        assert_equal(first, third)


def test_many_rows_for_each_block():
    num_tokens = 600  # more than one row for each team of every block
    dy, x, weight = rows(num_tokens, 24), rows(num_tokens, 24, seed=1), rows(1, 24, torch.float32, 2)[0]
    rstd = torch.rand(num_tokens)
    dx, dweight = norm_backward.call(dy, x, rstd, weight)
    with knobs(interpret=False):
        expected_dx, expected_dweight = norm_backward.call(dy, x, rstd, weight)
    torch.testing.assert_close(dx, expected_dx)
    torch.testing.assert_close(dweight, expected_dweight, rtol=1e-5, atol=1e-4)


def test_gradient_of_the_weight_is_added_to_what_is_there():
    dy, x, weight = rows(5, 264), rows(5, 264, seed=1), rows(1, 264, seed=2)[0]
    rstd = torch.rand(5)
    _, alone = quant.norm_backward(dy, x, weight.float(), rstd)
    held = torch.ones(264)
    _, returned = quant.norm_backward(dy, x, weight.float(), rstd, weight_grad=held)
    assert returned is held
    assert_equal(held, alone + 1)
    assert quant.norm_backward(dy, x, None, rstd)[1] is None


def test_without_rows_the_gradient_of_the_weight_is_zero():
    weight = rows(1, 264)[0]
    dx, dweight = quant.norm_backward(rows(0, 264), rows(0, 264), weight, torch.empty(0))
    assert dx.shape == (0, 264)
    assert_equal(dweight, torch.zeros_like(weight))


@pytest.mark.parametrize('shape', [(2, 0, 64), (0, 3, 64), (1, 3, 64), (2, 3, 64)])
@pytest.mark.parametrize('tma', [False, True])
def test_batches_may_be_empty_and_results_go_where_told(shape, tma):
    x = torch.randn(shape).bfloat16()
    y, _, z = quant.norm_forward(x, None, 1e-6, residual=x)
    out, total = torch.empty_like(x), torch.empty_like(x)
    written, _, _ = quant.norm_forward(x, None, 1e-6, residual=x, out=out, residual_out=total)
    assert written is out
    assert_equal(out, y)
    assert_equal(total, z)
    (data, sf), *_ = quant.norm_forward_and_per_token_cast(x, None, 1e-6, 'e4m3', 32, use_tma_aligned_col_major_sf=tma)
    room = torch.empty_like(data)  # data alone: the scale factors are new
    given = quant.norm_forward_and_per_token_cast(
        x, None, 1e-6, 'e4m3', 32, use_tma_aligned_col_major_sf=tma, out=room
    )[0]
    assert given.data.data_ptr() == room.data_ptr()
    assert_equal(room, data)
    if tma and x.numel():
        assert sf.stride() == (2 * 4, 1, 4)  # the columns of a batch one behind the other
    assert_equal(given.sf, sf)


# Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'call, sentence',
    [
        (lambda x: quant.norm_forward(x, None, 1e-6, residual_out=x), 'residual_out must come with residual'),
        (lambda x: quant.norm_forward(x, x[0, :4], 1e-6), 'weight must be \\(hidden\\) with hidden = 8'),
        (lambda x: quant.norm_forward(x, None, 1e-6, residual=x.half()), 'residual must be bfloat16'),
        (lambda x: quant.norm_forward(x.new_empty(1, 1 << 17), None, 1e-6), 'hidden must be at most 65536'),
        (lambda x: quant.norm_forward(x[0], None, 1e-6), 'x must be \\(num_tokens, hidden\\) or'),
        (lambda x: quant.norm_backward(x, x, None, torch.empty(3)), 'rstd must be \\(num_tokens\\)'),
        (lambda x: quant.norm_backward(x.float(), x, None, torch.empty(2)), 'out_grad must be bfloat16'),
        (lambda x: quant.norm_backward(x, x, x[0], torch.empty(2), weight_grad=x[0, :4]), 'weight_grad must be'),
        (lambda x: quant.norm_forward_and_per_token_cast(x, None, 1e-6, 'e4m3', 16, out=3), 'out must be a pair'),
        (lambda x: quant.norm_forward_and_per_token_cast(x, None, 1e-6, 'e4m3', 48), 'num_per_channels must be one of'),
    ],
)
def test_errors_name_what_is_wrong(call, sentence):
    with pytest.raises(ArgumentError, match=f'norm.norm_[a-z_]+: {sentence}'):
        call(rows(2, 8))


@pytest.mark.skipif(torch.cuda.is_available(), reason='the interpreter looks for races')
@pytest.mark.parametrize('hidden', [512, 2304])
def test_the_sums_of_two_rows_of_a_block_do_not_meet(hidden):
    """One thread block has several rows, each computed by several warps."""
    x, dy, weight = rows(7, hidden), rows(7, hidden, seed=1), rows(1, hidden, seed=2)[0]
    _, rstd = norm_forward.call(x, weight)
    static = (hidden, x.dtype, weight.dtype, False, 16, False)
    warps = 2 if hidden == 512 else 8
    dx, shares = torch.empty_like(x), torch.empty(1, hidden)
    config = dict(warps=warps, block_warps=16, stages=2, kept=1)
    with forced_config(norm_backward_kernel, **config), knobs(interpret=True, checks='races'):
        launch(norm_backward_kernel, static, dy, x, weight, rstd, None, dx, shares, 1.0, 1)
    expected = twin.norm_backward(dy, x, rstd, weight)
    torch.testing.assert_close(dx, expected[0], rtol=2e-2, atol=1e-4)
    torch.testing.assert_close(shares[0], expected[1].float(), rtol=2e-2, atol=2e-2)
