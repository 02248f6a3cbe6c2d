"""Split mixes: from the projection of a token to the coefficients of its streams.

    z[t, j] = mixes[t, j] scale[part of j] + base[j]        parts: [0, n), [n, 2n), [2n, 2n + n^2)
    pre[t, c]     = sigmoid(z[t, c]) + pre_eps
    post[t, c]    = sigmoid(z[t, n + c]) post_mult
    comb[t, i, o] = z[t, 2n + i n + o]

The head of a model needs only the first part (`head_mix`). One thread owns an element. In backward `PARTS` blocks sum
dscale and dbase over tokens, and a second kernel sums their results; the order is fixed. Latency bound.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, begin_early
from tile_kernels.core.launch import launch
from tile_kernels.core.op import empty, op
from tile_kernels.mhc._checks import F32, STREAMS, check_scale_and_base, flat, lead_of, num_mixes, reshaped
from tile_kernels.mhc._macros import WARP, affine, sigmoid

#: Blocks that sum over tokens. The number is fixed, so results do not depend on the GPU.
PARTS = 128

#: Tokens a thread of these blocks loads at a time.
IN_FLIGHT = 4

# Kernels -----------------------------------------------------------------------------------


def part_of(j, num_streams: int):
    """The part an element belongs to."""
    return T.min(j // num_streams, 2)


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


@kernel(choose=lambda *static: dict(num_threads=256), space=dict(num_threads=(128, 256, 512)), fixed='num_threads')
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
                    for f in T.unroll(IN_FLIGHT):  # all loads are issued before the first use
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


# Ops ---------------------------------------------------------------------------------------


def check_mixes(mixes: Tensor, scale: Tensor, base: Tensor, num_streams: int, head: bool = False) -> tuple[int, ...]:
    """Check the inputs; returns the leading shape."""
    check.one_of(num_streams, STREAMS, 'the number of streams')
    lead = lead_of(mixes, 'mixes', 'num_mixes', F32, num_mixes=num_mixes(num_streams, head))
    check_scale_and_base(scale, base, num_streams, head)
    check.same_device(mixes=mixes, scale=scale, base=base)
    return lead


@op(outputs='dmixes dscale dbase', out=True)
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
    num_streams = dcomb.shape[-1] if dcomb.dim() else 0
    lead = check_mixes(mixes, scale, base, num_streams)
    width = num_mixes(num_streams)
    for name, x, last in (('dpre', dpre, 1), ('dpost', dpost, 1), ('dcomb', dcomb, num_streams)):
        lead_of(x, name, 'num_streams last', F32, lead, num_streams=num_streams, last=last)
    check.same_device(mixes=mixes, dpre=dpre, dpost=dpost, dcomb=dcomb)
    given = (('dmixes', mixes), ('dscale', scale), ('dbase', base))
    dmixes, dscale, dbase = (empty(name, x.shape, F32, x.device) for name, x in given)
    scale_parts, base_parts = mixes.new_empty(PARTS, 3), mixes.new_empty(PARTS, width)
    launch(
        split_mixes_bwd_kernel,
        (num_streams, False),
        scale_parts,
        base_parts,
        flat(dpre, lead, num_streams),
        flat(dpost, lead, num_streams),
        flat(dcomb, lead, num_streams * num_streams),
        flat(mixes, lead, width),
        scale,
        base,
        flat(dmixes, lead, width),
        post_mult,
    )
    launch(sum_parts_kernel, (3, width), scale_parts, base_parts, dscale, dbase)
    return dmixes, dscale, dbase


@op(outputs='pre post comb', backward=split_mixes_bwd, out=True)
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
    pre, post = (empty(name, (*lead, num_streams, 1), F32, mixes.device) for name in ('pre', 'post'))
    comb = empty('comb', (*lead, num_streams, num_streams), F32, mixes.device)
    launch(
        split_mixes_kernel,
        (num_streams, False),
        flat(mixes, lead, num_mixes(num_streams)),
        scale,
        base,
        flat(pre, lead, num_streams),
        flat(post, lead, num_streams),
        flat(comb, lead, num_streams * num_streams),
        pre_eps,
        post_mult,
    )
    return pre, post, comb


def mhc_mix_split(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    num_streams: int = 4,
    *,
    post_mult: float = 1.0,
    pre_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of every token from its projection; differentiable.

    Args:
        mixes: (..., n (2 + n)) float32 for n streams, contiguous.
        scale: (3,) float32.
        base: (n (2 + n),) float32.
        num_streams: n: 2, 4 or 8.
        post_mult: factor of post.
        pre_eps: added to pre.

    Returns:
        pre and post (..., n, 1), comb (..., n, n) before `sinkhorn_normalize`.
    """
    return split_mixes(mixes, scale, base, num_streams, post_mult, pre_eps)


