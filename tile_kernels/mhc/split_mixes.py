"""Split mixes: from the projection of a token to the coefficients of its streams.

    z[t, j] = mixes[t, j] scale[part of j] + base[j]        parts: [0, n), [n, 2n), [2n, 2n + n^2)
    pre[t, c]     = sigmoid(z[t, c]) + pre_eps
    post[t, c]    = sigmoid(z[t, n + c]) post_mult
    comb[t, i, o] = z[t, 2n + i n + o]

The head of a model needs the first part alone (`head_mix`). One thread owns an element. Backward, the sums over tokens
(dscale, dbase) are taken by `PARTS` blocks, and their results by a second kernel, always in the same order. Latency
bound.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, begin_early, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Out, op
from tile_kernels.mhc._rows import STREAMS, WARP, flat, lead_of

F32 = torch.float32

#: Blocks that sum over tokens, whatever their number: results do not depend on the device.
PARTS = 128

#: Tokens a thread of these has under way.
IN_FLIGHT = 4

# Kernels ------------------------------------------------------------------------------------


def num_mixes(num_streams: int, head: bool = False) -> int:
    """Coefficients of a token."""
    return num_streams if head else num_streams * (2 + num_streams)


def part_of(j, num_streams: int):
    """The part an element belongs to."""
    return T.min(j // num_streams, 2)


@macro
def affine(value, scale, base):
    """`value scale + base`, rounded once."""
    return T.ieee_fmaf(value, scale, base)


@macro
def sigmoid(z):
    """1 / (1 + exp(-z)), every step rounded on its own."""
    return T.ieee_fdiv(T.float32(1.0), T.ieee_add(T.float32(1.0), T.exp(-z)))


@kernel(choose=lambda *static: dict(num_threads=256), space=dict(num_threads=(128, 256, 512)))
def split_mixes_kernel(num_streams: int, head: bool, *, num_threads: int):
    """One thread for each element of the projection."""
    width = num_mixes(num_streams, head)
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def split_mixes(
        mixes: T.Tensor((num_tokens, width), T.float32),
        scale: T.Tensor((1 if head else 3,), T.float32),
        base: T.Tensor((width,), T.float32),
        pre: T.Tensor((num_tokens, num_streams), T.float32),
        post: T.Tensor((num_tokens, num_streams), T.float32),
        comb: T.Tensor((num_tokens, num_streams * num_streams), T.float32),
        pre_eps: T.float32,
        post_mult: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, num_threads // width), threads=num_threads) as pid:
            begin_early()
            tx = T.get_thread_binding()
            token, j = pid * (num_threads // width) + tx // width, tx % width
            if tx // width < num_threads // width and token < num_tokens:
                z = affine(mixes[token, j], scale[part_of(j, num_streams)], base[j])
                if j < num_streams:
                    pre[token, j] = T.ieee_add(sigmoid(z), pre_eps)
                if not head:
                    if j >= num_streams and j < 2 * num_streams:
                        post[token, j - num_streams] = T.ieee_mul(sigmoid(z), post_mult)
                    if j >= 2 * num_streams:
                        comb[token, j - 2 * num_streams] = z

    return split_mixes


@kernel(choose=lambda *static: dict(num_threads=256), space=dict(num_threads=(128, 256, 512)))
def split_mixes_bwd_kernel(num_streams: int, head: bool, *, num_threads: int):
    """Gradient of the projection, and the sums over the tokens of each block."""
    width, num_scales = num_mixes(num_streams, head), 1 if head else 3
    rows = num_threads // width
    num_tokens, num_parts = T.dynamic('num_tokens'), T.dynamic('num_parts')

    @T.prim_func
    def split_mixes_bwd(
        scale_parts: T.Tensor((num_parts, num_scales), T.float32),
        base_parts: T.Tensor((num_parts, width), T.float32),
        dpre: T.Tensor((num_tokens, num_streams), T.float32),
        dpost: T.Tensor((num_tokens, num_streams), T.float32),
        dcomb: T.Tensor((num_tokens, num_streams * num_streams), T.float32),
        mixes: T.Tensor((num_tokens, width), T.float32),
        scale: T.Tensor((num_scales,), T.float32),
        base: T.Tensor((width,), T.float32),
        dmixes: T.Tensor((num_tokens, width), T.float32),
        post_mult: T.float32,
    ):
        with T.Kernel(num_parts, threads=num_threads) as pid:
            dscale_shared = T.alloc_shared((rows, width), T.float32)
            dbase_shared = T.alloc_shared((rows, width), T.float32)
            tx = T.get_thread_binding()
            row, j = tx // width, tx % width
            value_local = T.alloc_local((IN_FLIGHT,), T.float32)
            dz_local = T.alloc_local((IN_FLIGHT,), T.float32)
            dscale_sum = T.alloc_var(T.float32, init=0.0)
            dbase_sum = T.alloc_var(T.float32, init=0.0)

            begin_early()
            if row < rows:
                scale_j = T.alloc_var(T.float32)
                base_j = T.alloc_var(T.float32)
                scale_j = scale[part_of(j, num_streams)]
                base_j = base[j]
                for step in T.serial(T.ceildiv(num_tokens, IN_FLIGHT * num_parts * rows)):
                    first = (step * IN_FLIGHT * num_parts + pid) * rows + row
                    for f in T.unroll(IN_FLIGHT):  # all are asked for before the first is used
                        token = first + f * num_parts * rows
                        if token < num_tokens:
                            value_local[f] = mixes[token, j]
                            if j < num_streams:
                                dz_local[f] = dpre[token, j]
                            if not head:
                                if j >= num_streams and j < 2 * num_streams:
                                    dz_local[f] = dpost[token, j - num_streams]
                                if j >= 2 * num_streams:
                                    dz_local[f] = dcomb[token, j - 2 * num_streams]
                    for f in T.unroll(IN_FLIGHT):
                        token = first + f * num_parts * rows
                        if token < num_tokens:
                            s = sigmoid(affine(value_local[f], scale_j, base_j))
                            if j < num_streams:
                                dz_local[f] = dz_local[f] * (s * (1.0 - s))
                            if j >= num_streams and j < 2 * num_streams:
                                dz_local[f] = dz_local[f] * post_mult * (s * (1.0 - s))
                            dmixes[token, j] = dz_local[f] * scale_j
                            dscale_sum = T.ieee_fmaf(dz_local[f], value_local[f], dscale_sum)
                            dbase_sum = dbase_sum + dz_local[f]
                dscale_shared[row, j] = dscale_sum
                dbase_shared[row, j] = dbase_sum
            T.sync_threads()
            if tx < width:
                dbase_sum = 0.0
                dscale_sum = 0.0
                for r in T.unroll(rows):
                    dbase_sum = dbase_sum + dbase_shared[r, tx]
                    dscale_sum = dscale_sum + dscale_shared[r, tx]
                base_parts[pid, tx] = dbase_sum
                dscale_shared[0, tx] = dscale_sum
            T.sync_threads()
            if tx < num_scales:
                dscale_sum = 0.0
                for k in T.serial(num_streams * T.if_then_else(tx < 2, 1, num_streams)):
                    dscale_sum = dscale_sum + dscale_shared[0, tx * num_streams + k]
                scale_parts[pid, tx] = dscale_sum

    return split_mixes_bwd


@kernel(choose=lambda *static: dict(num_threads=WARP), space=dict(num_threads=(WARP,)))
def sum_parts_kernel(num_scales: int, width: int, *, num_threads: int):
    """Sums of the columns of `scale_parts` and `base_parts`, one warp each."""
    num_parts = T.dynamic('num_parts')

    @T.prim_func
    def sum_parts(
        scale_parts: T.Tensor((num_parts, num_scales), T.float32),
        base_parts: T.Tensor((num_parts, width), T.float32),
        dscale: T.Tensor((num_scales,), T.float32),
        dbase: T.Tensor((width,), T.float32),
    ):
        with T.Kernel(num_scales + width, threads=num_threads) as column:
            begin_early()
            tx = T.get_thread_binding()
            total = T.alloc_var(T.float32, init=0.0)
            for step in T.serial(T.ceildiv(num_parts, WARP)):
                if step * WARP + tx < num_parts:
                    if column < num_scales:
                        total = total + scale_parts[step * WARP + tx, column]
                    else:
                        total = total + base_parts[step * WARP + tx, column - num_scales]
            total = T.warp_reduce_sum(total)
            if tx == 0:
                if column < num_scales:
                    dscale[column] = total
                else:
                    dbase[column - num_scales] = total

    return sum_parts


# Ops ----------------------------------------------------------------------------------------


def check_mixes(mixes: Tensor, scale: Tensor, base: Tensor, num_streams: int, head: bool = False) -> tuple:
    """Check the inputs; returns the leading shape."""
    check.one_of(num_streams, STREAMS, 'the number of streams')
    width = num_mixes(num_streams, head)
    lead = lead_of(mixes, 'mixes', 'num_mixes', F32, num_mixes=width)
    check.shape(scale, 'scale', 'num_scales', dtype=F32, num_scales=1 if head else 3)
    check.shape(base, 'base', 'num_mixes', dtype=F32, num_mixes=width)
    check.contiguous(scale, 'scale')
    check.contiguous(base, 'base')
    check.same_device(mixes=mixes, scale=scale, base=base)
    return lead


def _check_mix(x: Tensor, name: str, lead: tuple, num_streams: int, last: int = 1) -> Tensor:
    """Check coefficients (..., num_streams, last); returns them as the kernels take them."""
    lead_of(x, name, 'num_streams last', F32, lead, num_streams=num_streams, last=last)
    return flat(x, lead, num_streams * last)


@op()
def split_mixes_bwd_(
    dpre: Tensor,
    dpost: Tensor,
    dcomb: Tensor,
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    dmixes: Out,
    dscale: Out,
    dbase: Out,
    post_mult: float = 1.0,
) -> None:
    """Gradients of `split_mixes` into memory of the caller; see `split_mixes_bwd`.

    Args:
        dpre: (..., num_streams, 1) float32, contiguous.
        dpost: (..., num_streams, 1) float32, contiguous.
        dcomb: (..., num_streams, num_streams) float32, contiguous.
        mixes: as given to `split_mixes`.
        scale: as given to `split_mixes`.
        base: as given to `split_mixes`.
        dmixes: shape of mixes; overwritten.
        dscale: (3,); overwritten.
        dbase: shape of base; overwritten.
        post_mult: as given to `split_mixes`.
    """
    num_streams = dcomb.shape[-1]
    lead = check_mixes(mixes, scale, base, num_streams)
    width = num_mixes(num_streams)
    lead_of(dmixes, 'dmixes', 'num_mixes', F32, lead, num_mixes=width)
    check.shape(dscale, 'dscale', 'num_scales', dtype=F32, num_scales=3)
    check.shape(dbase, 'dbase', 'num_mixes', dtype=F32, num_mixes=width)
    check.same_device(mixes=mixes, dpre=dpre, dpost=dpost, dcomb=dcomb, dmixes=dmixes, dscale=dscale, dbase=dbase)
    scale_parts, base_parts = mixes.new_empty(PARTS, 3), mixes.new_empty(PARTS, width)
    launch(
        split_mixes_bwd_kernel,
        (num_streams, False),
        scale_parts,
        base_parts,
        _check_mix(dpre, 'dpre', lead, num_streams),
        _check_mix(dpost, 'dpost', lead, num_streams),
        _check_mix(dcomb, 'dcomb', lead, num_streams, num_streams),
        flat(mixes, lead, width),
        scale,
        base,
        flat(dmixes, lead, width),
        post_mult,
    )
    launch(sum_parts_kernel, (3, width), scale_parts, base_parts, dscale, dbase)


@op(outputs='dmixes dscale dbase')
def split_mixes_bwd(
    dpre: Tensor,
    dpost: Tensor,
    dcomb: Tensor,
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    post_mult: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `split_mixes`.

    Args:
        dpre: (..., num_streams, 1) float32, contiguous.
        dpost: (..., num_streams, 1) float32, contiguous.
        dcomb: (..., num_streams, num_streams) float32, contiguous.
        mixes: as given to `split_mixes`.
        scale: as given to `split_mixes`.
        base: as given to `split_mixes`.
        post_mult: as given to `split_mixes`.

    Returns:
        Gradients of mixes, scale and base, float32; deterministic.
    """
    dmixes, dscale, dbase = torch.empty_like(mixes), torch.empty_like(scale), torch.empty_like(base)
    split_mixes_bwd_.fn(dpre, dpost, dcomb, mixes, scale, base, dmixes, dscale, dbase, post_mult)
    return dmixes, dscale, dbase


