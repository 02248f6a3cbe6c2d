"""Kernel of `fused_mapping`; see there for the method."""

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro

WARP = 32
MAX_CHUNKS = 128

#: Rounds of 32 slots that a warp has in flight.
ROUNDS = 4

#: Warps own their part of shared memory, so barriers of the whole block are written where they are needed.
PASS_CONFIGS = {
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    'TL_DISABLE_SHARED_MEMORY_REUSE': True,
}

# Config -------------------------------------------------------------------------------------


def choose(num_experts: int, num_topk: int, index_dtype: torch.dtype, size: int) -> dict:
    """About 1024 slots for each block; many experts allow fewer chunks (all are summed) and warps (shared memory)."""
    most = 128 if num_experts <= 64 else 64 if num_experts <= 256 else 32
    num_chunks = next((n for n in (1, 8, 32, 64) if size <= n * (2048 if n == 1 else 1024)), 128)
    num_threads = next(n for n in (1024, 512, 256, 128) if n * num_experts <= 1 << 19)
    return dict(num_chunks=min(num_chunks, most), num_threads=num_threads)


# Kernel -------------------------------------------------------------------------------------


@macro
def load_experts(topk_idx, first, stop, num_experts, expert_local):
    """Experts of the slots first + lane, first + 32 + lane, ... before `stop`; -1 if there is none."""
    num_topk = topk_idx.shape[1]
    for i in T.unroll(ROUNDS):
        slot = first + i * WARP + T.get_thread_binding() % WARP
        expert_local[i] = -1
        if slot < stop:
            index = topk_idx[slot // num_topk, slot % num_topk]
            if index >= 0 and index < num_experts:
                expert_local[i] = T.cast(index, T.int32)


@macro
def count_experts(topk_idx, first, stop, num_experts, expert_local, count_shared, row):
    """Add the experts of a warp's slots to row `row` of `count_shared`; `expert_local` holds the first of them."""
    for step in T.serial(T.ceildiv(stop - first, WARP * ROUNDS)):
        if step > 0:
            load_experts(topk_idx, first + step * (WARP * ROUNDS), stop, num_experts, expert_local)
        for i in T.unroll(ROUNDS):
            if expert_local[i] >= 0:
                T.atomic_add(count_shared[row, expert_local[i]], 1)


def _lanes(num_experts: int, num_warps: int) -> int:
    """Neighbouring lanes that own an expert: they share the chunks to sum and the warps to scan."""
    return max(n for n in (1, 2, 4, 8, 16, 32) if n == 1 or (n * num_experts <= num_warps * WARP and n <= num_warps))


@macro
def sum_chunks(counts, chunk, num_chunks, num_warps, before_shared, count_shared):
    """For every expert, the slots in the chunks before this one and in all chunks."""
    num_experts = count_shared.shape[0]
    lanes = _lanes(int(num_experts), num_warps)
    lane = T.get_thread_binding() % lanes
    before = T.alloc_var(T.int32)
    total = T.alloc_var(T.int32)
    count = T.alloc_var(T.int32)
    for i in T.serial(T.ceildiv(num_experts * lanes, num_warps * WARP)):
        expert = (i * (num_warps * WARP) + T.get_thread_binding()) // lanes
        before = 0
        total = 0
        for c in T.unroll(T.ceildiv(num_chunks, lanes)):
            if expert < num_experts and c * lanes + lane < num_chunks:
                count = counts[expert, c * lanes + lane]
                total += count
                if c * lanes + lane < chunk:
                    before += count
        for s in T.unroll(lanes.bit_length() - 1):
            total += T.shfl_xor(total, 1 << s)
            before += T.shfl_xor(before, 1 << s)
        if expert < num_experts and lane == 0:
            before_shared[expert] = before
            count_shared[expert] = total


@macro
def scan_warps(num_chunks, alignment, place_shared, before_shared, count_shared, size_shared):
    """Turn the counts of each warp into its first places within the expert; sizes of experts follow from all counts."""
    num_warps = place_shared.shape[0]
    num_experts = count_shared.shape[0]
    lanes = _lanes(int(num_experts), int(num_warps))
    own_warps = num_warps // lanes
    lane = T.get_thread_binding() % lanes
    own = T.alloc_var(T.int32)
    scan = T.alloc_var(T.int32)
    count = T.alloc_var(T.int32)
    for i in T.serial(T.ceildiv(num_experts * lanes, num_warps * WARP)):
        expert = (i * (num_warps * WARP) + T.get_thread_binding()) // lanes
        own = 0
        for w in T.unroll(own_warps):
            if expert < num_experts:
                own += place_shared[lane * own_warps + w, expert]
        scan = own
        for s in T.unroll(lanes.bit_length() - 1):
            count = T.shfl_up(scan, 1 << s, lanes)
            if lane >= (1 << s):
                scan += count
        if expert < num_experts:
            if lane == lanes - 1:
                if num_chunks == 1:
                    count_shared[expert] = scan
                size_shared[expert] = T.truncdiv(count_shared[expert] + alignment - 1, alignment) * alignment
            scan -= own
            if num_chunks > 1:
                scan += before_shared[expert]
            for w in T.unroll(own_warps):
                count = place_shared[lane * own_warps + w, expert]
                place_shared[lane * own_warps + w, expert] = scan
                scan += count


@macro
def set_place(pos, expert, slot, num_topk, pos_to_expert, pos_to_token, pos_to_token_topk):
    """Say who is at a place; -1 for nobody."""
    pos_to_expert[pos] = expert
    pos_to_token[pos] = T.if_then_else(slot >= 0, T.truncdiv(slot, num_topk), -1)
    pos_to_token_topk[pos] = slot


@kernel(
    choose=choose,
    space=dict(num_chunks=(1, 8, 32, 64, 128), num_threads=(128, 256, 512, 1024)),
    pass_configs=PASS_CONFIGS,
)
def fused_mapping_kernel(
    num_experts: int, num_topk: int, index_dtype: torch.dtype, *, num_chunks: int, num_threads: int
):
    """Maps of a (num_tokens, num_topk) choice; `counts` is scratch."""
    num_warps = num_threads // WARP
    num_tokens, num_expanded = T.dynamic('num_tokens'), T.dynamic('num_expanded')

    @T.prim_func
    def fused_mapping(
        topk_idx: T.Tensor((num_tokens, num_topk), T.dtype(index_dtype)),
        counts: T.Tensor((num_experts, MAX_CHUNKS), T.int32),
        pos_to_expert: T.Tensor((num_expanded,), T.int32),
        pos_to_token: T.Tensor((num_expanded,), T.int32),
        pos_to_token_topk: T.Tensor((num_expanded,), T.int32),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), T.int32),
        expert_start: T.Tensor((num_experts,), T.int32),
        expert_end: T.Tensor((num_experts,), T.int32),
        num_tokens_per_expert: T.Tensor((num_experts,), T.int32),
        overflow: T.Tensor((1,), T.int32),
        alignment: T.int32,
    ):
        num_slots = num_tokens * num_topk
        run = T.ceildiv(num_slots, num_chunks * num_warps)

        if num_chunks > 1:
            with T.Kernel(num_chunks, threads=num_threads) as chunk:
                count_shared = T.alloc_shared((1, num_experts), T.int32)
                expert_local = T.alloc_local((ROUNDS,), T.int32)
                tx = T.get_thread_binding()
                first = (chunk * num_warps + tx // WARP) * run
                stop = T.min(first + run, num_slots)

                load_experts(topk_idx, first, stop, num_experts, expert_local)
                for i in T.serial(T.ceildiv(num_experts, num_threads)):
                    if i * num_threads + tx < num_experts:
                        count_shared[0, i * num_threads + tx] = 0
                T.sync_threads()
                count_experts(topk_idx, first, stop, num_experts, expert_local, count_shared, 0)
                T.sync_threads()
                for i in T.serial(T.ceildiv(num_experts, num_threads)):
                    if i * num_threads + tx < num_experts:
                        counts[i * num_threads + tx, chunk] = count_shared[0, i * num_threads + tx]

        with T.Kernel(num_chunks, threads=num_threads) as chunk:
            place_shared = T.alloc_shared((num_warps, num_experts | 1), T.int32)  # odd pitch: warps in different banks
            before_shared = T.alloc_shared((num_experts,), T.int32)
            count_shared = T.alloc_shared((num_experts,), T.int32)
            size_shared = T.alloc_shared((num_experts,), T.int32)  # the count, aligned
            end_shared = T.alloc_shared((num_experts,), T.int32)
            expert_local = T.alloc_local((ROUNDS,), T.int32)
            tx = T.get_thread_binding()
            pos = T.alloc_var(T.int32)
            lane, warp = tx % WARP, tx // WARP
            first = (chunk * num_warps + warp) * run
            stop = T.min(first + run, num_slots)

            load_experts(topk_idx, first, stop, num_experts, expert_local)
            for i in T.serial(T.ceildiv(num_warps * (num_experts | 1), num_threads)):
                item = i * num_threads + tx
                if item < num_warps * (num_experts | 1):
                    place_shared[item // (num_experts | 1), item % (num_experts | 1)] = 0
            if num_chunks > 1:
                sum_chunks(counts, chunk, num_chunks, num_warps, before_shared, count_shared)
            T.sync_threads()
            count_experts(topk_idx, first, stop, num_experts, expert_local, place_shared, warp)
            T.sync_threads()
            scan_warps(num_chunks, alignment, place_shared, before_shared, count_shared, size_shared)
            T.sync_threads()
            T.cumsum(size_shared, end_shared)
            T.sync_threads()

            for step in T.serial(T.ceildiv(stop - first, WARP * ROUNDS)):
                if run > WARP * ROUNDS:  # otherwise they are still there
                    load_experts(topk_idx, first + step * (WARP * ROUNDS), stop, num_experts, expert_local)
                for i in T.unroll(ROUNDS):
                    slot = first + (step * ROUNDS + i) * WARP + lane
                    expert = expert_local[i]
                    peers = T.match_any_sync(expert)
                    rank = T.cast(T.popcount(peers & ((T.uint32(1) << T.cast(lane, T.uint32)) - T.uint32(1))), T.int32)
                    pos = -1
                    if expert >= 0:
                        pos = place_shared[warp, expert] + rank
                    T.sync_warp()
                    if expert >= 0 and rank == 0:
                        place_shared[warp, expert] = pos + T.cast(T.popcount(peers), T.int32)
                    T.sync_warp()
                    if slot < stop:
                        if expert >= 0:
                            pos += end_shared[expert] - size_shared[expert]
                            if pos >= num_expanded:
                                pos = -1
                        token_topk_to_pos[slot // num_topk, slot % num_topk] = pos
                        if pos >= 0:
                            set_place(pos, expert, slot, num_topk, pos_to_expert, pos_to_token, pos_to_token_topk)

            for i in T.serial(T.ceildiv(num_experts, num_chunks * num_warps)):
                expert = (i * num_warps + warp) * num_chunks + chunk
                if expert < num_experts:
                    start = end_shared[expert] - size_shared[expert]
                    end = T.min(end_shared[expert], num_expanded)
                    used = start + count_shared[expert]
                    if lane == 0:
                        expert_start[expert] = T.min(start, num_expanded)
                        expert_end[expert] = end
                        num_tokens_per_expert[expert] = size_shared[expert]
                    for j in T.serial(T.ceildiv(end - used, WARP)):
                        pos = used + j * WARP + lane
                        if pos < end:
                            set_place(pos, -1, -1, num_topk, pos_to_expert, pos_to_token, pos_to_token_topk)

            last = end_shared[num_experts - 1]
            if chunk == 0 and tx == 0:
                overflow[0] = T.max(last - num_expanded, 0)
            for j in T.serial(T.ceildiv(num_expanded - last, num_chunks * num_threads)):
                pos = last + (j * num_chunks + chunk) * num_threads + tx
                if pos < num_expanded:
                    set_place(pos, -1, -1, num_topk, pos_to_expert, pos_to_token, pos_to_token_topk)

    return fused_mapping
