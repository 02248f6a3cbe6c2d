import copy
import io
import pickle

import pytest
import torch

from tile_kernels import ArgumentError, QuantFormat, QuantTensor, moe, quant

NAMES = [
    'e4m3_1x128_f32',
    'e5m2_1x64_f32p2',
    'e2m1_1x16_e4m3',
    'e4m3_128x1_ue8m0x4',
    'e5m6_1xall_f32',
    'e4m3_1x32_ue8m0x4_col',
]


@pytest.mark.parametrize('name', NAMES)
def test_name_round_trip(name):
    fmt = QuantFormat.parse(name)
    assert str(fmt) == name and QuantFormat.parse(name) is fmt and QuantFormat.parse(fmt) is fmt
    assert pickle.loads(pickle.dumps(fmt)) is fmt and copy.deepcopy(fmt) is fmt


@pytest.mark.parametrize(
    ('name', 'rows', 'cols', 'shape', 'stride', 'dtype'),
    [
        ('e4m3_1x128_f32', 5, 300, (5, 3), (3, 1), torch.float32),
        ('e4m3_1x128_f32_col', 5, 300, (5, 3), (1, 8), torch.float32),
        ('e4m3_1x128_ue8m0x4', 5, 1300, (5, 3), (3, 1), torch.int32),
        ('e4m3_1x128_ue8m0x4_col', 5, 1300, (5, 3), (1, 8), torch.int32),
        ('e4m3_1x128_ue8m0x4_col', 8, 128, (8, 1), (1, 8), torch.int32),
        ('e4m3_1x128_f32_col', 0, 300, (0, 3), (1, 1), torch.float32),
        ('e2m1_1x16_e4m3_col', 5, 64, (5, 4), (1, 16), torch.float8_e4m3fn),
        ('e4m3_128x128_f32', 300, 300, (3, 3), (3, 1), torch.float32),
        ('e4m3_128x1_ue8m0x4', 700, 64, (2, 64), (64, 1), torch.int32),
        ('e4m3_1xall_f32', 5, 300, (5, 1), (1, 1), torch.float32),
        ('e4m3_allx1_f32', 5, 300, (1, 300), (300, 1), torch.float32),
    ],
)
def test_scale_factor_layouts(name, rows, cols, shape, stride, dtype):
    sf = QuantFormat.parse(name).empty_sf(rows, cols, torch.device('cpu'))
    assert (tuple(sf.shape), sf.stride(), sf.dtype) == (shape, stride, dtype)


def test_columns_of_column_major_factors_lie_inside_the_storage():
    sf = QuantFormat.parse('e4m3_1x128_f32_col').empty_sf(5, 300, torch.device('cpu'))
    assert sf.untyped_storage().nbytes() >= 8 * 3 * 4


@pytest.mark.parametrize(
    ('flags', 'name'),
    [
        ({}, 'e4m3_1x128_f32'),
        ({'round_sf': True}, 'e4m3_1x128_f32p2'),
        ({'round_sf': True, 'use_tma_aligned_col_major_sf': True}, 'e4m3_1x128_f32p2_col'),
        ({'round_sf': True, 'use_packed_ue8m0': True}, 'e4m3_1x128_ue8m0x4'),
        ({'use_e4m3_sf': True}, 'e4m3_1x128_e4m3'),
    ],
)
def test_flags_name_one_format(flags, name):
    assert QuantFormat.from_flags('e4m3', (1, 128), **flags) is QuantFormat.parse(name)


