"""Buffers: guards, strides, views, packed types, optional and scalar arguments."""

import numpy as np
import pytest
import tilelang.language as T
import torch

from tile_kernels.interpreter import OutOfBounds, UninitializedRead, UnsupportedConstruct, interpret


def tile_kernel(num_rows, block_m=16, hidden=24):
    @T.prim_func
    def copy_tiles(x: T.Tensor((num_rows, hidden), 'float32'), y: T.Tensor((num_rows, hidden), 'float32')):
        with T.Kernel(T.ceildiv(num_rows, block_m), threads=64) as pid:
            tile = T.alloc_shared((block_m, 32), 'float32')
            T.copy(x[pid * block_m, 0], tile)
            for i, j in T.Parallel(block_m, 32):
                tile[i, j] = tile[i, j] + 1.0
            T.copy(tile, y[pid * block_m, 0])

    return copy_tiles


@pytest.mark.parametrize('num_rows', [1, 16, 37])
def test_guarded_tails(num_rows):
    x = torch.randn(num_rows, 24)
    y = torch.zeros_like(x)
    report = interpret(tile_kernel(T.dynamic('num_rows')), x, y)
    assert torch.equal(y, x + 1)
    assert {buffer for _, buffer in report.guarded} == {'x', 'y'}
    assert len(report.findings) == len(report.guarded)


