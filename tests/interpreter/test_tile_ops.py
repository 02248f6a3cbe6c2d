"""Tile operators against NumPy and PyTorch: copy, fill, gemm, reduce, scan, reducers, transposes."""

import pytest
import tilelang
import tilelang.language as T
import torch

from tile_kernels.interpreter import interpret


@pytest.mark.parametrize(
    ('source', 'target'), [('shared', 'fragment'), ('fragment', 'shared'), ('fragment', 'fragment')]
)
def test_copy_converts_between_scopes_and_types(source, target):
    allocate = {'shared': T.alloc_shared, 'fragment': T.alloc_fragment}

    @T.prim_func
    def convert(x: T.Tensor((32, 48), 'float32'), y: T.Tensor((32, 48), 'float32')):
        with T.Kernel(1, threads=64):
            first = allocate[source]((32, 48), 'float32')
            second = allocate[target]((32, 48), 'float16')
            T.copy(x, first)
            T.copy(first, second)
            T.copy(second, y)

    x, y = torch.randn(32, 48), torch.empty(32, 48)
    interpret(convert, x, y)
    assert torch.equal(y, x.half().float())


def test_copy_matches_dimensions_of_extent_other_than_one_in_order():
    @T.prim_func
    def slices(x: T.Tensor((4, 8, 3, 16), 'float32'), y: T.Tensor((8, 4, 16), 'float32')):
        with T.Kernel(4, 3, threads=32) as (a, c):
            tile = T.alloc_shared((8, 16), 'float32')
            T.copy(x[a, 0:8, c, 0:16], tile)
            if c == 1:
                T.copy(tile, y[0:8, a, 0:16])

    x, y = torch.randn(4, 8, 3, 16), torch.empty(8, 4, 16)
    interpret(slices, x, y)
    assert torch.equal(y, x[:, :, 1].transpose(0, 1))


