"""Momentum of the Engram optimizer.

    m      <- fma(m, beta1, (1 - beta1) * g)                in float32; the buffer keeps it in its own dtype
    update  = fma(g, 1 - beta1, beta1 * m)                  with Nesterov, from the m not yet rounded; otherwise m

A thread owns a few quads of elements. Neighbouring threads own neighbouring quads, so they write whole sectors.
Memory bound: the floor is reading g and m and writing m and the update.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op
from tile_kernels.engram._checks import DTYPES

#: Neighbouring elements of a thread: 16 bytes of float32.
QUAD = 4


@macro
def load_quads(x, first, stride, piece, whole, x_local):
    """Load quads first, first + stride, ..., with `piece` elements per access, or one at the end of the tensor."""
    if not whole:
        T.clear(x_local)
    for i in T.unroll(x_local.shape[0]):
        if whole:
            for p in T.unroll(QUAD // piece):
                for e in T.vectorized(piece):
                    x_local[i, p * piece + e] = x[first + i * stride + p * piece + e]
        else:
            for e in T.unroll(QUAD):
                if first + i * stride + e < x.shape[0]:
                    x_local[i, e] = x[first + i * stride + e]


@macro
def store_quads(x_local, x, first, stride, piece, whole):
    """The inverse of `load_quads`."""
    for i in T.unroll(x_local.shape[0]):
        if whole:
            for p in T.unroll(QUAD // piece):
                for e in T.vectorized(piece):
                    x[first + i * stride + p * piece + e] = x_local[i, p * piece + e]
        else:
            for e in T.unroll(QUAD):
                if first + i * stride + e < x.shape[0]:
                    x[first + i * stride + e] = x_local[i, e]


@kernel(
    choose=lambda *static: dict(quads=4, num_threads=256),
    space=dict(quads=(2, 4, 8), num_threads=(128, 256, 512)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True, 'TL_ENABLE_LOWER_LDGSTG': True},
)
def sinkhorn_momentum_kernel(
    grad_dtype: torch.dtype,
    buffer_dtype: torch.dtype,
    vector_bytes: int,
    nesterov: bool,
    *,
    quads: int,
    num_threads: int,
):
    """Accesses have at most `vector_bytes` bytes."""
    num_elements = T.dynamic('num_elements', 'int64')  # tables are large
    grad_piece = min(QUAD, vector_bytes // grad_dtype.itemsize)
    buffer_piece = min(QUAD, vector_bytes // buffer_dtype.itemsize)
    stride, span = num_threads * QUAD, num_threads * QUAD * quads

    @macro
    def move(grad, momentum_buffer, update, keep, take, first, whole):
        grad_local = T.alloc_local((quads, QUAD), T.dtype(grad_dtype))
        buffer_local = T.alloc_local((quads, QUAD), T.dtype(buffer_dtype))
        m_local = T.alloc_local((quads, QUAD), T.float32)
        load_quads(grad, first, stride, grad_piece, whole, grad_local)
        load_quads(momentum_buffer, first, stride, buffer_piece, whole, buffer_local)
        for i in T.unroll(quads):
            for e in T.unroll(QUAD):
                g = T.cast(grad_local[i, e], T.float32)
                m_local[i, e] = T.ieee_fmaf(T.cast(buffer_local[i, e], T.float32), keep, take * g)
            for e in T.vectorized(QUAD):
                buffer_local[i, e] = T.cast(m_local[i, e], T.dtype(buffer_dtype))
        store_quads(buffer_local, momentum_buffer, first, stride, buffer_piece, whole)
        if nesterov:
            for i in T.unroll(quads):
                for e in T.unroll(QUAD):
                    m_local[i, e] = T.ieee_fmaf(T.cast(grad_local[i, e], T.float32), take, keep * m_local[i, e])
        store_quads(m_local, update, first, stride, QUAD, whole)

    @T.prim_func
    def sinkhorn_momentum(
        grad: T.Tensor((num_elements,), T.dtype(grad_dtype)),
        momentum_buffer: T.Tensor((num_elements,), T.dtype(buffer_dtype)),
        update: T.Tensor((num_elements,), T.float32),
        keep: T.float32,
        take: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_elements, span), threads=num_threads) as pid:
            begin = T.cast(pid, 'int64') * span
            first = begin + T.get_thread_binding() * QUAD
            if begin + span <= num_elements:
                move(grad, momentum_buffer, update, keep, take, first, True)
            else:
                move(grad, momentum_buffer, update, keep, take, first, False)

    return sinkhorn_momentum


@op(outputs='update', name='sinkhorn_momentum_update')
def engram_sinkhorn_momentum_update(grad: Tensor, momentum_buffer: Mut, beta1: float, nesterov: bool = True) -> Tensor:
    """Update the momentum with the gradient and return the parameter update.

    Args:
        grad: float32 or bfloat16, contiguous, any shape.
        momentum_buffer: float32 or bfloat16, contiguous, shape of grad; overwritten.
        beta1: decay rate of the momentum.
        nesterov: use Nesterov momentum.

    Returns:
        The update, float32, shape of grad.
    """
    check.dtype(grad, 'grad', DTYPES)
    check.dtype(momentum_buffer, 'momentum_buffer', DTYPES)
    if momentum_buffer.shape != grad.shape:
        check.fail('momentum_buffer', 'must have the shape of grad', check.describe(momentum_buffer))
    check.contiguous(grad, 'grad')
    check.contiguous(momentum_buffer, 'momentum_buffer')
    check.same_device(grad=grad, momentum_buffer=momentum_buffer)
    update = torch.empty_like(grad, dtype=torch.float32)
    flat = (grad.view(-1), momentum_buffer.view(-1), update.view(-1))
    static = (grad.dtype, momentum_buffer.dtype, check.vector_bytes(*flat), nesterov)
    launch(sinkhorn_momentum_kernel, static, *flat, beta1, 1 - beta1)
    return update


def _make(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    buffer_dtype: torch.dtype = torch.float32,
    nesterov: bool = True,
    beta1: float = 0.95,
) -> dict:
    return dict(
        grad=torch.randn(shape, dtype=dtype),
        momentum_buffer=torch.randn(shape, dtype=buffer_dtype),
        beta1=beta1,
        nesterov=nesterov,
    )


engram_sinkhorn_momentum_update.cases(
    make=_make,
    match='bitwise',
    smoke=grid(shape=[(17, 256), (5, 67)], dtype=DTYPES, buffer_dtype=DTYPES)  # more than one block, less than one
    + grid(shape=[(0, 4)])
    + grid(shape=[(9,)], nesterov=[False], beta1=[0.3]),
    full=grid(shape=[(4001, 1280)], dtype=DTYPES, buffer_dtype=DTYPES),
    bench=grid(shape=[(100003, 512)], dtype=DTYPES)
    + grid(shape=[(100003, 512)], dtype=[torch.bfloat16], buffer_dtype=[torch.bfloat16]),
)
