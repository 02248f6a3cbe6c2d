"""Linear attention with one decay for each token and head (simple GLA, retention, Mamba-2), in chunks.

    S[t] = exp(g[t]) * S[t - 1] + weight[t] * k[t] (x) v[t]            S is dim x value_dim
    o[t] = scale * S[t]^T q[t]

Without g nothing decays. The gradient uses the same sums:

    dq[t] = scale * S[t] do[t]                      dS[t - 1] = exp(g[t]) * (dS[t] + scale * q[t] (x) do[t])
    dk[t] = weight[t] * D[t] v[t]                   D[t] = dS[t] + scale * q[t] (x) do[t]
    dv[t] = weight[t] * D[t]^T k[t]                 dg[t] = <S[t - 1], dS[t - 1]>
    dweight[t] = k[t]^T D[t] v[t]

Nothing but the inputs is saved: states are computed again. The kernels are in `chunk_simple_gla_kernels`, by
mma for every GPU, and for the forward pass on Hopper in `chunk_simple_gla_sm90_kernels`. Compute bound for long
sequences.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.core.cases import grid
from tile_kernels.core.gpus import SUM_SMS
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
from tile_kernels.linear_attention.chunk_simple_gla_kernels import (
    CHUNK,
    KEYS,
    RESULT,
    ROWS,
    UNWEIGHTED,
    decay_gradient_kernel,
    join_states_kernel,
    num_tiles,
    simple_gla_kernel,
    sum_heads_kernel,
)
from tile_kernels.linear_attention.chunk_simple_gla_sm90_kernels import simple_gla_sm90_kernel

F32 = torch.float32
SIMPLE = (simple_gla_sm90_kernel, simple_gla_kernel)
#: Fewer tokens are not worth a segment of their own.
LEAST_SEGMENT = 512
#: Rounding errors of the gradient of gates add up along a segment only.
MOST_GATED = 2048


def segment_size(batch: int, tokens: int, blocks: int, most: int = 1 << 30) -> int:
    """Tokens of a segment, a multiple of a chunk; `blocks` is the number of thread blocks of one segment.

    It is a function of shapes alone, since it fixes the order of sums.
    """
    if batch * blocks >= SUM_SMS:
        size = tokens
    else:
        size = max(LEAST_SEGMENT, batch * tokens * blocks // (2 * SUM_SMS))
    return max(-(-min(size, most, max(tokens, 1)) // CHUNK) * CHUNK, CHUNK)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    weight: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    segment: int,
) -> int:
    """Check the arguments; returns the number of sequences."""
    batch, tokens, _, heads, dim, value_dim = check_qkv(q, k, v)
    number = check_cu_seqlens(cu_seqlens, q)
    known = dict(batch=batch, tokens=tokens, heads=heads)
    for name, x in (('g', g), ('weight', weight)):
        check_gate(x, name, 'batch tokens heads', q, **known)
        if x is not None:
            check.dtype(x, name, F32)
    if weight is not None and g is None:
        check.fail('g', 'must be given with weight', 'None')
    check_state(initial_state, number, heads, dim, value_dim, state_v_first)
    check.same_device(q=q, initial_state=initial_state)
    check.at_least(segment, 0, 'segment')
    check.multiple(segment, CHUNK, 'segment')
    check.at_most(tokens, (1 << 31) - (1 << 17), 'the number of tokens')
    return number


class Plan:
    """What all launches of a call share: sequences, segments and the numbers of their blocks."""

    def __init__(self, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, number: int, size: int, scale: float) -> None:
        self.batch, self.tokens = q.shape[0], q.shape[1]
        self.heads, self.dtype, self.device = v.shape[2], q.dtype, q.device
        self.cu_seqlens, self.number, self.size, self.scale = cu_seqlens, number, size, scale
        self.packed = cu_seqlens is not None
        self.split = self.tokens > size
        segments = -(-self.tokens // size)
        self.slots = self.tokens // size + number + 1 if self.packed else segments * self.batch
        self.bits = number.bit_length() if isinstance(number, int) else 0

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        weight: Tensor | None,
        weights: str,
        o: Tensor | None,
        begin: Tensor | None = None,
        end: Tensor | None = None,
        factors: Tensor | None = None,
        other: Tensor | None = None,
        dots: Tensor | None = None,
        by_slot: bool = False,
        backwards: bool = False,
    ) -> None:
        """Launch the kernel; without o it computes only states. States have the order of k and v."""
        dim, out_dim = k.shape[3], v.shape[3]
        static: tuple = (dim, out_dim, self.dtype, g is not None, weights if weight is not None else UNWEIGHTED)
        static += (self.packed, backwards, None if begin is None else begin.dtype, by_slot, o is None)
        static += (None if end is None else end.dtype, dots is not None)
        tensors = (q, k, v, g, weight, self.cu_seqlens, begin, end, factors, other, o, dots)
        numbers = (self.slots, self.heads, self.number, self.bits, self.size, self.scale)
        launch(SIMPLE, static, *tensors, *numbers, size=self.slots * self.heads)

    def states(
        self,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        weight: Tensor | None,
        begin: Tensor | None,
        backwards: bool = False,
    ) -> Tensor:
        """The state before every segment, (slots, heads, dim, value_dim)."""
        shape = (self.slots, self.heads, k.shape[3], v.shape[3])
        states = torch.empty(shape, dtype=F32, device=self.device)
        factors = torch.empty(shape[:2], dtype=F32, device=self.device)
        weights = UNWEIGHTED if backwards else KEYS
        self.run(k, k, v, g, weight, weights, None, end=states, factors=factors, backwards=backwards)
        self.join(states, factors, begin, backwards)
        return states

    def join(self, states: Tensor, factors: Tensor, begin: Tensor | None, backwards: bool) -> None:
        """Turn what segments add into the states before them; factors have a number for a head or for a row."""
        static = (self.packed, backwards, None if begin is None else begin.dtype, factors.dim() == 3)
        arguments = (states, factors, begin, self.cu_seqlens, self.number, self.tokens, self.size)
        launch(join_states_kernel, static, *arguments, size=self.number * self.heads)


def state_view(state: Tensor | None, v_first: bool) -> Tensor | None:
    """States as (sequences, heads, dim, value_dim)."""
    return state.transpose(2, 3) if state is not None and v_first else state


def transposed(state: Tensor | None) -> Tensor | None:
    """States as (sequences, heads, value_dim, dim)."""
    return None if state is None else state.transpose(2, 3)


def _sum_groups(x: Tensor, heads: int) -> Tensor:
    """Sums over the value heads of every head."""
    batch, tokens, value_heads, dim = x.shape
    if value_heads == heads:
        return x
    y = torch.empty(batch, tokens, heads, dim, dtype=x.dtype, device=x.device)
    grouped = x.view(batch * tokens, heads, value_heads // heads, dim)
    launch(sum_heads_kernel, (dim, x.dtype), grouped, y.view(batch * tokens, heads, dim), size=batch * tokens * heads)
    return y


@op(outputs='dq dk dv dg dweight dinitial_state')
def chunk_simple_gla_bwd(
    do: Tensor,
    dfinal_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    weight: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    output_final_state: bool = False,
    state_v_first: bool = False,
    segment: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `chunk_simple_gla`; equal bits in every run.

    Args:
        do: gradient of o, contiguous.
        dfinal_state: gradient of the final state, contiguous; (0,) if it is not returned.
        q: as in `chunk_simple_gla`, as all that is not said here.
        k: as there.
        v: as there.
        g: as there.
        weight: as there.
        initial_state: as there.
        cu_seqlens: as there.
        scale: as there.
        output_final_state: as there.
        state_v_first: as there.
        segment: as there.

    Returns:
        Gradients of q, k, v, g, weight and the initial state in their dtypes; (0,) for what is not given.
    """
    number = _check(q, k, v, g, weight, initial_state, cu_seqlens, state_v_first, segment)
    batch, tokens, qk_heads, dim = q.shape
    heads, value_dim = v.shape[2:]
    check.packed(do, 'do', 'batch tokens heads dim', q.dtype, batch=batch, tokens=tokens, heads=heads, dim=value_dim)
    check_vectors(do=do)
    check.same_device(q=q, do=do, dfinal_state=dfinal_state)
    check.dtype(dfinal_state, 'dfinal_state', F32)
    dfinal: Tensor | None = None
    if output_final_state:
        check_state(dfinal_state, number, heads, dim, value_dim, state_v_first, 'dfinal_state')
        dfinal = state_view(dfinal_state, state_v_first)
    dq, dk = (torch.empty(batch, tokens, heads, dim, dtype=q.dtype, device=q.device) for _ in range(2))
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    dg, dweight = (torch.empty((0,) if x is None else x.shape, dtype=F32, device=q.device) for x in (g, weight))
    if initial_state is None:
        dbegin = torch.empty(0, dtype=F32, device=q.device)
    else:
        dbegin = torch.empty(initial_state.shape, dtype=initial_state.dtype, device=q.device)
    if v.numel() == 0:
        if initial_state is not None:
            dbegin.copy_(dfinal_state) if output_final_state else dbegin.zero_()
        return _sum_groups(dq, qk_heads), _sum_groups(dk, qk_heads), dv, dg, dweight, dbegin
    if not isinstance(batch * tokens, int):  # symbolic: nothing runs, and a comparison would be a guard
        return _sum_groups(dq, qk_heads), _sum_groups(dk, qk_heads), dv, dg, dweight, dbegin

    blocks = heads * min(num_tiles(dim, value_dim), num_tiles(value_dim, dim))
    most = MOST_GATED if g is not None else 1 << 30
    plan = Plan(q, v, cu_seqlens, number, segment or segment_size(batch, tokens, blocks, most), scale)
    begin = state_view(initial_state, state_v_first)
    dbegin_view = None if initial_state is None else state_view(dbegin, state_v_first)
    states = dstates = None
    if plan.split:
        states = plan.states(k, v, g, weight, begin)
        dstates = plan.states(q, do, g, None, dfinal, backwards=True)
    before, after = (states, dstates) if plan.split else (begin, dfinal)

    def new_dots(inner: int, outer: int, wanted: bool) -> Tensor | None:
        if not wanted:
            return None
        return torch.empty(num_tiles(inner, outer), heads, batch * tokens, dtype=F32, device=q.device)

    q_dots, k_dots = (new_dots(value_dim, dim, g is not None) for _ in range(2))
    v_dots = new_dots(dim, value_dim, weight is not None)
    order: dict[str, Any] = dict(by_slot=plan.split)
    plan.run(do, v, k, g, weight, KEYS, dq, transposed(before), None, None, q, q_dots, **order)
    order['backwards'] = True
    plan.run(v, do, q, g, weight, ROWS, dk, transposed(after), None, None, k, k_dots, **order)
    plan.run(k, q, do, g, weight, RESULT, dv, after, dbegin_view, None, v, v_dots, **order)
    if g is not None:
        static = (plan.packed, plan.split, None if begin is None else begin.dtype, weight is not None)
        dots: Any = (q_dots, k_dots, v_dots, states, dstates, begin, dbegin_view, cu_seqlens, dg)
        numbers = (plan.slots, heads, number, plan.bits, plan.size)
        own = dweight if weight is not None else None
        launch(decay_gradient_kernel, static, *dots, own, *numbers, size=plan.slots * heads)
    return _sum_groups(dq, qk_heads), _sum_groups(dk, qk_heads), dv, dg, dweight, dbegin


