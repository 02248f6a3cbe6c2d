"""Kernels of the convolution: implicit GEMM with wgmma or mma, tiles copied by cp.async. See `conv2d`.

A row of the first operand is an output pixel. Its entry at (kh, kw, c) is the input at

    position = (pixel * mul + off + kernel * step) / div        in both dimensions

or 0 if the division leaves a rest or the position is outside. The convolution has mul = stride, off = -padding,
step = dilation and div = 1. The gradient of its input has mul = 1, off = padding, step = -dilation and div = stride.
"""

import torch

from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import T, macro

BLOCK_M, BLOCK_N, BLOCK_K = 64, 128, 64
THREADS = 128
STAGES = 3
LANES = 8  # channels of 16 bytes
VECTORS = BLOCK_K // LANES


@macro
def locate_pixels(first, pixels, height, width, mul_h, mul_w, off_h, off_w, place, threads: int):
    """`place[i]` = (image, first row, first column) of the pixels of this thread; images are -1 behind the last."""
    thread = T.get_thread_binding()
    for i in T.unroll(place.shape[0]):
        pixel = first + i * (threads // VECTORS) + thread // VECTORS
        inner = T.truncmod(pixel, height * width)
        place[i, 0] = T.if_then_else(pixel < pixels, T.truncdiv(pixel, height * width), -1)
        place[i, 1] = T.truncdiv(inner, width) * mul_h + off_h
        place[i, 2] = T.truncmod(inner, width) * mul_w + off_w


@macro
def copy_pixels(x, place, shift_h, shift_w, div_h, div_w, channel, channels: int, x_shared, slot, threads: int):
    """Start to copy a tile of pixels by channels; what lies outside is 0."""
    thread = T.get_thread_binding()
    for i in T.unroll(place.shape[0]):
        row, vector = i * (threads // VECTORS) + thread // VECTORS, thread % VECTORS * LANES
        h, w = place[i, 1] + shift_h, place[i, 2] + shift_w
        at_h, at_w = T.truncdiv(h, div_h), T.truncdiv(w, div_w)
        inside = place[i, 0] >= 0 and h >= 0 and w >= 0 and at_h < x.shape[1] and at_w < x.shape[2]
        if inside and at_h * div_h == h and at_w * div_w == w and channel + vector < channels:
            T.ptx_cp_async(
                T.access_ptr(x_shared[slot, row, vector], 'w', LANES),
                T.access_ptr(x[place[i, 0], at_h, at_w, channel + vector], 'r', LANES),
                LANES,
            )
        else:
            for e in T.vectorized(LANES):
                x_shared[slot, row, vector + e] = T.cast(0, x_shared.dtype)


@macro
def copy_rows(y, first, rows, column, columns: int, block_rows: int, block_columns: int, y_shared, slot, threads: int):
    """Start to copy a tile of a matrix; what lies outside is 0."""
    thread = T.get_thread_binding()
    per_row = block_columns // LANES
    for i in T.unroll(block_rows * per_row // threads):
        row, vector = (i * threads + thread) // per_row, (i * threads + thread) % per_row * LANES
        if first + row < rows and column + vector < columns:
            T.ptx_cp_async(
                T.access_ptr(y_shared[slot, row, vector], 'w', LANES),
                T.access_ptr(y[first + row, column + vector], 'r', LANES),
                LANES,
            )
        else:
            for e in T.vectorized(LANES):
                y_shared[slot, row, vector + e] = T.cast(0, y_shared.dtype)


@kernel(
    pass_configs=PLAIN_PRODUCTS,
    flops=lambda static, args: 2 * args[3].numel() * static[0] * static[2] * static[3],
)
def conv2d_kernel(
    channels: int, n: int, kh: int, kw: int, dtype: torch.dtype, bias_dtype: torch.dtype | None, divided: bool
):
    """A block owns 64 output pixels by 128 channels; three stages are in flight."""
    elem = T.dtype(dtype)
    batch, in_h, in_w, out_h, out_w = (T.dynamic(name) for name in ('batch', 'in_h', 'in_w', 'out_h', 'out_w'))
    chunks = -(-channels // BLOCK_K)
    steps = kh * kw * chunks
    bias_elem = T.dtype(bias_dtype or dtype)

    @T.prim_func
    def conv2d(
        x: T.Tensor((batch, in_h, in_w, channels), elem),
        w: T.Tensor((kh * kw * n, channels), elem),
        bias: T.Tensor((n,), bias_elem),
        y: T.Tensor((batch, out_h, out_w, n), elem),
        mul_h: T.int32,
        mul_w: T.int32,
        off_h: T.int32,
        off_w: T.int32,
        step_h: T.int32,
        step_w: T.int32,
        div_h: T.int32,
        div_w: T.int32,
    ):
        tiles_n = T.ceildiv(n, BLOCK_N)
        with T.Kernel(tiles_n * T.ceildiv(batch * out_h * out_w, BLOCK_M), threads=THREADS) as pid:
            bx, by = pid % tiles_n, pid // tiles_n
            x_shared = T.alloc_shared((STAGES, BLOCK_M, BLOCK_K), elem)
            w_shared = T.alloc_shared((STAGES, BLOCK_N, BLOCK_K), elem)
            acc_frag = T.alloc_fragment((BLOCK_M, BLOCK_N), T.float32)
            place = T.alloc_local((BLOCK_M * VECTORS // THREADS, 3), T.int32)
            pixels = batch * out_h * out_w
            first, column = by * BLOCK_M, bx * BLOCK_N
            over_h = div_h if divided else 1
            over_w = div_w if divided else 1
            locate_pixels(first, pixels, out_h, out_w, mul_h, mul_w, off_h, off_w, place, THREADS)
            T.clear(acc_frag)
            for step in T.unroll(STAGES - 1):
                if step < steps:
                    tap, channel = step // chunks, step % chunks * BLOCK_K
                    shift_h, shift_w = tap // kw * step_h, tap % kw * step_w
                    copy_pixels(x, place, shift_h, shift_w, over_h, over_w, channel, channels, x_shared, step, THREADS)
                    copy_rows(
                        w, tap * n + column, tap * n + n, channel, channels, BLOCK_N, BLOCK_K, w_shared, step, THREADS
                    )
                T.ptx_commit_group()
            for step in T.serial(steps):
                T.ptx_wait_group(STAGES - 2)
                T.sync_threads()
                later = step + STAGES - 1
                if later < steps:
                    tap, channel = later // chunks, later % chunks * BLOCK_K
                    shift_h, shift_w = tap // kw * step_h, tap % kw * step_w
                    slot = later % STAGES
                    copy_pixels(x, place, shift_h, shift_w, over_h, over_w, channel, channels, x_shared, slot, THREADS)
                    copy_rows(
                        w, tap * n + column, tap * n + n, channel, channels, BLOCK_N, BLOCK_K, w_shared, slot, THREADS
                    )
                T.ptx_commit_group()
                T.gemm(x_shared[step % STAGES, :, :], w_shared[step % STAGES, :, :], acc_frag, transpose_B=True)
            flat = T.view(y, (batch * out_h * out_w, n), elem)
            if bias_dtype is not None:
                for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                    acc_frag[i, j] = acc_frag[i, j] + T.cast(bias[T.min(column + j, n - 1)], T.float32)
            for i, j in T.Parallel(BLOCK_M, BLOCK_N):
                if first + i < pixels and column + j < n:
                    flat[first + i, column + j] = acc_frag[i, j]

    return conv2d


@kernel(
    serves=lambda static, gpu: gpu.has_wgmma,
    pass_configs={'TL_DISABLE_THREAD_STORAGE_SYNC': True},
    flops=lambda static, args: 2 * args[3].numel() * static[0] * static[2] * static[3],
)
def conv2d_sm90_kernel(
    channels: int, n: int, kh: int, kw: int, dtype: torch.dtype, bias_dtype: torch.dtype | None, divided: bool
):
    """A block owns 128 output pixels by up to 256 channels; the product of a stage runs while others are copied."""
    elem = T.dtype(dtype)
    batch, in_h, in_w, out_h, out_w = (T.dynamic(name) for name in ('batch', 'in_h', 'in_w', 'out_h', 'out_w'))
    chunks = -(-channels // BLOCK_K)
    steps = kh * kw * chunks
    bias_elem = T.dtype(bias_dtype or dtype)
    block_m, block_n, threads, stages = 128, 256 if n > 128 else 128, 256, 4
    ahead = stages - 2

    @T.prim_func
    def conv2d_sm90(
        x: T.Tensor((batch, in_h, in_w, channels), elem),
        w: T.Tensor((kh * kw * n, channels), elem),
        bias: T.Tensor((n,), bias_elem),
        y: T.Tensor((batch, out_h, out_w, n), elem),
        mul_h: T.int32,
        mul_w: T.int32,
        off_h: T.int32,
        off_w: T.int32,
        step_h: T.int32,
        step_w: T.int32,
        div_h: T.int32,
        div_w: T.int32,
    ):
        tiles_n = T.ceildiv(n, block_n)
        with T.Kernel(tiles_n * T.ceildiv(batch * out_h * out_w, block_m), threads=threads) as pid:
            bx, by = pid % tiles_n, pid // tiles_n
            x_shared = T.alloc_shared((stages, block_m, BLOCK_K), elem)
            w_shared = T.alloc_shared((stages, block_n, BLOCK_K), elem)
            y_shared = T.alloc_shared((block_m, block_n + LANES), elem)
            acc_frag = T.alloc_fragment((block_m, block_n), T.float32)
            place = T.alloc_local((block_m * VECTORS // threads, 3), T.int32)
            over_h = div_h if divided else 1
            over_w = div_w if divided else 1
            pixels = batch * out_h * out_w
            first, column = by * block_m, bx * block_n
            locate_pixels(first, pixels, out_h, out_w, mul_h, mul_w, off_h, off_w, place, threads)
            T.clear(acc_frag)
            for step in T.unroll(ahead):
                if step < steps:
                    tap, channel = step // chunks, step % chunks * BLOCK_K
                    shift_h, shift_w = tap // kw * step_h, tap % kw * step_w
                    copy_pixels(x, place, shift_h, shift_w, over_h, over_w, channel, channels, x_shared, step, threads)
                    copy_rows(
                        w, tap * n + column, tap * n + n, channel, channels, block_n, BLOCK_K, w_shared, step, threads
                    )
                T.ptx_commit_group()
            for step in T.serial(steps):
                T.ptx_wait_group(ahead - 1)
                T.fence_proxy_async()
                T.sync_threads()  # the product of the last stage but one is done in all warps: its slot is free
                T.wgmma_gemm(
                    x_shared[step % stages, :, :],
                    w_shared[step % stages, :, :],
                    acc_frag,
                    transpose_B=True,
                    policy=T.GemmWarpPolicy.FullRow,
                )
                later = step + ahead
                if later < steps:
                    tap, channel = later // chunks, later % chunks * BLOCK_K
                    shift_h, shift_w = tap // kw * step_h, tap % kw * step_w
                    slot = later % stages
                    copy_pixels(x, place, shift_h, shift_w, over_h, over_w, channel, channels, x_shared, slot, threads)
                    copy_rows(
                        w, tap * n + column, tap * n + n, channel, channels, block_n, BLOCK_K, w_shared, slot, threads
                    )
                T.ptx_commit_group()
                T.wait_wgmma(1)
            T.wait_wgmma(0)
            flat = T.view(y, (batch * out_h * out_w, n), elem)
            if bias_dtype is not None:
                for i, j in T.Parallel(block_m, block_n):
                    acc_frag[i, j] = acc_frag[i, j] + T.cast(bias[T.min(column + j, n - 1)], T.float32)
            T.sync_threads()  # y_shared may lie where the tiles were
            for i, j in T.Parallel(block_m, block_n):
                y_shared[i, j] = acc_frag[i, j]
            T.sync_threads()
            for i in T.unroll(block_m * block_n // LANES // threads):
                index = i * threads + T.get_thread_binding()
                row, vector = index // (block_n // LANES), index % (block_n // LANES) * LANES
                if first + row < pixels and column + vector < n:
                    for e in T.vectorized(LANES):
                        flat[first + row, column + vector + e] = y_shared[row, vector + e]

    return conv2d_sm90


def count_weight(static: tuple, args: tuple) -> int:
    """Operations of the gradient of the weight."""
    return 2 * args[0].numel() * static[0] * static[2] * static[3]


@kernel(pass_configs=PLAIN_PRODUCTS, flops=count_weight)
def conv2d_weight_kernel(channels: int, n: int, kh: int, kw: int, dtype: torch.dtype):
    """dweight: a block owns 128 output by 64 input channels of a tap, and sums a part of the pixels in float32."""
    elem = T.dtype(dtype)
    batch, in_h, in_w, out_h, out_w = (T.dynamic(name) for name in ('batch', 'in_h', 'in_w', 'out_h', 'out_w'))
    splits = T.dynamic('splits')
    chunks, tiles_n = -(-channels // BLOCK_K), -(-n // BLOCK_N)

    @T.prim_func
    def conv2d_weight(
        dy: T.Tensor((batch, out_h, out_w, n), elem),
        x: T.Tensor((batch, in_h, in_w, channels), elem),
        part: T.Tensor((splits, n, kh * kw * channels), T.float32),
        mul_h: T.int32,
        mul_w: T.int32,
        off_h: T.int32,
        off_w: T.int32,
        step_h: T.int32,
        step_w: T.int32,
        blocks: T.int32,  # of 64 pixels in a part
    ):
        with T.Kernel(kh * kw * chunks, tiles_n, splits, threads=THREADS) as (bx, by, split):
            x_shared = T.alloc_shared((1, BLOCK_M, BLOCK_K), elem)
            y_shared = T.alloc_shared((1, BLOCK_M, BLOCK_N), elem)
            acc_frag = T.alloc_fragment((BLOCK_N, BLOCK_K), T.float32)
            place = T.alloc_local((BLOCK_M * VECTORS // THREADS, 3), T.int32)
            pixels = batch * out_h * out_w
            flat = T.view(dy, (batch * out_h * out_w, n), elem)
            tap, channel, column = bx // chunks, bx % chunks * BLOCK_K, by * BLOCK_N
            shift_h, shift_w = tap // kw * step_h, tap % kw * step_w
            T.clear(acc_frag)
            for block in T.serial(blocks):
                first = (split * blocks + block) * BLOCK_M
                if first < pixels:
                    locate_pixels(first, pixels, out_h, out_w, mul_h, mul_w, off_h, off_w, place, THREADS)
                    T.sync_threads()
                    copy_pixels(x, place, shift_h, shift_w, 1, 1, channel, channels, x_shared, 0, THREADS)
                    copy_rows(flat, first, pixels, column, n, BLOCK_M, BLOCK_N, y_shared, 0, THREADS)
                    T.ptx_commit_group()
                    T.ptx_wait_group(0)
                    T.sync_threads()
                    T.gemm(y_shared[0, :, :], x_shared[0, :, :], acc_frag, transpose_A=True)
            for i, j in T.Parallel(BLOCK_N, BLOCK_K):
                if column + i < n and channel + j < channels:
                    part[split, column + i, tap * channels + channel + j] = acc_frag[i, j]

    return conv2d_weight
