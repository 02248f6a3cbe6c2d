"""Normalized projection: the mixes of a token from all of its streams, x of length k = num_streams hidden.

    mul[t, j]   = sum_k x[t, k] fn[j, k]                    TF32 products: fn is rounded to 11 bits
    rstd[t]     = rsqrt(sum_k x[t, k]^2 / k + eps)
    mixes[t, j] = mul[t, j] rstd[t]

A TF32 number is the sum of two bfloat16 numbers, so fn = high + low exactly, and tensor cores multiply in bfloat16. One
kernel does everything if the GPU has large clusters (`pre_kernels.py`). Without them, blocks write the sums of their
slices of the channels (`norm_fn_slices_kernels.py`). If a slice of fn does not fit into registers, a block has
`block_m` tokens and a part of k (`norm_fn_kernels.py`). Parts are summed in a fixed order. In backward let g be the
gradient of mixes and o = g rstd, rounded to TF32 too:

    dx[t, k]  = sum_j o[t, j] fn[j, k] - x[t, k] rstd[t]^2 / k sum_j g[t, j] mixes[t, j]
    dfn[j, k] = sum_t o[t, j] x[t, k]

A block has 128 columns and a part of the tokens, and reads each tile of x once for both (`norm_fn_bwd_kernels.py`).
Memory bound: the minimum is one read of x, and in backward one write of dx.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import config_for, gpu_of, launch
from tile_kernels.core.op import Mut, op
from tile_kernels.mhc._checks import BF16, F32, STREAMS, check_streams, flat, lead_of, vector_width
from tile_kernels.mhc._macros import LARGE_CLUSTER, padded
from tile_kernels.mhc.norm_fn_bwd_kernels import norm_fn_bwd_kernel, prepare_bwd_kernel, sum_dfn_kernel, sums_itself
from tile_kernels.mhc.norm_fn_kernels import normalise_kernel, project_kernel
from tile_kernels.mhc.norm_fn_slices_kernels import Slices, project_slices_kernel
from tile_kernels.mhc.pre_kernels import goes_in_one_pass, pre_streams_kernel

#: Last extents of a tensor with streams.
STREAMED = 'num_streams hidden'

#: Rows fn may have.
MAX_MIXES = 80

# Ops ----------------------------------------------------------------------------------------


def check_projection(residual: Tensor, fn: Tensor) -> tuple[tuple, int, int]:
    """Check the inputs of a projection; returns the leading shape, k and the number of mixes."""
    lead = lead_of(residual, 'residual', 'num_streams hidden', BF16)
    num_streams, hidden = residual.shape[-2:]
    check_streams(num_streams, hidden)
    known = {'num_streams*hidden': num_streams * hidden}
    num_mixes, k = check.shape(fn, 'fn', 'num_mixes num_streams*hidden', dtype=F32, **known)
    check.at_least(num_mixes, 1, 'the number of mixes')
    check.at_most(num_mixes, MAX_MIXES, 'the number of mixes')
    check.contiguous(fn, 'fn')
    check.same_device(residual=residual, fn=fn)
    if vector_width(residual, flat(residual, lead, k)) < 8 or vector_width(fn) < 4:
        check.fail('residual and fn', 'must start at a multiple of 16 bytes', 'misaligned views', 'clone them')
    return lead, k, num_mixes


def project(residual: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """Parts of mul and of the sums of squares, for residual (num_tokens, num_streams, hidden)."""
    (num_tokens, num_streams, hidden), (num_mixes, k) = residual.shape, fn.shape
    slices = Slices(hidden, num_streams, num_mixes)
    splits = slices.count
    if not slices.fits_registers:
        splits = config_for(project_kernel, (k, num_mixes), num_tokens, residual)['splits']
    parts = fn.new_empty(splits, num_tokens, padded(num_mixes)), fn.new_empty(splits, num_tokens)
    if slices.fits_registers:
        launch(project_slices_kernel, (hidden, num_streams, num_mixes), residual, fn, *parts)
    else:
        fn_parts = fn.new_empty(2 * padded(num_mixes), k, dtype=BF16)
        launch(project_kernel, (k, num_mixes), residual.view(num_tokens, k), fn, fn_parts, *parts)
    return parts


def check_projection_bwd(
    residual: Tensor, fn: Tensor, mixes: Tensor, rstd: Tensor, **gradients: tuple[Tensor | None, str]
) -> tuple[tuple, int, int]:
    """Check the inputs of backward, as `check_projection`; `gradients` are tensors and names of their last extents."""
    lead, k, num_mixes = check_projection(residual, fn)
    num_streams, hidden = residual.shape[-2:]
    lead_of(mixes, 'mixes', 'num_mixes', F32, lead, num_mixes=num_mixes)
    lead_of(rstd, 'rstd', '', F32, lead)
    check.same_device(residual=residual, mixes=mixes, rstd=rstd)
    for name, (x, spec) in gradients.items():
        if x is None:
            continue
        lead_of(x, name, spec, BF16, lead, num_streams=num_streams, hidden=hidden)
        check.same_device(residual=residual, **{name: x})
        if check.vector_bytes(x) < 16:
            check.fail(name, 'must start at a multiple of 16 bytes', 'a misaligned view', f'pass {name}.clone()')
    return lead, k, num_mixes


def launch_projection_bwd(
    prepare: Callable[[Tensor, Tensor, Tensor | None], None],
    residual: Tensor,
    fn: Tensor,
    dresidual: Tensor,
    before: Tensor | None,
    applied: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Returns the gradient of fn and writes that of residual, plus `before`, to dresidual.

    `before` may be dresidual. Arguments are checked (`check_projection_bwd`). `prepare(o_parts, pull, dfn)` launches a
    kernel that writes the first two, and zeros to dfn if given. `applied` (dlayer_input, pre) adds the gradient of
    residual through `apply_mix`.
    """
    lead, (num_streams, hidden) = tuple(residual.shape[:-2]), residual.shape[-2:]
    num_mixes, k = fn.shape
    adds_to = '' if before is None else 'dx' if before is dresidual else 'before'
    x = flat(residual, lead, k)
    num_tokens, columns = x.shape[0], padded(num_mixes)
    o_parts = fn.new_empty(num_tokens, 2 * columns, dtype=BF16)
    pull = fn.new_empty(num_tokens)
    clusters = gpu_of(x).max_cluster >= LARGE_CLUSTER
    static = (k, num_mixes, adds_to, 0 if applied is None else hidden, clusters)
    parts = config_for(norm_fn_bwd_kernel, static, num_tokens, x)['parts']
    dfn = torch.empty_like(fn)
    whole = sums_itself(parts, clusters) and num_tokens > 0
    clears = whole and parts == 4
    dfn_parts = dfn[None] if whole else fn.new_empty(parts * min(num_tokens, 1), num_mixes, k)  # none without tokens
    prepare(o_parts, pull, dfn.view(-1) if clears else None)
    launch(
        norm_fn_bwd_kernel,
        static,
        dfn_parts,
        x,
        fn,
        o_parts,
        pull,
        flat(dresidual, lead, k),
        flat(before, lead, k) if before is not None and adds_to == 'before' else None,
        *(None, None) if applied is None else (flat(applied[0], lead, hidden), flat(applied[1], lead, num_streams, 1)),
        size=num_tokens,
    )
    if not whole:
        launch(sum_dfn_kernel, (k, num_mixes), dfn, dfn_parts)
    return dfn


