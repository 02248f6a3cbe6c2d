"""Kernels that go over the tokens once, each block with its slice of the channels (`_slices`).

`project_slices_kernel`, for GPUs without large clusters, leaves the sums of every slice to others. `pre_streams_kernel`
uses them at once: the blocks of a token are a cluster and send their sums to each other's shared memory, so that the
token need not be read again. The warps of a block have roles:

    multiply   wait for a tile, multiply, and send the sums of the slice to the blocks that own the tokens
    own        for the tokens the block owns, sum the slices, find pre and post, send pre to all blocks
    copy       tiles to shared memory; fn as well if there is room, where the last of the first tiles will be
    send       the sums of wide slices: the many warps that multiply would wait for each other
    post       put y in place of the residual and write it, if y is asked for
    apply      layer_input from the tile, which then makes room for another

What is sent counts its bytes at a barrier of the block it is sent to, and nobody else waits: a barrier of the cluster
would wait for all copies and stores that are under way. The buffers for what is sent belong to the place of the tile,
which is free when its layer_input is done. Who copies another tile there has had pre from all owners, so they have read
their sums; and who sends pre for it has had sums from all blocks, so they have used pre of the tile that was there.

When all tiles are multiplied, the warps that did so carry what owners left for comb through the chain of Sinkhorn, a
thread for each token.
"""

from typing import Any

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.gpus import Gpu
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.core.launch import gpu_of
from tile_kernels.mhc._cluster import LARGE_CLUSTER, SEND_FOUR, send
from tile_kernels.mhc._rows import apply_to_vector, post_to_vector, store_vector
from tile_kernels.mhc._slices import (
    SLICE_PASS_CONFIGS,
    TOKENS,
    WARP_CHANNELS,
    WARPS,
    WIDTH,
    WITH_EXPONENTS,
    Slices,
    clear_spare,
    keep_fn,
    keep_sums,
    keep_wide_fn,
    multiply,
    multiply_wide,
    piece_of,
    read_copied_fn,
    read_fn,
    sum_shares,
    tile_for,
)
from tile_kernels.mhc.norm_fn_kernels import rstd_from
from tile_kernels.mhc.sinkhorn import scale_matrix
from tile_kernels.mhc.split_mixes import affine, sigmoid

#: Blocks of `project_slices_kernel`, about one on each SM. Results do not depend on it.
BLOCKS = 128

#: Places for tiles of a block, at most: a power of two.
MAX_STAGES = 8

SPACE = dict(tile=(8, 16, 32, 64), stages=tuple(range(2, MAX_STAGES + 1)))

#: Warps of a block, and registers of a thread of four warps in a row, if some of them multiply and if none does: no
#: more than an SM has, and the same for all four. By the number of those that multiply.
WARPS_AND_REGISTERS = {8: (16, 168, 80), 10: (16, 144, 80), 12: (24, 96, 48), 14: (24, 96, 48), 16: (28, 96, 40)}

#: Tokens whose sums an owner has under way at a time.
OWNED_AT_ONCE = 4

#: Tokens of an owner, the last ones, whose chain of Sinkhorn starts from shared memory; that of others from comb.
KEPT = 128

#: Channels of one copy, at most.
MAX_PIECE = 256

#: Bytes of shared memory of an SM, but for gaps between buffers.
SHARED_BYTES = 224 << 10

#: SMs of a GPU that has clusters of 16 blocks: on a part of a GPU they may not be close enough together.
SMS_FOR_CLUSTERS_OF_16 = 100

# Config -------------------------------------------------------------------------------------


def goes_in_one_pass(residual: Tensor, fn: Tensor, layer: tuple[Tensor, Tensor] | None = None) -> bool:
    """Whether `pre_streams_kernel` serves them.

    `layer` is x and its residual, which must start at a multiple of 16 bytes.
    """
    if layer is not None and check.vector_bytes(*layer) < 16:
        return False
    static = (residual.shape[-1], residual.shape[-2], fn.shape[0], 'pre' if layer is None else 'post_pre')
    return pre_streams_kernel.claims(static, gpu_of(residual))


