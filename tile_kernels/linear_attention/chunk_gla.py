"""Gated linear attention: a decay for every channel of k, in chunks.

    S[t] = exp(g[t]) * S[t - 1] + k[t] (x) v[t]                        S is dim x value_dim, g scales its rows
    o[t] = scale * S[t]^T q[t]

The gradient:

    dq[t] = scale * S[t] do[t]                      dS[t - 1] = exp(g[t]) * D[t]
    dk[t] = D[t] v[t]                               D[t] = dS[t] + scale * q[t] (x) do[t]
    dv[t] = D[t]^T k[t]                             dg[t] = sum over columns of S[t - 1] * dS[t - 1]

Nothing but the inputs is saved. The kernels are in `chunk_gla_kernels`, by mma for every GPU, and for the forward pass
on Hopper in `chunk_gla_sm90_kernels`. Compute bound for long sequences.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.linear_attention._checks import (
    CHUNK_SIZES,
    check_cu_seqlens,
    check_gate,
    check_qkv,
    check_state,
    check_vectors,
    dense,
    lengths_int32,
    refuse,
    scale_of,
    single,
)
from tile_kernels.linear_attention._samples import DECAY_BWD, DECAY_SUMS, decay_flops, random_decay
from tile_kernels.linear_attention.chunk_gla_kernels import (
    gla_gates_kernel,
    gla_gradient_kernel,
    gla_scan_kernel,
    gla_scores_kernel,
)
from tile_kernels.linear_attention.chunk_gla_sm90_kernels import gla_scan_sm90_kernel, gla_scores_sm90_kernel
from tile_kernels.linear_attention.chunk_simple_gla import MOST_GATED, Plan, segment_size, state_view, transposed
from tile_kernels.linear_attention.chunk_simple_gla_kernels import CHUNK, num_tiles

F32 = torch.float32
SCORES = (gla_scores_sm90_kernel, gla_scores_kernel)
SCAN = (gla_scan_sm90_kernel, gla_scan_kernel)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    segment: int,
) -> int:
    """Check the arguments; returns the number of sequences."""
    batch, tokens, heads, value_heads, dim, value_dim = check_qkv(q, k, v)
    check.equal(value_heads, heads, 'heads of v')
    number = check_cu_seqlens(cu_seqlens, q)
    check_gate(g, 'g', 'batch tokens heads dim', q, batch=batch, tokens=tokens, heads=heads, dim=dim)
    check.dtype(g, 'g', F32)
    check_vectors(g=g)
    check_state(initial_state, number, heads, dim, value_dim, state_v_first)
    check.same_device(q=q, initial_state=initial_state)
    check.at_least(segment, 0, 'segment')
    check.multiple(segment, CHUNK, 'segment')
    check.at_most(tokens, (1 << 31) - (1 << 17), 'the number of tokens')
    return number


class _Scan:
    """The launches that forward and gradient share: scores of chunks, and scans over segments."""

    def __init__(self, plan: Plan, q: Tensor, k: Tensor, g: Tensor) -> None:
        self.plan, self.dtype, self.device = plan, q.dtype, q.device
        batch, tokens, heads, dim = q.shape
        packed = plan.packed
        chunks = -(-tokens // CHUNK)
        self.chunks = tokens // CHUNK + plan.number + 1 if packed else chunks * batch
        self.since, self.until = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
        self.totals = torch.empty(self.chunks, heads, dim, dtype=F32, device=q.device)
        self.scores = torch.empty(self.chunks, heads, CHUNK, CHUNK, dtype=q.dtype, device=q.device)
        made = (self.since, self.until, self.totals, self.scores)
        numbers = (plan.number, plan.bits, plan.scale)
        launch(SCORES, (dim, q.dtype, packed), q, k, g, plan.cu_seqlens, *made, *numbers)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor | None,
        begin: Tensor | None = None,
        end: Tensor | None = None,
        factors: Tensor | None = None,
        scored: bool = False,
        rows_decay: bool = True,
        backwards: bool = False,
    ) -> None:
        """Launch a scan; without o it computes only states."""
        plan = self.plan
        static: tuple = (k.shape[3], v.shape[3], self.dtype, self.dtype if o is None else o.dtype, scored, rows_decay)
        static += (plan.packed, backwards, None if begin is None else begin.dtype, plan.split, o is None)
        static += (None if end is None else end.dtype,)
        tensors = (q, k, v, self.totals, self.scores if scored else None, plan.cu_seqlens, begin, end, factors, o)
        numbers = (plan.slots, plan.heads, plan.number, plan.bits, plan.size)
        launch(SCAN, static, *tensors, *numbers, size=plan.slots * plan.heads)

    def states(self, k: Tensor, v: Tensor, begin: Tensor | None, backwards: bool = False) -> Tensor:
        """The state before every segment, (slots, heads, dim, value_dim)."""
        shape = (self.plan.slots, self.plan.heads, k.shape[3], v.shape[3])
        states = torch.empty(shape, dtype=F32, device=self.device)
        factors = torch.empty(shape[:3], dtype=F32, device=self.device)
        self.run(k, k, v, None, end=states, factors=factors, backwards=backwards)
        self.plan.join(states, factors, begin, backwards)
        return states


@op(outputs='dq dk dv dg dinitial_state')
def chunk_gla_bwd(
    do: Tensor,
    dfinal_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    output_final_state: bool = False,
    state_v_first: bool = False,
    segment: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `chunk_gla`; equal bits in every run.

    Args:
        do: gradient of o, contiguous.
        dfinal_state: gradient of the final state, contiguous; (0,) if it is not returned.
        q: as in `chunk_gla`, as all that is not said here.
        k: as there.
        v: as there.
        g: as there.
        initial_state: as there.
        cu_seqlens: as there.
        scale: as there.
        output_final_state: as there.
        state_v_first: as there.
        segment: as there.

    Returns:
        Gradients of q, k, v, g and the initial state in their dtypes; the last is (0,) if there is none.
    """
    number = _check(q, k, v, g, initial_state, cu_seqlens, state_v_first, segment)
    batch, tokens, heads, dim = q.shape
    value_dim = v.shape[3]
    check.packed(do, 'do', 'batch tokens heads dim', q.dtype, batch=batch, tokens=tokens, heads=heads, dim=value_dim)
    check_vectors(do=do)
    check.same_device(q=q, do=do, dfinal_state=dfinal_state)
    check.dtype(dfinal_state, 'dfinal_state', F32)
    dfinal: Tensor | None = None
    if output_final_state:
        check_state(dfinal_state, number, heads, dim, value_dim, state_v_first, 'dfinal_state')
        dfinal = state_view(dfinal_state, state_v_first)
    dq, dk, dv, dg = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, g))
    if initial_state is None:
        dbegin = torch.empty(0, dtype=F32, device=q.device)
    else:
        dbegin = torch.empty(initial_state.shape, dtype=initial_state.dtype, device=q.device)
    if v.numel() == 0:
        if initial_state is not None:
            dbegin.copy_(dfinal_state) if output_final_state else dbegin.zero_()
        return dq, dk, dv, dg, dbegin
    if not isinstance(batch * tokens, int):  # symbolic: nothing runs, and a comparison would be a guard
        return dq, dk, dv, dg, dbegin

    blocks = heads * min(num_tiles(dim, value_dim), num_tiles(value_dim, dim))
    plan = Plan(q, v, cu_seqlens, number, segment or segment_size(batch, tokens, blocks, MOST_GATED), scale)
    scan = _Scan(plan, q, k, g)
    begin = state_view(initial_state, state_v_first)
    dbegin_view = None if initial_state is None else state_view(dbegin, state_v_first)
    states = dstates = None
    if plan.split:
        states = scan.states(scan.until, v, begin)
        dstates = scan.states(scan.since, do, dfinal, backwards=True)
    before, after = (states, dstates) if plan.split else (begin, dfinal)
    q_parts, k_parts = (torch.empty(q.shape, dtype=F32, device=q.device) for _ in range(2))
    changes = torch.empty(scan.chunks, heads, dim, dtype=F32, device=q.device)
    scan.run(do, v, scan.until, q_parts, transposed(before), rows_decay=False)
    scan.run(v, do, scan.since, k_parts, transposed(after), rows_decay=False, backwards=True)
    scan.run(scan.until, scan.since, do, dv, after, dbegin_view, scored=True, backwards=True)
    results = (q_parts, k_parts, cu_seqlens, dq, dk, dg, changes)
    static: tuple = (dim, value_dim, q.dtype, plan.packed)
    launch(gla_gradient_kernel, static, q, k, v, g, do, *results, number, plan.bits, scale)
    static = (dim, plan.packed, plan.split, None if begin is None else begin.dtype)
    tensors: Any = (changes, states, dstates, begin, dbegin_view, cu_seqlens)
    numbers = (plan.slots, heads, number, plan.bits, plan.size)
    launch(gla_gates_kernel, static, dg, *tensors, *numbers, size=plan.slots * heads)
    return dq, dk, dv, dg, dbegin


