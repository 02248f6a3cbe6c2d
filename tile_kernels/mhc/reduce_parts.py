"""Sum the parts of a projection and normalize, for callers that bring their own matrix product.

    mul[t, g, j]  = sum_s mul_parts[s, t, g, j]             square[t, g] = sum_s square_parts[s, t, g]
    rstd[t, g]    = rsqrt(square[t, g] / group + eps)
    y[t, j]       = sum_g mul[t, g, j] rstd[t, g]

    dmul[t, g, j] = dy[t, j] rstd[t, g]
    dsquare[t, g] = -rstd[t, g]^3 / (2 group) sum_j dy[t, j] mul[t, g, j]

One thread owns a column of a token, in backward a group of a token. Latency bound.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import empty, op
from tile_kernels.mhc._checks import F32, check_first_extent, reshaped
from tile_kernels.mhc._macros import rstd_from

# Kernels -----------------------------------------------------------------------------------


@kernel(choose=lambda *static: dict(num_threads=128), space=dict(num_threads=(64, 128, 256)))
def reduce_parts_kernel(num_groups: int, num_mixes: int, *, num_threads: int):
    """One thread for each mix of a token."""
    num_tokens, splits = T.dynamic('num_tokens'), T.dynamic('splits')

    @T.prim_func
    def reduce_parts(
        y: T.Tensor((num_tokens, num_mixes), T.float32),
        mul_parts: T.Tensor((splits, num_tokens, num_groups, num_mixes), T.float32),
        square_parts: T.Tensor((splits, num_tokens, num_groups), T.float32),
        mul: T.Tensor((num_tokens, num_groups, num_mixes), T.float32),
        square: T.Tensor((num_tokens, num_groups), T.float32),
        group_inv: T.float32,
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens * num_mixes, num_threads), threads=num_threads) as pid:
            index = pid * num_threads + T.get_thread_binding()
            token, j = index // num_mixes, index % num_mixes
            if token < num_tokens:
                total = T.alloc_var(T.float32, init=0.0)
                for g in T.serial(num_groups):
                    product = T.alloc_var(T.float32, init=0.0)
                    squares = T.alloc_var(T.float32, init=0.0)
                    product = 0.0
                    squares = 0.0
                    for s in T.unroll(splits, unroll_factor=8):
                        product = product + mul_parts[s, token, g, j]
                        squares = squares + square_parts[s, token, g]
                    mul[token, g, j] = product
                    if j == 0:
                        square[token, g] = squares
                    total = T.ieee_fmaf(product, rstd_from(squares, group_inv, eps), total)
                y[token, j] = total

    return reduce_parts


@kernel(choose=lambda *static: dict(num_threads=128), space=dict(num_threads=(64, 128, 256)))
def reduce_parts_bwd_kernel(num_groups: int, num_mixes: int, *, num_threads: int):
    """One thread for each group of a token."""
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def reduce_parts_bwd(
        dy: T.Tensor((num_tokens, num_mixes), T.float32),
        mul: T.Tensor((num_tokens, num_groups, num_mixes), T.float32),
        square: T.Tensor((num_tokens, num_groups), T.float32),
        dmul: T.Tensor((num_tokens, num_groups, num_mixes), T.float32),
        dsquare: T.Tensor((num_tokens, num_groups), T.float32),
        group_inv: T.float32,
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens * num_groups, num_threads), threads=num_threads) as pid:
            index = pid * num_threads + T.get_thread_binding()
            token, g = index // num_groups, index % num_groups
            if token < num_tokens:
                rstd = rstd_from(square[token, g], group_inv, eps)
                total = T.alloc_var(T.float32, init=0.0)
                for j in T.unroll(num_mixes, unroll_factor=8):
                    dmul[token, g, j] = dy[token, j] * rstd
                    total = T.ieee_fmaf(dy[token, j], mul[token, g, j], total)
                dsquare[token, g] = total * (rstd * rstd * rstd) * (group_inv * -0.5)

    return reduce_parts_bwd


# Ops ---------------------------------------------------------------------------------------


def _check(**tensors: tuple[Tensor, str]) -> dict[str, int]:
    """Check contiguous float32 tensors against named extents; returns the extents by name."""
    known: dict[str, int] = {}
    for name, (x, spec) in tensors.items():
        given = {dim: known[dim] for dim in spec.split() if dim in known}
        extents = check.shape(x, name, spec, dtype=F32, **given)
        known |= dict(zip(spec.split(), extents, strict=True))
        check.contiguous(x, name)
    check.same_device(**{name: x for name, (x, _) in tensors.items()})
    return known


@op(outputs='dmul dsquare', out=True)
def reduce_parts_bwd(dy: Tensor, mul: Tensor, square: Tensor, group: int, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Gradients of the sums of `reduce_parts`.

    Args:
        dy: (num_tokens, num_mixes) float32, contiguous.
        mul: (num_tokens, num_groups, num_mixes) float32, contiguous.
        square: (num_tokens, num_groups) float32, contiguous.
        group: channels of a group.
        eps: added to the mean square.

    Returns:
        Gradients of mul and square, in their shapes.
    """
    extents = _check(
        dy=(dy, 'num_tokens num_mixes'),
        mul=(mul, 'num_tokens num_groups num_mixes'),
        square=(square, 'num_tokens num_groups'),
    )
    check.at_least(group, 1, 'group')
    dmul, dsquare = (empty(name, x.shape, F32, x.device) for name, x in (('dmul', mul), ('dsquare', square)))
    static = (extents['num_groups'], extents['num_mixes'])
    launch(reduce_parts_bwd_kernel, static, dy, mul, square, dmul, dsquare, 1.0 / group, eps)
    return dmul, dsquare


