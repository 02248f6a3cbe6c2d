"""One kernel from the residual streams to the coefficients and the input of a layer.

The blocks of a cluster work on the same tokens, each on a slice of the channels (`norm_fn_slices_kernels.py`). They
exchange sums through distributed shared memory (DSMEM), so the residual is read once. Every token has an owner: the
block that sums its slices. The warps of a block have roles:

    multiply   wait for a tile, multiply by mma, and send the sums of the slice to the owners of the tokens
    own        for the tokens of the block: sum the slices, compute pre and post, send pre to all blocks
    copy       load tiles by TMA; before them fn, into stages that the first tiles do not use, if it fits there
    send       send the sums of wide slices, where the many multiplying warps would wait for each other
    post       overwrite the residual in shared memory with y and store y, if y is an output
    apply      compute layer_input from the tile, then free its stage

Blocks send by st.async, which counts bytes at an mbarrier of the receiver. The loop has no cluster barrier, because
that would wait for all copies and stores in flight.

The buffers for sums and for pre belong to the stage of a tile. A stage is free when layer_input of its tile is done.
Its buffers are free too:

- The copy warp loads another tile into a stage after pre arrived from all owners. So the owners have read their sums.
- An owner sends pre of that tile after sums arrived from all blocks. So the blocks have used pre of the earlier tile.

After the last tile the multiplying warps run Sinkhorn on the logits that owners left for comb, one thread for a token.
"""

from typing import Any

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.gpus import Gpu
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.core.launch import gpu_of
from tile_kernels.device.cluster import SEND_FOUR, send
from tile_kernels.mhc._macros import (
    LARGE_CLUSTER,
    affine,
    apply_to_vector,
    post_to_vector,
    rstd_from,
    sigmoid,
    store_vector,
)
from tile_kernels.mhc.norm_fn_slices_kernels import (
    MAX_STAGES,
    SLICE_PASS_CONFIGS,
    SPACE,
    TOKENS,
    WARP_CHANNELS,
    WARPS,
    WIDTH,
    WITH_EXPONENTS,
    Slices,
    chunk_of,
    clear_spare,
    keep_fn,
    keep_sums,
    keep_wide_fn,
    multiply,
    multiply_wide,
    read_copied_fn,
    read_fn,
    sum_warps,
    tile_for,
)
from tile_kernels.mhc.sinkhorn_kernels import scale_matrix

#: Multiplying warps -> warps of a block, registers of a thread in a warpgroup with multiplying warps, and in others.
WARPS_AND_REGISTERS = {8: (16, 168, 80), 10: (16, 144, 80), 12: (24, 96, 48), 14: (24, 96, 48), 16: (28, 96, 40)}

#: Tokens whose sums an owner computes at a time.
OWNED_AT_ONCE = 4

#: The last tokens of an owner, whose logits stay in shared memory. Logits of earlier tokens are stored in comb.
KEPT = 128

#: Channels of a TMA copy, at most.
MAX_CHUNK = 256

#: Bytes of shared memory of a block, minus padding between buffers.
SHARED_BYTES = 224 << 10

#: SMs of a GPU that can run clusters of 16 blocks: a part of a GPU (MIG) may not be able to.
SMS_FOR_CLUSTERS_OF_16 = 100

# Config ------------------------------------------------------------------------------------


def goes_in_one_pass(residual: Tensor, fn: Tensor, layer: tuple[Tensor, Tensor] | None = None) -> bool:
    """Whether `pre_streams_kernel` serves these tensors.

    `layer` is x and residual of a `post`. They must start at a multiple of 16 bytes.
    """
    if layer is not None and check.vector_bytes(*layer) < 16:
        return False
    static = (residual.shape[-1], residual.shape[-2], fn.shape[0], 'pre' if layer is None else 'post_pre')
    return pre_streams_kernel.claims(static, gpu_of(residual))


def fits_clusters(static: Any, gpu: Gpu) -> bool:
    """Whether a slice of fn fits into a block, and the GPU has clusters for all slices.

    With y, a slice may have at most 256 channels.
    """
    slices = Slices(static.hidden, static.num_streams, static.num_mixes)
    if not slices.fits or (static.variant == 'post_pre' and slices.slice_warps > WARPS):
        return False
    few_sms = slices.count == 16 and gpu.sms < SMS_FOR_CLUSTERS_OF_16
    return gpu.max_cluster >= LARGE_CLUSTER and not few_sms


