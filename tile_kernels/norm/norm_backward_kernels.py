"""The kernels of the gradients of RMS norm; see `norm_backward` for the maths.

A fixed number of blocks, whatever the device, walks over the rows. A group of warps computes one row while its next
rows are copied to shared memory. Each vector is copied by the thread that will read it, so no thread waits for a copy
of another. Each block adds up its share of dw, a second kernel adds the shares.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.gpus import SUM_SMS
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.core.launch import launch
from tile_kernels.device.reduce import folded, lane_dot, over_team
from tile_kernels.device.vectors import LANE, load_lane, store_lane, widen_lane
from tile_kernels.norm._checks import check_like, check_rows, check_weight
from tile_kernels.norm._macros import row_warps, team_warps

#: Blocks that divide the rows, one for each SM. They fix the order of a sum, so it is the same on every GPU.
NUM_BLOCKS = SUM_SMS

#: Warps of a block: as many as there can be, or half as many, with twice the registers.
MOST_WARPS, HALF_WARPS = 32, 16

#: Shared memory for rows on their way.
STAGE_BYTES = 192 << 10

#: Sums of dw that a thread adds up over teams and stores at a time.
SHARE_WIDTH = 4


# Config -------------------------------------------------------------------------------------


def team_and_block(hidden: int) -> tuple[int, int]:
    """Warps of a team and of a block of teams.

    A lane has about two vectors of a row. Where that leaves many lanes idle, it has one, and a block more warps.
    """
    vectors, warps = row_warps(hidden), team_warps(hidden, 2, HALF_WARPS)
    taken = -(-vectors // warps) * warps
    if vectors <= MOST_WARPS and 4 * vectors <= 3 * taken:
        return vectors, MOST_WARPS // vectors * vectors
    return warps, HALF_WARPS


def block_count_of(num_tokens: int, hidden: int) -> int:
    """At most `NUM_BLOCKS`, and so many that all have the same number of rows to go through."""
    warps, block_warps = team_and_block(hidden)
    teams = block_warps // warps
    turns = -(-num_tokens // (NUM_BLOCKS * teams))
    return -(-num_tokens // max(turns * teams, 1))


def choose(
    hidden: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    scaled: bool,
    vector_bytes: int,
    through: bool,
    num_tokens: int,
) -> dict:
    """Four rows under way for each team, or as many as fit; rows that cannot be copied asynchronously are loaded.

    Up to two vectors of a lane stay in registers; of more only one does, lest there be too few left for the others.
    """
    warps, block_warps = team_and_block(hidden)
    vectors = -(-row_warps(hidden) // warps)
    fitting = STAGE_BYTES // ((3 if through else 2) * vectors * block_warps * WARP * LANE * x_dtype.itemsize)
    piece_bytes = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden) * x_dtype.itemsize
    stages = min(4, fitting) if fitting > 1 and piece_bytes >= 4 else 0
    return dict(warps=warps, block_warps=block_warps, stages=stages, kept=vectors if vectors <= 2 else 1)


# Kernels ------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(warps=tuple(range(1, 33)), block_warps=tuple(range(16, 33)), stages=(0, 2, 3, 4), kept=(0, 1, 2)),
    pass_configs={
        'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
        'TL_ENABLE_LOWER_LDGSTG': True,
        'TL_DISABLE_THREAD_STORAGE_SYNC': True,  # what a thread copies to shared memory it reads itself
    },
    fixed='warps block_warps',
)
def norm_backward_kernel(
    hidden: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    scaled: bool,
    vector_bytes: int,
    through: bool,
    *,
    warps: int,
    block_warps: int,
    stages: int,
    kept: int,
):
    """`through`: there is a gradient dz to add; `stages`: rows of a team on their way to shared memory, 0 for none.

    `kept`: vectors of a lane whose n and g * weight stay in registers until the sum over the row is known; others are
    computed again.
    """
    vectors = -(-row_warps(hidden) // warps)
    teams = block_warps // warps
    num_threads = block_warps * WARP
    weighted, weight_type = weight_dtype is not None, T.dtype(weight_dtype or x_dtype)
    piece = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden)
    copied = min(piece, 16 // x_dtype.itemsize)
    dx_piece = math.gcd(LANE, 16 // x_dtype.itemsize, hidden)
    weight_piece = math.gcd(LANE, 16 // (weight_dtype or x_dtype).itemsize, hidden)
    share_piece = math.gcd(SHARE_WIDTH, hidden)
    tensors = 3 if through else 2
    full = hidden % (vectors * warps * WARP * LANE) == 0
    weight_kept = weight_dtype is not None and vectors * weight_dtype.itemsize <= 8  # else registers do not suffice
    ragged = row_warps(hidden) % warps != 0  # some warps have one vector less
    num_tokens, num_blocks = T.dynamic('num_tokens'), T.dynamic('num_blocks')
    dy_pitch, x_pitch, dz_pitch = T.dynamic('dy_pitch'), T.dynamic('x_pitch'), T.dynamic('dz_pitch')
    dtype = T.dtype(x_dtype)

    @macro
    def ask_for_row(x, row, warp, lane, stage_shared, stage, which):
        """Start to copy the channels of a thread to its own places in shared memory."""
        for i in T.unroll(vectors):
            first = ((i * warps + warp) * WARP + lane) * LANE
            for p in T.unroll(LANE // copied):
                if first + p * copied < hidden:
                    T.ptx_cp_async(
                        T.access_ptr(stage_shared[stage, which, i, T.get_thread_binding(), p * copied], 'w', copied),
                        T.access_ptr(x[row, first + p * copied], 'r', copied),
                        copied,
                    )

    @macro
    def ask_for_rows(dy, x, dz, first, team, warp, lane, stage_shared, stage):
        """Ask for the rows of all teams, of which `first` is the first; one past the end repeats the last."""
        row = T.alloc_var(T.int32)
        if first < num_tokens:
            row = T.min(first + team, num_tokens - 1)
            ask_for_row(x, row, warp, lane, stage_shared, stage, 0)
            ask_for_row(dy, row, warp, lane, stage_shared, stage, 1)
            if through:
                ask_for_row(dz, row, warp, lane, stage_shared, stage, 2)
        T.ptx_commit_group()

    @macro
    def clear_beyond(warp, lane, stage_shared):
        """Zeros for channels beyond the rows, to which nothing is copied."""
        for i in T.unroll(vectors):
            first = ((i * warps + warp) * WARP + lane) * LANE
            for p in T.unroll(LANE // copied):
                if first + p * copied >= hidden:
                    for s in T.unroll(stages):
                        for which in T.unroll(tensors):
                            for e in T.vectorized(copied):
                                stage_shared[s, which, i, T.get_thread_binding(), p * copied + e] = T.cast(0.0, dtype)

    @macro
    def take(x, row, i, warp, lane, stage_shared, stage, which, vector_local):
        """A vector of a row: from shared memory, or from where it is."""
        if stages > 0:
            for e in T.vectorized(LANE):
                vector_local[0, e] = stage_shared[stage, which, i, T.get_thread_binding(), e]
        else:
            if not full:
                T.clear(vector_local)
            load_lane(x, vector_local, 0, row, (i * warps + warp) * WARP + lane, piece, hidden)

    @macro
    def normal_and_upstream(
        i, dy, x, weight, source, warp, lane, stage_shared, stage, row_rstd, out_scale, weight_local, g_local, n, gw
    ):
        """Find n and g * weight of vector i, as `n[k]` and `gw[k]` with k = i if they are kept; g is in `g_local`."""
        vector_local = T.alloc_local((1, LANE), dtype)
        v_local = T.alloc_local((LANE,), T.float32)
        k = T.min(i, kept)
        take(x, source, i, warp, lane, stage_shared, stage, 0, vector_local)
        widen_lane(vector_local, 0, v_local)
        for e in T.unroll(LANE):
            n[k, e] = T.ieee_mul(v_local[e], row_rstd)
        take(dy, source, i, warp, lane, stage_shared, stage, 1, vector_local)
        widen_lane(vector_local, 0, g_local)
        if scaled:
            for e in T.unroll(LANE):
                g_local[e] = T.ieee_mul(g_local[e], out_scale)
        if weighted:
            if not weight_kept:
                load_lane(weight, weight_local, i, None, (i * warps + warp) * WARP + lane, weight_piece, hidden)
            widen_lane(weight_local, i, v_local)
        for e in T.unroll(LANE):
            gw[k, e] = T.ieee_mul(g_local[e], v_local[e]) if weighted else g_local[e]

    @T.prim_func
    def norm_backward(
        dy: T.StridedTensor((num_tokens, hidden), (dy_pitch, 1), dtype),
        x: T.StridedTensor((num_tokens, hidden), (x_pitch, 1), dtype),
        weight: T.Tensor((hidden,), weight_type),
        rstd: T.Tensor((num_tokens,), T.float32),
        dz: T.StridedTensor((num_tokens, hidden), (dz_pitch, 1), dtype),
        dx: T.Tensor((num_tokens, hidden), dtype),
        shares: T.Tensor((num_blocks, hidden), T.float32),
        out_scale: T.float32,
        block_count: T.int32,
    ):
        with T.Kernel(block_count, threads=num_threads) as pid:
            T.assume(dy_pitch % piece == 0)
            T.assume(x_pitch % piece == 0)
            if through:
                T.assume(dz_pitch % piece == 0)
            thread = T.get_thread_binding()
            row = T.alloc_var(T.int32)
            source = T.alloc_var(T.int32)
            stage = T.alloc_var(T.int32)
            row_rstd = T.alloc_var(T.float32)
            next_rstd = T.alloc_var(T.float32)
            vector_local = T.alloc_local((1, LANE), dtype)
            weight_local = T.alloc_local((vectors, LANE), weight_type)
            dw_local = T.alloc_local((vectors, LANE), T.float32)
            n = T.alloc_local((min(kept + 1, vectors), LANE), T.float32)
            gw = T.alloc_local((min(kept + 1, vectors), LANE), T.float32)
            g_local = T.alloc_local((LANE,), T.float32)
            dx_local = T.alloc_local((LANE,), T.float32)
            partial = T.alloc_local((vectors,), T.float32)
            shared = T.alloc_shared((2, teams, warps, WARP), T.float32)
            stage_shared = T.alloc_shared((max(stages, 1), tensors, vectors, num_threads, LANE), dtype)
            lane, warp, team = thread % WARP, thread // WARP % warps, thread // WARP // warps
            T.pdl_trigger()

            if weighted:
                T.clear(dw_local)
                if not full:
                    T.clear(weight_local)
                for i in T.unroll(vectors if weight_kept else 0):
                    load_lane(weight, weight_local, i, None, (i * warps + warp) * WARP + lane, weight_piece, hidden)
            if stages > 0 and hidden % (WARP * LANE) > 0:
                clear_beyond(warp, lane, stage_shared)
            for s in T.unroll(max(stages - 1, 0)):
                ask_for_rows(dy, x, dz, (s * block_count + pid) * teams, team, warp, lane, stage_shared, s)

            next_rstd = rstd[T.min(pid * teams + team, num_tokens - 1)]
            for turn in T.serial(T.ceildiv(num_tokens - pid * teams, block_count * teams)):
                row = (turn * block_count + pid) * teams + team
                source = T.min(row, num_tokens - 1)  # a row past the end repeats the last one and is not stored
                row_rstd = next_rstd
                next_rstd = rstd[T.min(row + block_count * teams, num_tokens - 1)]
                stage = turn % max(stages, 1)
                if stages > 0:
                    later = ((turn + stages - 1) * block_count + pid) * teams
                    ask_for_rows(dy, x, dz, later, team, warp, lane, stage_shared, (turn + stages - 1) % stages)
                    T.ptx_wait_group(stages - 1)

                place = (dy, x, weight, source, warp, lane, stage_shared, stage)
                values = (row_rstd, out_scale, weight_local, g_local, n, gw)
                for i in T.unroll(vectors):
                    partial[i] = T.float32(0.0)
                    if not ragged or i < vectors - 1 or i * warps + warp < row_warps(hidden):
                        normal_and_upstream(i, *place, *values)
                        k = T.min(i, kept)
                        partial[i] = lane_dot([n[k, e] for e in range(LANE)], [gw[k, e] for e in range(LANE)])
                        if weighted and row < num_tokens:
                            for e in T.unroll(LANE):
                                dw_local[i, e] = T.ieee_fmaf(n[k, e], g_local[e], dw_local[i, e])
                over_team(partial, 'sum', shared, turn % 2, team, warp, lane, warps)
                mean = T.ieee_fdiv(partial[0], T.float32(hidden))

                for i in T.unroll(vectors):
                    if not ragged or i < vectors - 1 or i * warps + warp < row_warps(hidden):
                        if i >= kept:
                            normal_and_upstream(i, *place, *values)
                        k = T.min(i, kept)
                        for e in T.unroll(LANE):
                            dx_local[e] = T.ieee_mul(T.ieee_fmaf(-n[k, e], mean, gw[k, e]), row_rstd)
                        if through:
                            take(dz, source, i, warp, lane, stage_shared, stage, 2, vector_local)
                            widen_lane(vector_local, 0, g_local)
                            for e in T.unroll(LANE):
                                dx_local[e] = T.ieee_add(dx_local[e], g_local[e])
                        for e in T.vectorized(LANE):
                            vector_local[0, e] = T.cast(dx_local[e], dtype)
                        if row < num_tokens:
                            slot = (i * warps + warp) * WARP + lane
                            store_lane(dx, vector_local, row, slot, dx_piece, hidden, LANE, i=0)

            if weighted and teams == 1:
                for i in T.unroll(vectors):
                    slot = (i * warps + warp) * WARP + lane
                    store_lane(shares, dw_local, pid, slot, share_piece, hidden, LANE, i=i)
            elif weighted:
                taken = warps * WARP * LANE
                teams_shared = T.alloc_shared((teams, taken), T.float32)
                for i in T.unroll(vectors):
                    T.sync_threads()
                    for e in T.vectorized(LANE):
                        teams_shared[team, (warp * WARP + lane) * LANE + e] = dw_local[i, e]
                    T.sync_threads()
                    if thread < taken // SHARE_WIDTH:
                        for e in T.unroll(SHARE_WIDTH):
                            dw_local[i, e] = folded(
                                lambda a, b: a + b,
                                [teams_shared[t, thread * SHARE_WIDTH + e] for t in range(teams)],
                            )
                        for p in T.unroll(SHARE_WIDTH // share_piece):
                            if i * taken + thread * SHARE_WIDTH + p * share_piece < hidden:
                                for e in T.vectorized(share_piece):
                                    column = i * taken + thread * SHARE_WIDTH + p * share_piece + e
                                    shares[pid, column] = dw_local[i, p * share_piece + e]

    return norm_backward


@kernel(pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def norm_weight_gradient_kernel(hidden: int, dtype: torch.dtype, accumulating: bool):
    """Add up the shares of all blocks; eight threads side by side own columns, 32 groups of them share the rows."""
    width = math.gcd(4, hidden)
    columns, groups = 8, 32
    turns = -(-NUM_BLOCKS // groups)
    num_blocks = T.dynamic('num_blocks')

    @T.prim_func
    def norm_weight_gradient(
        shares: T.Tensor((num_blocks, hidden), T.float32),
        dweight: T.Tensor((hidden,), T.dtype(dtype)),
    ):
        with T.Kernel(T.ceildiv(hidden, columns * width), threads=columns * groups) as pid:
            T.annotate_min_blocks_per_sm(8)  # registers that the first kernel leaves, so that blocks wait on the SMs
            T.pdl_sync()
            thread = T.get_thread_binding()
            total = T.alloc_local((width,), T.float32)
            share = T.alloc_local((turns, width), T.float32)
            shared = T.alloc_shared((groups, columns * width), T.float32)
            group, place = thread // columns, thread % columns * width
            first = pid * columns * width + place

            T.clear(total)
            T.clear(share)
            if first < hidden:
                for k in T.unroll(turns):  # all are asked for before the first is added
                    if group + k * groups < num_blocks:
                        for e in T.vectorized(width):
                            share[k, e] = shares[group + k * groups, first + e]
                for k in T.unroll(turns):
                    for e in T.unroll(width):
                        total[e] = total[e] + share[k, e]
            for e in T.vectorized(width):
                shared[group, place + e] = total[e]
            T.sync_threads()
            if thread < columns * width and pid * columns * width + thread < hidden:
                column = pid * columns * width + thread
                total[0] = folded(lambda a, b: a + b, [shared[g, thread] for g in range(groups)])
                if accumulating:
                    total[0] = T.cast(dweight[column], T.float32) + total[0]
                dweight[column] = T.cast(total[0], T.dtype(dtype))

    return norm_weight_gradient


# Launch -------------------------------------------------------------------------------------


def launch_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dz: Tensor | None,
    out_scale: float,
    dweight: Tensor | None,
    accumulating: bool,
) -> Tensor:
    """Check, launch both kernels, fill dweight; returns dx."""
    num_tokens, hidden = check_rows(x)
    check_like(x, dy=dy, dz=dz)
    check.shape(rstd, 'rstd', 'num_tokens', dtype=torch.float32, num_tokens=num_tokens)
    check.contiguous(rstd, 'rstd')
    check.same_device(x=x, rstd=rstd)
    numbers = (x.dtype, check_weight(x, weight), out_scale != 1.0, check.vector_bytes(x, dy, dz))
    static = (hidden, *numbers, dz is not None)
    num_blocks = block_count_of(num_tokens, hidden)
    dx = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    shares = None
    if weight is not None:
        shares = torch.empty((num_blocks, hidden), dtype=torch.float32, device=x.device)
    launch(norm_backward_kernel, static, dy, x, weight, rstd, dz, dx, shares, out_scale, num_blocks)
    if shares is not None and dweight is not None:
        # without rows the gradient is 0, which this kernel writes
        launch(norm_weight_gradient_kernel, (hidden, dweight.dtype, accumulating), shares, dweight, size=hidden)
    return dx
