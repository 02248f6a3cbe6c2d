"""Kernel of `route`: from hidden states to quantized rows in expert order in one launch, for few tokens.

    1   a tile of 64 tokens and 64 experts, over one part of the channels, per block: TMA and wgmma, as in `gate_logits`
    -   grid barrier
    2   a token per block: the sum of the parts, then the choice of its experts by a warp, as in `topk_gating`
    -   grid barrier
    3   every block counts all choices, so it knows where the rows of its tokens go. It writes their maps, codes and
        scale factors, and a share of the padding.

All sums have the order that they have in those ops, so the results have the same bits. All blocks must be resident.
"""

import math
from typing import Any

import torch

from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.device.codes import code_registers
from tile_kernels.device.scales import sf_register_dtype
from tile_kernels.device.vectors import LANE, load_lane
from tile_kernels.moe._checks import BITS
from tile_kernels.moe._macros import (
    FAST_FUNCTIONS,
    WARP_PASS_CONFIGS,
    Place,
    RowLayout,
    exp_of_chosen,
    load_rows,
    softmax_of_row,
    sum_of_renormalized,
)
from tile_kernels.moe.expand_and_per_token_cast import quantise_lanes, sf_size_of, store_codes
from tile_kernels.moe.expand_to_fused_with_sf_kernels import sf_type
from tile_kernels.moe.fused_mapping_kernels import scan_experts, set_place
from tile_kernels.moe.scoring import ScoringFunc
from tile_kernels.moe.topk_gate_kernels import select_topk
from tile_kernels.moe.topk_gating_kernels import Bias, ScoreRanking

THREADS, NUM_WARPS = 128, 4
BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 128  # those of `gate_logits` for few tokens
MAX_STAGES = 4
MAX_TOKENS, MAX_HIDDEN = 256, 8192
BF16 = 'bfloat16'


