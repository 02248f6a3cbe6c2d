"""Which of many like cases a test takes: a few of each kind, all of them with `TK_FULL_TEST=1`."""

from collections.abc import Callable, Iterable
from typing import Any

from tile_kernels import knobs
from tile_kernels.core.jit import Kernel


def a_few_of_each(items: Iterable[Any], kind: Callable[[Any], Any], count: int) -> list[Any]:
    """Up to `count` items of each kind, spread evenly over their order, the first and the last among them."""
    kinds: dict[Any, list[Any]] = {}
    for item in items:
        kinds.setdefault(kind(item), []).append(item)
    if knobs.full_test:
        return [item for own in kinds.values() for item in own]
    chosen = []
    for own in kinds.values():
        last = len(own) - 1
        places = sorted({round(i * last / max(count - 1, 1)) for i in range(count)})
        chosen += [own[place] for place in places]
    return chosen


#: Families and modules whose kernels ran on no GPU yet.
ON_NO_GPU_YET = (
    'tile_kernels.activation.swiglu_forward_and_per_block_cast',
    'tile_kernels.attention.',
    'tile_kernels.linear_attention.',
    'tile_kernels.gemm.gemm_kernels',
    'tile_kernels.gemm.gemm_dequant_kernels',
    'tile_kernels.gemm.gemm_sparse24_kernels',
    'tile_kernels.gemm.conv2d_kernels',
)


def ran_on_a_gpu(kernel: Kernel) -> bool:
    """Whether a kernel ran and was compared on an H200, at some commit."""
    return not kernel.__module__.startswith(ON_NO_GPU_YET)
