"""Product with weights of which two of four neighboring channels are kept.

    d[m, n] = sum_k a[m, k] * b[n, k],    b[n, 4 i : 4 i + 4] has at most two numbers that are not 0

A row is stored as k / 2 values and k / 8 bytes. A byte has four indices of two bits, the lowest first: two for each of
two groups of four, rising. On Hopper sparse tensor cores read this as it is, in half precision and for k that is a
multiple of 128. In other cases it is expanded, which saves memory but no products. Few rows expand tiles in shared
memory, and many rows expand all of it to a buffer.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import gpu_of, launch, num_workers
from tile_kernels.core.op import op
from tile_kernels.gemm._checks import HALVES, check_operands, gathered
from tile_kernels.gemm._macros import DENSE, FP8
from tile_kernels.gemm._samples import SUMS
from tile_kernels.gemm.gemm_sparse24_kernels import expand24_kernel, sparse24_kernel, sparse24_wgmma_kernel
from tile_kernels.gemm.grouped_gemm_kernels import PRODUCT

KINDS = (*HALVES, FP8)
#: Up to this many rows, tiles are expanded instead of the whole matrix.
FEW_ROWS = 256


@dataclass(frozen=True)
class Sparse24:
    """A matrix (n, k) of which two of four neighboring channels are kept; `compress24` makes it.

    `values` is (n, k / 2), `index` (n, k / 8) uint8.
    """

    values: Tensor
    index: Tensor

    @property
    def shape(self) -> torch.Size:
        """Logical shape."""
        return torch.Size((self.values.shape[0], 2 * self.values.shape[1]))

    def dense(self) -> Tensor:
        """The matrix with its zeros."""
        n, k = self.shape
        byte = self.index.long().unsqueeze(-1)
        places = torch.cat([byte >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).view(n, k // 4, 2)
        bits = self.values.view(torch.uint8) if self.values.element_size() == 1 else self.values
        matrix = torch.zeros((n, k // 4, 4), dtype=bits.dtype, device=bits.device)
        return matrix.scatter_(2, places, bits.view(n, k // 4, 2)).view(n, k).view(self.values.dtype)

    def to(self, device: torch.device | str | int) -> 'Sparse24':
        """The same matrix on another device."""
        return Sparse24(self.values.to(device), self.index.to(device))


def _restore(children: Any, about: Any) -> Sparse24:
    return Sparse24(*children)


torch.utils._pytree.register_pytree_node(
    Sparse24, lambda b: ([b.values, b.index], None), _restore, serialized_type_name='tile_kernels.Sparse24'
)


def compress24(b: Tensor, *, prune: bool = False) -> Sparse24:
    """Keep two of four neighboring channels of a matrix.

    Args:
        b: (n, k) bfloat16, float16 or float8_e4m3fn, k a multiple of 8.
        prune: keep the two largest magnitudes of every four; otherwise more than two numbers are an error. Of equal
            magnitudes the first are kept.

    Returns:
        The compressed matrix.
    """
    if not isinstance(b, Tensor) or b.dim() != 2 or b.dtype not in KINDS:
        check.fail('b', 'must be a matrix of bfloat16, float16 or float8_e4m3fn', check.describe(b), op='compress24')
    n, k = b.shape
    if k % 8 or n == 0 or k == 0:
        check.fail('b', 'must be (n, k) with k a multiple of 8', check.describe(b), op='compress24')
    fours = b.float().reshape(n, k // 4, 4)
    if not prune and bool(((fours != 0).sum(-1) > 2).any()):
        rule = 'must have at most two of four neighboring channels that are not 0'
        check.fail('b', rule, 'more', hint='prune=True keeps the two largest', op='compress24')
    size = fours.abs().nan_to_num(torch.inf) if prune else (fours != 0).float()
    kept = size.sort(dim=-1, descending=True, stable=True).indices[..., :2].sort(dim=-1).values
    bits = b.contiguous().view(torch.uint8) if b.element_size() == 1 else b
    values = bits.reshape(n, k // 4, 4).gather(2, kept).reshape(n, k // 2).contiguous().view(b.dtype)
    places = kept.reshape(n, k // 8, 4)
    index = sum(places[..., i] << 2 * i for i in range(4))
    return Sparse24(values, index.to(torch.uint8))  # type: ignore[union-attr]


# Ops ----------------------------------------------------------------------------------------


def check_sparse(a: Tensor, values: Tensor, index: Tensor) -> tuple[int, int, int]:
    """Check the operands; returns m, n, k."""
    m, k = check.shape(a, 'a', 'm k', dtype=KINDS)
    check.multiple(k, 16 if a.dtype is FP8 else 8, 'k')
    check.packed(values, 'values', 'n half_k', a.dtype, half_k=k // 2)
    n = values.shape[0]
    check.packed(index, 'index', 'n bytes', torch.uint8, n=n, bytes=k // 8)
    check.multiple(n, 8, 'n')
    check_operands((k,), a=a)
    if check.vector_bytes(values.view(-1)) < 16:
        check.fail('values', 'must begin at a multiple of 16 bytes', check.describe(values), hint='pass values.clone()')
    check.same_device(a=a, values=values, index=index)
    return m, n, k


def result_dtype(a: Tensor) -> torch.dtype:
    """The dtype of the product: bfloat16 for fp8."""
    return torch.bfloat16 if a.dtype is FP8 else a.dtype


@op(outputs='da')
def gemm_sparse24_bwd(dd: Tensor, a: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """The gradient of `gemm_sparse24` with respect to a: da = dd @ b, with b expanded to a buffer.

    Args:
        dd: (m, n) gradient of the result.
        a: as in `gemm_sparse24`; only its shape and dtype are used.
        values: as there.
        index: as there.

    Returns:
        (m, k) of a's dtype, summed in float32.
    """
    m, n, k = check_sparse(a, values, index)
    dtype = result_dtype(a)
    check.shape(dd, 'dd', 'm n', dtype=dtype, m=m, n=n)
    check_operands((n,), dd=dd)
    check.same_device(a=a, dd=dd)
    da = torch.empty((m, k), dtype=dtype, device=a.device)
    if m > 0:
        w = torch.empty((n, k), dtype=dtype, device=a.device)
        launch(expand24_kernel, (n, k, a.dtype), values, index, w)
        launch(PRODUCT, (k, n, DENSE, False, dtype), dd, w.view(1, n, k), None, da, num_workers(dd))
    return da.to(a.dtype)


@op(outputs='d', backward=gemm_sparse24_bwd)
def _gemm_sparse24(a: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """The product of a with a 2:4 sparse matrix; see `gemm_sparse24`.

    Args:
        a: (m, k) bfloat16, float16 or float8_e4m3fn, contiguous.
        values: (n, k / 2) of a's dtype, of a `Sparse24`.
        index: (n, k / 8) uint8, of a `Sparse24`.

    Returns:
        (m, n) of a's dtype, bfloat16 for fp8, summed in float32.
    """
    m, n, k = check_sparse(a, values, index)
    d = torch.empty((m, n), dtype=result_dtype(a), device=a.device)
    static = (n, k, a.dtype)
    if sparse24_wgmma_kernel.claims(static, gpu_of(a)):
        launch(sparse24_wgmma_kernel, static, a, values, index.view(torch.int16), d, num_workers(a))
    elif m <= FEW_ROWS:
        launch(sparse24_kernel, static, a, values, index, d)
    else:
        w = torch.empty((n, k), dtype=d.dtype, device=a.device)
        launch(expand24_kernel, static, values, index, w)
        launch(PRODUCT, (n, k, DENSE, True, d.dtype), a.to(d.dtype), w.view(1, n, k), None, d, num_workers(a))
    return d


# Public function ----------------------------------------------------------------------------


@_gemm_sparse24.public
def gemm_sparse24(a: Tensor, b: Sparse24) -> Tensor:
    """The product a @ b.T with a matrix of which two of four neighboring channels are kept, summed in float32.

    Args:
        a: (m, k) bfloat16, float16 or float8_e4m3fn; strided rows are copied.
        b: a `Sparse24` of (n, k) of a's dtype, n a multiple of 8; see `compress24`. It has no gradient.

    Returns:
        (m, n) of a's dtype, bfloat16 for fp8.
    """
    if not isinstance(b, Sparse24):
        check.fail('b', 'must be a Sparse24', check.describe(b), hint='compress24 makes one')
    if check.tensor(a, 'a').dim() != 2 or a.shape[1] != b.shape[1]:
        check.fail('a', f'must be (m, {b.shape[1]})', check.describe(a))
    if a.dtype is not FP8:
        (a,) = autocast(a)
    return gemm_sparse24.call(gathered(a, 'a'), b.values, b.index)


# Cases --------------------------------------------------------------------------------------

BF16, F16 = torch.bfloat16, torch.float16


def _make(m: int, n: int, k: int, dtype: torch.dtype) -> dict:
    pairs = torch.tensor([first | second << 2 for second in range(4) for first in range(second)])
    low, high = (pairs[torch.randint(6, (n, k // 8))] for _ in range(2))
    values = torch.randn(n, k // 2) if dtype is FP8 else torch.randn(n, k // 2) / k**0.5
    return dict(a=torch.randn(m, k).to(dtype), values=values.to(dtype), index=(low | high << 4).to(torch.uint8))


def _make_bwd(m: int, n: int, k: int, dtype: torch.dtype) -> dict:
    made = _make(m, n, k, dtype)
    return dict(dd=torch.randn(m, n, dtype=result_dtype(made['a'])), **made)


def _flops(a: Tensor, values: Tensor, **others: Tensor) -> int:
    return 2 * a.shape[0] * values.numel()


SMOKE = grid(m=[0, 1, 70], n=[136], k=[72], dtype=[BF16]) + grid(m=[5], n=[8], k=[8], dtype=[F16])
FP8_SMOKE = grid(m=[5, 260], n=[24], k=[80], dtype=[FP8])
WHOLE_SMOKE = grid(m=[70], n=[136], k=[384], dtype=[BF16])  # whole stages of indices
BENCH = grid(m=[8192], n=[8192], k=[8192], dtype=[BF16, FP8]) + grid(m=[64], n=[8192], k=[8192], dtype=[FP8])
_gemm_sparse24.cases(
    make=_make,
    match=dict(rtol=1e-2, atol=2e-2),
    smoke=SMOKE + FP8_SMOKE + WHOLE_SMOKE,
    full=grid(m=[1, 333], n=[577 * 8], k=[1104, 1152], dtype=[BF16, F16, FP8]),
    bench=BENCH,
    flops=_flops,
)
gemm_sparse24_bwd.cases(
    make=_make_bwd,
    match=SUMS,
    smoke=SMOKE + FP8_SMOKE,
    bench=BENCH[:1],
    flops=lambda dd, **others: 2 * _flops(**others),
)
