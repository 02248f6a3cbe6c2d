"""Planted defects: the simulator finds each one and names ranks, tensor and line."""

import functools
import inspect

import pytest
import tilelang.language as T
import torch

from tile_kernels import knobs
from tile_kernels import scale as S
from tile_kernels.interpreter import (
    DataRace,
    Deadlock,
    RemoteOutOfBounds,
    RemoteRace,
    SignalReused,
    StaleRead,
)

N, WORLD = 64, 3
SEEDS = (None, 1, 2, 3) if knobs.full_test else (None, 1)


def line_of(mark):
    """The line of this file that ends with a mark."""
    lines, first = inspect.getsourcelines(inspect.getmodule(line_of))
    return first + 1 + next(i for i, line in enumerate(lines) if line.rstrip().endswith(f'# {mark}'))


def found(kernel, kinds, args=None, world=WORLD, seed=None, launches=1):
    """The finding of a run, which must be of these kinds."""
    a, b, c = torch.randn(world, N), torch.zeros(world, N), torch.zeros(world, N)
    with pytest.raises(kinds) as caught:
        S.simulate(
            kernel, world, args or (lambda rank: (a[rank], b[rank], c[rank], None, rank)), seed=seed, launches=launches
        )
    assert type(caught.value) in (kinds if isinstance(kinds, tuple) else (kinds,))
    return caught.value


@functools.cache
def hand_over(order):
    """Send `a` to the next device, which copies what it got to `c`; `order` says what is done and when."""

    @T.prim_func
    def main(
        a: T.Tensor((N,), 'float32'),
        b: S.Symmetric((N,), 'float32', WORLD),
        c: T.Tensor((N,), 'float32'),
        signals: S.Signals(WORLD, slots=2),
        rank: T.int32,
    ):
        with T.Kernel(1, threads=64), S.Scale('device', rank, WORLD) as (dev_id, dev_num):
            following, before = (dev_id + 1) % dev_num, (dev_id + dev_num - 1) % dev_num
            for step in order:
                if step == 'put':
                    S.copy(a, b, dst=following)  # put
                if step == 'put everywhere':
                    S.copy(a, b, dst=0)  # put everywhere
                if step == 'put too far':
                    S.copy(a, b, dst=dev_id + 1)  # put too far
                if step == 'put past the end':
                    S.copy(a[0:32], S.peer(b, following)[dev_id + 32 : dev_id + 64])  # put past the end
                if step == 'signal':
                    S.signal(signals, dst=following)  # signal
                if step == 'signal 2':
                    S.signal(signals, dst=following, value=2)
                if step == 'signal slot':
                    S.signal(signals, dst=following, slot=dev_id)  # signal slot
                if step == 'wait':
                    S.wait(signals, src=before)  # wait
                if step == 'wait 2':
                    S.wait(signals, src=before, value=2)
                if step == 'wait for next':
                    S.wait(signals, src=following)  # wait for next
                if step == 'wait in slot 1':
                    S.wait(signals, src=before, slot=1)  # wait in slot 1
                if step == 'barrier':
                    S.barrier(signals)  # barrier
                if step == 'get':
                    S.copy(b, c, src=dev_id)  # get
                if step == 'get from next':
                    S.copy(b, c, src=following)  # get from next
                if step == 'write own':
                    S.copy(a, b, dst=dev_id)  # write own

    return main


@pytest.mark.parametrize('seed', SEEDS)
@pytest.mark.parametrize(
    'order',
    [
        ('put', 'signal', 'wait', 'get'),
        ('put', 'barrier', 'get'),
        ('barrier', 'put', 'signal', 'wait', 'get', 'barrier'),
        ('write own', 'barrier', 'get from next', 'barrier'),
        ('put', 'barrier', 'get', 'barrier', 'put', 'barrier', 'get'),
        ('put', 'signal', 'wait', 'get', 'signal 2', 'wait 2'),
    ],
    ids=lambda order: ' '.join(order),
)
def test_what_is_right_is_not_found(order, seed):
    a, b, c = torch.randn(WORLD, N), torch.zeros(WORLD, N), torch.zeros(WORLD, N)
    report = S.simulate(hand_over(order), WORLD, lambda rank: (a[rank], b[rank], c[rank], None, rank), seed=seed)
    assert not report.findings
    assert torch.equal(c, a.roll(-1 if 'get from next' in order else 1, 0))


