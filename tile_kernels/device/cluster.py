"""What the thread blocks of a cluster send each other."""

from tile_kernels.core.lang import T

#: Writes four floats to the shared memory of another block of the cluster. An mbarrier there counts the bytes.
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


def send(address, value_local, barrier, rank):
    """Write four floats to the same address in block `rank` of the cluster; see `SEND_FOUR`."""
    four = (value_local[e] for e in range(4))
    return T.evaluate(T.call_extern('handle', 'send_four', T.address_of(address), *four, T.address_of(barrier), rank))