def test_copy_between_registers_and_memory_is_private_to_each_thread():
    @T.prim_func
    def private(x: T.Tensor((32, 4), 'float32'), y: T.Tensor((32, 4), 'float32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            values = T.alloc_local((4,), 'float32')
            T.copy(x[thread, 0:4], values)
            for k in T.unroll(4):
                values[k] = values[k] + T.cast(thread, 'float32')
            T.copy(values, y[thread, 0:4])

    x, y = torch.randn(32, 4), torch.empty(32, 4)
    interpret(private, x, y)
    assert torch.equal(y, x + torch.arange(32.0)[:, None])


def test_fill_and_clear_parts_of_a_tile():
    @T.prim_func
    def corners(y: T.Tensor((8, 8), 'int32')):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((8, 8), 'int32')
            T.fill(tile, 7)
            T.clear(tile[2:4, 0:8])
            T.fill(tile[5, 1:3], -1)
            T.copy(tile, y)

    y = torch.empty(8, 8, dtype=torch.int32)
    interpret(corners, y)
    want = torch.full((8, 8), 7, dtype=torch.int32)
    want[2:4] = 0
    want[5, 1:3] = -1
    assert torch.equal(y, want)


@pytest.mark.parametrize('transpose_a', [False, True])
@pytest.mark.parametrize('transpose_b', [False, True])
@pytest.mark.parametrize('dtype', ['float16', 'bfloat16', 'float8_e4m3fn', 'int8'])
def test_gemm(transpose_a, transpose_b, dtype):
    out = 'int32' if dtype == 'int8' else 'float32'
    shape_a, shape_b = ((64, 32) if transpose_a else (32, 64)), ((48, 64) if transpose_b else (64, 48))

    @T.prim_func
    def multiply(a: T.Tensor(shape_a, dtype), b: T.Tensor(shape_b, dtype), c: T.Tensor((32, 48), out)):
        with T.Kernel(1, threads=64):
            a_shared, b_shared = T.alloc_shared(shape_a, dtype), T.alloc_shared(shape_b, dtype)
            c_frag = T.alloc_fragment((32, 48), out)
            T.copy(a, a_shared)
            T.copy(b, b_shared)
            T.clear(c_frag)
            T.gemm(a_shared, b_shared, c_frag, transpose_A=transpose_a, transpose_B=transpose_b)
            T.gemm(a_shared, b_shared, c_frag, transpose_A=transpose_a, transpose_B=transpose_b)
            T.copy(c_frag, c)

    kind = getattr(torch, dtype)
    a, b = (torch.randint(-4, 5, shape).to(kind) for shape in (shape_a, shape_b))
    c = torch.empty(32, 48, dtype=getattr(torch, out))
    interpret(multiply, a, b, c)
    left = a.float().T if transpose_a else a.float()
    right = b.float().T if transpose_b else b.float()
    assert torch.equal(c.float(), 2 * (left @ right))


def test_gemm_can_clear_its_accumulator_and_work_on_slices():
    @T.prim_func
    def slices(
        a: T.Tensor((2, 32, 32), 'float16'), b: T.Tensor((32, 32), 'float16'), c: T.Tensor((2, 32, 32), 'float32')
    ):
        with T.Kernel(1, threads=64):
            a_shared, b_shared = T.alloc_shared((2, 32, 32), 'float16'), T.alloc_shared((32, 32), 'float16')
            c_frag = T.alloc_fragment((32, 32), 'float32')
            T.copy(a, a_shared)
            T.copy(b, b_shared)
            for stage in T.serial(2):
                T.gemm(a_shared[stage, :, :], b_shared, c_frag, clear_accum=True)
                T.copy(c_frag, c[stage, 0:32, 0:32])

    a, b = torch.randint(-4, 5, (2, 32, 32)).half(), torch.randint(-4, 5, (32, 32)).half()
    c = torch.empty(2, 32, 32)
    interpret(slices, a, b, c)
    assert torch.equal(c, a.float() @ b.float())


REDUCTIONS = {
    'reduce_sum': lambda x, dim: x.sum(dim),
    'reduce_max': lambda x, dim: x.amax(dim),
    'reduce_min': lambda x, dim: x.amin(dim),
    'reduce_abssum': lambda x, dim: x.abs().sum(dim),
    'reduce_absmax': lambda x, dim: x.abs().amax(dim),
}


@pytest.mark.parametrize('name', REDUCTIONS)
@pytest.mark.parametrize('dim', [0, 1])
def test_reduce(name, dim):
    shape = (32,) if dim else (64,)

    @T.prim_func
    def reduce(x: T.Tensor((32, 64), 'float32'), y: T.Tensor(shape, 'float32')):
        with T.Kernel(1, threads=64):
            values, result = T.alloc_fragment((32, 64), 'float32'), T.alloc_fragment(shape, 'float32')
            T.copy(x, values)
            getattr(T, name)(values, result, dim=dim)
            T.copy(result, y)

    x, y = torch.randint(-50, 50, (32, 64)).float(), torch.empty(shape)
    interpret(reduce, x, y)
    assert torch.equal(y, REDUCTIONS[name](x, dim))


@pytest.mark.parametrize('name', ['reduce_bitand', 'reduce_bitor', 'reduce_bitxor'])
def test_reduce_bits(name):
    @T.prim_func
    def reduce(x: T.Tensor((16, 32), 'int32'), y: T.Tensor((16,), 'int32')):
        with T.Kernel(1, threads=32):
            values, result = T.alloc_fragment((16, 32), 'int32'), T.alloc_fragment((16,), 'int32')
            T.copy(x, values)
            getattr(T, name)(values, result, dim=1)
            T.copy(result, y)

    x = torch.randint(0, 1 << 20, (16, 32), dtype=torch.int32)
    x[:, :] |= 1 << 10
    y = torch.empty(16, dtype=torch.int32)
    interpret(reduce, x, y)
    want = x[:, 0].clone()
    for column in x.T[1:]:
        want = {'reduce_bitand': want & column, 'reduce_bitor': want | column, 'reduce_bitxor': want ^ column}[name]
    assert torch.equal(y, want)


def test_reduce_into_old_values():
    @T.prim_func
    def running(x: T.Tensor((3, 16, 32), 'float32'), y: T.Tensor((16,), 'float32'), z: T.Tensor((16,), 'float32')):
        with T.Kernel(1, threads=32):
            values = T.alloc_fragment((16, 32), 'float32')
            total, peak = T.alloc_fragment((16,), 'float32'), T.alloc_fragment((16,), 'float32')
            T.clear(total)
            T.fill(peak, -T.infinity('float32'))
            for step in T.serial(3):
                T.copy(x[step, 0:16, 0:32], values)
                T.reduce_sum(values, total, dim=1, clear=False)
                T.reduce_max(values, peak, dim=1, clear=False)
            T.copy(total, y)
            T.copy(peak, z)

    x, y, z = torch.randint(-9, 9, (3, 16, 32)).float(), torch.empty(16), torch.empty(16)
    interpret(running, x, y, z)
    assert torch.equal(y, x.sum((0, 2))) and torch.equal(z, x.amax((0, 2)))


def test_max_reduction_drops_nan():
    @T.prim_func
    def peak(x: T.Tensor((2, 32), 'float32'), y: T.Tensor((2,), 'float32')):
        with T.Kernel(1, threads=32):
            values, result = T.alloc_fragment((2, 32), 'float32'), T.alloc_fragment((2,), 'float32')
            T.copy(x, values)
            T.reduce_max(values, result, dim=1)
            T.copy(result, y)

    x = torch.arange(64.0).view(2, 32)
    x[0, 5] = float('nan')
    y = torch.empty(2)
    interpret(peak, x, y)
    assert y.tolist() == [31, 63]


@pytest.mark.parametrize('name', ['max', 'min', 'absmax'])
@pytest.mark.parametrize('clear', [True, False])
def test_reduction_that_propagates_nan(name, clear):
    @T.prim_func
    def peak(x: T.Tensor((2, 32), 'bfloat16'), y: T.Tensor((2,), 'bfloat16')):
        with T.Kernel(1, threads=32):
            values, result = T.alloc_fragment((2, 32), 'bfloat16'), T.alloc_fragment((2,), 'bfloat16')
            T.copy(x, values)
            T.copy(y, result)
            getattr(T, f'reduce_{name}')(values, result, dim=1, clear=clear, nan_propagate=True)
            T.copy(result, y)

    x = torch.ones(2, 32).bfloat16()
    x[0, 5] = float('nan')
    y = torch.ones(2).bfloat16()
    interpret(peak, x, y)
    assert y.isnan().tolist() == [True, False]
    assert y[1] == 1
    interpret(peak, torch.ones(2, 32).bfloat16(), y)
    assert y.isnan().tolist() == [not clear, False]


def test_reduce_registers_of_a_thread():
    @T.prim_func
    def own(x: T.Tensor((32, 8), 'float32'), y: T.Tensor((32,), 'float32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            values, total = T.alloc_local((8,), 'float32'), T.alloc_local((1,), 'float32')
            for k in T.unroll(8):
                values[k] = x[thread, k]
            T.reduce_sum(values, total, dim=0)
            y[thread] = total[0]

    x, y = torch.randint(-9, 9, (32, 8)).float(), torch.empty(32)
    interpret(own, x, y)
    assert torch.equal(y, x.sum(1))


@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize('dim', [0, 1])
def test_cumsum_and_cummax(reverse, dim):
    @T.prim_func
    def scan(x: T.Tensor((16, 32), 'int32'), y: T.Tensor((16, 32), 'int32'), z: T.Tensor((16, 32), 'int32')):
        with T.Kernel(1, threads=32):
            tile, peaks = T.alloc_shared((16, 32), 'int32'), T.alloc_fragment((16, 32), 'int32')
            T.copy(x, tile)
            T.copy(x, peaks)
            T.cumsum(tile, dim=dim, reverse=reverse)
            T.cummax(peaks, dim=dim, reverse=reverse)
            T.copy(tile, y)
            T.copy(peaks, z)

    x = torch.randint(-9, 9, (16, 32), dtype=torch.int32)
    y, z = torch.empty_like(x), torch.empty_like(x)
    interpret(scan, x, y, z)
    given = x.flip(dim) if reverse else x
    total, peak = given.cumsum(dim).int(), given.cummax(dim).values
    assert torch.equal(y, total.flip(dim) if reverse else total)
    assert torch.equal(z, peak.flip(dim) if reverse else peak)


def test_reducer_in_the_older_syntax():
    @T.prim_func
    def rows(x: T.Tensor((64, 8), 'float32'), y: T.Tensor((64, 8), 'float32')):
        with T.Kernel(1, threads=128):
            x_frag = T.alloc_fragment((64, 8), 'float32')
            total = T.alloc_reducer((64,), 'float32')
            T.copy(x, x_frag)
            T.clear(total)
            for i, j in T.Parallel(64, 8):
                total[i] += x_frag[i, j]
            T.finalize_reducer(total)
            for i, j in T.Parallel(64, 8):
                y[i, j] = x_frag[i, j] - total[i]

    x, y = torch.randn(64, 8), torch.empty(64, 8)
    interpret(rows, x, y, checks='all')
    torch.testing.assert_close(y, x - x.sum(1, keepdim=True))


def test_reducer_counts_every_iteration_once():
    @T.prim_func
    def reducer(x: T.Tensor((8, 100), 'float32'), y: T.Tensor((8, 2), 'float32')):
        with T.Kernel(8, threads=64) as pid:
            total = T.alloc_reducer((1,), 'float32', op='sum')
            peak = T.alloc_reducer((1,), 'float32', op='max')
            result = T.alloc_fragment((1,), 'float32')
            T.reducer_init(total, 1000.0)
            T.reducer_init(peak)
            for j in T.Parallel(100):
                T.reducer_update(total[0], x[pid, j])
                if j < 50:
                    T.reducer_update(peak[0], x[pid, j])
            T.finalize_reducer(total, result)
            y[pid, 0] = result[0]
            T.finalize_reducer(peak, result)
            y[pid, 1] = result[0]

    x, y = torch.randint(-50, 50, (8, 100)).float(), torch.empty(8, 2)
    interpret(reducer, x, y)
    assert torch.equal(y, torch.stack([x.sum(1) + 1000, x[:, :50].amax(1)], 1))


def test_parallel_iterations_may_accumulate_into_one_element():
    @T.prim_func
    def rows(x: T.Tensor((16, 64), 'float32'), y: T.Tensor((16,), 'float32'), z: T.Tensor((1,), 'float32')):
        with T.Kernel(1, threads=64):
            values, total = T.alloc_fragment((16, 64), 'float32'), T.alloc_fragment((16,), 'float32')
            mine = T.alloc_var('float32', init=0.0)
            T.copy(x, values)
            T.clear(total)
            for i, j in T.Parallel(16, 64):
                total[i] += values[i, j]
                mine += values[i, j]
            T.copy(total, y)
            everybody = T.alloc_shared((1,), 'float32')
            everybody[0] = 0.0
            T.atomic_add(everybody[0], mine)
            T.sync_threads()
            z[0] = everybody[0]

    x, y, z = torch.randint(-9, 9, (16, 64)).float(), torch.empty(16), torch.empty(1)
    interpret(rows, x, y, z)
    assert torch.equal(y, x.sum(1)) and z.item() == x.sum()


def test_registers_inside_parallel_are_private_to_the_iteration():
    @T.prim_func
    def horner(x: T.Tensor((8, 32), 'float32'), y: T.Tensor((8, 32), 'float32')):
        with T.Kernel(8, threads=32) as pid:
            value = T.alloc_var('float32')
            for j in T.Parallel(32):
                value = 1.0
                for _ in T.serial(3):
                    value = value * x[pid, j] + 1.0
                y[pid, j] = value

    x, y = torch.randint(-3, 4, (8, 32)).float(), torch.empty(8, 32)
    interpret(horner, x, y)
    assert torch.equal(y, ((x + 1) * x + 1) * x + 1)


def test_pipelined_loops_and_layout_hints_do_not_change_results():
    @T.prim_func
    def pipelined(a: T.Tensor((64, 96), 'float16'), b: T.Tensor((96, 64), 'float16'), c: T.Tensor((64, 64), 'float32')):
        with T.Kernel(2, 2, threads=64) as (bx, by):
            a_shared, b_shared = T.alloc_shared((32, 32), 'float16'), T.alloc_shared((32, 32), 'float16')
            c_frag = T.alloc_fragment((32, 32), 'float32')
            T.annotate_layout({a_shared: tilelang.layout.make_swizzled_layout(a_shared)})
            T.use_swizzle(4)
            T.clear(c_frag)
            for k in T.Pipelined(3, num_stages=2):
                T.copy(a[by * 32, k * 32], a_shared)
                T.copy(b[k * 32, bx * 32], b_shared)
                T.gemm(a_shared, b_shared, c_frag)
            T.copy(c_frag, c[by * 32, bx * 32])

    a, b, c = torch.randint(-4, 5, (64, 96)).half(), torch.randint(-4, 5, (96, 64)).half(), torch.empty(64, 64)
    interpret(pipelined, a, b, c, checks='all')
    assert torch.equal(c, a.float() @ b.float())


def test_transpose_of_a_tile():
    @T.prim_func
    def flip(x: T.Tensor((32, 64), 'float32'), y: T.Tensor((64, 32), 'float32'), z: T.Tensor((64, 32), 'float32')):
        with T.Kernel(1, threads=64):
            tile, turned = T.alloc_shared((32, 64), 'float32'), T.alloc_shared((64, 32), 'float32')
            T.copy(x, tile)
            T.transpose(tile, turned)
            T.copy(turned, y)
            for i, j in T.Parallel(64, 32):
                z[i, j] = tile[j, i]

    x, y, z = torch.randn(32, 64), torch.empty(64, 32), torch.empty(64, 32)
    interpret(flip, x, y, z)
    assert torch.equal(y, x.T) and torch.equal(z, x.T)


@pytest.mark.parametrize('batch', [1, 2])
def test_im2col(batch):
    @T.prim_func
    def columns(image: T.Tensor((batch, 8, 8, 16), 'float16'), y: T.Tensor((batch * 64, 144), 'float16')):
        with T.Kernel(batch, 9, threads=64) as (bx, by):
            tile = T.alloc_shared((64, 16), 'float16')
            T.c2d_im2col(image, tile, bx, by, 3, 1, 1, 1)
            T.copy(tile, y[bx * 64, by * 16])

    image, y = torch.randn(batch, 8, 8, 16).half(), torch.empty(batch * 64, 144).half()
    interpret(columns, image, y)
    unfolded = torch.nn.functional.unfold(image.permute(0, 3, 1, 2).float(), 3, padding=1)
    assert torch.equal(y.float(), unfolded.view(batch, 16, 9, 64).permute(0, 3, 2, 1).reshape(batch * 64, 144))


@pytest.mark.parametrize('name', ['atomic_add', 'atomic_max', 'atomic_min'])
def test_atomics_on_tiles(name):
    @T.prim_func
    def combine(x: T.Tensor((4, 16, 16), 'float32'), y: T.Tensor((16, 16), 'float32')):
        with T.Kernel(4, threads=64) as pid:
            tile = T.alloc_fragment((16, 16), 'float32')
            T.copy(x[pid, 0:16, 0:16], tile)
            getattr(T, name)(y, tile)

    x, y = torch.randint(-50, 50, (4, 16, 16)).float(), torch.zeros(16, 16)
    interpret(combine, x, y)
    stacked = torch.cat([x, torch.zeros(1, 16, 16)])
    want = {'atomic_add': stacked.sum(0), 'atomic_max': stacked.amax(0), 'atomic_min': stacked.amin(0)}[name]
    assert torch.equal(y, want)