@op(outputs='mul square y', out=True)
def reduce_parts(
    mul_parts: Tensor, square_parts: Tensor, group: int, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the parts of a projection and normalize.

    Args:
        mul_parts: (splits, num_tokens, num_groups, num_mixes) float32, contiguous; parts of the products.
        square_parts: (splits, num_tokens, num_groups) float32, contiguous; parts of the sums of squares.
        group: channels of a group.
        eps: added to the mean square.

    Returns:
        The products (num_tokens, num_groups, num_mixes), the sums of squares (num_tokens, num_groups) and the
        normalized projection (num_tokens, num_mixes), float32.
    """
    extents = _check(
        mul_parts=(mul_parts, 'splits num_tokens num_groups num_mixes'),
        square_parts=(square_parts, 'splits num_tokens num_groups'),
    )
    check.at_least(group, 1, 'group')
    _, num_tokens, num_groups, num_mixes = mul_parts.shape
    mul = empty('mul', (num_tokens, num_groups, num_mixes), F32, mul_parts.device)
    square = empty('square', (num_tokens, num_groups), F32, mul_parts.device)
    y = empty('y', (num_tokens, num_mixes), F32, mul_parts.device)
    static = (extents['num_groups'], extents['num_mixes'])
    launch(reduce_parts_kernel, static, y, mul_parts, square_parts, mul, square, 1.0 / group, eps)
    return mul, square, y


def mhc_reduce_partials_and_rmsnorm_fwd(
    out_mul_splitted: Tensor,
    sqrsum_splitted: Tensor,
    out_mul: Tensor,
    sqrsum: Tensor,
    out: Tensor,
    rms_group_size: int,
    rms_eps: float,
    n_splits: int,
) -> None:
    """Sum n_splits parts of a projection and its squares, and write the normalized projection into out."""
    check_first_extent(out_mul_splitted, 'out_mul_splitted', n_splits)
    num_tokens, num_mixes = check.shape(out, 'out', 'num_tokens num_mixes')
    num_groups = sqrsum_splitted.shape[-1] if check.tensor(sqrsum_splitted, 'sqrsum_splitted').dim() == 3 else 1
    reduce_parts.out(
        reshaped(out_mul_splitted, 'out_mul_splitted', n_splits, num_tokens, num_groups, num_mixes),
        reshaped(sqrsum_splitted, 'sqrsum_splitted', n_splits, num_tokens, num_groups),
        rms_group_size,
        rms_eps,
        mul=reshaped(out_mul, 'out_mul', num_tokens, num_groups, num_mixes),
        square=reshaped(sqrsum, 'sqrsum', num_tokens, num_groups),
        y=out,
    )


def mhc_reduce_partials_and_rmsnorm_bwd(
    out_grad: Tensor,
    out_mul: Tensor,
    sqrsum: Tensor,
    out_mul_grad: Tensor,
    sqrsum_grad: Tensor,
    rms_group_size: int,
    rms_eps: float,
) -> None:
    """Write the gradients of out_mul and sqrsum."""
    num_tokens, num_mixes = check.shape(out_grad, 'out_grad', 'num_tokens num_mixes')
    num_groups = sqrsum.shape[-1] if check.tensor(sqrsum, 'sqrsum').dim() == 2 else 1
    reduce_parts_bwd.out(
        out_grad,
        reshaped(out_mul, 'out_mul', num_tokens, num_groups, num_mixes),
        reshaped(sqrsum, 'sqrsum', num_tokens, num_groups),
        rms_group_size,
        rms_eps,
        dmul=reshaped(out_mul_grad, 'out_mul_grad', num_tokens, num_groups, num_mixes),
        dsquare=reshaped(sqrsum_grad, 'sqrsum_grad', num_tokens, num_groups),
    )


# Cases -------------------------------------------------------------------------------------


def _make(splits: int, num_tokens: int, num_groups: int, num_mixes: int) -> dict:
    return dict(
        mul_parts=torch.randn(splits, num_tokens, num_groups, num_mixes),
        square_parts=torch.rand(splits, num_tokens, num_groups) * 100 + 1,
        group=64,
    )


def _make_bwd(num_tokens: int, num_groups: int, num_mixes: int) -> dict:
    return dict(
        dy=torch.randn(num_tokens, num_mixes),
        mul=torch.randn(num_tokens, num_groups, num_mixes),
        square=torch.rand(num_tokens, num_groups) * 100 + 1,
        group=64,
    )


SIZES = dict(num_tokens=[0, 37], num_groups=[1, 3], num_mixes=[24])
CLOSE = dict(rtol=1e-5, atol=1e-5)
reduce_parts.cases(
    make=_make,
    match=CLOSE,
    smoke=grid(splits=[1, 3], **SIZES),
    bench=grid(splits=[16], num_tokens=[4096], num_groups=[1], num_mixes=[24]),
)
reduce_parts_bwd.cases(
    make=_make_bwd,
    match=CLOSE,
    smoke=grid(**SIZES),
    bench=grid(num_tokens=[4096], num_groups=[1], num_mixes=[24]),
)
