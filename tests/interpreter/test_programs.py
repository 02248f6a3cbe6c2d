"""Small programs that use one construct of public kernels each, compared with PyTorch or with known answers."""

import numpy as np
import pytest
import tilelang.language as T
import torch
from tilelang.language.experimental.gemm_sp_op import wgmma_gemm_sp

from tile_kernels.interpreter import (
    AsyncReadBeforeWait,
    BarrierDivergence,
    Deadlock,
    UnsupportedConstruct,
    interpret,
    unknown_constructs,
)
from tile_kernels.interpreter.meaning.random_ops import Mrg, Xorwow, philox


def run(kernel, *tensors, checks='all', **settings):
    assert unknown_constructs(kernel) == []
    return interpret(kernel, *tensors, checks=checks, **settings)


def test_a_loop_bound_to_threads():
    @T.prim_func
    def main(x: T.Tensor((4, 32), 'float32'), y: T.Tensor((4, 32), 'float32')):
        with T.Kernel(2, threads=(32, 2)) as pid:
            for i in T.thread_binding(2, thread='threadIdx.y'):
                for j in T.thread_binding(32, thread='threadIdx.x'):
                    y[pid * 2 + i, j] = x[pid * 2 + i, 31 - j] + T.cast(i, 'float32')

    x, y = torch.randn(4, 32), torch.empty(4, 32)
    run(main, x, y)
    assert torch.equal(y, x.flip(1) + torch.tensor([0.0, 1.0, 0.0, 1.0])[:, None])


def test_a_loop_bound_to_other_threads_than_there_are_is_refused():
    @T.prim_func
    def main(y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=32):
            for j in T.thread_binding(64, thread='threadIdx.x'):
                y[j] = 1.0

    with pytest.raises(UnsupportedConstruct, match=r'threadIdx\.x of 64 iterations in a block with 32 threads'):
        interpret(main, torch.empty(64))


def allreduce_kernel(dtype, combine, identity, dims, axis, guard=None):
    rows, columns = dims[1], dims[0]

    @T.prim_func
    def main(x: T.Tensor((rows, columns), dtype), y: T.Tensor((rows, columns), dtype)):
        with T.Kernel(1, threads=dims):
            tx = T.get_thread_binding(0)
            ty = T.get_thread_binding(1)
            mine = T.alloc_local((1,), dtype)
            found = T.alloc_local((1,), dtype)
            mine[0] = x[ty, tx]
            with T.attr(
                T.comm_reducer(combine, [T.cast(identity, dtype)]),
                'reduce_scope',
                T.reinterpret(T.uint64(0), dtype='handle'),
            ):
                T.evaluate(
                    T.tvm_thread_allreduce(
                        T.uint32(1),
                        mine[0],
                        True if guard is None else tx < guard,
                        found[0],
                        tx if axis == 0 else ty,
                        dtype='handle',
                    )
                )
            y[ty, tx] = found[0]

    return main


@pytest.mark.parametrize('dtype', ['float32', 'int32', 'float16', 'int8'])
def test_allreduce_over_an_axis_of_threads(dtype):
    x = torch.randint(-3, 4, (4, 32)).to(getattr(torch, dtype))
    y = torch.empty_like(x)
    run(allreduce_kernel(dtype, lambda a, b: a + b, 0, (32, 4), 0), x, y)
    assert torch.equal(y, x.sum(1, keepdim=True).to(x.dtype).expand(4, 32))
    run(allreduce_kernel(dtype, lambda a, b: a + b, 0, (32, 4), 1), x, y)
    assert torch.equal(y, x.sum(0, keepdim=True).to(x.dtype).expand(4, 32))
    run(allreduce_kernel(dtype, lambda a, b: T.max(a, b), -5, (32, 4), 0), x, y)
    assert torch.equal(y, x.amax(1, keepdim=True).expand(4, 32))


def test_allreduce_of_a_guarded_value_and_an_odd_number_of_threads():
    x, y = torch.randn(1, 24), torch.empty(1, 24)
    run(allreduce_kernel('float32', lambda a, b: a + b, 0, (24, 1), 0, guard=10), x, y)
    torch.testing.assert_close(y, x[:, :10].sum(1, keepdim=True).expand(1, 24))


