import pytest
import torch

from tile_kernels import ArgumentError
from tile_kernels.core import check

X = torch.zeros(4, 6, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ('call', 'sentence'),
    [
        (lambda: check.shape(3, 'x', 'a b'), 'x must be a tensor, got int 3'),
        (lambda: check.shape(X, 'x', 'a b c'), r'x must be \(a, b, c\), got bfloat16\[4, 6\] on cpu'),
        (lambda: check.shape(X, 'x', 'a b', b=7), r'x must be \(a, b\) with b = 7, got bfloat16\[4, 6\] on cpu'),
        (lambda: check.shape(X, 'x', 'a b', dtype=torch.float32), r'x must be float32, got bfloat16\[4, 6\] on cpu'),
        (lambda: check.dtype(X, 'x', (torch.int32, torch.int64)), 'x must be int32 or int64, got bfloat16'),
        (lambda: check.multiple(7, 4, 'hidden'), 'hidden must be a multiple of 4, got 7'),
        (lambda: check.equal(1, 2, 'n'), 'n must be 2, got 1'),
        (lambda: check.one_of('a', ('b', 'c'), 'mode'), "mode must be one of b, c, got 'a'"),
        (lambda: check.at_least(0, 1, 'k'), 'k must be at least 1, got 0'),
        (lambda: check.at_most(9, 8, 'k'), 'k must be at most 8, got 9'),
        (lambda: check.contiguous(X.T, 'x'), r'x must be contiguous, got .* strides \(1, 6\); pass x.contiguous\(\)'),
        (lambda: check.unit_stride(X.T, 'x'), 'x must have stride 1 in the last dimension'),
        (
            lambda: check.same_device(x=X, b=None, y=torch.empty(1, device='meta')),
            r'y must be on the device of x \(cpu\), got float32\[1\] on meta',
        ),
    ],
)
def test_one_sentence_form(call, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        call()


@pytest.mark.parametrize(
    ('make', 'fact'),
    [
        (lambda x: x.to_sparse(), r'float32\[4, 6\] on cpu, layout sparse_coo; pass x.to_dense\(\)'),
        (lambda x: x.to_sparse_csr(), r'float32\[4, 6\] on cpu, layout sparse_csr; pass x.to_dense\(\)'),
        (lambda x: x.to_mkldnn(), r'float32\[4, 6\] on cpu, layout mkldnn; pass x.to_dense\(\)'),
        (
            lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8),
            r'qint8\[4, 6\] on cpu; pass x.dequantize\(\)',
        ),
        (
            lambda x: torch.nested.nested_tensor([x, x[1:]]),
            r'a nested tensor of float32; pass x.to_padded_tensor\(0.0\)',
        ),
    ],
    ids=['sparse', 'csr', 'mkldnn', 'quantised', 'nested'],
)
@pytest.mark.filterwarnings('ignore::UserWarning')  # that PyTorch's support is a prototype
def test_what_is_no_plain_memory_is_refused(make, fact):
    x = make(torch.ones(4, 6))
    for call in (
        lambda: check.tensor(x, 'x'),
        lambda: check.shape(x, 'x', 'a b'),
        lambda: check.dtype(x, 'x', torch.float32),
    ):
        with pytest.raises(ArgumentError, match=f'x must be a plain dense tensor, got {fact}'):
            call()


def test_passing_checks_return_the_extents():
    assert check.shape(X, 'x', 'a b', dtype=(torch.bfloat16, torch.float32), a=4) == (4, 6)


@pytest.mark.parametrize(
    ('offset', 'stride', 'expected'), [(0, 16, 16), (8, 16, 16), (4, 16, 8), (1, 16, 2), (0, 9, 2), (0, 12, 8)]
)
def test_vector_bytes_follow_pointer_and_stride(offset, stride, expected):
    base = torch.zeros(256, dtype=torch.bfloat16)
    assert base.data_ptr() % 16 == 0
    assert check.vector_bytes(base.as_strided((4, 8), (stride, 1), offset), None) == expected
