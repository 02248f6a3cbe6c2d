"""Add up partial sums, in an order that the shape fixes, and hand them on.

    s[j]  = sum_p partial[p, j]                              in float32
    out   = s                                               `sum_of_partials`, `engram_sinkhorn_step_reduce`
    grad_weight_hidden += s * weight_embed,  grad_weight_embed += s * weight_hidden            `grad_w_reduce`

A warp owns 128 neighbouring columns of every eighth partial sum; the eight warps of a block meet in shared memory.
Memory bound: the floor is reading the partial sums.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op

WARP = 32
WEIGHTS = (torch.bfloat16, torch.float32)

#: Partial sums that a thread has in flight.
IN_FLIGHT = 4

# Config -------------------------------------------------------------------------------------


def choose(width: int, weight_dtype: torch.dtype | None, grad_dtype: torch.dtype | None, num_columns: int) -> dict:
    """Eight warps share the partial sums of a column: 128 of them are 16 loads for each thread."""
    return dict(warps=8)


# Kernel -------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(warps=(4, 8, 16)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def sum_partials_kernel(width: int, weight_dtype: torch.dtype | None, grad_dtype: torch.dtype | None, *, warps: int):
    """`width` columns in an access; with weights, their gradients grow, without, the sums are written to `total`."""
    num_partials, num_columns = T.dynamic('num_partials'), T.dynamic('num_columns')
    weighted = weight_dtype is not None

    @T.prim_func
    def sum_partials(
        partial: T.Tensor((num_partials, num_columns), T.float32),
        weight_hidden: T.Tensor((num_columns,), T.dtype(weight_dtype or torch.bfloat16)),
        weight_embed: T.Tensor((num_columns,), T.dtype(weight_dtype or torch.bfloat16)),
        total: T.Tensor((num_columns,), T.float32),
        grad_weight_hidden: T.Tensor((num_columns,), T.dtype(grad_dtype or torch.float32)),
        grad_weight_embed: T.Tensor((num_columns,), T.dtype(grad_dtype or torch.float32)),
    ):
        with T.Kernel(T.ceildiv(num_columns, WARP * width), threads=warps * WARP) as pid:
            T.assume(num_columns % width == 0)
            part_local = T.alloc_local((IN_FLIGHT, width), T.float32)
            sum_local = T.alloc_local((width,), T.float32)
            sum_shared = T.alloc_shared((warps, WARP, width), T.float32)
            thread = T.get_thread_binding()
            warp, lane = thread // WARP, thread % WARP
            column = (pid * WARP + lane) * width

            T.clear(sum_local)
            for i in T.serial(T.ceildiv(num_partials, warps * IN_FLIGHT)):
                T.clear(part_local)
                for f in T.unroll(IN_FLIGHT):
                    row = (i * IN_FLIGHT + f) * warps + warp
                    if row < num_partials and column < num_columns:
                        for e in T.vectorized(width):
                            part_local[f, e] = partial[row, column + e]
                for f in T.unroll(IN_FLIGHT):
                    for e in T.unroll(width):
                        sum_local[e] = sum_local[e] + part_local[f, e]
            for e in T.vectorized(width):
                sum_shared[warp, lane, e] = sum_local[e]
            T.sync_threads()
            if warp == 0 and column < num_columns:
                for w in T.unroll(warps - 1):
                    for e in T.unroll(width):
                        sum_local[e] = sum_local[e] + sum_shared[w + 1, lane, e]
                for e in T.unroll(width):
                    if weighted:
                        at = column + e
                        grad_weight_hidden[at] = grown(grad_weight_hidden[at], sum_local[e], weight_embed[at])
                        grad_weight_embed[at] = grown(grad_weight_embed[at], sum_local[e], weight_hidden[at])
                    else:
                        total[column + e] = sum_local[e]

    return sum_partials


def grown(gradient, total, weight):
    """What a gradient becomes: gradient + total * weight, in float32."""
    return T.cast(T.cast(gradient, T.float32) + total * T.cast(weight, T.float32), gradient.dtype)


# Ops ----------------------------------------------------------------------------------------


def sum_of_partials(partial: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum over the first dimension, written to `out` if it is given."""
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
    """Add the gradients of both norm weights, from the partial sums of `engram_gate_bwd`, to the given buffers.

    Args:
        grad_w_partial: (num_partials, num_streams, hidden) float32, contiguous; any number of partial sums.
        weight_hidden: (num_streams, hidden) bfloat16 or float32, contiguous.
        weight_embed: (num_streams, hidden) of the same dtype, contiguous.
        grad_weight_hidden: (num_streams, hidden) float32 or bfloat16, contiguous; grows by the sum times weight_embed.
        grad_weight_embed: (num_streams, hidden) of the same dtype, contiguous; grows by the sum times weight_hidden.
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


# Cases --------------------------------------------------------------------------------------


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
    full=grid(num_partials=[132, 396], num_streams=[1, 4, 8], hidden=[576, 4096, 8192]),
    bench=grid(num_partials=[64, 128, 132], num_streams=[4], hidden=[4096, 7168]),
)
