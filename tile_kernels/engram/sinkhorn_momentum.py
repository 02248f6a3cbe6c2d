"""Momentum of the Engram optimiser.

    m      <- fma(m, beta1, (1 - beta1) * g)                in float32; the buffer keeps it in its own dtype
    update  = fma(g, 1 - beta1, beta1 * m)                  with Nesterov, from the m not yet rounded; otherwise m

A thread owns eight neighbouring elements. Memory bound: the floor is reading g and m and writing m and the update.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op
from tile_kernels.engram._rows import SLOT
from tile_kernels.engram._sinkhorn import DTYPES

# Kernel -------------------------------------------------------------------------------------


@macro
def load_slot(x, first, piece, slot_local):
    """Read eight neighbouring elements, `piece` in an access, or what is left of them at the end."""
    if first + SLOT <= x.shape[0]:
        for p in T.unroll(SLOT // piece):
            for e in T.vectorized(piece):
                slot_local[p * piece + e] = x[first + p * piece + e]
    else:
        T.clear(slot_local)
        for e in T.unroll(SLOT):
            if first + e < x.shape[0]:
                slot_local[e] = x[first + e]


@macro
def store_flat_slot(slot_local, x, first, piece):
    """The inverse of `load_slot`."""
    if first + SLOT <= x.shape[0]:
        for p in T.unroll(SLOT // piece):
            for e in T.vectorized(piece):
                x[first + p * piece + e] = slot_local[p * piece + e]
    else:
        for e in T.unroll(SLOT):
            if first + e < x.shape[0]:
                x[first + e] = slot_local[e]


@kernel(
    choose=lambda *static: dict(num_threads=256),
    space=dict(num_threads=(128, 256, 512)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True, 'TL_ENABLE_LOWER_LDGSTG': True},
)
def sinkhorn_momentum_kernel(
    grad_dtype: torch.dtype, buffer_dtype: torch.dtype, vector_bytes: int, nesterov: bool, *, num_threads: int
):
    """Accesses of at most `vector_bytes` bytes."""
    num_elements = T.dynamic('num_elements', 'int64')  # tables are large
    grad_piece = min(SLOT, vector_bytes // grad_dtype.itemsize)
    buffer_piece = min(SLOT, vector_bytes // buffer_dtype.itemsize)

    @T.prim_func
    def sinkhorn_momentum(
        grad: T.Tensor((num_elements,), T.dtype(grad_dtype)),
        momentum_buffer: T.Tensor((num_elements,), T.dtype(buffer_dtype)),
        update: T.Tensor((num_elements,), T.float32),
        keep: T.float32,
        take: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_elements, num_threads * SLOT), threads=num_threads) as pid:
            grad_local = T.alloc_local((SLOT,), T.dtype(grad_dtype))
            buffer_local = T.alloc_local((SLOT,), T.dtype(buffer_dtype))
            m_local = T.alloc_local((SLOT,), T.float32)
            first = (T.cast(pid, 'int64') * num_threads + T.get_thread_binding()) * SLOT
            if first < num_elements:
                load_slot(grad, first, grad_piece, grad_local)
                load_slot(momentum_buffer, first, buffer_piece, buffer_local)
                for e in T.unroll(SLOT):
                    g = T.cast(grad_local[e], T.float32)
                    m_local[e] = T.ieee_fmaf(T.cast(buffer_local[e], T.float32), keep, take * g)
                for e in T.vectorized(SLOT):
                    buffer_local[e] = T.cast(m_local[e], T.dtype(buffer_dtype))
                store_flat_slot(buffer_local, momentum_buffer, first, buffer_piece)
                if nesterov:
                    for e in T.unroll(SLOT):
                        m_local[e] = T.ieee_fmaf(T.cast(grad_local[e], T.float32), take, keep * m_local[e])
                store_flat_slot(m_local, update, first, 4)

    return sinkhorn_momentum


# Op -----------------------------------------------------------------------------------------


@op(outputs='update')
def engram_sinkhorn_momentum_update(grad: Tensor, momentum_buffer: Mut, beta1: float, nesterov: bool = True) -> Tensor:
    """Move the momentum towards the gradient and give the update.

    Args:
        grad: float32 or bfloat16, contiguous, any shape.
        momentum_buffer: float32 or bfloat16, contiguous, shape of grad; overwritten.
        beta1: share of the momentum that stays.
        nesterov: look one step ahead.

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


# Cases --------------------------------------------------------------------------------------


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
    smoke=grid(shape=[(0, 4), (3, 256), (5, 67)], dtype=DTYPES, buffer_dtype=DTYPES)
    + grid(shape=[(9,)], nesterov=[False], beta1=[0.3]),
    full=grid(shape=[(4001, 1280)], dtype=DTYPES, buffer_dtype=DTYPES),
    bench=grid(shape=[(100003, 512)], dtype=DTYPES)
    + grid(shape=[(100003, 512)], dtype=[torch.bfloat16], buffer_dtype=[torch.bfloat16]),
)