def choose_pre(hidden: int, num_streams: int, num_mixes: int, variant: str, num_tokens: int) -> dict:
    """As many stages as fit, with tiles of up to 40 KB. With y 24 KB: the first tile is ready sooner."""
    slices, posted = Slices(hidden, num_streams, num_mixes), variant == 'post_pre'
    token_bytes = 2 * (num_streams + posted) * slices.channels + posted * 4 * num_streams * (1 + num_streams)
    token_bytes += 4 * slices.sums * max(1, slices.count // TOKENS) + 16  # sums and pre
    token_groups = slices.token_groups_of(warps_that_multiply(slices, variant))
    tile = tile_for(slices, token_groups, token_bytes, (24 if posted else 40) << 10, num_tokens)
    kept_bytes = 0 if variant == 'mixes' else KEPT * 4 * num_streams**2
    free_bytes = SHARED_BYTES - tile * 2 * 4 * slices.slice_warps * slices.sums - slices.low_bytes - kept_bytes
    return dict(tile=tile, stages=min(MAX_STAGES, free_bytes // (tile * token_bytes)))


def warps_that_multiply(slices: Slices, variant: str) -> int:
    """Multiplying warps of a block of `pre_streams_kernel`; with y there are other warps to compute it."""
    return WARPS if variant == 'post_pre' else slices.warps


class Plan:
    """Sizes and roles of a block of `pre_streams_kernel`."""

    def __init__(self, hidden: int, num_streams: int, num_mixes: int, variant: str, tile: int, stages: int) -> None:
        self.slices = slices = Slices(hidden, num_streams, num_mixes)
        self.hidden, self.num_streams, self.num_mixes, self.tile = hidden, num_streams, num_mixes, tile
        self.count, self.channels, self.columns = slices.count, slices.channels, slices.columns
        self.quads = slices.sums // 4
        self.applied, self.posted, self.saves = variant != 'mixes', variant == 'post_pre', variant != 'input'
        self.coefficients = num_streams * (1 + num_streams)
        # Tokens of an owner in a tile; it has tokens in every turns-th tile.
        self.owned, self.turns = max(1, tile // self.count), max(1, self.count // tile)
        # First threads of roles. The number of multiplying warps is even, so register counts of warpgroups work out.
        warps = warps_that_multiply(slices, variant)
        num_warps, *self.registers = WARPS_AND_REGISTERS[warps]
        self.own = warps * WARP
        self.copy = self.own + WARP
        self.send_or_post = self.copy + WARP
        self.apply = self.send_or_post + 2 * WARP * slices.wide + 4 * WARP * self.posted
        self.num_threads = num_warps * WARP if self.applied else self.apply
        self.multipliers, self.appliers = self.own, max(self.num_threads - self.apply, 1)
        self.helpers = max(self.apply - self.send_or_post, 1)
        self.senders = self.helpers if slices.wide else self.multipliers
        self.token_groups = slices.token_groups_of(warps)
        self.parts, rest = divmod(tile, TOKENS * self.token_groups)
        if rest:
            raise ValueError(f'a tile of {tile} tokens is no multiple of {TOKENS * self.token_groups} tokens')
        # TMA copies chunks of a slice. It loads fn faster than threads do, if fn fits into the last stages; in wide
        # slices two streams at a time. The first tiles are loaded into `early_stages` stages meanwhile.
        self.chunks = -(-self.channels // MAX_CHUNK)
        self.chunk = self.channels // self.chunks
        self.fn_rows, self.tile_rows = self.chunks * self.columns, self.chunks * tile * num_streams // 2
        self.fn_buffers = 2 if slices.wide else num_streams
        self.early_stages = stages - -(-self.fn_buffers * self.fn_rows // self.tile_rows)
        self.fn_by_tma = self.early_stages > 0


# Kernel ------------------------------------------------------------------------------------


def small(slot):
    """The same stage, known to the compiler to be small: indices then have 32 bits."""
    return slot & (MAX_STAGES - 1)


@macro
def take_registers(plan, first):
    """Set the registers of the role that begins with thread `first`."""
    if plan.applied:
        if first // (4 * WARP) * 4 * WARP < plan.own:
            T.inc_max_nreg(plan.registers[0])
        else:
            T.dec_max_nreg(plan.registers[1])


@macro
def copy_fn(plan, fn, fn_shared, fn_loaded, s, rank):
    """Load stream s of the slice of fn, behind the early stages."""
    for p in T.unroll(plan.chunks):
        channel = s * plan.hidden + rank * plan.channels + p * plan.chunk
        row = plan.early_stages * plan.tile_rows + s % plan.fn_buffers * plan.fn_rows + p * plan.columns
        T.tma_copy(
            fn[0 : plan.num_mixes, channel : channel + plan.chunk],
            fn_shared[row : row + plan.num_mixes, 0 : plan.chunk],
            barrier=fn_loaded[s],
        )
    T.mbarrier_arrive(fn_loaded[s])


@macro
def copy_mixes(plan, post_mix, comb_mix, first, mix_shared, slot, lane):
    """Start to copy the coefficients of `post` for a tile; those of padding tokens are zeros."""
    for r in T.serial(T.ceildiv(plan.tile * plan.coefficients, WARP)):
        index = r * WARP + lane
        tile_row, c = index // plan.coefficients, index % plan.coefficients
        if tile_row < plan.tile:
            if c < plan.num_streams:
                T.ptx_cp_async(
                    T.access_ptr(mix_shared[small(slot), tile_row, c], 'w', 1),
                    T.access_ptr(post_mix[first + tile_row, c, 0], 'r', 1),
                    1,
                    first + tile_row < post_mix.shape[0],
                )
            else:
                o = c - plan.num_streams
                T.ptx_cp_async(
                    T.access_ptr(mix_shared[small(slot), tile_row, c], 'w', 1),
                    T.access_ptr(comb_mix[first + tile_row, o // plan.num_streams, o % plan.num_streams], 'r', 1),
                    1,
                    first + tile_row < post_mix.shape[0],
                )


@macro
def copy_tile(plan, residual, x, post_mix, comb_mix, index, rank, tile_shared, x_shared, mix_shared, loaded, slot):
    """Load the slices of the tokens of tile `index`, and the other inputs of y."""
    first = index * plan.tile
    for p in T.unroll(plan.chunks):
        channel = rank * plan.channels + p * plan.chunk
        for s in T.unroll(plan.num_streams):
            T.tma_copy(
                residual[first : first + plan.tile, s, channel : channel + plan.chunk],
                tile_shared[small(slot), p, s, 0 : plan.tile, 0 : plan.chunk],
                barrier=loaded[slot],
            )
    if plan.posted:
        T.tma_copy(
            x[first : first + plan.tile, rank * plan.channels : (rank + 1) * plan.channels],
            x_shared[small(slot), 0 : plan.tile, 0 : plan.channels],
            barrier=loaded[slot],
        )
        copy_mixes(plan, post_mix, comb_mix, first, mix_shared, slot, T.get_thread_binding() % WARP)
        T.cp_async_barrier_noinc(loaded[slot])
    T.mbarrier_arrive(loaded[slot])


@macro
def expect_bytes(plan, part_sent, pre_sent, slot, i, rank):
    """Expect the bytes of tile i: sums of the tokens the block owns, and pre of all tokens."""
    if T.get_thread_binding() % WARP == 0:
        T.mbarrier_arrive_expect_tx(pre_sent[slot], plan.tile * 16)
        if (rank + (plan.turns - i % plan.turns) * plan.tile) % plan.count < plan.tile:
            T.mbarrier_arrive_expect_tx(part_sent[slot], plan.count * plan.owned * plan.slices.sums * 4)
        else:
            T.mbarrier_arrive(part_sent[slot])


@macro
def send_sums(plan, sum_shared, part_shared, part_sent, slot, i, rank, thread):
    """Send the sums of the slice, of all tokens of a tile, to the owners of the tokens."""
    total_local = T.alloc_local((4,), T.float32)
    for r in T.unroll(-(-plan.tile * plan.quads // plan.senders)):
        index = r * plan.senders + thread
        token, quad = index // plan.quads, index % plan.quads
        if token < plan.tile:
            sum_warps(plan.slices, sum_shared, i % 2, token, quad * 4, total_local)
            owner = (i % plan.turns * plan.tile + token) % plan.count
            send(
                part_shared[small(slot), rank, token // plan.count, quad * 4],
                total_local,
                part_sent[small(slot)],
                owner,
            )


@macro
def keep_logit(plan, z, kept_shared, comb, token, index, num_owned, lane):
    """Store a logit of comb for token `index` of an owner: the last tokens in shared memory, others in comb."""
    row, column = lane // plan.num_streams - 2, lane % plan.num_streams
    if index + KEPT >= num_owned:
        kept_shared[index % KEPT, row, column] = z
    else:
        comb[token, row, column] = z


@macro
def load_streams(plan, tile_shared, slot, token, vector, streams_local):
    """Load a vector of each stream of a token from shared memory."""
    part, first = vector // (plan.chunk // WIDTH), vector % (plan.chunk // WIDTH) * WIDTH
    for s in T.unroll(plan.num_streams):
        for e in T.vectorized(WIDTH):
            streams_local[s, e] = tile_shared[small(slot), part, s, token, first + e]


@macro
def post_of_vector(plan, tile_shared, x_shared, mix_shared, slot, token, vector, y_local):
    """Overwrite a vector of the residual in shared memory with y; also returns it in `y_local`."""
    x_local = T.alloc_local((1, WIDTH), T.bfloat16)
    residual_local = T.alloc_local((plan.num_streams, WIDTH), T.bfloat16)
    post_local = T.alloc_local((plan.num_streams,), T.float32)
    comb_local = T.alloc_local((plan.num_streams * plan.num_streams,), T.float32)
    load_streams(plan, tile_shared, slot, token, vector, residual_local)
    for e in T.vectorized(WIDTH):
        x_local[0, e] = x_shared[small(slot), token, vector * WIDTH + e]
    for c in T.vectorized(plan.num_streams):
        post_local[c] = mix_shared[small(slot), token, c]
    for o in T.unroll(plan.num_streams):
        for c in T.vectorized(plan.num_streams):
            comb_local[o * plan.num_streams + c] = mix_shared[small(slot), token, (o + 1) * plan.num_streams + c]
    post_to_vector(x_local, 0, residual_local, 0, post_local, comb_local, y_local)
    part, first = vector // (plan.chunk // WIDTH), vector % (plan.chunk // WIDTH) * WIDTH
    for s in T.unroll(plan.num_streams):
        for e in T.vectorized(WIDTH):
            tile_shared[small(slot), part, s, token, first + e] = y_local[s, e]


@kernel(
    choose=choose_pre,
    space=SPACE,
    pass_configs=SLICE_PASS_CONFIGS,
    serves=fits_clusters,
)
def pre_streams_kernel(hidden: int, num_streams: int, num_mixes: int, variant: str, *, tile: int, stages: int):
    """Coefficients and input of a layer from the residual streams.

    - Variant `pre` writes all outputs.
    - Variant `post_pre` computes them from y = post(x, residual), and writes y too.
    - Variant `input` omits the outputs that only backward needs: pre, mixes and rstd.
    - Variant `mixes` writes only mixes and rstd. No warp applies a mix then; owners only send that they are done.
    """
    from tilelang.layout import make_linear_layout

    plan = Plan(hidden, num_streams, num_mixes, variant, tile, stages)
    slices, tile_rows = plan.slices, plan.tile_rows
    applied, posted, saves = plan.applied, plan.posted, plan.saves
    own, copy, send_or_post, apply = plan.own, plan.copy, plan.send_or_post, plan.apply
    multipliers, appliers, helpers, senders = plan.multipliers, plan.appliers, plan.helpers, plan.senders
    chunks, chunk, early_stages, fn_buffers = plan.chunks, plan.chunk, plan.early_stages, plan.fn_buffers
    count, channels, columns, vectors = plan.count, plan.channels, plan.columns, plan.channels // WIDTH
    owned, turns, token_groups, parts = plan.owned, plan.turns, plan.token_groups, plan.parts
    at_once, tile_vectors = min(owned, OWNED_AT_ONCE), tile * num_streams * vectors
    rounds = -(-tile * vectors // appliers)
    loop = T.unroll if rounds <= (3 if slices.wide else 4) else T.serial  # unrolled as far as registers allow
    fn_dtype = T.uint32 if slices.wide else T.bfloat16
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def pre_streams(
        residual: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        x: T.Tensor((num_tokens, hidden), T.bfloat16),
        post_mix: T.Tensor((num_tokens, num_streams, 1), T.float32),
        comb_mix: T.Tensor((num_tokens, num_streams, num_streams), T.float32),
        fn: T.Tensor((num_mixes, num_streams * hidden), T.float32),
        scale: T.Tensor((3,), T.float32),
        base: T.Tensor((num_mixes,), T.float32),
        y: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        post: T.Tensor((num_tokens, num_streams, 1), T.float32),
        comb: T.Tensor((num_tokens, num_streams, num_streams), T.float32),
        layer_input: T.Tensor((num_tokens, hidden), T.bfloat16),
        pre: T.Tensor((num_tokens, num_streams, 1), T.float32),
        mixes: T.Tensor((num_tokens, num_mixes), T.float32),
        rstd: T.Tensor((num_tokens,), T.float32),
        repeat: T.int32,
        eps: T.float32,
        pre_eps: T.float32,
        sinkhorn_eps: T.float32,
        post_mult: T.float32,
    ):
        num_tiles = T.ceildiv(num_tokens, tile)
        groups = T.min(slices.groups, num_tiles)
        with T.Kernel(groups * count, threads=plan.num_threads, cluster_dims=(count, 1, 1)) as pid:
            T.import_source(SEND_FOUR + WITH_EXPONENTS)
            # Stream by stream: neighbours among the tokens, read at a time, then lie in different banks more often.
            tile_shared = T.alloc_shared((stages, chunks, num_streams, tile, chunk), T.bfloat16)
            fn_shared = T.view(tile_shared, (stages * tile_rows, chunk), T.float32)
            vectors_shared = T.view(tile_shared, (stages * tile_vectors, WIDTH))
            views = (tile_shared, fn_shared, vectors_shared)
            T.annotate_layout({shared: make_linear_layout(shared) for shared in views})
            x_shared = T.alloc_shared((stages, tile, channels) if posted else (1, 1, 8), T.bfloat16)
            mix_shared = T.alloc_shared((stages, tile, plan.coefficients) if posted else (1, 1, 4), T.float32)
            sum_shared = T.alloc_shared((2, slices.slice_warps, tile, slices.sums), T.float32)
            part_shared = T.alloc_shared((stages, count, owned, slices.sums), T.float32)
            pre_shared = T.alloc_shared((stages, tile, 4), T.float32)
            kept_shared = T.alloc_shared((KEPT, num_streams, num_streams) if applied else (1, 1, 4), T.float32)
            loaded, used = T.alloc_barrier([WARP * (1 + posted)] * stages), T.alloc_barrier([appliers] * stages)
            in_place = T.alloc_barrier([helpers] * stages)
            fn_loaded, fn_used = T.alloc_barrier([WARP] * num_streams), T.alloc_barrier([multipliers] * num_streams)
            multiplied = T.alloc_barrier([multipliers] * stages)
            summed, sent = T.alloc_barrier([multipliers] * 2), T.alloc_barrier([senders] * 2)
            part_sent, pre_sent = T.alloc_barrier([1] * stages), T.alloc_barrier([1] * stages)
            low_shared = T.alloc_shared(slices.low_shape if slices.wide else (1, 1, 1, 1, 4), T.uint32)
            fn_local = T.alloc_local((slices.operands // 4,) if slices.wide else (slices.operands,), fn_dtype)
            value_local = T.alloc_local((slices.octets, WIDTH), T.float32)
            streams_local = T.alloc_local((num_streams, WIDTH), T.bfloat16)
            x_local = T.alloc_local((WIDTH,), T.bfloat16)
            y_local = T.alloc_local((1, WIDTH), T.bfloat16)
            pre_local = T.alloc_local((num_streams,), T.float32)
            sent_local = T.alloc_local((4,), T.float32)
            sum_local = T.alloc_local((parts, slices.octets * 4 + 4), T.float32)
            total_local = T.alloc_local((4,), T.float32)
            k_local = T.alloc_local((num_streams, num_streams), T.float32)
            tx = T.get_thread_binding()
            rank, group, lane = pid % count, pid // count, tx % WARP
            mine = T.ceildiv(num_tiles - group, groups)
            num_owned = T.ceildiv(mine, turns) * owned  # upper bound
            slot = T.alloc_var(T.int32, init=0)
            parity = T.alloc_var(T.int32, init=0)

            T.pdl_sync()
            T.cluster_arrive()  # no block sends before all blocks have initialized their mbarriers
            if tx < own:
                take_registers(plan, 0)
                warp, token_group = tx // WARP % slices.slice_warps, tx // WARP // slices.slice_warps
                if slices.wide:  # without a division; one warp may be idle
                    warp, token_group = (
                        T.min(tx // WARP, slices.slice_warps - 1),
                        T.cast(tx // WARP >= slices.slice_warps, T.int32),
                    )
                for s in T.unroll(num_streams):
                    if plan.fn_by_tma:
                        T.mbarrier_wait_parity(fn_loaded[s], 0)
                        T.sync_warp()
                        first_row = early_stages * tile_rows + s % fn_buffers * plan.fn_rows
                        read_copied_fn(fn_shared, slices, first_row, chunks, warp, lane, value_local)
                    else:
                        read_fn(fn, slices, 0, s * hidden + rank * channels, warp, lane, value_local)
                    if not slices.wide:
                        keep_fn(slices, s, lane, value_local, fn_local)
                    elif token_group < token_groups:
                        keep_wide_fn(slices, s, warp, lane, value_local, fn_local, low_shared)
                    if plan.fn_by_tma:
                        T.fence_proxy_async()  # orders the reads before a TMA write; an arrival alone does not
                        T.mbarrier_arrive(fn_used[s])
                clear_spare(slices, sum_shared, tx, multipliers)
                T.sync_threads(8, multipliers)
                T.cluster_wait()
                token, channel = token_group * TOKENS + lane // 4, warp * WARP_CHANNELS + lane % 4 * WIDTH
                part = chunk_of(channel, chunk, chunks)
                first_vector = T.alloc_var(T.int32)  # first vector of a thread in a tile, in one register
                first_vector = ((part * num_streams * tile + token) * chunk + channel - part * chunk) // WIDTH
                for i in T.serial(mine):
                    if posted:
                        T.mbarrier_wait_parity(in_place[slot], parity)
                    else:
                        T.mbarrier_wait_parity(loaded[slot], parity)
                    if slices.wide and i >= 2:
                        T.mbarrier_wait_parity(sent[i % 2], (i // 2 + 1) % 2)  # the buffer for sums is free
                    T.sync_warp()  # no lane reads earlier
                    if token_group < token_groups:
                        T.clear(sum_local)
                        for s in T.unroll(num_streams):
                            for p in T.unroll(parts):  # independent mma
                                row = s * tile + p * token_groups * TOKENS
                                vector = first_vector + small(slot) * tile_vectors + row * (chunk // WIDTH)
                                for e in T.vectorized(WIDTH):
                                    x_local[e] = vectors_shared[vector, e]
                                if slices.wide:
                                    multiply_wide(slices, s, x_local, fn_local, low_shared, warp, lane, sum_local, p)
                                else:
                                    multiply(slices, s, x_local, fn_local, sum_local, p)
                        for p in T.unroll(parts):
                            first = (p * token_groups + token_group) * TOKENS
                            keep_sums(slices, sum_local, p, sum_shared, i % 2, warp, first, lane)
                    T.mbarrier_arrive(multiplied[slot])
                    if slices.wide:
                        T.mbarrier_arrive(summed[i % 2])
                    else:
                        T.sync_threads(8, multipliers)
                        send_sums(plan, sum_shared, part_shared, part_sent, slot, i, rank, tx)
                    parity = T.if_then_else(slot == stages - 1, 1 - parity, parity)
                    slot = T.if_then_else(slot == stages - 1, 0, slot + 1)
                if applied:
                    T.sync_threads(9, WARP + multipliers)
                    for r in T.serial(T.ceildiv(num_owned, multipliers)):
                        index = r * multipliers + tx
                        i = index // owned * turns + rank // tile % turns
                        token = (group + i * groups) * tile + rank % tile + index % owned * count
                        if i < mine and token < num_tokens:
                            for o in T.unroll(num_streams):
                                for c in T.vectorized(num_streams):
                                    if index + KEPT >= num_owned:
                                        k_local[o, c] = kept_shared[index % KEPT, o, c]
                                    else:
                                        k_local[o, c] = comb[token, o, c]
                            scale_matrix(k_local, 1, num_streams, 1.0, repeat, sinkhorn_eps)
                            for o in T.unroll(num_streams):
                                for c in T.vectorized(num_streams):
                                    comb[token, o, c] = k_local[o, c]
            elif tx < copy:
                take_registers(plan, own)
                own_scale, own_base = T.alloc_var(T.float32, init=0.0), T.alloc_var(T.float32, init=0.0)
                if applied:  # a lane has one product of a token
                    own_scale = scale[T.min(lane // num_streams, 2)]
                    own_base = base[T.min(lane, num_mixes - 1)]
                T.cluster_wait()
                for i in T.serial(mine):
                    shift = (rank + (turns - i % turns) * tile) % count  # index of its first token in the tile, if any
                    if shift < tile:
                        T.mbarrier_wait_parity(part_sent[slot], parity)
                        T.sync_warp()  # no lane reads earlier
                        for q in T.serial(owned // at_once):
                            for o in T.unroll(at_once):
                                total_local[o] = 0.0
                            for s in T.unroll(count):
                                for o in T.unroll(at_once):
                                    part = part_shared[small(slot), s, q * at_once + o, T.min(lane, columns)]
                                    total_local[o] = total_local[o] + part
                            for p in T.unroll(at_once):
                                tile_row = shift + (q * at_once + p) * count
                                token = (group + i * groups) * tile + tile_row
                                square = T.shfl_sync(total_local[p], columns)
                                factor = rstd_from(square, T.float32(1.0 / (num_streams * hidden)), eps)
                                mix = T.ieee_mul(total_local[p], factor)
                                z = affine(mix, own_scale, own_base)
                                gate = sigmoid(z)
                                weight = T.ieee_add(gate, pre_eps) if applied else mix
                                for e in T.unroll(4):
                                    sent_local[e] = T.shfl_sync(weight, T.min(e, num_streams - 1))
                                if lane < count:
                                    send(pre_shared[small(slot), tile_row, 0], sent_local, pre_sent[small(slot)], lane)
                                if token < num_tokens:
                                    if saves and lane < num_mixes:
                                        mixes[token, lane] = mix
                                    if saves and lane == columns:
                                        rstd[token] = factor
                                    if saves and applied and lane < num_streams:
                                        pre[token, lane, 0] = weight
                                    if applied and lane >= num_streams and lane < 2 * num_streams:
                                        post[token, lane - num_streams, 0] = T.ieee_mul(gate, post_mult)
                                    if applied and lane >= 2 * num_streams and lane < num_mixes:
                                        index = i // turns * owned + q * at_once + p
                                        keep_logit(plan, z, kept_shared, comb, token, index, num_owned, lane)
                    parity = T.if_then_else(slot == stages - 1, 1 - parity, parity)
                    slot = T.if_then_else(slot == stages - 1, 0, slot + 1)
                if applied:
                    T.named_barrier_arrive(9, WARP + multipliers)  # Sinkhorn can start
            elif tx < send_or_post:
                take_registers(plan, copy)
                inputs, buffers = (residual, x, post_mix, comb_mix), (tile_shared, x_shared, mix_shared)
                if plan.fn_by_tma:
                    for s in T.unroll(fn_buffers):
                        copy_fn(plan, fn, fn_shared, fn_loaded, s, rank)
                for i in T.unroll(stages):
                    if plan.fn_by_tma and i == early_stages:
                        for s in T.unroll(num_streams):
                            T.mbarrier_wait_parity(fn_used[s], 0)
                            if s + fn_buffers < num_streams:
                                copy_fn(plan, fn, fn_shared, fn_loaded, s + fn_buffers, rank)
                    if i < mine:
                        expect_bytes(plan, part_sent, pre_sent, i, i, rank)
                        copy_tile(plan, *inputs, group + i * groups, rank, *buffers, loaded, i)
                for j in T.serial(mine - stages):
                    i = j + stages
                    if applied:
                        T.mbarrier_wait_parity(used[slot], parity)
                    else:
                        T.mbarrier_wait_parity(multiplied[slot], parity)
                        T.mbarrier_wait_parity(pre_sent[slot], parity)
                    expect_bytes(plan, part_sent, pre_sent, slot, i, rank)
                    copy_tile(plan, *inputs, group + i * groups, rank, *buffers, loaded, slot)
                    parity = T.if_then_else(slot == stages - 1, 1 - parity, parity)
                    slot = T.if_then_else(slot == stages - 1, 0, slot + 1)
                T.cluster_wait()
                if not applied:  # a block must not exit before all sends to it have arrived
                    for i in T.serial(stages):
                        if i < mine:  # the last tile of each stage
                            T.mbarrier_wait_parity(pre_sent[i], (mine - 1 - i) // stages % 2)
            elif slices.wide and tx < apply:
                take_registers(plan, send_or_post)
                T.cluster_wait()
                for i in T.serial(mine):
                    T.mbarrier_wait_parity(summed[i % 2], i // 2 % 2)
                    T.sync_warp()
                    send_sums(plan, sum_shared, part_shared, part_sent, slot, i, rank, tx - send_or_post)
                    T.mbarrier_arrive(sent[i % 2])
                    slot = T.if_then_else(slot == stages - 1, 0, slot + 1)
            elif posted and tx < apply:
                take_registers(plan, send_or_post)
                T.cluster_wait()
                for i in T.serial(mine):
                    T.mbarrier_wait_parity(loaded[slot], parity)
                    T.sync_warp()
                    for r in T.serial(T.ceildiv(tile * vectors, helpers)):
                        index = r * helpers + tx - send_or_post
                        token, vector = index // vectors, index % vectors
                        target = (group + i * groups) * tile + token
                        if token < tile:
                            post_of_vector(plan, tile_shared, x_shared, mix_shared, slot, token, vector, streams_local)
                            if target < num_tokens:
                                for s in T.unroll(num_streams):
                                    store_vector(streams_local, s, y, target, s, rank * vectors + vector)
                    T.fence_proxy_async()  # orders the writes of y before the next TMA write
                    T.mbarrier_arrive(in_place[small(slot)])
                    parity = T.if_then_else(slot == stages - 1, 1 - parity, parity)
                    slot = T.if_then_else(slot == stages - 1, 0, slot + 1)
            elif applied:
                take_registers(plan, apply)
                T.cluster_wait()
                for i in T.serial(mine):
                    T.mbarrier_wait_parity(loaded[slot], parity)
                    T.mbarrier_wait_parity(multiplied[slot], parity)
                    T.mbarrier_wait_parity(pre_sent[slot], parity)
                    T.sync_warp()
                    for r in loop(rounds):
                        index = r * appliers + tx - apply
                        token, vector = index // vectors, index % vectors
                        target = (group + i * groups) * tile + token
                        if token < tile and target < num_tokens:
                            for c in T.vectorized(num_streams):
                                pre_local[c] = pre_shared[small(slot), token, c]
                            load_streams(plan, tile_shared, slot, token, vector, streams_local)
                            apply_to_vector(streams_local, 0, pre_local, y_local)
                            store_vector(y_local, 0, layer_input, target, 0, rank * vectors + vector)
                    T.mbarrier_arrive(used[small(slot)])
                    parity = T.if_then_else(slot == stages - 1, 1 - parity, parity)
                    slot = T.if_then_else(slot == stages - 1, 0, slot + 1)

    return pre_streams
