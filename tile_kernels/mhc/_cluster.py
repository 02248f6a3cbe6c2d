"""Clusters: blocks that write into each other's shared memory."""

from torch import Tensor
from torch._subclasses import FakeTensor

from tile_kernels.core.gpus import arch_number, arch_of
from tile_kernels.core.lang import T
from tile_kernels.core.launch import state

#: Compute capabilities of GPUs with clusters of up to 16 blocks, and 227 KB of shared memory.
FIRST_WITH_CLUSTERS, LAST_WITH_CLUSTERS = 90, 119

#: Four numbers to the shared memory of another block of the cluster, where a barrier counts their bytes.
SEND_FOUR = """
static __device__ __forceinline__ void send_four(
    float* place, float a, float b, float c, float d, void* barrier, int rank) {
  asm volatile("{\\n.reg .b32 there, count;\\n"
    "mapa.shared::cluster.u32 there, %0, %6;\\n"
    "mapa.shared::cluster.u32 count, %1, %6;\\n"
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%2, %3, %4, %5}, [count];\\n}"
    :: "r"((unsigned)__cvta_generic_to_shared(place)), "r"((unsigned)__cvta_generic_to_shared(barrier)),
       "f"(a), "f"(b), "f"(c), "f"(d), "r"(rank) : "memory");
}
"""


def on_gpu(x: Tensor) -> bool:
    """Whether a tensor lies on a GPU that can be asked."""
    return x.is_cuda and not isinstance(x, FakeTensor)


def has_clusters(x: Tensor) -> bool:
    """Whether the GPU of a tensor has clusters. Without one, the answer for Hopper or for what is `meant_for`."""
    if on_gpu(x):
        number = arch_number(arch_of(x.get_device()))
    else:
        number = FIRST_WITH_CLUSTERS if state.arch is None else arch_number(state.arch)
    return FIRST_WITH_CLUSTERS <= number <= LAST_WITH_CLUSTERS


def send(place, value_local, barrier, rank):
    """Four numbers to the same place in block `rank` of the cluster, see `SEND_FOUR`."""
    four = (value_local[e] for e in range(4))
    return T.evaluate(T.call_extern('handle', 'send_four', T.address_of(place), *four, T.address_of(barrier), rank))
