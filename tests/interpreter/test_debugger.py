"""The debugger: prints, watches, observers, post-mortems, collected findings, strict bounds, the `debug` command."""

import io
import sys

import numpy as np
import pytest
import tilelang.language as T
import torch

from tile_kernels.cli.main import main
from tile_kernels.interpreter import (
    AccessEvent,
    AssertionFailed,
    Counter,
    DataRace,
    MisalignedAccess,
    OutOfBounds,
    UninitializedRead,
    UnwrittenOutput,
    interpret,
)


@T.prim_func
def scale(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
    with T.Kernel(2, threads=32) as pid:
        thread = T.get_thread_binding()
        x_shared = T.alloc_shared((32,), 'float32')
        mine = T.alloc_local((2,), 'float32')
        mine[0] = x[pid * 32 + thread]
        x_shared[thread] = mine[0] * 2.0
        y[pid * 32 + thread] = x_shared[thread]


@T.prim_func
def neighbour(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
    with T.Kernel(1, threads=64):
        for i in T.Parallel(64):
            y[i] = x[i + 1]


@T.prim_func
def broken(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32'), z: T.Tensor((64,), 'float32')):
    with T.Kernel(1, threads=32):
        thread = T.get_thread_binding()
        x_shared = T.alloc_shared((32,), 'float32')
        tile = T.alloc_fragment((32,), 'float32')
        mine = T.alloc_local((2,), 'float32')
        mine[0] = x[thread]
        x_shared[thread] = mine[0]
        T.device_assert(x[thread] >= 0.0, 'x must not be negative')
        for i in T.Parallel(32):
            tile[i] = x_shared[i] + 1.0
        y[thread] = x_shared[thread + 1]
        y[thread + 32] = mine[1]
        z[0] = mine[0]


def test_print_shows_value_message_block_thread_and_line(capsys):
    @T.prim_func
    def printing(x: T.Tensor((64,), 'float32')):
        with T.Kernel(2, threads=32) as pid:
            thread = T.get_thread_binding()
            tile = T.alloc_fragment((4,), 'float32')
            T.fill(tile, 0.5)
            if thread == 3:
                T.print(x[pid * 32 + thread], 'x here')
                T.print(pid)
            T.print(tile)
            T.print(msg='done')

    report = interpret(printing, torch.arange(64.0))
    line = printing_line()
    lines = capsys.readouterr().out.splitlines()
    assert tuple(lines) == report.prints
    assert lines[0] == f'printing: x here = 3 (block (0,), thread 3), at {__file__}:{line}'
    assert lines[1] == f'printing: x here = 35 (block (1,), thread 3), at {__file__}:{line}'
    assert f'printing: expr<bx> = 1 (block (1,), thread 3), at {__file__}:{line + 1}' in lines
    assert f'printing: tile[2] = 0.5 (block (1,), thread 0), at {__file__}:{line + 2}' in lines
    done = [text for text in lines if 'done' in text]
    assert len(done) == 20
    assert done[5] == f'printing: done (block (0,), thread 5), at {__file__}:{line + 3}'
    assert lines[-1] == f'printing: 44 more prints, at {__file__}:{line + 3}'


def printing_line():
    with open(__file__) as file:
        return next(number for number, text in enumerate(file, 1) if "'x here')" in text)


def test_print_inside_parallel_names_the_iteration(capsys):
    @T.prim_func
    def printing(x: T.Tensor((4,), 'int32')):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                if x[i] > 5:
                    T.print(x[i], 'big')

    report = interpret(printing, torch.tensor([1, 9, 2, 7], dtype=torch.int32))
    capsys.readouterr()
    assert [text.split(',  at')[0].split(', at')[0] for text in report.prints] == [
        'printing: big = 9 (block (0,), iteration (1,))',
        'printing: big = 7 (block (0,), iteration (3,))',
    ]


def test_print_may_look_at_memory_that_nothing_wrote(capsys):
    @T.prim_func
    def printing(x: T.Tensor((4,), 'float32')):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((2,), 'float32')
            mine = T.alloc_fragment((4,), 'float32')
            tile[1] = 3.0
            T.print(tile)
            for i in T.Parallel(4):
                T.print(mine[i], 'mine')

    report = interpret(printing, torch.ones(4), checks='all')
    capsys.readouterr()
    shown = {text.split(' (')[0] for text in report.prints}
    assert shown >= {'printing: tile[0] = not written', 'printing: tile[1] = 3', 'printing: mine = not written'}
    assert 'printing: tile[1] = not written' not in shown


def test_device_assert_says_its_message_and_line():
    with pytest.raises(AssertionFailed) as caught:
        interpret(broken, -torch.ones(64), torch.empty(64), torch.empty(64))
    assert "T.device_assert('x must not be negative') does not hold: x[thread] >= " in str(caught.value)
    assert '\n' not in str(caught.value)
    with open(__file__) as file:
        assert 'T.device_assert' in file.read().splitlines()[caught.value.line - 1]


def test_watch_is_called_for_chosen_buffers_and_lines():
    seen = []
    x = torch.arange(64.0)
    interpret(scale, x, torch.empty(64), watch=seen.append, at='x_shared')
    assert {touch.buffer for touch in seen} == {'x_shared'}
    assert [touch.action for touch in seen] == ['store'] * 64 + ['load'] * 64
    one = next(touch for touch in seen if touch.block == (1,) and touch.thread == 5)
    assert (one.index, one.value, one.action) == ((5,), 74.0, 'store')
    assert str(one) == f'line {one.line}: store x_shared[5] = 74.0 (block (1,), thread 5)'
    by_line = []
    interpret(scale, x, torch.empty(64), watch=by_line.append, at=[one.line, 'y'])
    assert {(touch.action, touch.buffer) for touch in by_line} == {
        ('load', 'mine'),
        ('store', 'x_shared'),
        ('store', 'y'),
    }
    everything = []
    interpret(scale, x, torch.empty(64), watch=everything.append)
    assert {touch.buffer for touch in everything} == {'x', 'mine', 'x_shared', 'y'}


def test_breakpoint_works_in_a_watch(monkeypatch):
    stops = []
    monkeypatch.setattr(sys, 'breakpointhook', lambda: stops.append(1))

    def stop(touch):
        if touch.thread == 3:
            breakpoint()

    interpret(scale, torch.ones(64), torch.empty(64), watch=stop, at='y')
    assert len(stops) == 2


def test_at_needs_watch():
    with pytest.raises(ValueError, match='watch is not given'):
        interpret(scale, torch.ones(64), torch.empty(64), at='y')


class Recorder:
    def __init__(self):
        self.events: list[AccessEvent] = []

    def access(self, event):
        self.events.append(event)


def test_an_observer_sees_lanes_addresses_banks_and_sectors():
    @T.prim_func
    def strided(x: T.Tensor((64, 32), 'float16'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            s = T.alloc_shared((64, 32), 'float16')
            T.copy(x, s)
            if thread < 40:
                y[thread] = s[thread, 4]

    recorder = Recorder()
    x = torch.arange(64 * 32).reshape(64, 32).half()
    interpret(strided, x, torch.zeros(64), observer=recorder)
    load = next(event for event in recorder.events if event.buffer == 's' and event.action == 'load')
    assert (load.scope, load.dtype, load.itemsize, load.count) == ('shared', 'float16', 2, 40)
    assert load.thread.tolist() == list(range(40))
    assert load.lane.tolist() == [*range(32), *range(8)]
    assert load.index.tolist() == [[thread, 4] for thread in range(40)]
    assert load.address.tolist() == [thread * 64 + 8 for thread in range(40)]
    assert load.bank.tolist() == [(thread * 16 + 2) % 32 for thread in range(40)]
    assert np.array_equal(load.value, x[:40, 4].float().numpy())
    copied = next(event for event in recorder.events if event.buffer == 'x')
    assert copied.count == 64 * 32
    assert set(copied.thread) == {-1}
    assert copied.iteration[33].tolist() == [1, 1]
    store = next(event for event in recorder.events if event.buffer == 'y')
    assert store.sector.tolist() == [thread // 8 for thread in range(40)]
    assert store.block.tolist() == [[0]] * 40


def test_atomics_reach_the_observer_as_updates():
    @T.prim_func
    def count(x: T.Tensor((64,), 'int32'), y: T.Tensor((4,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            T.atomic_add(y[x[thread]], 1)

    recorder = Recorder()
    interpret(count, torch.arange(64, dtype=torch.int32) % 4, torch.zeros(4, dtype=torch.int32), observer=recorder)
    update = next(event for event in recorder.events if event.action == 'update')
    assert (update.buffer, update.count) == ('y', 64)
    assert update.index[:5].tolist() == [[0], [1], [2], [3], [0]]


def test_the_counter_finds_bank_conflicts_and_uncoalesced_loads():
    def kernel(stride):
        @T.prim_func
        def main(x: T.Tensor((32 * 32,), 'float32'), y: T.Tensor((32,), 'float32')):
            with T.Kernel(1, threads=32):
                thread = T.get_thread_binding()
                s = T.alloc_shared((32 * 32,), 'float32')
                T.copy(x, s)
                y[thread] = s[thread * stride] + x[thread * stride]

        return main

    counts = {}
    for stride in (1, 32):
        counter = Counter()
        interpret(kernel(stride), torch.ones(32 * 32), torch.empty(32), observer=counter)
        rows = {(buffer, action): row for (_, buffer, action), row in counter.rows.items() if row[0] == 32}
        counts[stride] = rows['s', 'load'][2], rows['x', 'load'][3]
    assert counts == {1: (1, 4), 32: (32, 32)}


def test_results_do_not_depend_on_an_observer():
    x = torch.randn(64)
    plain, seen = torch.empty(64), torch.empty(64)
    interpret(scale, x, plain, checks='all')
    interpret(scale, x, seen, checks='all', observer=Counter(), watch=lambda touch: None, profile=True)
    assert torch.equal(plain, seen)
    assert torch.equal(plain, x * 2)


def test_the_post_mortem_keeps_what_the_failing_block_held():
    x = torch.arange(64.0)
    with pytest.raises(OutOfBounds) as caught:
        interpret(broken, x, torch.empty(64), torch.empty(64))
    kept = caught.value.post_mortem
    assert kept.block == (0,)
    assert kept.shared['x_shared'].tolist() == list(range(32))
    assert kept.fragment['tile'].tolist() == [value + 1.0 for value in range(32)]
    assert kept.local['mine'].shape == (32, 2)
    assert kept.local['mine'][7].tolist() == [7.0, None]  # the second register was never written
    assert kept.variables['thread'].tolist() == list(range(32))
    assert 'x_shared' in kept.names
    assert caught.value.frame is None


def test_on_error_pdb_stops_at_the_line_of_the_kernel(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'stdin', io.StringIO('p float(x_shared[5])\np finding.index\nq\n'))
    with pytest.raises(OutOfBounds) as caught:
        interpret(broken, torch.arange(64.0), torch.empty(64), torch.empty(64), on_error='pdb')
    shown = capsys.readouterr().out
    assert f'{__file__}({caught.value.line})' in shown
    assert 'y[thread] = x_shared[thread + 1]' in shown
    assert '5.0' in shown
    assert '(32,)' in shown


def test_on_error_takes_two_values():
    with pytest.raises(ValueError, match='on_error must be one of'):
        interpret(scale, torch.ones(64), torch.empty(64), on_error='ignore')


def test_collect_reports_all_findings():
    x, y = -torch.arange(64.0), torch.zeros(64)
    report = interpret(broken, x, y, torch.empty(64), checks='collect')
    assert [type(error) for error in report.errors] == [
        AssertionFailed,
        OutOfBounds,
        UninitializedRead,
        DataRace,
        UnwrittenOutput,
    ]
    assert torch.equal(y[:31], x[1:32])  # the kernel ran to its end
    assert report.findings[1] == str(report.errors[1])
    assert interpret(scale, x, y, checks='collect').errors == ()


def test_collect_goes_on_after_a_misaligned_vector():
    @T.prim_func
    def odd(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=16):
            thread = T.get_thread_binding()
            tile = T.alloc_shared((64,), 'float32')
            for i in T.vectorized(4):
                tile[thread * 4 + i] = x[thread * 4 + i]
            T.sync_threads()
            for i in T.Parallel(64):
                y[i] = tile[i] + tile[i + 1]

    x, y = torch.arange(72.0)[1:65], torch.zeros(64)
    report = interpret(odd, x, y, checks='collect')
    assert [type(error) for error in report.errors] == [MisalignedAccess, OutOfBounds]
    assert torch.equal(y[:63], x[:63] + x[1:])


def test_collect_counts_what_a_loop_repeats():
    @T.prim_func
    def again(x: T.Tensor((32,), 'float32'), y: T.Tensor((32,), 'float32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            s = T.alloc_shared((32,), 'float32')
            for k in T.serial(5):
                s[thread] = x[thread]
                y[thread] = s[thread + k + 1]

    report = interpret(again, torch.ones(32), torch.empty(32), checks='collect')
    assert [(type(error), error.times) for error in report.errors] == [(OutOfBounds, 5)]


def test_strict_makes_guarded_accesses_findings():
    x, y = torch.ones(64), torch.empty(64)
    assert interpret(neighbour, x, y).guarded
    with pytest.raises(OutOfBounds) as caught:
        interpret(neighbour, x, y, strict=True)
    assert (caught.value.buffer, caught.value.index) == ('x', (64,))
    assert not interpret(scale, x, y, strict=True).findings


def test_a_store_past_the_end_is_strict_too():
    @T.prim_func
    def tail(x: T.Tensor((50,), 'float32'), y: T.Tensor((50,), 'float32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            if thread < 50:
                y[thread] = x[thread]

    assert not interpret(tail, torch.ones(50), torch.empty(50), strict=True).findings

    @T.prim_func
    def past(x: T.Tensor((50,), 'float32'), y: T.Tensor((50,), 'float32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            y[thread] = 1.0

    with pytest.raises(OutOfBounds, match=r'index \(50\) of global buffer y'):
        interpret(past, torch.ones(50), torch.empty(50), strict=True)


def test_profile_books_time_by_line():
    report = interpret(scale, torch.ones(64), torch.empty(64), profile=True)
    assert {row.file for row in report.lines} == {__file__}
    assert report.lines[0].seconds >= report.lines[-1].seconds > 0
    assert sum(row.seconds for row in report.lines) <= report.seconds
    assert interpret(scale, torch.ones(64), torch.empty(64)).lines == ()


PROGRAM = """
import tilelang
import tilelang.language as T


@T.prim_func
def plain(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
    with T.Kernel(1, threads=64):
        thread = T.get_thread_binding()
        s = T.alloc_shared((64,), 'float32')
        s[thread] = x[thread]
        if thread == 100:
            y[thread] = 0.0
        y[thread] = s[thread + 1]


@tilelang.jit(out_idx=[-1])
def lazy(n, block=32):
    m = T.dynamic('m')

    @T.prim_func
    def copy(x: T.Tensor((m, n), 'bfloat16'), y: T.Tensor((m, n), 'bfloat16')):
        with T.Kernel(T.ceildiv(m, block), threads=32) as pid:
            for i, j in T.Parallel(block, n):
                y[pid * block + i, j] = x[pid * block + i, j]

    return copy


@tilelang.jit
def eager(a, scale: float = 2.0):
    m, n = T.const('m n')
    a: T.Tensor((m, n), 'float32')
    b = T.empty((m, n), dtype='float32')
    with T.Kernel(m, threads=32) as pid:
        T.print(msg='one row')
        for j in T.Parallel(n):
            b[pid, j] = a[pid, j] * scale
    return b
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / 'program.py'
    path.write_text(PROGRAM)
    return path


def test_debug_command_reports_findings_coverage_and_slow_lines(program, capsys):
    assert main(['debug', f'{program}:plain']) == 1
    shown = capsys.readouterr().out
    assert 'input     x: float32 (64,)' in shown
    assert 'finding   OutOfBounds: plain: index (64) of shared buffer s is outside its shape (64)' in shown
    assert "branch    line 12: no thread took the 'then' side" in shown
    assert 'coverage  1 of 2 branches' in shown
    assert 'y[thread] = s[thread + 1]' in shown
    assert 'result    1 findings' in shown


def test_debug_command_takes_jit_functions_of_both_styles(program, capsys):
    assert main(['debug', f'{program}:lazy', '--set', 'n=16', '--set', 'm=40']) == 0
    shown = capsys.readouterr().out
    assert 'input     x: bfloat16 (40, 16)' in shown
    assert 'guarded   line 25: x is accessed outside its shape' in shown
    assert main(['debug', f'{program}:lazy', '--set', 'n=16', '--set', 'm=40', '--strict']) == 1
    assert 'OutOfBounds' in capsys.readouterr().out
    assert main(['debug', f'{program}:eager', '--set', 'm=3']) == 0
    shown = capsys.readouterr().out
    assert 'input     a: float32 (3, 64)' in shown
    assert 'eager: one row (block (0,), thread 0)' in shown


@pytest.mark.parametrize(
    ('what', 'words'),
    [
        ('plain', 'must be given as FILE.py:NAME'),
        ('nowhere.py:plain', 'there is no file nowhere.py'),
        ('{program}:missing', 'has no missing; it has eager, lazy, plain'),
        ('{program}:lazy', 'lazy needs n; give --set n=...'),
        ('{program}:T', 'T is no kernel'),
    ],
)
def test_debug_command_refuses_in_one_sentence(program, capsys, what, words):
    assert main(['debug', what.format(program=program)]) == 1
    refused = capsys.readouterr().err
    assert words in refused
    assert refused.count('\n') == 1