def test_loads_outside_give_the_safe_value():
    num_elements = T.dynamic('num_elements')

    @T.prim_func
    def padded(x: T.Tensor((num_elements,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=64):
            T.annotate_safe_value({x: -1.0})
            tile = T.alloc_shared((64,), 'float32')
            T.copy(x[0], tile)
            for i in T.Parallel(64):
                y[i] = tile[i] + x[i]

    x = torch.ones(40)
    y = torch.zeros(64)
    interpret(padded, x, y)
    assert y.tolist() == [2.0] * 40 + [-2.0] * 24


def test_copy_windows_may_start_before_the_tensor():
    @T.prim_func
    def halo(x: T.Tensor((32,), 'float32'), y: T.Tensor((2, 20), 'float32')):
        with T.Kernel(2, threads=32) as pid:
            tile = T.alloc_shared((20,), 'float32')
            T.copy(x[pid * 16 - 2 : pid * 16 + 18], tile)
            T.copy(tile, y[pid, 0:20])

    x, y = torch.randn(32), torch.empty(2, 20)
    interpret(halo, x, y)
    padded = torch.nn.functional.pad(x, (2, 2))
    assert torch.equal(y, torch.stack([padded[:20], padded[16:36]]))


def test_literal_index_is_not_guarded():
    num_elements = T.dynamic('num_elements')

    @T.prim_func
    def fifth(x: T.Tensor((num_elements,), 'float32'), y: T.Tensor((1,), 'float32')):
        with T.Kernel(1, threads=32):
            y[0] = x[5]

    y = torch.zeros(1)
    interpret(fifth, torch.arange(6.0), y)
    assert y.item() == 5
    with pytest.raises(OutOfBounds):
        interpret(fifth, torch.arange(3.0), y)


def test_strided_rows_and_dynamic_strides():
    num_tokens, row_stride = T.dynamic('num_tokens'), T.dynamic('row_stride')

    @T.prim_func
    def double(
        x: T.StridedTensor((num_tokens, 16), (row_stride, 1), 'float32'), y: T.Tensor((num_tokens, 16), 'float32')
    ):
        with T.Kernel(num_tokens, threads=32) as pid:
            for j in T.Parallel(16):
                y[pid, j] = x[pid, j] * 2.0

    base = torch.randn(5, 40)
    y = torch.empty(5, 16)
    interpret(double, base[:, 8:24], y)
    assert torch.equal(y, base[:, 8:24] * 2)


def test_outputs_may_be_views():
    num_tokens = T.dynamic('num_tokens')
    strides = T.dynamic('row_stride'), T.dynamic('column_stride')

    @T.prim_func
    def fill(y: T.StridedTensor((num_tokens, 8), strides, 'int32')):
        with T.Kernel(num_tokens, threads=32) as pid:
            for j in T.Parallel(8):
                y[pid, j] = pid * 8 + j

    base = torch.full((8, 6), -1, dtype=torch.int32)
    interpret(fill, base.T[:4])
    assert torch.equal(base.T[:4], torch.arange(32, dtype=torch.int32).reshape(4, 8))
    assert (base.T[4:] == -1).all()


def test_shapes_and_strides_are_checked():
    @T.prim_func
    def packed(x: T.Tensor((4, 8), 'float32')):
        with T.Kernel(1, threads=32):
            x[0, 0] = 1.0

    with pytest.raises(ValueError, match='shape'):
        interpret(packed, torch.zeros(4, 9))
    with pytest.raises(ValueError, match='strides'):
        interpret(packed, torch.zeros(8, 4).T)
    with pytest.raises(ValueError, match='dimensions'):
        interpret(packed, torch.zeros(32))
    with pytest.raises(TypeError, match='float32'):
        interpret(packed, torch.zeros(4, 8, dtype=torch.float64))
    with pytest.raises(TypeError, match='1 arguments'):
        interpret(packed)


def test_symbols_must_agree_between_tensors():
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def pair(x: T.Tensor((num_tokens,), 'float32'), y: T.Tensor((num_tokens,), 'float32')):
        with T.Kernel(1, threads=32):
            y[0] = x[0]

    with pytest.raises(ValueError, match='y'):
        interpret(pair, torch.zeros(3), torch.zeros(4))


def test_unused_tensors_may_be_none():
    @T.prim_func
    def optional(x: T.Tensor((8,), 'float32'), bias: T.Tensor((8,), 'float32'), y: T.Tensor((8,), 'float32')):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                y[i] = x[i]

    x, y = torch.randn(8), torch.empty(8)
    interpret(optional, x, None, y)
    assert torch.equal(x, y)
    with pytest.raises(UnsupportedConstruct, match='None'):
        interpret(optional, None, None, y)


def test_scalar_arguments():
    @T.prim_func
    def affine(x: T.Tensor((8,), 'float32'), factor: T.float32, shift: T.int32, y: T.Tensor((8,), 'float32')):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                y[i] = x[i] * factor + T.cast(shift, 'float32')

    x, y = torch.randn(8), torch.empty(8)
    interpret(affine, x, 0.1, 3, y)
    assert torch.equal(y, x * torch.tensor(0.1) + 3)


def test_views_of_global_memory_under_another_type():
    @T.prim_func
    def words(x: T.Tensor((4, 8), 'bfloat16'), y: T.Tensor((4, 4), 'uint32')):
        with T.Kernel(4, threads=32) as pid:
            x_words = T.view(x, (4, 4), 'uint32')
            for j in T.Parallel(4):
                y[pid, j] = x_words[pid, j]

    x = torch.randn(4, 8).bfloat16()
    y = torch.zeros(4, 4, dtype=torch.uint32)
    interpret(words, x, y)
    assert torch.equal(y.view(torch.bfloat16), x)


def test_views_of_shared_memory_under_another_type():
    @T.prim_func
    def bits(x: T.Tensor((16,), 'float32'), y: T.Tensor((8, 2), 'int32'), z: T.Tensor((64,), 'uint8')):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((16,), 'float32')
            T.copy(x, tile)
            T.copy(T.view(tile, (8, 2), 'int32'), y)
            T.copy(T.view(tile, (64,), 'uint8'), z)

    x, y, z = torch.randn(16), torch.zeros(8, 2, dtype=torch.int32), torch.zeros(64, dtype=torch.uint8)
    interpret(bits, x, y, z)
    assert torch.equal(y.flatten(), x.view(torch.int32)) and torch.equal(z, x.view(torch.uint8))


def test_views_of_registers_under_another_type():
    @T.prim_func
    def registers(x: T.Tensor((32, 4), 'bfloat16'), y: T.Tensor((32, 2), 'uint32'), z: T.Tensor((32, 8), 'uint8')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            values = T.alloc_local((4,), 'bfloat16')
            words = T.view(values, (2,), 'uint32')
            octets = T.view(values, (8,), 'uint8')
            for k in T.vectorized(4):
                values[k] = x[thread, k]
            for k in T.unroll(2):
                y[thread, k] = words[k]
            words[1] = T.uint32(0x01020304)
            for k in T.unroll(8):
                z[thread, k] = octets[k]

    x = torch.randn(32, 4).bfloat16()
    y, z = torch.zeros(32, 2, dtype=torch.uint32), torch.zeros(32, 8, dtype=torch.uint8)
    interpret(registers, x, y, z)
    assert torch.equal(y.view(torch.bfloat16), x)
    assert torch.equal(z[:, :4], x.view(torch.uint8)[:, :4]) and z[0, 4:].tolist() == [4, 3, 2, 1]


def test_reshaped_fragments_share_their_data():
    @T.prim_func
    def groups(x: T.Tensor((64,), 'float32'), y: T.Tensor((4,), 'float32')):
        with T.Kernel(1, threads=32):
            values = T.alloc_fragment((64,), 'float32')
            peak = T.alloc_fragment((4,), 'float32')
            T.copy(x, values)
            T.reduce_max(T.reshape(values, (4, 16)), peak, dim=1)
            T.copy(peak, y)

    x, y = torch.randn(64), torch.empty(4)
    interpret(groups, x, y)
    assert torch.equal(y, x.view(4, 16).amax(1))


def test_two_numbers_of_four_bits_share_a_byte():
    num_rows = T.dynamic('num_rows')

    @T.prim_func
    def to_e2m1(
        x: T.Tensor((num_rows, 8), 'float32'),
        y: T.Tensor((num_rows, 8), 'float4_e2m1fn'),
        z: T.Tensor((num_rows, 8), 'float32'),
    ):
        with T.Kernel(num_rows, threads=32) as pid:
            tile = T.alloc_shared((8,), 'float4_e2m1fn')
            for j in T.Parallel(8):
                tile[j] = T.cast(x[pid, j], 'float4_e2m1fn')
            for j in T.Parallel(8):
                y[pid, j] = tile[j]
                z[pid, j] = T.cast(tile[j], 'float32')

    x = torch.tensor([[0.0, 0.5, 1.0, 1.5, -2.0, -3.0, 4.0, -9.0]]).repeat(3, 1)
    y, z = torch.zeros(3, 4, dtype=torch.uint8), torch.empty(3, 8)
    interpret(to_e2m1, x, y, z)
    assert y[1].tolist() == [0x10, 0x32, 0xDC, 0xF6]
    assert z[2].tolist() == [0.0, 0.5, 1.0, 1.5, -2.0, -3.0, 4.0, -6.0]


@pytest.mark.parametrize(
    'dtype',
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bool, torch.int8, torch.int64, torch.float64],
)
def test_every_stored_type_copies_its_bits(dtype):
    name = str(dtype).removeprefix('torch.')

    @T.prim_func
    def through_shared(x: T.Tensor((64,), name), y: T.Tensor((64,), name)):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((64,), name)
            T.copy(x, tile)
            T.copy(tile, y)

    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 100, 64 * dtype.itemsize).astype(np.uint8))
    x = (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
    y = torch.empty(64, dtype=dtype)
    interpret(through_shared, x, y)
    assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_registers_indexed_by_lane():
    @T.prim_func
    def pick(x: T.Tensor((32,), 'int32'), y: T.Tensor((32,), 'int32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            values = T.alloc_local((4,), 'int32')
            for k in T.unroll(4):
                values[k] = k * 10
            values[x[thread]] = 99
            y[thread] = values[(x[thread] + thread) % 4]

    x = torch.arange(32, dtype=torch.int32) % 4
    y = torch.zeros(32, dtype=torch.int32)
    interpret(pick, x, y)
    want = []
    for thread in range(32):
        values = [0, 10, 20, 30]
        values[thread % 4] = 99
        want.append(values[(thread % 4 + thread) % 4])
    assert y.tolist() == want


def test_register_written_by_some_threads_only():
    @T.prim_func
    def half(x: T.Tensor((32,), 'int32'), y: T.Tensor((32,), 'int32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            value = T.alloc_local((1,), 'int32')
            if x[thread] > 0:
                value[0] = x[thread]
            y[thread] = value[0]

    interpret(half, torch.ones(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32))
    x = torch.ones(32, dtype=torch.int32)
    x[7] = 0
    with pytest.raises(UninitializedRead) as caught:
        interpret(half, x, torch.zeros(32, dtype=torch.int32))
    assert caught.value.thread == 7 and caught.value.buffer == 'value'
    interpret(half, x, torch.zeros(32, dtype=torch.int32), checks='none')


def test_raw_pointers():
    @T.prim_func
    def gather(table: T.Tensor((3,), 'int64'), bias: T.ptr, y: T.Tensor((3, 16), 'float32')):
        with T.Kernel(3, threads=32) as pid:
            row = T.make_tensor(table[pid], (16,), 'float32')
            shift = T.make_tensor(bias, (16,), 'float32')
            for j in T.Parallel(16):
                y[pid, j] = row[j] + shift[j]

    rows, bias = [torch.randn(16) for _ in range(3)], torch.randn(16)
    y = torch.empty(3, 16)
    interpret(gather, torch.tensor([row.data_ptr() for row in rows]), bias, y)
    assert torch.equal(y, torch.stack(rows) + bias)


def test_wide_loads_and_stores():
    @T.prim_func
    def move(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=16):
            thread = T.get_thread_binding()
            tile = T.alloc_shared((64,), 'float32')
            T.sts128(tile[thread * 4 : thread * 4 + 4], T.ldg128(x[thread * 4 : thread * 4 + 4], pred=thread < 8))
            T.sync_threads()
            T.stg128(y[thread * 4 : thread * 4 + 4], T.lds128(tile[thread * 4 : thread * 4 + 4]))

    x, y = torch.randn(64), torch.empty(64)
    interpret(move, x, y)
    assert torch.equal(y, torch.where(torch.arange(64) < 32, x, 0))


@pytest.mark.parametrize('checks', ['none', 'memory', 'all'])
def test_negative_index_of_a_tensor_is_guarded(checks):
    @T.prim_func
    def shifted(x: T.Tensor((32, 16), 'float32'), y: T.Tensor((32, 16), 'float32'), z: T.Tensor((32, 16), 'float32')):
        with T.Kernel(1, threads=64):
            T.annotate_safe_value({x: 7.0})
            for i, j in T.Parallel(32, 16):
                y[i, j] = x[i - 10, j]
            for i, j in T.Parallel(42, 16):
                z[i - 10, j] = x[i - 10, j]

    x, y, z = torch.randn(32, 16), torch.empty(32, 16), torch.empty(32, 16)
    report = interpret(shifted, x, y, z, checks=checks)
    assert torch.equal(y, torch.cat([torch.full((10, 16), 7.0), x[:22]]))
    assert torch.equal(z, x)
    assert len(report.guarded) == 3


def test_index_that_is_surely_negative_counts_from_the_end():
    @T.prim_func
    def reverse(x: T.Tensor((64,), 'float32'), y: T.Tensor((2, 64), 'float32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            tile = T.alloc_shared((64,), 'float32')
            tile[thread] = x[-thread - 1]
            T.sync_threads()
            y[0, thread] = tile[-1]
            for i in T.serial(64):
                y[1, i] = tile[i - 64]

    x, y = torch.randn(64), torch.empty(2, 64)
    interpret(reverse, x, y, checks='all')
    assert torch.equal(y[0], x[:1].expand(64))
    assert torch.equal(y[1], x.flip(0))


def test_safe_value_of_an_inner_block_holds_for_copies_inside_and_for_later_loads():
    @T.prim_func
    def nested(x: T.Tensor((50,), 'float32'), y: T.Tensor((4, 64), 'float32')):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((64,), 'float32')
            T.annotate_safe_value({x: -1.0})
            with T.sblock('inner'):
                T.annotate_safe_value({x: 5.0})
                for i in T.Parallel(64):
                    y[0, i] = x[i]
                T.copy(x[0:64], tile)
                T.copy(tile, y[1, 0:64])
            for i in T.Parallel(64):
                y[2, i] = x[i]
            T.copy(x[0:64], tile)
            T.copy(tile, y[3, 0:64])

    y = torch.empty(4, 64)
    interpret(nested, torch.zeros(50), y)
    assert y[:, 50:].tolist() == [[5.0] * 14, [5.0] * 14, [5.0] * 14, [-1.0] * 14]


def test_name_of_a_region_reads_nothing():
    @T.prim_func
    def alias(x: T.Tensor((64, 64), 'float32'), y: T.Tensor((64, 64), 'float32')):
        with T.Kernel(1, threads=64):
            tile = T.alloc_shared((64, 64), 'float32')
            part = tile[:64, :64]
            T.copy(x, part)
            T.copy(part, y)

    x, y = torch.randn(64, 64), torch.empty(64, 64)
    interpret(alias, x, y)
    assert torch.equal(x, y)


def test_variables_start_at_zero_and_strict_wants_a_start():
    @T.prim_func
    def count(y: T.Tensor((4,), 'int32')):
        with T.Kernel(1, threads=1):
            total = T.alloc_var('int32')
            for i in T.serial(4):
                total += i
                y[i] = total

    y = torch.empty(4, dtype=torch.int32)
    interpret(count, y, checks='all')
    assert y.tolist() == [0, 1, 3, 6]
    with pytest.raises(UninitializedRead, match='total'):
        interpret(count, y, strict=True)


def test_index_beyond_32_bits():
    n = T.dynamic('n', 'int64')

    @T.prim_func
    def static(x: T.StridedTensor((2**33,), (0,), 'int32'), y: T.Tensor((8,), 'int32')):
        with T.Kernel(8, threads=32) as pid:
            y[pid] = x[pid * (1 << 30) + 5]

    @T.prim_func
    def symbolic(x: T.StridedTensor((n,), (0,), 'int32'), y: T.Tensor((8,), 'int32')):
        with T.Kernel(8, threads=32) as pid:
            for i in T.Parallel(1):
                y[pid] = x[pid * (1 << 30) + i]

    for kernel in (static, symbolic):
        y = torch.zeros(8, dtype=torch.int32)
        interpret(kernel, torch.full((1,), 7, dtype=torch.int32).expand(2**33), y, checks='memory')
        assert y.tolist() == [7] * 8


def test_vector_index_may_have_a_name():
    @T.prim_func
    def double(x: T.Tensor((68,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=16):
            index = T.Ramp(T.get_thread_binding() * 4, 1, 4)
            y[index] = x[index] + x[index + T.Broadcast(4, 4)]

    x, y = torch.randn(68), torch.empty(64)
    interpret(double, x, y, checks='all')
    assert torch.equal(y, x[:64] + x[4:])


def test_vector_of_unknown_sign_counts_from_the_end():
    @T.prim_func
    def shifted(x: T.Tensor((32,), 'float32'), y: T.Tensor((4, 4), 'float32'), z: T.Tensor((32,), 'float32')):
        with T.Kernel(1, threads=1):
            for t in T.serial(4):
                y[t, T.Ramp(0, 1, 4)] = x[T.Ramp(t - 2, 1, 4)]
                z[T.Ramp(t - 2, 1, 4)] = y[t, T.Ramp(0, 1, 4)]

    x, y, z = torch.arange(32.0), torch.empty(4, 4), torch.zeros(32)
    interpret(shifted, x, y, z)
    assert y.tolist() == [[30, 31, 0, 1], [31, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4]]
    assert z.nonzero().flatten().tolist() == [1, 2, 3, 4, 30, 31]
    assert torch.equal(z[30:], x[30:])


def test_tensors_without_elements():
    rows, columns = T.dynamic('rows'), T.dynamic('columns')

    @T.prim_func
    def padded(x: T.Tensor((rows, columns), 'float32'), y: T.Tensor((4, 64), 'float32'), z: T.Tensor((4,), 'float32')):
        with T.Kernel(4, threads=64) as pid:
            tile = T.alloc_shared((64,), 'float32')
            total = T.alloc_fragment((1,), 'float32')
            T.clear(total)
            T.copy(x[pid, 0:64], tile)
            for i in T.Parallel(64):
                y[pid, i] = tile[i] + x[pid, i]
            for i in T.serial(columns):
                total[0] += x[pid, i]
            for i in T.Parallel(columns):
                total[0] += x[pid, i]
            z[pid] = total[0]

    for shape in ((0, 64), (4, 0), (0, 0)):
        y, z = torch.ones(4, 64), torch.ones(4)
        interpret(padded, torch.empty(shape), y, z, checks='all')
        assert not y.any()
        assert not z.any()
