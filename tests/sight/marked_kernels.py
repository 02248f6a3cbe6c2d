"""Kernels whose comments say what each line moves: `#: reads A, writes B, product`."""

import tilelang
import tilelang.language as T


def pipelined_gemm(m=256, n=256, k=256):
    """TMA and wgmma with a producer warpgroup; cp.async without it; cp.async, ldmatrix and mma before Hopper."""

    @T.prim_func
    def gemm(A: T.Tensor((m, k), 'float16'), B: T.Tensor((n, k), 'float16'), C: T.Tensor((m, n), 'float16')):
        with T.Kernel(n // 64, m // 64, threads=128) as (bx, by):
            A_shared = T.alloc_shared((64, 64), 'float16')
            B_shared = T.alloc_shared((64, 64), 'float16')
            C_local = T.alloc_fragment((64, 64), 'float32')
            T.clear(C_local)
            for step in T.Pipelined(k // 64, num_stages=3):
                T.copy(A[by * 64, step * 64], A_shared)  #: reads A, writes A_shared
                T.copy(B[bx * 64, step * 64], B_shared)  #: reads B, writes B_shared
                T.gemm(A_shared, B_shared, C_local, transpose_B=True)  #: reads A_shared, reads B_shared, product
            for i, j in T.Parallel(64, 64):
                C_local[i, j] = T.max(C_local[i, j], 0)
            T.copy(C_local, C[by * 64, bx * 64])  #: writes C

    return gemm


def roles():
    """A producer that only loads and a consumer that only multiplies."""

    @T.prim_func
    def gemm(
        a: T.Tensor((128, 256), 'bfloat16'), b: T.Tensor((128, 256), 'bfloat16'), c: T.Tensor((128, 128), 'float32')
    ):
        with T.Kernel(2, 2, threads=256) as (bx, by):
            a_shared = T.alloc_shared((2, 64, 64), 'bfloat16')
            b_shared = T.alloc_shared((2, 64, 64), 'bfloat16')
            c_frag = T.alloc_fragment((64, 64), 'float32')
            full = T.alloc_barrier([128] * 2)
            free = T.alloc_barrier([128] * 2)
            if T.get_thread_binding() >= 128:
                for k in T.serial(4):
                    T.mbarrier_wait_parity(free[k % 2], (k // 2 + 1) % 2)
                    T.tma_copy(  #: reads a
                        a[by * 64 : by * 64 + 64, k * 64 : k * 64 + 64], a_shared[k % 2, :, :], barrier=full[k % 2]
                    )
                    T.tma_copy(  #: reads b
                        b[bx * 64 : bx * 64 + 64, k * 64 : k * 64 + 64], b_shared[k % 2, :, :], barrier=full[k % 2]
                    )
                    T.barrier_arrive(full[k % 2])
            else:
                T.clear(c_frag)
                for k in T.serial(4):
                    T.mbarrier_wait_parity(full[k % 2], (k // 2) % 2)
                    T.wgmma_gemm(a_shared[k % 2, :, :], b_shared[k % 2, :, :], c_frag, transpose_B=True)  #: product
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[k % 2])
                T.copy(c_frag, c[by * 64, bx * 64])  #: writes c

    return gemm


def attention():
    """Two products in a loop, reductions, and a result that TMA stores."""

    @T.prim_func
    def attend(
        Q: T.Tensor((256, 64), 'float16'),
        K: T.Tensor((256, 64), 'float16'),
        V: T.Tensor((256, 64), 'float16'),
        O: T.Tensor((256, 64), 'float16'),
    ):
        with T.Kernel(4, threads=128) as block:
            q_shared = T.alloc_shared((64, 64), 'float16')
            k_shared = T.alloc_shared((64, 64), 'float16')
            v_shared = T.alloc_shared((64, 64), 'float16')
            o_shared = T.alloc_shared((64, 64), 'float16')
            scores = T.alloc_fragment((64, 64), 'float32')
            p = T.alloc_fragment((64, 64), 'float16')
            o = T.alloc_fragment((64, 64), 'float32')
            total = T.alloc_fragment((64,), 'float32')
            part = T.alloc_fragment((64,), 'float32')
            T.copy(Q[block * 64, 0], q_shared)  #: reads Q, writes q_shared
            T.clear(o)
            T.clear(total)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(K[k * 64, 0], k_shared)  #: reads K, writes k_shared
                T.clear(scores)
                T.gemm(  #: reads q_shared, reads k_shared, product
                    q_shared, k_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow
                )
                for i, j in T.Parallel(64, 64):
                    scores[i, j] = T.exp2(scores[i, j])
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(64):
                    total[i] += part[i]
                T.copy(scores, p)
                T.copy(V[k * 64, 0], v_shared)  #: reads V, writes v_shared
                T.gemm(p, v_shared, o, policy=T.GemmWarpPolicy.FullRow)  #: reads v_shared, product
            for i, j in T.Parallel(64, 64):
                o[i, j] /= total[i]
            T.copy(o, o_shared)  #: writes o_shared
            T.copy(o_shared, O[block * 64, 0])  #: reads o_shared, writes O

    return attend


def sum_of_products():
    """Two products with one accumulator, of tiles that come from one tensor."""

    @T.prim_func
    def kernel(
        a: T.Tensor((2, 64, 64), 'float16'), b: T.Tensor((2, 64, 64), 'float16'), c: T.Tensor((64, 64), 'float32')
    ):
        with T.Kernel(1, threads=128):
            a0 = T.alloc_shared((64, 64), 'float16')
            a1 = T.alloc_shared((64, 64), 'float16')
            b0 = T.alloc_shared((64, 64), 'float16')
            b1 = T.alloc_shared((64, 64), 'float16')
            c_frag = T.alloc_fragment((64, 64), 'float32')
            T.copy(a[0, 0:64, 0:64], a0, prefer_instruction='tma')  #: reads a, writes a0
            T.copy(a[1, 0:64, 0:64], a1, prefer_instruction='tma')  #: reads a, writes a1
            T.copy(b[0, 0:64, 0:64], b0)  #: reads b, writes b0
            T.copy(b[1, 0:64, 0:64], b1)  #: reads b, writes b1
            T.clear(c_frag)
            T.gemm(a0, b0, c_frag)  #: reads a0, reads b0, product
            T.gemm(a1, b1, c_frag)  #: reads a1, reads b1, product
            T.copy(c_frag, c)  #: writes c

    return kernel


def softmax(columns=512):
    """Rows in fragments, with reductions between the loops."""
    rows = T.dynamic('rows')

    @T.prim_func
    def kernel(x: T.Tensor((rows, columns), 'float32'), y: T.Tensor((rows, columns), 'float32')):
        with T.Kernel(rows, threads=128) as row:
            x_frag = T.alloc_fragment((columns,), 'float32')
            top = T.alloc_fragment((1,), 'float32')
            total = T.alloc_fragment((1,), 'float32')
            for j in T.Parallel(columns):
                x_frag[j] = x[row, j]  #: reads x
            T.reduce_max(x_frag, top, dim=0)
            for j in T.Parallel(columns):
                x_frag[j] = T.exp(x_frag[j] - top[0])
            T.reduce_sum(x_frag, total, dim=0)
            for j in T.Parallel(columns):
                y[row, j] = x_frag[j] / total[0]  #: writes y

    return kernel


def transpose():
    """Through shared memory, element by element and by vectors."""

    @T.prim_func
    def kernel(x: T.Tensor((256, 256), 'float32'), y: T.Tensor((256, 256), 'float32')):
        with T.Kernel(8, 8, threads=128) as (bx, by):
            tile = T.alloc_shared((32, 36), 'float32')
            thread = T.get_thread_binding()
            r, c = thread // 8, thread % 8 * 4
            for i in T.unroll(2):
                for e in T.vectorized(4):
                    tile[i * 16 + r, c + e] = x[by * 32 + i * 16 + r, bx * 32 + c + e]  #: reads x, writes tile
            T.sync_threads()
            lane, warp = thread % 32, thread // 32
            for i in T.unroll(8):
                y[bx * 32 + i * 4 + warp, by * 32 + lane] = tile[lane, i * 4 + warp]  #: reads tile, writes y

    return kernel


def histogram():
    """Atomics in shared and global memory."""

    @T.prim_func
    def kernel(x: T.Tensor((4096,), 'int32'), bins: T.Tensor((64,), 'int32')):
        with T.Kernel(8, threads=128) as block:
            counts = T.alloc_shared((64,), 'int32')
            thread = T.get_thread_binding()
            if thread < 64:
                counts[thread] = 0  #: writes counts
            for i in T.serial(4):
                T.atomic_add(counts[x[block * 512 + i * 128 + thread]], 1)  #: reads x, writes counts
            if thread < 64:
                T.atomic_add(bins[thread], counts[thread])  #: reads counts, writes bins

    return kernel


@T.macro
def load_row(x, x_local, row, thread):
    """A macro has the line of its own statement."""
    for e in T.vectorized(8):
        x_local[e] = x[row, thread * 8 + e]  #: reads x


def by_intrinsics():
    """Loads and stores as PTX intrinsics, which lose their lines."""

    @T.prim_func
    def kernel(
        x: T.Tensor((64, 1024), 'bfloat16'), y: T.Tensor((64, 1024), 'bfloat16'), z: T.Tensor((64, 1024), 'bfloat16')
    ):
        with T.Kernel(64, threads=128) as row:
            thread = T.get_thread_binding()
            x_local = T.alloc_local((8,), 'bfloat16')
            load_row(x, x_local, row, thread)
            for e in T.vectorized(8):
                y[row, thread * 8 + e] = x_local[e]  #: writes y
            for e in T.vectorized(8):
                z[row, thread * 8 + e] = x_local[e] * T.bfloat16(2.0)  #: writes z

    return kernel


@tilelang.jit
def eager(x, y, rows: int = 8):
    """An eager kernel."""
    columns = T.const('columns')
    x: T.Tensor((rows, columns), 'float32')
    y: T.Tensor((rows, columns), 'float32')
    with T.Kernel(rows, threads=128) as row:
        for j in T.Parallel(columns):
            y[row, j] = x[row, j] * 2.0  #: reads x, writes y
