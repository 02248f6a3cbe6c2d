"""Multiply the columns of a projection by the weight of the norm before it.

    y[j, k] = fn[j, k] norm_weight[k]
    dfn[j, k] += dy[j, k] norm_weight[k]                    dnorm_weight[k] += sum_j dy[j, k] fn[j, k]

A thread owns four neighboring columns and loops over the rows. Backward adds to gradients or writes them.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, empty, op
from tile_kernels.mhc._checks import F32

# Kernels -----------------------------------------------------------------------------------


@kernel(choose=lambda *static: dict(num_threads=64), space=dict(num_threads=(32, 64, 128)))
def merge_norm_weight_kernel(k: int, *, num_threads: int):
    """Blocks with the same index y have a row of fn."""
    num_mixes = T.dynamic('num_mixes')

    @T.prim_func
    def merge_norm_weight(
        fn: T.Tensor((num_mixes, k), T.float32),
        norm_weight: T.Tensor((k,), T.float32),
        y: T.Tensor((num_mixes, k), T.float32),
    ):
        with T.Kernel(T.ceildiv(k // 4, num_threads), num_mixes, threads=num_threads) as (pid, j):
            first = (pid * num_threads + T.get_thread_binding()) * 4
            if first < k:
                for e in T.vectorized(4):
                    y[j, first + e] = fn[j, first + e] * norm_weight[first + e]

    return merge_norm_weight


@kernel(choose=lambda *static: dict(num_threads=64), space=dict(num_threads=(32, 64, 128)))
def merge_norm_weight_bwd_kernel(k: int, accumulate: bool, *, num_threads: int):
    """Both gradients; `accumulate` adds them to dfn and dnorm_weight."""
    num_mixes = T.dynamic('num_mixes')

    @T.prim_func
    def merge_norm_weight_bwd(
        dy: T.Tensor((num_mixes, k), T.float32),
        fn: T.Tensor((num_mixes, k), T.float32),
        norm_weight: T.Tensor((k,), T.float32),
        dfn: T.Tensor((num_mixes, k), T.float32),
        dnorm_weight: T.Tensor((k,), T.float32),
    ):
        with T.Kernel(T.ceildiv(k // 4, num_threads), threads=num_threads) as pid:
            dy_local = T.alloc_local((4,), T.float32)
            fn_local = T.alloc_local((4,), T.float32)
            dfn_local = T.alloc_local((4,), T.float32)
            weight_local = T.alloc_local((4,), T.float32)
            total_local = T.alloc_local((4,), T.float32)
            first = (pid * num_threads + T.get_thread_binding()) * 4

            if first < k:
                T.clear(dfn_local)
                T.clear(total_local)
                for e in T.vectorized(4):
                    weight_local[e] = norm_weight[first + e]
                for j in T.serial(num_mixes):
                    for e in T.vectorized(4):
                        dy_local[e] = dy[j, first + e]
                    for e in T.vectorized(4):
                        fn_local[e] = fn[j, first + e]
                    if accumulate:
                        for e in T.vectorized(4):
                            dfn_local[e] = dfn[j, first + e]
                    for e in T.unroll(4):
                        total_local[e] = T.ieee_fmaf(dy_local[e], fn_local[e], total_local[e])
                        if accumulate:
                            dfn_local[e] = T.ieee_fmaf(dy_local[e], weight_local[e], dfn_local[e])
                        else:
                            dfn_local[e] = dy_local[e] * weight_local[e]
                    for e in T.vectorized(4):
                        dfn[j, first + e] = dfn_local[e]
                if accumulate:
                    for e in T.vectorized(4):
                        weight_local[e] = dnorm_weight[first + e]
                    for e in T.unroll(4):
                        total_local[e] = total_local[e] + weight_local[e]
                for e in T.vectorized(4):
                    dnorm_weight[first + e] = total_local[e]

    return merge_norm_weight_bwd


# Ops ---------------------------------------------------------------------------------------


def _check(fn: Tensor, norm_weight: Tensor, **others: Tensor) -> tuple[int, int]:
    """Check tensors with the shape of fn, or of norm_weight if their name ends so; returns the shape of fn."""
    num_mixes, k = check.shape(fn, 'fn', 'num_mixes k', dtype=F32)
    check.multiple(k, 4, 'k')
    for name, x in dict(fn=fn, norm_weight=norm_weight, **others).items():
        if name.endswith('norm_weight'):
            check.shape(x, name, 'k', dtype=F32, k=k)
        else:
            check.shape(x, name, 'num_mixes k', dtype=F32, num_mixes=num_mixes, k=k)
        check.contiguous(x, name)
    check.same_device(fn=fn, norm_weight=norm_weight, **others)
    if check.vector_bytes(fn, norm_weight, *others.values()) < 16:
        check.fail('fn and norm_weight', 'must start at a multiple of 16 bytes', 'misaligned views', 'clone them')
    return num_mixes, k


@op()
def merge_norm_weight_bwd_(dy: Tensor, fn: Tensor, norm_weight: Tensor, dfn: Mut, dnorm_weight: Mut) -> None:
    """Gradients of `merge_norm_weight`, added to dfn and dnorm_weight.

    Args:
        dy: shape of fn, float32, contiguous.
        fn: as given to `merge_norm_weight`.
        norm_weight: as given to `merge_norm_weight`.
        dfn: shape of fn; added to.
        dnorm_weight: shape of norm_weight; added to.
    """
    _, k = _check(fn, norm_weight, dy=dy, dfn=dfn, dnorm_weight=dnorm_weight)
    launch(merge_norm_weight_bwd_kernel, (k, True), dy, fn, norm_weight, dfn, dnorm_weight)


@op(outputs='dfn dnorm_weight')
def merge_norm_weight_bwd(dy: Tensor, fn: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `merge_norm_weight`.

    Args:
        dy: shape of fn, float32, contiguous.
        fn: as given to `merge_norm_weight`.
        norm_weight: as given to `merge_norm_weight`.

    Returns:
        Gradients of fn and norm_weight.
    """
    _, k = _check(fn, norm_weight, dy=dy)
    dfn, dnorm_weight = torch.empty_like(fn), torch.empty_like(norm_weight)
    launch(merge_norm_weight_bwd_kernel, (k, False), dy, fn, norm_weight, dfn, dnorm_weight)
    return dfn, dnorm_weight