@op(outputs='o final_state', backward=chunk_simple_gla_bwd)
def _chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    weight: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    output_final_state: bool = False,
    state_v_first: bool = False,
    segment: int = 0,
) -> tuple[Tensor, Tensor]:
    """Linear attention with one decay for each token and head; see the public function.

    Args:
        q: (batch, tokens, heads, dim) bfloat16 or float16.
        k: like q.
        v: (batch, tokens, value_heads, value_dim); value_heads is a multiple of heads.
        g: (batch, tokens, value_heads) float32, logarithms of the decay, any strides.
        weight: (batch, tokens, value_heads) float32, factors of what a token adds to the state; needs g.
        initial_state: (sequences, value_heads, dim, value_dim) float32 or bfloat16.
        cu_seqlens: (sequences + 1,) int32, where packed sequences start, and the end of the last; batch is then 1.
        scale: factor of o.
        output_final_state: whether to return the final state.
        state_v_first: whether states are (sequences, value_heads, value_dim, dim).
        segment: tokens of the segments that run side by side, a multiple of 64; 0 chooses.

    Returns:
        o, contiguous with the dtype of q, and the final state in float32, (0,) unless it is wanted.
    """
    number = _check(q, k, v, g, weight, initial_state, cu_seqlens, state_v_first, segment)
    batch, tokens, _, dim = q.shape
    heads, value_dim = v.shape[2:]
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
    begin = state_view(initial_state, state_v_first)
    end = state_view(final, state_v_first) if output_final_state else None
    if plan.split:
        begin = plan.states(k, v, g, weight, begin)
    plan.run(q, k, v, g, weight, KEYS, o, begin, end, by_slot=plan.split)
    return o, final


