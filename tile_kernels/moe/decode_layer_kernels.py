"""Kernel of `decode_layer`: a mixture-of-experts layer for few tokens in one launch.

    1   every block normalizes all tokens to shared memory, and multiplies them with its rows of the gate
    -   grid barrier
    2   every block chooses the experts of all tokens, a token per warp, and lists the chosen ones
    3   gate and up rows of 8 channels of one expert at a time, SwiGLU
    -   grid barrier
    4   16 rows of the down projection of one expert at a time
    -   grid barrier
    5   the weighted sum of every token

A warp multiplies tiles of 16 rows of a weight and 128 bytes, as the first operand of mma; all tokens are the columns of
the second. The weights that a warp multiplies in the phases 3 and 4 are one sequence. Each thread copies its own bytes
of it by cp.async and reads no others, so it goes on to copy while the block waits at a barrier. The tile number
modulo 8 decides which sum a tile enters, so the results do not depend on the number of blocks.
"""

from typing import Any

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.moe._macros import (
    FAST_FUNCTIONS,
    Place,
    RowLayout,
    exp_of_chosen,
    load_rows,
    softmax_of_row,
    sum_of_renormalized,
)
from tile_kernels.moe.scoring import ScoringFunc
from tile_kernels.moe.topk_gate_kernels import select_topk
from tile_kernels.moe.topk_gating_kernels import Bias, ScoreRanking

THREADS, NUM_WARPS = 256, 8
TURN_BITS = NUM_WARPS.bit_length() - 1
ROWS, OCTET = 16, 8  # rows of a weight, tokens
TILE = 128  # bytes of a row in a tile
GROUP = 128  # channels with one scale factor
VECTOR = 8  # channels of 16 bytes of bfloat16
MAX_TOKENS, MAX_TOPK = 16, 16
RING_BYTES = NUM_WARPS * ROWS * TILE  # of one tile for every warp
SHARED_BYTES = 227 << 10
FP8_MAX, AMAX_FLOOR = 448.0, 1e-4
FP8 = torch.float8_e4m3fn
BF16 = 'bfloat16'

PASS_CONFIGS = {
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    'TL_DISABLE_SHARED_MEMORY_REUSE': True,
}


def most_chosen(num_experts: int, top_k: int, octets: int) -> int:
    """Most experts that the tokens can choose."""
    return min(num_experts, top_k * octets * OCTET)


