"""For every rule of the linter a kernel that breaks it at the line marked `<-`, and one that does not."""

import tilelang.language as T


def strided_row(promise):
    """Rows with a stride that is known only at run time; without a promise each lane moves 2 bytes."""
    rows, stride = T.dynamic('rows'), T.dynamic('stride')

    @T.prim_func
    def kernel(x: T.StridedTensor((rows, 2048), (stride, 1), 'bfloat16'), y: T.Tensor((rows, 2048), 'bfloat16')):
        if promise:
            T.assume(stride % 8 == 0)
        with T.Kernel(rows, threads=128) as row:
            tile = T.alloc_fragment((2048,), 'bfloat16')
            T.copy(x[row, 0:2048], tile)  # <- narrow-access
            T.copy(tile, y[row, 0:2048])

    return kernel


def columns(transposed):
    """Each lane reads a row of its own, or neighboring lanes read neighboring elements."""

    @T.prim_func
    def kernel(x: T.Tensor((4096, 32), 'float32'), y: T.Tensor((4096, 32), 'float32')):
        with T.Kernel(128, threads=32) as block:
            lane = T.get_thread_binding()
            for i in T.serial(32):
                if transposed:
                    y[block * 32 + lane, i] = x[block * 32 + lane, i]  # <- scattered-access
                else:
                    y[block * 32 + i, lane] = x[block * 32 + i, lane]

    return kernel


def turned_tile(pad):
    """A tile is read down its columns; padding spreads them over the banks."""

    @T.prim_func
    def kernel(x: T.Tensor((4096, 32), 'float32'), y: T.Tensor((4096, 32), 'float32')):
        with T.Kernel(128, threads=32) as block:
            lane = T.get_thread_binding()
            tile = T.alloc_shared((32, 32 + pad), 'float32')
            for i in T.serial(32):
                tile[i, lane] = x[block * 32 + i, lane]
            T.sync_threads()
            for i in T.serial(32):
                y[block * 32 + i, lane] = tile[lane, i]  # <- bank-conflict

    return kernel


def long_loop(bound):
    """A loop over rows of a tensor that may have more than 2^31 elements."""
    rows = T.dynamic('rows')

    @T.prim_func
    def kernel(x: T.Tensor((rows, 4096), 'float32'), y: T.Tensor((4096,), 'float32')):
        if bound:
            T.assume(rows < 65536)
        with T.Kernel(32, threads=128) as block:
            total = T.alloc_var('float32', init=0.0)
            for i in T.serial(rows):
                total += x[i, block * 128 + T.get_thread_binding()]  # <- int64-index
            y[block * 128 + T.get_thread_binding()] = total

    return kernel


def staged_product(fence):
    """Tiles by cp.async go into wgmma; TileLang sets its fence before the wait."""

    @T.prim_func
    def kernel(a: T.Tensor((64, 192), 'float16'), b: T.Tensor((64, 192), 'float16'), c: T.Tensor((64, 64), 'float32')):
        with T.Kernel(1, threads=128):
            a_shared = T.alloc_shared((3, 64, 64), 'float16')
            b_shared = T.alloc_shared((3, 64, 64), 'float16')
            c_frag = T.alloc_fragment((64, 64), 'float32')
            T.clear(c_frag)
            for s in T.unroll(3):
                T.async_copy(a[0:64, s * 64 : (s + 1) * 64], a_shared[s, :, :])
                T.async_copy(b[0:64, s * 64 : (s + 1) * 64], b_shared[s, :, :])
            for k in T.serial(3):
                T.ptx_wait_group(0)
                T.sync_threads()
                if fence:
                    T.fence_proxy_async()
                T.wgmma_gemm(a_shared[k, :, :], b_shared[k, :, :], c_frag, transpose_B=True)  # <- missing-fence
                T.wait_wgmma(0)
            T.copy(c_frag, c)

    return kernel


def stored_and_read(complete):
    """T.copy waits until TMA has read the tile, not until the tensor holds it."""

    @T.prim_func
    def kernel(a: T.Tensor((64, 64), 'float16'), c: T.Tensor((64, 64), 'float16'), d: T.Tensor((64, 64), 'float16')):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), 'float16')
            again = T.alloc_fragment((64, 64), 'float16')
            T.copy(a, tile)
            T.copy(tile, c)
            if complete:
                T.tma_store_wait(0, read=False)
                T.sync_threads()
            T.copy(c, again)  # <- store-not-waited
            T.copy(again, d)

    return kernel


def copy(threads=128, floats=1024, blocks=132):
    """A copy with the given threads, shared memory and blocks."""

    @T.prim_func
    def kernel(x: T.Tensor((blocks * threads,), 'float32'), y: T.Tensor((blocks * threads,), 'float32')):
        with T.Kernel(blocks, threads=threads) as block:
            tile = T.alloc_shared((floats,), 'float32')
            tile[T.get_thread_binding()] = x[block * threads + T.get_thread_binding()]
            y[block * threads + T.get_thread_binding()] = tile[T.get_thread_binding()]

    return kernel


