"""Kernels of `fused_mapping`, which describes the method."""

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import EARLY, WARP, T, begin_early, macro

#: Slots of the smallest chunk; this bounds the scratch for counts.
MIN_CHUNK = 256

#: Positions per block if there are more positions than slots.
FILL = 4096

#: Warps own parts of shared memory, so the code itself places block barriers.
PASS_CONFIGS = {
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    'TL_DISABLE_SHARED_MEMORY_REUSE': True,
}

# Config -------------------------------------------------------------------------------------


def choose(num_experts: int, num_topk: int, index_dtype: torch.dtype, size: int) -> dict:
    """With few slots, every block counts all of them. Otherwise it sums the counts of all chunks, unless very many.

    The cost of a block grows with experts and warps: few slots get small blocks, and many experts get long runs.
    """
    num_threads = next(n for n in (1024, 512, 256) if n * num_experts <= 1 << 20)
    if size <= 1 << 16:
        num_threads = min(num_threads, 512)
    if size <= 4096:
        return dict(launches=1, rounds=1, num_threads=num_threads, early=True)
    rounds = 2 if size <= 1 << 18 and num_experts <= 1024 else 8
    many = num_experts * -(-size // (num_threads * rounds)) > 1 << 16
    return dict(launches=3 if many else 2, rounds=rounds, num_threads=num_threads, early=False)


# Slots --------------------------------------------------------------------------------------


@macro
def load_experts(topk_idx, first, num_experts, expert_local):
    """Experts of the slots first + lane, first + 32 + lane, ...; -1 where there is none."""
    num_topk = topk_idx.shape[1]
    index_local = T.alloc_local((expert_local.shape[0],), topk_idx.dtype)
    for i in T.unroll(expert_local.shape[0]):
        slot = first + i * WARP + T.get_thread_binding() % WARP
        index_local[i] = -1
        if slot < topk_idx.shape[0] * num_topk:
            index_local[i] = topk_idx[slot // num_topk, slot % num_topk]
    for i in T.unroll(expert_local.shape[0]):
        exists = index_local[i] >= 0 and index_local[i] < num_experts
        expert_local[i] = T.if_then_else(exists, T.cast(index_local[i], T.int32), -1)


@macro
def rank_slots(expert_local, warp, rank_local, table_shared):
    """Number of earlier slots of the warp with the same expert; `table_shared[warp]` counts them all."""
    lane = T.get_thread_binding() % WARP
    for i in T.unroll(expert_local.shape[0]):
        expert = expert_local[i]
        peers = T.match_any_sync(expert)
        rank_local[i] = T.cast(T.popcount(peers & ((T.uint32(1) << T.cast(lane, T.uint32)) - T.uint32(1))), T.int32)
        leads = rank_local[i] == 0
        if expert >= 0:
            rank_local[i] = rank_local[i] + table_shared[warp, expert]
        T.sync_warp()
        if expert >= 0 and leads:
            table_shared[warp, expert] = rank_local[i] + T.cast(T.popcount(peers), T.int32)
        T.sync_warp()


def _lanes(num_experts: int, num_warps: int) -> int:
    """Neighboring lanes per expert; each scans some of the warps."""
    return max(n for n in (1, 2, 4, 8, 16, 32) if n == 1 or (n * num_experts <= num_warps * WARP and n <= num_warps))


@macro
def scan_warps(table_shared, count_shared):
    """Exclusive scan of the counts over warps; `count_shared` gets the sums."""
    num_experts = count_shared.shape[0]
    num_warps = table_shared.shape[0]
    lanes = _lanes(int(num_experts), int(num_warps))
    own_warps = num_warps // lanes
    lane = T.get_thread_binding() % lanes
    scan = T.alloc_var(T.int32)
    count = T.alloc_var(T.int32)
    own = T.alloc_var(T.int32)
    for i in T.serial(T.ceildiv(num_experts * lanes, num_warps * WARP)):
        expert = (i * (num_warps * WARP) + T.get_thread_binding()) // lanes
        own = 0
        for w in T.unroll(own_warps):
            if expert < num_experts:
                own += table_shared[lane * own_warps + w, expert]
        scan = own
        for s in T.unroll(lanes.bit_length() - 1):
            count = T.shfl_up(scan, 1 << s, lanes)
            if lane >= (1 << s):
                scan += count
        scan -= own
        for w in T.unroll(own_warps):
            if expert < num_experts:
                count = table_shared[lane * own_warps + w, expert]
                table_shared[lane * own_warps + w, expert] = scan
                scan += count
        if expert < num_experts and lane == lanes - 1:
            count_shared[expert] = scan


# Experts ------------------------------------------------------------------------------------


@macro
def count_all(topk_idx, stop, num_threads, num_experts, before_shared, count_shared):
    """Count, for every expert, the slots before `stop` and all slots."""
    num_topk = topk_idx.shape[1]
    num_slots = topk_idx.shape[0] * num_topk
    for step in T.serial(T.ceildiv(num_slots, num_threads)):
        slot = step * num_threads + T.get_thread_binding()
        if slot < num_slots:
            index = topk_idx[slot // num_topk, slot % num_topk]
            if index >= 0 and index < num_experts:
                T.atomic_add(count_shared[T.cast(index, T.int32)], 1)
                if slot < stop:
                    T.atomic_add(before_shared[T.cast(index, T.int32)], 1)


@macro
def sum_chunks(counts, chunk, num_chunks, num_threads, before_shared, count_shared):
    """Sum the counts of the chunks before this one and of all chunks for every expert."""
    num_experts = counts.shape[1]
    teams = max(1, num_threads // int(num_experts))  # each sums some of the chunks
    before = T.alloc_var(T.int32)
    total = T.alloc_var(T.int32)
    count = T.alloc_var(T.int32)
    for i in T.serial(T.ceildiv(num_experts, num_threads)):
        expert = i * num_threads + T.get_thread_binding() % (num_experts if teams > 1 else num_threads)
        team = T.get_thread_binding() // num_experts if teams > 1 else 0
        if expert < num_experts and team < teams:
            before = 0
            total = 0
            for step in T.unroll(T.ceildiv(num_chunks, teams), unroll_factor=8):
                if step * teams + team < num_chunks:
                    count = counts[step * teams + team, expert]
                    total += count
                    if step * teams + team < chunk:
                        before += count
            T.atomic_add(before_shared[expert], before)
            T.atomic_add(count_shared[expert], total)


def _items(num_experts: int, num_warps: int) -> int:
    """Neighboring experts per thread."""
    return -(-num_experts // (num_warps * WARP))


@macro
def scan_experts(count_shared, alignment, size_shared, start_shared, part_shared):
    """Sizes of the experts (the aligned counts), and their exclusive scan."""
    num_experts = count_shared.shape[0]
    items = _items(int(num_experts), int(part_shared.shape[0]))
    tx = T.get_thread_binding()
    lane, warp = tx % WARP, tx // WARP
    own = T.alloc_var(T.int32, init=0)
    scan = T.alloc_var(T.int32)
    other = T.alloc_var(T.int32)
    for i in T.unroll(items):
        expert = tx * items + i
        if expert < num_experts:
            size_shared[expert] = T.truncdiv(count_shared[expert] + alignment - 1, alignment) * alignment
            own += size_shared[expert]
    scan = own
    for s in T.unroll(5):
        other = T.shfl_up(scan, 1 << s)
        if lane >= (1 << s):
            scan += other
    if lane == WARP - 1:
        part_shared[warp] = scan
    T.sync_threads()
    other = 0
    if lane < warp:
        other = part_shared[lane]
    scan += T.warp_reduce_sum(other) - own
    for i in T.unroll(items):
        expert = tx * items + i
        if expert < num_experts:
            start_shared[expert] = scan
            scan += size_shared[expert]


@macro
def set_place(pos, expert, slot, num_topk, pos_to_expert, pos_to_token, pos_to_token_topk):
    """Write the three maps of a position; expert and slot are -1 for padding."""
    pos_to_expert[pos] = expert
    pos_to_token[pos] = T.if_then_else(slot >= 0, T.truncdiv(slot, num_topk), -1)
    pos_to_token_topk[pos] = slot


# Kernel -------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(launches=(1, 2, 3), rounds=(1, 2, 4, 8), num_threads=(256, 512, 1024), early=EARLY),
    pass_configs=PASS_CONFIGS,
)
def fused_mapping_kernel(
    num_experts: int,
    num_topk: int,
    index_dtype: torch.dtype,
    *,
    launches: int,
    rounds: int,
    num_threads: int,
    early: bool = False,
):
    """Maps of a (num_tokens, num_topk) choice; `counts` is scratch, and its last row has the sums of the others."""
    num_warps = num_threads // WARP
    chunk_slots = num_threads * rounds
    items = _items(num_experts, num_warps)
    num_tokens, num_expanded, count_rows = (T.dynamic(n) for n in ('num_tokens', 'num_expanded', 'count_rows'))

    @T.prim_func
    def fused_mapping(
        topk_idx: T.Tensor((num_tokens, num_topk), T.dtype(index_dtype)),
        counts: T.Tensor((count_rows, num_experts), T.int32),
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
        num_chunks = T.max(1, T.ceildiv(num_slots, chunk_slots))

        if launches > 1:
            with T.Kernel(num_chunks, threads=num_threads) as chunk:
                count_shared = T.alloc_shared((num_experts,), T.int32)
                expert_local = T.alloc_local((rounds,), T.int32)
                tx = T.get_thread_binding()

                T.pdl_trigger()
                load_experts(topk_idx, chunk * chunk_slots + tx // WARP * (WARP * rounds), num_experts, expert_local)
                for i in T.serial(T.ceildiv(num_experts, num_threads)):
                    if i * num_threads + tx < num_experts:
                        count_shared[i * num_threads + tx] = 0
                T.sync_threads()
                for i in T.unroll(rounds):
                    if expert_local[i] >= 0:
                        T.atomic_add(count_shared[expert_local[i]], 1)
                T.sync_threads()
                for i in T.serial(T.ceildiv(num_experts, num_threads)):
                    if i * num_threads + tx < num_experts:
                        counts[chunk, i * num_threads + tx] = count_shared[i * num_threads + tx]

        if launches > 2:
            with T.Kernel(T.ceildiv(num_experts, WARP), threads=1024) as pid:  # a lane for each expert
                sum_shared = T.alloc_shared((WARP, WARP), T.int32)
                tx = T.get_thread_binding()
                lane, warp = tx % WARP, tx // WARP
                expert = pid * WARP + lane
                own_chunks = T.ceildiv(num_chunks, WARP)
                before = T.alloc_var(T.int32, init=0)
                count = T.alloc_var(T.int32)

                T.pdl_trigger()
                T.pdl_sync()
                for c in T.unroll(own_chunks, unroll_factor=8):
                    if warp * own_chunks + c < num_chunks and expert < num_experts:
                        before += counts[warp * own_chunks + c, expert]
                sum_shared[warp, lane] = before
                T.sync_threads()
                before = 0
                for w in T.unroll(WARP):
                    if w < warp:
                        before += sum_shared[w, lane]
                for c in T.unroll(own_chunks, unroll_factor=8):
                    if warp * own_chunks + c < num_chunks and expert < num_experts:
                        count = counts[warp * own_chunks + c, expert]
                        counts[warp * own_chunks + c, expert] = before
                        before += count
                if warp == WARP - 1 and expert < num_experts:
                    counts[count_rows - 1, expert] = before

        with T.Kernel(T.max(num_chunks, T.ceildiv(num_expanded, FILL)), threads=num_threads) as chunk:
            if early and launches == 1:
                begin_early()
            table_shared = T.alloc_shared((num_warps, num_experts | 1), T.int32)  # odd: no bank conflicts
            before_shared = T.alloc_shared((num_experts,), T.int32)
            count_shared = T.alloc_shared((num_experts,), T.int32)
            size_shared = T.alloc_shared((num_experts,), T.int32)  # the count, aligned; first that of the chunk
            start_shared = T.alloc_shared((num_experts,), T.int32)
            local_shared = T.alloc_shared((num_experts,), T.int32)  # the start in the sorted chunk
            sorted_shared = T.alloc_shared((chunk_slots,), T.int32)  # the chunk by experts: expert * chunk_slots + slot
            part_shared = T.alloc_shared((num_warps,), T.int32)
            expert_local = T.alloc_local((rounds,), T.int32)
            rank_local = T.alloc_local((rounds,), T.int32)
            tx = T.get_thread_binding()
            pos = T.alloc_var(T.int32)
            lane, warp = tx % WARP, tx // WARP
            num_blocks = T.max(num_chunks, T.ceildiv(num_expanded, FILL))
            first = chunk * chunk_slots + warp * (WARP * rounds)

            load_experts(topk_idx, first, num_experts, expert_local)
            for i in T.serial(T.ceildiv(num_warps * (num_experts | 1), num_threads)):
                item = i * num_threads + tx
                if item < num_warps * (num_experts | 1):
                    table_shared[item // (num_experts | 1), item % (num_experts | 1)] = 0
            for i in T.serial(T.ceildiv(num_experts, num_threads)):
                if i * num_threads + tx < num_experts:
                    before_shared[i * num_threads + tx] = 0
                    count_shared[i * num_threads + tx] = 0
            T.sync_threads()
            rank_slots(expert_local, warp, rank_local, table_shared)
            T.sync_threads()
            scan_warps(table_shared, size_shared)
            T.sync_threads()
            scan_experts(size_shared, 1, size_shared, local_shared, part_shared)
            T.sync_threads()
            num_placed = local_shared[num_experts - 1] + size_shared[num_experts - 1]
            for i in T.unroll(rounds):
                expert = expert_local[i]
                if expert >= 0:
                    rank_local[i] = rank_local[i] + local_shared[expert] + table_shared[warp, expert]
                    sorted_shared[rank_local[i]] = expert * chunk_slots + (warp * rounds + i) * WARP + lane

            if launches == 1:
                count_all(topk_idx, chunk * chunk_slots, num_threads, num_experts, before_shared, count_shared)
            else:
                T.pdl_sync()
                if launches == 2:
                    sum_chunks(counts, chunk, num_chunks, num_threads, before_shared, count_shared)
                else:
                    for i in T.serial(T.ceildiv(num_experts, num_threads)):
                        if i * num_threads + tx < num_experts:
                            if chunk < num_chunks:
                                before_shared[i * num_threads + tx] = counts[chunk, i * num_threads + tx]
                            count_shared[i * num_threads + tx] = counts[count_rows - 1, i * num_threads + tx]
            T.sync_threads()
            scan_experts(count_shared, alignment, size_shared, start_shared, part_shared)
            for i in T.unroll(items):
                if tx * items + i < num_experts:  # from positions in the chunk to positions among all slots
                    before_shared[tx * items + i] += start_shared[tx * items + i] - local_shared[tx * items + i]
            T.sync_threads()

            for i in T.unroll(rounds):
                slot = first + i * WARP + lane
                if slot < num_slots:
                    pos = -1
                    if expert_local[i] >= 0:
                        pos = before_shared[expert_local[i]] + rank_local[i]
                        if pos >= num_expanded:
                            pos = -1
                    token_topk_to_pos[slot // num_topk, slot % num_topk] = pos
            for i in T.unroll(rounds):
                rank = i * num_threads + tx
                if rank < num_placed:
                    expert, slot = sorted_shared[rank] // chunk_slots, sorted_shared[rank] % chunk_slots
                    pos = before_shared[expert] + rank
                    if pos < num_expanded:
                        slot = chunk * chunk_slots + slot
                        set_place(pos, expert, slot, num_topk, pos_to_expert, pos_to_token, pos_to_token_topk)

            for i in T.serial(T.ceildiv(num_experts, num_blocks * num_threads)):
                expert = (i * num_blocks + chunk) * num_threads + tx
                if expert < num_experts:
                    expert_start[expert] = T.min(start_shared[expert], num_expanded)
                    expert_end[expert] = T.min(start_shared[expert] + size_shared[expert], num_expanded)
                    num_tokens_per_expert[expert] = size_shared[expert]
            for i in T.serial(T.ceildiv(num_experts, num_blocks * num_warps)):
                expert = (i * num_warps + warp) * num_blocks + chunk
                if expert < num_experts:
                    end = T.min(start_shared[expert] + size_shared[expert], num_expanded)
                    used = start_shared[expert] + count_shared[expert]
                    for j in T.serial(T.ceildiv(end - used, WARP)):
                        pos = used + j * WARP + lane
                        if pos < end:
                            set_place(pos, -1, -1, num_topk, pos_to_expert, pos_to_token, pos_to_token_topk)

            last = start_shared[num_experts - 1] + size_shared[num_experts - 1]
            if chunk == 0 and tx == 0:
                overflow[0] = T.max(last - num_expanded, 0)
            for j in T.serial(T.ceildiv(num_expanded - last, num_blocks * num_threads)):
                pos = last + (j * num_blocks + chunk) * num_threads + tx
                if pos < num_expanded:
                    set_place(pos, -1, -1, num_topk, pos_to_expert, pos_to_token, pos_to_token_topk)

    return fused_mapping
