"""The kernel of RMS norm, with or without a residual, with or without a per-token cast; see the ops for the maths.

A team of warps keeps a row in registers; everything it reads is asked for before the first sum. Scale groups lie within
a warp and are reduced by shuffles, as in `per_token_cast`. A whole row is reduced by its group of warps. Memory bound:
the floor is reading x and the residual and writing what is asked for once.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import EARLY, WARP, T, begin_early, is_short, macro, resident_blocks
from tile_kernels.core.launch import launch
from tile_kernels.device.bits import bits_of
from tile_kernels.device.codes import code_registers, encode_and_store
from tile_kernels.device.reduce import lane_dot, lane_max, over_team, scatter_max, shuffle_steps
from tile_kernels.device.scales import amax_to_sf, clamp_amax, sf_bytes, sf_register_dtype, sf_tensor, store_sf
from tile_kernels.device.vectors import LANE, apart, load_lane, store_lane, swap_pieces, widen_lane
from tile_kernels.norm._checks import check_weight
from tile_kernels.norm._macros import row_warps, team_warps


def choose(
    hidden: int,
    fmt: QuantFormat | None,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    scaled: bool,
    vector_bytes: int,
    residual: bool,
    plain: bool,
    batched: bool,
    mega: bool,
    num_tokens: int,
) -> dict:
    """At most 64 bytes of a row for each lane: enough loads in flight, few warps to wait for.

    A cast computes more than it moves. So a lane holds at least 64 bytes, in long rows up to 128: what it does once per
    row then counts less. This needs rows for many waves and enough registers.
    """
    pieces, vectors = row_warps(hidden), 8 // x_dtype.itemsize
    early = is_short(2 * num_tokens * hidden * x_dtype.itemsize)
    warps = team_warps(hidden, vectors)
    if fmt is not None and not residual and x_dtype.itemsize == 2 and num_tokens * pieces >= 1 << 14:
        fewer = 1 << max(pieces // vectors, 1).bit_length() - 1
        warps = min(warps, fewer) if pieces < 8 * vectors else team_warps(hidden, 2 * vectors)
    owned = -(-pieces // warps)
    if owned <= vectors:
        return dict(warps=warps, resident_threads=1024, early=early)
    fitting = owned <= 2 * vectors and weight_dtype is not torch.float32
    return dict(warps=warps, resident_threads=768 if fitting else 512, early=early)


@kernel(
    choose=choose,
    space=dict(warps=(1, 2, 4, 8, 16), resident_threads=(512, 768, 1024), early=EARLY),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True, 'TL_ENABLE_LOWER_LDGSTG': True},
    fixed='warps',
)
def norm_forward_kernel(
    hidden: int,
    fmt: QuantFormat | None,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    scaled: bool,
    vector_bytes: int,
    residual: bool,
    plain: bool,
    batched: bool,
    mega: bool,
    *,
    warps: int,
    resident_threads: int,
    early: bool = False,
):
    """`scaled`: out_scale is not 1; `plain`: y is written in the dtype of x; `batched`, `mega`: see `place_sf`."""
    vectors = -(-row_warps(hidden) // warps)
    teams = max(1, 4 // warps)
    num_threads = teams * warps * WARP
    quantized = fmt is not None
    whole_row = quantized and fmt.sf_block[1] == 0
    lanes = 1 if fmt is None or whole_row else fmt.sf_block[1] // LANE
    num_groups = 1 if fmt is None or whole_row else -(-hidden // fmt.sf_block[1])
    counted = 1 << (vectors - 1).bit_length()  # `scatter_max` halves
    owned = -(-counted // lanes)
    piece = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden)
    halves = apart(x_dtype, piece)
    weight_piece = math.gcd(LANE, 16 // (weight_dtype or x_dtype).itemsize, hidden)
    full = hidden % (vectors * warps * WARP * LANE) == 0
    ragged = row_warps(hidden) % warps != 0  # some warps have one vector less
    residual_early = vectors * x_dtype.itemsize <= 16  # else registers do not suffice
    weight_early = weight_dtype is not None and vectors * weight_dtype.itemsize <= 16
    joined = quantized and fmt.sf == 'ue8m0x4' and not whole_row and not mega
    num_tokens, x_pitch, residual_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch'), T.dynamic('residual_pitch')
    y_pitch, z_pitch = T.dynamic('y_pitch'), T.dynamic('z_pitch')
    weighted, weight_type = weight_dtype is not None, T.dtype(weight_dtype or x_dtype)
    dtype, num_words = T.dtype(x_dtype), -(-num_groups // (fmt.sf_pack if fmt else 1))
    if fmt is None:
        codes_parameter = T.Tensor((num_tokens, 1), dtype)
        sf_parameter = T.Tensor((num_tokens, 1), T.float32)
    elif batched:
        columns = (T.dynamic('sf_rows'), T.dynamic('sf_columns'))
        sf_parameter = T.StridedTensor(columns, (1, T.dynamic('sf_pitch')), T.dtype(fmt.sf_dtype))
    else:
        sf_parameter = sf_tensor(fmt, num_tokens, num_groups)
    if fmt is not None:
        codes_parameter = T.Tensor((num_tokens, fmt.data.stored(hidden)), T.dtype(fmt.data.torch))

    @macro
    def place_sf(sf, mega_sf, row, group, value, batch_rows, mega_rows):
        """Write the factor of a group: rows of a batch side by side, and to the tiles of 128 rows of `mega_sf`."""
        if batched:
            store_sf(sf, fmt, num_groups, row % batch_rows, group, value, row // batch_rows * num_words)
        else:
            store_sf(sf, fmt, num_groups, row, group, value)
        if mega:
            tiled = T.view(
                mega_sf, (mega_sf.shape[0], num_groups // 4, 4), T.uint8, strides=(4, 4 * mega_sf.strides[1], 1)
            )
            place = row % mega_rows
            first = row // mega_rows * (T.ceildiv(mega_rows, 128) * 128) + place // 128 * 128
            byte = value if fmt.sf == 'ue8m0x4' else T.cast(bits_of(value) >> T.uint32(23), T.uint8)
            tiled[first + place % 32 * 4 + place % 128 // 32, group // 4, group % 4] = byte

    @macro
    def place_exponents(sf, row, group, value, stored, lane, batch_rows):
        """Gather the exponent bytes of the groups of a warp that share a word, and write them at a time."""
        together = min(4, WARP // lanes)
        word = T.alloc_var(T.uint32)
        place = lane // lanes % together
        word = T.if_then_else(group < num_groups, T.cast(value, T.uint32) << T.cast(8 * place, T.uint32), T.uint32(0))
        for step in T.unroll(shuffle_steps(together)):
            word = word | T.shfl_xor(word, lanes << step)
        if stored and place == 0:
            own_row = row % batch_rows if batched else row
            column = group // 4 + (row // batch_rows * num_words if batched else 0)
            if together == 4:
                sf[own_row, column] = T.reinterpret(word, T.int32)
            else:
                packed = sf_bytes(sf)
                for e in T.vectorized(together):
                    packed[own_row, column, group % 4 + e] = T.cast(word >> T.cast(8 * e, T.uint32), T.uint8)
                if group + together >= num_groups:
                    for b in T.unroll(-(-(-num_groups // together) * together) % 4):
                        packed[own_row, column, group % 4 + together + b] = T.uint8(0)

    @macro
    def normalize(x_local, weight_local, i, row_rstd, out_scale, v_local, w_local):
        """One vector times rstd and its weights, rounded."""
        widen_lane(x_local, i, v_local)
        if weighted:
            widen_lane(weight_local, i, w_local)
            if scaled:
                for e in T.unroll(LANE):
                    w_local[e] = w_local[e] * out_scale
            for e in T.vectorized(LANE):
                x_local[i, e] = T.cast((v_local[e] * row_rstd) * w_local[e], dtype)
        elif scaled:
            for e in T.vectorized(LANE):
                x_local[i, e] = T.cast((v_local[e] * row_rstd) * out_scale, dtype)
        else:
            for e in T.vectorized(LANE):
                x_local[i, e] = T.cast(v_local[e] * row_rstd, dtype)

    @macro
    def store_row(y, x_local, i, row, slot, exists):
        """Write vector i of a lane, if there is such a row."""
        pieces_local = T.alloc_local((1, LANE), dtype)
        if halves:
            swap_pieces(x_local, i, pieces_local, 0)
        if exists:
            if halves:
                store_lane(y, pieces_local, row, slot, piece, hidden, LANE, i=0, halves=halves)
            else:
                store_lane(y, x_local, row, slot, piece, hidden, LANE, i=i, halves=halves)

    @T.prim_func
    def norm_forward(
        x: T.StridedTensor((num_tokens, hidden), (x_pitch, 1), dtype),
        residual_in: T.StridedTensor((num_tokens, hidden), (residual_pitch, 1), dtype),
        weight: T.Tensor((hidden,), weight_type),
        y: T.StridedTensor((num_tokens, hidden), (y_pitch, 1), dtype),
        z: T.StridedTensor((num_tokens, hidden), (z_pitch, 1), dtype),
        rstd: T.Tensor((num_tokens,), T.float32),
        codes: codes_parameter,
        sf: sf_parameter,
        mega_sf: T.StridedTensor(
            (T.dynamic('mega_places'), -(-num_groups // 4)), (1, T.dynamic('mega_pitch')), T.int32
        ),
        eps: T.float32,
        out_scale: T.float32,
        amax_floor: T.float32,
        batch_rows: T.int32,
        mega_rows: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, teams), threads=num_threads) as pid:
            if early:
                begin_early()
            T.assume(x_pitch % piece == 0)
            if residual:
                T.assume(residual_pitch % piece == 0)
                T.assume(z_pitch % piece == 0)
            if plain:
                T.assume(y_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, num_threads))
            thread = T.get_thread_binding()
            row = T.alloc_var(T.int32)
            x_local = T.alloc_local((vectors, LANE), dtype)
            residual_local = T.alloc_local((vectors, LANE), dtype)
            weight_local = T.alloc_local((vectors, LANE), weight_type)
            v_local = T.alloc_local((LANE,), T.float32)
            w_local = T.alloc_local((LANE,), T.float32)
            partial = T.alloc_local((vectors,), T.float32)
            shared = T.alloc_shared((2, teams, warps, WARP), T.float32)
            lane, warp, team = thread % WARP, thread // WARP % warps, thread // WARP // warps
            row = pid * teams + team
            exists = row < num_tokens
            source = T.min(row, num_tokens - 1)  # a row past the end repeats the last one and is not stored

            if not full:
                T.clear(x_local)
            for i in T.unroll(vectors):
                load_lane(x, x_local, i, source, (i * warps + warp) * WARP + lane, piece, hidden, halves=halves)
            if residual:
                if not full:
                    T.clear(residual_local)
                for i in T.unroll(vectors if residual_early else 0):
                    slot = (i * warps + warp) * WARP + lane
                    load_lane(residual_in, residual_local, i, source, slot, piece, hidden, halves=halves)
            if weighted:
                if not full:
                    T.clear(weight_local)
                for i in T.unroll(vectors if weight_early else 0):
                    load_lane(weight, weight_local, i, None, (i * warps + warp) * WARP + lane, weight_piece, hidden)

            for i in T.unroll(vectors):
                partial[i] = T.float32(0.0)
                if not ragged or i < vectors - 1 or i * warps + warp < row_warps(hidden):
                    if halves:
                        swap_pieces(x_local, i, x_local, i)
                    widen_lane(x_local, i, v_local)
                    if residual:
                        slot = (i * warps + warp) * WARP + lane
                        if not residual_early:
                            load_lane(residual_in, residual_local, i, source, slot, piece, hidden, halves=halves)
                        if halves:
                            swap_pieces(residual_local, i, residual_local, i)
                        widen_lane(residual_local, i, w_local)
                        for e in T.vectorized(LANE):
                            x_local[i, e] = T.cast(v_local[e] + w_local[e], dtype)
                        widen_lane(x_local, i, v_local)
                        store_row(z, x_local, i, row, slot, exists)
                    partial[i] = lane_dot(v_local, v_local)
            over_team(partial, 'sum', shared, 0, team, warp, lane, warps)
            row_rstd = T.ieee_frsqrt(T.ieee_fdiv(partial[0], T.float32(hidden)) + eps)
            if exists and warp == 0 and lane == 0:
                rstd[row] = row_rstd

            for i in T.unroll(vectors):
                if not ragged or i < vectors - 1 or i * warps + warp < row_warps(hidden):
                    if weighted and not weight_early:
                        load_lane(weight, weight_local, i, None, (i * warps + warp) * WARP + lane, weight_piece, hidden)
                    normalize(x_local, weight_local, i, row_rstd, out_scale, v_local, w_local)
                    if plain:
                        store_row(y, x_local, i, row, (i * warps + warp) * WARP + lane, exists)

            if quantized:
                amax = T.alloc_local((counted,), T.float32)
                sf_local = T.alloc_local((owned,), sf_register_dtype(fmt))
                own_inv = T.alloc_local((owned,), T.float32)
                y_local = T.alloc_local(*code_registers(fmt))
                T.clear(amax)
                for i in T.unroll(vectors):
                    amax[i] = lane_max(x_local, i)
                if whole_row:
                    over_team(amax, 'max', shared, 1, team, warp, lane, warps)
                    amax_to_sf(clamp_amax(amax[0], amax_floor), fmt, sf_local, own_inv, 0)
                    if exists and warp == 0 and lane == 0:
                        place_sf(sf, mega_sf, row, 0, sf_local[0], batch_rows, mega_rows)
                else:
                    scatter_max(amax, counted, lane, 1, lanes)
                    for k in T.unroll(owned):
                        own = k * lanes + lane % lanes
                        group = ((own * warps + warp) * WARP + lane) // lanes
                        stored = own < vectors and exists and group < num_groups
                        amax_to_sf(clamp_amax(amax[k], amax_floor), fmt, sf_local, own_inv, k)
                        if joined:
                            place_exponents(sf, row, group, sf_local[k], stored, lane, batch_rows)
                        elif stored:
                            place_sf(sf, mega_sf, row, group, sf_local[k], batch_rows, mega_rows)
                for i in T.unroll(vectors):
                    sf_inv = own_inv[0] if whole_row else T.shfl_sync(own_inv[i // lanes], i % lanes, width=lanes)
                    slot = (i * warps + warp) * WARP + lane
                    if not ragged or i < vectors - 1 or i * warps + warp < row_warps(hidden):
                        encode_and_store(x_local, i, fmt, 'cast', sf_inv, v_local, y_local, codes, row, slot, hidden)

    return norm_forward


# Launch -------------------------------------------------------------------------------------


def launch_norm(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    y: Tensor | None,
    z: Tensor | None,
    eps: float,
    out_scale: float,
    fmt: QuantFormat | None = None,
    codes: Tensor | None = None,
    sf: Tensor | None = None,
    amax_floor: float = 0.0,
    mega_sf: Tensor | None = None,
    mega_rows: int = 1,
) -> Tensor:
    """Launch the kernel, which fills what is given of y, z, codes and factors; returns rstd."""
    batched, batch_rows = sf is not None and sf.dim() == 3, 1
    if sf is not None and batched:
        num_batches, batch_rows, words = sf.shape
        sf = sf.as_strided((batch_rows, num_batches * words), sf.stride()[1:])
    numbers = (x.dtype, check_weight(x, weight), out_scale != 1.0, check.vector_bytes(x, residual, y, z))
    static = (x.shape[1], fmt, *numbers, residual is not None, y is not None, batched, mega_sf is not None)
    rstd = torch.empty(x.shape[:1], dtype=torch.float32, device=x.device)
    tensors = (x, residual, weight, y, z, rstd, codes, sf, mega_sf)
    launch(norm_forward_kernel, static, *tensors, eps, out_scale, amax_floor, batch_rows, mega_rows)
    return rstd