@op(outputs='o final_state', backward=chunk_gla_bwd)
def _chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    output_final_state: bool = False,
    state_v_first: bool = False,
    segment: int = 0,
) -> tuple[Tensor, Tensor]:
    """Gated linear attention; see the public function.

    Args:
        q: (batch, tokens, heads, dim) bfloat16 or float16.
        k: like q.
        v: (batch, tokens, heads, value_dim).
        g: (batch, tokens, heads, dim) float32, logarithms of the decay.
        initial_state: (sequences, heads, dim, value_dim) float32 or bfloat16.
        cu_seqlens: (sequences + 1,) int32, where packed sequences start, and the end of the last; batch is then 1.
        scale: factor of o.
        output_final_state: whether to return the final state.
        state_v_first: whether states are (sequences, heads, value_dim, dim).
        segment: tokens of the segments that run side by side, a multiple of 64; 0 chooses.

    Returns:
        o, contiguous with the dtype of q, and the final state in float32, (0,) unless it is wanted.
    """
    number = _check(q, k, v, g, initial_state, cu_seqlens, state_v_first, segment)
    batch, tokens, heads, dim = q.shape
    value_dim = v.shape[3]
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    rows = (value_dim, dim) if state_v_first else (dim, value_dim)
    shape = (number, heads, *rows) if output_final_state else (0,)
    final = torch.empty(shape, dtype=F32, device=q.device)
    if v.numel() == 0:
        if output_final_state:
            final.zero_() if initial_state is None else final.copy_(initial_state)
        return o, final
    if not isinstance(batch * tokens, int):  # symbolic: nothing runs, and a comparison would be a guard
        return o, final
    size = segment or segment_size(batch, tokens, heads * num_tiles(dim, value_dim))
    plan = Plan(q, v, cu_seqlens, number, size, scale)
    scan = _Scan(plan, q, k, g)
    begin = state_view(initial_state, state_v_first)
    end = state_view(final, state_v_first) if output_final_state else None
    if plan.split:
        begin = scan.states(scan.until, v, begin)
    scan.run(scan.since, scan.until, v, o, begin, end, scored=True)
    return o, final


