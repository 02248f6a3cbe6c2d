"""Short convolution: each channel looks a few tokens back, and what it sees goes through SiLU.

    a[b, t, c] = sum_j weight[c, j] * x[b, t - (taps - 1 - j) * dilation, c]         0 before the sequence starts
    y[b, t, c] = a * sigmoid(a)                                                       in float32, rounded once

    da[b, t, c]      = dy * s * (1 + a * (1 - s)),   s = sigmoid(a)
    dx[b, t, c]      = sum_j weight[c, j] * da[b, t + (taps - 1 - j) * dilation, c]
    dweight[c, j]    = sum_bt da[b, t, c] * x[b, t - (taps - 1 - j) * dilation, c]

A thread owns a few neighbouring channels of a run of tokens and walks along them with the last tokens in registers, so
x is read once but for the tokens before a run. Gradients are found on the same walk, those of x `reach` tokens late;
the sums over tokens are partial sums per run, added up in a fixed order. Memory bound.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.engram._rows import SLOT
from tile_kernels.engram.sum_partials import sum_of_partials

#: Tokens of a run of the gradient; the sums over tokens come in so many pieces.
RUN_BWD = 128

#: Channels of a thread of the gradient, which holds more of each.
SLOT_BWD = 4

MAX_TAPS, MAX_REACH = 8, 32

PASS_CONFIGS = {'TL_DISABLE_SAFE_MEMORY_ACCESS': True, 'TL_ENABLE_LOWER_LDGSTG': True}

# Config -------------------------------------------------------------------------------------


def choose(channels: int, taps: int, dilation: int, size: int) -> dict:
    """Long runs re-read less, short ones fill the GPU when there are few tokens; small blocks waste few registers."""
    return dict(run=64 if size * channels >= 2**24 else 16, chunk=8, num_threads=64)


# Kernels ------------------------------------------------------------------------------------


@macro
def load_tokens(x, batch, first, count, slot, at, x_local):
    """Read channels of tokens first .. first + count - 1 to x_local[at ..]; what is outside the sequence stays."""
    width = x_local.shape[1]
    for i in T.unroll(count):
        if first + i >= 0 and first + i < x.shape[1]:
            for e in T.vectorized(width):
                x_local[at + i, e] = x[batch, first + i, slot * width + e]


@macro
def load_taps(weight, slot, weight_local):
    """Weights of the channels of a thread, `weight_local[taps, width]`."""
    taps, width = weight_local.shape
    for e in T.unroll(width):
        for j in T.unroll(taps):
            weight_local[j, e] = weight[slot * width + e, j]


@macro
def convolve(x_local, weight_local, at, dilation, a_local):
    """Sum over the taps of the token in x_local[at]."""
    taps, width = weight_local.shape
    for e in T.unroll(width):
        a_local[e] = T.float32(0.0)
        for j in T.unroll(taps):
            a_local[e] = a_local[e] + weight_local[j, e] * T.cast(x_local[at - (taps - 1 - j) * dilation, e], T.float32)


@macro
def sigmoid_of(a):
    """1 / (1 + exp(-a)), to two units in the last place: an exact division would cost more than the memory."""
    return T.fast_rcp(T.float32(1.0) + T.exp(-a))


@macro
def forget(x_local, count):
    """Move on by `count` tokens."""
    for i in T.unroll(x_local.shape[0] - count):
        for e in T.unroll(x_local.shape[1]):
            x_local[i, e] = x_local[i + count, e]


@kernel(
    choose=choose,
    space=dict(run=(16, 32, 64, 128), chunk=(4, 8), num_threads=(64, 128)),
    pass_configs=PASS_CONFIGS,
)
def short_conv_kernel(channels: int, taps: int, dilation: int, *, run: int, chunk: int, num_threads: int):
    """`chunk` tokens are read at a time."""
    reach = (taps - 1) * dilation
    batch_size, num_tokens = T.dynamic('batch_size'), T.dynamic('num_tokens')

    @T.prim_func
    def short_conv(
        x: T.Tensor((batch_size, num_tokens, channels), T.bfloat16),
        weight: T.Tensor((channels, taps), T.float32),
        y: T.Tensor((batch_size, num_tokens, channels), T.bfloat16),
    ):
        with T.Kernel(
            T.ceildiv(channels // SLOT, num_threads), T.ceildiv(num_tokens, run), batch_size, threads=num_threads
        ) as (pid, part, batch):
            x_local = T.alloc_local((reach + chunk, SLOT), T.bfloat16)
            y_local = T.alloc_local((SLOT,), T.bfloat16)
            weight_local = T.alloc_local((taps, SLOT), T.float32)
            a_local = T.alloc_local((SLOT,), T.float32)
            slot = pid * num_threads + T.get_thread_binding()
            first = part * run

            if slot < channels // SLOT:
                T.clear(x_local)
                load_taps(weight, slot, weight_local)
                load_tokens(x, batch, first - reach, reach, slot, 0, x_local)
                for step in T.serial(T.ceildiv(T.min(run, num_tokens - first), chunk)):
                    load_tokens(x, batch, first + step * chunk, chunk, slot, reach, x_local)
                    for i in T.unroll(chunk):
                        convolve(x_local, weight_local, reach + i, dilation, a_local)
                        for e in T.vectorized(SLOT):
                            y_local[e] = T.cast(a_local[e] * sigmoid_of(a_local[e]), T.bfloat16)
                        if first + step * chunk + i < num_tokens:
                            for e in T.vectorized(SLOT):
                                y[batch, first + step * chunk + i, slot * SLOT + e] = y_local[e]
                    forget(x_local, chunk)

    return short_conv


@kernel(
    choose=lambda *static: dict(chunk=8, num_threads=64),
    space=dict(chunk=(4, 8), num_threads=(64, 128)),
    pass_configs=PASS_CONFIGS,
)
def short_conv_bwd_kernel(channels: int, taps: int, dilation: int, *, chunk: int, num_threads: int):
    """`dweight_partial[batch, part]` holds the sums over the tokens of a run of a sequence."""
    reach = (taps - 1) * dilation
    batch_size, num_tokens, num_runs = T.dynamic('batch_size'), T.dynamic('num_tokens'), T.dynamic('num_runs')

    @T.prim_func
    def short_conv_bwd(
        dy: T.Tensor((batch_size, num_tokens, channels), T.bfloat16),
        x: T.Tensor((batch_size, num_tokens, channels), T.bfloat16),
        weight: T.Tensor((channels, taps), T.float32),
        dx: T.Tensor((batch_size, num_tokens, channels), T.bfloat16),
        dweight_partial: T.Tensor((batch_size, num_runs, channels, taps), T.float32),
    ):
        with T.Kernel(T.ceildiv(channels // SLOT_BWD, num_threads), num_runs, batch_size, threads=num_threads) as (
            pid,
            part,
            batch,
        ):
            x_local = T.alloc_local((reach + chunk, SLOT_BWD), T.bfloat16)
            dy_local = T.alloc_local((chunk, SLOT_BWD), T.bfloat16)
            da_local = T.alloc_local((reach + chunk, SLOT_BWD), T.float32)
            dx_local = T.alloc_local((SLOT_BWD,), T.float32)
            rounded = T.alloc_local((SLOT_BWD,), T.bfloat16)
            weight_local = T.alloc_local((taps, SLOT_BWD), T.float32)
            dweight_local = T.alloc_local((taps, SLOT_BWD), T.float32)
            a_local = T.alloc_local((SLOT_BWD,), T.float32)
            sigmoid = T.alloc_var(T.float32)
            slot = pid * num_threads + T.get_thread_binding()
            first = part * RUN_BWD
            last = T.min(first + RUN_BWD, num_tokens)

            if slot < channels // SLOT_BWD:
                T.clear(x_local)
                T.clear(da_local)
                T.clear(dweight_local)
                load_taps(weight, slot, weight_local)
                load_tokens(x, batch, first - reach, reach, slot, 0, x_local)
                for step in T.serial(T.ceildiv(last - first + reach, chunk)):
                    token = first + step * chunk
                    T.clear(dy_local)
                    load_tokens(x, batch, token, chunk, slot, reach, x_local)
                    load_tokens(dy, batch, token, chunk, slot, 0, dy_local)
                    for i in T.unroll(chunk):
                        convolve(x_local, weight_local, reach + i, dilation, a_local)
                        for e in T.unroll(SLOT_BWD):
                            sigmoid = sigmoid_of(a_local[e])
                            da_local[reach + i, e] = (
                                T.cast(dy_local[i, e], T.float32)
                                * sigmoid
                                * (T.float32(1.0) + a_local[e] * (T.float32(1.0) - sigmoid))
                            )
                        if token + i < last:
                            for e in T.unroll(SLOT_BWD):
                                for j in T.unroll(taps):
                                    dweight_local[j, e] = dweight_local[j, e] + da_local[reach + i, e] * T.cast(
                                        x_local[reach + i - (taps - 1 - j) * dilation, e], T.float32
                                    )
                        for e in T.unroll(SLOT_BWD):
                            dx_local[e] = T.float32(0.0)
                            for j in T.unroll(taps):
                                dx_local[e] = (
                                    dx_local[e] + weight_local[j, e] * da_local[i + (taps - 1 - j) * dilation, e]
                                )
                        for e in T.vectorized(SLOT_BWD):
                            rounded[e] = T.cast(dx_local[e], T.bfloat16)
                        if token + i - reach >= first and token + i - reach < last:
                            for e in T.vectorized(SLOT_BWD):
                                dx[batch, token + i - reach, slot * SLOT_BWD + e] = rounded[e]
                    forget(x_local, chunk)
                    forget(da_local, chunk)
                for e in T.unroll(SLOT_BWD):
                    for j in T.unroll(taps):
                        dweight_partial[batch, part, slot * SLOT_BWD + e, j] = dweight_local[j, e]

    return short_conv_bwd


# Ops ----------------------------------------------------------------------------------------


def _check(x: Tensor, weight: Tensor, dilation: int) -> tuple[int, int, int, int]:
    """Check what both directions share; returns batch_size, num_tokens, channels, taps."""
    batch_size, num_tokens, channels = check.shape(x, 'x', 'batch num_tokens channels', dtype=torch.bfloat16)
    _, taps = check.shape(weight, 'weight', 'channels taps', dtype=torch.float32, channels=channels)
    check.multiple(channels, SLOT, 'channels')
    check.at_least(channels, SLOT, 'channels')
    check.at_least(taps, 1, 'taps')
    check.at_most(taps, MAX_TAPS, 'taps')
    check.at_least(dilation, 1, 'dilation')
    check.at_most((taps - 1) * dilation, MAX_REACH, '(taps - 1) * dilation')
    check.contiguous(x, 'x')
    check.contiguous(weight, 'weight')
    check.same_device(x=x, weight=weight)
    check.equal(check.vector_bytes(x), 16, 'alignment of x')
    return batch_size, num_tokens, channels, taps


@op(outputs='dx dweight')
def short_conv_bwd(dy: Tensor, x: Tensor, weight: Tensor, dilation: int = 1) -> tuple[Tensor, Tensor]:
    """Gradients of `short_conv`.

    Args:
        dy: (batch, num_tokens, channels) bfloat16, contiguous.
        x: (batch, num_tokens, channels) bfloat16, contiguous.
        weight: (channels, taps) float32, contiguous.
        dilation: that of the forward op.

    Returns:
        Gradients of x and weight, both deterministic.
    """
    batch_size, num_tokens, channels, taps = _check(x, weight, dilation)
    known = {'batch': batch_size, 'num_tokens': num_tokens, 'channels': channels}
    check.shape(dy, 'dy', 'batch num_tokens channels', dtype=torch.bfloat16, **known)
    check.contiguous(dy, 'dy')
    check.same_device(x=x, dy=dy)
    check.equal(check.vector_bytes(dy), 16, 'alignment of dy')
    dx = torch.empty_like(x)
    num_runs = -(-num_tokens // RUN_BWD)
    partial = weight.new_empty(batch_size, num_runs, channels, taps)
    size = batch_size * num_tokens
    launch(short_conv_bwd_kernel, (channels, taps, dilation), dy, x, weight, dx, partial, size=size)
    return dx, sum_of_partials(partial.view(batch_size * num_runs, channels, taps))


@op(outputs='y', backward=short_conv_bwd)
def short_conv(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """Causal convolution of each channel with its own taps, then SiLU.

    Args:
        x: (batch, num_tokens, channels) bfloat16, contiguous; channels a multiple of 8.
        weight: (channels, taps) float32, contiguous; the last tap meets the token itself. Up to 8 taps.
        dilation: tokens between taps; taps reach at most 32 tokens back.

    Returns:
        (batch, num_tokens, channels) bfloat16.
    """
    batch_size, num_tokens, channels, taps = _check(x, weight, dilation)
    y = torch.empty_like(x)
    launch(short_conv_kernel, (channels, taps, dilation), x, weight, y, size=batch_size * num_tokens)
    return y


# Cases --------------------------------------------------------------------------------------


def _make(batch: int, num_tokens: int, channels: int, taps: int = 4, dilation: int = 3) -> dict:
    return dict(
        x=torch.randn(batch, num_tokens, channels, dtype=torch.bfloat16),
        weight=torch.randn(channels, taps) * taps**-0.5,
        dilation=dilation,
    )


def _make_bwd(**case) -> dict:
    made = _make(**case)
    return made | dict(dy=torch.randn_like(made['x']))


SMOKE = (
    grid(batch=[2], num_tokens=[0, 1, 37], channels=[64])
    + grid(batch=[2], num_tokens=[150], channels=[8], taps=[3], dilation=[4])  # several runs
    + grid(batch=[1], num_tokens=[5], channels=[24], taps=[1], dilation=[1])
)
FULL = grid(batch=[1, 3], num_tokens=[4001], channels=[576, 8192], taps=[4], dilation=[1, 3])
BENCH = grid(batch=[1], num_tokens=[64, 4096], channels=[16384]) + grid(batch=[2], num_tokens=[2001], channels=[28672])
BOUNDS = dict(rtol=1e-4, atol=1e-4)

short_conv.cases(make=_make, match=BOUNDS, smoke=SMOKE, full=FULL, bench=BENCH)
short_conv_bwd.cases(make=_make_bwd, match=BOUNDS, smoke=SMOKE, full=FULL, bench=BENCH)