def product(m=64, n=64, threads=128):
    """One product; the accumulator of a thread has m * n / threads registers."""

    @T.prim_func
    def kernel(a: T.Tensor((m, 64), 'float16'), b: T.Tensor((n, 64), 'float16'), c: T.Tensor((m, n), 'float32')):
        with T.Kernel(1, threads=threads):
            a_shared = T.alloc_shared((m, 64), 'float16')
            b_shared = T.alloc_shared((n, 64), 'float16')
            c_frag = T.alloc_fragment((m, n), 'float32')
            T.copy(a, a_shared)
            T.copy(b, b_shared)
            T.clear(c_frag)
            T.gemm(a_shared, b_shared, c_frag, transpose_B=True)  # <- accumulator wgmma-width
            T.copy(c_frag, c)

    return kernel


def row_sum(threads):
    """A sum of 384 elements; the threads divide them in a butterfly."""

    @T.prim_func
    def kernel(x: T.Tensor((132, 384), 'float32'), y: T.Tensor((132,), 'float32')):
        with T.Kernel(132, threads=threads) as row:
            x_frag = T.alloc_fragment((384,), 'float32')
            sum_frag = T.alloc_fragment((1,), 'float32')
            T.copy(x[row, 0:384], x_frag)
            T.reduce_sum(x_frag, sum_frag, dim=0)  # <- reduction-width
            y[row] = sum_frag[0]

    return kernel


def pipeline(rows=1024, overwrite=False):
    """A pipelined sum over tiles; `rows` may be dynamic, and the tile may be reused inside a turn."""

    @T.prim_func
    def kernel(x: T.Tensor((rows, 64), 'float16'), y: T.Tensor((64, 64), 'float16')):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), 'float16')
            total = T.alloc_fragment((64, 64), 'float16')
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(rows, 64), num_stages=2):  # <- dynamic-pipeline
                T.copy(x[k * 64, 0], tile)
                for i, j in T.Parallel(64, 64):
                    total[i, j] += tile[i, j]
                if overwrite:
                    T.copy(total, tile)  # <- pipeline-overwrite
            T.copy(total, y)

    return kernel


def fragment_sum(parallel):
    """A loop over the elements of a fragment."""

    @T.prim_func
    def kernel(x: T.Tensor((128,), 'float32'), y: T.Tensor((128,), 'float32')):
        with T.Kernel(1, threads=128):
            x_frag = T.alloc_fragment((128,), 'float32')
            total = T.alloc_var('float32', init=0.0)
            T.copy(x, x_frag)
            if parallel:
                for i in T.Parallel(128):
                    y[i] = x_frag[i]
            else:
                for i in T.serial(128):
                    total += x_frag[i]  # <- fragment-in-loop
                y[0] = total

    return kernel


def far_element(row):
    """One element of a tensor of 2^31 elements and more."""

    @T.prim_func
    def kernel(x: T.Tensor((65544, 32768), 'int8'), y: T.Tensor((64,), 'int8')):
        with T.Kernel(1, threads=32):
            y[0] = x[row, 5]  # <- large-index

    return kernel


def crowded(blocks_per_sm):
    """128 registers of values per thread; many resident blocks leave a thread fewer registers."""

    @T.prim_func
    def kernel(x: T.Tensor((128, 128 * 256), 'float32'), y: T.Tensor((128, 128 * 256), 'float32')):
        with T.Kernel(128, threads=256) as row:
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            values = T.alloc_local((128,), 'float32')
            for i in T.unroll(128):
                values[i] = x[row, i * 256 + T.get_thread_binding()]
            for i in T.unroll(128):
                y[row, i * 256 + T.get_thread_binding()] = values[i] + values[127 - i] * values[(i * 37) % 128]

    return kernel


def guarded_cast(joined):
    """A store that converts its dtype under two conditions; TileLang keeps the outer one only."""
    rows = T.dynamic('rows')

    @T.prim_func
    def kernel(x: T.Tensor((rows, 128), 'float32'), y: T.Tensor((rows, 128), 'bfloat16')):
        with T.Kernel(T.ceildiv(rows, 32), threads=128) as block:
            tile = T.alloc_fragment((32, 128), 'float32')
            T.copy(x[block * 32, 0], tile)
            for i, j in T.Parallel(32, 128):
                if joined:
                    if T.And(block > 0, i < 20):
                        y[block * 32 + i, j] = T.cast(tile[i, j], 'bfloat16')
                else:
                    if block > 0:  # noqa: SIM102 - the nesting is the mistake
                        if i < 20:
                            y[block * 32 + i, j] = T.cast(tile[i, j], 'bfloat16')  # <- lost-guard

    return kernel


def guarded_load(alone):
    """A load that converts its dtype under a condition; TileLang drops that of an expression."""

    @T.prim_func
    def kernel(x: T.Tensor((32, 128), 'bfloat16'), used: T.Tensor((1,), 'int32'), y: T.Tensor((32,), 'float32')):
        with T.Kernel(1, threads=128):
            tile = T.alloc_fragment((32, 128), 'float32')
            sums = T.alloc_fragment((32,), 'float32')
            if alone:
                T.clear(tile)
                for i, j in T.Parallel(32, 128):
                    if i < used[0]:
                        tile[i, j] = T.cast(x[i, j], 'float32')
            else:
                for i, j in T.Parallel(32, 128):
                    tile[i, j] = T.if_then_else(i < used[0], T.cast(x[i, j], 'float32'), 0.0)  # <- load
            T.reduce_sum(tile, sums, dim=1)
            T.copy(sums, y)

    return kernel