@op(outputs='y', backward=merge_norm_weight_bwd, out=True)
def merge_norm_weight(fn: Tensor, norm_weight: Tensor) -> Tensor:
    """`fn * norm_weight`: the weight of a norm merged into the projection after it; differentiable.

    Args:
        fn: (num_mixes, k) float32, contiguous; k a multiple of 4.
        norm_weight: (k,) float32, contiguous.

    Returns:
        (num_mixes, k) float32.
    """
    _, k = _check(fn, norm_weight)
    y = empty('y', fn.shape, F32, fn.device)
    if check.vector_bytes(y) < 16:
        check.fail('y', 'must start at a multiple of 16 bytes', 'a misaligned view')
    launch(merge_norm_weight_kernel, (k,), fn, norm_weight, y)
    return y


def mhc_fn_normw_merge_fwd(fn: Tensor, normw: Tensor, out_fn: Tensor) -> None:
    """Write fn (num_mixes, k) * normw (k,) into out_fn."""
    merge_norm_weight.out(fn, normw, y=out_fn)


def mhc_fn_normw_merge_bwd(fn: Tensor, normw: Tensor, out_fn_grad: Tensor, fn_grad: Tensor, normw_grad: Tensor) -> None:
    """Add the gradients of fn and normw to fn_grad and normw_grad."""
    merge_norm_weight_bwd_(out_fn_grad, fn, normw, fn_grad, normw_grad)


# Cases -------------------------------------------------------------------------------------


def _make(num_mixes: int, k: int) -> dict:
    return dict(fn=torch.randn(num_mixes, k), norm_weight=torch.randn(k))


def _make_bwd(num_mixes: int, k: int) -> dict:
    return dict(dy=torch.randn(num_mixes, k)) | _make(num_mixes, k)


def _make_bwd_(num_mixes: int, k: int) -> dict:
    return _make_bwd(num_mixes, k) | dict(dfn=torch.randn(num_mixes, k), dnorm_weight=torch.randn(k))


SMOKE, BENCH = grid(num_mixes=[1, 24], k=[512, 260]), grid(num_mixes=[24], k=[16384])
CLOSE = dict(rtol=1e-5, atol=1e-5)
merge_norm_weight.cases(make=_make, match='bitwise', smoke=SMOKE, bench=BENCH)
merge_norm_weight_bwd.cases(make=_make_bwd, match=CLOSE, smoke=SMOKE, bench=BENCH)
merge_norm_weight_bwd_.cases(make=_make_bwd_, match=CLOSE, smoke=SMOKE, bench=BENCH)
