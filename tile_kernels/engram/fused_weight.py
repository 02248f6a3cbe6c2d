"""Fused weight: the product of both norm weights; the Engram gate needs nothing else of them.

    weight_fused[c, h] = weight_hidden[c, h] * weight_embed[c, h]           in float32

A thread owns eight neighbouring elements. The tensors have a few hundred kilobytes, so launch time dominates.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op

DTYPES = (torch.bfloat16, torch.float32)


@kernel(
    choose=lambda *static: dict(num_threads=128),
    space=dict(num_threads=(64, 128, 256)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def fused_weight_kernel(dtype: torch.dtype, width: int, *, num_threads: int):
    """Each thread handles `width` elements."""
    num_elements = T.dynamic('num_elements')

    @T.prim_func
    def fused_weight(
        weight_hidden: T.Tensor((num_elements,), T.dtype(dtype)),
        weight_embed: T.Tensor((num_elements,), T.dtype(dtype)),
        weight_fused: T.Tensor((num_elements,), T.float32),
    ):
        with T.Kernel(T.ceildiv(num_elements, num_threads * width), threads=num_threads) as pid:
            T.assume(num_elements % width == 0)
            hidden_local = T.alloc_local((width,), T.dtype(dtype))
            embed_local = T.alloc_local((width,), T.dtype(dtype))
            first = (pid * num_threads + T.get_thread_binding()) * width
            if first < num_elements:
                for e in T.vectorized(width):
                    hidden_local[e] = weight_hidden[first + e]
                for e in T.vectorized(width):
                    embed_local[e] = weight_embed[first + e]
                for e in T.vectorized(width):
                    weight_fused[first + e] = T.cast(hidden_local[e], T.float32) * T.cast(embed_local[e], T.float32)

    return fused_weight


@op(outputs='weight_fused')
def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    """Multiply both norm weights of the Engram gate.

    Args:
        weight_hidden: (num_streams, hidden) bfloat16 or float32, contiguous.
        weight_embed: (num_streams, hidden) of the same dtype, contiguous.

    Returns:
        (num_streams, hidden) float32, exact for bfloat16.
    """
    num_streams, hidden = check.shape(weight_hidden, 'weight_hidden', 'num_streams hidden', dtype=DTYPES)
    known = {'num_streams': num_streams, 'hidden': hidden}
    check.shape(weight_embed, 'weight_embed', 'num_streams hidden', dtype=weight_hidden.dtype, **known)
    check.contiguous(weight_hidden, 'weight_hidden')
    check.contiguous(weight_embed, 'weight_embed')
    check.same_device(weight_hidden=weight_hidden, weight_embed=weight_embed)
    out = torch.empty_like(weight_hidden, dtype=torch.float32)
    size = num_streams * hidden
    wide = check.vector_bytes(weight_hidden, weight_embed) == 16 and hidden % 8 == 0
    static = (weight_hidden.dtype, 8 if wide else 1)
    launch(fused_weight_kernel, static, weight_hidden.view(-1), weight_embed.view(-1), out.view(-1), size=size)
    return out


def _make(num_streams: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> dict:
    return dict(
        weight_hidden=torch.randn(num_streams, hidden, dtype=dtype),
        weight_embed=torch.randn(num_streams, hidden, dtype=dtype),
    )


fused_weight.cases(
    make=_make,
    match='bitwise',
    smoke=grid(num_streams=[1, 4], hidden=[256, 67], dtype=DTYPES) + grid(num_streams=[0], hidden=[64]),
    full=grid(num_streams=[4, 8], hidden=[576, 4096, 7168], dtype=DTYPES),
    bench=grid(num_streams=[4], hidden=[4096, 7168]),
)