def test_allreduce_by_a_part_of_the_block_is_a_finding():
    @T.prim_func
    def main(x: T.Tensor((32,), 'float32'), y: T.Tensor((32,), 'float32')):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding(0)
            found = T.alloc_local((1,), 'float32')
            if tx < 16:
                with T.attr(
                    T.comm_reducer(lambda a, b: a + b, [T.float32(0)]),
                    'reduce_scope',
                    T.reinterpret(T.uint64(0), dtype='handle'),
                ):
                    T.evaluate(T.tvm_thread_allreduce(T.uint32(1), x[tx], True, found[0], tx, dtype='handle'))
                y[tx] = found[0]

    with pytest.raises(BarrierDivergence, match='tvm_thread_allreduce is reached by only some threads'):
        interpret(main, torch.ones(32), torch.empty(32))


def test_warp_shuffles_of_tvm():
    @T.prim_func
    def main(x: T.Tensor((64,), 'int32'), y: T.Tensor((3, 64), 'int32')):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding(0)
            y[0, tx] = T.tvm_warp_shuffle(T.uint32(0xFFFFFFFF), x[tx], 5, 32, 32)
            y[1, tx] = T.tvm_warp_shuffle_down(T.uint32(0xFFFFFFFF), x[tx], 3, 32, 32)
            y[2, tx] = T.tvm_warp_shuffle_up(T.uint32(0xFFFFFFFF), x[tx], 1, 32, 32)

    x, y = torch.arange(64, dtype=torch.int32), torch.empty(3, 64, dtype=torch.int32)
    run(main, x, y)
    lane = torch.arange(64) % 32
    warp = torch.arange(64) - lane
    assert torch.equal(y[0], (warp + 5).int())
    assert torch.equal(y[1], torch.where(lane + 3 < 32, x + 3, x))
    assert torch.equal(y[2], torch.where(lane >= 1, x - 1, x))


def test_philox_gives_the_known_answers_of_random123():
    def words(*values):
        return [np.array([value], np.uint64) for value in values]

    assert [int(word[0]) for word in philox(words(0, 0, 0, 0), words(0, 0))] == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]
    ones = 0xFFFFFFFF
    assert [int(word[0]) for word in philox(words(ones, ones, ones, ones), words(ones, ones))] == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