@_chunk_simple_gla.public
def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    **foreign: Any,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with one decay for each token and head, differentiable in all tensors; takes the calls of fla.

    Args:
        q: (batch, tokens, heads, dim) bfloat16 or float16; dim is a multiple of 16 up to 256.
        k: like q.
        v: (batch, tokens, value_heads, value_dim); value_heads is a multiple of heads.
        g: (batch, tokens, value_heads) logarithms of the decay, at most 0, of any floating dtype.
        g_gamma: (value_heads,) logarithms of a decay that is the same for all tokens, instead of g.
        scale: factor of o, dim ** -0.5 unless given.
        initial_state: (sequences, value_heads, dim, value_dim) float32 or bfloat16, 0 unless given.
        output_final_state: whether to return the final state.
        state_v_first: whether states are (sequences, value_heads, value_dim, dim).
        cu_seqlens: (sequences + 1,) int32 or int64: 0, and where every packed sequence ends; batch is then 1.
        chunk_size: 16, 32 or 64; accepted, chunks have 64 tokens.
        foreign: arguments of fla that have no meaning here, at their neutral value.

    Returns:
        o (batch, tokens, value_heads, value_dim), and the final state in float32 or None.
    """
    refuse(foreign)
    if chunk_size is not None:
        check.one_of(chunk_size, CHUNK_SIZES, 'chunk_size')
    q, k, v = autocast(q, k, v)
    dim = check.shape(q, 'q', 'batch tokens heads dim')[3]
    batch, tokens, heads, _ = check.shape(v, 'v', 'batch tokens heads dim')
    g, g_gamma = single(g, 'g'), single(g_gamma, 'g_gamma')
    check_gate(g, 'g', 'batch tokens heads', q, batch=batch, tokens=tokens, heads=heads)
    if g_gamma is not None:
        if g is not None:
            check.fail('g_gamma', 'must not come with g', check.describe(g_gamma))
        check_gate(g_gamma, 'g_gamma', 'heads', q, heads=heads)
        g = g_gamma.float().expand(batch, tokens, heads)
    elif g is not None:
        g = g.float()
    cuts = lengths_int32(cu_seqlens, 'cu_seqlens')
    factor = scale_of(scale, dim)
    begin = dense(initial_state)
    o, final = chunk_simple_gla.call(q, k, v, g, None, begin, cuts, factor, output_final_state, state_v_first)
    return o, final if output_final_state else None


# Cases --------------------------------------------------------------------------------------

BF16, F16 = torch.bfloat16, torch.float16
SMALL = (16, 16)
SMOKE = (
    grid(tokens=[0, 1, 70], heads=[(1, 1)], dims=[SMALL], gate=['random'])
    + grid(tokens=[65], heads=[(1, 2)], dims=[(16, 80)], batch=[2], gate=[''], state=[F32], final=[True])
    + grid(
        tokens=[130], heads=[(1, 2)], dims=[(48, 32)], gate=['random'], weighted=[True], segment=[0, 64], final=[True]
    )
    + grid(tokens=[130], heads=[(2, 2)], dims=[SMALL], dtype=[F16], gate=['steep'], state=[BF16], segment=[64])
    + grid(
        tokens=[(0, 1, 0, 130, 3)],
        heads=[(2, 2)],
        dims=[SMALL],
        gate=['random'],
        state=[F32],
        final=[True],
        v_first=[True],
        behind=[2],
        segment=[64],
        weighted=[True],
    )
    + grid(tokens=[()], heads=[(1, 1)], dims=[SMALL], gate=['random'], behind=[3], final=[True])
    + grid(tokens=[3], heads=[(1, 1)], dims=[(160, 16)], gate=['gamma'], final=[True], fused=[True])
)
BENCH = (
    grid(tokens=[8192], heads=[(96, 96), (8, 8)], dims=[(128, 128)], gate=['gamma', 'random'])
    + grid(tokens=[8001], heads=[(24, 24)], dims=[(128, 128)], batch=[2], gate=['random'])
    + grid(tokens=[(2048,) * 16], heads=[(32, 32)], dims=[(64, 64)], gate=['random'])
    + grid(tokens=[4096], heads=[(1, 64)], dims=[(128, 64)], batch=[8], gate=['random'], weighted=[True])
)
FULL = (
    grid(tokens=[63, 64, 4097], heads=[(2, 2)], dims=[(64, 64), (128, 128)], gate=['', 'random', 'steep'], state=[F32])
    + grid(tokens=[129], heads=[(1, 3)], dims=[(256, 256), (256, 16), (32, 256)], gate=['random'], final=[True])
    + grid(tokens=[tuple(range(200))], heads=[(2, 2)], dims=[(64, 64)], gate=['gamma'], state=[F32], final=[True])
)
chunk_simple_gla.cases(make=random_decay, match=DECAY_SUMS, smoke=SMOKE, full=FULL, bench=BENCH, flops=decay_flops)


def _make_bwd(**case: Any) -> dict:
    """Gradients of the results beside the arguments."""
    given = random_decay(**case)
    q, v, final = given['q'], given['v'], given['output_final_state']
    cuts = given['cu_seqlens']
    number = q.shape[0] if cuts is None else cuts.shape[0] - 1
    rows = (v.shape[3], q.shape[3]) if given['state_v_first'] else (q.shape[3], v.shape[3])
    dfinal = torch.randn((number, v.shape[2], *rows) if final else (0,))
    return dict(do=torch.randn(v.shape).to(v.dtype), dfinal_state=dfinal, **given)


chunk_simple_gla_bwd.cases(
    make=_make_bwd,
    match=DECAY_BWD,
    smoke=SMOKE,
    full=FULL,
    bench=BENCH,
    flops=lambda do, dfinal_state, **given: 3 * decay_flops(**given),
)
