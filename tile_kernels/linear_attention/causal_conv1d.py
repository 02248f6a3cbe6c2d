"""Short causal convolution of every channel, for dense and packed sequences.

    a[t, c] = bias[c] + sum_j weight[c, j] * x[t - (taps - 1 - j), c]      earlier tokens: `initial_state`, else 0
    y[t, c] = a * sigmoid(a)                                               or a without an activation; in float32

    da[t, c]      = dy * s * (1 + a * (1 - s)),   s = sigmoid(a)
    dx[t, c]      = sum_j weight[c, j] * da[t + (taps - 1 - j), c]         inside the sequence
    dweight[c, j] = sum_t da[t, c] * x[t - (taps - 1 - j), c]
    dbias[c]      = sum_t da[t, c]

A lane owns neighboring channels and walks over tokens with the last `taps - 1` in registers. It loads several tokens
before it uses the first. Only steps with the start of a sequence test what a tap meets. Sequences are found on the
device. The gradient walks the same way. Each block writes a partial sum of the weight gradients; a second kernel adds
these in one order. Memory bound.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.core.launch import config_for, launch
from tile_kernels.core.op import op
from tile_kernels.engram._macros import FAST_EXP2, sigmoid_of
from tile_kernels.engram.grad_w_reduce import sum_of_partials
from tile_kernels.linear_attention._checks import (
    FLOATS,
    HALVES,
    check_cu_seqlens,
    check_vectors,
    lengths_int32,
    refuse_gradient,
)

MAX_TAPS = 8
PASS_CONFIGS = {'TL_DISABLE_SAFE_MEMORY_ACCESS': True, 'TL_ENABLE_LOWER_LDGSTG': True}


# Config -------------------------------------------------------------------------------------


def choose(*static: Any) -> dict:
    """16-byte accesses; more taps leave registers for fewer tokens."""
    return dict(width=8, ahead=8 if static[0] <= 4 else 4, steps=2, warps=4, resident=16)


def choose_bwd(*static: Any) -> dict:
    """Long walks of large tensors: few halos and few partial sums. Narrower accesses leave registers for the sums."""
    taps, size = static[0], static[-1]
    walk = 128 if size >= 1 << 27 else 64
    ahead = 8 if taps <= 4 else 4
    return dict(width=4, ahead=ahead, steps=walk // ahead, warps=4, resident=16)


# Kernels ------------------------------------------------------------------------------------


@macro
def place_tokens(cu_seqlens, first, num_sequences, bits, start_shared, sequence_shared):
    """Sequence of every token from `first` on, and where it starts; sequence N owns the tokens behind the last."""
    count, threads = start_shared.shape[0], T.get_thread_extent()
    thread = T.get_thread_binding()
    sequence = T.alloc_var(T.int32)
    for i in T.serial(T.ceildiv(count, threads)):
        sequence = 0
        for step in T.serial(bits):
            later = sequence + (1 << (bits - 1 - step))
            if later <= num_sequences:  # noqa: SIM102
                if cu_seqlens[T.min(later, num_sequences)] <= first + i * threads + thread:
                    sequence = later
        if i * threads + thread < count:
            start_shared[i * threads + thread] = cu_seqlens[sequence]
            sequence_shared[i * threads + thread] = sequence


@macro
def load_tokens(x, batch, token, last, slot, x_local):
    """Load channels of the tokens from `token` on; those outside of the tensor or behind `last` repeat another."""
    count, width = x_local.shape
    for i in T.unroll(count):
        row = T.alloc_var(T.int32)
        row = T.max(T.min(token + i, last), 0)
        for e in T.vectorized(width):
            x_local[i, e] = x[batch, row, slot * width + e]


@macro
def load_weights(weight, bias, slot, weight_local, bias_local, has_bias: bool):
    """Weights and bias of the channels of a thread."""
    width, taps = weight_local.shape
    flat = T.view(weight, (weight.shape[0] * taps,), weight.dtype)
    most = 16 // T.dtype(weight.dtype).itemsize
    piece = most if width * taps % most == 0 else width
    own = T.alloc_local((width * taps,), weight.dtype)
    for i in T.unroll(width * taps // piece):
        for e in T.vectorized(piece):
            own[i * piece + e] = flat[slot * width * taps + i * piece + e]
    for e in T.unroll(width):
        for j in T.unroll(taps):
            weight_local[e, j] = T.cast(own[e * taps + j], T.float32)
        bias_local[e] = T.cast(bias[slot * width + e], T.float32) if has_bias else T.float32(0.0)


@macro
def fill_window(x_local, state, i, token, start, sequence, slot, window, has_state: bool):
    """What the taps of a token meet, whose window starts at x_local[i]: tokens of its sequence, a state, or 0."""
    taps, width = window.shape
    for j in T.unroll(taps):
        for e in T.unroll(width):
            window[j, e] = x_local[i + j, e]
        at = token - (taps - 1) + j - start
        if at < 0:
            for e in T.unroll(width):
                window[j, e] = 0.0
                if has_state:
                    window[j, e] = T.cast(state[sequence, T.max(taps - 1 + at, 0), slot * width + e], T.float32)


def _x_type(batch: Any, tokens: Any, channels: Any, dtype: torch.dtype) -> Any:
    strides = [T.dynamic('x_stride0'), T.dynamic('x_stride1')]
    return T.StridedTensor((batch, tokens, channels), (*strides, 1), T.dtype(dtype)), strides


@kernel(
    choose=choose,
    space=dict(width=(4, 8), ahead=(4, 8), steps=(2, 4, 8), warps=(2, 4, 8), resident=(16, 20)),
    pass_configs=PASS_CONFIGS,
)
def causal_conv1d_kernel(
    taps: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    has_bias: bool,
    has_state: bool,
    packed: bool,
    silu: bool,
    *,
    width: int,
    ahead: int,
    steps: int,
    warps: int,
    resident: int,
):
    """A lane owns `width` channels and walks over `ahead * steps` tokens, `ahead` loads in flight."""
    batch_size, num_tokens, channels = T.dynamic('batch_size'), T.dynamic('num_tokens'), T.dynamic('channels')
    num_starts, num_states = T.dynamic('num_starts'), T.dynamic('num_states')
    elem, wide = T.dtype(dtype), T.dtype(weight_dtype)
    past = taps - 1
    walk = ahead * steps
    block = walk * warps
    x_type, x_strides = _x_type(batch_size, num_tokens, channels, dtype)

    @T.prim_func
    def causal_conv1d(
        x: x_type,
        weight: T.Tensor((channels, taps), wide),
        bias: T.Tensor((channels,), wide),
        state: T.Tensor((num_states, past, channels), elem),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        y: T.Tensor((batch_size, num_tokens, channels), elem),
        num_sequences: T.int32,
        bits: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(channels, width * WARP), T.ceildiv(num_tokens, block), batch_size, threads=warps * WARP
        ) as (pid, part, batch):
            T.import_source(FAST_EXP2)
            T.annotate_min_blocks_per_sm(resident // warps)
            T.assume(channels % 8 == 0)
            for stride in x_strides:
                T.assume(stride % 8 == 0)
            start_shared = T.alloc_shared((block if packed else 1,), T.int32)
            sequence_shared = T.alloc_shared((block if packed else 1,), T.int32)
            own = T.alloc_local((ahead, width), elem)
            before = T.alloc_local((past, width), elem)
            x_local = T.alloc_local((past + ahead, width), T.float32)
            window = T.alloc_local((taps, width), T.float32)
            weight_local = T.alloc_local((width, taps), T.float32)
            bias_local = T.alloc_local((width,), T.float32)
            y_local = T.alloc_local((width,), elem)
            a = T.alloc_var(T.float32)
            start = T.alloc_var(T.int32, init=0)
            sequence = T.alloc_var(T.int32, init=0)
            thread = T.get_thread_binding()
            slot, warp = pid * WARP + thread % WARP, thread // WARP
            first = part * block + warp * walk
            if packed:
                place_tokens(cu_seqlens, part * block, num_sequences, bits, start_shared, sequence_shared)
                T.sync_threads()
            if slot * width < channels:
                load_weights(weight, bias, slot, weight_local, bias_local, has_bias)
                load_tokens(x, batch, first - past, num_tokens - 1, slot, before)
                for i in T.unroll(past):
                    for e in T.unroll(width):
                        x_local[i, e] = T.cast(before[i, e], T.float32)
                for step in T.serial(steps):
                    token = first + step * ahead
                    if token < num_tokens:
                        load_tokens(x, batch, token, num_tokens - 1, slot, own)
                        for i in T.unroll(ahead):
                            for e in T.unroll(width):
                                x_local[past + i, e] = T.cast(own[i, e], T.float32)
                        if packed:
                            start = start_shared[warp * walk + step * ahead + ahead - 1]
                            sequence = sequence_shared[warp * walk + step * ahead + ahead - 1]
                        plain = T.And(token + ahead <= num_tokens, start <= token - past)
                        if T.And(plain, sequence < num_sequences):
                            for i in T.unroll(ahead):
                                for e in T.unroll(width):
                                    a = bias_local[e]
                                    for j in T.unroll(taps):
                                        a = a + weight_local[e, j] * x_local[i + j, e]
                                    if silu:
                                        a = a * sigmoid_of(a)
                                    y_local[e] = T.cast(a, elem)
                                for e in T.vectorized(width):
                                    y[batch, token + i, slot * width + e] = y_local[e]
                        else:
                            for i in T.unroll(ahead):
                                if token + i < num_tokens:
                                    if packed:
                                        start = start_shared[warp * walk + step * ahead + i]
                                        sequence = sequence_shared[warp * walk + step * ahead + i]
                                    else:
                                        sequence = batch
                                    for e in T.unroll(width):
                                        y_local[e] = T.cast(0.0, elem)
                                    if sequence < num_sequences:
                                        fill_window(
                                            x_local, state, i, token + i, start, sequence, slot, window, has_state
                                        )
                                        for e in T.unroll(width):
                                            a = bias_local[e]
                                            for j in T.unroll(taps):
                                                a = a + weight_local[e, j] * window[j, e]
                                            if silu:
                                                a = a * sigmoid_of(a)
                                            y_local[e] = T.cast(a, elem)
                                    for e in T.vectorized(width):
                                        y[batch, token + i, slot * width + e] = y_local[e]
                            start = 0
                            sequence = 0
                        for i in T.unroll(past):
                            for e in T.unroll(width):
                                x_local[i, e] = x_local[ahead + i, e]

    return causal_conv1d


@kernel(
    choose=choose_bwd,
    space=dict(width=(4, 8), ahead=(4, 8), steps=(8, 16, 32), warps=(2, 4), resident=(12, 16)),
    fixed='width ahead steps warps',
    pass_configs=PASS_CONFIGS,
)
def causal_conv1d_bwd_kernel(
    taps: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    has_bias: bool,
    has_state: bool,
    packed: bool,
    silu: bool,
    *,
    width: int,
    ahead: int,
    steps: int,
    warps: int,
    resident: int,
):
    """A lane walks as in the forward, and `taps - 1` tokens more: a token adds to dx of the tokens that it saw.

    `partial[part, j]` is the sum over the tokens of a block: gradients of the taps, and of the bias at the end.
    """
    batch_size, num_tokens, channels = T.dynamic('batch_size'), T.dynamic('num_tokens'), T.dynamic('channels')
    num_starts, num_states, num_parts = T.dynamic('num_starts'), T.dynamic('num_states'), T.dynamic('num_parts')
    elem, wide = T.dtype(dtype), T.dtype(weight_dtype)
    past = taps - 1
    walk = ahead * steps
    block, threads = walk * warps, warps * WARP
    placed = block + ahead if packed else 1
    x_type, x_strides = _x_type(batch_size, num_tokens, channels, dtype)

    @T.prim_func
    def causal_conv1d_bwd(
        dy: T.Tensor((batch_size, num_tokens, channels), elem),
        x: x_type,
        weight: T.Tensor((channels, taps), wide),
        bias: T.Tensor((channels,), wide),
        state: T.Tensor((num_states, past, channels), elem),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        dx: T.Tensor((batch_size, num_tokens, channels), elem),
        partial: T.Tensor((batch_size, num_parts, taps + 1, channels), T.float32),
        num_sequences: T.int32,
        bits: T.int32,
    ):
        with T.Kernel(T.ceildiv(channels, width * WARP), num_parts, batch_size, threads=threads) as (
            pid,
            part,
            batch,
        ):
            T.import_source(FAST_EXP2)
            T.annotate_min_blocks_per_sm(resident // warps)
            T.assume(channels % 8 == 0)
            for stride in x_strides:
                T.assume(stride % 8 == 0)
            start_shared = T.alloc_shared((placed,), T.int32)
            sequence_shared = T.alloc_shared((placed,), T.int32)
            sums_shared = T.alloc_shared((warps, taps + 1, WARP * width), T.float32)
            own = T.alloc_local((ahead, width), elem)
            dy_local = T.alloc_local((ahead, width), elem)
            before = T.alloc_local((past, width), elem)
            x_local = T.alloc_local((past + ahead, width), T.float32)
            dx_local = T.alloc_local((past + ahead, width), T.float32)
            window = T.alloc_local((taps, width), T.float32)
            weight_local = T.alloc_local((width, taps), T.float32)
            bias_local = T.alloc_local((width,), T.float32)
            sums = T.alloc_local((taps + 1, width), T.float32)
            dx_own = T.alloc_local((width,), elem)
            a = T.alloc_var(T.float32)
            s = T.alloc_var(T.float32)
            da = T.alloc_var(T.float32)
            start = T.alloc_var(T.int32, init=0)
            sequence = T.alloc_var(T.int32, init=0)
            thread = T.get_thread_binding()
            lane, warp = thread % WARP, thread // WARP
            slot = pid * WARP + lane
            first = part * block + warp * walk
            last = first + walk
            if packed:
                place_tokens(cu_seqlens, part * block, num_sequences, bits, start_shared, sequence_shared)
                T.sync_threads()
            T.clear(sums)
            T.clear(dx_local)
            if slot * width < channels:
                load_weights(weight, bias, slot, weight_local, bias_local, has_bias)
                load_tokens(x, batch, first - past, num_tokens - 1, slot, before)
                for i in T.unroll(past):
                    for e in T.unroll(width):
                        x_local[i, e] = T.cast(before[i, e], T.float32)
                for step in T.serial(steps + 1):
                    token = first + step * ahead
                    if token < num_tokens + past:
                        load_tokens(x, batch, token, T.min(num_tokens, last + past) - 1, slot, own)
                        load_tokens(dy, batch, token, T.min(num_tokens, last + past) - 1, slot, dy_local)
                        for i in T.unroll(ahead):
                            for e in T.unroll(width):
                                x_local[past + i, e] = T.cast(own[i, e], T.float32)
                        if packed:
                            start = start_shared[warp * walk + step * ahead + ahead - 1]
                            sequence = sequence_shared[warp * walk + step * ahead + ahead - 1]
                        plain = T.And(token + ahead <= T.min(num_tokens, last), start <= token - past)
                        if T.And(plain, sequence < num_sequences):
                            for i in T.unroll(ahead):
                                for e in T.unroll(width):
                                    da = T.cast(dy_local[i, e], T.float32)
                                    if silu:
                                        a = bias_local[e]
                                        for j in T.unroll(taps):
                                            a = a + weight_local[e, j] * x_local[i + j, e]
                                        s = sigmoid_of(a)
                                        da = da * (s + a * (s - s * s))
                                    for j in T.unroll(taps):
                                        sums[j, e] = sums[j, e] + da * x_local[i + j, e]
                                        dx_local[i + j, e] = dx_local[i + j, e] + da * weight_local[e, j]
                                    sums[taps, e] = sums[taps, e] + da
                                if token + i - past >= first:
                                    for e in T.unroll(width):
                                        dx_own[e] = T.cast(dx_local[i, e], elem)
                                    for e in T.vectorized(width):
                                        dx[batch, token + i - past, slot * width + e] = dx_own[e]
                        else:
                            for i in T.unroll(ahead):
                                if token + i < last + past:
                                    if packed:
                                        start = start_shared[warp * walk + step * ahead + i]
                                        sequence = sequence_shared[warp * walk + step * ahead + i]
                                    else:
                                        sequence = batch
                                    if T.And(token + i < num_tokens, sequence < num_sequences):
                                        fill_window(
                                            x_local, state, i, token + i, start, sequence, slot, window, has_state
                                        )
                                        for e in T.unroll(width):
                                            da = T.cast(dy_local[i, e], T.float32)
                                            if silu:
                                                a = bias_local[e]
                                                for j in T.unroll(taps):
                                                    a = a + weight_local[e, j] * window[j, e]
                                                s = sigmoid_of(a)
                                                da = da * (s + a * (s - s * s))
                                            if token + i < last:
                                                for j in T.unroll(taps):
                                                    sums[j, e] = sums[j, e] + da * window[j, e]
                                                sums[taps, e] = sums[taps, e] + da
                                            for j in T.unroll(taps):
                                                if token + i - past + j >= start:
                                                    dx_local[i + j, e] = dx_local[i + j, e] + da * weight_local[e, j]
                                    if T.And(token + i - past >= first, token + i - past < num_tokens):
                                        for e in T.unroll(width):
                                            dx_own[e] = T.cast(dx_local[i, e], elem)
                                        for e in T.vectorized(width):
                                            dx[batch, token + i - past, slot * width + e] = dx_own[e]
                            start = 0
                            sequence = 0
                        for i in T.unroll(past):
                            for e in T.unroll(width):
                                x_local[i, e] = x_local[ahead + i, e]
                                dx_local[i, e] = dx_local[ahead + i, e]
                        for i in T.unroll(ahead):
                            for e in T.unroll(width):
                                dx_local[past + i, e] = 0.0
            for j in T.unroll(taps + 1):
                for e in T.vectorized(width):
                    sums_shared[warp, j, lane * width + e] = sums[j, e]
            T.sync_threads()
            for j in T.unroll(taps + 1):
                for e in T.unroll(width * WARP // threads):
                    column = e * threads + thread
                    if pid * WARP * width + column < channels:
                        a = sums_shared[0, j, column]
                        for w in T.unroll(warps - 1):
                            a = a + sums_shared[w + 1, j, column]
                        partial[batch, part, j, pid * WARP * width + column] = a

    return causal_conv1d_bwd


@kernel(pass_configs=PASS_CONFIGS)
def causal_conv1d_state_kernel(taps: int, dtype: torch.dtype, has_state: bool, packed: bool):
    """The last taps - 1 tokens of every sequence."""
    batch_size, num_tokens, channels = T.dynamic('batch_size'), T.dynamic('num_tokens'), T.dynamic('channels')
    num_starts, num_sequences = T.dynamic('num_starts'), T.dynamic('num_sequences')
    elem, past, threads = T.dtype(dtype), taps - 1, 128
    x_type, x_strides = _x_type(batch_size, num_tokens, channels, dtype)

    @T.prim_func
    def causal_conv1d_state(
        x: x_type,
        state: T.Tensor((num_sequences, past, channels), elem),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        final_state: T.Tensor((num_sequences, past, channels), elem),
    ):
        with T.Kernel(T.ceildiv(channels, threads), past, num_sequences, threads=threads) as (pid, r, sequence):
            for stride in x_strides:
                T.assume(stride % 8 == 0)
            start = T.alloc_var(T.int32, init=0)
            length = T.alloc_var(T.int32, init=0)
            batch = T.alloc_var(T.int32, init=0)
            number = T.alloc_var(elem)
            if packed:
                start = T.min(cu_seqlens[sequence], num_tokens)
                length = T.min(cu_seqlens[sequence + 1], num_tokens) - start
            else:
                batch = sequence
                length = num_tokens
            column = pid * threads + T.get_thread_binding()
            if column < channels:
                at = length - past + r
                number = T.cast(0.0, elem)
                if at >= 0:
                    number = x[batch, start + at, column]  # type: ignore[index]
                elif has_state:
                    number = state[sequence, past + at, column]
                final_state[sequence, r, column] = number

    return causal_conv1d_state


# Ops ----------------------------------------------------------------------------------------


def check_weights(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> int:
    """Check weights and activation; returns the number of taps."""
    channels = x.shape[-1]
    _, taps = check.shape(weight, 'weight', 'channels taps', dtype=FLOATS, channels=channels)
    check.packed(bias, 'bias', 'channels', weight.dtype, channels=channels)
    check.contiguous(weight, 'weight')
    check.multiple(channels, 8, 'channels')
    if taps < 2 or taps > MAX_TAPS:
        check.fail('taps', f'must be 2 to {MAX_TAPS}', str(taps))
    if activation not in (None, 'silu', 'swish'):
        check.fail('activation', "must be 'silu' or None", repr(activation))
    check_vectors(x=x, weight=weight.view(-1))
    if bias is not None:
        check_vectors(bias=bias)
    check.same_device(x=x, weight=weight, bias=bias)
    return taps


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str | None,
) -> tuple[tuple, int]:
    """Check the arguments of both directions; returns the static arguments and the number of sequences."""
    *_, channels = check.shape(x, 'x', 'batch tokens channels', dtype=HALVES)
    taps = check_weights(x, weight, bias, activation)
    number = check_cu_seqlens(cu_seqlens, x)
    spec = dict(sequences=number, past=taps - 1, channels=channels)
    check.packed(initial_state, 'initial_state', 'sequences past channels', x.dtype, **spec)
    check.same_device(x=x, initial_state=initial_state)
    packed, has_state = cu_seqlens is not None, initial_state is not None
    static = (taps, x.dtype, weight.dtype, bias is not None, has_state, packed, activation is not None)
    return static, number


def _bits(number: int) -> int:
    return number.bit_length() if isinstance(number, int) else 0


@op(outputs='dx dweight dbias')
def causal_conv1d_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = 'silu',
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `causal_conv1d`; equal bits in every run.

    Args:
        dy: gradient of y, contiguous.
        x: as in `causal_conv1d`, as all that follows.
        weight: as there.
        bias: as there.
        initial_state: as there; it has no gradient.
        cu_seqlens: as there.
        activation: as there.

    Returns:
        Gradients of x, weight and bias; that of a bias that is None has extent 0.
    """
    static, number = _check(x, weight, bias, initial_state, cu_seqlens, activation)
    check.packed(
        dy, 'dy', 'batch tokens channels', x.dtype, **dict(zip(('batch', 'tokens', 'channels'), x.shape, strict=True))
    )
    check.same_device(x=x, dy=dy)
    batch, tokens, channels = x.shape
    taps = static[0]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        sums = torch.zeros(taps + 1, channels, dtype=torch.float32, device=x.device)
    else:
        config = config_for(causal_conv1d_bwd_kernel, static, x.numel(), x)
        parts = -(-tokens // (config['ahead'] * config['steps'] * config['warps']))
        partial = torch.empty(batch, parts, taps + 1, channels, dtype=torch.float32, device=x.device)
        operands = (dy, x, weight, bias, initial_state, cu_seqlens, dx, partial)
        launch(causal_conv1d_bwd_kernel, static, *operands, number, _bits(number), size=x.numel())
        sums = sum_of_partials(partial.view(batch * parts, taps + 1, channels))
    dbias = sums[taps] if bias is not None else sums[:0, 0]
    return dx, torch.empty_like(weight).copy_(sums[:taps].t()), dbias.to(weight.dtype, copy=True)


@op(outputs='y final_state', backward=causal_conv1d_bwd)
def _causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = 'silu',
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """The convolution; see the public function."""
    static, number = _check(x, weight, bias, initial_state, cu_seqlens, activation)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    operands = (x, weight, bias, initial_state, cu_seqlens, y, number, _bits(number))
    launch(causal_conv1d_kernel, static, *operands, size=x.numel())
    final = torch.empty(
        (number if output_final_state else 0, static[0] - 1, x.shape[2]), dtype=x.dtype, device=x.device
    )
    if output_final_state:
        which = (static[0], x.dtype, static[4], static[5])
        if x.numel() == 0:  # a slice without tokens may have strides that the kernel does not take
            x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        launch(causal_conv1d_state_kernel, which, x, initial_state, cu_seqlens, final, size=final.numel())
    return y, final


@_causal_conv1d.public
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = 'silu',
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Convolve every channel with its last tokens, differentiable in x, weight and bias.

    Args:
        x: (batch, tokens, channels) bfloat16 or float16; channels a multiple of 8, strides multiples of 16 bytes.
        weight: (channels, taps), 2 to 8 taps, the last for the token itself; float32, bfloat16 or float16.
        bias: (channels,) of the dtype of weight.
        activation: 'silu' (or 'swish'), or None.
        initial_state: (sequences, taps - 1, channels) of the dtype of x: the tokens before the first. No gradient.
        output_final_state: also return the last taps - 1 tokens of every sequence.
        cu_seqlens: (sequences + 1,) int32 or int64: where packed sequences start and the last ends; batch is then 1.

    Returns:
        y like x, contiguous, and the state or None. Tokens behind the last sequence give 0.
    """
    refuse_gradient(initial_state=initial_state)
    (x,) = autocast(x)
    starts = lengths_int32(cu_seqlens, 'cu_seqlens')
    y, final = causal_conv1d.call(x, weight, bias, initial_state, starts, activation, output_final_state)
    return y, final if output_final_state else None


# Cases --------------------------------------------------------------------------------------

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def random_convolution(
    tokens: Any,
    channels: int,
    taps: int = 4,
    batch: int = 1,
    dtype: torch.dtype = BF16,
    weights: torch.dtype = F32,
    bias: bool = False,
    state: bool = False,
    activation: str | None = 'silu',
    behind: int = 0,
    sliced: bool = False,
) -> dict:
    """Arguments of both directions; `tokens` are the lengths of packed sequences if a tuple."""
    packed = isinstance(tokens, tuple)
    number = len(tokens) if packed else batch
    total = sum(tokens) + behind if packed else tokens
    x = torch.randn(batch, total, channels + (16 if sliced else 0)).to(dtype)
    if sliced:
        x = x[..., 8:-8]
    if behind:
        x[:, -behind:] = math.nan
    return dict(
        x=x,
        weight=torch.randn(channels, taps).to(weights),
        bias=torch.randn(channels).to(weights) if bias else None,
        initial_state=torch.randn(number, taps - 1, channels).to(dtype) if state else None,
        cu_seqlens=torch.tensor([0, *tokens]).cumsum(0).int() if packed else None,
        activation=activation,
    )


SMOKE = (
    grid(tokens=[0, 1, 37], channels=[16], batch=[2], output_final_state=[True])
    + grid(tokens=[5], channels=[136], taps=[3], dtype=[F16], weights=[F16], bias=[True], activation=[None])
    + grid(tokens=[(0, 1, 0, 33, 2)], channels=[8], weights=[BF16], bias=[True], state=[True], behind=[3])
    + grid(tokens=[(2, 40)], channels=[24], taps=[8], state=[True], sliced=[True], output_final_state=[True])
    + grid(tokens=[()], channels=[8], behind=[3])
)
FULL = grid(tokens=[4001], channels=[576, 8192], taps=[2, 4], batch=[1, 3], bias=[True]) + grid(
    tokens=[tuple(range(1, 200))], channels=[256], state=[True], output_final_state=[True]
)
BENCH = grid(tokens=[8192, 32768], channels=[8192], weights=[BF16]) + grid(tokens=[(8001,) * 4], channels=[12288])
STATE = grid(tokens=[8192], channels=[8192], output_final_state=[True])
BOUNDS = dict(rtol=1e-2, atol=1e-2)


def _make_forward(output_final_state: bool = False, **case: Any) -> dict:
    return random_convolution(**case) | dict(output_final_state=output_final_state)


def _make_bwd(output_final_state: bool = False, **case: Any) -> dict:
    made = random_convolution(**case)
    return dict(dy=torch.randn(made['x'].shape).to(made['x'].dtype), **made)


causal_conv1d.cases(make=_make_forward, match=BOUNDS, smoke=SMOKE, full=FULL, bench=BENCH + STATE)
causal_conv1d_bwd.cases(make=_make_bwd, match=BOUNDS, smoke=SMOKE, full=FULL, bench=BENCH)
