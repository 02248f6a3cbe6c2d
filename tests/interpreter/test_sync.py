"""Barriers, roles and asynchronous copies that are right, and where they stop when they are not."""

import pytest
import tilelang.language as T
import torch

from tile_kernels.interpreter import (
    AsyncReadBeforeWait,
    BarrierDivergence,
    DataRace,
    Deadlock,
    OutOfBounds,
    UninitializedRead,
    interpret,
)

MANUAL = {'tl.disable_thread_storage_sync': True}


def ring_kernel(num_stages, num_steps, early=0):
    """A producer copies rows into a ring of stages, a consumer sums them."""

    @T.prim_func
    def ring(x: T.Tensor((3, num_steps, 64), 'float32'), y: T.Tensor((3, 64), 'float32')):
        with T.Kernel(3, threads=256) as pid:
            stages = T.alloc_shared((num_stages, 64), 'float32')
            total = T.alloc_fragment((64,), 'float32')
            full, free = T.alloc_barrier([128] * num_stages), T.alloc_barrier([128] * num_stages)
            if T.get_thread_binding() >= 128:
                for k in T.serial(num_steps):
                    T.mbarrier_wait_parity(free[k % num_stages], ((k // num_stages) & 1) ^ 1 ^ early)
                    T.tma_copy(x[pid, k, 0:64], stages[k % num_stages, 0:64], barrier=full[k % num_stages])
                    T.barrier_arrive(full[k % num_stages])
            else:
                T.clear(total)
                for k in T.serial(num_steps):
                    T.mbarrier_wait_parity(full[k % num_stages], (k // num_stages) & 1)
                    for j in T.Parallel(64):
                        total[j] = total[j] + stages[k % num_stages, j]
                    T.barrier_arrive(free[k % num_stages])
                T.copy(total, y[pid, 0:64])

    return ring


@pytest.mark.parametrize('num_stages', [1, 2, 4])
@pytest.mark.parametrize('checks', ['none', 'all'])
def test_producer_and_consumer(num_stages, checks):
    x, y = torch.randint(-9, 9, (3, 7, 64)).float(), torch.empty(3, 64)
    interpret(ring_kernel(num_stages, 7), x, y, checks=checks)
    assert torch.equal(y, x.sum(1))


def test_waiting_for_the_wrong_parity_stops():
    with pytest.raises(Deadlock, match=r'parity . of mbarrier \w+\[\d\] \(\d+ of 128 arrivals\)'):
        interpret(ring_kernel(2, 7, early=1), torch.zeros(3, 7, 64), torch.empty(3, 64))


def test_roles_as_neighbouring_branches():
    @T.prim_func
    def roles(x: T.Tensor((2, 4, 64), 'float32'), y: T.Tensor((2, 4, 64), 'float32')):
        with T.Kernel(2, threads=256) as pid:
            tile = T.alloc_shared((64,), 'float32')
            full, free = T.alloc_barrier([128]), T.alloc_barrier([128])
            with T.ws(1):
                for k in T.serial(4):
                    T.mbarrier_wait_parity(free[0], (k & 1) ^ 1)
                    T.copy(x[pid, k, 0:64], tile)
                    T.barrier_arrive(full[0])
            with T.ws(0):
                for k in T.serial(4):
                    T.mbarrier_wait_parity(full[0], k & 1)
                    T.copy(tile, y[pid, k, 0:64])
                    T.barrier_arrive(free[0])

    x, y = torch.randn(2, 4, 64), torch.empty(2, 4, 64)
    interpret(roles, x, y, checks='all')
    assert torch.equal(x, y)


def test_a_branch_with_a_wait_may_depend_on_the_one_before():
    """Some blocks, and some warps, take both branches; the others take neither."""

    @T.prim_func
    def chain(x: T.Tensor((3, 2), 'int32'), y: T.Tensor((3, 64), 'int32')):
        with T.Kernel(3, threads=64) as pid:
            bars = T.alloc_barrier([32, 32, 32, 32])
            state = T.alloc_var('int32', init=0)
            warp = T.get_thread_binding() // 32
            if x[pid, warp] == 1:
                T.mbarrier_arrive(bars[warp])
                T.mbarrier_wait_parity(bars[warp], 0)
                state = 2
            if state == 0:
                state = 5
                T.mbarrier_arrive(bars[2 + warp])
                T.mbarrier_wait_parity(bars[2 + warp], 0)
            if state == 2:
                state = 3
                T.mbarrier_arrive(bars[2 + warp])
                T.mbarrier_wait_parity(bars[2 + warp], 0)
            y[pid, T.get_thread_binding()] = state

    x, y = torch.tensor([[1, 1], [0, 1], [0, 0]], dtype=torch.int32), torch.empty(3, 64, dtype=torch.int32)
    interpret(chain, x, y, checks='all')
    assert torch.equal(y, torch.where(x == 1, 3, 5).repeat_interleave(32, 1).int())


def test_blocks_that_wait_in_different_orders_do_not_stop_each_other():
    @T.prim_func
    def orders(y: T.Tensor((2,), 'int32')):
        with T.Kernel(2, threads=64) as pid:
            bars = T.alloc_barrier([32, 32])
            thread = T.get_thread_binding()
            if thread < 32:
                if pid == 0:
                    T.barrier_arrive(bars[0])
                    T.mbarrier_wait_parity(bars[1], 0)
                else:
                    T.mbarrier_wait_parity(bars[1], 0)
                    T.barrier_arrive(bars[0])
                if thread == 0:
                    y[pid] = 1
            else:
                if pid == 0:
                    T.mbarrier_wait_parity(bars[0], 0)
                    T.barrier_arrive(bars[1])
                else:
                    T.barrier_arrive(bars[1])
                    T.mbarrier_wait_parity(bars[0], 0)

    y = torch.zeros(2, dtype=torch.int32)
    interpret(orders, y)
    assert y.tolist() == [1, 1]


def test_barrier_of_one_arrival_by_an_elected_thread():
    @T.prim_func
    def elected(x: T.Tensor((4, 64), 'float32'), y: T.Tensor((4, 64), 'float32')):
        with T.Kernel(4, threads=128) as pid:
            tile = T.alloc_shared((64,), 'float32')
            full = T.alloc_barrier([1])
            T.tma_copy(x[pid, 0:64], tile[0:64], barrier=full[0])
            if T.shuffle_elect(128):
                T.barrier_arrive(full[0])
            T.mbarrier_wait_parity(full[0], 0)
            for j in T.Parallel(64):
                y[pid, j] = tile[j]

    x, y = torch.randn(4, 64), torch.empty(4, 64)
    interpret(elected, x, y)
    assert torch.equal(x, y)


def test_groups_of_asynchronous_copies():
    @T.prim_func
    def stream(x: T.Tensor((8, 64), 'float32'), y: T.Tensor((8, 64), 'float32')):
        with T.Kernel(1, threads=32):
            stages = T.alloc_shared((3, 64), 'float32')
            for k in T.unroll(2):
                T.async_copy(x[k, 0:64], stages[k, 0:64])
            for k in T.serial(8):
                if k + 2 < 8:
                    T.async_copy(x[k + 2, 0:64], stages[(k + 2) % 3, 0:64])
                else:
                    T.ptx_commit_group()
                T.ptx_wait_group(2)
                T.sync_threads()
                T.copy(stages[k % 3, 0:64], y[k, 0:64])
                T.sync_threads()

    x, y = torch.randn(8, 64), torch.empty(8, 64)
    interpret(stream, x, y)
    assert torch.equal(x, y)


def test_named_barrier_between_two_warps():
    @T.prim_func
    def hand_over(x: T.Tensor((32,), 'float32'), y: T.Tensor((32,), 'float32')):
        with T.Kernel(1, threads=96):
            thread = T.get_thread_binding()
            tile = T.alloc_shared((32,), 'float32')
            if thread < 32:
                tile[thread] = x[thread]
                T.named_barrier_arrive(8, 64)
            elif thread < 64:
                T.sync_threads(8, 64)
                y[thread - 32] = tile[63 - thread]

    x, y = torch.randn(32), torch.empty(32)
    interpret(hand_over, x, y, checks='all', pass_configs=MANUAL)
    assert torch.equal(y, x.flip(0))


def test_grid_barrier_lets_blocks_read_each_other():
    @T.prim_func
    def exchange(x: T.Tensor((64,), 'float32'), scratch: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(64, threads=32) as pid:
            scratch[pid] = x[pid] * 2.0
            T.sync_grid()
            y[pid] = scratch[63 - pid]

    x, scratch, y = torch.randn(64), torch.empty(64), torch.empty(64)
    interpret(exchange, x, scratch, y, checks='all')
    assert torch.equal(y, x.flip(0) * 2)


def test_cluster_of_blocks():
    num_rows = T.dynamic('num_rows')

    @T.prim_func
    def cluster_sum(x: T.Tensor((num_rows, 128), 'float32'), y: T.Tensor((num_rows, 4), 'float32')):
        with T.ClusterKernel(4, num_rows, threads=64, cluster_dims=(4, 1, 1)) as (rank, row):
            thread = T.get_thread_binding()
            values, total = T.alloc_fragment((32,), 'float32'), T.alloc_fragment((1,), 'float32')
            mine, parts = T.alloc_shared((1,), 'float32'), T.alloc_shared((4,), 'float32')
            T.copy(x[row, rank * 32], values)
            T.reduce_sum(values, total, dim=0)
            T.copy(total, mine)
            T.cluster_sync()
            if thread < 4:
                T.copy_cluster(mine[0:1], parts[rank : rank + 1], dst_block=thread)
            T.cluster_sync()
            if thread == 0:
                y[row, T.block_rank_in_cluster()] = parts[0] + parts[1] + parts[2] + parts[3]

    x, y = torch.randint(-9, 9, (3, 128)).float(), torch.empty(3, 4)
    interpret(cluster_sum, x, y)
    assert torch.equal(y, x.sum(1, keepdim=True).expand(3, 4))


def test_block_barrier_after_some_threads_returned():
    @T.prim_func
    def survivors(y: T.Tensor((64,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            if thread >= 48:
                T.thread_return()
            tile = T.alloc_shared((64,), 'int32')
            tile[thread] = thread
            T.sync_threads()
            y[thread] = tile[47 - thread]

    y = torch.zeros(64, dtype=torch.int32)
    interpret(survivors, y)
    assert y[:48].tolist() == list(range(47, -1, -1))


def test_too_many_arrivals_at_a_named_barrier():
    @T.prim_func
    def crowd(y: T.Tensor((1,), 'int32')):
        with T.Kernel(1, threads=96):
            T.sync_threads(8, 64)

    with pytest.raises(BarrierDivergence, match='96 threads'):
        interpret(crowd, torch.zeros(1, dtype=torch.int32))


def test_automatic_barriers_leave_only_races_within_a_statement():
    def kernel(shift):
        @T.prim_func
        def rotate(x: T.Tensor((128,), 'float32'), y: T.Tensor((128,), 'float32')):
            with T.Kernel(1, threads=128):
                thread = T.get_thread_binding()
                tile = T.alloc_shared((128,), 'float32')
                tile[thread] = x[thread]
                if shift:
                    tile[thread] = tile[(thread + 1) % 128]
                else:
                    tile[thread] = tile[thread] + 1.0
                y[thread] = tile[127 - thread]

        return rotate

    x, y = torch.randn(128), torch.empty(128)
    interpret(kernel(False), x, y, checks='all')
    assert torch.equal(y, (x + 1).flip(0))
    with pytest.raises(DataRace) as caught:
        interpret(kernel(True), x, y, checks='all')
    assert caught.value.buffer == 'tile'
    with pytest.raises(DataRace):
        interpret(kernel(False), x, y, checks='all', pass_configs=MANUAL)


def test_parallel_iterations_that_read_their_neighbours_race():
    @T.prim_func
    def smooth(x: T.Tensor((128,), 'float32'), y: T.Tensor((128,), 'float32')):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((128,), 'float32')
            T.copy(x, tile)
            for i in T.Parallel(127):
                tile[i] = tile[i + 1]
            T.copy(tile, y)

    with pytest.raises(DataRace):
        interpret(smooth, torch.randn(128), torch.empty(128), checks='all')


def test_workspace_read_before_it_is_written():
    @T.prim_func
    def early(y: T.Tensor((64,), 'float32')):
        scratch = T.alloc_global((64,), 'float32')
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                y[i] = scratch[i]

    with pytest.raises(UninitializedRead):
        interpret(early, torch.empty(64))


def test_a_loop_that_cannot_end_is_reported(monkeypatch):
    from tile_kernels.interpreter.engine import program

    @T.prim_func
    def spin(flag: T.Tensor((1,), 'int32')):
        with T.Kernel(1, threads=32):
            while T.atomic_load(flag[0]) == 0:
                T.sync_warp()

    monkeypatch.setattr(program.Shared, 'patience', 100)
    with pytest.raises(Deadlock, match='while'):
        interpret(spin, torch.zeros(1, dtype=torch.int32))
    interpret(spin, torch.ones(1, dtype=torch.int32))


def test_blocks_may_wait_for_flags_of_other_blocks():
    @T.prim_func
    def chain(flags: T.Tensor((5,), 'int32'), y: T.Tensor((4,), 'int32')):
        with T.Kernel(4, threads=32) as pid:
            if T.get_thread_binding() == 0:
                while T.atomic_load(flags[pid + 1]) == 0:
                    T.sync_warp(1)
                y[pid] = T.atomic_load(flags[pid + 1]) + 1
                T.atomic_store(flags[pid], y[pid])

    flags, y = torch.tensor([0, 0, 0, 0, 7], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    interpret(chain, flags, y)
    assert y.tolist() == [11, 10, 9, 8]


@pytest.mark.parametrize('pass_configs', [{}, MANUAL])
@pytest.mark.parametrize('early', [False, True])
def test_a_slot_freed_before_it_is_read_races(early, pass_configs):
    @T.prim_func
    def hand_over(x: T.Tensor((6, 64), 'float32'), y: T.Tensor((6, 64), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            slot = T.alloc_shared((64,), 'float32')
            full, free = T.alloc_barrier([64]), T.alloc_barrier([64])
            if thread >= 64:
                for row in T.serial(6):
                    T.mbarrier_wait_parity(free[0], (row + 1) % 2)
                    slot[thread - 64] = x[row, thread - 64]
                    T.barrier_arrive(full[0])
            else:
                for row in T.serial(6):
                    T.mbarrier_wait_parity(full[0], row % 2)
                    if early:
                        T.barrier_arrive(free[0])
                    y[row, thread] = slot[63 - thread]
                    if not early:
                        T.barrier_arrive(free[0])

    x, y = torch.randn(6, 64), torch.empty(6, 64)
    if early:
        with pytest.raises(DataRace, match='slot'):
            interpret(hand_over, x, y, checks='all', pass_configs=pass_configs)
    else:
        interpret(hand_over, x, y, checks='all', pass_configs=pass_configs)
        assert torch.equal(y, x.flip(1))


@pytest.mark.parametrize('arriving', [64, 32])
def test_roles_wait_for_all_blocks_of_their_cluster(arriving):
    """Arrival and wait may be apart: the second half of a block arrives late, or with 32 never."""

    @T.prim_func
    def late(y: T.Tensor((4, 32), 'int32')):
        with T.ClusterKernel(4, threads=64, cluster_dims=(2, 1, 1)) as pid:
            go = T.alloc_barrier([32])
            thread = T.get_thread_binding()
            if thread < 32:
                T.cluster_arrive()
                T.mbarrier_arrive(go[0])
                T.cluster_wait()
                y[pid, thread] = pid
            else:
                T.mbarrier_wait_parity(go[0], 0)
                if thread < arriving:
                    T.cluster_arrive()
                    T.cluster_wait()

    y = torch.zeros(4, 32, dtype=torch.int32)
    if arriving == 32:
        with pytest.raises(Deadlock, match=r'the barrier of its cluster \(64 threads have not arrived\)'):
            interpret(late, y)
    else:
        interpret(late, y, checks='all')
        assert torch.equal(y, torch.arange(4, dtype=torch.int32)[:, None].expand(4, 32))


def send_four(place, value, barrier, rank):
    """A value four times, from `place` on, to block `rank` of the cluster."""
    four = (value, value, value, value)
    T.evaluate(T.call_extern('handle', 'send_four', T.address_of(place), *four, T.address_of(barrier), rank))


@pytest.mark.parametrize('sent', [1, 2])
def test_blocks_of_a_cluster_send_to_each_other(sent):
    """A barrier lets nobody pass before all bytes it was told of have been sent."""

    @T.prim_func
    def ring(y: T.Tensor((4, 8), 'float32')):
        with T.ClusterKernel(4, threads=64, cluster_dims=(2, 1, 1)) as pid:
            there = T.alloc_shared((8,), 'float32')
            arrived = T.alloc_barrier([1])
            thread = T.get_thread_binding()
            T.cluster_sync()
            if thread < 32:
                if thread == 0:
                    T.mbarrier_arrive_expect_tx(arrived[0], 32)
                T.mbarrier_wait_parity(arrived[0], 0)
                if thread < 8:
                    y[pid, thread] = there[thread]
            else:
                if thread < 32 + sent:
                    value = T.cast(10 * pid + thread - 32, 'float32')
                    send_four(there[(thread - 32) * 4], value, arrived[0], 1 - pid % 2)

    y = torch.zeros(4, 8)
    if sent == 1:
        with pytest.raises(Deadlock, match=r'mbarrier arrived\[0\]'):
            interpret(ring, y)
    else:
        interpret(ring, y, checks='all')
        assert torch.equal(y[:, ::4], torch.tensor([[10.0, 11], [0, 1], [30, 31], [20, 21]]))


@pytest.mark.parametrize(
    ('left_out', 'match'),
    [
        ('nothing', None),
        ('beginning', "sends to another block's there before a barrier of the cluster says that the block has begun"),
        ('wait', r'thread 32 reads there\[0\], which another block sent without a barrier between'),
        ('answer', r"thread 0 sends to another block's there\[0\], which .* without a barrier between"),
        ('last wait', 'a block can end before all that other blocks send to it has come'),
    ],
)
def test_what_is_sent_comes_to_a_free_place_and_is_waited_for(left_out, match):
    @T.macro
    def send(value, there, arrived, rank):
        T.mbarrier_arrive_expect_tx(arrived[0], 16)
        send_four(there[0], value, arrived[0], rank)

    @T.prim_func
    def swap(y: T.Tensor((4, 4), 'float32')):
        with T.ClusterKernel(4, threads=64, cluster_dims=(2, 1, 1)) as pid:
            there = T.alloc_shared((4,), 'float32')
            arrived = T.alloc_barrier([1])
            thread = T.get_thread_binding()
            if left_out != 'beginning':
                T.cluster_sync()
            if thread == 0:
                send(T.cast(pid, 'float32'), there, arrived, 1 - pid % 2)
            if left_out != 'wait' and thread >= 32:
                T.mbarrier_wait_parity(arrived[0], 0)
            if thread >= 32 and thread < 36:
                y[pid, thread - 32] = there[thread - 32]
            if left_out != 'answer':
                T.cluster_sync()
            if thread == 0:
                send(T.float32(0), there, arrived, 1 - pid % 2)
            if left_out != 'last wait' and thread >= 32:
                T.mbarrier_wait_parity(arrived[0], 1)

    y = torch.zeros(4, 4)
    if match is None:
        interpret(swap, y, checks='all')
        assert torch.equal(y[:, 0], torch.tensor([1.0, 0, 3, 2]))
    else:
        with pytest.raises(DataRace, match=match):
            interpret(swap, y, checks='all')


@pytest.mark.parametrize(
    ('more', 'fewer', 'asking', 'match'),
    [
        (160, 96, 256, None),
        (168, 96, 256, r'its warps ask for 66560 registers, and the block began with 65536'),
        (160, 96, 224, r'all warps of threads 128 to 255 must ask for the same: 96 registers and none at all'),
    ],
)
def test_registers_that_never_come_are_found(more, fewer, asking, match):
    """One warpgroup wants what another gives up, two keep what they began with."""

    @T.prim_func
    def roles(y: T.Tensor((3, 512), 'int32')):
        with T.Kernel(3, threads=512) as pid:
            thread = T.get_thread_binding()
            if thread < 128:
                T.inc_max_nreg(more)
            elif thread < asking:
                T.dec_max_nreg(fewer)
            y[pid, thread] = thread

    y = torch.zeros(3, 512, dtype=torch.int32)
    if match:
        with pytest.raises(Deadlock, match=match):
            interpret(roles, y)
    else:
        interpret(roles, y)
        assert torch.equal(y, torch.arange(512, dtype=torch.int32).expand(3, 512))


@pytest.mark.parametrize('barriers', [16, 8])
def test_lanes_that_do_not_arrive_have_no_barrier(barriers):
    """Each of 16 lanes arrives at a barrier of its own; the others name ones that do not exist."""

    @T.prim_func
    def own(y: T.Tensor((2, 32), 'int32')):
        with T.Kernel(2, threads=32) as pid:
            arrived = T.alloc_barrier([1] * barriers)
            lane = T.get_thread_binding()
            if lane < 16:
                T.mbarrier_arrive(arrived[lane])
            T.mbarrier_wait_parity(arrived[lane % 8], 0)
            y[pid, lane] = lane

    y = torch.zeros(2, 32, dtype=torch.int32)
    if barriers == 8:
        with pytest.raises(OutOfBounds, match=r'there is no mbarrier arrived\[8\], the last is arrived\[7\]'):
            interpret(own, y)
    else:
        interpret(own, y)
        assert torch.equal(y, torch.arange(32, dtype=torch.int32).expand(2, 32))


def test_registers_are_counted_where_blocks_run_by_turns():
    @T.prim_func
    def turns(flag: T.Tensor((2,), 'int32')):
        with T.Kernel(2, threads=512) as pid:
            T.inc_max_nreg(136)
            if T.get_thread_binding() == 0:
                if pid == 0:
                    while T.atomic_load(flag[1]) == 0:
                        pass
                T.atomic_store(flag[pid], 1)

    with pytest.raises(Deadlock, match='its warps ask for 69632 registers'):
        interpret(turns, torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize('step', [63, 64])
@pytest.mark.parametrize('order', ['windows', 'rows', 'threads'])
def test_stores_of_blocks_that_overlap_by_one_element(order, step):
    @T.prim_func
    def windows(x: T.Tensor((4, 64), 'float32'), y: T.Tensor((256,), 'float32')):
        with T.Kernel(4, threads=64) as pid:
            for j in T.Parallel(64):
                y[pid * step + j] = x[pid, j]

    @T.prim_func
    def rows(x: T.Tensor((4, 64), 'float32'), y: T.Tensor((256,), 'float32')):
        with T.Kernel(2, threads=64) as pid:
            for i, j in T.Parallel(2, 64):
                y[(pid * 2 + i) * step + j] = x[pid * 2 + i, j]

    @T.prim_func
    def threads(x: T.Tensor((4, 64), 'float32'), y: T.Tensor((256,), 'float32')):
        with T.Kernel(4, threads=64) as pid:
            thread = T.get_thread_binding()
            y[pid * step + thread] = x[pid, thread]

    kernel = {'windows': windows, 'rows': rows, 'threads': threads}[order]
    x, y = torch.arange(256.0).reshape(4, 64), torch.zeros(256)
    if step == 64:
        interpret(kernel, x, y, checks='all')
        assert torch.equal(y, x.flatten())
    else:
        with pytest.raises(DataRace, match='y'):
            interpret(kernel, x, y, checks='races')


@pytest.mark.parametrize('unique', [False, True])
def test_scattered_rows_that_meet(unique):
    @T.prim_func
    def scatter(x: T.Tensor((8, 32), 'float32'), index: T.Tensor((8,), 'int32'), y: T.Tensor((8, 32), 'float32')):
        with T.Kernel(8, threads=32) as pid:
            for j in T.Parallel(32):
                y[index[pid], j] = x[pid, j]

    x, index = torch.randn(8, 32), torch.tensor([3, 1, 0, 2, 7, 6, 5, 4 if unique else 3], dtype=torch.int32)
    if unique:
        y = torch.empty(8, 32)
        interpret(scatter, x, index, y, checks='all')
        assert torch.equal(y[index.long()], x)
    else:
        with pytest.raises(DataRace, match='y'):
            interpret(scatter, x, index, torch.empty(8, 32), checks='races')


def test_a_read_before_the_wait_for_the_kernel_of_another_program():
    @T.prim_func
    def first(x: T.Tensor((8,), 'float32'), scratch: T.Tensor((8,), 'float32')):
        with T.Kernel(4, threads=32) as pid:
            if T.get_thread_binding() == 0:
                scratch[pid] = x[pid] * 2.0
            T.pdl_trigger()

    def second(early, place):
        @T.prim_func
        def main(scratch: T.Tensor((8,), 'float32'), y: T.Tensor((8,), 'float32')):
            with T.Kernel(1, threads=32):
                held = T.alloc_local((1,), 'float32')
                if early:
                    held[0] = scratch[place]
                T.pdl_sync()
                if not early:
                    held[0] = scratch[place]
                if T.get_thread_binding() == 0:
                    y[0] = held[0]

        return main

    x, scratch, y = torch.randn(8), torch.zeros(8), torch.empty(8)
    interpret(first, x, scratch, checks='races')
    with pytest.raises(DataRace, match=r'scratch\[3\] is read before T.pdl_sync, and the kernel before wrote it'):
        interpret(second(True, 3), scratch, y, checks='races')
    for early, place in ((False, 3), (True, 5)):  # after the wait, or what the kernel before did not write
        interpret(first, x, scratch, checks='races')
        interpret(second(early, place), scratch, y, checks='races')
    interpret(first, x, scratch, checks='races')
    scratch.add_(1.0)  # PyTorch's kernel comes between
    interpret(second(True, 3), scratch, y, checks='races')
    interpret(first, x, scratch, checks='races')
    interpret(first, x, torch.zeros(8), checks='races')  # and so does another one
    interpret(second(True, 3), scratch, y, checks='races')


def uneven_ring(leave):
    """Two warps copy three tiles each through a ring of two; in a loop of pairs, one has the odd tile first."""

    @T.prim_func
    def ring(x: T.Tensor((2, 3, 32, 4), 'float32'), y: T.Tensor((2, 3, 32, 4), 'float32')):
        with T.Kernel(1, threads=64):
            stages = T.alloc_shared((2, 64, 4), 'float32')
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            turn = T.alloc_var('int32', init=0)
            for i in T.unroll(2):
                T.ptx_cp_async(T.access_ptr(stages[i, thread, 0], 'w', 4), T.access_ptr(x[warp, i, lane, 0], 'r', 4), 4)
                T.ptx_commit_group()
            for item in T.serial(2):
                for _ in T.serial(1 + (warp + item) % 2):
                    T.ptx_wait_group(leave)
                    for e in T.vectorized(4):
                        y[warp, turn, lane, e] = stages[turn % 2, thread, e]
                    if turn == 0:
                        T.ptx_cp_async(
                            T.access_ptr(stages[0, thread, 0], 'w', 4), T.access_ptr(x[warp, 2, lane, 0], 'r', 4), 4
                        )
                    T.ptx_commit_group()
                    turn = turn + 1

    return ring


def test_warps_that_do_not_advance_together_wait_for_their_own_copies():
    x, y = torch.randn(2, 3, 32, 4), torch.zeros(2, 3, 32, 4)
    interpret(uneven_ring(1), x, y, checks='all', pass_configs=MANUAL)
    assert torch.equal(x, y)
    with pytest.raises(AsyncReadBeforeWait, match='wait for it first'):
        interpret(uneven_ring(2), x, y, checks='all', pass_configs=MANUAL)


@pytest.mark.parametrize(
    ('mask', 'lanes', 'stops'), [(0xFFFFFFFF, 16, True), (0xFFFF, 16, False), (0xFFFFFFFF, 32, False)]
)
def test_a_shuffle_whose_mask_has_lanes_that_take_no_part(mask, lanes, stops):
    @T.prim_func
    def pairs(x: T.Tensor((64,), 'int32'), y: T.Tensor((64,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            if thread % 32 < lanes:
                y[thread] = T.shfl_xor(x[thread], 1, mask=mask)

    x, y = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    if stops:
        with pytest.raises(BarrierDivergence, match=r'the mask of a shuffle has a lane that takes no part.*thread 16'):
            interpret(pairs, x, y)
    else:
        interpret(pairs, x, y)
        assert torch.equal(y, torch.where(x % 32 < lanes, x ^ 1, 0))
