"""Gradients of RMS norm, see `norm_forward`; the gradient that comes through the residual is added on the way.

    n     = x[t, h] * rstd[t];  g = dy[t, h] * out_scale    x is what was normalised
    c[t]  = sum over h of n * (g * weight[h]) / H
    dx    = (g * weight[h] - n * c[t]) * rstd[t] + dz[t, h]
    dw[h] = sum over t of n * g

A fixed number of blocks, whatever the device, walks over the rows. A team of warps works on one row while its next ones
are copied to shared memory, each vector by the thread that will read it, so that nobody waits for anybody else's copy.
Each block adds up its share of dw, a second kernel adds the shares. Every sum has one order and nothing is added
atomically, so results are the same in every run on every device. Memory bound: the floor is reading dy, x (and dz) and
writing dx.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op
from tile_kernels.quant._macros import LANE, load_lane
from tile_kernels.quant._norm_rows import (
    WARP,
    check_like,
    check_rows,
    check_weight,
    folded,
    lane_dot,
    load_weight,
    over_team,
    row_warps,
    store_vector,
    team_warps,
)
from tile_kernels.quant._swiglu_macros import widen_lane

#: Blocks that share the rows, one for each multiprocessor of an H200. Sums depend on it, so it is the same everywhere.
NUM_BLOCKS = 132

#: Warps of a block.
BLOCK_WARPS = 16

#: Shared memory for rows on their way.
STAGE_BYTES = 192 << 10


# Config -------------------------------------------------------------------------------------


def own_warps(hidden: int) -> int:
    """Warps of a team: a lane has about two vectors of a row."""
    return team_warps(hidden, 2, BLOCK_WARPS)


def choose(
    hidden: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    scaled: bool,
    vector_bytes: int,
    through: bool,
    num_tokens: int,
) -> dict:
    """Four rows under way for each team, or as many as fit; rows that cannot be copied asynchronously are loaded."""
    warps = own_warps(hidden)
    vectors = -(-row_warps(hidden) // warps)
    fitting = STAGE_BYTES // ((3 if through else 2) * vectors * BLOCK_WARPS * WARP * LANE * x_dtype.itemsize)
    piece_bytes = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden) * x_dtype.itemsize
    return dict(warps=warps, stages=min(4, fitting) if fitting > 1 and piece_bytes >= 4 else 0)


# Kernels ------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(warps=(1, 2, 4, 8, 16), stages=(0, 2, 3, 4)),
    pass_configs={
        'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
        'TL_ENABLE_LOWER_LDGSTG': True,
        'TL_DISABLE_THREAD_STORAGE_SYNC': True,  # what a thread copies to shared memory it reads itself
    },
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
    stages: int,
):
    """`through`: there is a gradient dz to add; `stages`: rows of a team on their way to shared memory, 0 for none."""
    vectors = -(-row_warps(hidden) // warps)
    teams = BLOCK_WARPS // warps
    num_threads = BLOCK_WARPS * WARP
    weighted, weight_type = weight_dtype is not None, T.dtype(weight_dtype or x_dtype)
    piece = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden)
    copied = min(piece, 16 // x_dtype.itemsize)
    dx_piece = math.gcd(LANE, 16 // x_dtype.itemsize, hidden)
    weight_piece = math.gcd(LANE, 16 // (weight_dtype or x_dtype).itemsize, hidden)
    share_piece = math.gcd(4, hidden)
    full = hidden % (vectors * warps * WARP * LANE) == 0
    ragged = row_warps(hidden) % warps != 0  # some warps have one vector less
    num_tokens, num_blocks = T.dynamic('num_tokens'), T.dynamic('num_blocks')
    dy_pitch, x_pitch, dz_pitch = T.dynamic('dy_pitch'), T.dynamic('x_pitch'), T.dynamic('dz_pitch')
    dtype = T.dtype(x_dtype)

    @macro
    def ask_for_row(x, row, warp, lane, stage_shared, stage, which):
        """Start to copy the channels of a thread to its own places in shared memory."""
        thread = T.get_thread_binding()
        for i in T.unroll(vectors):
            first = ((i * warps + warp) * WARP + lane) * LANE
            for p in T.unroll(LANE // copied):
                if first + p * copied < hidden:
                    T.ptx_cp_async(
                        T.access_ptr(stage_shared[stage, which, i, thread, p * copied], 'w', copied),
                        T.access_ptr(x[row, first + p * copied], 'r', copied),
                        copied,
                    )

    @macro
    def ask_for_rows(dy, x, dz, row, warp, lane, stage_shared, stage):
        if row < num_tokens:
            ask_for_row(x, row, warp, lane, stage_shared, stage, 0)
            ask_for_row(dy, row, warp, lane, stage_shared, stage, 1)
            if through:
                ask_for_row(dz, row, warp, lane, stage_shared, stage, 2)
        T.ptx_commit_group()

    @macro
    def take(x, row, i, warp, lane, stage_shared, stage, which, vector_local):
        """A vector of a row: from shared memory, or from where it is."""
        if stages > 0:
            for e in T.vectorized(LANE):
                vector_local[0, e] = stage_shared[stage, which, i, T.get_thread_binding(), e]
        else:
            load_lane(x, vector_local, 0, row, (i * warps + warp) * WARP + lane, piece, hidden)

    @macro
    def normal_and_upstream(x_local, dy_local, weight_local, i, row_rstd, out_scale, n_local, g_local, gw_local):
        """n, g and g * weight of one vector."""
        widen_lane(x_local, 0, n_local)
        widen_lane(dy_local, 0, g_local)
        if weighted:
            widen_lane(weight_local, i, gw_local)
        for e in T.unroll(LANE):
            n_local[e] = T.ieee_mul(n_local[e], row_rstd)
            if scaled:
                g_local[e] = T.ieee_mul(g_local[e], out_scale)
            gw_local[e] = T.ieee_mul(g_local[e], gw_local[e]) if weighted else g_local[e]

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
            x_local = T.alloc_local((1, LANE), dtype)
            dy_local = T.alloc_local((1, LANE), dtype)
            dz_local = T.alloc_local((1, LANE), dtype)
            weight_local = T.alloc_local((vectors, LANE), weight_type)
            dw_local = T.alloc_local((vectors, LANE), T.float32)
            n_local = T.alloc_local((LANE,), T.float32)
            g_local = T.alloc_local((LANE,), T.float32)
            gw_local = T.alloc_local((LANE,), T.float32)
            partial = T.alloc_local((vectors,), T.float32)
            shared = T.alloc_shared((2, teams, warps, WARP), T.float32)
            stage_shared = T.alloc_shared((max(stages, 1), 3 if through else 2, vectors, num_threads, LANE), dtype)
            lane, warp, team = thread % WARP, thread // WARP % warps, thread // WARP // warps
            T.pdl_trigger()

            if weighted:
                T.clear(dw_local)
                if not full:
                    T.clear(weight_local)
                for i in T.unroll(vectors):
                    load_weight(weight, weight_local, i, (i * warps + warp) * WARP + lane, weight_piece, hidden)
            if stages > 0 and not full:  # channels beyond the row are never copied and count as 0
                for s in T.unroll(stages):
                    for which in T.unroll(3 if through else 2):
                        for i in T.unroll(vectors):
                            for e in T.vectorized(LANE):
                                stage_shared[s, which, i, thread, e] = T.cast(0.0, dtype)
            for s in T.unroll(max(stages - 1, 0)):
                ask_for_rows(dy, x, dz, (s * block_count + pid) * teams + team, warp, lane, stage_shared, s)

            next_rstd = rstd[T.min(pid * teams + team, num_tokens - 1)]
            for turn in T.serial(T.ceildiv(num_tokens - pid * teams, block_count * teams)):
                row = (turn * block_count + pid) * teams + team
                source = T.min(row, num_tokens - 1)  # a row past the end repeats the last one and is not stored
                row_rstd = next_rstd
                next_rstd = rstd[T.min(row + block_count * teams, num_tokens - 1)]
                stage = turn % max(stages, 1)
                if stages > 0:
                    ask_for_rows(
                        dy,
                        x,
                        dz,
                        row + (stages - 1) * block_count * teams,
                        warp,
                        lane,
                        stage_shared,
                        (turn + stages - 1) % stages,
                    )
                    T.ptx_wait_group(stages - 1)

                for i in T.unroll(vectors):
                    partial[i] = T.float32(0.0)
                    if not ragged or i < vectors - 1 or i * warps + warp < row_warps(hidden):
                        if stages == 0 and not full:
                            T.clear(x_local)
                            T.clear(dy_local)
                        take(x, source, i, warp, lane, stage_shared, stage, 0, x_local)
                        take(dy, source, i, warp, lane, stage_shared, stage, 1, dy_local)
                        normal_and_upstream(
                            x_local, dy_local, weight_local, i, row_rstd, out_scale, n_local, g_local, gw_local
                        )
                        partial[i] = lane_dot(n_local, gw_local)
                        if weighted and row < num_tokens:
                            for e in T.unroll(LANE):
                                dw_local[i, e] = T.ieee_fmaf(n_local[e], g_local[e], dw_local[i, e])
                over_team(partial, 'sum', shared, turn % 2, team, warp, lane, warps)
                mean = T.ieee_fdiv(partial[0], T.float32(hidden))

                for i in T.unroll(vectors):
                    if not ragged or i < vectors - 1 or i * warps + warp < row_warps(hidden):
                        if stages == 0 and not full:
                            T.clear(x_local)
                            T.clear(dy_local)
                            T.clear(dz_local)
                        take(x, source, i, warp, lane, stage_shared, stage, 0, x_local)
                        take(dy, source, i, warp, lane, stage_shared, stage, 1, dy_local)
                        normal_and_upstream(
                            x_local, dy_local, weight_local, i, row_rstd, out_scale, n_local, g_local, gw_local
                        )
                        if through:
                            take(dz, source, i, warp, lane, stage_shared, stage, 2, dz_local)
                            widen_lane(dz_local, 0, g_local)
                        for e in T.unroll(LANE):
                            n_local[e] = T.ieee_mul(T.ieee_fmaf(-n_local[e], mean, gw_local[e]), row_rstd)
                            if through:
                                n_local[e] = T.ieee_add(n_local[e], g_local[e])
                        for e in T.vectorized(LANE):
                            x_local[0, e] = T.cast(n_local[e], dtype)
                        if row < num_tokens:
                            store_vector(dx, x_local, 0, row, (i * warps + warp) * WARP + lane, dx_piece, hidden)

            if weighted:
                teams_shared = T.alloc_shared((teams, warps * WARP * LANE), T.float32)
                if teams > 1:
                    for i in T.unroll(vectors):
                        T.sync_threads()
                        for e in T.vectorized(LANE):
                            teams_shared[team, (warp * WARP + lane) * LANE + e] = dw_local[i, e]
                        T.sync_threads()
                        for e in T.unroll(LANE):
                            dw_local[i, e] = folded(
                                lambda a, b: a + b,
                                [teams_shared[t, (warp * WARP + lane) * LANE + e] for t in range(teams)],
                            )
                if team == 0:
                    for i in T.unroll(vectors):
                        store_vector(shares, dw_local, i, pid, (i * warps + warp) * WARP + lane, share_piece, hidden)

    return norm_backward


@kernel(pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def norm_weight_gradient_kernel(hidden: int, dtype: torch.dtype, accumulating: bool):
    """Add up the shares of all blocks; eight threads side by side own columns, 32 groups of them share the rows."""
    width = math.gcd(4, hidden)
    columns, groups = 8, 32
    num_blocks = T.dynamic('num_blocks')

    @T.prim_func
    def norm_weight_gradient(
        shares: T.Tensor((num_blocks, hidden), T.float32),
        dweight: T.Tensor((hidden,), T.dtype(dtype)),
    ):
        with T.Kernel(T.ceildiv(hidden, columns * width), threads=columns * groups) as pid:
            T.pdl_sync()
            thread = T.get_thread_binding()
            total = T.alloc_local((width,), T.float32)
            share = T.alloc_local((width,), T.float32)
            shared = T.alloc_shared((groups, columns * width), T.float32)
            group, place = thread // columns, thread % columns * width
            first = pid * columns * width + place

            T.clear(total)
            if first < hidden:
                for k in T.serial(T.ceildiv(num_blocks - group, groups)):
                    for e in T.vectorized(width):
                        share[e] = shares[group + k * groups, first + e]
                    for e in T.unroll(width):
                        total[e] = total[e] + share[e]
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


# Ops ----------------------------------------------------------------------------------------


def _block_count(num_tokens: int, hidden: int) -> int:
    """At most `NUM_BLOCKS`, and so many that all have the same number of rows to go through."""
    teams = BLOCK_WARPS // own_warps(hidden)
    turns = -(-num_tokens // (NUM_BLOCKS * teams))
    return -(-num_tokens // max(turns * teams, 1))


def _backward(
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
    static = (hidden, x.dtype, check_weight(x, weight), out_scale != 1.0)
    static += (check.vector_bytes(x, dy, dz), dz is not None)
    num_blocks = _block_count(num_tokens, hidden)
    dx = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    shares = None
    if weight is not None:
        shares = torch.empty((num_blocks, hidden), dtype=torch.float32, device=x.device)
    launch(norm_backward_kernel, static, dy, x, weight, rstd, dz, dx, shares, out_scale, num_blocks)
    if shares is not None and dweight is not None:
        # without rows the gradient is 0, which this kernel writes
        launch(norm_weight_gradient_kernel, (hidden, dweight.dtype, accumulating), shares, dweight, size=hidden)
    return dx


@op(outputs='dx dweight')
def norm_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    dz: Tensor | None = None,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Gradients of `norm_forward`.

    Args:
        dy: (num_tokens, hidden), gradient of y, in the dtype of x, rows dense, any row stride.
        x: (num_tokens, hidden) bfloat16, float16 or float32, what was normalised.
        rstd: (num_tokens,) float32 from the forward pass.
        weight: (hidden,) as in the forward pass, or None.
        dz: (num_tokens, hidden), added to the gradient of x, or None.
        out_scale: as in the forward pass.

    Returns:
        dx (num_tokens, hidden) in the dtype of x, and dweight (hidden,) in the dtype of weight, summed in float32 in a
        fixed order; empty without a weight.
    """
    dweight = torch.empty_like(weight) if weight is not None else torch.empty((0,), dtype=x.dtype, device=x.device)
    return _backward(dy, x, weight, rstd, dz, out_scale, dweight, False), dweight


