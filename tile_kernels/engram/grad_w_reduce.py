"""Add up partial sums in an order that depends only on the shape, then store or apply the result.

    s[j]  = sum_p partial[p, j]                              in float32
    out   = s                                               `sum_of_partials`, `engram_sinkhorn_step_reduce`
    grad_weight_hidden += s * weight_embed,  grad_weight_embed += s * weight_hidden            `grad_w_reduce`

A few neighbouring threads own the columns of a block. Several such groups divide the partial sums, so that many loads
are in flight. Shuffles and shared memory combine the sums of the groups. Memory bound: the floor is reading the partial
sums.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.gpus import SUM_SMS
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op

WEIGHTS = (torch.bfloat16, torch.float32)


#: Warps of a block, and loads in flight per thread.
WARPS, IN_FLIGHT = 16, 8


def choose(width: int, weight_dtype: torch.dtype | None, grad_dtype: torch.dtype | None, num_columns: int) -> dict:
    """Whole warps per row of columns; fewer threads if few columns would leave SMs idle."""
    return dict(lanes=32 if num_columns >= 8192 else 8)


@kernel(
    choose=choose, space=dict(lanes=(8, 16, 32)), pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True}, fixed='lanes'
)
def sum_partials_kernel(width: int, weight_dtype: torch.dtype | None, grad_dtype: torch.dtype | None, *, lanes: int):
    """Accesses have `width` columns; the sums update the weight gradients, or without weights go to `total`."""
    groups = WARPS * WARP // lanes
    num_partials, num_columns = T.dynamic('num_partials'), T.dynamic('num_columns')
    weighted = weight_dtype is not None
    block_columns = lanes * width

    @T.prim_func
    def sum_partials(
        partial: T.Tensor((num_partials, num_columns), T.float32),
        weight_hidden: T.Tensor((num_columns,), T.dtype(weight_dtype or torch.bfloat16)),
        weight_embed: T.Tensor((num_columns,), T.dtype(weight_dtype or torch.bfloat16)),
        total: T.Tensor((num_columns,), T.float32),
        grad_weight_hidden: T.Tensor((num_columns,), T.dtype(grad_dtype or torch.float32)),
        grad_weight_embed: T.Tensor((num_columns,), T.dtype(grad_dtype or torch.float32)),
    ):
        with T.Kernel(T.ceildiv(num_columns, block_columns), threads=WARPS * WARP) as pid:
            T.pdl_sync()
            T.assume(num_columns % width == 0)
            part_local = T.alloc_local((IN_FLIGHT, width), T.float32)
            sum_local = T.alloc_local((width,), T.float32)
            sum_shared = T.alloc_shared((WARPS, block_columns), T.float32)
            before = T.alloc_local((4,), T.float32)
            sum_all = T.alloc_var(T.float32)
            thread = T.get_thread_binding()
            group, lane = thread // lanes, thread % lanes
            column = pid * block_columns + lane * width
            own = pid * block_columns + thread  # the column of a thread that stores a result

            if weighted and thread < block_columns and own < num_columns:
                before[0] = T.cast(grad_weight_hidden[own], T.float32)
                before[1] = T.cast(grad_weight_embed[own], T.float32)
                before[2] = T.cast(weight_hidden[own], T.float32)
                before[3] = T.cast(weight_embed[own], T.float32)
            T.clear(sum_local)
            for i in T.serial(T.ceildiv(num_partials, groups * IN_FLIGHT)):
                T.clear(part_local)
                for f in T.unroll(IN_FLIGHT):
                    row = (i * IN_FLIGHT + f) * groups + group
                    if row < num_partials and column < num_columns:
                        for e in T.vectorized(width):
                            part_local[f, e] = partial[row, column + e]
                for f in T.unroll(IN_FLIGHT):
                    for e in T.unroll(width):
                        sum_local[e] = sum_local[e] + part_local[f, e]
            for e in T.unroll(width):
                for step in tuple(s for s in (8, 16) if s >= lanes):
                    sum_local[e] = sum_local[e] + T.shfl_xor(sum_local[e], step)
            if thread % WARP < lanes:
                for e in T.vectorized(width):
                    sum_shared[thread // WARP, lane * width + e] = sum_local[e]
            T.sync_threads()
            if thread < block_columns and own < num_columns:
                sum_all = sum_shared[0, thread]
                for w in T.unroll(WARPS - 1):
                    sum_all = sum_all + sum_shared[w + 1, thread]
                if weighted:
                    grad_weight_hidden[own] = T.cast(before[0] + sum_all * before[3], grad_weight_hidden.dtype)
                    grad_weight_embed[own] = T.cast(before[1] + sum_all * before[2], grad_weight_embed.dtype)
                else:
                    total[own] = sum_all

    return sum_partials


def sum_of_partials(partial: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum over the first dimension, stored in `out` if given."""
    out = partial.new_empty(partial.shape[1:]) if out is None else out
    flat = partial.view(partial.shape[0], out.numel())
    width = 4 if check.vector_bytes(flat) == 16 else 1
    launch(sum_partials_kernel, (width, None, None), flat, None, None, out.view(-1), None, None, size=flat.shape[1])
    return out