def _norm_fn_bwd(
    dmixes: Tensor, residual: Tensor, fn: Tensor, mixes: Tensor, rstd: Tensor, dresidual: Tensor, before: Tensor | None
) -> Tensor:
    """Returns the gradient of fn and writes that of residual, plus `before`, to dresidual."""
    lead, k, num_mixes = check_projection_bwd(residual, fn, mixes, rstd, dresidual=(dresidual, STREAMED))
    lead_of(dmixes, 'dmixes', 'num_mixes', F32, lead, num_mixes=num_mixes)
    check.same_device(residual=residual, dmixes=dmixes)

    def prepare(o_parts: Tensor, pull: Tensor, dfn: Tensor | None) -> None:
        launch(
            prepare_bwd_kernel,
            (k, num_mixes, dfn is not None),
            flat(dmixes, lead, num_mixes),
            flat(mixes, lead, num_mixes),
            flat(rstd, lead),
            o_parts,
            pull,
            dfn,
        )

    return launch_projection_bwd(prepare, residual, fn, dresidual, before)


@op(outputs='dfn')
def norm_fn_bwd_(dmixes: Tensor, residual: Tensor, fn: Tensor, mixes: Tensor, rstd: Tensor, dresidual: Mut) -> Tensor:
    """Gradients of `norm_fn`, that of residual added to dresidual.

    Args:
        dmixes: (..., num_mixes) float32, contiguous.
        residual: as given to `norm_fn`.
        fn: as given to `norm_fn`.
        mixes: as returned by `norm_fn`.
        rstd: as returned by `norm_fn`.
        dresidual: shape of residual, bfloat16, contiguous; added to in float32, rounded once.

    Returns:
        Gradient of fn, float32; deterministic.
    """
    return _norm_fn_bwd(dmixes, residual, fn, mixes, rstd, dresidual, dresidual)