def fits_clusters(static: Any, gpu: Gpu) -> bool:
    """Whether a slice of fn fits into a block, and the GPU has clusters for all slices.

    Where y is found, a block may get 256 channels at most.
    """
    slices = Slices(static.hidden, static.num_streams, static.num_mixes)
    if not slices.fits or (static.kind == 'post_pre' and slices.shares > WARPS):
        return False
    few_sms = slices.count == 16 and gpu.sms < SMS_FOR_CLUSTERS_OF_16
    return gpu.max_cluster >= LARGE_CLUSTER and not few_sms


def choose_project(hidden: int, num_streams: int, num_mixes: int, num_tokens: int) -> dict:
    """Small tiles: the GPUs that need this kernel have down to 99 KB of shared memory."""
    slices = Slices(hidden, num_streams, num_mixes)
    token_bytes = 2 * slices.pitch(num_streams)
    tile = tile_for(slices, slices.teams, token_bytes, 20 << 10, num_tokens)
    return dict(tile=tile, stages=min(3, (90 << 10) // (tile * token_bytes)))


def choose_pre(hidden: int, num_streams: int, num_mixes: int, kind: str, num_tokens: int) -> dict:
    """What fits of tiles of up to 40 KB, or 24 KB where y is found: the next step then begins sooner."""
    slices, posted = Slices(hidden, num_streams, num_mixes), kind == 'post_pre'
    token_bytes = 2 * (num_streams + posted) * slices.channels + posted * 4 * num_streams * (1 + num_streams)
    token_bytes += 4 * slices.sums * max(1, slices.count // TOKENS) + 16  # what is sent
    teams = slices.teams_of(warps_that_multiply(slices, kind))
    tile = tile_for(slices, teams, token_bytes, (24 if posted else 40) << 10, num_tokens)
    kept_bytes = 0 if kind == 'mixes' else KEPT * 4 * num_streams**2
    room = SHARED_BYTES - tile * 2 * 4 * slices.shares * slices.sums - slices.low_bytes - kept_bytes
    return dict(tile=tile, stages=min(MAX_STAGES, room // (tile * token_bytes)))


def warps_that_multiply(slices: Slices, kind: str) -> int:
    """Of a block of `pre_streams_kernel`: others find y, where it is asked for."""
    return WARPS if kind == 'post_pre' else slices.warps


# Kernels ------------------------------------------------------------------------------------


def small(slot):
    """The same number, as one that the compiler knows to be small: indices then have 32 bits."""
    return slot & (MAX_STAGES - 1)


@kernel(choose=choose_project, space=SPACE, pass_configs=SLICE_PASS_CONFIGS)
def project_slices_kernel(hidden: int, num_streams: int, num_mixes: int, *, tile: int, stages: int):
    """The products and sums of squares of every slice."""
    slices = Slices(hidden, num_streams, num_mixes)
    ahead, parts, quads = stages - 1, tile // TOKENS // slices.teams, slices.sums // 4
    num_tokens = T.dynamic('num_tokens')

    @macro
    def ask_for_tile(x, first, rank, tile_shared, slot):
        """Start to copy the slices of the tokens from `first` on, zeros behind the last."""
        vectors = slices.channels // WIDTH
        if first < x.shape[0]:
            for r in T.unroll(-(-tile * num_streams * vectors // slices.num_threads)):
                index = r * slices.num_threads + T.get_thread_binding()
                token, s, vector = index // vectors // num_streams, index // vectors % num_streams, index % vectors
                if token < tile:
                    T.ptx_cp_async(
                        T.access_ptr(tile_shared[slot, token, s * slices.channels + vector * WIDTH], 'w', WIDTH),
                        T.access_ptr(x[first + token, s, rank * slices.channels + vector * WIDTH], 'r', WIDTH),
                        WIDTH,
                        first + token < x.shape[0],
                    )
        T.ptx_commit_group()

    @T.prim_func
    def project_slices(
        x: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        fn: T.Tensor((num_mixes, num_streams * hidden), T.float32),
        mul_parts: T.Tensor((slices.count, num_tokens, slices.columns), T.float32),
        square_parts: T.Tensor((slices.count, num_tokens), T.float32),
    ):
        num_tiles = T.ceildiv(num_tokens, tile)
        groups = T.min(BLOCKS // slices.count, num_tiles)
        with T.Kernel(groups * slices.count, threads=slices.num_threads) as pid:
            tile_shared = T.alloc_shared((stages, tile, slices.pitch(num_streams)), T.bfloat16)
            sum_shared = T.alloc_shared((1, slices.shares, tile, slices.sums), T.float32)
            fn_local = T.alloc_local((slices.operands,), T.bfloat16)
            value_local = T.alloc_local((slices.octets, WIDTH), T.float32)
            x_local = T.alloc_local((WIDTH,), T.bfloat16)
            sum_local = T.alloc_local((1, slices.octets * 4 + 4), T.float32)
            total_local = T.alloc_local((4,), T.float32)
            tx = T.get_thread_binding()
            rank, group, lane = pid % slices.count, pid // slices.count, tx % WARP
            share, team = tx // WARP % slices.shares, tx // WARP // slices.shares
            slot = T.alloc_var(T.int32, init=0)  # of tile i
            free = T.alloc_var(T.int32, init=ahead)  # of the tile before, and of the next to be copied

            for i in T.unroll(ahead):
                ask_for_tile(x, (group + i * groups) * tile, rank, tile_shared, i)
            clear_spare(slices, sum_shared, tx, slices.num_threads)
            for s in T.unroll(num_streams):
                read_fn(fn, slices, 0, s * hidden + rank * slices.channels, share, lane, value_local)
                keep_fn(slices, s, lane, value_local, fn_local)
            for i in T.serial(T.ceildiv(num_tiles - group, groups)):
                first = (group + i * groups) * tile
                T.ptx_wait_group(ahead - 1)
                T.sync_threads()
                ask_for_tile(x, (group + (i + ahead) * groups) * tile, rank, tile_shared, free)
                for p in T.unroll(parts):
                    start = (p * slices.teams + team) * TOKENS
                    place = share * WARP_CHANNELS + lane % 4 * WIDTH
                    T.clear(sum_local)
                    for s in T.unroll(num_streams):
                        for e in T.vectorized(WIDTH):
                            x_local[e] = tile_shared[slot, start + lane // 4, s * slices.channels + place + e]
                        multiply(slices, s, x_local, fn_local, sum_local, 0)
                    keep_sums(slices, sum_local, 0, sum_shared, 0, share, start, lane)
                T.sync_threads()
                for r in T.unroll(-(-tile * quads // slices.num_threads)):
                    index = r * slices.num_threads + tx
                    token, quad = index // quads, index % quads
                    if token < tile and first + token < num_tokens:
                        sum_shares(slices, sum_shared, 0, token, quad * 4, total_local)
                        if quad < quads - 1:
                            for e in T.vectorized(4):
                                mul_parts[rank, first + token, quad * 4 + e] = total_local[e]
                        else:
                            square_parts[rank, first + token] = total_local[0]
                free = slot
                slot = T.if_then_else(slot == stages - 1, 0, slot + 1)

    return project_slices


@kernel(
    choose=choose_pre,
    space=SPACE,
    pass_configs=SLICE_PASS_CONFIGS,
    serves=fits_clusters,
)
def pre_streams_kernel(hidden: int, num_streams: int, num_mixes: int, kind: str, *, tile: int, stages: int):
    """Coefficients and input of a layer, 'pre'; 'post_pre' of y = post(x, residual), which is written as well.

    Of 'input' there is nothing that only gradients need: neither pre nor mixes and rstd. Of 'mixes' these and rstd are
    all there is: nobody applies them, and what owners send says that they are done.
    """
    from tilelang.layout import make_linear_layout

    slices = Slices(hidden, num_streams, num_mixes)
    applied, posted, saves = kind != 'mixes', kind == 'post_pre', kind != 'input'
    count, channels, columns = slices.count, slices.channels, slices.columns
    coefficients = num_streams * (1 + num_streams)
    vectors, quads = channels // WIDTH, slices.sums // 4
    tile_vectors = tile * num_streams * vectors
    owned, turns = max(1, tile // count), max(1, count // tile)  # tokens of an owner in a tile, every so many tiles
    at_once = min(owned, OWNED_AT_ONCE)
    warps = warps_that_multiply(slices, kind)
    teams = slices.teams_of(warps)
    parts, rest = divmod(tile, TOKENS * teams)
    if rest:
        raise ValueError(f'a tile of {tile} tokens cannot be shared by {teams} warps with {TOKENS} each')
    num_warps, *registers = WARPS_AND_REGISTERS[warps]
    # Where roles begin. Warps that multiply are even in number, so that four warps in a row may have as many registers.
    own = warps * WARP
    copy = own + WARP
    send_or_post = copy + WARP
    apply = send_or_post + 2 * WARP * slices.wide + 4 * WARP * posted
    num_threads = num_warps * WARP if applied else apply
    multipliers, appliers = own, max(num_threads - apply, 1)
    helpers = max(apply - send_or_post, 1)
    senders = helpers if slices.wide else multipliers
    pieces = -(-channels // MAX_PIECE)  # of a slice, that are copied one by one
    piece = channels // pieces
    # Copies bring fn sooner than loads, if the last tiles have room for it, in wide slices for two streams at a time;
    # the first tiles are copied meanwhile.
    fn_rows, tile_rows = pieces * columns, pieces * tile * num_streams // 2  # an element of fn takes two of a tile
    rooms = 2 if slices.wide else num_streams
    early = stages - -(-rooms * fn_rows // tile_rows)
    by_copies = early > 0
    rounds = -(-tile * vectors // appliers)
    some = T.unroll if rounds <= (3 if slices.wide else 4) else T.serial  # as registers allow
    fn_dtype = T.uint32 if slices.wide else T.bfloat16
    num_tokens = T.dynamic('num_tokens')

    @macro
    def take_registers(first):
        """As many registers as a role needs that begins with thread `first`, if there are roles that need fewer."""
        if applied:
            if first // (4 * WARP) * 4 * WARP < own:
                T.inc_max_nreg(registers[0])
            else:
                T.dec_max_nreg(registers[1])

    @macro
    def copy_fn(fn, fn_shared, fn_loaded, s, rank):
        """Copy stream s of the slice of fn behind the room of the first tiles."""
        for p in T.unroll(pieces):
            channel = s * hidden + rank * channels + p * piece
            row = early * tile_rows + s % rooms * fn_rows + p * columns
            T.tma_copy(
                fn[0:num_mixes, channel : channel + piece],
                fn_shared[row : row + num_mixes, 0:piece],
                barrier=fn_loaded[s],
            )
        T.mbarrier_arrive(fn_loaded[s])

    @macro
    def copy_mixes(post_mix, comb_mix, first, mix_shared, slot, lane):
        """Start to copy the coefficients of post of a tile; zeros behind the last token."""
        for r in T.serial(T.ceildiv(tile * coefficients, WARP)):
            index = r * WARP + lane
            place, c = index // coefficients, index % coefficients
            if place < tile:
                if c < num_streams:
                    T.ptx_cp_async(
                        T.access_ptr(mix_shared[small(slot), place, c], 'w', 1),
                        T.access_ptr(post_mix[first + place, c, 0], 'r', 1),
                        1,
                        first + place < post_mix.shape[0],
                    )
                else:
                    o = c - num_streams
                    T.ptx_cp_async(
                        T.access_ptr(mix_shared[small(slot), place, c], 'w', 1),
                        T.access_ptr(comb_mix[first + place, o // num_streams, o % num_streams], 'r', 1),
                        1,
                        first + place < post_mix.shape[0],
                    )

    @macro
    def copy_tile(residual, x, post_mix, comb_mix, index, rank, tile_shared, x_shared, mix_shared, loaded, slot):
        """Copy the slices of the tokens of tile `index`, and what else y is made of."""
        first = index * tile
        for p in T.unroll(pieces):
            channel = rank * channels + p * piece
            for s in T.unroll(num_streams):
                T.tma_copy(
                    residual[first : first + tile, s, channel : channel + piece],
                    tile_shared[small(slot), p, s, 0:tile, 0:piece],
                    barrier=loaded[slot],
                )
        if posted:
            T.tma_copy(
                x[first : first + tile, rank * channels : (rank + 1) * channels],
                x_shared[small(slot), 0:tile, 0:channels],
                barrier=loaded[slot],
            )
            copy_mixes(post_mix, comb_mix, first, mix_shared, slot, T.get_thread_binding() % WARP)
            T.cp_async_barrier_noinc(loaded[slot])
        T.mbarrier_arrive(loaded[slot])

    @macro
    def announce(part_sent, pre_sent, slot, i, rank):
        """What will be sent for tile i: the sums of the tokens the block owns, and pre of all tokens."""
        if T.get_thread_binding() % WARP == 0:
            T.mbarrier_arrive_expect_tx(pre_sent[slot], tile * 16)
            if (rank + (turns - i % turns) * tile) % count < tile:
                T.mbarrier_arrive_expect_tx(part_sent[slot], count * owned * slices.sums * 4)
            else:
                T.mbarrier_arrive(part_sent[slot])

    @macro
    def send_sums(sum_shared, part_shared, part_sent, slot, i, rank, thread):
        """The sums of the slice, of all tokens of a tile, to the blocks that own them."""
        total_local = T.alloc_local((4,), T.float32)
        for r in T.unroll(-(-tile * quads // senders)):
            index = r * senders + thread
            token, quad = index // quads, index % quads
            if token < tile:
                sum_shares(slices, sum_shared, i % 2, token, quad * 4, total_local)
                owner = (i % turns * tile + token) % count
                send(
                    part_shared[small(slot), rank, token // count, quad * 4], total_local, part_sent[small(slot)], owner
                )

    @macro
    def keep_logit(z, kept_shared, comb, token, index, num_owned, lane):
        """Where the chain of Sinkhorn starts, for token `index` of an owner: the last ones need not be loaded again."""
        row, column = lane // num_streams - 2, lane % num_streams
        if index + KEPT >= num_owned:
            kept_shared[index % KEPT, row, column] = z
        else:
            comb[token, row, column] = z

    @macro
    def load_streams(tile_shared, slot, token, vector, streams_local):
        """A vector of each stream of a token."""
        part, first = vector // (piece // WIDTH), vector % (piece // WIDTH) * WIDTH
        for s in T.unroll(num_streams):
            for e in T.vectorized(WIDTH):
                streams_local[s, e] = tile_shared[small(slot), part, s, token, first + e]

    @macro
    def post_of_vector(tile_shared, x_shared, mix_shared, slot, token, vector, y_local):
        """Put y in place of the residual, for a vector of a token, and into `y_local`."""
        x_local = T.alloc_local((1, WIDTH), T.bfloat16)
        residual_local = T.alloc_local((num_streams, WIDTH), T.bfloat16)
        post_local = T.alloc_local((num_streams,), T.float32)
        comb_local = T.alloc_local((num_streams * num_streams,), T.float32)
        load_streams(tile_shared, slot, token, vector, residual_local)
        for e in T.vectorized(WIDTH):
            x_local[0, e] = x_shared[small(slot), token, vector * WIDTH + e]
        for c in T.vectorized(num_streams):
            post_local[c] = mix_shared[small(slot), token, c]
        for o in T.unroll(num_streams):
            for c in T.vectorized(num_streams):
                comb_local[o * num_streams + c] = mix_shared[small(slot), token, (o + 1) * num_streams + c]
        post_to_vector(x_local, 0, residual_local, 0, post_local, comb_local, y_local)
        part, first = vector // (piece // WIDTH), vector % (piece // WIDTH) * WIDTH
        for s in T.unroll(num_streams):
            for e in T.vectorized(WIDTH):
                tile_shared[small(slot), part, s, token, first + e] = y_local[s, e]

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
        with T.Kernel(groups * count, threads=num_threads, cluster_dims=(count, 1, 1)) as pid:
            T.import_source(SEND_FOUR + WITH_EXPONENTS)
            # Stream by stream: neighbours among the tokens, read at a time, then lie in different banks more often.
            tile_shared = T.alloc_shared((stages, pieces, num_streams, tile, piece), T.bfloat16)
            fn_shared = T.view(tile_shared, (stages * tile_rows, piece), T.float32)
            vectors_shared = T.view(tile_shared, (stages * tile_vectors, WIDTH))
            views = (tile_shared, fn_shared, vectors_shared)
            T.annotate_layout({shared: make_linear_layout(shared) for shared in views})
            x_shared = T.alloc_shared((stages, tile, channels) if posted else (1, 1, 8), T.bfloat16)
            mix_shared = T.alloc_shared((stages, tile, coefficients) if posted else (1, 1, 4), T.float32)
            sum_shared = T.alloc_shared((2, slices.shares, tile, slices.sums), T.float32)
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
            num_owned = T.ceildiv(mine, turns) * owned  # or a few less
            slot = T.alloc_var(T.int32, init=0)
            parity = T.alloc_var(T.int32, init=0)

            T.pdl_sync()
            T.cluster_arrive()  # who sends waits until all blocks have their barriers
            if tx < own:
                take_registers(0)
                share, team = tx // WARP % slices.shares, tx // WARP // slices.shares
                if slices.wide:  # one may be idle; without a division
                    share, team = T.min(tx // WARP, slices.shares - 1), T.cast(tx // WARP >= slices.shares, T.int32)
                for s in T.unroll(num_streams):
                    if by_copies:
                        T.mbarrier_wait_parity(fn_loaded[s], 0)
                        T.sync_warp()
                        first_row = early * tile_rows + s % rooms * fn_rows
                        read_copied_fn(fn_shared, slices, first_row, pieces, share, lane, value_local)
                    else:
                        read_fn(fn, slices, 0, s * hidden + rank * channels, share, lane, value_local)
                    if not slices.wide:
                        keep_fn(slices, s, lane, value_local, fn_local)
                    elif team < teams:
                        keep_wide_fn(slices, s, share, lane, value_local, fn_local, low_shared)
                    if by_copies:
                        T.fence_proxy_async()  # or a copy may come before what was read: an arrival waits for no read
                        T.mbarrier_arrive(fn_used[s])
                clear_spare(slices, sum_shared, tx, multipliers)
                T.sync_threads(8, multipliers)
                T.cluster_wait()
                token, channel = team * TOKENS + lane // 4, share * WARP_CHANNELS + lane % 4 * WIDTH
                part = piece_of(channel, piece, pieces)
                first_vector = T.alloc_var(T.int32)  # of a thread in a tile; or its parts would be kept
                first_vector = ((part * num_streams * tile + token) * piece + channel - part * piece) // WIDTH
                for i in T.serial(mine):
                    if posted:
                        T.mbarrier_wait_parity(in_place[slot], parity)
                    else:
                        T.mbarrier_wait_parity(loaded[slot], parity)
                    if slices.wide and i >= 2:
                        T.mbarrier_wait_parity(sent[i % 2], (i // 2 + 1) % 2)  # there is room for sums
                    T.sync_warp()  # nothing is read before
                    if team < teams:
                        T.clear(sum_local)
                        for s in T.unroll(num_streams):
                            for p in T.unroll(parts):  # products that need not wait for each other
                                row = s * tile + p * teams * TOKENS
                                vector = first_vector + small(slot) * tile_vectors + row * (piece // WIDTH)
                                for e in T.vectorized(WIDTH):
                                    x_local[e] = vectors_shared[vector, e]
                                if slices.wide:
                                    multiply_wide(slices, s, x_local, fn_local, low_shared, share, lane, sum_local, p)
                                else:
                                    multiply(slices, s, x_local, fn_local, sum_local, p)
                        for p in T.unroll(parts):
                            first = (p * teams + team) * TOKENS
                            keep_sums(slices, sum_local, p, sum_shared, i % 2, share, first, lane)
                    T.mbarrier_arrive(multiplied[slot])
                    if slices.wide:
                        T.mbarrier_arrive(summed[i % 2])
                    else:
                        T.sync_threads(8, multipliers)
                        send_sums(sum_shared, part_shared, part_sent, slot, i, rank, tx)
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
                take_registers(own)
                own_scale, own_base = T.alloc_var(T.float32, init=0.0), T.alloc_var(T.float32, init=0.0)
                if applied:  # a lane has a product of a token
                    own_scale = scale[T.min(lane // num_streams, 2)]
                    own_base = base[T.min(lane, num_mixes - 1)]
                T.cluster_wait()
                for i in T.serial(mine):
                    shift = (rank + (turns - i % turns) * tile) % count  # the first of its tokens in the tile, if any
                    if shift < tile:
                        T.mbarrier_wait_parity(part_sent[slot], parity)
                        T.sync_warp()  # nothing that was sent is read before
                        for q in T.serial(owned // at_once):
                            for o in T.unroll(at_once):
                                total_local[o] = 0.0
                            for s in T.unroll(count):
                                for o in T.unroll(at_once):
                                    part = part_shared[small(slot), s, q * at_once + o, T.min(lane, columns)]
                                    total_local[o] = total_local[o] + part
                            for p in T.unroll(at_once):
                                place = shift + (q * at_once + p) * count
                                token = (group + i * groups) * tile + place
                                square = T.shfl_sync(total_local[p], columns)
                                factor = rstd_from(square, T.float32(1.0 / (num_streams * hidden)), eps)
                                mix = T.ieee_mul(total_local[p], factor)
                                z = affine(mix, own_scale, own_base)
                                gate = sigmoid(z)
                                weight = T.ieee_add(gate, pre_eps) if applied else mix
                                for e in T.unroll(4):
                                    sent_local[e] = T.shfl_sync(weight, T.min(e, num_streams - 1))
                                if lane < count:
                                    send(pre_shared[small(slot), place, 0], sent_local, pre_sent[small(slot)], lane)
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
                                        keep_logit(z, kept_shared, comb, token, index, num_owned, lane)
                    parity = T.if_then_else(slot == stages - 1, 1 - parity, parity)
                    slot = T.if_then_else(slot == stages - 1, 0, slot + 1)
                if applied:
                    T.named_barrier_arrive(9, WARP + multipliers)  # the chains can start
            elif tx < send_or_post:
                take_registers(copy)
                inputs, places = (residual, x, post_mix, comb_mix), (tile_shared, x_shared, mix_shared)
                if by_copies:
                    for s in T.unroll(rooms):
                        copy_fn(fn, fn_shared, fn_loaded, s, rank)
                for i in T.unroll(stages):
                    if by_copies and i == early:
                        for s in T.unroll(num_streams):
                            T.mbarrier_wait_parity(fn_used[s], 0)
                            if s + rooms < num_streams:
                                copy_fn(fn, fn_shared, fn_loaded, s + rooms, rank)
                    if i < mine:
                        announce(part_sent, pre_sent, i, i, rank)
                        copy_tile(*inputs, group + i * groups, rank, *places, loaded, i)
                for j in T.serial(mine - stages):
                    i = j + stages
                    if applied:
                        T.mbarrier_wait_parity(used[slot], parity)
                    else:
                        T.mbarrier_wait_parity(multiplied[slot], parity)
                        T.mbarrier_wait_parity(pre_sent[slot], parity)
                    announce(part_sent, pre_sent, slot, i, rank)
                    copy_tile(*inputs, group + i * groups, rank, *places, loaded, slot)
                    parity = T.if_then_else(slot == stages - 1, 1 - parity, parity)
                    slot = T.if_then_else(slot == stages - 1, 0, slot + 1)
                T.cluster_wait()
                if not applied:  # nobody may leave before all that is sent to the block has come
                    for i in T.serial(stages):
                        if i < mine:  # the last tile of each place
                            T.mbarrier_wait_parity(pre_sent[i], (mine - 1 - i) // stages % 2)
            elif slices.wide and tx < apply:
                take_registers(send_or_post)
                T.cluster_wait()
                for i in T.serial(mine):
                    T.mbarrier_wait_parity(summed[i % 2], i // 2 % 2)
                    T.sync_warp()
                    send_sums(sum_shared, part_shared, part_sent, slot, i, rank, tx - send_or_post)
                    T.mbarrier_arrive(sent[i % 2])
                    slot = T.if_then_else(slot == stages - 1, 0, slot + 1)
            elif posted and tx < apply:
                take_registers(send_or_post)
                T.cluster_wait()
                for i in T.serial(mine):
                    T.mbarrier_wait_parity(loaded[slot], parity)
                    T.sync_warp()
                    for r in T.serial(T.ceildiv(tile * vectors, helpers)):
                        index = r * helpers + tx - send_or_post
                        token, vector = index // vectors, index % vectors
                        target = (group + i * groups) * tile + token
                        if token < tile:
                            post_of_vector(tile_shared, x_shared, mix_shared, slot, token, vector, streams_local)
                            if target < num_tokens:
                                for s in T.unroll(num_streams):
                                    store_vector(streams_local, s, y, target, s, rank * vectors + vector)
                    T.fence_proxy_async()  # y is written before another tile is copied there
                    T.mbarrier_arrive(in_place[small(slot)])
                    parity = T.if_then_else(slot == stages - 1, 1 - parity, parity)
                    slot = T.if_then_else(slot == stages - 1, 0, slot + 1)
            elif applied:
                take_registers(apply)
                T.cluster_wait()
                for i in T.serial(mine):
                    T.mbarrier_wait_parity(loaded[slot], parity)
                    T.mbarrier_wait_parity(multiplied[slot], parity)
                    T.mbarrier_wait_parity(pre_sent[slot], parity)
                    T.sync_warp()
                    for r in some(rounds):
                        index = r * appliers + tx - apply
                        token, vector = index // vectors, index % vectors
                        target = (group + i * groups) * tile + token
                        if token < tile and target < num_tokens:
                            for c in T.vectorized(num_streams):
                                pre_local[c] = pre_shared[small(slot), token, c]
                            load_streams(tile_shared, slot, token, vector, streams_local)
                            apply_to_vector(streams_local, 0, pre_local, y_local)
                            store_vector(y_local, 0, layer_input, target, 0, rank * vectors + vector)
                    T.mbarrier_arrive(used[small(slot)])
                    parity = T.if_then_else(slot == stages - 1, 1 - parity, parity)
                    slot = T.if_then_else(slot == stages - 1, 0, slot + 1)

    return pre_streams
