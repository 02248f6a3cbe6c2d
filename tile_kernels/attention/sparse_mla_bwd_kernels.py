"""Kernels of the gradient of latent attention over listed keys, by mma on every GPU. See `sparse_mla_bwd`.

A thread block owns a tile of heads of one token and goes over blocks of 32 listed keys, which it gathers as
`mla_decode` does. Scores are computed again. Gradients of queries stay in registers. Those of keys are added to float32
memory by atomics. Or they are stored for every listed key, and a second kernel adds them in the order of tokens. Shared
tiles are cut into pieces of 128 columns.
"""

import math

import torch

from tile_kernels.attention.mla_decode_kernels import (
    BLOCK_N,
    LISTED,
    LOG2E,
    PORTABLE,
    VECTOR,
    find_block,
    load_block,
    tile_rows,
)
from tile_kernels.attention.pack_mla_cache import KEY, LATENT, ROTARY
from tile_kernels.core.gpus import Gpu
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro

PIECE = 128
PIECES = LATENT // PIECE
#: For loops over pieces when the kernel is built.
EACH = tuple(range(PIECES))


def tile_heads(heads: int, gpu: Gpu) -> int:
    """Heads of a tile: tall tiles read keys less often; they must fit into shared memory."""
    kib = gpu.smem_per_block >> 10
    return min(tile_rows(heads), 64 if kib > 200 else 32 if kib > 150 else 16)


