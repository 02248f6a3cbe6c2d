"""Short convolution: each channel is convolved with a few previous tokens, followed by SiLU.

    a[b, t, c] = sum_j weight[c, j] * x[b, t - (taps - 1 - j) * dilation, c]         0 before the sequence starts
    y[b, t, c] = a * sigmoid(a)                                                       in float32, rounded once

    da[b, t, c]      = dy * s * (1 + a * (1 - s)),   s = sigmoid(a)
    dx[b, t, c]      = sum_j weight[c, j] * da[b, t + (taps - 1 - j) * dilation, c]
    dweight[c, j]    = sum_bt da[b, t, c] * x[b, t - (taps - 1 - j) * dilation, c]

Tokens that are `dilation` apart form a chain, called a walk. A warp processes `length` tokens of a walk, and each lane
`width` neighbouring channels. Of earlier tokens it needs only the last taps - 1, which stay in registers. It prefetches
the next tokens while it computes. The gradient uses the same walks; the gradient of x follows taps - 1 steps later.
Each block adds the weight gradients of its walks into a partial sum, and a second kernel adds these in a fixed order.
Memory bound.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro, resident_blocks
from tile_kernels.core.launch import config_for, launch
from tile_kernels.core.op import op
from tile_kernels.engram._macros import FAST_EXP2, SLOT, sigmoid_of
from tile_kernels.engram.grad_w_reduce import sum_of_partials

MAX_TAPS, MAX_REACH = 8, 32


PASS_CONFIGS = {
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    'TL_ENABLE_LOWER_LDGSTG': True,
}


def choose(channels: int, taps: int, dilation: int, size: int) -> dict:
    """Long walks re-read less, short ones fill the GPU for few tokens; more taps need more registers."""
    resident_threads = 1024 if taps <= 4 else 768 if taps == 5 else 512
    length = 64 if size * channels >= 2**24 else 4
    return dict(width=4, chunk=4, length=length, warps=4, resident_threads=resident_threads)


def choose_bwd(channels: int, taps: int, dilation: int, size: int) -> dict:
    """Like `choose`; a thread holds more values per channel."""
    length = 64 if size * channels >= 2**24 else 8
    return dict(width=4, chunk=4, length=length, warps=4, resident_threads=512 if taps <= 4 else 256)


SPACE = dict(
    width=(4, 8),
    chunk=(4, 8),
    length=(4, 8, 16, 32, 64, 128),
    warps=(4, 8),
    resident_threads=(256, 384, 512, 640, 768, 1024),
)


def num_walks(num_tokens: int, dilation: int, length: int) -> int:
    """The number of walks of a sequence."""
    return -(-num_tokens // (dilation * length)) * dilation


@macro
def load_tokens(x, batch, first, dilation, slot, x_local):
    """Load channels of tokens first, first + dilation, ...; zeros outside the sequence."""
    count, width = x_local.shape
    T.clear(x_local)
    if slot < x.shape[2] // width:
        for i in T.unroll(count):
            if first + i * dilation >= 0 and first + i * dilation < x.shape[1]:
                for e in T.vectorized(width):
                    x_local[i, e] = x[batch, first + i * dilation, slot * width + e]


@macro
def widen(x_local, at, seen):
    """Copy tokens into the window as float32."""
    count, width = x_local.shape
    pairs = T.view(x_local, (count, width // 2), T.uint32)
    for i in T.unroll(count):
        for e in T.unroll(width // 2):  # a bfloat16 is the upper half of its float32
            seen[at + i, 2 * e] = T.reinterpret(pairs[i, e] << T.uint32(16), T.float32)
            seen[at + i, 2 * e + 1] = T.reinterpret(pairs[i, e] & T.uint32(0xFFFF0000), T.float32)


@macro
def load_taps(weight, slot, weight_local):
    """Load the weights of a thread's channels, `weight_local[width * taps]`, channel by channel."""
    count = weight_local.shape[0]
    T.clear(weight_local)
    if slot < weight.shape[0] // count:
        for p in T.unroll(count // 4):
            for e in T.vectorized(4):
                weight_local[p * 4 + e] = weight[slot * count + p * 4 + e]


@macro
def convolve(seen, weight_local, at, a_local):
    """Sum over the taps; the first tap is multiplied with seen[at]."""
    width = a_local.shape[0]
    taps = weight_local.shape[0] // width
    for e in T.unroll(width):
        a_local[e] = weight_local[e * taps] * seen[at, e]
        for j in T.unroll(taps - 1):
            a_local[e] = a_local[e] + weight_local[e * taps + j + 1] * seen[at + j + 1, e]


@macro
def forget(seen, count):
    """Shift the window by `count` tokens."""
    for i in T.unroll(seen.shape[0] - count):
        for e in T.unroll(seen.shape[1]):
            seen[i, e] = seen[i + count, e]


@kernel(choose=choose, space=SPACE, pass_configs=PASS_CONFIGS)
def short_conv_kernel(
    channels: int, taps: int, dilation: int, *, width: int, chunk: int, length: int, warps: int, resident_threads: int
):
    """A thread loads `chunk` tokens of a walk at a time."""
    past = taps - 1
    batch_size, num_tokens = T.dynamic('batch_size'), T.dynamic('num_tokens')

    @T.prim_func
    def short_conv(
        x: T.Tensor((batch_size, num_tokens, channels), T.bfloat16),
        weight: T.Tensor((channels * taps,), T.float32),
        y: T.Tensor((batch_size, num_tokens, channels), T.bfloat16),
    ):
        walks = T.ceildiv(num_tokens, dilation * length) * dilation
        with T.Kernel(
            T.ceildiv(channels // width, WARP), T.ceildiv(walks, warps), batch_size, threads=warps * WARP
        ) as (pid, part, batch):
            T.import_source(FAST_EXP2)
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, warps * WARP))
            past_local = T.alloc_local((max(past, 1), width), T.bfloat16)
            next_local = T.alloc_local((chunk, width), T.bfloat16)
            seen = T.alloc_local((past + chunk, width), T.float32)
            weight_local = T.alloc_local((width * taps,), T.float32)
            a_local = T.alloc_local((width,), T.float32)
            y_local = T.alloc_local((width,), T.bfloat16)
            first = T.alloc_var(T.int32)  # variables: otherwise the divisions become 64-bit together with the addresses
            steps = T.alloc_var(T.int32)
            slot = pid * WARP + T.get_thread_binding() % WARP
            walk = part * warps + T.get_thread_binding() // WARP
            first = walk // dilation * (dilation * length) + walk % dilation
            steps = T.max(0, T.min(length, T.ceildiv(num_tokens - first, dilation)))

            load_tokens(x, batch, first, dilation, slot, next_local)
            if past > 0:
                load_tokens(x, batch, first - past * dilation, dilation, slot, past_local)
                widen(past_local, 0, seen)
            load_taps(weight, slot, weight_local)
            for step in T.serial(T.ceildiv(steps, chunk)):
                token = first + step * (chunk * dilation)
                widen(next_local, past, seen)
                if step * chunk + chunk < steps:
                    load_tokens(x, batch, token + chunk * dilation, dilation, slot, next_local)
                for i in T.unroll(chunk):
                    convolve(seen, weight_local, i, a_local)
                    for e in T.unroll(width):
                        a_local[e] = a_local[e] * sigmoid_of(a_local[e])
                    for e in T.vectorized(width):
                        y_local[e] = T.cast(a_local[e], T.bfloat16)
                    if step * chunk + i < steps and slot < channels // width:
                        for e in T.vectorized(width):
                            y[batch, token + i * dilation, slot * width + e] = y_local[e]
                forget(seen, chunk)

    return short_conv


