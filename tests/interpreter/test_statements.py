"""Statements: loops, branches, early exit, several launches, grids."""

import time

import pytest
import tilelang.language as T
import torch

from tile_kernels.interpreter import AssertionFailed, DataRace, UnsupportedConstruct, interpret

from .kernels import per_thread


def test_loop_bounds_may_differ_between_blocks():
    num_rows = T.dynamic('num_rows')

    @T.prim_func
    def strided_rows(x: T.Tensor((num_rows,), 'int32'), y: T.Tensor((num_rows,), 'int32')):
        with T.Kernel(3, threads=32) as pid:
            for i in T.serial(T.ceildiv(num_rows - pid, 3)):
                y[pid + i * 3] = x[pid + i * 3] * (i + 1)

    x = torch.arange(10, dtype=torch.int32)
    y = torch.zeros_like(x)
    interpret(strided_rows, x, y)
    assert y.tolist() == [x * (x // 3 + 1) for x in range(10)]


def test_loop_bounds_may_differ_between_threads():
    @T.prim_func
    def triangle(y: T.Tensor((64,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            total = T.alloc_var('int32', init=0)
            for i in T.serial(thread + 1):
                total += i
            y[thread] = total

    y = torch.zeros(64, dtype=torch.int32)
    interpret(triangle, y)
    assert y.tolist() == [n * (n + 1) // 2 for n in range(64)]


def test_loop_with_start_and_step():
    @T.prim_func
    def steps(y: T.Tensor((20,), 'int32')):
        with T.Kernel(1, threads=1):
            for i in T.serial(3, 18, 4):
                y[i] = 1

    y = torch.zeros(20, dtype=torch.int32)
    interpret(steps, y)
    assert y.nonzero().flatten().tolist() == [3, 7, 11, 15]


def test_a_loop_that_writes_its_own_bound_is_refused():
    """The generated code reads the bound in every iteration, so half of the iterations would be missing."""

    @T.prim_func
    def shrinking(y: T.Tensor((32,), 'int32')):
        with T.Kernel(1, threads=32):
            left = T.alloc_var('int32', init=8)
            for i in T.serial(left):
                y[i] = left
                left -= 1

    with pytest.raises(UnsupportedConstruct, match='writes left, which its bounds read') as caught:
        interpret(shrinking, torch.zeros(32, dtype=torch.int32))
    assert caught.value.line and caught.value.buffer == 'left'


def test_while_ends_for_each_thread_on_its_own():
    @T.prim_func
    def collatz(y: T.Tensor((64,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            n = T.alloc_var('int32')
            count = T.alloc_var('int32', init=0)
            n = thread + 1
            while n != 1:
                if n % 2 == 0:
                    n = n // 2
                else:
                    n = 3 * n + 1
                count += 1
            y[thread] = count

    def steps(n):
        return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    y = torch.zeros(64, dtype=torch.int32)
    interpret(collatz, y)
    assert y.tolist() == [steps(n + 1) for n in range(64)]


def test_break_leaves_the_innermost_loop():
    @T.prim_func
    def first_above(x: T.Tensor((4, 16), 'int32'), y: T.Tensor((4,), 'int32')):
        with T.Kernel(4, threads=32) as pid:
            found = T.alloc_var('int32', init=-1)
            for i in T.serial(16):
                if x[pid, i] > 50:
                    found = i
                    T.loop_break()
            y[pid] = found

    x = torch.randint(0, 60, (4, 16), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    x[0] = 0
    y = torch.zeros(4, dtype=torch.int32)
    interpret(first_above, x, y)
    want = [next((i for i, value in enumerate(row) if value > 50), -1) for row in x.tolist()]
    assert y.tolist() == want and want[0] == -1


def test_returned_threads_do_nothing_more():
    @T.prim_func
    def leave(y: T.Tensor((64,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            y[thread] = 1
            if thread % 2 == 0:
                T.thread_return()
            y[thread] = 2
            if thread > 32:
                T.thread_return()
            y[thread] = 3

    y = torch.zeros(64, dtype=torch.int32)
    interpret(leave, y)
    assert y.tolist() == [1 if t % 2 == 0 else 2 if t > 32 else 3 for t in range(64)]


def test_branches_by_lane_and_their_report():
    @T.prim_func
    def sign(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            if x[thread] > 0.0:
                y[thread] = 1
            elif x[thread] < 0.0:
                y[thread] = -1
            else:
                y[thread] = 0

    x = torch.linspace(-1, 1, 64)
    y = torch.full((64,), 7, dtype=torch.int32)
    report = interpret(sign, x, y)
    assert torch.equal(y, torch.sign(x).int())
    assert [(branch.side, branch.ran) for branch in report.branches] == [
        ('then', True),
        ('else', True),
        ('then', True),
        ('else', False),
    ]
    assert len(report.uncovered) == 1 and report.uncovered[0].line == report.branches[2].line
    assert interpret(sign, torch.zeros(64), y).branches[3].ran


def test_condition_protects_its_second_operand():
    @T.prim_func
    def lookup(ids: T.Tensor((32,), 'int32'), table: T.Tensor((4,), 'int32'), y: T.Tensor((32,), 'int32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            table_shared = T.alloc_shared((4,), 'int32')
            T.copy(table, table_shared)
            y[thread] = T.if_then_else(ids[thread] >= 0, table_shared[ids[thread]], -1)
            if ids[thread] >= 0 and table_shared[ids[thread]] == 30:
                y[thread] = 100

    ids = torch.arange(32, dtype=torch.int32) % 5 - 1
    y = torch.zeros(32, dtype=torch.int32)
    interpret(lookup, ids, torch.tensor([10, 20, 30, 40], dtype=torch.int32), y)
    assert y.tolist() == [{-1: -1, 0: 10, 1: 20, 2: 100, 3: 40}[i] for i in ids.tolist()]


def test_several_launches_in_one_program_share_a_workspace():
    @T.prim_func
    def two_launches(x: T.Tensor((8, 64), 'float32'), y: T.Tensor((64,), 'float32')):
        partial = T.alloc_global((8, 64), 'float32')
        with T.Kernel(8, threads=64) as pid:
            for j in T.Parallel(64):
                partial[pid, j] = x[pid, j] * 2.0
        with T.Kernel(1, threads=64):
            for j in T.Parallel(64):
                y[j] = partial[0, j] + partial[7, j]

    x, y = torch.randn(8, 64), torch.empty(64)
    interpret(two_launches, x, y)
    assert torch.equal(y, x[0] * 2 + x[7] * 2)


def test_grid_of_three_dimensions():
    @T.prim_func
    def coordinates(y: T.Tensor((2, 3, 4), 'int32')):
        with T.Kernel(4, 3, 2, threads=32) as (bx, by, bz):
            y[bz, by, bx] = bz * 100 + by * 10 + bx

    y = torch.zeros(2, 3, 4, dtype=torch.int32)
    interpret(coordinates, y)
    assert y.tolist() == [[[z * 100 + y * 10 + x for x in range(4)] for y in range(3)] for z in range(2)]


def test_thread_block_of_three_dimensions():
    @T.prim_func
    def threads(y: T.Tensor((2, 4, 8), 'int32')):
        with T.Kernel(1, threads=(8, 4, 2)):
            tx, ty, tz = T.get_thread_bindings()
            y[tz, ty, tx] = tz * 100 + ty * 10 + tx

    y = torch.zeros(2, 4, 8, dtype=torch.int32)
    interpret(threads, y)
    assert y.tolist() == [[[z * 100 + y * 10 + x for x in range(8)] for y in range(4)] for z in range(2)]


def test_persistent_tiles():
    @T.prim_func
    def tiles(y: T.Tensor((6, 5), 'int32')):
        with T.Kernel(4, threads=32) as pid:
            for row, column in T.Persistent([6, 5], 4, pid):
                y[row, column] = y[row, column] + row * 10 + column

    y = torch.zeros(6, 5, dtype=torch.int32)
    interpret(tiles, y)
    assert y.tolist() == [[row * 10 + column for column in range(5)] for row in range(6)]


def test_empty_grid_does_nothing():
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def nothing(x: T.Tensor((num_tokens, 8), 'float32')):
        with T.Kernel(num_tokens, threads=32) as pid:
            for j in T.Parallel(8):
                x[pid, j] = 1.0

    interpret(nothing, torch.empty(0, 8))


def test_large_grid_runs_in_batches():
    @T.prim_func
    def many(y: T.Tensor((3000,), 'int32')):
        with T.Kernel(3000, threads=128) as pid:
            tile = T.alloc_shared((8192,), 'float32')
            T.fill(tile, T.cast(pid, 'float32'))
            y[pid] = T.cast(tile[8191], 'int32')

    y = torch.zeros(3000, dtype=torch.int32)
    interpret(many, y)
    assert torch.equal(y, torch.arange(3000, dtype=torch.int32))


def test_assumptions_are_checked():
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def promise(x: T.Tensor((num_tokens,), 'int32')):
        T.assume(num_tokens % 8 == 0)
        with T.Kernel(1, threads=32):
            x[0] = 1

    interpret(promise, torch.zeros(8, dtype=torch.int32))
    with pytest.raises(AssertionFailed, match='assume'):
        interpret(promise, torch.zeros(9, dtype=torch.int32))


def test_device_assertions_are_checked():
    @T.prim_func
    def valid(x: T.Tensor((32,), 'int32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            T.device_assert(x[thread] >= 0)

    interpret(valid, torch.zeros(32, dtype=torch.int32))
    bad = torch.zeros(32, dtype=torch.int32)
    bad[5] = -1
    with pytest.raises(AssertionFailed) as caught:
        interpret(valid, bad)
    assert caught.value.thread == 5 and caught.value.line


def test_bound_names_keep_their_value():
    def body(thread, value):
        before = value
        return before * 2 + thread

    x = torch.arange(64, dtype=torch.int32).reshape(2, 32)
    assert torch.equal(per_thread(body, x), x * 2 + torch.arange(32, dtype=torch.int32))


def test_memory_changes_do_not_reach_names_bound_before():
    @T.prim_func
    def swap(x: T.Tensor((32,), 'float32')):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((32,), 'float32')
            T.copy(x, tile)
            for i in T.Parallel(32):
                old = tile[i]
                tile[i] = 0.0
                x[i] = old + tile[i]

    x = torch.randn(32)
    want = x.clone()
    interpret(swap, x)
    assert torch.equal(x, want)


def test_carrying_a_register_through_parallel_iterations_is_refused():
    @T.prim_func
    def carry(x: T.Tensor((64,), 'float32'), y: T.Tensor((1,), 'float32')):
        with T.Kernel(1, threads=32):
            last = T.alloc_var('float32', init=0.0)
            for i in T.Parallel(64):
                if x[i] > last:
                    last = x[i]
            y[0] = last

    with pytest.raises(UnsupportedConstruct, match='carrying last') as caught:
        interpret(carry, torch.randn(64), torch.empty(1))
    assert caught.value.line


def test_element_wise_grid_runs_as_an_array():
    @T.prim_func
    def scale(x: T.Tensor((1024, 4096), 'float32'), y: T.Tensor((1024, 4096), 'float32')):
        with T.Kernel(1, threads=128):
            for i, j in T.grid(1024, 4096):
                y[i, j] = x[i, j] * 2.0 + 1.0

    x, y = torch.randn(1024, 4096), torch.empty(1024, 4096)
    started = time.process_time()
    interpret(scale, x, y)
    assert time.process_time() - started < 20
    assert torch.equal(y, x * 2 + 1)


@pytest.mark.parametrize('checks', ['none', 'all'])
def test_serial_loops_keep_their_order_where_it_matters(checks):
    @T.prim_func
    def loops(x: T.Tensor((64,), 'int32'), y: T.Tensor((6, 64), 'int32'), z: T.Tensor((80,), 'int32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            tile = T.alloc_shared((65,), 'int32')
            total = T.alloc_var('int32', init=0)
            y[0, 0] = x[0]
            for i in T.serial(63):  # each needs the one before
                y[0, i + 1] = y[0, i] + x[i + 1]
            for i in T.serial(64):  # a sum in a register
                total = total + x[i]
                y[1, i] = total
            for i, j in T.grid(16, 16):  # several iterations meet; the last one counts
                z[i + j] = x[i * 4] - x[j * 4]
            for i in T.serial(80 - 31):
                z[i + 31] = i
            for i in T.serial(64):
                y[2, 63 - i] = T.if_then_else(x[i] > 0, x[i], -x[i])
                if i % 3 == 0:
                    y[2, 63 - i] = y[2, 63 - i] * 2
            for i in T.serial(64):  # a shift in place
                tile[i] = x[i]
            tile[64] = 0
            for i in T.serial(64):
                tile[i] = tile[i + 1]
            for i in T.serial(64):
                y[3, i] = tile[i]
            for i in T.serial(2):
                for j in T.serial(16, 32):
                    y[4, j * 2 + i - 32] = j * 10 + i
            for i in T.serial(32):
                y[4, 32 + i] = i
            for i in T.serial(64):
                if i < thread + 33:
                    y[5, i] = 1 + 0 * thread

    x = torch.randint(-9, 9, (64,), dtype=torch.int32)
    y, z = torch.zeros(6, 64, dtype=torch.int32), torch.zeros(80, dtype=torch.int32)
    interpret(loops, x, y, z, checks=checks)
    assert torch.equal(y[0], x.cumsum(0).int())
    assert torch.equal(y[1], y[0])
    assert z[:31].tolist() == [int(x[min(s, 15) * 4] - x[(s - min(s, 15)) * 4]) for s in range(31)]
    assert z[31:].tolist() == list(range(49))
    assert torch.equal(y[2].flip(0), x.abs() * torch.where(torch.arange(64) % 3 == 0, 2, 1))
    assert torch.equal(y[3], torch.cat([x[1:], torch.zeros(1, dtype=torch.int32)]))
    assert y[4, :32].tolist() == [j * 10 + i for j in range(16, 32) for i in range(2)]
    assert y[5].tolist() == [1] * 64


def test_threads_race_in_serial_loops_that_run_as_arrays():
    @T.prim_func
    def fill(y: T.Tensor((64,), 'int32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            tile = T.alloc_shared((64,), 'int32')
            for i in T.serial(64):
                tile[i] = thread
            T.sync_threads()
            for i in T.serial(64):
                y[i] = tile[i]

    with pytest.raises(DataRace, match='tile'):
        interpret(
            fill,
            torch.empty(64, dtype=torch.int32),
            checks='races',
            pass_configs={'tl.disable_thread_storage_sync': True},
        )