@macro
def load_pieces(x, page_shared, offset_shared, x_shared, threads: int):
    """Start to copy the latent channels of the keys of a block; zeros where there is no key."""
    lanes = LATENT // VECTOR
    for step in T.unroll(BLOCK_N * lanes // threads):
        index = step * threads + T.get_thread_binding()
        j = index // lanes
        column = index % lanes * VECTOR
        T.ptx_cp_async(
            T.access_ptr(x_shared[column // PIECE, j, column % PIECE], 'w', VECTOR),
            T.access_ptr(x[T.max(page_shared[0, j], 0), offset_shared[0, j], column], 'r', VECTOR),
            VECTOR,
            page_shared[0, j] >= 0,
        )


@kernel(pass_configs=PORTABLE)
def sparse_mla_bwd_kernel(
    dtype: torch.dtype, shortened: bool, sink_dtype: torch.dtype | None, ordered: bool, block_m: int
):
    """With `ordered`, `dkv` has a row for every tile of heads and listed key; otherwise one for every key."""
    tokens, heads, keys, width = (T.dynamic(name) for name in ('tokens', 'heads', 'keys', 'width'))
    num_lengths, num_rows = T.dynamic('num_lengths'), T.dynamic('num_rows')
    elem = T.dtype(dtype)
    threads = 128 if block_m == 16 else 256
    q_strides = [T.dynamic(f'q_stride{dim}') for dim in range(2)]
    kv_stride = T.dynamic('kv_stride')
    inf = math.inf

    @T.prim_func
    def sparse_mla_bwd(
        do: T.Tensor((tokens, heads, LATENT), elem),
        q: T.StridedTensor((tokens, heads, KEY), (*q_strides, 1), elem),
        latent: T.StridedTensor((1, keys, LATENT), (kv_stride * keys, kv_stride, 1), elem),
        rotary: T.StridedTensor((1, keys, ROTARY), (kv_stride * keys, kv_stride, 1), elem),
        indices: T.Tensor((tokens, width), T.int32),
        topk_length: T.Tensor((num_lengths,), T.int32),
        o: T.Tensor((tokens, heads, LATENT), elem),
        lse: T.Tensor((tokens, heads), T.float32),
        sink: T.Tensor((heads,), T.dtype(sink_dtype or torch.float32)),
        dq: T.Tensor((tokens, heads, KEY), elem),
        dkv: T.Tensor((num_rows, KEY), T.float32),
        dsink: T.Tensor((tokens, heads), T.float32),
        first_token: T.int32,
        num_tokens: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(heads, block_m) * num_tokens, threads=threads) as pid:
            for stride in q_strides:
                T.assume(stride % VECTOR == 0)
            T.assume(kv_stride % VECTOR == 0)
            q_shared = T.alloc_shared((PIECES, block_m, PIECE), elem)
            do_shared = T.alloc_shared((PIECES, block_m, PIECE), elem)
            q_rotary_shared = T.alloc_shared((block_m, ROTARY), elem)
            kv_shared = T.alloc_shared((PIECES, BLOCK_N, PIECE), elem)
            rotary_shared = T.alloc_shared((1, BLOCK_N, ROTARY), elem)
            p_shared = T.alloc_shared((block_m, BLOCK_N), elem)
            ds_shared = T.alloc_shared((block_m, BLOCK_N), elem)
            page_shared = T.alloc_shared((1, BLOCK_N), T.int32)
            offset_shared = T.alloc_shared((1, BLOCK_N), T.int32)
            below_shared = T.alloc_shared((block_m,), T.float32)
            delta_shared = T.alloc_shared((block_m,), T.float32)
            scores = T.alloc_fragment((block_m, BLOCK_N), T.float32)
            dp = T.alloc_fragment((block_m, BLOCK_N), T.float32)
            product = T.alloc_fragment((block_m, PIECE), T.float32)
            delta = T.alloc_fragment((block_m,), T.float32)
            dq_frag = [T.alloc_fragment((block_m, PIECE), T.float32) for _ in EACH]
            dq_rotary_frag = T.alloc_fragment((block_m, ROTARY), T.float32)
            dkv_frag = T.alloc_fragment((BLOCK_N, PIECE), T.float32)
            drotary_frag = T.alloc_fragment((BLOCK_N, ROTARY), T.float32)

            tiles = T.truncdiv(heads + block_m - 1, block_m)
            local = T.alloc_var(T.int32)
            local = T.truncdiv(pid, tiles)
            tile = pid - local * tiles
            token, head = first_token + local, tile * block_m
            num_keys = T.alloc_var(T.int32)
            num_keys = width
            if shortened:
                num_keys = T.max(T.min(topk_length[token], width), 0)

            zero = T.cast(0.0, elem)
            T.clear(delta)
            for p in T.serial(PIECES):
                for i, d in T.Parallel(block_m, PIECE):
                    q_shared[p, i, d] = T.if_then_else(head + i < heads, q[token, head + i, p * PIECE + d], zero)
                for i, d in T.Parallel(block_m, PIECE):
                    do_shared[p, i, d] = T.if_then_else(head + i < heads, do[token, head + i, p * PIECE + d], zero)
                T.clear(product)
                for i, d in T.Parallel(block_m, PIECE):
                    if head + i < heads:
                        product[i, d] = T.cast(o[token, head + i, p * PIECE + d], T.float32) * T.cast(
                            do[token, head + i, p * PIECE + d], T.float32
                        )
                T.reduce_sum(product, delta, dim=1, clear=False)
            for i, d in T.Parallel(block_m, ROTARY):
                q_rotary_shared[i, d] = T.if_then_else(head + i < heads, q[token, head + i, LATENT + d], zero)
            for i in T.Parallel(block_m):
                delta_shared[i] = delta[i]
            T.sync_threads()
            thread = T.get_thread_binding()
            below = T.alloc_var(T.float32)
            number = T.alloc_var(T.float32)
            if thread < block_m:
                below = inf
                if head + thread < heads:
                    below = lse[token, head + thread] * LOG2E
                    if sink_dtype is not None:
                        number = T.cast(sink[head + thread], T.float32) * LOG2E
                        if below == inf:  # there is no key
                            dsink[token, head + thread] = 0.0
                        else:
                            if number > below:
                                below = number + T.log2(1.0 + T.exp2(below - number))
                            else:
                                below = below + T.log2(1.0 + T.exp2(number - below))
                            dsink[token, head + thread] = T.if_then_else(
                                number == -inf, 0.0, -T.exp2(number - below) * delta_shared[thread]
                            )
                below_shared[thread] = below

            for p in EACH:
                T.clear(dq_frag[p])
            T.clear(dq_rotary_frag)
            for block in T.serial(T.truncdiv(num_keys + BLOCK_N - 1, BLOCK_N)):
                find_block(indices, token, num_keys, block, keys, 1, LISTED, page_shared, offset_shared, 0)
                T.sync_threads()
                load_pieces(latent, page_shared, offset_shared, kv_shared, threads)
                load_block(rotary, page_shared, offset_shared, 0, rotary_shared, 0, ROTARY, VECTOR, threads)
                T.ptx_commit_group()
                T.ptx_wait_group(0)
                T.sync_threads()
                T.clear(scores)
                T.clear(dp)
                for p in T.serial(PIECES):
                    T.gemm(q_shared[p, :, :], kv_shared[p, :, :], scores, transpose_B=True)
                    T.gemm(do_shared[p, :, :], kv_shared[p, :, :], dp, transpose_B=True)
                T.gemm(q_rotary_shared, rotary_shared[0, :, :], scores, transpose_B=True)
                for i, j in T.Parallel(block_m, BLOCK_N):
                    scores[i, j] = T.if_then_else(
                        page_shared[0, j] >= 0, T.exp2(scores[i, j] * (scale * LOG2E) - below_shared[i]), 0.0
                    )
                for i, j in T.Parallel(block_m, BLOCK_N):
                    dp[i, j] = T.if_then_else(
                        scores[i, j] == 0.0, 0.0, scores[i, j] * (dp[i, j] - delta_shared[i]) * scale
                    )
                T.copy(scores, p_shared)
                T.copy(dp, ds_shared)
                T.sync_threads()
                for p in EACH:
                    T.gemm(ds_shared, kv_shared[p, :, :], dq_frag[p])
                for p in T.serial(PIECES):
                    T.gemm(ds_shared, q_shared[p, :, :], dkv_frag, transpose_A=True, clear_accum=True)
                    T.gemm(p_shared, do_shared[p, :, :], dkv_frag, transpose_A=True)
                    if ordered:
                        for j, d in T.Parallel(BLOCK_N, PIECE):
                            if block * BLOCK_N + j < width:
                                dkv[(local * tiles + tile) * width + block * BLOCK_N + j, p * PIECE + d] = dkv_frag[
                                    j, d
                                ]
                    else:
                        for j, d in T.Parallel(BLOCK_N, PIECE):
                            if page_shared[0, j] >= 0:
                                T.atomic_add(dkv[offset_shared[0, j], p * PIECE + d], dkv_frag[j, d])
                T.gemm(ds_shared, rotary_shared[0, :, :], dq_rotary_frag)
                T.gemm(ds_shared, q_rotary_shared, drotary_frag, transpose_A=True, clear_accum=True)
                if ordered:
                    for j, d in T.Parallel(BLOCK_N, ROTARY):
                        if block * BLOCK_N + j < width:
                            dkv[(local * tiles + tile) * width + block * BLOCK_N + j, LATENT + d] = drotary_frag[j, d]
                else:
                    for j, d in T.Parallel(BLOCK_N, ROTARY):
                        if page_shared[0, j] >= 0:
                            T.atomic_add(dkv[offset_shared[0, j], LATENT + d], drotary_frag[j, d])
                T.sync_threads()

            for p in EACH:
                for i, d in T.Parallel(block_m, PIECE):
                    if head + i < heads:
                        dq[token, head + i, p * PIECE + d] = dq_frag[p][i, d]
            for i, d in T.Parallel(block_m, ROTARY):
                if head + i < heads:
                    dq[token, head + i, LATENT + d] = dq_rotary_frag[i, d]

    return sparse_mla_bwd


SUM_THREADS = KEY // 4


@kernel(pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def sparse_mla_sum_kernel():
    """Add stored gradients of listed keys in a given order: one block for a key, one thread for four columns."""
    num_parts, num_pairs, keys, bounds = (T.dynamic(name) for name in ('num_parts', 'num_pairs', 'keys', 'bounds'))

    @T.prim_func
    def sparse_mla_sum(
        parts: T.Tensor((num_parts, KEY), T.float32),
        order: T.Tensor((num_pairs,), T.int64),
        start: T.Tensor((bounds,), T.int64),
        dkv: T.Tensor((keys, KEY), T.float32),
        tiles: T.int32,
        width: T.int32,
    ):
        with T.Kernel(keys, threads=SUM_THREADS) as key:
            column = T.get_thread_binding() * 4
            x = T.alloc_local((4,), T.float32)
            acc = T.alloc_local((4,), T.float32)
            pair = T.alloc_var(T.int64)
            token = T.alloc_var(T.int64)
            for e in T.vectorized(4):
                acc[e] = dkv[key, column + e]
            for n in T.serial(T.cast(start[key + 1] - start[key], T.int32)):
                pair = order[start[key] + T.cast(n, T.int64)]
                token = T.truncdiv(pair, T.cast(width, T.int64))
                for tile in T.serial(tiles):
                    row = (token * T.cast(tiles - 1, T.int64) + T.cast(tile, T.int64)) * T.cast(width, T.int64) + pair
                    for e in T.vectorized(4):
                        x[e] = parts[row, column + e]
                    for e in T.unroll(4):
                        acc[e] += x[e]
            for e in T.vectorized(4):
                dkv[key, column + e] = acc[e]

    return sparse_mla_sum
