"""The gradient of latent attention over listed keys for Hopper, by wgmma. See `sparse_mla_bwd`.

A thread block owns 64 heads of one token and goes over blocks of 64 listed keys. Shared tiles are pieces of 64 columns:
queries, gradients of the result, one block of keys, weights p and their gradients ds. Of two warpgroups

    the first: s = q k', p        the second: dp = do k', ds = p (dp - delta)

and each computes its columns of dq += ds k. Then the next block of keys is loaded. Meanwhile each
computes its columns of p' do + ds' q, and adds them to memory by atomics or stores them for a second kernel.
"""

import math

import torch

from tile_kernels.attention.mla_decode_kernels import LOG2E, OWN_BARRIERS, VECTOR
from tile_kernels.attention.pack_mla_cache import KEY, LATENT, ROTARY
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro

WARPGROUP = 128
THREADS = 2 * WARPGROUP
ROWS = 64
KEYS = 64
PIECE = 64
PIECES, LATENT_PIECES = KEY // PIECE, LATENT // PIECE
#: The pieces of each warpgroup, for loops when the kernel is built.
FIRST, SECOND = tuple(range(LATENT_PIECES // 2)), tuple(range(LATENT_PIECES // 2, PIECES))
#: Threads that copy a row of a piece, and rows that all threads copy at a time.
LANES = PIECE // VECTOR
STEP = THREADS // LANES
OWN_ROWS = KEYS // STEP
#: Named barriers: keys, weights and their gradients are there; keys are used.
LOADED, WEIGHTS, GRADIENTS, USED = 8, 9, 10, 11


@macro
def load_heads(x, token, head, x_shared, pieces: int):
    """Start to copy the columns of the heads of a token; zeros where there is no head."""
    heads = x.shape[1]
    thread = T.get_thread_binding()
    column = thread % LANES * VECTOR
    for p in T.unroll(pieces):
        for r in T.unroll(OWN_ROWS):
            i = r * STEP + thread // LANES
            T.ptx_cp_async(
                T.access_ptr(x_shared[p, i, column], 'w', VECTOR),
                T.access_ptr(x[token, T.min(head + i, heads - 1), p * PIECE + column], 'r', VECTOR),
                VECTOR,
                head + i < heads,
            )


@macro
def read_list(indices, token, num_keys, block, listed):
    """Read the keys of this thread's rows of a block; -1 behind the list."""
    for r in T.unroll(OWN_ROWS):
        listed[r] = -1
        place = block * KEYS + r * STEP + T.get_thread_binding() // LANES
        if place < num_keys:
            listed[r] = indices[token, place]


@macro
def load_keys(latent, rotary, listed, slot, key_shared, kv_shared):
    """Start to copy the keys of this thread's rows, and write which keys they are; zeros where there is none."""
    keys = latent.shape[1]
    thread = T.get_thread_binding()
    column = thread % LANES * VECTOR
    for r in T.unroll(OWN_ROWS):
        j = r * STEP + thread // LANES
        valid = T.And(listed[r] >= 0, listed[r] < keys)
        key = T.if_then_else(valid, listed[r], 0)
        if thread % LANES == 0:
            key_shared[slot, j] = T.if_then_else(valid, listed[r], -1)
        for p in T.unroll(LATENT_PIECES):
            T.ptx_cp_async(
                T.access_ptr(kv_shared[p, j, column], 'w', VECTOR),
                T.access_ptr(latent[0, key, p * PIECE + column], 'r', VECTOR),
                VECTOR,
                valid,
            )
        T.ptx_cp_async(
            T.access_ptr(kv_shared[LATENT_PIECES, j, column], 'w', VECTOR),
            T.access_ptr(rotary[0, key, column], 'r', VECTOR),
            VECTOR,
            valid,
        )


@macro
def await_keys():
    """Wait until all threads have copied their keys, and used those of the gradients."""
    T.ptx_wait_group(0)
    T.fence_proxy_async()
    T.sync_threads(LOADED, THREADS)


@macro
def add_piece(dkv, piece, slot, key_shared, first_row, block, width, p: int, ordered: bool):
    """Add a piece of the gradient of a block of keys to memory, or store it in the rows of the list."""
    if ordered:
        for j, d in T.Parallel(KEYS, PIECE):
            if block * KEYS + j < width:
                dkv[first_row + block * KEYS + j, p * PIECE + d] = piece[j, d]
    else:
        for j, d in T.Parallel(KEYS, PIECE):
            if key_shared[slot, j] >= 0:
                T.atomic_add(dkv[key_shared[slot, j], p * PIECE + d], piece[j, d])


@kernel(pass_configs=OWN_BARRIERS, serves=lambda static, gpu: gpu.has_wgmma and static.block_m == ROWS)
def sparse_mla_bwd_sm90_kernel(
    dtype: torch.dtype, shortened: bool, sink_dtype: torch.dtype | None, ordered: bool, block_m: int
):
    """Parameters are those of `sparse_mla_bwd_kernel`."""
    tokens, heads, keys, width = (T.dynamic(name) for name in ('tokens', 'heads', 'keys', 'width'))
    num_lengths, num_rows = T.dynamic('num_lengths'), T.dynamic('num_rows')
    elem = T.dtype(dtype)
    q_strides = [T.dynamic(f'q_stride{dim}') for dim in range(2)]
    kv_stride = T.dynamic('kv_stride')
    inf = math.inf

    @T.prim_func
    def sparse_mla_bwd_sm90(
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
        with T.Kernel(T.ceildiv(heads, ROWS) * num_tokens, threads=THREADS) as pid:
            for stride in q_strides:
                T.assume(stride % VECTOR == 0)
            T.assume(kv_stride % VECTOR == 0)
            q_shared = T.alloc_shared((PIECES, ROWS, PIECE), elem)  # in the end dq
            do_shared = T.alloc_shared((LATENT_PIECES, ROWS, PIECE), elem)
            kv_shared = T.alloc_shared((PIECES, KEYS, PIECE), elem)
            p_shared = T.alloc_shared((ROWS, KEYS), elem)
            ds_shared = T.alloc_shared((ROWS, KEYS), elem)
            key_shared = T.alloc_shared((2, KEYS), T.int32)
            below_shared = T.alloc_shared((ROWS,), T.float32)
            delta_shared = T.alloc_shared((ROWS,), T.float32)
            listed = T.alloc_local((OWN_ROWS,), T.int32)
            x, y = T.alloc_local((VECTOR,), elem), T.alloc_local((VECTOR,), elem)
            scores = T.alloc_fragment((ROWS, KEYS), T.float32)
            dp = T.alloc_fragment((ROWS, KEYS), T.float32)
            dq_frag = [T.alloc_fragment((ROWS, PIECE), T.float32) for _ in range(PIECES)]
            piece = [T.alloc_fragment((KEYS, PIECE), T.float32) for _ in (0, 1)]

            tiles = T.truncdiv(heads + ROWS - 1, ROWS)
            local = T.alloc_var(T.int32)
            local = T.truncdiv(pid, tiles)
            tile = pid - local * tiles
            token, head = first_token + local, tile * ROWS
            num_keys = T.alloc_var(T.int32)
            num_keys = width
            if shortened:
                num_keys = T.max(T.min(topk_length[token], width), 0)
            num_blocks = T.truncdiv(num_keys + KEYS - 1, KEYS)
            first_row = (local * tiles + tile) * width

            thread = T.get_thread_binding()
            load_heads(q, token, head, q_shared, PIECES)
            load_heads(do, token, head, do_shared, LATENT_PIECES)
            read_list(indices, token, num_keys, 0, listed)
            load_keys(latent, rotary, listed, 0, key_shared, kv_shared)
            T.ptx_commit_group()
            delta = T.alloc_var(T.float32, init=0.0)
            own = head + thread // 4
            if own < heads:
                for step in T.serial(LATENT // (4 * VECTOR)):
                    for e in T.vectorized(VECTOR):
                        x[e] = o[token, own, (step * 4 + thread % 4) * VECTOR + e]
                    for e in T.vectorized(VECTOR):
                        y[e] = do[token, own, (step * 4 + thread % 4) * VECTOR + e]
                    for e in T.unroll(VECTOR):
                        delta += T.cast(x[e], T.float32) * T.cast(y[e], T.float32)
            delta += T.shfl_xor(delta, 1)
            delta += T.shfl_xor(delta, 2)
            below = T.alloc_var(T.float32)
            number = T.alloc_var(T.float32)
            if thread % 4 == 0:
                below = inf
                if own < heads:
                    below = lse[token, own] * LOG2E
                    if sink_dtype is not None:
                        number = T.cast(sink[own], T.float32) * LOG2E
                        if below == inf:  # there is no key
                            dsink[token, own] = 0.0
                        else:
                            if number > below:
                                below = number + T.log2(1.0 + T.exp2(below - number))
                            else:
                                below = below + T.log2(1.0 + T.exp2(number - below))
                            dsink[token, own] = T.if_then_else(number == -inf, 0.0, -T.exp2(number - below) * delta)
                below_shared[thread // 4] = below
                delta_shared[thread // 4] = delta

            with T.ws(0):
                for p in FIRST:
                    T.clear(dq_frag[p])
                for block in T.serial(num_blocks):
                    slot = block % 2
                    await_keys()
                    read_list(indices, token, num_keys, block + 1, listed)
                    T.wgmma_gemm(q_shared[0, :, :], kv_shared[0, :, :], scores, transpose_B=True, clear_accum=True)
                    for p in tuple(range(1, PIECES)):
                        T.wgmma_gemm(q_shared[p, :, :], kv_shared[p, :, :], scores, transpose_B=True)
                    T.wait_wgmma(0)
                    for i, j in T.Parallel(ROWS, KEYS):
                        scores[i, j] = T.if_then_else(
                            key_shared[slot, j] >= 0, T.exp2(scores[i, j] * (scale * LOG2E) - below_shared[i]), 0.0
                        )
                    T.copy(scores, p_shared)
                    T.fence_proxy_async()
                    T.sync_threads(WEIGHTS, THREADS)
                    T.wgmma_gemm(p_shared, do_shared[FIRST[0], :, :], piece[0], transpose_A=True, clear_accum=True)
                    T.sync_threads(GRADIENTS, THREADS)
                    for p in FIRST:
                        T.wgmma_gemm(ds_shared, kv_shared[p, :, :], dq_frag[p])
                    T.wait_wgmma(0)
                    T.sync_threads(USED, THREADS)
                    if block + 1 < num_blocks:
                        load_keys(latent, rotary, listed, (block + 1) % 2, key_shared, kv_shared)
                    T.ptx_commit_group()
                    for p in FIRST:
                        if p != FIRST[0]:
                            T.wgmma_gemm(p_shared, do_shared[p, :, :], piece[0], transpose_A=True, clear_accum=True)
                        T.wgmma_gemm(ds_shared, q_shared[p, :, :], piece[0], transpose_A=True)
                        T.wait_wgmma(0)
                        add_piece(dkv, piece[0], slot, key_shared, first_row, block, width, p, ordered)
                T.sync_threads(USED, THREADS)
                for p in FIRST:
                    T.copy(dq_frag[p], q_shared[p, :, :])
            with T.ws(1):
                for p in SECOND:
                    T.clear(dq_frag[p])
                for block in T.serial(num_blocks):
                    slot = block % 2
                    await_keys()
                    read_list(indices, token, num_keys, block + 1, listed)
                    T.wgmma_gemm(do_shared[0, :, :], kv_shared[0, :, :], dp, transpose_B=True, clear_accum=True)
                    for p in tuple(range(1, LATENT_PIECES)):
                        T.wgmma_gemm(do_shared[p, :, :], kv_shared[p, :, :], dp, transpose_B=True)
                    T.wait_wgmma(0)
                    T.sync_threads(WEIGHTS, THREADS)
                    for i, j in T.Parallel(ROWS, KEYS):
                        weight = T.cast(p_shared[i, j], T.float32)
                        dp[i, j] = T.if_then_else(weight == 0.0, 0.0, weight * (dp[i, j] - delta_shared[i]) * scale)
                    T.copy(dp, ds_shared)
                    T.fence_proxy_async()
                    T.sync_threads(GRADIENTS, THREADS)
                    for p in SECOND:
                        T.wgmma_gemm(ds_shared, kv_shared[p, :, :], dq_frag[p])
                    T.wait_wgmma(0)
                    T.sync_threads(USED, THREADS)
                    if block + 1 < num_blocks:
                        load_keys(latent, rotary, listed, (block + 1) % 2, key_shared, kv_shared)
                    T.ptx_commit_group()
                    for p in SECOND:
                        if p < LATENT_PIECES:
                            T.wgmma_gemm(p_shared, do_shared[p, :, :], piece[1], transpose_A=True, clear_accum=True)
                            T.wgmma_gemm(ds_shared, q_shared[p, :, :], piece[1], transpose_A=True)
                        else:
                            T.wgmma_gemm(ds_shared, q_shared[p, :, :], piece[1], transpose_A=True, clear_accum=True)
                        T.wait_wgmma(0)
                        add_piece(dkv, piece[1], slot, key_shared, first_row, block, width, p, ordered)
                T.sync_threads(USED, THREADS)
                for p in SECOND:
                    T.copy(dq_frag[p], q_shared[p, :, :])
            T.ptx_wait_group(0)
            T.sync_threads()
            for p in T.unroll(PIECES):
                for r in T.unroll(OWN_ROWS):
                    i = r * STEP + thread // LANES
                    if head + i < heads:
                        for e in T.vectorized(VECTOR):
                            dq[token, head + i, p * PIECE + thread % LANES * VECTOR + e] = q_shared[
                                p, i, thread % LANES * VECTOR + e
                            ]

    return sparse_mla_bwd_sm90