@op()
def split_mixes_(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    pre: Out,
    post: Out,
    comb: Out,
    post_mult: float = 1.0,
    pre_eps: float = 1e-6,
) -> None:
    """Split mixes into memory of the caller; see `split_mixes`.

    Args:
        mixes: (..., n (2 + n)) float32, contiguous, for n streams.
        scale: (3,) float32.
        base: (n (2 + n),) float32.
        pre: (..., n, 1) float32, contiguous; overwritten.
        post: (..., n, 1) float32, contiguous; overwritten.
        comb: (..., n, n) float32, contiguous; overwritten.
        post_mult: factor of post.
        pre_eps: added to pre.
    """
    num_streams = comb.shape[-1]
    lead = check_mixes(mixes, scale, base, num_streams)
    check.same_device(mixes=mixes, pre=pre, post=post, comb=comb)
    launch(
        split_mixes_kernel,
        (num_streams, False),
        flat(mixes, lead, num_mixes(num_streams)),
        scale,
        base,
        _check_mix(pre, 'pre', lead, num_streams),
        _check_mix(post, 'post', lead, num_streams),
        _check_mix(comb, 'comb', lead, num_streams, num_streams),
        pre_eps,
        post_mult,
    )


@op(outputs='pre post comb', backward=split_mixes_bwd)
def split_mixes(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    num_streams: int = 4,
    post_mult: float = 1.0,
    pre_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of every token from its projection; differentiable in mixes, scale and base.

    Args:
        mixes: (..., n (2 + n)) float32, contiguous, for n streams.
        scale: (3,) float32, one factor for each part.
        base: (n (2 + n),) float32.
        num_streams: n: 2, 4 or 8.
        post_mult: factor of post.
        pre_eps: added to pre.

    Returns:
        pre and post (..., n, 1), comb (..., n, n), float32.
    """
    lead = check_mixes(mixes, scale, base, num_streams)
    pre, post = (mixes.new_empty((*lead, num_streams, 1)) for _ in range(2))
    comb = mixes.new_empty((*lead, num_streams, num_streams))
    split_mixes_.fn(mixes, scale, base, pre, post, comb, post_mult, pre_eps)
    return pre, post, comb


# Cases --------------------------------------------------------------------------------------


def _make(lead: tuple, num_streams: int) -> dict:
    width = num_mixes(num_streams)
    mixes, scale, base = torch.randn(*lead, width), torch.rand(3) + 0.5, torch.randn(width)
    return dict(mixes=mixes, scale=scale, base=base, num_streams=num_streams, post_mult=2.0)


def _coefficients(lead: tuple, num_streams: int, *names: str) -> dict:
    shapes = [(num_streams, 1), (num_streams, 1), (num_streams, num_streams)]
    return {name: torch.randn(*lead, *shape) for name, shape in zip(names, shapes, strict=True)}


def _make_(lead: tuple, num_streams: int) -> dict:
    made = _make(lead, num_streams) | _coefficients(lead, num_streams, 'pre', 'post', 'comb')
    return {name: value for name, value in made.items() if name != 'num_streams'}


def _make_bwd(lead: tuple, num_streams: int) -> dict:
    made = _coefficients(lead, num_streams, 'dpre', 'dpost', 'dcomb') | _make(lead, num_streams)
    return {name: value for name, value in made.items() if name != 'num_streams'}


def _make_bwd_(lead: tuple, num_streams: int) -> dict:
    made = _make_bwd(lead, num_streams)
    return made | {f'd{name}': torch.empty_like(made[name]) for name in ('mixes', 'scale', 'base')}


SMOKE = grid(lead=[(0,), (), (2, 3)], num_streams=[4]) + grid(lead=[(67,)], num_streams=STREAMS)
FULL = grid(lead=[(4001,), (3, 1001)], num_streams=STREAMS) + grid(lead=[(1000003,)], num_streams=[4])
BENCH = grid(lead=[(64,), (4001,), (16384,)], num_streams=[4])
CLOSE, SUMMED = dict(rtol=2e-6, atol=1e-6), dict(rtol=1e-5, atol=2e-5)
split_mixes.cases(make=_make, match=CLOSE, smoke=SMOKE, full=FULL, bench=BENCH)
split_mixes_.cases(make=_make_, match=CLOSE, smoke=SMOKE[:1] + SMOKE[-1:], bench=BENCH[:1])
split_mixes_bwd.cases(make=_make_bwd, match=SUMMED, smoke=SMOKE, full=FULL[:-1], bench=BENCH)
split_mixes_bwd_.cases(make=_make_bwd_, match=SUMMED, smoke=SMOKE[:1] + SMOKE[-1:], bench=BENCH[:1])