def _coefficients(input_mixes: Tensor, mhc_base: Tensor, **mixes: Tensor) -> tuple[int, list[Tensor]]:
    """The number of streams, and coefficients in the shapes of the ops; the last are those of comb."""
    lead = check.tensor(input_mixes, 'input_mixes').shape[:-1]
    num_streams = round((check.tensor(mhc_base, 'mhc_base').numel() + 1) ** 0.5) - 1
    lasts = [1] * (len(mixes) - 1) + [num_streams]
    shapes = [(*lead, num_streams, last) for last in lasts]
    return num_streams, [reshaped(x, name, *shape) for (name, x), shape in zip(mixes.items(), shapes, strict=True)]


def mhc_pre_split_mixes_fwd(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    pre: Tensor,
    post: Tensor,
    comb: Tensor,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> None:
    """Split mixes (..., n (2 + n)) into pre and post of n and comb of n^2 coefficients."""
    n, (pre, post, comb) = _coefficients(input_mixes, mhc_base, pre=pre, post=post, comb=comb)
    options = (n, mhc_post_mult_value, mhc_pre_eps)
    split_mixes.out(input_mixes, mhc_scale, mhc_base, *options, pre=pre, post=post, comb=comb)


def mhc_pre_split_mixes_bwd(
    pre_grad: Tensor,
    post_grad: Tensor,
    comb_grad: Tensor,
    input_mixes: Tensor,
    post: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    input_mixes_grad: Tensor,
    mhc_scale_grad: Tensor,
    mhc_base_grad: Tensor,
    mhc_post_mult_value: float,
) -> None:
    """Write the gradients of mixes, scale and base; `post` has no effect: the mixes determine it."""
    gradients = dict(pre_grad=pre_grad, post_grad=post_grad, comb_grad=comb_grad)
    _, upstream = _coefficients(input_mixes, mhc_base, **gradients)
    outputs = dict(dmixes=input_mixes_grad, dscale=mhc_scale_grad, dbase=mhc_base_grad)
    split_mixes_bwd.out(*upstream, input_mixes, mhc_scale, mhc_base, mhc_post_mult_value, **outputs)


# Cases -------------------------------------------------------------------------------------


def _make(lead: tuple, num_streams: int) -> dict:
    width = num_mixes(num_streams)
    mixes, scale, base = torch.randn(*lead, width), torch.rand(3) + 0.5, torch.randn(width)
    return dict(mixes=mixes, scale=scale, base=base, num_streams=num_streams, post_mult=2.0)


def _make_bwd(lead: tuple, num_streams: int) -> dict:
    shapes = dict(dpre=(num_streams, 1), dpost=(num_streams, 1), dcomb=(num_streams, num_streams))
    made = {name: torch.randn(*lead, *shape) for name, shape in shapes.items()} | _make(lead, num_streams)
    return {name: value for name, value in made.items() if name != 'num_streams'}


SMOKE = grid(lead=[(0,), (), (2, 3)], num_streams=[4]) + grid(lead=[(67,)], num_streams=STREAMS)
FULL = grid(lead=[(4001,), (3, 1001)], num_streams=STREAMS) + grid(lead=[(1000003,)], num_streams=[4])
BENCH = grid(lead=[(64,), (4001,), (16384,)], num_streams=[4])
CLOSE, SUMMED = dict(rtol=2e-6, atol=1e-6), dict(rtol=1e-5, atol=2e-5)
split_mixes.cases(make=_make, match=CLOSE, smoke=SMOKE, full=FULL, bench=BENCH)
split_mixes_bwd.cases(make=_make_bwd, match=SUMMED, smoke=SMOKE, full=FULL[:-1], bench=BENCH)
