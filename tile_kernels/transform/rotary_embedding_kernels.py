"""The kernel of rotary position embedding; `rotary_embedding` has the mathematics.

Some blocks own heads of the query, the others heads of the key. A thread rotates the same pairs of `heads` heads of a
token. So it loads their angles once, and all its loads are in flight together.
"""

import math

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import EARLY, T, begin_early, is_short, macro

# Config -------------------------------------------------------------------------------------


def choose(
    dtype: torch.dtype,
    num_rotated: int,
    width: int,
    cache_width: int,
    tail: int,
    interleaved: bool,
    batched: bool,
    position_dtype: torch.dtype | None,
    with_key: bool,
    in_place: bool,
    num_rows: int,
) -> dict:
    """Two heads per thread; more would need registers and lower the occupancy."""
    return dict(heads=2, resident_threads=1024, early=is_short(2 * num_rows * num_rotated * dtype.itemsize))


# Kernel -------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(heads=(1, 2, 4), resident_threads=(1024, 1280, 1536, 2048), early=EARLY),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True, 'TL_ENABLE_LOWER_LDGSTG': True},
)
def rotary_kernel(
    dtype: torch.dtype,
    num_rotated: int,
    width: int,
    cache_width: int,
    tail: int,
    interleaved: bool,
    batched: bool,
    position_dtype: torch.dtype | None,
    with_key: bool,
    in_place: bool,
    *,
    heads: int,
    resident_threads: int,
    early: bool = False,
):
    """Each thread rotates `width` pairs; the `tail` channels after the rotated ones are copied."""
    num_threads = 128
    half, rotated = num_rotated // 2, num_rotated // 2 // width
    slots = rotated + -(-tail // (2 * width))
    element = T.dtype(dtype)
    num_batches, seq_len = T.dynamic('num_batches'), T.dynamic('seq_len')
    query_heads, key_heads, head_dim = T.dynamic('query_heads'), T.dynamic('key_heads'), T.dynamic('head_dim')
    key_dim, cache_rows = T.dynamic('key_dim'), T.dynamic('cache_rows')
    placed = position_dtype is not None
    position_type = T.dtype(position_dtype or torch.int32)

    def tensor(name, num_heads, channels):
        """A parameter with a separate stride for every dimension but the last, and these strides."""
        rows = (num_batches, seq_len) if batched else (seq_len,)
        strides = [T.dynamic(f'{name}_stride{dim}') for dim in range(len(rows) + 1)]
        return T.StridedTensor((*rows, num_heads, channels), (*strides, 1), element), strides

    query_type, query_strides = tensor('query', query_heads, head_dim)
    key_type, key_strides = tensor('key', key_heads, key_dim)
    query_out_type, query_out_strides = tensor('query_out', query_heads, head_dim)
    key_out_type, key_out_strides = tensor('key_out', key_heads, key_dim)
    promised = query_strides + (key_strides if with_key else [])
    if not in_place:
        promised += query_out_strides + (key_out_strides if with_key else [])
    position_shape = (num_batches, seq_len) if batched else (seq_len,)

    @macro
    def load(x, batch, place, head, channel, x_local, k, part):
        for e in T.vectorized(width):
            x_local[k, part, e] = x[batch, place, head, channel + e] if batched else x[place, head, channel + e]

    @macro
    def store(y, batch, place, head, channel, y_local, part):
        for e in T.vectorized(width):
            if batched:
                y[batch, place, head, channel + e] = y_local[part, e]
            else:
                y[place, head, channel + e] = y_local[part, e]

    @macro
    def rotate_heads(x, y, cache, positions, index, num_heads, num_tokens, length, offset, sign):
        """The work of a thread: pairs `slot` of every `head_lanes`-th head of a token."""
        x_local = T.alloc_local((heads, 2, width), element)
        y_local = T.alloc_local((2, width), element)
        v_local = T.alloc_local((2, width), T.float32)
        cos = T.alloc_local((width,), T.float32)
        sin = T.alloc_local((width,), T.float32)
        position = T.alloc_var(position_type)
        lane = T.alloc_var(T.int32)  # variables: otherwise the divisions become 64-bit together with the addresses
        token = T.alloc_var(T.int32)
        batch = T.alloc_var(T.int32, init=0)
        place = T.alloc_var(T.int32)
        head_lanes = T.ceildiv(num_heads, heads)
        slot = index % slots
        token = T.truncdiv(index // slots, head_lanes)
        lane = index // slots - token * head_lanes
        place = token
        if batched:
            batch = T.truncdiv(token, length)
            place = token - batch * length
        first = T.if_then_else(slot < rotated, slot * (2 * width if interleaved else width), 2 * width * slot)
        second = first + T.if_then_else(slot < rotated, width if interleaved else half, width)
        if token < num_tokens:
            for k in T.unroll(heads):
                head = lane + k * head_lanes
                if head < num_heads:
                    load(x, batch, place, head, first, x_local, k, 0)
                    if num_rotated + tail >= 2 * width * slots or second < num_rotated + tail:
                        load(x, batch, place, head, second, x_local, k, 1)
            if placed:
                position = (positions[batch, place] if batched else positions[place]) + T.cast(offset, position_type)
            else:
                position = T.cast(place + offset, position_type)
            if slot < rotated:
                if position >= 0 and position < cache.shape[0]:
                    for p in T.unroll(width // cache_width):
                        for e in T.vectorized(cache_width):
                            cos[p * cache_width + e] = cache[position, slot * width + p * cache_width + e]
                        for e in T.vectorized(cache_width):
                            sin[p * cache_width + e] = cache[position, half + slot * width + p * cache_width + e]
                else:
                    for e in T.unroll(width):
                        cos[e] = T.float32(math.nan)
                        sin[e] = T.float32(math.nan)
                for e in T.unroll(width):
                    sin[e] = sin[e] * sign
            for k in T.unroll(heads):
                head = lane + k * head_lanes
                if head < num_heads:
                    if slot < rotated:
                        pairs = T.view(x_local, (heads, 2 * width), element)
                        out = T.view(v_local, (2 * width,), T.float32)
                        for e in T.unroll(width):
                            i, j = (2 * e, 2 * e + 1) if interleaved else (e, width + e)
                            a, b = T.cast(pairs[k, i], T.float32), T.cast(pairs[k, j], T.float32)
                            out[i] = T.ieee_fmaf(a, cos[e], -T.ieee_mul(b, sin[e]))
                            out[j] = T.ieee_fmaf(a, sin[e], T.ieee_mul(b, cos[e]))
                        for part in T.unroll(2):
                            for e in T.vectorized(width):
                                y_local[part, e] = T.cast(v_local[part, e], element)
                        store(y, batch, place, head, first, y_local, 0)
                        store(y, batch, place, head, second, y_local, 1)
                    elif tail > 0:
                        for e in T.vectorized(width):
                            y_local[0, e] = x_local[k, 0, e]
                        store(y, batch, place, head, first, y_local, 0)
                        if second < num_rotated + tail:
                            for e in T.vectorized(width):
                                y_local[1, e] = x_local[k, 1, e]
                            store(y, batch, place, head, second, y_local, 1)

    @T.prim_func
    def rotary(
        query: query_type,
        key: key_type,
        query_out: query_out_type,
        key_out: key_out_type,
        cos_sin_cache: T.Tensor((cache_rows, num_rotated), T.float32),
        positions: T.Tensor(position_shape, position_type),
        num_tokens: T.int32,
        length: T.int32,
        offset: T.int32,
        sign: T.float32,
    ):
        query_blocks = T.ceildiv(num_tokens * T.ceildiv(query_heads, heads) * slots, num_threads)
        key_blocks = T.ceildiv(num_tokens * T.ceildiv(key_heads, heads) * slots, num_threads) if with_key else 0
        with T.Kernel(query_blocks + key_blocks, threads=num_threads) as pid:
            if early:
                begin_early()
            for stride in promised:
                T.assume(stride % width == 0)
            T.annotate_min_blocks_per_sm(resident_threads // num_threads)
            thread = T.get_thread_binding()
            if not with_key or pid < query_blocks:
                rotate_heads(
                    query,
                    query if in_place else query_out,
                    cos_sin_cache,
                    positions,
                    pid * num_threads + thread,
                    query_heads,
                    num_tokens,
                    length,
                    offset,
                    sign,
                )
            elif with_key:
                rotate_heads(
                    key,
                    key if in_place else key_out,
                    cos_sin_cache,
                    positions,
                    (pid - query_blocks) * num_threads + thread,
                    key_heads,
                    num_tokens,
                    length,
                    offset,
                    sign,
                )

    return rotary
