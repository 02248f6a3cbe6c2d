"""The gated delta rule: a state per head that decays, forgets what a key meant before, and learns what it means now.

    S_t = e^{g_t} S_{t-1} + k_t (x) u_t,      u_t = beta_t (v_t - (e^{g_t} S_{t-1})^T k_t)
    o_t = scale * S_t^T q_t

In chunks, with G the sum of gates since the start of the chunk and S the state before it:

    A_ij = beta_i e^{G_i - G_j} k_i . k_j  (j < i),      P_ij = e^{G_i - G_j} q_i . k_j  (j <= i)
    u = (1 + A)^-1 beta (v - e^G k S),      o = scale (e^G q S + P u),      S' = e^{G_C} S + (e^{G_C - G} k)^T u

g is one number for a token and value head, or one for every channel of k (KDA). Every decay is one exponential of a
difference that is not positive. The kernels are in `delta_rule_kernels` and `delta_rule_bwd_kernels`, which run on
every GPU by mma, and in `delta_rule_sm90_kernels` and `delta_rule_bwd_sm90_kernels`. Compute bound for many heads,
bound by the chain for few.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.core.cases import grid
from tile_kernels.core.gpus import SUM_SMS
from tile_kernels.core.launch import gpu_of, launch, variant_for
from tile_kernels.core.op import op
from tile_kernels.linear_attention._checks import (
    CHUNK_SIZES,
    check_cu_seqlens,
    check_qkv,
    check_state,
    check_vectors,
    chunk_of,
    dense,
    lengths_int32,
    refuse,
    scale_of,
    single,
)
from tile_kernels.linear_attention._samples import delta_products, random_delta
from tile_kernels.linear_attention.delta_rule_bwd_kernels import (
    delta_channel_gradients_kernel,
    delta_dstates_kernel,
    delta_gradients_kernel,
    delta_group_kernel,
)
from tile_kernels.linear_attention.delta_rule_bwd_sm90_kernels import (
    delta_brackets_sm90_kernel,
    delta_chains_sm90_kernel,
    delta_gradients_sm90_kernel,
)
from tile_kernels.linear_attention.delta_rule_kernels import (
    PLAIN,
    SIGMOID,
    TWICE_SIGMOID,
    delta_channel_scores_kernel,
    delta_scores_kernel,
    delta_states_kernel,
    padded,
)
from tile_kernels.linear_attention.delta_rule_sm90_kernels import (
    JOINED,
    MAPS,
    WHOLE,
    delta_channel_scores_sm90_kernel,
    delta_scores_sm90_kernel,
    delta_states_sm90_kernel,
)
from tile_kernels.linear_attention.gate import gate
from tile_kernels.linear_attention.l2norm import l2norm

SCORES = (delta_scores_sm90_kernel, delta_scores_kernel)
CHANNEL_SCORES = (delta_channel_scores_sm90_kernel, delta_channel_scores_kernel)
STATES = (delta_states_sm90_kernel, delta_states_kernel)
#: A piece of a sequence has at least so many chunks.
LEAST_CHUNKS = 8
FORMS = (PLAIN, SIGMOID, TWICE_SIGMOID)


def count_chunks(tokens: int, number: int, chunk: int, packed: bool) -> int:
    """Chunks of all sequences; packed ones have numbers to spare."""
    return tokens // chunk + number + 1 if packed else -(-tokens // chunk) * number


def check_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    form: int,
    v_first: bool,
    name: str = 'g',
) -> int:
    """Check the arguments of both directions; returns the number of sequences."""
    batch, tokens, _, value_heads, dim, value_dim = check_qkv(q, k, v)
    known = dict(batch=batch, tokens=tokens, heads=value_heads)
    channels = isinstance(g, Tensor) and g.dim() == 4
    spec, extra = ('batch tokens heads dim', dict(dim=dim)) if channels else ('batch tokens heads', {})
    check.packed(check.tensor(g, name), name, spec, torch.float32, **known, **extra)
    check.packed(check.tensor(beta, 'beta'), 'beta', 'batch tokens heads', torch.float32, **known)
    check.one_of(chunk_size, CHUNK_SIZES if dim <= 128 else (32,), 'chunk_size')
    check.one_of(form, FORMS, 'form')
    number = check_cu_seqlens(cu_seqlens, q)
    check_state(initial_state, number, value_heads, dim, value_dim, v_first)
    check.same_device(q=q, g=g, beta=beta, initial_state=initial_state)
    return number


def _unchanged(final_state: Tensor, initial_state: Tensor | None) -> Tensor:
    """The final state of sequences without tokens."""
    if initial_state is None or final_state.numel() == 0:
        return final_state.zero_()
    return final_state.copy_(initial_state)


def count_pieces(chunks: int, blocks: int) -> int:
    """Pieces of every sequence, when the thread blocks of whole sequences leave SMs idle.

    Pieces cost three times the work. The number depends on the shapes alone, since it changes the rounding.
    """
    return max(1, min(SUM_SMS // max(blocks, 1), chunks // LEAST_CHUNKS)) if 4 * blocks <= SUM_SMS else 1


def _bits(number: int) -> int:
    return number.bit_length() if isinstance(number, int) else 0


@op(outputs='dq dk dv dg dbeta dinitial_state')
def delta_rule_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_sum: Tensor,
    beta: Tensor,
    inverse: Tensor,
    dfinal_state: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    chunk_size: int = 64,
    form: int = 0,
    v_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `delta_rule`; equal bits in every run.

    It needs memory for the time of the call, in the dtype of q. Every chunk and value head has two states and
    chunk_size^2 numbers. Every value has two numbers. With value groups, every value head has dq and dk in float32.

    Args:
        do: gradient of o, contiguous.
        q: as in `delta_rule`, as all that is not said here.
        k: as there.
        v: as there.
        g_sum: third result of `delta_rule`.
        beta: as there.
        inverse: fourth result.
        dfinal_state: gradient of final_state; None or one without sequences is 0.
        initial_state: as there.
        cu_seqlens: as there.
        scale: as there.
        chunk_size: as there.
        form: as there.
        v_first: as there.

    Returns:
        Gradients of q, k, v, g, beta and initial_state; the last has extent 0 without an initial state.
    """
    number = check_delta(q, k, v, g_sum, beta, initial_state, cu_seqlens, chunk_size, form, v_first, 'g_sum')
    (batch, tokens, heads, dim), (value_heads, value_dim) = q.shape, v.shape[2:]
    packed, channels, grouped = cu_seqlens is not None, g_sum.dim() == 4, value_heads != heads
    chunks = count_chunks(tokens, number, chunk_size, packed)
    shape = dict(zip(('batch', 'tokens', 'heads', 'dim'), v.shape, strict=True))
    check.packed(do, 'do', 'batch tokens heads dim', v.dtype, **shape)
    square = {'chunks': chunks, 'heads': value_heads, 'chunk': chunk_size}
    check.packed(inverse, 'inverse', 'chunks heads chunk chunk', v.dtype, **square)
    given = dfinal_state is not None and dfinal_state.shape[0] > 0
    if given:
        check_state(dfinal_state, number, value_heads, dim, value_dim, v_first, 'dfinal_state')
    check_vectors(do=do, inverse=inverse)
    check.same_device(q=q, do=do, inverse=inverse, dfinal_state=dfinal_state)

    def half(*extents: int) -> Tensor:
        return torch.empty(extents, dtype=q.dtype, device=q.device)

    dq, dk, dv = half(*q.shape), half(*k.shape), half(*v.shape)
    dg, dbeta = torch.empty_like(g_sum), torch.empty_like(beta)
    dinitial = (
        torch.empty_like(initial_state)
        if initial_state is not None
        else torch.empty(0, dtype=torch.float32, device=q.device)
    )
    if tokens == 0:
        if initial_state is not None:
            _unchanged(dinitial, dfinal_state if given else None)
        return dq, dk, dv, dg, dbeta, dinitial
    static: tuple = (dim, value_dim, q.dtype, chunk_size, packed, form)
    initial = None if initial_state is None else initial_state.dtype
    bits, size = _bits(number), number * v.numel()
    dstate = dfinal_state if given else None
    dinitial_or_none = dinitial if initial_state is not None else None
    scores, u, dx = half(*inverse.shape), half(*v.shape), half(*v.shape)
    if not channels and delta_gradients_sm90_kernel.claims((*static, grouped), gpu_of(q)):
        writes = half(*v.shape[:3], dim)
        h, dh = (half(chunks, value_heads, value_dim, dim) for _ in range(2))
        operands: Any = (q, k, g_sum, inverse, cu_seqlens, scores, writes, number, bits, scale)
        launch(delta_brackets_sm90_kernel, static[:5], *operands, size=v.numel())
        operands = (do, q, k, v, g_sum, beta, inverse, scores, writes, initial_state, dstate, cu_seqlens)
        operands += (h, u, dh, dx, dv, dinitial_or_none, number, scale)
        launch(delta_chains_sm90_kernel, (*static, initial, v_first, given), *operands, size=number * value_heads)
        sums: Any = (torch.empty(q.shape, device=q.device) for _ in range(2)) if grouped else (None, None)
        operands = (do, q, k, v, g_sum, beta, u, dx, h, dh, cu_seqlens, *sums, dq, dk, dv, dg, dbeta)
        operands += (number, bits, scale, value_heads // heads)
        launch(delta_gradients_sm90_kernel, (*static, grouped), *operands, size=v.numel())
        return dq, dk, dv, dg, dbeta, dinitial
    h, dh = (half(chunks, value_heads, dim, value_dim) for _ in range(2))
    operands = (q, k, None, beta, cu_seqlens, g_sum, scores, None, None, number, bits, None)
    operands += (None, None) if channels else ()
    launch(delta_channel_scores_kernel if channels else delta_scores_kernel, (*static, True), *operands, size=v.numel())
    operands = (q, k, v, g_sum, beta, None, inverse, initial_state, cu_seqlens, None, None, h, u, number, scale)
    operands += (None, None, None, 1)
    launch(delta_states_kernel, (*static, channels, initial, v_first, False, True, WHOLE), *operands, size=size)
    operands = (do, q, k, g_sum, beta, scores, inverse, dstate, cu_seqlens)
    operands += (dv, dx, dh, dinitial_or_none, number, scale)
    launch(delta_dstates_kernel, (*static, channels, initial, v_first, given), *operands, size=size)
    if grouped:
        wide_dq, wide_dk = (torch.empty(batch, tokens, value_heads, dim, device=q.device) for _ in range(2))
    else:
        wide_dq, wide_dk = dq, dk
    operands = (
        do,
        q,
        k,
        v,
        g_sum,
        beta,
        u,
        dx,
        h,
        dh,
        cu_seqlens,
        wide_dq,
        wide_dk,
        dv,
        dg,
        dbeta,
        number,
        bits,
        scale,
    )
    last = delta_channel_gradients_kernel if channels else delta_gradients_kernel
    launch(last, (*static, grouped), *operands, size=v.numel())
    if grouped:
        rows = (x.view(-1, dim) for x in (wide_dq, wide_dk, dq, dk))
        launch(delta_group_kernel, (dim, q.dtype), *rows, value_heads // heads, size=dq.numel())
    return dq, dk, dv, dg, dbeta, dinitial


@op(outputs='o final_state g_sum inverse', backward=delta_rule_bwd)
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    chunk_size: int = 64,
    form: int = 0,
    v_first: bool = False,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gated delta rule; see `chunk_gated_delta_rule`.

    Args:
        q: (batch, tokens, heads, dim).
        k: the same.
        v: (batch, tokens, value_heads, value_dim).
        g: (batch, tokens, value_heads) float32, or (batch, tokens, value_heads, dim): logarithms of decays.
        beta: (batch, tokens, value_heads) float32.
        initial_state: (sequences, value_heads, dim, value_dim) float32 or bfloat16.
        cu_seqlens: (sequences + 1,) int32, where packed sequences start, and the end of the last.
        scale: factor of o.
        chunk_size: 16, 32 or 64.
        form: 0 takes beta as it is, 1 its sigmoid, 2 twice its sigmoid.
        v_first: states are (sequences, value_heads, value_dim, dim).
        output_final_state: whether final_state is computed; otherwise it has no sequences.

    Returns:
        o like v, final_state float32, and what the gradient needs: sums of gates in chunks, and inverses.
    """
    number = check_delta(q, k, v, g, beta, initial_state, cu_seqlens, chunk_size, form, v_first)
    tokens, (value_heads, value_dim), dim = q.shape[1], v.shape[2:], q.shape[3]
    packed, channels = cu_seqlens is not None, g.dim() == 4
    chunks = count_chunks(tokens, number, chunk_size, packed)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    shape = (number if output_final_state else 0, value_heads, *((value_dim, dim) if v_first else (dim, value_dim)))
    final_state = torch.empty(shape, dtype=torch.float32, device=v.device)
    g_sum = torch.empty_like(g)
    inverse = torch.empty(chunks, value_heads, chunk_size, chunk_size, dtype=v.dtype, device=v.device)
    if tokens == 0:
        return o, _unchanged(final_state, initial_state), g_sum, inverse
    scores = torch.empty_like(inverse)
    static: tuple = (dim, value_dim, q.dtype, chunk_size, packed, form)
    initial = None if initial_state is None else initial_state.dtype
    whole: tuple = (*static, channels, initial, v_first, output_final_state, False)
    on_hopper = variant_for(STATES, (*whole, WHOLE), gpu_of(q)) is delta_states_sm90_kernel

    def wide_half() -> Tensor | None:
        return torch.empty(*v.shape[:3], dim, dtype=q.dtype, device=q.device) if on_hopper else None

    writes = wide_half()
    decayed: tuple = (wide_half(), wide_half()) if channels else ()
    operands: tuple = (q, k, g, beta, cu_seqlens, g_sum, scores, inverse, o, number, _bits(number), writes, *decayed)
    launch(CHANNEL_SCORES if channels else SCORES, (*static, False), *operands, size=inverse.numel())
    operands = decayed if channels and on_hopper else (q, k)
    operands += (v, g_sum, beta, scores, None if on_hopper else inverse, initial_state, cu_seqlens, o)
    operands += (final_state if output_final_state else None, None, None, number, scale, writes)
    size, pieces = number * value_heads, 1
    if on_hopper and not packed and isinstance(size * tokens, int):
        pieces = count_pieces(tokens // chunk_size, size * -(-value_dim // 64))
    if pieces == 1:
        launch(STATES, (*whole, WHOLE), *operands, None, None, 1, size=size)
        return o, final_state, g_sum, inverse
    wide = padded(dim)
    maps = torch.empty(number * (pieces - 1), value_heads, wide, wide, dtype=q.dtype, device=q.device)
    offsets = torch.empty(number * (pieces - 1), value_heads, value_dim, wide, device=q.device)
    for mode in (MAPS, JOINED):
        launch(STATES, (*whole, mode), *operands, maps, offsets, pieces, size=size)
    return o, final_state, g_sum, inverse


# Public functions ---------------------------------------------------------------------------


def beta_form(use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> int:
    """How beta is computed from its input."""
    return (TWICE_SIGMOID if allow_neg_eigval else SIGMOID) if use_beta_sigmoid_in_kernel else PLAIN


def prepare_gate(g: Tensor, use_gate: bool, A_log: Tensor | None, dt_bias: Tensor | None, bound: float) -> Tensor:
    """Gates as logarithms in float32, from their inputs if `use_gate`."""
    if not use_gate:
        if A_log is not None or dt_bias is not None:
            check.fail('A_log and dt_bias', 'must come with use_gate_in_kernel', 'no use_gate_in_kernel')
        return g.float().contiguous()
    a_log = check.tensor(A_log, 'A_log').float().flatten().contiguous()
    return gate(
        single(g, 'g').contiguous(), a_log, None if dt_bias is None else dt_bias.float().flatten().contiguous(), bound
    )


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **foreign: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, differentiable in all tensors and the initial state; takes the calls of fla.

    A NaN or an infinity in a token makes the results of that token and of those behind it NaN.

    Args:
        q: (batch, tokens, heads, dim) bfloat16 or float16; dim is a multiple of 16 up to 256. The last dimension is
            dense, base and other strides are multiples of 16 bytes.
        k: the same.
        v: (batch, tokens, value_heads, value_dim); value_heads is a multiple of heads.
        g: (batch, tokens, value_heads), logarithms of decays, computed in float32; or inputs of the gate.
        beta: (batch, tokens, value_heads), or inputs of the sigmoid.
        scale: factor of o, dim ** -0.5 unless given.
        initial_state: (sequences, value_heads, dim, value_dim) float32 or bfloat16; its gradient has its dtype.
        output_final_state: also return the state behind every sequence.
        use_qk_l2norm_in_kernel: divide q and k by (sum of squares + 1e-6) ** 0.5.
        use_beta_sigmoid_in_kernel: take the sigmoid of beta.
        allow_neg_eigval: take twice the sigmoid.
        state_v_first: states are (sequences, value_heads, value_dim, dim).
        cu_seqlens: (sequences + 1,) int32 or int64 on the device: where packed sequences start, and the end of the
            last; batch is then 1. Sequences may be empty.
        chunk_size: 16, 32 or 64; changes nothing but rounding.
        use_gate_in_kernel: the gate is -exp(A_log) * softplus(g + dt_bias).
        A_log: (value_heads,).
        dt_bias: (value_heads,).
        foreign: arguments of fla that have no meaning here, at their neutral value.

    Returns:
        o (batch, tokens, value_heads, value_dim), and the final state in float32 or None. Tokens behind the last
        sequence have o = 0 and gradient 0.
    """
    refuse(foreign)
    if check.tensor(g, 'g').dim() != 3:
        check.fail('g', 'must be (batch, tokens, heads)', check.describe(g))
    given = (q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel)
    form = beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    gates = prepare_gate(g, use_gate_in_kernel, A_log, dt_bias, 0.0)
    return run_chunked(*given, form, state_v_first, cu_seqlens, chunk_size, gates)[:2]


chunk_gdn = chunk_gated_delta_rule


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule` without decay.

    Args:
        q: as there, as all arguments.
        k: as there.
        v: as there.
        beta: as there.
        scale: as there.
        initial_state: as there.
        output_final_state: as there.
        use_qk_l2norm_in_kernel: as there.
        cu_seqlens: as there.
        options: other arguments of it.

    Returns:
        What it returns.
    """
    if 'g' in options or options.get('use_gate_in_kernel'):
        check.fail('g', 'must be given to chunk_gated_delta_rule', 'a gate')
    g = torch.zeros(check.tensor(v, 'v').shape[:3], dtype=torch.float32, device=v.device)
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        **options,
    )


def run_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    normalize: bool,
    form: int,
    v_first: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    gates: Tensor,
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """What the public functions share; `gates` are logarithms in float32. The third result is for `delta_states`."""
    check.tensor(beta, 'beta')
    q, k, v = autocast(check.tensor(q, 'q'), check.tensor(k, 'k'), check.tensor(v, 'v'))
    if normalize:
        q, k = l2norm(q)[0], l2norm(k)[0]
    given: dict[str, Any] = dict(k=k, v=v, beta=beta.float().contiguous(), initial_state=dense(initial_state))
    given |= dict(cu_seqlens=lengths_int32(cu_seqlens, 'cu_seqlens'), form=form, v_first=v_first)
    numbers: dict[str, Any] = dict(scale=scale_of(scale, q.shape[-1]), chunk_size=chunk_of(chunk_size, q.shape[-1]))
    o, final, g_sum, inverse = delta_rule(q=q, g=gates, output_final_state=output_final_state, **numbers, **given)
    return o, final if output_final_state else None, dict(g_sum=g_sum, inverse=inverse, **given)


# Cases --------------------------------------------------------------------------------------

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMOKE = (
    grid(tokens=[0, 1, 17], output_final_state=[True])
    + grid(tokens=[40], heads=[(1, 3)], dims=[(16, 48)], batch=[2], dtype=[F16], form=[2], state=[F32])
    + grid(
        tokens=[(0, 1, 0, 35, 16)], dims=[(48, 80)], state=[BF16], v_first=[True], behind=[3], output_final_state=[True]
    )
    + grid(tokens=[()], behind=[3])
    + grid(tokens=[20], heads=[(2, 2)], gate=['drop'], fused=[True], form=[1])
    + grid(tokens=[33], chunk=[32], keys=['equal'], betas=['one'], gate=['none'], state=[F32])
    + grid(tokens=[65], chunk=[64], keys=['long'], gate=['none'])
    + grid(tokens=[(0, 66, 3)], heads=[(1, 2)], dims=[(128, 128)], chunk=[64], state=[BF16], v_first=[True], behind=[3])
    + grid(tokens=[20], heads=[(1, 2)], dims=[(48, 16)], gate=['drop'], channels=[True], state=[F32], form=[1])
    + grid(tokens=[(0, 1, 0, 35)], channels=[True], chunk=[32], behind=[3])
    + grid(tokens=[(0, 65, 3)], heads=[(1, 2)], dims=[(48, 80)], channels=[True], chunk=[64], behind=[3])
)
PIECES = grid(tokens=[1100], dims=[(32, 48)], chunk=[64], gate=['weak'], state=[F32], output_final_state=[True])
D64, D128 = (64, 64), (128, 128)
FULL = (
    grid(tokens=[1, 63, 64, 65, 4097], heads=[(2, 6)], dims=[D128], chunk=[64], output_final_state=[True])
    + grid(tokens=[130], heads=[(1, 2)], dims=[D64], chunk=[64], betas=['zero', 'one'], gate=['none', 'drop'])
    + grid(tokens=[130], dims=[D64], chunk=[64], keys=['equal'], betas=['one'], gate=['none'], state=[F32])
    + grid(tokens=[64], dims=[D64, D128], chunk=[64], keys=['long'], gate=['none', 'mixed'], dtype=[BF16, F16])
    + grid(tokens=[(0, 1, 0, 130)], heads=[(2, 6)], dims=[D128], chunk=[16, 64], state=[BF16], behind=[5])
    + grid(tokens=[700], heads=[(2, 2)], dims=[(256, 256), (256, 32)], chunk=[32], gate=['weak'], state=[F32])
    + grid(
        tokens=[1, 65, 1025],
        heads=[(1, 3)],
        dims=[D128],
        chunk=[64],
        channels=[True],
        gate=['mixed', 'drop'],
        state=[F32],
    )
    + grid(tokens=[(0, 1, 0, 130)], dims=[D64, (256, 64)], chunk=[32], channels=[True], gate=['weak'], behind=[5])
)
BENCH = (
    grid(tokens=[32768], heads=[(16, 64), (16, 32)], dims=[D128], chunk=[64])
    + grid(tokens=[(4096,) * 8, (1024,) * 8], heads=[(16, 64)], dims=[D128], chunk=[64])
    + grid(tokens=[8192, 65536], heads=[(2, 8)], dims=[D128], chunk=[64])
    + grid(tokens=[(8001,) * 4], heads=[(24, 24)], dims=[D64], chunk=[64])
    + grid(tokens=[8192], heads=[(96, 96), (64, 64)], dims=[D128], chunk=[64], channels=[True])
)
BOUNDS = dict(
    rtol=1e-2,
    o=dict(rtol=2e-2, rms=5e-2),
    final_state=dict(rtol=2e-2, rms=5e-2),
    g_sum=dict(rtol=1e-5, atol=1e-5),
    inverse=dict(rtol=1e-2, atol=4e-3),
)


def _make(output_final_state: bool = False, **case: Any) -> dict:
    return random_delta(**case) | dict(output_final_state=output_final_state)


delta_rule.cases(make=_make, match=BOUNDS, smoke=SMOKE + PIECES, full=FULL, bench=BENCH, flops=delta_products)


def make_bwd(output_final_state: bool = False, **case: Any) -> dict:
    """Results and gradients beside the arguments; the results are those of the twin."""
    given = random_delta(**case)
    small = given['v'].numel() < 1 << 20
    chunks = 0
    if type(given['q']) is Tensor and (small or given['q'].is_cuda):
        forward = delta_rule.twin if small else delta_rule.call
        _, final, g_sum, inverse = forward(**given, output_final_state=output_final_state)
    else:  # a dry run
        packed, tokens = 'cu_seqlens' in given, given['q'].shape[1]
        number = given['cu_seqlens'].shape[0] - 1 if packed else given['q'].shape[0]
        chunk = given['chunk_size']
        chunks = count_chunks(tokens, number, chunk, packed)
        g_sum = given['g'] * 0.5
        dim, value_dim = given['q'].shape[-1], given['v'].shape[-1]
        final = torch.empty(number, given['v'].shape[2], *((value_dim, dim) if given['v_first'] else (dim, value_dim)))
        inverse = torch.eye(chunk).to(given['q'].dtype).expand(chunks, given['v'].shape[2], -1, -1).contiguous()
    dfinal = torch.randn(final.shape) if output_final_state and final is not None else None
    del given['g']
    do = torch.randn(given['v'].shape).to(given['v'].dtype)
    return dict(do=do, g_sum=g_sum, inverse=inverse, dfinal_state=dfinal, **given)


delta_rule_bwd.cases(
    make=make_bwd,
    match=dict(rtol=4e-2, rms=8e-2, atol=1e-5),
    smoke=SMOKE,
    full=FULL,
    bench=BENCH,
    flops=lambda do, g_sum, inverse, dfinal_state=None, **given: 3 * delta_products(**given),
)