def num_tiles(tiles_m: int, num_experts: int, num_parts: int) -> int:
    """Blocks with a part of a tile of logits."""
    return -(-num_experts // BLOCK_N) * tiles_m * num_parts


def num_blocks(tiles_m: int, num_experts: int, num_parts: int) -> int:
    """Blocks of the grid: also enough for one or two tokens per block."""
    return max(num_tiles(tiles_m, num_experts, num_parts), min(BLOCK_M * tiles_m, 2 * BLOCK_M))


def serves(static: Any, gpu: Any) -> bool:
    """GPUs with wgmma and TMA."""
    return gpu.has_wgmma


@macro
def load_step(x, gate_weight, row, col, part, step, num_steps: int, x_shared, weight_shared, full):
    """Start the copies of one step along the channels."""
    slot = step % full.shape[0]
    k = (part * num_steps + step) * BLOCK_K
    T.tma_copy(x[row : row + BLOCK_M, k : k + BLOCK_K], x_shared[slot, :, :], barrier=full[slot])
    T.tma_copy(gate_weight[col : col + BLOCK_N, k : k + BLOCK_K], weight_shared[slot, :, :], barrier=full[slot])
    T.barrier_arrive(full[slot])


@macro
def quantise_row(x, token, piece: int, hidden: int, fmt: QuantFormat, amax_floor, code_local, sf_shared):
    """The codes of the lanes of this thread, and the scale factors of a row in shared memory."""
    vectors, group_lanes = int(code_local.shape[0]), fmt.sf_block[1] // LANE
    num_sf = -(-hidden // fmt.sf_block[1])
    lanes_local = T.alloc_local((vectors, LANE), BF16)
    amax = T.alloc_local((vectors,), T.float32)
    sf = T.alloc_local((vectors,), sf_register_dtype(fmt))
    sf_inv = T.alloc_local((vectors,), T.float32)
    v_local = T.alloc_local((LANE,), T.float32)
    y_local = T.alloc_local(*code_registers(fmt))
    tx = T.get_thread_binding()
    T.clear(lanes_local)
    for v in T.unroll(vectors):
        load_lane(x, lanes_local, v, token, tx + v * THREADS, piece, hidden)
    quantise_lanes(lanes_local, fmt, amax_floor, amax, sf, sf_inv, v_local, y_local, code_local)
    for v in T.unroll(vectors):
        if tx % group_lanes == 0:
            exists = (tx + v * THREADS) // group_lanes < num_sf
            sf_shared[(tx + v * THREADS) // group_lanes] = T.if_then_else(exists, sf[v], T.cast(0, sf_shared.dtype))
    slots = vectors * THREADS // group_lanes
    if tx < sf_shared.shape[0] - slots:
        sf_shared[slots + tx] = T.cast(0, sf_shared.dtype)


@kernel(pass_configs=WARP_PASS_CONFIGS, serves=serves)
def route_kernel(
    num_experts: int,
    hidden: int,
    num_parts: int,
    tiles_m: int,
    num_topk: int,
    index_dtype: torch.dtype,
    scoring: ScoringFunc,
    renormalize: bool,
    biased: bool,
    num_groups: int,
    num_topk_groups: int,
    fmt: QuantFormat,
):
    """Up to `64 * tiles_m` tokens."""
    layout = RowLayout.of(num_experts, 4, 16)
    ranking = ScoreRanking.of(layout, num_topk, scoring, biased, num_groups, num_topk_groups)
    is_softmax = scoring == ScoringFunc.SOFTMAX
    num_steps = -(-hidden // (BLOCK_K * num_parts))
    stages = min(num_steps, MAX_STAGES)
    tiles, blocks = num_tiles(tiles_m, num_experts, num_parts), num_blocks(tiles_m, num_experts, num_parts)
    turns = -(-tiles_m * BLOCK_M // blocks)  # tokens of a block
    rounds = -(-num_experts // THREADS)
    # Codes: a thread has the lanes thread, thread + 128, ... of 8 channels.
    stored, width = fmt.data.stored(hidden), fmt.data.stored(LANE)
    num_sf = -(-hidden // fmt.sf_block[1])
    group_lanes = fmt.sf_block[1] // LANE
    vectors = -(-num_sf * group_lanes // THREADS)
    sf_slots = -(-vectors * THREADS // group_lanes // 4) * 4
    sf_size = sf_size_of(fmt, num_sf)
    slots_per_word = sf_size * fmt.sf_pack // fmt.sf_dtype.itemsize
    sf_words = -(-num_sf // slots_per_word)
    sf_dtype = T.dtype(BITS[sf_size])
    piece = math.gcd(LANE, hidden)
    num_tokens, num_expanded, x_pitch = (T.dynamic(name) for name in ('num_tokens', 'num_expanded', 'x_pitch'))

    @T.prim_func
    def route(
        x: T.StridedTensor((num_tokens, hidden), (x_pitch, 1), BF16),
        gate_weight: T.Tensor((num_experts, hidden), BF16),
        bias: T.Tensor((num_experts,), 'float32'),
        parts: T.Tensor((num_parts, num_tokens, num_experts), 'float32'),
        weights: T.Tensor((num_tokens, num_topk), 'float32'),
        indices: T.Tensor((num_tokens, num_topk), T.dtype(index_dtype)),
        pos_to_expert: T.Tensor((num_expanded,), T.int32),
        pos_to_token: T.Tensor((num_expanded,), T.int32),
        pos_to_token_topk: T.Tensor((num_expanded,), T.int32),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), T.int32),
        expert_start: T.Tensor((num_experts,), T.int32),
        expert_end: T.Tensor((num_experts,), T.int32),
        num_tokens_per_expert: T.Tensor((num_experts,), T.int32),
        overflow: T.Tensor((1,), T.int32),
        y: T.Tensor((num_expanded, stored), T.uint8),
        y_sf: sf_type(num_expanded, sf_words, sf_dtype, fmt.col),
        alignment: T.int32,
        scale: T.float32,
        amax_floor: T.float32,
    ):
        with T.Kernel(blocks, threads=THREADS) as block:
            T.assume(x_pitch % 8 == 0)
            T.import_source(FAST_FUNCTIONS)
            x_shared = T.alloc_shared((stages, BLOCK_M, BLOCK_K), BF16)
            weight_shared = T.alloc_shared((stages, BLOCK_N, BLOCK_K), BF16)
            full = T.alloc_barrier([THREADS] * stages)
            sum_frag = T.alloc_fragment((BLOCK_M, BLOCK_N), 'float32')
            tx = T.get_thread_binding()

            # Shared memory and registers of phase 3; what does not depend on the choice is ready before it.
            count_shared = T.alloc_shared((num_experts,), T.int32)
            size_shared = T.alloc_shared((num_experts,), T.int32)
            start_shared = T.alloc_shared((num_experts,), T.int32)
            part_shared = T.alloc_shared((NUM_WARPS,), T.int32)
            own_shared = T.alloc_shared((turns, num_topk), T.int32)
            place_shared = T.alloc_shared((turns, num_topk), T.int32)
            sf_shared = T.alloc_shared((sf_slots,), sf_register_dtype(fmt))
            words_shared = T.view(sf_shared, (sf_slots // slots_per_word,), sf_dtype)
            code_local = T.alloc_local((vectors, width), T.uint8)

            # 1: a part of a tile of logits
            part = block % num_parts
            row, col = block // num_parts % tiles_m * BLOCK_M, block // (num_parts * tiles_m) * BLOCK_N
            if block < tiles:
                for step in T.unroll(stages):
                    load_step(x, gate_weight, row, col, part, step, num_steps, x_shared, weight_shared, full)
            for i in T.serial(T.ceildiv(num_experts, THREADS)):
                if i * THREADS + tx < num_experts:
                    count_shared[i * THREADS + tx] = 0
            for r in T.unroll(turns):
                if tx < num_topk:
                    own_shared[r, tx] = -1
                    place_shared[r, tx] = 0
            if block < num_tokens:
                quantise_row(x, block, piece, hidden, fmt, amax_floor, code_local, sf_shared)
            if block < tiles:
                for step in T.serial(num_steps):
                    slot = step % stages
                    T.mbarrier_wait_parity(full[slot], step // stages % 2)
                    T.wgmma_gemm(
                        x_shared[slot, :, :],
                        weight_shared[slot, :, :],
                        sum_frag,
                        transpose_B=True,
                        clear_accum=step == 0,
                    )
                    T.wait_wgmma(0)
                    if step + stages < num_steps:
                        T.sync_threads()
                        load_step(
                            x, gate_weight, row, col, part, step + stages, num_steps, x_shared, weight_shared, full
                        )
                for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                    if row + i < num_tokens and col + j < num_experts:
                        parts[part, row + i, col + j] = sum_frag[i, j]
            T.sync_grid()

            # 2: the experts of a token
            logits_shared = T.alloc_shared((1, num_experts), 'float32')
            part_local = T.alloc_local((rounds, num_parts), 'float32')
            x_local = T.alloc_local((1, layout.num_slots), 'float32')
            expert_local = T.alloc_local((ranking.num_picks,), 'int32')
            value_local = T.alloc_local((ranking.num_picks,), 'float32')
            rows_local = T.alloc_local((1,), 'int32')
            total = T.alloc_var('float32')
            peak = T.alloc_var('float32')
            zero = T.alloc_var('int32', init=0)
            at = Place(1, 1, tx, rows_local, zero)
            rows_local[0] = 0
            for turn in T.serial(T.ceildiv(num_tokens - block, blocks)):
                token = turn * blocks + block
                for i in T.unroll(rounds):  # all loads are in flight at the same time
                    for p in T.unroll(num_parts):
                        if i * THREADS + tx < num_experts:
                            part_local[i, p] = parts[p, token, i * THREADS + tx]
                for i in T.unroll(rounds):
                    if i * THREADS + tx < num_experts:
                        total = 0.0
                        for p in T.unroll(num_parts):
                            total = total + part_local[i, p]
                        logits_shared[0, i * THREADS + tx] = total
                T.sync_threads()
                if tx < WARP:
                    load_rows(logits_shared, at, layout, x_local)
                    total = 1.0
                    if is_softmax and not renormalize:
                        peak, total = softmax_of_row(x_local, 0, layout.num_slots)
                    select_topk(ranking, logits_shared, Bias(bias), at, x_local, expert_local, value_local)
                    if renormalize:
                        total = sum_of_renormalized(value_local, scoring, at, num_topk)
                    elif is_softmax:
                        exp_of_chosen(value_local, peak, at, num_topk)
                    if at.lane < num_topk:
                        indices[token, at.lane] = T.cast(expert_local[0], T.dtype(index_dtype))
                        weights[token, at.lane] = value_local[0] / total * scale
                        own_shared[turn, at.lane] = expert_local[0]
                T.sync_threads()
            T.sync_grid()

            # 3: maps and rows
            place = T.alloc_var(T.int32)
            chosen = T.alloc_var(T.int32)
            for i in T.serial(T.ceildiv(num_tokens * num_topk, THREADS)):
                slot = i * THREADS + tx
                if slot < num_tokens * num_topk:
                    chosen = T.cast(indices[slot // num_topk, slot % num_topk], T.int32)
                    T.atomic_add(count_shared[chosen], 1)
                    for r in T.unroll(turns):
                        if slot < (r * blocks + block) * num_topk:  # earlier slots of the experts of own tokens
                            for k in T.unroll(num_topk):
                                if own_shared[r, k] == chosen:
                                    T.atomic_add(place_shared[r, k], 1)
            T.sync_threads()
            scan_experts(count_shared, alignment, size_shared, start_shared, part_shared)
            T.sync_threads()
            for turn in T.serial(T.ceildiv(num_tokens - block, blocks)):
                token = turn * blocks + block
                if tx < num_topk:
                    place = place_shared[turn, tx] + start_shared[own_shared[turn, tx]]
                    place_shared[turn, tx] = place
                    token_topk_to_pos[token, tx] = T.if_then_else(place < num_expanded, place, -1)
                    if place < num_expanded:
                        set_place(
                            place,
                            own_shared[turn, tx],
                            token * num_topk + tx,
                            num_topk,
                            pos_to_expert,
                            pos_to_token,
                            pos_to_token_topk,
                        )
                T.sync_threads()
                for k in T.unroll(num_topk, unroll_factor=8):
                    if place_shared[turn, k] < num_expanded:
                        store_codes(code_local, y, place_shared[turn, k], tx, THREADS)
                        for i in T.unroll(T.ceildiv(sf_words, THREADS)):
                            if i * THREADS + tx < sf_words:
                                y_sf[place_shared[turn, k], i * THREADS + tx] = words_shared[i * THREADS + tx]
                if token + blocks < num_tokens:
                    T.sync_threads()
                    quantise_row(x, token + blocks, piece, hidden, fmt, amax_floor, code_local, sf_shared)

            # The ends of experts, and what is behind their rows
            expert = T.alloc_var(T.int32)
            T.clear(code_local)
            for i in T.serial(T.ceildiv(num_experts, blocks * THREADS)):
                expert = (i * blocks + block) * THREADS + tx
                if expert < num_experts:
                    expert_start[expert] = T.min(start_shared[expert], num_expanded)
                    expert_end[expert] = T.min(start_shared[expert] + size_shared[expert], num_expanded)
                    num_tokens_per_expert[expert] = size_shared[expert]
            last = start_shared[num_experts - 1] + size_shared[num_experts - 1]
            if block == 0 and tx == 0:
                overflow[0] = T.max(last - num_expanded, 0)
            for i in T.serial(T.ceildiv(num_experts - block, blocks)):
                expert = i * blocks + block
                used = start_shared[expert] + count_shared[expert]
                end = T.min(start_shared[expert] + size_shared[expert], num_expanded)
                for j in T.serial(T.max(end - used, 0)):
                    clear_place(used + j, code_local, pos_to_expert, pos_to_token, pos_to_token_topk, y, y_sf)
            for j in T.serial(T.ceildiv(num_expanded - last - block, blocks)):
                clear_place(
                    last + j * blocks + block, code_local, pos_to_expert, pos_to_token, pos_to_token_topk, y, y_sf
                )

    return route


@macro
def clear_place(pos, zero_local, pos_to_expert, pos_to_token, pos_to_token_topk, y, y_sf):
    """Mark a position as padding: no token, and zeros as codes and scale factors."""
    tx = T.get_thread_binding()
    if tx == 0:
        set_place(pos, -1, -1, 1, pos_to_expert, pos_to_token, pos_to_token_topk)
    store_codes(zero_local, y, pos, tx, THREADS)
    for i in T.unroll(T.ceildiv(y_sf.shape[1], THREADS)):
        if i * THREADS + tx < y_sf.shape[1]:
            y_sf[pos, i * THREADS + tx] = T.cast(0, y_sf.dtype)