def shared_bytes(num_experts: int, hidden: int, top_k: int, octets: int, dtype: torch.dtype) -> int:
    """Shared memory without the ring."""
    size, tokens = dtype.itemsize, octets * OCTET
    tokens_bytes = tokens * (hidden * size + 64) + (tokens * hidden // GROUP * 4 if size == 1 else 0)
    sums = 2 * NUM_WARPS * octets * WARP * 16
    tables = most_chosen(num_experts, top_k, octets) * (tokens + 1) * 4 + tokens * top_k * 8 + num_experts // 8 + 64
    return tokens_bytes + sums + tables + 8192  # and that of `select_topk`


def ring_tiles(num_experts: int, hidden: int, top_k: int, octets: int, dtype: torch.dtype) -> int:
    """Tiles of a warp that are on their way, at most."""
    room = SHARED_BYTES - shared_bytes(num_experts, hidden, top_k, octets, dtype)
    return min(10, room // (RING_BYTES + (THREADS * 8 if dtype is FP8 else 0)))


def serves(static: Any, gpu: Any) -> bool:
    """Hopper and newer, where the tokens and a ring of four tiles fit into shared memory."""
    given = static.num_experts, static.hidden, static.top_k, static.octets, static.dtype
    return gpu.has_wgmma and ring_tiles(*given) >= 4


@macro
def multiply(dtype, b_words, a_words, octets: int, sums):
    """Add the products of 64 bytes of 16 rows with those of all tokens to `sums[octet]`."""
    name = 'e4m3' if dtype is FP8 else 'bf16'
    pair_local = T.alloc_local((4,), T.uint32)
    for step in T.unroll(2):
        for e in T.unroll(4):
            pair_local[e] = b_words[e % 2, step * 2 + e // 2]
        for octet in T.unroll(octets):
            T.ptx_mma(
                'float32',
                'm16n8k32' if dtype is FP8 else 'm16n8k16',
                'row',
                'col',
                name,
                name,
                'fp32',
                T.access_ptr(pair_local[0], 'r', 4),
                0,
                T.access_ptr(a_words[octet, step * 2], 'r', 2),
                0,
                T.access_ptr(sums[octet, 0], 'rw', 4),
                0,
                T.bool(False),
            )


@kernel(pass_configs=PASS_CONFIGS, serves=serves)
def decode_layer_kernel(
    num_experts: int,
    hidden: int,
    inter: int,
    top_k: int,
    octets: int,
    dtype: torch.dtype,
    scoring: ScoringFunc,
    renormalize: bool,
    biased: bool,
    num_groups: int,
    num_topk_groups: int,
    normed: bool,
    residual: bool,
):
    """Up to `8 * octets` tokens."""
    fp8 = dtype is FP8
    elem, size = T.dtype(dtype), dtype.itemsize
    lanes, depth = 16 // size, TILE // size  # channels of a vector of a lane, and of a tile
    tokens, chosen = octets * OCTET, most_chosen(num_experts, top_k, octets)
    ring = ring_tiles(num_experts, hidden, top_k, octets, dtype)
    words = -(-num_experts // WARP)
    vectors, down_vectors = (-(-width // (WARP * VECTOR)) for width in (hidden, inter))  # of a lane and a token
    up_items, up_tiles = inter // OCTET, hidden // depth  # of an expert, of an item
    down_items, down_tiles = hidden // ROWS, inter // depth
    groups = max(hidden, inter) // GROUP if fp8 else 1
    layout = RowLayout.of(num_experts, 4, 16)
    ranking = ScoreRanking.of(layout, top_k, scoring, biased, num_groups, num_topk_groups)
    all_chosen = top_k == num_experts
    is_softmax = scoring == ScoringFunc.SOFTMAX
    num_tokens, x_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch')
    sf_shape = (lambda n, k: (num_experts, n // GROUP, k // GROUP)) if fp8 else (lambda n, k: (1, 1, 1))

    @macro
    def load_z(x, norm_weight, token, v, factor, x_local, z_local):
        """The normalized channels of a vector."""
        first = (v * WARP + T.get_thread_binding() % WARP) * VECTOR
        for e in T.vectorized(VECTOR):
            x_local[e] = x[token, first + e]
        if normed:
            for e in T.unroll(VECTOR):
                weight = T.cast(norm_weight[first + e], 'float32')
                z_local[e] = T.cast(T.cast(x_local[e], 'float32') * factor * weight, BF16)
        else:
            for e in T.vectorized(VECTOR):
                z_local[e] = x_local[e]

    @macro
    def copy_rows(weight, weight_sf, expert, first, second, tile, slot, ring_shared, sf_shared):
        """Start to copy 8 rows from `first` on and 8 from `second` on: the bytes of this lane."""
        thread = T.get_thread_binding()
        row, column = thread % WARP // 4, thread % 4 * lanes
        for half in (0, 1):
            for v in (0, 1):
                T.ptx_cp_async(
                    T.access_ptr(ring_shared[slot, half, v, thread, 0], 'w', lanes),
                    T.access_ptr(
                        weight[expert, (second if half else first) + row, tile * depth + v * (depth // 2) + column],
                        'r',
                        lanes,
                    ),
                    lanes,
                )
            if fp8:
                T.ptx_cp_async(
                    T.access_ptr(sf_shared[slot, thread, half], 'w', 1),
                    T.access_ptr(weight_sf[expert, (second if half else first) // GROUP, tile], 'r', 1),
                    1,
                )

    @macro
    def copy_next(turn, slot, counts, at, weights, list_shared, ring_shared, sf_shared):
        """Start to copy the tile of a turn, if there is one; every call is one group of copies."""
        up_first, _, up_turns, down_first, _, down_turns = counts
        gate_up, gate_up_sf, down, down_sf = weights
        warp = T.get_thread_binding() // WARP
        # `at` holds tile, item, expert and row, so that each is computed once.
        if turn < up_turns:
            at[0] = warp + turn * NUM_WARPS
            at[1] = up_first + at[0] // up_tiles
            at[0] = at[0] % up_tiles
            at[2] = list_shared[at[1] // up_items]
            at[3] = at[1] % up_items * OCTET
            copy_rows(gate_up, gate_up_sf, at[2], at[3], inter + at[3], at[0], slot, ring_shared, sf_shared)
        elif turn < up_turns + down_turns:
            at[0] = warp + (turn - up_turns) * NUM_WARPS
            at[1] = down_first + at[0] // down_tiles
            at[0] = at[0] % down_tiles
            at[2] = list_shared[at[1] // down_items]
            at[3] = at[1] % down_items * ROWS
            copy_rows(down, down_sf, at[2], at[3], at[3] + OCTET, at[0], slot, ring_shared, sf_shared)
        T.ptx_commit_group()

    @macro
    def sum_of_warps(i, residue, sum_shared, total_local, found_local):
        """Exchange the sums of the warps; those of warp i % 8 are complete then."""
        thread = T.get_thread_binding()
        warp, lane = thread // WARP, thread % WARP
        for octet in T.unroll(octets):
            for e in T.vectorized(4):
                sum_shared[i % 2, residue, octet, lane, e] = total_local[octet, e]
        T.sync_threads()
        if warp == i % NUM_WARPS:
            T.clear(total_local)
            for w in T.unroll(NUM_WARPS):
                for octet in T.unroll(octets):
                    for e in T.vectorized(4):
                        found_local[octet, e] = sum_shared[i % 2, w, octet, lane, e]
                    for e in T.unroll(4):
                        total_local[octet, e] = total_local[octet, e] + found_local[octet, e]

    @macro
    def sequence(num_used, block, workers):
        """Items of this block, and tiles of this warp: the first item and the number of items of up, then of down."""
        warp = T.get_thread_binding() // WARP
        up_first = num_used * up_items * block // workers
        up_count = num_used * up_items * (block + 1) // workers - up_first
        down_first = num_used * down_items * block // workers
        down_count = num_used * down_items * (block + 1) // workers - down_first
        up_turns = T.shift_right(T.max(up_count * up_tiles - warp, 0) + NUM_WARPS - 1, TURN_BITS)
        down_turns = T.shift_right(T.max(down_count * down_tiles - warp, 0) + NUM_WARPS - 1, TURN_BITS)
        return up_first, up_count, up_turns, down_first, down_count, down_turns

    @macro
    def store_vector(z_local, token, v, width: int, v_local, code_local, z_shared, z_sf_shared):
        """Store a vector of a token to shared memory, quantized for fp8; all lanes call it."""
        lane = T.get_thread_binding() % WARP
        first = (v * WARP + lane) * VECTOR
        if fp8:
            amax = T.alloc_var('float32')
            amax = AMAX_FLOOR
            for e in T.unroll(VECTOR):
                v_local[e] = T.cast(z_local[e], 'float32')
                amax = T.max(amax, T.abs(v_local[e]))
            for step in (8, 4, 2, 1):
                amax = T.max(amax, T.shfl_xor(amax, step))
            for e in T.unroll(VECTOR):
                v_local[e] = v_local[e] * (T.float32(FP8_MAX) / amax)
            for e in T.vectorized(VECTOR):
                code_local[e] = T.cast(v_local[e], elem)
            if first < width and lane % (GROUP // VECTOR) == 0:
                z_sf_shared[token, first // GROUP] = amax / T.float32(FP8_MAX)
        if first < width:
            for e in T.vectorized(VECTOR):
                z_shared[token, first + e] = code_local[e] if fp8 else z_local[e]

    @macro
    def multiply_item(i, tiles: int, now, copied, z_shared, z_sf_shared, registers, sum_shared):
        """The sums of an item of `tiles` tiles; those of warp i % 8 are complete in the end. `now` is turn and slot."""
        a_local, b_local, total_local, group_local, found_local = registers
        ring_shared, sf_shared = copied[-2:]
        thread = T.get_thread_binding()
        warp, lane = thread // WARP, thread % WARP
        a_words, b_words = T.view(a_local, (octets, 4), T.uint32), T.view(b_local, (2, 4), T.uint32)
        start = T.shift_right(i * tiles - warp + NUM_WARPS - 1, TURN_BITS)
        end = T.shift_right((i + 1) * tiles - warp + NUM_WARPS - 1, TURN_BITS)
        T.clear(total_local)
        for own in T.serial(end - start):
            tile = warp + (start + own) * NUM_WARPS - i * tiles
            T.ptx_wait_group(ring - 1)
            if fp8:
                T.clear(group_local)
            for v in (0, 1):
                for half in T.unroll(2):
                    for e in T.vectorized(lanes):
                        b_local[half, e] = ring_shared[now[1], half, v, thread, e]
                for octet in T.unroll(octets):
                    for e in T.vectorized(lanes):
                        a_local[octet, e] = z_shared[
                            octet * OCTET + lane // 4, tile * depth + v * (depth // 2) + lane % 4 * lanes + e
                        ]
                multiply(dtype, b_words, a_words, octets, group_local if fp8 else total_local)
            if fp8:
                for octet in T.unroll(octets):
                    for e in T.unroll(4):
                        both = (
                            sf_shared[now[1], thread, e // 2] * z_sf_shared[octet * OCTET + lane % 4 * 2 + e % 2, tile]
                        )
                        total_local[octet, e] = T.ieee_fmaf(group_local[octet, e], both, total_local[octet, e])
            copy_next(now[0] + ring, now[1], *copied)
            now[0] = now[0] + 1
            now[1] = T.if_then_else(now[1] == ring - 1, 0, now[1] + 1)
        residue = T.bitwise_and(warp - i * tiles, NUM_WARPS - 1)
        sum_of_warps(i, residue, sum_shared, total_local, found_local)

    @T.prim_func
    def decode_layer(
        x: T.StridedTensor((num_tokens, hidden), (x_pitch, 1), BF16),
        norm_weight: T.Tensor((hidden,), BF16),
        gate_weight: T.Tensor((num_experts, hidden), BF16),
        bias: T.Tensor((num_experts,), 'float32'),
        gate_up: T.Tensor((num_experts, 2 * inter, hidden), elem),
        gate_up_sf: T.Tensor(sf_shape(2 * inter, hidden), 'float32'),
        down: T.Tensor((num_experts, hidden, inter), elem),
        down_sf: T.Tensor(sf_shape(hidden, inter), 'float32'),
        logits: T.Tensor((num_tokens, num_experts), 'float32'),
        act: T.Tensor((num_tokens * top_k, inter), BF16),
        part: T.Tensor((num_tokens * top_k, hidden), 'float32'),
        y: T.Tensor((num_tokens, hidden), BF16),
        eps: T.float32,
        scale: T.float32,
        workers: T.int32,
    ):
        with T.Kernel(workers, threads=THREADS) as block:
            T.assume(x_pitch % VECTOR == 0)
            T.import_source(FAST_FUNCTIONS)
            thread = T.get_thread_binding()
            warp, lane = thread // WARP, thread % WARP
            z_shared = T.alloc_shared((tokens, max(hidden, inter) + 64 // size), elem)
            z_sf_shared = T.alloc_shared((tokens, groups), 'float32')
            ring_shared = T.alloc_shared((ring, 2, 2, THREADS, lanes), elem)
            sf_shared = T.alloc_shared((ring if fp8 else 1, THREADS, 2), 'float32')
            sum_shared = T.alloc_shared((2, NUM_WARPS, octets, WARP, 4), 'float32')
            expert_shared = T.alloc_shared((tokens, top_k), T.int32)
            weight_shared = T.alloc_shared((tokens, top_k), 'float32')
            mask_shared = T.alloc_shared((words,), T.uint32)
            list_shared = T.alloc_shared((chosen,), T.int32)
            slot_shared = T.alloc_shared((chosen, tokens), T.int32)

            a_local = T.alloc_local((octets, lanes), elem)
            b_local = T.alloc_local((2, lanes), elem)
            total_local = T.alloc_local((octets, 4), 'float32')
            group_local = T.alloc_local((octets, 4), 'float32')
            found_local = T.alloc_local((octets, 4), 'float32')
            registers = a_local, b_local, total_local, group_local, found_local
            place_local = T.alloc_local((4,), T.int32)
            now = T.alloc_local((2,), T.int32)
            now[0] = 0
            now[1] = 0
            weights = gate_up, gate_up_sf, down, down_sf
            if all_chosen:  # the weights need not wait for the choice
                for i in T.serial(-(-num_experts // THREADS)):
                    if i * THREADS + thread < num_experts:
                        list_shared[i * THREADS + thread] = i * THREADS + thread
                T.sync_threads()
                parts = sequence(num_experts, block, workers)
                copied = parts, place_local, weights, list_shared, ring_shared, sf_shared
                for i in T.unroll(ring):
                    copy_next(i, i, *copied)

            # 1: tokens and logits
            w_local = T.alloc_local((vectors, VECTOR), BF16)
            x_local = T.alloc_local((VECTOR,), BF16)
            z_local = T.alloc_local((VECTOR,), BF16)
            v_local = T.alloc_local((VECTOR,), 'float32')
            code_local = T.alloc_local((VECTOR,), elem)
            total = T.alloc_var('float32')
            factor = T.alloc_var('float32')

            for v in T.unroll(vectors):
                if block < num_experts and (v * WARP + lane) * VECTOR < hidden:
                    for e in T.vectorized(VECTOR):
                        w_local[v, e] = gate_weight[block, (v * WARP + lane) * VECTOR + e]
            for r in T.serial(octets):
                token = r * OCTET + warp
                factor = 1.0
                if normed and token < num_tokens:
                    total = 0.0
                    for v in T.unroll(vectors):
                        if (v * WARP + lane) * VECTOR < hidden:
                            for e in T.vectorized(VECTOR):
                                x_local[e] = x[token, (v * WARP + lane) * VECTOR + e]
                            for e in T.unroll(VECTOR):
                                total = total + T.cast(x_local[e], 'float32') * T.cast(x_local[e], 'float32')
                    for step in (16, 8, 4, 2, 1):
                        total = total + T.shfl_xor(total, step)
                    factor = T.rsqrt(total / T.float32(hidden) + eps)
                for v in T.unroll(vectors):
                    for e in T.vectorized(VECTOR):
                        z_local[e] = T.cast(0, BF16)
                    if (v * WARP + lane) * VECTOR < hidden:  # noqa: SIM102
                        if token < num_tokens:
                            load_z(x, norm_weight, token, v, factor, x_local, z_local)
                    store_vector(z_local, token, v, hidden, v_local, code_local, z_shared, z_sf_shared)
                for turn in T.serial(T.truncdiv(T.max(num_experts - block + workers - 1, 0), workers)):
                    expert = turn * workers + block
                    if turn > 0 or r > 0:
                        for v in T.unroll(vectors):
                            if (v * WARP + lane) * VECTOR < hidden:
                                for e in T.vectorized(VECTOR):
                                    w_local[v, e] = gate_weight[expert, (v * WARP + lane) * VECTOR + e]
                    if token < num_tokens:
                        total = 0.0
                        for v in T.unroll(vectors):
                            if (v * WARP + lane) * VECTOR < hidden:
                                load_z(x, norm_weight, token, v, factor, x_local, z_local)
                                for e in T.unroll(VECTOR):
                                    total = T.ieee_fmaf(
                                        T.cast(z_local[e], 'float32'), T.cast(w_local[v, e], 'float32'), total
                                    )
                        for step in (16, 8, 4, 2, 1):
                            total = total + T.shfl_xor(total, step)
                        if lane == 0:
                            logits[token, expert] = total
            T.sync_grid()

            # 2: the experts of all tokens
            row_local = T.alloc_local((1, layout.num_slots), 'float32')
            expert_local = T.alloc_local((ranking.num_picks,), T.int32)
            value_local = T.alloc_local((ranking.num_picks,), 'float32')
            rows_local = T.alloc_local((1,), T.int32)
            own_token = T.alloc_var(T.int32)
            peak = T.alloc_var('float32')
            at = Place(NUM_WARPS, 1, thread, rows_local, own_token)
            for r in T.serial(octets):
                own_token = r * OCTET + warp
                rows_local[0] = own_token
                if own_token < num_tokens:
                    load_rows(logits, at, layout, row_local)
                    total = 1.0
                    if is_softmax and not renormalize:
                        peak, total = softmax_of_row(row_local, 0, layout.num_slots)
                    select_topk(ranking, logits, Bias(bias), at, row_local, expert_local, value_local)
                    if renormalize:
                        total = sum_of_renormalized(value_local, scoring, at, top_k)
                    elif is_softmax:
                        exp_of_chosen(value_local, peak, at, top_k)
                    if lane < top_k:
                        expert_shared[own_token, lane] = expert_local[0]
                        weight_shared[own_token, lane] = value_local[0] / total * scale
                T.sync_warp()  # the next choice uses the same shared memory
            T.sync_threads()
            used = T.alloc_var('bool')
            num_used = T.alloc_var(T.int32, init=0)
            place = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            votes = T.alloc_var(T.uint32)
            for i in T.serial(-(-words // NUM_WARPS)):
                if i * NUM_WARPS + warp < words:
                    used = False
                    for token in T.serial(num_tokens):
                        for j in T.unroll(top_k):
                            if expert_shared[token, j] == (i * NUM_WARPS + warp) * WARP + lane:
                                used = True
                    votes = T.cast(T.ballot(used), T.uint32)
                    if lane == 0:
                        mask_shared[i * NUM_WARPS + warp] = votes
            T.sync_threads()
            for word in T.serial(words):
                votes = mask_shared[word]
                if word % NUM_WARPS == warp:  # noqa: SIM102
                    if (votes >> T.cast(lane, T.uint32)) & T.uint32(1) != T.uint32(0):
                        below = votes & ((T.uint32(1) << T.cast(lane, T.uint32)) - T.uint32(1))
                        place = num_used + T.cast(T.popcount(below), T.int32)
                        if not all_chosen:
                            list_shared[place] = word * WARP + lane
                        for token in T.serial(tokens):
                            slot = -1
                            if token < num_tokens:
                                for j in T.unroll(top_k):
                                    if expert_shared[token, j] == word * WARP + lane:
                                        slot = j
                            slot_shared[place, token] = slot
                num_used = num_used + T.cast(T.popcount(votes), T.int32)
            T.sync_threads()

            if not all_chosen:
                parts = sequence(num_used, block, workers)
                copied = parts, place_local, weights, list_shared, ring_shared, sf_shared
                for i in T.unroll(ring):
                    copy_next(i, i, *copied)
            up_first, up_count, _, down_first, down_count, _ = parts

            # 3: gate, up and SwiGLU
            for i in T.serial(up_count):
                rank = (up_first + i) // up_items
                row = (up_first + i) % up_items * OCTET
                multiply_item(i, up_tiles, now, copied, z_shared, z_sf_shared, registers, sum_shared)
                if warp == i % NUM_WARPS:
                    for octet in T.unroll(octets):
                        for e in T.unroll(2):
                            token = octet * OCTET + lane % 4 * 2 + e
                            if slot_shared[rank, token] >= 0:
                                gate = total_local[octet, e]
                                act[token * top_k + slot_shared[rank, token], row + lane // 4] = T.cast(
                                    gate / (T.float32(1) + T.exp(-gate)) * total_local[octet, 2 + e], BF16
                                )
            T.sync_grid()

            # 4: down
            for i in T.serial(down_count):
                rank = (down_first + i) // down_items
                row = (down_first + i) % down_items * ROWS
                if i == 0 or row == 0:  # another expert: its activations replace those in shared memory
                    for r in T.serial(octets):
                        token = r * OCTET + warp
                        if slot_shared[rank, token] >= 0:
                            for v in T.unroll(down_vectors):
                                for e in T.vectorized(VECTOR):
                                    z_local[e] = T.cast(0, BF16)
                                if (v * WARP + lane) * VECTOR < inter:
                                    for e in T.vectorized(VECTOR):
                                        z_local[e] = act[
                                            token * top_k + slot_shared[rank, token], (v * WARP + lane) * VECTOR + e
                                        ]
                                store_vector(z_local, token, v, inter, v_local, code_local, z_shared, z_sf_shared)
                    T.sync_threads()
                multiply_item(i, down_tiles, now, copied, z_shared, z_sf_shared, registers, sum_shared)
                if warp == i % NUM_WARPS:
                    for octet in T.unroll(octets):
                        for e in T.unroll(4):
                            token = octet * OCTET + lane % 4 * 2 + e % 2
                            if slot_shared[rank, token] >= 0:
                                part[token * top_k + slot_shared[rank, token], row + e // 2 * OCTET + lane // 4] = (
                                    total_local[octet, e]
                                )
            T.ptx_wait_group(0)
            T.sync_grid()

            # 5: the weighted sum
            for i in T.serial(T.ceildiv(num_tokens * hidden, workers * THREADS)):
                index = (i * workers + block) * THREADS + thread
                if index < num_tokens * hidden:
                    token, channel = index // hidden, index % hidden
                    total = 0.0
                    if residual:
                        total = T.cast(x[token, channel], 'float32')
                    for j in T.unroll(top_k):
                        total = T.ieee_fmaf(weight_shared[token, j], part[token * top_k + j, channel], total)
                    y[token, channel] = T.cast(total, BF16)

    return decode_layer