@op()
def grad_w_reduce(
    grad_w_partial: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    grad_weight_hidden: Mut,
    grad_weight_embed: Mut,
) -> None:
    """Add the gradients of both norm weights to the given buffers, from the partial sums of `engram_gate_bwd`.

    Args:
        grad_w_partial: (num_partials, num_streams, hidden) float32, contiguous; any number of partial sums.
        weight_hidden: (num_streams, hidden) bfloat16 or float32, contiguous.
        weight_embed: (num_streams, hidden) of the same dtype, contiguous.
        grad_weight_hidden: (num_streams, hidden) float32 or bfloat16, contiguous; the sum times weight_embed is added.
        grad_weight_embed: (num_streams, hidden) of the same dtype, contiguous; the sum times weight_hidden is added.
    """
    _, num_streams, hidden = check.shape(
        grad_w_partial, 'grad_w_partial', 'num_partials num_streams hidden', dtype=torch.float32
    )
    known = {'num_streams': num_streams, 'hidden': hidden}
    check.dtype(weight_hidden, 'weight_hidden', WEIGHTS)
    check.dtype(grad_weight_hidden, 'grad_weight_hidden', WEIGHTS)
    tensors = {
        'weight_hidden': weight_hidden,
        'weight_embed': weight_embed,
        'grad_weight_hidden': grad_weight_hidden,
        'grad_weight_embed': grad_weight_embed,
    }
    for name, tensor in tensors.items():
        dtype = grad_weight_hidden.dtype if name.startswith('grad') else weight_hidden.dtype
        check.shape(tensor, name, 'num_streams hidden', dtype=dtype, **known)
        check.contiguous(tensor, name)
    check.contiguous(grad_w_partial, 'grad_w_partial')
    check.same_device(grad_w_partial=grad_w_partial, **tensors)
    flat = grad_w_partial.view(grad_w_partial.shape[0], num_streams * hidden)
    width = 4 if check.vector_bytes(flat) == 16 else 1
    static = (width, weight_hidden.dtype, grad_weight_hidden.dtype)
    weights = (weight_hidden.view(-1), weight_embed.view(-1))
    grads = (grad_weight_hidden.view(-1), grad_weight_embed.view(-1))
    launch(sum_partials_kernel, static, flat, *weights, None, *grads, size=num_streams * hidden)


def _make(
    num_partials: int,
    num_streams: int,
    hidden: int,
    dtype: torch.dtype = torch.bfloat16,
    grad_dtype: torch.dtype = torch.float32,
) -> dict:
    return dict(
        grad_w_partial=torch.randn(num_partials, num_streams, hidden),
        weight_hidden=torch.randn(num_streams, hidden, dtype=dtype),
        weight_embed=torch.randn(num_streams, hidden, dtype=dtype),
        grad_weight_hidden=torch.randn(num_streams, hidden, dtype=grad_dtype),
        grad_weight_embed=torch.randn(num_streams, hidden, dtype=grad_dtype),
    )


grad_w_reduce.cases(
    make=_make,
    match=dict(rtol=1e-5, atol=1e-4),
    smoke=grid(num_partials=[0, 1, 37], num_streams=[4], hidden=[64])
    + grid(num_partials=[9], num_streams=[3], hidden=[67], dtype=WEIGHTS, grad_dtype=[torch.bfloat16]),
    full=grid(num_partials=[SUM_SMS, 3 * SUM_SMS], num_streams=[1, 4, 8], hidden=[576, 4096, 8192]),
    bench=grid(num_partials=[64, 128, SUM_SMS], num_streams=[4], hidden=[4096, 7168]),
)