def test_random_numbers_follow_seed_sequence_and_offset():
    @T.prim_func
    def main(bits: T.Tensor((8, 64), 'uint32'), flat: T.Tensor((64,), 'float32'), bell: T.Tensor((8, 64), 'float32')):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            T.rng_init(0, 0, tx * 2)
            for k in T.serial(8):
                bits[k, tx] = T.rng_rand()
            T.rng_init(7, tx, 0)
            flat[tx] = T.rng_rand_float()
            for k in T.serial(8):
                bell[k, tx] = T.rng_rand_float(dist='normal')

    bits, flat, bell = torch.empty(8, 64, dtype=torch.uint32), torch.empty(64), torch.empty(8, 64)
    run(main, bits, flat, bell)
    stream = bits.to(torch.int64)
    assert stream[:4, 0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert torch.equal(stream[2:, 0], stream[:6, 1])  # thread 1 starts two numbers further on
    assert flat.unique().numel() == 64
    assert 0 < flat.min() <= flat.max() <= 1
    assert abs(float(bell.mean())) < 0.15
    assert abs(float(bell.std()) - 1) < 0.15


def draws(generator, kind='rng_rand', **how):
    """Four numbers of each of four threads, with seed, sequence and offset from a tensor."""
    out = {'rng_rand': 'uint32'}.get(kind, f'float{how.get("bit", 32)}')

    @T.prim_func
    def main(start: T.Tensor((4, 3), 'int64'), y: T.Tensor((4, 4), out)):
        with T.Kernel(1, threads=4):
            tx = T.get_thread_binding()
            T.rng_init(start[tx, 0], start[tx, 1], start[tx, 2], generator=generator)
            for k in T.serial(4):
                y[tx, k] = getattr(T, kind)(**how)

    return main, torch.empty(4, 4, dtype=getattr(torch, out))


def xorwow(seed, offset, count):
    """The recurrence of Marsaglia's generator, number by number."""
    ones = 0xFFFFFFFF
    low = 1099087573 * ((seed & ones) ^ 0xAAD26B49) & ones
    high = 2591861531 * ((seed >> 32) ^ 0xF7DCEFDD) & ones
    x, y, z = (123456789 + low) & ones, 362436069 ^ low, (521288629 + high) & ones
    w, v, d = 88675123 ^ high, (5783321 + low) & ones, (6615241 + high + low) & ones
    found = []
    for _ in range(offset + count):
        t = x ^ x >> 2
        x, y, z, w, v = y, z, w, v, (v ^ v << 4 ^ t ^ t << 1) & ones
        d = (d + 362437) & ones
        found.append((v + d) & ones)
    return found[offset:]


def test_xorwow_numbers_follow_seed_sequence_and_offset():
    kernel, y = draws('curandStateXORWOW_t')
    starts = [(0, 0, 0), (7, 0, 0), (7 + (5 << 32), 0, 100), (7, 3, 0)]
    run(kernel, torch.tensor(starts), y)
    for row, (seed, sequence, offset) in zip(y.tolist(), starts, strict=True):
        assert (row == xorwow(seed, offset, 4)) == (sequence == 0)


def test_sequences_of_xorwow_follow_each_other():
    words = np.arange(1, 6, dtype=np.uint32).reshape(5, 1, 1)
    one, two = np.full((1, 1), 1, np.uint64), np.full((1, 1), 2, np.uint64)
    assert np.array_equal(Xorwow._jump(Xorwow._jump(words, one, 67), one, 67), Xorwow._jump(words, two, 67))
    steps = words
    for _ in range(1 << 12):
        steps = Xorwow._stepped(steps)
    assert np.array_equal(Xorwow._jump(words, one, 12), steps)


def test_mrg_numbers_are_those_of_the_published_generator():
    kernel, y = draws('curandStateMRG32k3a_t', 'rng_rand_float', bit=64)
    run(kernel, torch.tensor([(0, 0, 0), (0, 0, 1), (0, 1, 0), (5, 0, 0)]), y)
    # the first numbers of RngStreams, which has the same recurrence, start values and jumps of 2**76
    torch.testing.assert_close(y[0, :3], torch.tensor([0.1270111, 0.3185276, 0.3091860]).double(), rtol=0, atol=1e-7)
    assert torch.equal(y[0, 1:], y[1, :3])
    jump = [[82758667, 1871391091, 4127413238], [3672831523, 69195019, 1871391091], [3672091415, 3528743235, 69195019]]
    assert Mrg.matrix(0, 76).tolist() == jump
    assert ((y > 0) & (y <= 1)).all()


@pytest.mark.parametrize('generator', ['curandStatePhilox4_32_10_t', 'curandStateXORWOW_t', 'curandStateMRG32k3a_t'])
@pytest.mark.parametrize('bit', [32, 64])
def test_normal_numbers_have_mean_0_and_deviation_1(generator, bit):
    @T.prim_func
    def main(y: T.Tensor((128, 16), f'float{bit}')):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            T.rng_init(11, tx, 0, generator=generator)
            for k in T.serial(16):
                y[tx, k] = T.rng_rand_float(bit=bit, dist='normal')

    y = torch.empty(128, 16, dtype=getattr(torch, f'float{bit}'))
    run(main, y)
    assert abs(float(y.mean())) < 0.1
    assert abs(float(y.std()) - 1) < 0.1
    assert y.unique().numel() > 2000


def test_random_numbers_in_a_parallel_loop():
    def kernel(threads):
        @T.prim_func
        def main(x: T.Tensor((8,), 'int32'), y: T.Tensor((8,), 'uint32')):
            with T.Kernel(1, threads=threads):
                T.rng_init(0, 0, 0)
                for i in T.Parallel(8):
                    if x[i] > 0:
                        y[i] = T.rng_rand()

        return main

    x, y = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0], dtype=torch.int32), torch.zeros(8, dtype=torch.uint32)
    run(kernel(1), x, y, checks='races')
    assert y.tolist() == [0x6627E8D5, 0, 0xE169C58D, 0xBC57AC4C, 0, 0, 0x9B00DBD8, 0]
    with pytest.raises(UnsupportedConstruct, match=r'inside T\.Parallel of a block with several threads'):
        interpret(kernel(32), x, y)