@_chunk_gla.public
def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    **foreign: Any,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a decay for every channel of k, differentiable in all tensors; takes the calls of fla.

    Args:
        q: (batch, tokens, heads, dim) bfloat16 or float16; dim is a multiple of 16 up to 256.
        k: like q.
        v: (batch, tokens, heads, value_dim).
        g: (batch, tokens, heads, dim) logarithms of the decay, at most 0, of any floating dtype.
        scale: factor of o, dim ** -0.5 unless given.
        initial_state: (sequences, heads, dim, value_dim) float32 or bfloat16, 0 unless given.
        output_final_state: whether to return the final state.
        state_v_first: whether states are (sequences, heads, value_dim, dim).
        cu_seqlens: (sequences + 1,) int32 or int64: 0, and where every packed sequence ends; batch is then 1.
        chunk_size: 16, 32 or 64; accepted, chunks have 64 tokens.
        foreign: arguments of fla that have no meaning here, at their neutral value.

    Returns:
        o (batch, tokens, heads, value_dim), and the final state in float32 or None.
    """
    refuse(foreign)
    if chunk_size is not None:
        check.one_of(chunk_size, CHUNK_SIZES, 'chunk_size')
    q, k, v = autocast(q, k, v)
    batch, tokens, heads, dim = check.shape(q, 'q', 'batch tokens heads dim')
    g = single(check.tensor(g, 'g'), 'g')
    check_gate(g, 'g', 'batch tokens heads dim', q, batch=batch, tokens=tokens, heads=heads, dim=dim)
    cuts = lengths_int32(cu_seqlens, 'cu_seqlens')
    options = (cuts, scale_of(scale, dim), output_final_state, state_v_first)
    o, final = chunk_gla.call(q, k, v, g.float(), dense(initial_state), *options)
    return o, final if output_final_state else None


# Cases --------------------------------------------------------------------------------------

BF16, F16 = torch.bfloat16, torch.float16
SMALL = (16, 16)
SMOKE = (
    grid(tokens=[0, 1, 70], heads=[1], dims=[SMALL], gate=['random'])
    + grid(tokens=[65], heads=[1], dims=[(80, 48)], batch=[2], gate=['random'], state=[F32], final=[True])
    + grid(tokens=[130], heads=[1], dims=[(16, 32)], dtype=[F16], gate=['steep'], state=[BF16], segment=[64])
    + grid(
        tokens=[(0, 1, 0, 130, 3)],
        heads=[2],
        dims=[SMALL],
        gate=['random'],
        state=[F32],
        final=[True],
        v_first=[True],
        behind=[2],
        segment=[64],
    )
    + grid(tokens=[()], heads=[1], dims=[SMALL], gate=['random'], behind=[3], final=[True])
)
BENCH = grid(tokens=[8192], heads=[96, 8], dims=[(128, 128)], gate=['random']) + grid(
    tokens=[(2048,) * 8], heads=[32], dims=[(64, 64)], gate=['random']
)
FULL = grid(tokens=[63, 64, 1025], heads=[2], dims=[(64, 64), (128, 128)], gate=['zero', 'random', 'steep']) + grid(
    tokens=[129], heads=[1], dims=[(256, 256), (256, 16), (32, 256)], gate=['random'], state=[F32], final=[True]
)


def _make(tokens: Any, heads: int, dims: tuple[int, int], gate: str, **case: Any) -> dict:
    """As `random_decay`, with gates of every channel."""
    given = random_decay(tokens, (heads, heads), dims, **case)
    shape = given['q'].shape
    g = -torch.rand(shape) * (0.0 if gate == 'zero' else 0.3)
    if gate == 'steep':
        g = torch.where(torch.rand(shape) < 0.05, -1e4, g)
    if case.get('behind'):
        g[:, -case['behind'] :] = torch.nan
    del given['weight']
    return given | dict(g=g)


def _make_bwd(**case: Any) -> dict:
    """Gradients of the results beside the arguments."""
    given = _make(**case)
    q, v, cuts = given['q'], given['v'], given['cu_seqlens']
    number = q.shape[0] if cuts is None else cuts.shape[0] - 1
    rows = (v.shape[3], q.shape[3]) if given['state_v_first'] else (q.shape[3], v.shape[3])
    dfinal = torch.randn((number, v.shape[2], *rows) if given['output_final_state'] else (0,))
    return dict(do=torch.randn(v.shape).to(v.dtype), dfinal_state=dfinal, **given)


def _flops(q: Tensor, k: Tensor, v: Tensor, **others: object) -> int:
    """Those of one decay for a head, and six products of scores instead of one."""
    return decay_flops(q, k, v) + 2 * q.numel() * 64 * 5


chunk_gla.cases(make=_make, match=DECAY_SUMS, smoke=SMOKE, full=FULL, bench=BENCH, flops=_flops)
chunk_gla_bwd.cases(
    make=_make_bwd,
    match=DECAY_BWD,
    smoke=SMOKE,
    full=FULL,
    bench=BENCH,
    flops=lambda do, dfinal_state, **given: 3 * _flops(**given),
)