@pytest.mark.parametrize(
    ('flags', 'sentence'),
    [
        ({'use_packed_ue8m0': True}, 'use_packed_ue8m0 must come with round_sf=True'),
        ({'use_e4m3_sf': True, 'round_sf': True}, 'use_e4m3_sf must not be combined'),
    ],
)
def test_flags_without_a_meaning_are_errors(flags, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        QuantFormat.from_flags('e4m3', (1, 128), **flags)


@pytest.mark.parametrize(
    ('name', 'sentence'),
    [
        ('fp8', "^QuantFormat.parse: fmt must be a whole format <data>_.*, e.g. e4m3_1x128_f32, got 'fp8'$"),
        ('e4m3_1x128', 'must be a whole format'),
        ('e3m3_1x128_f32', "fmt must have data of e4m3, e5m2, e2m1, e5m6, got 'e3m3_1x128_f32'"),
        ('e4m3_1x128_f64', "fmt must have scale factors of f32, f32p2, ue8m0x4, e4m3, got 'e4m3_1x128_f64'"),
        ('e4m3_1x0_f32', 'or all for the whole extent'),
    ],
)
def test_bad_names_are_sentences(name, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        QuantFormat.parse(name)


@pytest.mark.parametrize(
    ('name', 'meant'),
    [
        ('e4m3_128_f32', 'e4m3_1x128_f32'),
        ('E4M3_1x128_F32', 'e4m3_1x128_f32'),
        ('e4m3_1x64_ue8m0', 'e4m3_1x64_ue8m0x4'),
        ('e2m1_1x48_f16', 'e2m1_1x48_f32'),
        ('e2m1_1x32_f32_row', 'e2m1_1x32_f32_col'),
    ],
)
def test_a_misspelled_format_names_the_right_one(name, meant):
    with pytest.raises(ArgumentError, match=f'did you mean {meant}[?]$'):
        quant.per_token_cast(torch.zeros(4, 128), name)


def test_a_misspelled_option_names_the_right_one():
    with pytest.raises(ArgumentError, match=r"scoring must be one of .*, got 'Soft_max'; did you mean softmax\?$"):
        moe.topk_gating(torch.zeros(4, 16), top_k=2, scoring='Soft_max')
    with pytest.raises(ArgumentError, match=r"fmt must be one of .*, got 'e4m'; did you mean e4m3\?$"):
        quant.per_token_cast(torch.zeros(4, 128), 'e4m', 128)


def test_a_quantised_tensor_is_a_pair():
    q = QuantFormat.parse('e2m1_1x32_f32').empty(4, 64, torch.device('cpu'))
    data, sf = q
    assert data is q.data and sf is q.sf and len(q) == 2
    assert q.shape == (4, 64) and data.shape == (4, 32)
    again = pickle.loads(pickle.dumps(q))
    assert isinstance(again, QuantTensor) and again.fmt is q.fmt
    leaves, spec = torch.utils._pytree.tree_flatten(q)
    assert len(leaves) == 2 and torch.utils._pytree.tree_unflatten(leaves, spec).fmt is q.fmt


@pytest.mark.parametrize('name', ['e4m3_1x32_f32', 'e4m3_1x32_ue8m0x4_col', 'e2m1_1x32_f32_col'])
def test_a_quantised_tensor_moves_with_the_layout_of_its_factors(name):
    q = QuantFormat.parse(name).empty(5, 256, torch.device('cpu'))
    assert q.to('cpu') is q and q.cpu() is q
    moved = q.to('meta')
    assert moved.fmt is q.fmt and moved.shape == q.shape and moved.device == moved.sf.device == torch.device('meta')
    assert moved.sf.stride() == q.sf.stride()
    assert moved.sf.untyped_storage().nbytes() == q.sf.untyped_storage().nbytes()
    with pytest.raises(ArgumentError, match=r'^QuantTensor\.to: device must be a device, got torch\.float16; quant'):
        q.to(torch.float16)


@pytest.mark.parametrize(('name', 'cols'), [('e2m1_1x32_f32', 63), ('e5m6_1xall_f32', 12)])
def test_rows_that_do_not_fill_bytes_are_refused(name, cols):
    with pytest.raises(ArgumentError, match='hidden must be a multiple of'):
        QuantFormat.parse(name).empty(2, cols, torch.device('cpu'))


def test_a_quantized_tensor_has_no_arithmetic_but_joins_tuples():
    q = quant.per_token_cast(torch.randn(4, 128), 'e4m3', 128)
    for wrong in (lambda: q * 2, lambda: 2 * q, lambda: q + 1, lambda: -q, lambda: q @ q, lambda: q / 2):
        with pytest.raises(ArgumentError, match=r'has no arithmetic; quant.cast_back gives numbers'):
            wrong()
    assert len(q + (1,)) == 3


def test_a_quantized_tensor_loads_with_weights_only():
    q = quant.per_token_cast(torch.randn(4, 128), 'e4m3_1x128_ue8m0x4')
    file = io.BytesIO()
    torch.save({'q': q}, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)['q']
    assert again.fmt is q.fmt and torch.equal(again.sf, q.sf)
    assert torch.equal(again.data.view(torch.uint8), q.data.view(torch.uint8))
