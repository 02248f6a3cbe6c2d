"""Constructs of Blackwell GPUs: products of two blocks, scaled products, gathers of rows."""

import pytest
import tilelang.language as T
import torch

from tile_kernels.interpreter import (
    AsyncReadBeforeWait,
    BarrierDivergence,
    Deadlock,
    UnsupportedConstruct,
    interpret,
    unknown_constructs,
)

BLOCK, DEPTH = 128, 32  # rows of C of a block, and K elements of a step


def run(kernel, *tensors, checks='all'):
    assert unknown_constructs(kernel) == []
    return interpret(kernel, *tensors, checks=checks)


def gemm_of_two_blocks(m, n, k, cluster=(2, 1, 1), wait=True, multicast=True):
    """Every block loads its rows of A and half of the columns of B; the first block of a pair issues the products."""
    columns, half = 64, 32
    across = cluster[1] == 2

    @T.prim_func
    def main(a: T.Tensor((m, k), 'bfloat16'), b: T.Tensor((k, n), 'bfloat16'), c: T.Tensor((m, n), 'float32')):
        with T.ClusterKernel(
            n // columns if across else m // BLOCK,
            m // BLOCK if across else n // columns,
            threads=128,
            cluster_dims=cluster,
        ) as (x, y):
            row = y if across else x
            column = x if across else y
            a_shared = T.alloc_shared((2, BLOCK, DEPTH), 'bfloat16')
            b_shared = T.alloc_shared((2, DEPTH, half), 'bfloat16')
            c_tmem = T.alloc_tmem([BLOCK, columns], 'float32')
            c_frag = T.alloc_fragment((BLOCK, columns), 'float32')
            loaded = T.alloc_cluster_barrier([64, 64])
            used = T.alloc_cluster_barrier([1, 1])
            done = T.alloc_barrier([1])
            thread = T.get_thread_binding()
            rank = T.block_rank_in_cluster()
            T.assume(rank < 2)
            if thread < 32:
                for step in T.serial(k // DEPTH):
                    T.mbarrier_wait_parity(used[step % 2], (step // 2 & 1) ^ 1)
                    T.tma_copy(
                        a[row * BLOCK : (row + 1) * BLOCK, step * DEPTH : (step + 1) * DEPTH],
                        a_shared[step % 2, :, :],
                        barrier=loaded[step % 2],
                    )
                    T.tma_copy(
                        b[
                            step * DEPTH : (step + 1) * DEPTH,
                            (column * 2 + rank) * half : (column * 2 + rank + 1) * half,
                        ],
                        b_shared[step % 2, :, :],
                        barrier=loaded[step % 2],
                    )
                    T.mbarrier_arrive(loaded[step % 2], 0)
            elif thread < 64 and rank == 0:
                for step in T.serial(k // DEPTH):
                    T.mbarrier_wait_parity(loaded[step % 2], step // 2 & 1)
                    T.tcgen05_gemm(
                        a_shared[step % 2, :, :],
                        b_shared[step % 2, :, :],
                        c_tmem,
                        mbar=used[step % 2],
                        clear_accum=step == 0,
                        use_2cta=True,
                    )
                T.tcgen05_mma_arrive(done, arrive_2cta=multicast)
            if wait:
                T.mbarrier_wait_parity(done, 0)
            T.copy(c_tmem, c_frag)
            T.copy(c_frag, c[row * BLOCK, column * columns])

    return main


@pytest.mark.parametrize('cluster', [(2, 1, 1), (1, 2, 1)])
def test_a_product_of_two_blocks(cluster):
    m, n, k = 4 * BLOCK, 128, 5 * DEPTH
    a, b, c = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16(), torch.empty(m, n)
    run(gemm_of_two_blocks(m, n, k, cluster), a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-4)


def test_a_result_of_two_blocks_is_read_before_its_wait():
    m, n, k = 2 * BLOCK, 64, DEPTH
    a, b, c = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16(), torch.empty(m, n)
    with pytest.raises(AsyncReadBeforeWait, match='c_tmem is read at index'):
        interpret(gemm_of_two_blocks(m, n, k, wait=False), a, b, c)


def test_an_arrival_at_one_block_leaves_the_other_waiting():
    m, n, k = 2 * BLOCK, 64, DEPTH
    a, b, c = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16(), torch.empty(m, n)
    with pytest.raises(Deadlock, match=r'parity 0 of mbarrier done\[0\]'):
        interpret(gemm_of_two_blocks(m, n, k, multicast=False), a, b, c)


def test_a_product_of_two_blocks_needs_a_cluster():
    m, n, k = 2 * BLOCK, 64, DEPTH
    a, b, c = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16(), torch.empty(m, n)
    with pytest.raises(UnsupportedConstruct, match='a product of two blocks in clusters of'):
        interpret(gemm_of_two_blocks(m, n, k, cluster=(1, 1, 1)), a, b, c)


def packed(codes):
    """Scale factors (rows, groups) as words of four, one word of every row after another."""
    words = codes.long().reshape(codes.shape[0], -1, 4)
    words = words[..., 0] | words[..., 1] << 8 | words[..., 2] << 16 | words[..., 3] << 24
    return words.to(torch.uint32).T.contiguous().reshape(-1)


def scaled(values, codes, group):
    """Values (rows, K) times powers of two, one per group of K elements."""
    return values.float() * torch.exp2(codes.float() - 127).repeat_interleave(group, 1)


def scaled_gemm(n, k, group, left='float8_e4m3fn', pair=False, warps=1, asynchronous=True):
    """One tile (two with `pair`): scale factors come as words, which a warp transposes before they move on."""
    blocks = 2 if pair else 1
    rows = BLOCK * blocks
    per_word = 4 * group
    step = min(BLOCK, k)
    half = n // blocks
    kept = left if left == 'float8_e4m3fn' else 'float4_e2m1fn'

    @T.prim_func
    def main(
        a: T.Tensor((rows, k), kept),
        b: T.Tensor((n, k), 'float8_e4m3fn'),
        sfa: T.Tensor((k // per_word * rows,), 'uint32'),
        sfb: T.Tensor((k // per_word * n,), 'uint32'),
        c: T.Tensor((rows, n), 'float32'),
    ):
        with T.ClusterKernel(blocks, threads=128, cluster_dims=blocks) as pid:
            rank = T.block_rank_in_cluster()
            a_shared = T.alloc_shared((BLOCK, step), left)
            b_shared = T.alloc_shared((half, step), 'float8_e4m3fn')
            sfa_shared = T.alloc_shared((BLOCK,), 'uint32')
            sfb_shared = T.alloc_shared((n,), 'uint32')
            c_tmem = T.alloc_tmem([BLOCK, n], 'float32')
            sfa_tmem = T.alloc_tmem([BLOCK, 4], 'uint32')
            sfb_tmem = T.alloc_tmem([BLOCK, n // 128 * 4], 'uint32')
            c_frag = T.alloc_fragment((BLOCK, n), 'float32')
            loaded = T.alloc_barrier([32])
            ready = T.alloc_cluster_barrier([32 * blocks * warps])
            done = T.alloc_cluster_barrier([1])
            thread = T.get_thread_binding()
            for t in T.serial(k // step):
                if thread < 32:
                    T.tma_copy(a[pid * BLOCK : (pid + 1) * BLOCK, t * step : (t + 1) * step], a_shared, barrier=loaded)
                    T.tma_copy(b[rank * half : (rank + 1) * half, t * step : (t + 1) * step], b_shared, barrier=loaded)
                    if t * step % per_word == 0:
                        word = t * step // per_word
                        T.tma_copy(
                            sfa[word * rows + pid * BLOCK : word * rows + (pid + 1) * BLOCK], sfa_shared, barrier=loaded
                        )
                        T.tma_copy(sfb[word * n : (word + 1) * n], sfb_shared, barrier=loaded)
                    T.mbarrier_arrive(loaded)
                elif thread < 64 and rank == 0:
                    T.mbarrier_wait_parity(ready, t & 1)
                    if t * step % per_word == 0:
                        T.tcgen05_cp_warpx4(sfa_shared, sfa_tmem, use_2cta=pair)
                        T.tcgen05_cp_warpx4(sfb_shared, sfb_tmem, use_2cta=pair)
                    if asynchronous:
                        T.tcgen05_gemm_blockscaled(
                            a_shared,
                            b_shared,
                            c_tmem,
                            sfa_tmem,
                            sfb_tmem,
                            transpose_B=True,
                            clear_accum=t == 0,
                            mbar=done,
                            k_start=t * step,
                            sf_a_granularity_k=group,
                            sf_b_granularity_k=group,
                            use_2cta=pair,
                        )
                    else:
                        T.gemm_blockscaled(
                            a_shared,
                            b_shared,
                            c_tmem,
                            sfa_tmem,
                            sfb_tmem,
                            transpose_B=True,
                            clear_accum=t == 0,
                            mbar=done,
                            k_start=t * step,
                            sf_a_granularity_k=group,
                            sf_b_granularity_k=group,
                        )
                elif thread >= 64 and thread < 64 + 32 * warps:
                    T.mbarrier_wait_parity(loaded, t & 1)
                    if t * step % per_word == 0:
                        T.tcgen05_sf_warp_transpose(sfa_shared)
                        T.tcgen05_sf_warp_transpose(sfb_shared)
                        T.fence_proxy_async()
                    T.mbarrier_arrive(ready, 0)
                T.mbarrier_wait_parity(done, t & 1)
            T.copy(c_tmem, c_frag)
            T.copy(c_frag, c[pid * BLOCK, 0])

    return main


@pytest.mark.parametrize(
    ('n', 'k', 'group', 'pair', 'asynchronous'),
    [
        (128, 256, 64, False, True),
        (256, 128, 32, False, True),
        (256, 512, 128, True, True),
        (128, 128, 32, False, False),
    ],
)
def test_scaled_products_in_tensor_memory(n, k, group, pair, asynchronous):
    rows = BLOCK * (2 if pair else 1)
    a, b = torch.randn(rows, k).to(torch.float8_e4m3fn), torch.randn(n, k).to(torch.float8_e4m3fn)
    sfa, sfb = (torch.randint(120, 132, (size, k // group), dtype=torch.uint8) for size in (rows, n))
    c = torch.empty(rows, n)
    run(scaled_gemm(n, k, group, pair=pair, asynchronous=asynchronous), a, b, packed(sfa), packed(sfb), c)
    expected = scaled(a, sfa, group).double() @ scaled(b, sfb, group).double().T
    torch.testing.assert_close(c, expected.float(), rtol=1e-5, atol=1e-3)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def test_unpacked_fp4_operands():
    k, group = 128, 32
    codes = torch.randint(0, 16, (BLOCK, k), dtype=torch.uint8)
    a = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous().view(torch.int8)
    b = torch.randn(BLOCK, k).to(torch.float8_e4m3fn)
    sfa, sfb = (torch.randint(125, 130, (BLOCK, k // group), dtype=torch.uint8) for _ in range(2))
    c = torch.empty(BLOCK, BLOCK)
    run(scaled_gemm(BLOCK, k, group, left=T.float4_e2m1_unpacked), a, b, packed(sfa), packed(sfb), c)
    expected = scaled(E2M1[codes.long()], sfa, group) @ scaled(b, sfb, group).T
    torch.testing.assert_close(c, expected, rtol=1e-5, atol=1e-3)


def test_the_transpose_of_scale_factors_needs_one_warp():
    k, group = 128, 32
    a, b = torch.randn(BLOCK, k).to(torch.float8_e4m3fn), torch.randn(BLOCK, k).to(torch.float8_e4m3fn)
    words = packed(torch.full((BLOCK, 4), 127, dtype=torch.uint8))
    with pytest.raises(BarrierDivergence, match='tcgen05_sf_warp_transpose runs on 64 threads'):
        interpret(scaled_gemm(BLOCK, k, group, warps=2), a, b, words, words, torch.empty(BLOCK, BLOCK))


@pytest.mark.parametrize('layout', ['rowmajor', 'blockscaled_chunk_kmajor'])
def test_scaled_products_of_fp4_with_factors_in_shared_memory(layout):
    m, n, k, step = 64, 32, 256, 128
    words = step // 64
    chunks = layout != 'rowmajor'
    columns = words if chunks else k // 64

    @T.prim_func
    def main(
        a: T.Tensor((m, k), 'float4_e2m1fn'),
        b: T.Tensor((n, k), 'float4_e2m1fn'),
        sfa: T.Tensor((k // step if chunks else 1, m, columns), 'uint32'),
        sfb: T.Tensor((k // step if chunks else 1, n, columns), 'uint32'),
        c: T.Tensor((m, n), 'float32'),
    ):
        with T.Kernel(1, threads=128):
            a_shared = T.alloc_shared((m, step), 'float4_e2m1fn')
            b_shared = T.alloc_shared((n, step), 'float4_e2m1fn')
            sfa_shared = T.alloc_shared((m, columns), 'uint32')
            sfb_shared = T.alloc_shared((n, columns), 'uint32')
            c_frag = T.alloc_fragment((m, n), 'float32')
            T.clear(c_frag)
            for t in T.serial(k // step):
                T.copy(a[0, t * step], a_shared)
                T.copy(b[0, t * step], b_shared)
                T.copy(sfa[t if chunks else 0, :, :], sfa_shared)
                T.copy(sfb[t if chunks else 0, :, :], sfb_shared)
                T.mma_gemm_blockscaled(
                    a_shared,
                    b_shared,
                    c_frag,
                    sfa_shared,
                    sfb_shared,
                    transpose_B=True,
                    k_start=t * step,
                    sf_a_granularity_k=16,
                    sf_b_granularity_k=16,
                    sf_layout=layout,
                )
            T.copy(c_frag, c)

    def operand(rows):
        codes = torch.randint(0, 16, (rows, k), dtype=torch.uint8)
        factors = (torch.rand(rows, k // 16) * 4).to(torch.float8_e4m3fn)
        value = E2M1[codes.long()] * factors.float().repeat_interleave(16, 1)
        word = factors.view(torch.int32).view(torch.uint32)  # (rows, k // 64)
        if chunks:  # per step: K first, then the row within 32, then the group of 32 rows
            parts = word.view(torch.int32).reshape(rows // 32, 32, k // step, words).permute(2, 3, 1, 0)
            word = parts.contiguous().view(torch.uint32).reshape(k // step, rows, words)
        else:
            word = word.reshape(1, rows, -1)
        return (codes[:, ::2] | codes[:, 1::2] << 4).contiguous().view(torch.int8), word.contiguous(), value

    (a, sfa, left), (b, sfb, right) = operand(m), operand(n)
    c = torch.empty(m, n)
    run(main, a, b, sfa, sfb, c)
    torch.testing.assert_close(c, left @ right.T, rtol=1e-5, atol=1e-3)


def four_rows(wait=True, width=32, column=16):
    @T.prim_func
    def main(x: T.Tensor((8, 64), 'float16'), rows: T.Tensor((4,), 'int32'), y: T.Tensor((8, 64), 'float16')):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((4, width), 'float16')
            loaded = T.alloc_barrier(1)
            first, second, third, fourth = rows[0], rows[1], rows[2], rows[3]
            if T.shuffle_elect(128):
                T.mbarrier_expect_tx(loaded, T.tma_gather4_bytes(width, 'float16'))
                T.tma_gather4(x, tile, column, [first, second, third, fourth], barrier=loaded)
                T.barrier_arrive(loaded)
            if wait:
                T.mbarrier_wait_parity(loaded, 0)
            if T.shuffle_elect(128):
                T.tma_scatter4(tile, y, column, [fourth, third, second, first])
                T.tma_store_arrive()
            T.tma_store_wait(0, read=False)

    return main


def test_rows_are_gathered_and_scattered():
    x, rows = torch.randn(8, 64).half(), torch.tensor([5, 0, 7, 2], dtype=torch.int32)
    y = torch.zeros(8, 64, dtype=torch.float16)
    run(four_rows(), x, rows, y, checks='races')
    expected = torch.zeros_like(x)
    expected[[2, 7, 0, 5], 16:48] = x[[5, 0, 7, 2], 16:48]
    assert torch.equal(y, expected)
    with pytest.raises(AsyncReadBeforeWait, match='tile is read at index'):
        interpret(four_rows(wait=False), x, rows, y)


def test_gathered_rows_outside_the_tensor_are_zero_and_scattered_ones_are_dropped():
    x, rows = torch.randn(8, 64).half(), torch.tensor([8, 1, -1, 3], dtype=torch.int32)
    y = torch.ones(8, 64, dtype=torch.float16)
    run(four_rows(), x, rows, y, checks='races')
    expected = torch.ones_like(x)
    expected[[3, 1], 16:48] = 0  # where rows 8 and -1 went; rows 1 and 3 went to -1 and 8
    assert torch.equal(y, expected)


@pytest.mark.parametrize('size', [1, 2])
def test_running_clusters_take_over_the_work_of_others(size):
    count = 12

    @T.prim_func
    def main(
        x: T.Tensor((count, 32), 'float32'), y: T.Tensor((count, 32), 'float32'), done: T.Tensor((count,), 'int32')
    ):
        with T.ClusterKernel(count, threads=32, cluster_dims=size) as pid:
            response = T.alloc_shared((4,), 'uint32', scope='shared')
            answered = T.alloc_cluster_barrier([1])
            thread = T.get_thread_binding()
            rank = T.block_rank_in_cluster()
            tile = T.alloc_var('int32', init=pid)
            for turn in T.serial(count):
                y[tile, thread] = x[tile, thread] * 2.0
                if thread == 0:
                    T.atomic_add(done[pid], 1)
                    T.mbarrier_arrive_expect_tx(answered, 16)
                    if rank == 0:
                        if size == 1:
                            T.clc_try_cancel(response, answered)
                        else:
                            T.clc_try_cancel_multicast(response, answered)
                T.mbarrier_wait_parity(answered, turn & 1)
                if T.clc_is_canceled(response) == 0:
                    break
                tile = T.cast(T.clc_get_first_ctaid_x(response), 'int32') + rank

    x, y, done = torch.randn(count, 32), torch.zeros(count, 32), torch.zeros(count, dtype=torch.int32)
    run(main, x, y, done, checks='races')
    assert torch.equal(y, x * 2)
    assert int(done.sum()) == count  # every block's work is done once
    assert int(done.max()) > 1
    assert int(done.min()) == 0
