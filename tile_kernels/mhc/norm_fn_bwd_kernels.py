"""Kernels of the gradients of the normalized projection. See `norm_fn.py` for the mathematics.

`o` is the gradient of the products, split into two bfloat16 parts. `pull` is the factor of x in dx.
"""

from tile_kernels.core.gpus import SUM_SMS
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.device.cluster import SEND_FOUR, send
from tile_kernels.mhc._macros import high_of, padded, round_to_tf32

#: Tokens of a tile, and columns of a block.
BLOCK_T, BLOCK_K = 64, 128

#: Numbers of parts of the tokens.
PARTS = (1, 2, 3, 4, 6, 8, 16, 32)

#: Blocks that run at a time: two on each SM. They fix the order of a sum, so the choice is the same on every GPU.
WAVE = 2 * SUM_SMS

#: For a wgmma that is not waited for; the last wgmma of a step waits for all.
UNWAITED = {'wg_wait': -1}

# Config -------------------------------------------------------------------------------------


def parts_of(k: int, num_tokens: int) -> int:
    """Parts of the tokens: with the fewest rounds of tiles, then the fewest parts of dfn."""
    tiles = -(-num_tokens // BLOCK_T)

    def rounds(parts: int) -> int:
        return -(-parts * (k // BLOCK_K) // WAVE) * (-(-tiles // parts) + 2)  # a block costs two tiles more

    return min(PARTS, key=rounds)


def choose(k: int, num_mixes: int, adds_to: str, applied: int, clusters: bool, num_tokens: int) -> dict:
    """See `parts_of`; three stages if two blocks then fit on an SM."""
    return dict(parts=parts_of(k, num_tokens), num_stages=3 if padded(num_mixes) <= 24 else 2)


def sums_itself(parts: int, clusters: bool) -> bool:
    """Whether `norm_fn_bwd_kernel` sums the parts of dfn: two blocks as a cluster, two clusters by atomics on zeros.

    The sum of 0 and two numbers does not depend on their order; atomics flush subnormal numbers to 0. More parts would
    need larger clusters, which do not all run at the same time.
    """
    return parts == 1 or (clusters and parts in (2, 4))


# Kernels ------------------------------------------------------------------------------------


@macro
def clear_dfn(dfn, thread, num_threads):
    """Write zeros to dfn, which has one dimension, a multiple of four."""
    for r in T.serial(T.ceildiv(dfn.shape[0] // 4, num_threads)):
        first = (r * num_threads + thread) * 4
        if first < dfn.shape[0]:
            for e in T.vectorized(4):
                dfn[first + e] = 0.0


@kernel(choose=lambda *static: dict(num_threads=128), space=dict(num_threads=(128,)))
def prepare_bwd_kernel(k: int, num_mixes: int, clears: bool, *, num_threads: int):
    """Compute o in two parts and pull. With `clears` also write zeros to dfn, for the atomics of the next kernel."""
    columns = padded(num_mixes)
    num_tokens = T.dynamic('num_tokens')
    lanes = 8

    @T.prim_func
    def prepare_bwd(
        dmixes: T.Tensor((num_tokens, num_mixes), T.float32),
        mixes: T.Tensor((num_tokens, num_mixes), T.float32),
        rstd: T.Tensor((num_tokens,), T.float32),
        o_parts: T.Tensor((num_tokens, 2 * columns), T.bfloat16),
        pull: T.Tensor((num_tokens,), T.float32),
        dfn: T.Tensor((num_mixes * k,), T.float32),
    ):
        blocks = T.ceildiv(num_tokens, num_threads // lanes)
        with T.Kernel(blocks, threads=num_threads) as pid:
            tx = T.get_thread_binding()
            T.pdl_trigger()
            if clears:
                clear_dfn(dfn, pid * num_threads + tx, blocks * num_threads)
            token = pid * (num_threads // lanes) + tx // lanes
            total = T.alloc_var(T.float32, init=0.0)
            if token < num_tokens:
                for v in T.unroll(columns // lanes):
                    j = v * lanes + tx % lanes
                    value = T.alloc_var(T.float32, init=0.0)
                    if j < num_mixes:
                        total = T.ieee_fmaf(dmixes[token, j], mixes[token, j], total)
                        value = round_to_tf32(dmixes[token, j] * rstd[token])
                    o_parts[token, j] = T.cast(high_of(value), T.bfloat16)
                    o_parts[token, columns + j] = T.cast(value - high_of(value), T.bfloat16)
            for distance in (4, 2, 1):
                total = total + T.shfl_xor(total, distance)
            if token < num_tokens and tx % lanes == 0:
                pull[token] = -total * (rstd[token] * rstd[token]) * T.float32(1.0 / k)

    return prepare_bwd


@kernel(
    choose=choose,
    space=dict(parts=PARTS, num_stages=(2, 3)),
    pass_configs={'TL_DISABLE_THREAD_STORAGE_SYNC': True},
    fixed='parts',
)
def norm_fn_bwd_kernel(
    k: int, num_mixes: int, adds_to: str, applied: int, clusters: bool, *, parts: int, num_stages: int
):
    """Each block has 128 columns and a part of the tokens: it writes dx of its tiles, and their part of dfn.

    The gradient of x is added to dx or before, if `adds_to` says so. `applied` is hidden or 0. If it is hidden, the
    gradient through `apply_mix` is added too. If the kernel `sums_itself`, it writes dfn; four parts need zeros in dfn.

    With PDL the first tiles of x and the columns of fn are loaded while the previous kernel computes o. A step reads
    tiles that were copied `num_stages - 1` steps before. A barrier separates the readers of a stage from the next copy.
    Terms added to dx, and dx itself, change between row layout and wgmma layout through the stage of x.
    """
    columns = padded(num_mixes)
    num_threads = 128 if columns <= 24 else 256  # dfn of eight streams needs the registers of 256 threads
    ahead = num_stages - 1
    copies = 3  # cp.async groups of a tile
    whole = sums_itself(parts, clusters)
    paired = whole and parts > 1
    quads = BLOCK_K // 4
    spanned = 1 if applied % BLOCK_K == 0 else 2  # streams with columns of a block, at most
    num_tokens = T.dynamic('num_tokens')

    @macro
    def copy_pre(pre, row, column, pre_shared, slot):
        """Start to copy pre of a tile of tokens, for the streams of the block."""
        for r in T.unroll(-(-spanned * BLOCK_T // num_threads)):
            index = r * num_threads + T.get_thread_binding()
            s, i = index // BLOCK_T, index % BLOCK_T
            if s < spanned:
                T.ptx_cp_async(
                    T.access_ptr(pre_shared[slot, s, i], 'w', 1),
                    T.access_ptr(pre[row + i, T.min(column // applied + s, k // applied - 1), 0], 'r', 1),
                    1,
                    row + i < pre.shape[0],
                )

    @macro
    def load_applied(dlayer_input, row, column, applied_frag):
        """Load dlayer_input for the columns of the block."""
        for i, j in T.Parallel(BLOCK_T, BLOCK_K):
            channel = (column + j) % applied
            applied_frag[i, j] = T.if_then_else(row + i < dlayer_input.shape[0], dlayer_input[row + i, channel], 0)

    @macro
    def add_pairs(dfn_shared, rank, dfn_parts, column):
        """Sum dfn over a cluster of two blocks: each block sums every other row, with the values of the other block."""
        T.import_source(SEND_FOUR)
        sent_shared = T.alloc_shared(((num_mixes + 1) // 2, BLOCK_K), T.float32)
        all_sent = T.alloc_barrier([1])
        four_local = T.alloc_local((4,), T.float32)
        tx = T.get_thread_binding()
        if tx == 0:
            T.mbarrier_arrive_expect_tx(all_sent[0], (num_mixes + 1 - rank) // 2 * BLOCK_K * 4)
        T.cluster_arrive()
        T.cluster_wait()  # the other block no longer uses the memory that `sent_shared` overlaps
        for own in (False, True):
            if own:
                T.mbarrier_wait_parity(all_sent[0], 0)
                T.sync_warp()  # no lane reads earlier
            for r in T.serial(-(-((num_mixes + 1) // 2) * quads // num_threads)):
                index = r * num_threads + tx
                row, first = index // quads, index % quads * 4
                j = row * 2 + (rank if own else 1 - rank)
                if j < num_mixes:
                    for e in T.unroll(4):
                        four_local[e] = dfn_shared[j, first + e] + dfn_shared[columns + j, first + e]
                    if not own:
                        send(sent_shared[row, first], four_local, all_sent[0], 1 - rank)
                    else:
                        for e in T.unroll(4):
                            four_local[e] = four_local[e] + sent_shared[row, first + e]
                        if parts == 2:
                            for e in T.vectorized(4):
                                dfn_parts[0, j, column + first + e] = four_local[e]
                        else:
                            T.atomic_addx4(dfn_parts[0, j, column + first], four_local[0])

    @T.prim_func
    def norm_fn_bwd(
        dfn_parts: T.Tensor((1 if whole else parts, num_mixes, k), T.float32),
        x: T.Tensor((num_tokens, k), T.bfloat16),
        fn: T.Tensor((num_mixes, k), T.float32),
        o_parts: T.Tensor((num_tokens, 2 * columns), T.bfloat16),
        pull: T.Tensor((num_tokens,), T.float32),
        dx: T.Tensor((num_tokens, k), T.bfloat16),
        before: T.Tensor((num_tokens, k), T.bfloat16),
        dlayer_input: T.Tensor((num_tokens, max(applied, 1)), T.bfloat16),
        pre: T.Tensor((num_tokens, k // max(applied, 1), 1), T.float32),
    ):
        cluster_dims = (2, 1, 1) if paired else None
        with T.Kernel(parts, k // BLOCK_K, threads=num_threads, cluster_dims=cluster_dims) as (pid_t, pid_k):
            x_shared = T.alloc_shared((num_stages, BLOCK_T, BLOCK_K), T.bfloat16)
            o_shared = T.alloc_shared((num_stages, BLOCK_T, 2 * columns), T.bfloat16)
            pull_shared = T.alloc_shared((num_stages, BLOCK_T), T.float32)
            pre_shared = T.alloc_shared((num_stages, spanned, BLOCK_T) if applied > 0 else (1, 1, 1), T.float32)
            high_shared = T.alloc_shared((2 * columns, BLOCK_K), T.bfloat16)
            low_shared = T.alloc_shared((2 * columns, BLOCK_K), T.bfloat16)
            dx_frag = T.alloc_fragment((BLOCK_T, BLOCK_K), T.float32)
            dfn_frag = T.alloc_fragment((BLOCK_K, 2 * columns), T.float32)
            dfn_shared = T.alloc_shared((2 * columns, BLOCK_K + 4), T.float32)
            there_frag = T.alloc_fragment((BLOCK_T, BLOCK_K), T.bfloat16)
            applied_frag = T.alloc_fragment((BLOCK_T, BLOCK_K), T.bfloat16)
            column = pid_k * BLOCK_K
            tiles = T.ceildiv(num_tokens, BLOCK_T)
            first_tile = pid_t * tiles // parts
            count = (pid_t + 1) * tiles // parts - first_tile

            for step in T.unroll(ahead):
                if step < count:
                    row = (first_tile + step) * BLOCK_T
                    T.async_copy(x[row : row + BLOCK_T, column : column + BLOCK_K], x_shared[step, :, :])
            for i, j in T.Parallel(columns, BLOCK_K):
                value = round_to_tf32(T.if_then_else(i < num_mixes, fn[T.min(i, num_mixes - 1), column + j], 0.0))
                high_shared[i, j] = T.cast(high_of(value), T.bfloat16)
                high_shared[columns + i, j] = T.cast(high_of(value), T.bfloat16)
                low_shared[i, j] = T.cast(value - high_of(value), T.bfloat16)
                low_shared[columns + i, j] = T.cast(value - high_of(value), T.bfloat16)
            T.clear(dfn_frag)
            T.pdl_sync()
            T.pdl_trigger()
            for step in T.unroll(ahead):
                if step < count:
                    row = (first_tile + step) * BLOCK_T
                    if applied > 0:
                        copy_pre(pre, row, column, pre_shared, step)
                    T.async_copy(o_parts[row : row + BLOCK_T, :], o_shared[step, :, :])
                    T.async_copy(pull[row : row + BLOCK_T], pull_shared[step, :])
                else:
                    T.ptx_commit_group()
                    T.ptx_commit_group()
                T.ptx_commit_group()  # the group of x, copied above

            if applied > 0 and count > 0:
                load_applied(dlayer_input, first_tile * BLOCK_T, column, applied_frag)

            for step in T.serial(count):
                slot, next_slot = step % num_stages, (step + ahead) % num_stages
                row, next_row = (first_tile + step) * BLOCK_T, (first_tile + step + ahead) * BLOCK_T
                T.ptx_wait_group(copies * (ahead - 1))
                T.fence_proxy_async()  # makes cp.async writes visible to wgmma
                T.sync_threads()
                if adds_to != '':
                    there = dx if adds_to == 'dx' else before
                    T.copy(there[row : row + BLOCK_T, column : column + BLOCK_K], there_frag)
                T.gemm(
                    x_shared[slot, :, :],
                    o_shared[slot, :, :],
                    dfn_frag,
                    transpose_A=True,
                    policy=T.GemmWarpPolicy.FullRow,
                    annotations=UNWAITED,
                )
                T.gemm(o_shared[slot, :, :], high_shared, dx_frag, clear_accum=True, annotations=UNWAITED)
                if step + ahead < count:
                    T.async_copy(x[next_row : next_row + BLOCK_T, column : column + BLOCK_K], x_shared[next_slot, :, :])
                    if applied > 0:
                        copy_pre(pre, next_row, column, pre_shared, next_slot)
                    T.async_copy(o_parts[next_row : next_row + BLOCK_T, :], o_shared[next_slot, :, :])
                    T.async_copy(pull[next_row : next_row + BLOCK_T], pull_shared[next_slot, :])
                else:
                    for _ in range(copies):
                        T.ptx_commit_group()
                T.gemm(o_shared[slot, :, :], low_shared, dx_frag)
                for i, j in T.Parallel(BLOCK_T, BLOCK_K):
                    dx_frag[i, j] = dx_frag[i, j] + pull_shared[slot, i] * T.cast(x_shared[slot, i, j], T.float32)
                if adds_to != '':
                    T.sync_threads()
                    T.copy(there_frag, x_shared[slot, :, :])
                    T.sync_threads()
                    for i, j in T.Parallel(BLOCK_T, BLOCK_K):
                        dx_frag[i, j] = dx_frag[i, j] + T.cast(x_shared[slot, i, j], T.float32)
                if applied > 0:
                    T.sync_threads()
                    T.copy(applied_frag, x_shared[slot, :, :])
                    if step + 1 < count:
                        load_applied(dlayer_input, row + BLOCK_T, column, applied_frag)
                    T.sync_threads()
                    for i, j in T.Parallel(BLOCK_T, BLOCK_K):
                        share = pre_shared[slot, (column + j) // applied - column // applied if spanned > 1 else 0, i]
                        dx_frag[i, j] = dx_frag[i, j] + share * T.cast(x_shared[slot, i, j], T.float32)
                T.sync_threads()
                T.copy(dx_frag, x_shared[slot, :, :])
                T.sync_threads()
                T.copy(x_shared[slot, :, :], dx[row : row + BLOCK_T, column : column + BLOCK_K], disable_tma=True)

            T.sync_threads()  # dfn_shared overlaps buffers of the loop
            for i, j in T.Parallel(BLOCK_K, 2 * columns):
                dfn_shared[j, i] = dfn_frag[i, j]
            T.sync_threads()
            if paired:
                add_pairs(dfn_shared, pid_t % 2, dfn_parts, column)
            else:
                for j, i in T.Parallel(num_mixes, BLOCK_K):
                    dfn_parts[pid_t, j, column + i] = dfn_shared[j, i] + dfn_shared[columns + j, i]

    return norm_fn_bwd


@kernel(choose=lambda *static: dict(num_threads=128), space=dict(num_threads=(64, 128, 256)))
def sum_dfn_kernel(k: int, num_mixes: int, *, num_threads: int):
    """Sum the parts of dfn, in ascending order."""
    splits = T.dynamic('splits')

    @T.prim_func
    def sum_dfn(dfn: T.Tensor((num_mixes, k), T.float32), dfn_parts: T.Tensor((splits, num_mixes, k), T.float32)):
        with T.Kernel(T.ceildiv(k // 4, num_threads), num_mixes, threads=num_threads) as (pid, j):
            part_local = T.alloc_local((4,), T.float32)
            total_local = T.alloc_local((4,), T.float32)
            first = (pid * num_threads + T.get_thread_binding()) * 4
            T.pdl_sync()
            if first < k:
                T.clear(total_local)
                for s in T.unroll(splits, unroll_factor=8):
                    for e in T.vectorized(4):
                        part_local[e] = dfn_parts[s, j, first + e]
                    for e in T.unroll(4):
                        total_local[e] = total_local[e] + part_local[e]
                for e in T.vectorized(4):
                    dfn[j, first + e] = total_local[e]

    return sum_dfn