def sparse(rows, k, dtype, group):
    """A random matrix with two of four (one of two) elements kept: dense, kept elements, 4 bits per group."""
    places = torch.rand(rows, k // group, group).argsort(-1)[..., : group // 2].sort(-1).values
    values = torch.randint(1, 5, places.shape).float()
    dense = torch.zeros(rows, k // group, group).scatter_(-1, places, values)
    code = places[..., 0] | places[..., 1] << 2 if group == 4 else torch.where(places[..., 0] == 0, 0b0100, 0b1110)
    return dense.reshape(rows, k), values.reshape(rows, k // 2).to(dtype), code


@pytest.mark.parametrize(
    ('dtype', 'meta', 'swapped'),
    [('float16', 'int16', False), ('float16', 'int8', True), ('int8', 'int32', False), ('float32', 'int16', False)],
)
def test_products_with_a_sparse_operand(dtype, meta, swapped):
    m, n, k = 32, 16, 64
    group = 2 if dtype == 'float32' else 4
    out = 'int32' if dtype == 'int8' else 'float32'
    bits = int(meta.removeprefix('int'))
    per_word = bits // 4
    words = k // group // per_word
    a_shape, e_shape = ((k // 2, m), (words, m)) if swapped else ((m, k // 2), (m, words))

    @T.prim_func
    def main(
        a: T.Tensor(a_shape, dtype), e: T.Tensor(e_shape, meta), b: T.Tensor((k, n), dtype), c: T.Tensor((m, n), out)
    ):
        with T.Kernel(1, threads=32):
            a_shared = T.alloc_shared(a_shape, dtype)
            e_shared = T.alloc_shared(e_shape, meta)
            b_shared = T.alloc_shared((k, n), dtype)
            c_frag = T.alloc_fragment((m, n), out)
            T.clear(c_frag)
            T.copy(a, a_shared)
            T.copy(e, e_shared)
            T.copy(b, b_shared)
            T.gemm_sp(a_shared, e_shared, b_shared, c_frag, transpose_A=swapped, transpose_E=swapped)
            T.copy(c_frag, c)

    dense, kept, code = sparse(m, k, getattr(torch, dtype), group)
    word = (code.reshape(m, words, per_word) << torch.arange(per_word) * 4).sum(-1)
    e = ((word + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)).to(getattr(torch, meta))
    b = torch.randint(-4, 5, (k, n)).to(getattr(torch, dtype))
    c = torch.empty(m, n, dtype=getattr(torch, out))
    if swapped:
        kept, e = kept.T.contiguous(), e.T.contiguous()
    run(main, kept, e, b, c)
    assert torch.equal(c.float(), dense @ b.float())


def test_an_asynchronous_product_with_a_sparse_operand():
    def kernel(wait):
        @T.prim_func
        def main(
            a: T.Tensor((64, 32), 'float16'),
            e: T.Tensor((64, 4), 'int16'),
            b: T.Tensor((64, 16), 'float16'),
            c: T.Tensor((64, 16), 'float32'),
        ):
            with T.Kernel(1, threads=128):
                a_shared = T.alloc_shared((64, 32), 'float16')
                e_shared = T.alloc_shared((64, 4), 'int16')
                b_shared = T.alloc_shared((64, 16), 'float16')
                c_frag = T.alloc_fragment((64, 16), 'float32')
                T.copy(a, a_shared)
                T.copy(e, e_shared)
                T.copy(b, b_shared)
                wgmma_gemm_sp(a_shared, e_shared, b_shared, c_frag, clear_accum=True)
                if wait:
                    T.wait_wgmma(0)
                T.copy(c_frag, c)

        return main

    dense, kept, code = sparse(64, 64, torch.float16, 4)
    word = (code.reshape(64, 4, 4) << torch.arange(4) * 4).sum(-1)
    e = ((word + 32768) % 65536 - 32768).short()
    b, c = torch.randint(-4, 5, (64, 16)).half(), torch.empty(64, 16)
    run(kernel(True), kept, e, b, c)
    assert torch.equal(c, dense @ b.float())
    with pytest.raises(AsyncReadBeforeWait, match='c_frag is read at index'):
        interpret(kernel(False), kept, e, b, c)


def test_addresses_in_place_of_tensors():
    @T.prim_func
    def main(x_ptr: T.ptr, y_ptr: T.ptr, n: T.int32):
        x = T.make_tensor(x_ptr, (n, 4), 'float32')
        y = T.make_tensor(y_ptr, (n, 4), 'float32')
        with T.Kernel(n, threads=32) as pid:
            for j in T.Parallel(4):
                y[pid, j] = x[n - 1 - pid, j] * 2.0

    x, y = torch.randn(6, 4), torch.zeros(6, 4)
    run(main, x.data_ptr(), y.data_ptr(), 6)
    assert torch.equal(y, x.flip(0) * 2)
    with pytest.raises(ValueError, match='main: x must be a tensor or its address, got 0'):
        interpret(main, 0, y.data_ptr(), 6)


def nibbles(values):
    """Numbers of four bits, two in a byte."""
    return ((values[..., ::2] & 15) | (values[..., 1::2] & 15) << 4).to(torch.int8).contiguous()


def test_products_of_int4():
    @T.prim_func
    def main(a: T.Tensor((32, 64), 'int4'), b: T.Tensor((16, 64), 'int4'), c: T.Tensor((32, 16), 'int32')):
        with T.Kernel(1, threads=32):
            a_shared = T.alloc_shared((32, 64), 'int4')
            b_shared = T.alloc_shared((16, 64), 'int4')
            c_frag = T.alloc_fragment((32, 16), 'int32')
            T.clear(c_frag)
            T.copy(a, a_shared)
            T.copy(b, b_shared)
            T.gemm(a_shared, b_shared, c_frag, transpose_B=True)
            T.copy(c_frag, c)

    a, b = torch.randint(-8, 8, (32, 64)), torch.randint(-8, 8, (16, 64))
    c = torch.empty(32, 16, dtype=torch.int32)
    run(main, nibbles(a), nibbles(b), c)
    assert torch.equal(c.long(), a @ b.T)


def test_integers_of_four_bits_wrap_and_extend_their_sign():
    @T.prim_func
    def main(
        x: T.Tensor((16,), 'int4'),
        u: T.Tensor((16,), 'uint4'),
        wide: T.Tensor((2, 16), 'int32'),
        back: T.Tensor((16,), 'int4'),
    ):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(16):
                wide[0, i] = T.cast(x[i], 'int32') * 3
                wide[1, i] = T.cast(u[i], 'int32') * 3
                back[i] = T.cast(T.cast(x[i], 'int32') * 3, 'int4')

    numbers = torch.arange(-8, 8)
    wide, back = torch.empty(2, 16, dtype=torch.int32), torch.empty(8, dtype=torch.int8)
    run(main, nibbles(numbers), nibbles(numbers), wide, back)
    assert torch.equal(wide.long(), torch.stack([numbers * 3, (numbers & 15) * 3]))
    assert torch.equal(back, nibbles(numbers * 3))


def test_pairs_of_fp4_numbers():
    @T.prim_func
    def main(
        x: T.Tensor((16,), 'float4_e2m1fnx2'), y: T.Tensor((16,), 'float4_e2m1fnx2'), z: T.Tensor((16, 2), 'float32')
    ):
        with T.Kernel(1, threads=32):
            shared = T.alloc_shared((16,), 'float4_e2m1fnx2')
            T.copy(x, shared)
            for i in T.serial(16):
                y[i] = shared[15 - i]
                z[i, T.Ramp(0, 1, 2)] = T.cast(x[i], 'float32x2')

    codes = torch.arange(256, dtype=torch.uint8)[::16] + torch.arange(16, dtype=torch.uint8)
    y, z = torch.empty(16, dtype=torch.uint8), torch.empty(16, 2)
    run(main, codes.view(torch.float4_e2m1fn_x2), y.view(torch.float4_e2m1fn_x2), z)
    assert torch.equal(y, codes.flip(0))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    assert torch.equal(z, torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], 1))

    @T.prim_func
    def fill(y: T.Tensor((16,), 'float4_e2m1fnx2')):
        with T.Kernel(1, threads=32):
            shared = T.alloc_shared((16,), 'float4_e2m1fnx2')
            T.clear(shared)
            T.copy(shared, y)

    with pytest.raises(UnsupportedConstruct, match='a tile operation other than a copy on float4_e2m1fnx2'):
        interpret(fill, y.view(torch.float4_e2m1fn_x2))


def test_sizes_that_are_expressions_of_symbols():
    n, m = T.dynamic('n'), T.dynamic('m')

    @T.prim_func
    def main(x: T.Tensor((n * 4, m + 1), 'int32'), y: T.Tensor((n, m), 'int32')):
        with T.Kernel(n, threads=32) as pid:
            for j in T.Parallel(m):
                y[pid, j] = x[pid * 4, j + 1]

    x, y = torch.arange(12 * 6, dtype=torch.int32).reshape(12, 6), torch.empty(3, 5, dtype=torch.int32)
    run(main, x, y)
    assert torch.equal(y, x[::4, 1:])
    with pytest.raises(ValueError, match='must have shape'):
        interpret(main, torch.zeros(13, 6, dtype=torch.int32), torch.empty(3, 5, dtype=torch.int32))

    k = T.dynamic('k')

    @T.prim_func
    def alone(x: T.Tensor((k * 4 + 2,), 'int32')):
        with T.Kernel(1, threads=32):
            for j in T.serial(k):
                x[j * 4] = j + 1

    x = torch.zeros(14, dtype=torch.int32)
    interpret(alone, x)
    assert x.tolist() == [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0]


def test_tfloat32_products_round_their_operands():
    @T.prim_func
    def main(a: T.Tensor((32, 32), 'float32'), b: T.Tensor((32, 32), 'float32'), c: T.Tensor((32, 32), 'float32')):
        with T.Kernel(1, threads=128):
            a_shared = T.alloc_shared((32, 32), T.tfloat32)
            b_shared = T.alloc_shared((32, 32), T.tfloat32)
            c_frag = T.alloc_fragment((32, 32), 'float32')
            T.copy(a, a_shared)
            T.copy(b, b_shared)
            T.gemm(a_shared, b_shared, c_frag, clear_accum=True)
            T.copy(c_frag, c)

    a, b, c = torch.randn(32, 32), torch.eye(32), torch.empty(32, 32)
    run(main, a, b, c)
    bits = (a.view(torch.int32) + 0x1000) & ~0x1FFF
    assert torch.equal(c, bits.view(torch.float32))


def cluster_copy(wait, count=1):
    @T.prim_func
    def main(a: T.Tensor((64,), 'float32'), b: T.Tensor((64,), 'float32')):
        with T.ClusterKernel(2, threads=128, cluster_dims=(2, 1, 1)) as pid:
            source = T.alloc_shared((64,), 'float32')
            target = T.alloc_shared((64,), 'float32')
            full = T.alloc_cluster_barrier([count])
            T.fill(source, 0.0)
            T.fill(target, 0.0)
            T.cluster_sync()
            if pid == 0:
                for i in T.Parallel(64):
                    source[i] = a[i]
                T.copy_cluster(source, target, dst_block=1, remote_barrier=full[0])
            if pid == 1:
                if wait:
                    T.mbarrier_wait_parity(full[0], 0)
                for i in T.Parallel(64):
                    b[i] = target[i]

    return main


def test_a_copy_to_another_block_signals_its_mbarrier():
    a, b = torch.randn(64), torch.empty(64)
    run(cluster_copy(True), a, b, checks='races')
    assert torch.equal(a, b)
    with pytest.raises(Deadlock, match=r'mbarrier full\[0\] \(1 of 2 arrivals\)'):
        interpret(cluster_copy(True, count=2), a, b)


def test_arriving_at_the_mbarrier_of_another_block():
    def kernel(count):
        @T.prim_func
        def main(y: T.Tensor((8,), 'int32')):
            with T.ClusterKernel(8, threads=32, cluster_dims=(4, 1, 1)) as pid:
                full = T.alloc_cluster_barrier([count])
                T.cluster_sync()
                T.mbarrier_arrive(full[0], 0)
                if T.block_rank_in_cluster() == 0:
                    T.mbarrier_wait_parity(full[0], 0)
                if T.get_thread_binding() == 0:
                    y[pid] = pid + 1
                T.cluster_sync()

        return main

    y = torch.zeros(8, dtype=torch.int32)
    run(kernel(128), y, checks='races')
    assert y.tolist() == list(range(1, 9))
    with pytest.raises(Deadlock, match='128 of 129 arrivals'):
        interpret(kernel(129), y)


def test_multicast_gives_all_blocks_of_the_mask_what_the_first_loads():
    @T.prim_func
    def main(a: T.Tensor((32, 128), 'float16'), b: T.Tensor((32, 128), 'float16')):
        with T.ClusterKernel(4, 2, threads=128, cluster_dims=(4, 1, 1)) as (bx, by):
            tile = T.alloc_shared((16, 32), 'float16')
            T.copy_cluster(a[by * 16, bx * 32], tile, cluster_mask=0b0110)
            T.copy(tile, b[by * 16, bx * 32])

    a, b = torch.randn(32, 128).half(), torch.empty(32, 128).half()
    run(main, a, b)
    want = a.clone()
    want[:, 64:96] = a[:, 32:64]
    assert torch.equal(b, want)


def mma_kernel(shape, abbreviation, dtype, accumulator, held):
    """One warp: 16 x depth times 8 x depth, A by ldmatrix and B element by element."""
    depth = int(shape.split('k')[1])
    size = getattr(torch, dtype).itemsize
    words = depth * size // 16
    per_word = 4 // size

    @T.prim_func
    def main(a: T.Tensor((16, depth), dtype), b: T.Tensor((8, depth), dtype), c: T.Tensor((16, 8), held)):
        with T.Kernel(1, threads=32):
            lane = T.get_thread_binding()
            a_shared = T.alloc_shared((16, depth), dtype)
            a_local = T.alloc_local((2 * words * per_word,), dtype)
            b_local = T.alloc_local((words * per_word,), dtype)
            c_local = T.alloc_local((4,), held)
            T.copy(a, a_shared)
            T.ptx_ldmatrix(
                T.bool(False),
                2 * words,
                T.access_ptr(a_shared[lane % 16, lane // 16 % words * (16 // size)], 'r', 8),
                T.access_ptr(a_local[0], 'w', 8),
            )
            for k in T.serial(words * per_word):
                b_local[k] = b[lane // 4, k // per_word * (16 // size) + lane % 4 * per_word + k % per_word]
            for k in T.serial(4):
                c_local[k] = c[lane // 4 + k // 2 * 8, lane % 4 * 2 + k % 2]
            T.ptx_mma(
                accumulator,
                shape,
                'row',
                'col',
                abbreviation,
                abbreviation,
                'int32' if held == 'int32' else 'fp32',
                a_local.data,
                0,
                b_local.data,
                0,
                c_local.data,
                0,
                T.bool(False),
            )
            for k in T.serial(4):
                c[lane // 4 + k // 2 * 8, lane % 4 * 2 + k % 2] = c_local[k]

    return main


@pytest.mark.parametrize(
    ('shape', 'abbreviation', 'dtype', 'held'),
    [
        ('m16n8k16', 'fp16', 'float16', 'float32'),
        ('m16n8k16', 'bf16', 'bfloat16', 'float32'),
        ('m16n8k8', 'fp16', 'float16', 'float32'),
        ('m16n8k32', 'int8', 'int8', 'int32'),
        ('m16n8k32', 'e4m3', 'float8_e4m3fn', 'float32'),
    ],
)
def test_ldmatrix_and_mma_of_a_warp(shape, abbreviation, dtype, held):
    depth = int(shape.split('k')[1])
    a, b = (torch.randint(-8, 9, (rows, depth)).to(getattr(torch, dtype)) for rows in (16, 8))
    c = torch.randint(-8, 9, (16, 8)).to(getattr(torch, held))
    want = c.double() + a.double() @ b.double().T
    run(mma_kernel(shape, abbreviation, dtype, held, held), a, b, c, checks='races')
    assert torch.equal(c.double(), want)


def test_ldmatrix_transposed():
    @T.prim_func
    def main(x: T.Tensor((8, 8), 'float16'), y: T.Tensor((8, 8), 'float16')):
        with T.Kernel(1, threads=32):
            lane = T.get_thread_binding()
            s = T.alloc_shared((8, 8), 'float16')
            r = T.alloc_local((2,), 'float16')
            T.copy(x, s)
            T.ptx_ldmatrix(T.bool(True), 1, T.access_ptr(s[lane % 8, 0], 'r', 8), T.access_ptr(r[0], 'w', 2))
            for k in T.serial(2):
                y[lane // 4, lane % 4 * 2 + k] = r[k]

    x, y = torch.randn(8, 8).half(), torch.empty(8, 8).half()
    run(main, x, y)
    assert torch.equal(y, x.T)


def test_dp4a_and_nanosleep_have_models():
    @T.prim_func
    def main(a: T.Tensor((32, 4), 'int8'), b: T.Tensor((32, 4), 'int8'), c: T.Tensor((32,), 'int32')):
        with T.Kernel(1, threads=32):
            lane = T.get_thread_binding()
            total = T.alloc_local((1,), 'int32')
            left = T.alloc_local((4,), 'int8')
            right = T.alloc_local((4,), 'int8')
            total[0] = 5
            for k in T.serial(4):
                left[k] = a[lane, k]
                right[k] = b[lane, k]
            T.call_extern('void', '__nanosleep', 100)
            T.call_extern(
                'handle',
                'DP4A',
                T.address_of(left[0]),
                T.address_of(right[0]),
                T.address_of(total[0]),
            )
            c[lane] = total[0]

    a, b = (torch.randint(-128, 128, (32, 4), dtype=torch.int8) for _ in range(2))
    c = torch.empty(32, dtype=torch.int32)
    run(main, a, b, c)
    assert torch.equal(c, (a.int() * b.int()).sum(1, dtype=torch.int32) + 5)


def decode_kernel(name, count, dtype, *arguments):
    @T.prim_func
    def main(x: T.Tensor((32, 4), 'uint8'), y: T.Tensor((32, count), dtype)):
        with T.Kernel(1, threads=32):
            lane = T.get_thread_binding()
            packed = T.alloc_local((4,), 'uint8')
            plain = T.alloc_local((count,), dtype)
            for k in T.serial(4):
                packed[k] = x[lane, k]
            T.call_extern('handle', name, T.address_of(packed[0]), T.address_of(plain[0]), *arguments)
            for k in T.serial(count):
                y[lane, k] = plain[k]

    return main


def test_decoders_of_packed_numbers_have_models():
    x = torch.randint(0, 256, (32, 4), dtype=torch.uint8)
    nibbles = torch.stack([x & 15, x >> 4], 2).reshape(32, 8).float()
    interleaved = torch.stack([nibbles[:, :4], nibbles[:, 4:]], 2).reshape(32, 8)
    for name, bias in (('decode_i4u_to_f16', 0), ('decode_i4s_to_f16', 8)):
        y = torch.empty(32, 8).half()
        run(decode_kernel(name, 8, 'float16'), x, y)
        assert torch.equal(y.float(), interleaved - bias)
    crumbs = torch.stack([(x >> (2 * k)) & 3 for k in range(4)], 1).reshape(32, 16)
    y = torch.empty(32, 16, dtype=torch.int8)
    run(decode_kernel('decode_i2s_to_i8s', 16, 'int8'), x, y)
    assert torch.equal(y, crumbs.to(torch.int8) - 2)
    values = torch.empty(32, 8, dtype=torch.bfloat16)
    run(decode_kernel('decode_fp4_to_bf16_twiddling', 8, 'bfloat16', 1), x, values)
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert torch.isin(values.float().abs(), e2m1).all()
    pair = x[:, 0].int() << 8 | x[:, 1].int()  # the first number: sign in bit 15, magnitude in bits 8 to 6
    first = e2m1[(pair >> 6 & 7).long()] * torch.where(pair >> 15 == 1, -1.0, 1.0)
    assert torch.equal(values[:, 0].float(), first)


def test_unknown_cuda_functions_are_refused_by_name():
    @T.prim_func
    def main(y: T.Tensor((32,), 'float32')):
        with T.Kernel(1, threads=32):
            y[T.get_thread_binding()] = T.call_extern('float32', 'my_secret_function', T.float32(1))

    with pytest.raises(UnsupportedConstruct, match='external function my_secret_function'):
        interpret(main, torch.empty(32))


def tensor_memory_gemm(wait=True, arrive='gemm', depth=64):
    @T.prim_func
    def main(
        a: T.Tensor((128, depth), 'bfloat16'), b: T.Tensor((128, depth), 'bfloat16'), c: T.Tensor((128, 128), 'float32')
    ):
        with T.Kernel(1, threads=256):
            a_shared = T.alloc_shared((128, 32), 'bfloat16')
            b_shared = T.alloc_shared((128, 32), 'bfloat16')
            c_tmem = T.alloc_tmem([128, 128], 'float32')
            done = T.alloc_barrier(1)
            c_frag = T.alloc_fragment((128, 128), 'float32')
            for k in T.serial(depth // 32):
                T.copy(a[0, k * 32], a_shared)
                T.copy(b[0, k * 32], b_shared)
                if arrive == 'gemm':
                    T.tcgen05_gemm(a_shared, b_shared, c_tmem, False, True, mbar=done, clear_accum=k == 0)
                else:
                    T.tcgen05_gemm(a_shared, b_shared, c_tmem, False, True, mbar=None, clear_accum=k == 0)
                    T.tcgen05_mma_arrive(done)
                if wait:
                    T.mbarrier_wait_parity(done, k % 2)
            T.copy(c_tmem, c_frag)
            T.copy(c_frag, c)

    return main


@pytest.mark.parametrize('arrive', ['gemm', 'later'])
def test_products_in_tensor_memory(arrive):
    a, b = torch.randn(128, 64).bfloat16(), torch.randn(128, 64).bfloat16()
    c = torch.empty(128, 128)
    run(tensor_memory_gemm(arrive=arrive), a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-5, atol=1e-4)
    with pytest.raises(AsyncReadBeforeWait, match='c_tmem is read at index'):
        interpret(tensor_memory_gemm(wait=False, arrive=arrive), a, b, c)