@kernel(choose=choose_bwd, space=SPACE, pass_configs=PASS_CONFIGS, fixed='length warps')
def short_conv_bwd_kernel(
    channels: int, taps: int, dilation: int, *, width: int, chunk: int, length: int, warps: int, resident_threads: int
):
    """`dweight_partial[batch, part]` is the sum over the tokens of `warps` walks of a sequence."""
    past, count = taps - 1, width * taps
    batch_size, num_tokens, num_parts = T.dynamic('batch_size'), T.dynamic('num_tokens'), T.dynamic('num_parts')

    @T.prim_func
    def short_conv_bwd(
        dy: T.Tensor((batch_size, num_tokens, channels), T.bfloat16),
        x: T.Tensor((batch_size, num_tokens, channels), T.bfloat16),
        weight: T.Tensor((channels * taps,), T.float32),
        dx: T.Tensor((batch_size, num_tokens, channels), T.bfloat16),
        dweight_partial: T.Tensor((batch_size, num_parts, channels * taps), T.float32),
    ):
        with T.Kernel(T.ceildiv(channels // width, WARP), num_parts, batch_size, threads=warps * WARP) as (
            pid,
            part,
            batch,
        ):
            T.import_source(FAST_EXP2)
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, warps * WARP))
            past_local = T.alloc_local((max(past, 1), width), T.bfloat16)
            next_x = T.alloc_local((chunk, width), T.bfloat16)
            next_dy = T.alloc_local((chunk, width), T.bfloat16)
            seen = T.alloc_local((past + chunk, width), T.float32)
            da = T.alloc_local((past + chunk, width), T.float32)
            weight_local = T.alloc_local((count,), T.float32)
            dweight_local = T.alloc_local((count,), T.float32)
            a_local = T.alloc_local((width,), T.float32)
            dx_local = T.alloc_local((width,), T.float32)
            rounded = T.alloc_local((width,), T.bfloat16)
            dweight_shared = T.alloc_shared((warps, WARP * count), T.float32)
            sigmoid = T.alloc_var(T.float32)
            first = T.alloc_var(T.int32)
            steps = T.alloc_var(T.int32)
            thread = T.get_thread_binding()
            lane, warp = thread % WARP, thread // WARP
            slot = pid * WARP + lane
            walk = part * warps + warp
            first = walk // dilation * (dilation * length) + walk % dilation
            steps = T.max(0, T.min(length, T.ceildiv(num_tokens - first, dilation)))

            load_tokens(x, batch, first, dilation, slot, next_x)
            load_tokens(dy, batch, first, dilation, slot, next_dy)
            if past > 0:
                load_tokens(x, batch, first - past * dilation, dilation, slot, past_local)
                widen(past_local, 0, seen)
            load_taps(weight, slot, weight_local)
            T.clear(da)
            T.clear(dweight_local)
            for step in T.serial(T.ceildiv(steps + past, chunk)):
                token = first + step * (chunk * dilation)
                widen(next_x, past, seen)
                widen(next_dy, past, da)
                if step * chunk + chunk < steps + past:
                    load_tokens(x, batch, token + chunk * dilation, dilation, slot, next_x)
                    load_tokens(dy, batch, token + chunk * dilation, dilation, slot, next_dy)
                for i in T.unroll(chunk):
                    convolve(seen, weight_local, i, a_local)
                    for e in T.unroll(width):
                        sigmoid = sigmoid_of(a_local[e])
                        da[past + i, e] = (
                            da[past + i, e] * sigmoid * (T.float32(1.0) + a_local[e] * (T.float32(1.0) - sigmoid))
                        )
                    if step * chunk + i < steps:
                        for e in T.unroll(width):
                            for j in T.unroll(taps):
                                dweight_local[e * taps + j] = (
                                    dweight_local[e * taps + j] + da[past + i, e] * seen[i + j, e]
                                )
                    for e in T.unroll(width):
                        dx_local[e] = weight_local[e * taps] * da[past + i, e]
                        for j in T.unroll(past):
                            dx_local[e] = dx_local[e] + weight_local[e * taps + j + 1] * da[past + i - 1 - j, e]
                    for e in T.vectorized(width):
                        rounded[e] = T.cast(dx_local[e], T.bfloat16)
                    at = step * chunk + i - past
                    if at >= 0 and at < steps and slot < channels // width:
                        for e in T.vectorized(width):
                            dx[batch, token + (i - past) * dilation, slot * width + e] = rounded[e]
                forget(seen, chunk)
                forget(da, chunk)

            for p in T.unroll(count // 4):
                for e in T.vectorized(4):
                    dweight_shared[warp, lane * count + p * 4 + e] = dweight_local[p * 4 + e]
            T.sync_threads()
            for r in T.unroll(T.ceildiv(count, warps)):
                at = r * warps * WARP + thread
                if at < WARP * count and pid * WARP * count + at < channels * taps:
                    sigmoid = dweight_shared[0, at]
                    for w in T.unroll(warps - 1):
                        sigmoid = sigmoid + dweight_shared[w + 1, at]
                    dweight_partial[batch, part, pid * WARP * count + at] = sigmoid

    return short_conv_bwd


def _check(x: Tensor, weight: Tensor, dilation: int) -> tuple[int, int, int, int]:
    """Check the arguments of both directions; returns batch_size, num_tokens, channels, taps."""
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
    static, size = (channels, taps, dilation), batch_size * num_tokens
    config = config_for(short_conv_bwd_kernel, static, size, x)
    num_parts = -(-num_walks(num_tokens, dilation, config['length']) // config['warps'])
    partial = weight.new_empty(batch_size, num_parts, channels * taps)
    launch(short_conv_bwd_kernel, static, dy, x, weight.view(-1), dx, partial, size=size)
    return dx, sum_of_partials(partial.view(batch_size * num_parts, channels, taps))


@op(outputs='y', backward=short_conv_bwd)
def short_conv(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """Causal convolution of each channel with its own taps, then SiLU.

    Args:
        x: (batch, num_tokens, channels) bfloat16, contiguous; channels a multiple of 8.
        weight: (channels, taps) float32, contiguous; the last tap applies to the token itself. Up to 8 taps.
        dilation: distance between taps in tokens; taps reach at most 32 tokens back.

    Returns:
        (batch, num_tokens, channels) bfloat16.
    """
    batch_size, num_tokens, channels, taps = _check(x, weight, dilation)
    y = torch.empty_like(x)
    launch(short_conv_kernel, (channels, taps, dilation), x, weight.view(-1), y, size=batch_size * num_tokens)
    return y


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