@op(outputs='dx dweight')
def add_norm_backward(
    dy: Tensor, dz: Tensor, z: Tensor, rstd: Tensor, weight: Tensor | None = None, out_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Gradients of `add_norm_forward`, one for both of its summands; see `norm_backward`.

    Args:
        dy: (num_tokens, hidden), gradient of y.
        dz: (num_tokens, hidden), gradient of the sum z.
        z: (num_tokens, hidden), what was normalised.
        rstd: (num_tokens,) float32 from the forward pass.
        weight: (hidden,) or None.
        out_scale: as in the forward pass.

    Returns:
        dx (num_tokens, hidden), the gradient of x and of residual, and dweight (hidden,).
    """
    dweight = torch.empty_like(weight) if weight is not None else torch.empty((0,), dtype=z.dtype, device=z.device)
    return _backward(dy, z, weight, rstd, dz, out_scale, dweight, False), dweight


@op(outputs='dx')
def norm_backward_(
    weight_grad: Mut,
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    dz: Tensor | None = None,
    out_scale: float = 1.0,
) -> Tensor:
    """Gradients of `norm_forward`, that of the weight added to `weight_grad`; see `norm_backward`.

    Args:
        weight_grad: (hidden,) bfloat16, float16 or float32; the gradient of the weight is added to it.
        dy: (num_tokens, hidden), gradient of y.
        x: (num_tokens, hidden), what was normalised.
        rstd: (num_tokens,) float32 from the forward pass.
        weight: (hidden,).
        dz: (num_tokens, hidden), added to the gradient of x, or None.
        out_scale: as in the forward pass.

    Returns:
        dx (num_tokens, hidden).
    """
    check_weight(x, weight_grad)
    return _backward(dy, x, weight, rstd, dz, out_scale, weight_grad, True)


# Cases --------------------------------------------------------------------------------------


def _make(
    num_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    weight: torch.dtype | None = None,
    through: bool = False,
    pitch: int | None = None,
) -> dict:
    dy, x, dz = (torch.empty(num_tokens, pitch or hidden, dtype=dtype).narrow(1, 0, hidden) for _ in range(3))
    for rows in (dy, x, dz):
        rows.normal_()
    rstd = torch.rsqrt(x.float().square().mean(dim=1) + 1e-5)
    weights = None if weight is None else (1 + 0.2 * torch.randn(hidden)).to(weight)
    return dict(dy=dy, x=x, weight=weights, rstd=rstd, dz=dz if through else None, out_scale=0.5)


def _make_add(**case) -> dict:
    made = _make(**case, through=True)
    made['z'] = made.pop('x')
    return made


def _make_into(accumulator: torch.dtype = torch.float32, **case) -> dict:
    made = _make(**case)
    return dict(weight_grad=torch.randn(made['x'].shape[1]).to(accumulator), **made)


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
SMOKE = (
    grid(num_tokens=[0, 1, 37], hidden=[128], dtype=BF16, weight=BF16)  # many teams to a block
    + grid(num_tokens=[3], hidden=[4416], dtype=BF16, weight=F32)  # a team is a block, a shorter last vector
    + grid(num_tokens=[2], hidden=[99], dtype=F16, pitch=[101])  # odd rows, odd stride, no weight
    + grid(num_tokens=[2], hidden=[6144], dtype=F32, weight=BF16)  # no room to ask early
)
SMOKE_THROUGH = [case | dict(through=True) for case in SMOKE[2:]]
FULL = grid(
    num_tokens=[4001], hidden=[576, 1024, 2560, 7168, 8192, 16384], dtype=BF16, weight=BF16, through=[True]
) + grid(num_tokens=[257], hidden=[1, 99, 4100, 32768], dtype=F32, weight=F32, through=[False])
HUGE = grid(num_tokens=[300001], hidden=[136], dtype=BF16, weight=BF16, pitch=[8192])  # beyond 2^31 elements
BENCH = (
    grid(num_tokens=[64, 4096, 16384], hidden=[7168], dtype=BF16, weight=BF16)
    + grid(num_tokens=[8001], hidden=[1024, 2560, 4096, 16384], dtype=BF16, weight=BF16)
    + grid(num_tokens=[32001], hidden=[1344], dtype=BF16, weight=F32)
    + grid(num_tokens=[8001], hidden=[4096], dtype=F32, weight=F32)
)
GRADIENT = dict(rtol=2e-5, atol=1e-4)  # sums of float32 in another order
norm_backward.cases(
    make=_make,
    match=GRADIENT,
    smoke=SMOKE + SMOKE_THROUGH,
    full=FULL + HUGE,
    bench=BENCH + [case | dict(through=True) for case in BENCH[:3]],
)


def _without_through(cases: list[dict]) -> list[dict]:
    return [{name: value for name, value in case.items() if name != 'through'} for case in cases]


add_norm_backward.cases(
    make=_make_add, match=GRADIENT, smoke=SMOKE[1:4], full=_without_through(FULL[:2]), bench=BENCH[:2]
)
norm_backward_.cases(
    make=_make_into,
    match=GRADIENT,
    smoke=SMOKE[:4] + [SMOKE_THROUGH[1] | dict(accumulator=torch.bfloat16)],
    full=FULL[:2],
    bench=BENCH[1:2],
)