@pytest.mark.parametrize('seed', SEEDS)
@pytest.mark.parametrize(
    ('order', 'kinds', 'lines', 'buffer'),
    [
        (('put', 'get'), StaleRead, ('put', 'get'), 'b'),  # nobody says when the data have come
        (('signal', 'put', 'wait', 'get'), StaleRead, ('put', 'get'), 'b'),  # signal before data
        (('write own', 'signal', 'get from next', 'wait'), StaleRead, ('write own', 'get from next'), 'b'),
        (('put', 'signal', 'wait for next', 'get'), Deadlock, ('wait for next',), ''),  # the wrong rank
        (('put', 'signal', 'wait in slot 1', 'get'), Deadlock, ('wait in slot 1',), ''),
        (('wait', 'put', 'signal'), Deadlock, ('wait',), ''),  # everybody waits first
        (('put', 'signal', 'wait', 'signal'), SignalReused, ('signal',), ''),  # the value of a phase twice
        (('put everywhere', 'barrier'), RemoteRace, ('put everywhere',), 'b'),  # several write one tensor
        (('put', 'signal', 'wait', 'get', 'put', 'signal 2'), RemoteRace, ('put', 'get'), 'b'),  # before it was read
        (('put too far', 'barrier'), RemoteOutOfBounds, ('put too far',), 'b'),  # a device that is not there
        (('put past the end', 'barrier'), RemoteOutOfBounds, ('put past the end',), 'b'),
        (('signal slot',), RemoteOutOfBounds, ('signal slot',), ''),
    ],
    ids=lambda value: ' '.join(value) if isinstance(value, tuple) else '',
)
def test_defects_of_order_are_found(order, kinds, lines, buffer, seed):
    finding = found(hand_over(order), kinds, seed=seed)
    assert finding.line in {line_of(line) for line in lines}
    assert finding.buffer == buffer
    assert finding.ranks and set(finding.ranks) <= set(range(WORLD)) and f'rank {finding.ranks[0]}' in str(finding)
    if kinds in (StaleRead, RemoteRace, Deadlock):
        assert len(finding.ranks) > 1


def test_a_deadlock_says_who_waits_for_whom():
    finding = found(hand_over(('put', 'signal', 'wait for next')), Deadlock)
    for rank in range(WORLD):
        text = f'rank {rank} for value 1 from rank {(rank + 1) % WORLD} in slot 0, which holds 0'
        assert text in str(finding)
    assert finding.ranks == (0, 1, 2)


@functools.cache
def blocks_at_a_barrier(taking_part):
    @T.prim_func
    def main(b: S.Symmetric((N,), 'float32', 2), signals: S.Signals(2, blocks=2), rank: T.int32):
        with T.Kernel(2, threads=64) as pid, S.Scale('device', rank, 2) as (dev_id, _):
            if pid < taking_part:
                S.barrier(signals, block=pid)
            S.copy(S.peer(b, dev_id)[pid * 32 : pid * 32 + 32], S.peer(b, dev_id)[pid * 32 : pid * 32 + 32])

    return main


@pytest.mark.parametrize('seed', SEEDS)
def test_a_barrier_that_half_of_the_blocks_reach_is_found(seed):
    b = torch.zeros(2, N)
    S.simulate(blocks_at_a_barrier(2), 2, lambda rank: (b[rank], None, rank), seed=seed)
    finding = found(blocks_at_a_barrier(1), Deadlock, lambda rank: (b[rank], None, rank), world=2, seed=seed)
    assert 'from rank 0 in slot 2' in str(finding)


@functools.cache
def flags(order, fences=()):
    """Data, then a flag that the program sets and polls by itself."""

    @T.prim_func
    def main(
        a: T.Tensor((N,), 'float32'),
        b: S.Symmetric((N,), 'float32', 2),
        flag: S.Symmetric((1,), 'int32', 2),
        c: T.Tensor((N,), 'float32'),
        rank: T.int32,
    ):
        with T.Kernel(1, threads=64):
            theirs, mine = S.peer(flag, 1 - rank), S.peer(flag, rank)
            S.copy(a, b, dst=1 - rank)
            T.sync_threads()
            if T.get_thread_binding() == 0:
                if 'before' in fences:
                    T.evaluate(T.call_extern('handle', '__threadfence_system'))
                T.atomic_store(theirs[0], 1, memory_order=order)
                while T.atomic_load(mine[0], memory_order='acquire') == 0:
                    pass
                if 'after' in fences:
                    T.evaluate(T.call_extern('handle', '__threadfence_system'))
            T.sync_threads()
            S.copy(b, c, src=rank)  # polled

    return main


