"""Packed weights: exact unpacking of every format, real checkpoint layouts, one sentence for bad input."""

import pickle

import pytest
import torch

from tile_kernels import ArgumentError
from tile_kernels.gemm import from_awq, from_compressed_tensors, from_gptq, pack_weight, quantize_weight
from tile_kernels.gemm.packed_weight import FORMATS
from tile_kernels.quant import per_token_cast

FP8 = torch.float8_e4m3fn
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def made(fmt, n, k, lead=(), dtype=torch.bfloat16):
    """Random codes that contain every value, factors, and zero points."""
    form = FORMATS[fmt]
    codes = torch.randint(256 if form.bits == 8 else 16, (*lead, n, k)).to(torch.uint8)
    codes.view(-1)[:256] = (torch.arange(256) % (1 << form.bits)).to(torch.uint8)[: codes.numel()]
    if form.element == 'e4m3':
        codes = torch.where((codes & 127) == 127, 0, codes).to(torch.uint8)
    groups = form.groups(k)
    shape = (*lead, -(-n // 128), groups) if form.blocks else (*lead, n, groups)
    if form.factor in ('any', 'f32'):
        scale = (torch.rand(shape) + 0.5).to(dtype if form.factor == 'any' else torch.float32)
    else:
        scale = torch.randint(100, 150, shape).to(torch.uint8) if form.factor == 'ue8m0' else torch.rand(shape).to(FP8)
    kind = {'s8': torch.int8, 'e4m3': FP8}.get(form.element, torch.uint8)
    zero = torch.randint(16, shape) if form.element == 'u4' else None
    whole = torch.rand(lead or (1,)) if fmt == 'e2m1_1x16_e4m3' else None
    return codes.view(kind), scale, zero, whole


def numbers(fmt, codes, scale, zero, whole):
    """The matrix, element by element."""
    form = FORMATS[fmt]
    n, k = codes.shape[-2:]
    values = codes.double() if form.element != 'e2m1' else LEVELS[(codes & 7).long()].double()
    if form.element == 'e2m1':
        values = torch.where(codes > 7, -values, values)
    spread = [x if x is None else x.repeat_interleave(form.group or k, -1)[..., :k] for x in (scale, zero)]
    if form.factor == 'ue8m0':
        spread[0] = torch.exp2(spread[0].double() - 127)
    if form.blocks:
        spread[0] = spread[0].repeat_interleave(128, -2)[..., :n, :]
    if form.element == 'u4':
        values = values - (8 if zero is None else spread[1].double())
    values = values * spread[0].double()
    return values if whole is None else values * whole.double().reshape(*codes.shape[:-2], 1, 1)


@pytest.mark.parametrize('fmt', FORMATS)
def test_packing_is_exact_for_every_code(fmt):
    for n, k, lead in ((40, 128, ()), (13, 256, ()), (8, 128, (3,))):
        for dtype in (torch.bfloat16, torch.float16, torch.float32)[: 3 if FORMATS[fmt].factor == 'any' else 1]:
            codes, scale, zero, whole = made(fmt, n, k, lead, dtype)
            weight = pack_weight(codes, scale, zero, fmt=fmt, global_scale=whole)
            assert weight.shape == codes.shape
            assert torch.equal(weight.unpack().view(torch.uint8), codes.view(torch.uint8))
            expected = numbers(fmt, codes, scale, zero, whole)
            torch.testing.assert_close(weight.dequantize(torch.float64), expected, rtol=1e-6, atol=0)
            back, zeros = weight.factors()
            assert torch.equal(back.view(scale.dtype) if back.element_size() == 1 else back, scale)
            assert zero is None or torch.equal(zeros.long(), zero)


@pytest.mark.parametrize('fmt', ['u4_1xk', 's8_1xk', 'e4m3_1xk_f32', 'e4m3_128x128_f32'])
def test_any_multiple_of_eight_channels(fmt):
    for k in (8, 72, 136):
        codes, scale, zero, _ = made(fmt, 7, k)
        weight = pack_weight(codes, scale.squeeze(-1) if 'xk' in fmt else scale, zero, fmt=fmt)
        assert torch.equal(weight.unpack().view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(weight.dequantize().double(), numbers(fmt, codes, scale, zero, None).float().double())


def test_transposed_permuted_and_two_codes_to_a_byte():
    codes, scale, zero, _ = made('u4_1x32', 24, 96)
    plain = pack_weight(codes, scale, zero, fmt='u4_1x32')
    assert torch.equal(pack_weight(codes.T, scale.T, zero.T, fmt='u4_1x32', order='kn').codes, plain.codes)
    perm = torch.randperm(96)
    shuffled = pack_weight(codes, scale, zero, fmt='u4_1x32', perm=perm)
    assert torch.equal(shuffled.unpack(), codes)
    inner = pack_weight(codes[:, perm], scale, zero, fmt='u4_1x32').dequantize()
    assert torch.equal(shuffled.dequantize()[:, perm], inner)
    codes, scale, _, _ = made('e2m1_1x32_ue8m0', 24, 96)
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    assert torch.equal(
        pack_weight(pairs, scale, fmt='e2m1_1x32_ue8m0').codes, pack_weight(codes, scale, fmt='e2m1_1x32_ue8m0').codes
    )


def test_a_packed_weight_travels():
    weight = quantize_weight(torch.randn(24, 128), 'u4_1x64')
    leaves, spec = torch.utils._pytree.tree_flatten(weight)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert len(leaves) == 2 and again.fmt == 'u4_1x64' and torch.equal(again.unpack(), weight.unpack())
    assert torch.equal(pickle.loads(pickle.dumps(weight)).unpack(), weight.unpack())
    assert weight.nbytes == 32 * 128 // 2 + 32 * 2 * 2 and 'u4_1x64' in repr(weight)


def words_of(codes, dim, order=range(8), bits=4):
    """Codes packed as checkpoints have them: value order[i] of a word in its i-th nibble."""
    parts = codes.unflatten(dim, (-1, 32 // bits)).long()
    total = sum(parts.select(dim + 1, column) << bits * place for place, column in enumerate(order))
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


@pytest.mark.parametrize('groups', [1, 2, 4])
def test_checkpoints_of_gptq(groups):
    n, k = 24, 128
    codes, zero = torch.randint(16, (k, n)), torch.randint(1, 16, (groups, n))
    scales = torch.rand(groups, n).half()
    for g_idx in (None, torch.arange(k) // (k // groups), torch.arange(k).flip(0) // (k // groups)):
        group = torch.arange(k) // (k // groups) if g_idx is None else g_idx
        expected = ((codes - zero[group]) * scales[group].double()).T
        for version, stored in ((1, zero - 1), (2, zero)):
            weight = from_gptq(
                qweight=words_of(codes, 0), qzeros=words_of(stored, 1), scales=scales, g_idx=g_idx, version=version
            )
            torch.testing.assert_close(weight.dequantize(torch.float64), expected, rtol=1e-6, atol=0)
            assert (weight.perm is not None) == (g_idx is not None and groups > 1 and int(g_idx[0]) != 0)
    assert from_gptq(qweight=words_of(codes, 0), scales=scales).zero is None


def test_checkpoints_of_awq():
    n, k = 16, 128
    codes, zero, scales = torch.randint(16, (k, n)), torch.randint(16, (2, n)), torch.rand(2, n).half()
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    weight = from_awq(qweight=words_of(codes, 1, order), qzeros=words_of(zero, 1, order), scales=scales)
    group = torch.arange(k) // 64
    expected = ((codes - zero[group]) * scales[group].double()).T
    torch.testing.assert_close(weight.dequantize(torch.float64), expected, rtol=1e-6, atol=0)


def test_checkpoints_of_compressed_tensors():
    n, k = 24, 128
    codes, scale = torch.randint(-8, 8, (n, k)), torch.rand(n, 4).bfloat16()
    zero = torch.randint(-8, 8, (n, 4))
    group = torch.arange(k) // 32
    packed = dict(weight_packed=words_of(codes + 8, 1), weight_scale=scale, weight_shape=torch.tensor([n, k]))
    expected = codes * scale[:, group].double()
    torch.testing.assert_close(from_compressed_tensors(**packed).dequantize(torch.float64), expected, rtol=1e-6, atol=0)
    shifted = from_compressed_tensors(**packed, weight_zero_point=words_of(zero + 8, 0))
    expected = (codes - zero[:, group]) * scale[:, group].double()
    torch.testing.assert_close(shifted.dequantize(torch.float64), expected, rtol=1e-6, atol=0)
    wide, whole = torch.randint(-128, 128, (n, k)), torch.rand(n, 1)
    weight = from_compressed_tensors(weight_packed=words_of(wide + 128, 1, range(4), 8), weight_scale=whole, num_bits=8)
    assert weight.fmt == 's8_1xk' and torch.equal(weight.unpack(), wide.to(torch.int8))
    g_idx = torch.randperm(k) // 32
    shuffled = from_compressed_tensors(**packed, weight_g_idx=g_idx)
    torch.testing.assert_close(shuffled.dequantize(torch.float64), codes * scale[:, g_idx].double(), rtol=1e-6, atol=0)


def test_fp4_codes_are_those_of_per_token_cast():
    x = torch.randn(16, 64)
    codes, sf = per_token_cast(x, 'e2m1_1x32_f32p2')
    given = pack_weight(codes, (sf.log2() + 127).to(torch.uint8), fmt='e2m1_1x32_ue8m0')
    weight = quantize_weight(x, 'e2m1_1x32_ue8m0')
    same = weight.unpack() == given.unpack()
    assert same[weight.unpack() % 8 != 0].all() and torch.equal(weight.factors()[0], given.factors()[0])
    assert torch.equal(weight.dequantize(), given.dequantize())
    codes, sf = per_token_cast(x, 'e2m1_1x16_e4m3')
    given = pack_weight(codes, sf, fmt='e2m1_1x16_e4m3')
    low, high = codes.view(torch.uint8) & 15, codes.view(torch.uint8) >> 4
    assert torch.equal(given.unpack(), torch.stack((low, high), -1).flatten(1))


@pytest.mark.parametrize('fmt', FORMATS)
def test_quantizing_stays_within_half_a_step(fmt):
    x = torch.randn(24, 256)
    bound = {'u4': 0.16, 's8': 0.01, 'e4m3': 0.04, 'e2m1': 0.16}[FORMATS[fmt].element]
    error = (quantize_weight(x, fmt).dequantize() - x).norm() / x.norm()
    assert error < bound
    assert not quantize_weight(torch.zeros(8, 128), fmt).dequantize().any()


@pytest.mark.parametrize(
    ('change', 'sentence'),
    [
        (dict(fmt='u4_1x99'), 'pack_weight: fmt must be one of u4_1x128'),
        (dict(codes=torch.full((8, 128), 16)), 'codes must be from 0 to 15 for u4_1x64, got 16 to 16'),
        (dict(codes=torch.zeros(8, 128)), 'codes must be integers for u4_1x64'),
        (
            dict(codes=torch.zeros(8, 96, dtype=torch.int8)),
            'the channels of codes must be a multiple of the group of 64',
        ),
        (dict(scale=torch.ones(8, 4)), r'scale must be \(8, 2\) for u4_1x64'),
        (dict(scale=torch.ones(8, 2).double()), 'scale must be bfloat16 or float16 or float32'),
        (dict(zero=torch.full((8, 2), 16)), 'zero must be integers from 0 to 15, got 16 to 16'),
        (dict(zero=torch.zeros(8, 1)), r'zero must be \(8, 2\)'),
        (dict(order='nn'), "order must be 'nk' or 'kn'"),
        (dict(perm=torch.zeros(128, dtype=torch.int64)), 'perm must have every channel from 0 to 127 once'),
        (dict(global_scale=1.0), 'global_scale must be None for u4_1x64'),
        (dict(fmt='e4m3_1xk_f32', codes=torch.full((8, 128), torch.nan).to(FP8)), 'codes must be finite'),
        (dict(fmt='s8_1xk'), 'codes must be int8 for s8_1xk'),
        (dict(codes=torch.zeros(8, 0, dtype=torch.int64)), 'codes must not be empty'),
    ],
)
def test_bad_weights_are_told(change, sentence):
    given = dict(codes=torch.zeros(8, 128, dtype=torch.int64), scale=torch.ones(8, 2), fmt='u4_1x64') | change
    with pytest.raises(ArgumentError, match=sentence):
        pack_weight(given.pop('codes'), given.pop('scale'), given.pop('zero', None), **given)


@pytest.mark.parametrize(
    ('call', 'sentence'),
    [
        (lambda w, s: from_gptq(qweight=w.float(), scales=s), 'from_gptq: qweight must be a matrix of int32 words'),
        (lambda w, s: from_gptq(qweight=w, scales=s[:, :4]), r"from_gptq: scales must be \('groups', 8\)"),
        (
            lambda w, s: from_gptq(qweight=w, scales=s.expand(8, 8)),
            'the group of scales must be all channels or one of',
        ),
        (lambda w, s: from_gptq(qweight=w, scales=s, version=3), 'version must be 1 or 2'),
        (lambda w, s: from_gptq(qweight=w, scales=s, g_idx=torch.arange(8)), r'g_idx must be \(128,\)'),
        (
            lambda w, s: from_gptq(qweight=w, scales=s.expand(2, 8), g_idx=torch.zeros(128)),
            'g_idx must have 64 channels',
        ),
        (lambda w, s: from_awq(qweight=w, scales=s), r"from_awq: scales must be \('groups', 64\)"),
        (
            lambda w, s: from_compressed_tensors(weight_packed=w, weight_scale=s),
            r"weight_scale must be \(16, 'groups'\)",
        ),
        (lambda w, s: from_compressed_tensors(weight_packed=w, weight_scale=s, num_bits=3), 'num_bits must be 4 or 8'),
    ],
)
def test_foreign_layouts_are_told(call, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        call(torch.zeros(16, 8, dtype=torch.int32), torch.ones(1, 8))