@op(outputs='dresidual dfn')
def norm_fn_bwd(dmixes: Tensor, residual: Tensor, fn: Tensor, mixes: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `norm_fn`.

    Args:
        dmixes: (..., num_mixes) float32, contiguous.
        residual: as given to `norm_fn`.
        fn: as given to `norm_fn`.
        mixes: as returned by `norm_fn`.
        rstd: as returned by `norm_fn`.

    Returns:
        Gradients of residual (bfloat16) and fn (float32); deterministic.
    """
    dresidual = torch.empty_like(residual)
    return dresidual, _norm_fn_bwd(dmixes, residual, fn, mixes, rstd, dresidual, None)


@op(outputs='mixes rstd', backward=norm_fn_bwd)
def norm_fn(residual: Tensor, fn: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Project the normalized streams of every token; differentiable in residual and fn.

    Args:
        residual: (..., num_streams, hidden) bfloat16, contiguous; 2, 4 or 8 streams, hidden a multiple of 64.
        fn: (num_mixes, num_streams * hidden) float32, contiguous, up to 80 rows; rounded to TF32.
        eps: added to the mean square.

    Returns:
        mixes (..., num_mixes) float32, and rstd (...) float32, which has no gradient.
    """
    lead, k, num_mixes = check_projection(residual, fn)
    mixes, rstd = fn.new_empty((*lead, num_mixes)), fn.new_empty(lead)
    num_streams, hidden = residual.shape[-2:]
    streams = flat(residual, lead, num_streams, hidden)
    outputs = (flat(mixes, lead, num_mixes), flat(rstd, lead))
    if goes_in_one_pass(streams, fn):
        static, nothing = (hidden, num_streams, num_mixes, 'mixes'), (None, None, None)
        launch(
            pre_streams_kernel, static, streams, *nothing, fn, *nothing, *nothing, None, *outputs, 1, eps, 0.0, 0.0, 0.0
        )
    else:
        mul_parts, square_parts = project(streams, fn)
        launch(normalise_kernel, (k, num_mixes), outputs[0], mul_parts, square_parts, outputs[1], eps)
    return mixes, rstd


# Cases --------------------------------------------------------------------------------------


def _make(lead: tuple, hidden: int, num_streams: int, num_mixes: int) -> dict:
    residual = torch.randn(*lead, num_streams, hidden, dtype=BF16)
    return dict(residual=residual, fn=torch.randn(num_mixes, num_streams * hidden) * (num_streams * hidden) ** -0.5)


def _make_bwd(lead: tuple, hidden: int, num_streams: int, num_mixes: int) -> dict:
    made = _make(lead, hidden, num_streams, num_mixes)
    square = made['residual'].float().square().flatten(-2).mean(-1)
    upstream = dict(dmixes=torch.randn(*lead, num_mixes), mixes=torch.randn(*lead, num_mixes))
    return made | upstream | dict(rstd=(square + 1e-6).rsqrt())


def _make_bwd_(**case) -> dict:
    made = _make_bwd(**case)
    return made | dict(dresidual=torch.randn(*made['residual'].shape, dtype=BF16))


SMOKE = (
    grid(lead=[(0,), (), (2, 3)], hidden=[64], num_streams=[4], num_mixes=[24])
    + grid(lead=[(70,)], hidden=[192], num_streams=[2], num_mixes=[8, 2])  # two tiles of tokens, padding mixes
    + grid(lead=[(3,)], hidden=[128], num_streams=[8], num_mixes=[80])
    + grid(lead=[(33,)], hidden=[576, 704], num_streams=[4], num_mixes=[24])  # an idle warp; wide slices
    + grid(lead=[(33,)], hidden=[1088], num_streams=[4], num_mixes=[24])  # splits that do not divide
)
FULL = grid(lead=[(4001,), (3, 1001)], hidden=[1280, 2560, 7168], num_streams=[4], num_mixes=[24, 4]) + grid(
    lead=[(513,)], hidden=[2048], num_streams=STREAMS, num_mixes=[8, 80]
)
BENCH = (
    grid(lead=[(64,), (4096,), (8192,)], hidden=[4096], num_streams=[4], num_mixes=[24])
    + grid(lead=[(4096,)], hidden=[2048, 7168], num_streams=[4], num_mixes=[24])
    + grid(lead=[(4001,)], hidden=[2560], num_streams=[4], num_mixes=[24])
)
norm_fn.cases(make=_make, match=dict(rtol=1e-3, atol=1e-4), smoke=SMOKE, full=FULL, bench=BENCH)
FOUR_PARTS = dict(num_streams=[4], num_mixes=[24])  # of dfn, by clusters
SMOKE_BWD = SMOKE + grid(lead=[(200,)], hidden=[512], **FOUR_PARTS)
FULL_BWD = FULL + grid(lead=[(512,)], hidden=[2048], **FOUR_PARTS)
norm_fn_bwd.cases(make=_make_bwd, match=dict(rtol=1e-3, atol=3e-3), smoke=SMOKE_BWD, full=FULL_BWD, bench=BENCH)
norm_fn_bwd_.cases(make=_make_bwd_, match=dict(rtol=1e-3, atol=3e-3), smoke=SMOKE_BWD, bench=BENCH[:2])