@pytest.mark.parametrize('order', ['relaxed', 'release'])
@pytest.mark.parametrize('fences', [(), ('before',), ('after',), ('before', 'after')], ids=' '.join)
@pytest.mark.parametrize('seed', SEEDS)
def test_a_flag_needs_system_scope(order, fences, seed):
    a, b, c = torch.randn(2, N), torch.zeros(2, N), torch.zeros(2, N)
    flag = torch.zeros(2, 1, dtype=torch.int32)
    args = lambda rank: (a[rank], b[rank], flag[rank], c[rank], rank)
    if len(fences) == 2:
        assert not S.simulate(flags(order, fences), 2, args, seed=seed).findings
        assert torch.equal(c, a.flip(0))
    else:
        finding = found(flags(order, fences), StaleRead, args, world=2, seed=seed)
        assert finding.line == line_of('polled') and set(finding.ranks) == {0, 1}


@functools.cache
def repeated(guarded):
    """Every launch sends a tensor, and reads what it got."""

    @T.prim_func
    def main(
        a: T.Tensor((N,), 'float32'),
        b: S.Symmetric((N,), 'float32', 2),
        c: T.Tensor((N,), 'float32'),
        signals: S.Signals(2),
        rank: T.int32,
    ):
        with T.Kernel(1, threads=64), S.Scale('device', rank, 2) as (dev_id, _):
            if guarded:
                S.barrier(signals)
            S.copy(a, b, dst=1 - dev_id)  # send again
            S.signal(signals, dst=1 - dev_id)
            S.wait(signals, src=1 - dev_id)
            S.copy(b, c, src=dev_id)  # keep

    return main


@pytest.mark.parametrize('seed', SEEDS)
def test_a_launch_that_overwrites_what_the_last_one_still_reads_is_found(seed):
    a, b, c = torch.randn(2, N), torch.zeros(2, N), torch.zeros(2, N)
    args = lambda rank: (a[rank], b[rank], c[rank], None, rank)
    S.simulate(repeated(True), 2, args, seed=seed, launches=3)
    S.simulate(repeated(False), 2, args, seed=seed)
    finding = found(repeated(False), RemoteRace, args, world=2, seed=seed, launches=2)
    assert finding.line in (line_of('send again'), line_of('keep')) and finding.buffer == 'b'


@functools.cache
def blocks_of_one_device(ordered):
    @T.prim_func
    def main(
        b: S.Symmetric((N,), 'float32', 2),
        c: T.Tensor((2, N), 'float32'),
        signals: S.Signals(2, slots=2),
        rank: T.int32,
    ):
        with T.Kernel(2, threads=64) as pid, S.Scale('device', rank, 2) as (dev_id, _):
            if pid == 0:
                for i in T.Parallel(N):
                    S.peer(b, dev_id)[i] = T.float32(1)
                S.signal(signals, dst=dev_id)
            else:
                if ordered:
                    S.wait(signals, src=dev_id)
                S.copy(b, c[pid, 0:N], src=dev_id)

    return main


def test_blocks_of_one_device_race_as_elsewhere():
    b, c = torch.zeros(2, N), torch.zeros(2, 2, N)
    args = lambda rank: (b[rank], c[rank], None, rank)
    S.simulate(blocks_of_one_device(True), 2, args, checks='races')
    finding = found_kind(blocks_of_one_device(False), args)
    assert type(finding) is DataRace and 'another block of this rank' in str(finding)


def found_kind(kernel, args):
    with pytest.raises(DataRace) as caught:
        S.simulate(kernel, 2, args, checks='races')
    return caught.value


def test_findings_can_be_collected_and_results_are_kept():
    a, b, c = torch.randn(WORLD, N), torch.zeros(WORLD, N), torch.zeros(WORLD, N)
    args = lambda rank: (a[rank], b[rank], c[rank], None, rank)
    report = S.simulate(hand_over(('put', 'get', 'barrier', 'get')), WORLD, args, checks='collect')
    assert {type(error) for error in report.errors} == {StaleRead}
    assert torch.equal(c, a.roll(1, 0))
    S.simulate(hand_over(('put', 'get', 'barrier')), WORLD, args, checks='memory')  # no check of races
