"""The profiler: sums over recorded and synthetic traces, names of slices, and that nothing stays behind."""

import json
import sys

import pytest
import torch
from torch._dynamo.utils import counters

from tile_kernels import ArgumentError, profiler
from tile_kernels.cli.main import main
from tile_kernels.core.call import Calls, naming
from tile_kernels.core.knobs import knobs
from tile_kernels.core.replay import MISS
from tile_kernels.moe import topk_gating
from tile_kernels.profiler import Naming
from tile_kernels.profiler.events import Costs, aggregate, busy_share, op_of, short_name, text_of
from tile_kernels.quant import per_token_cast

CAST = 'quant.per_token_cast'


# A trace of a GPU: two casts, a kernel of PyTorch, a copy, and a CUDA graph ---------------------


def event(cat, name, ts, dur, tid=1, **args):
    return dict(ph='X', cat=cat, name=name, pid=1 if tid < 7 else 0, tid=tid, ts=ts, dur=dur, args=args)


GPU_TRACE = [
    dict(ph='M', name='process_name', pid=1, tid=1, args={'name': 'python'}),
    event('user_annotation', f'{CAST}#0', 0.0, 10.0, **{'External id': 1}),
    event('cuda_driver', 'cuLaunchKernel', 4.0, 3.0, correlation=11),
    event('kernel', 'per_token_cast_kernel', 10.0, 20.0, tid=7, correlation=11, stream=7),
    event('gpu_user_annotation', f'{CAST}#0', 10.0, 20.0, tid=7),
    event('user_annotation', f'{CAST}#0', 20.0, 8.0, **{'External id': 2}),
    event('cpu_op', 'tile_kernels::quant_per_token_cast', 21.0, 6.0, **{'External id': 3}),
    event('cuda_driver', 'cuLaunchKernelEx', 22.0, 3.0, correlation=12),
    event('kernel', 'per_token_cast_kernel', 30.0, 40.0, tid=7, correlation=12, stream=7),
    event('cpu_op', 'aten::add', 40.0, 9.0, **{'External id': 4}),
    event('cuda_runtime', 'cudaLaunchKernel', 42.0, 4.0, correlation=13),
    event('kernel', 'void at::native::elementwise_kernel<128, 4>(int, at::Array)', 90.0, 10.0, tid=7, correlation=13),
    event('cuda_runtime', 'cudaMemcpyAsync', 50.0, 2.0, correlation=14),
    event('gpu_memcpy', 'Memcpy DtoH (Device -> Pinned)', 95.0, 15.0, tid=8, correlation=14),
    event('cuda_runtime', 'cudaGraphLaunch', 60.0, 5.0, correlation=15),
    event('kernel', 'norm_forward_kernel', 120.0, 30.0, tid=7, correlation=15),
    event('kernel', 'norm_forward_kernel', 150.0, 30.0, tid=7, correlation=15),
]
COSTS = {f'{CAST}#0': Costs(bytes=42_400_000, flops=6_000_000, floor_us=9.0)}


@pytest.fixture(scope='module')
def rows():
    found = aggregate(GPU_TRACE, COSTS, copy_bandwidth=4.24e12, on_gpu=True)
    return {record.name: record for record in found}


def test_device_time_goes_to_the_op_that_launched_the_kernel(rows):
    cast = rows[CAST]
    assert (cast.kind, cast.calls, cast.device_us, cast.mean_us, cast.p95_us) == ('op', 2, 60.0, 30.0, 40.0)
    assert cast.host_us == 18.0  # the operator inside the call is not counted again


def test_kernels_of_others_have_rows_of_their_own(rows):
    assert set(rows) == {CAST, 'elementwise_kernel', 'Memcpy DtoH', 'norm_forward_kernel'}
    assert (rows['elementwise_kernel'].device_us, rows['elementwise_kernel'].host_us) == (10.0, 4.0)
    assert (rows['norm_forward_kernel'].calls, rows['norm_forward_kernel'].device_us) == (2, 60.0)


def test_rates_follow_from_bytes_and_operations(rows):
    cast = rows[CAST]
    assert cast.gbps == pytest.approx(2 * 42.4e6 / 60e-6 / 1e9)
    assert cast.pct_of_copy == pytest.approx(100 * 20 / 60)
    assert cast.tflops == pytest.approx(0.2) and cast.floor_us == 18.0
    assert rows['elementwise_kernel'].gbps is None


def test_shares_and_gaps_add_up(rows):
    assert sum(r.share for r in rows.values()) == pytest.approx(1)
    assert sum(r.device_us for r in rows.values()) == 145.0
    assert (rows[CAST].gap_us, rows['elementwise_kernel'].gap_us, rows['Memcpy DtoH'].gap_us) == (0.0, 20.0, 0.0)
    assert rows['norm_forward_kernel'].gap_us == 10.0
    assert busy_share(GPU_TRACE) == pytest.approx(140 / 180)


def test_a_kernel_without_a_launch_is_found_by_its_external_id():
    lost = event('kernel', 'per_token_cast_kernel', 10.0, 5.0, tid=7, **{'External id': 1})
    (record,) = aggregate([GPU_TRACE[1], lost], {}, 1e12, on_gpu=True)
    assert (record.name, record.device_us) == (CAST, 5.0)


def test_replays_that_did_not_match_are_no_calls():
    missed = {f'{CAST}#0': Costs(1, 0, 1.0, misses=1)}
    assert next(r for r in aggregate(GPU_TRACE, missed, 1e12, True) if r.name == CAST).calls == 1


def test_the_summary_is_sorted_fits_80_columns_and_says_what_to_do(rows):
    text = text_of(list(rows.values()), GPU_TRACE, True, 'device', 80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == [
        'calls',
        'us',
        'mean',
        'p95',
        '%',
        'GB/s',
        '%copy',
        'TF/s',
        'floor',
        'host',
        'us',
        'gap',
        'us',
    ]
    assert lines[1] == CAST and lines[2].split()[:5] == ['2', '60.0', '30.0', '40.0', '41']
    assert 'device busy 78%: host-bound; to do:' in text
    advice = lines[-3:]
    assert advice[0].startswith('  1. tile-kernels tune quant.per_token_cast: 3.3 times its floor (up to 42 us)')
    assert 'CUDA graph' in advice[1] and 'fuse norm_forward_kernel' in advice[2]
    wide = text_of(list(rows.values()), GPU_TRACE, True, 'name', 200).splitlines()
    assert [line.split()[0] for line in wide[1:5]] == ['Memcpy', 'elementwise_kernel', 'norm_forward_kernel', CAST]
    with pytest.raises(ArgumentError, match=r"sort must be one of device, .* got 'size'"):
        text_of(list(rows.values()), GPU_TRACE, True, 'size', 80)


def test_many_rows_are_cut():
    events = [event('kernel', f'k{i}', float(i), 1.0, tid=7) for i in range(40)]
    text = text_of(aggregate(events, {}, 1e12, True), events, True, 'name', 120)
    assert 'and 10 more' in text and 'device busy 100%: device-bound' in text


@pytest.mark.parametrize(
    ('full', 'short'),
    [
        ('void at::native::(anonymous namespace)::vectorized<4, at::F<int>>(int)', 'vectorized'),
        ('matmul_kernel', 'matmul_kernel'),
        ('Memset (Device)', 'Memset'),
    ],
)
def test_names_of_kernels_are_short(full, short):
    assert short_name(full) == short


@pytest.fixture(autouse=True, scope='module')
def no_gpu():
    """The same machine everywhere: profiles are those of a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('torch.cuda.is_available', lambda: False)
        yield


# A profile on this CPU ------------------------------------------------------------------------


@pytest.fixture(scope='module')
def recorded(tmp_path_factory):
    """A real profile, and the trace it wrote."""
    x = torch.randn(16, 256, dtype=torch.bfloat16)
    logits = torch.randn(4, 64, requires_grad=True)
    with profiler.profile() as found:
        for _ in range(3):
            per_token_cast(x, 'e4m3_1x128_f32')
        per_token_cast(x[:4], 'e4m3_1x128_f32')
        weights, _ = topk_gating(logits, top_k=8)
        weights.square().sum().backward()
        x @ x.T
    path = tmp_path_factory.mktemp('trace') / 'trace.json'
    found.export_chrome_trace(path)
    return found, json.loads(path.read_text())


def test_on_a_cpu_there_is_wall_time_per_op_and_it_says_so(recorded, capsys):
    found, _ = recorded
    rows = {record.name: record for record in found.records}
    assert rows[CAST].calls == 4 and rows['moe.topk_gating'].calls == rows['moe.topk_gating_bwd'].calls == 1
    assert rows[CAST].device_us is None and rows[CAST].host_us > 0
    assert rows['aten::matmul'].kind == 'torch' and not any('autograd::engine' in name for name in rows)
    found.summary()
    out = capsys.readouterr().out
    assert 'wall us' in out and out.endswith(
        'No GPU: these are wall times on this CPU; they say nothing about the kernels.\n'
    )
    assert str(found) == out[:-1]


def test_slices_of_the_trace_carry_config_bytes_floor_and_prediction(recorded):
    _, trace = recorded
    slices = [e for e in trace['traceEvents'] if e.get('name') == CAST]
    assert len(slices) == 4 and not any('#' in e['name'] for e in slices)
    large, small = slices[0]['args'], slices[-1]['args']
    assert large['config'].startswith('per_token_cast_kernel vectors=')
    assert (large['bytes'], small['bytes']) == (16 * 256 * 3 + 16 * 8, 4 * 256 * 3 + 4 * 8)
    assert large['floor us'] > 0 and large['predicted us'] > 1
    assert all(e['ph'] != 'X' or (e['ts'] >= 0 and e['dur'] >= 0) for e in trace['traceEvents'])
    assert 'schemaVersion' in trace


def test_nothing_is_left_of_a_profile_and_nothing_was_checked(recorded):
    """An inactive profiler costs a look at PyTorch's flag: calls run the code they ran before one was ever active."""
    op = per_token_cast
    before = type(op).call, type(op).__call__, Calls.eager, Calls.learn
    assert Calls.eager.__qualname__ == 'Calls.eager'
    assert not naming.elsewhere
    epoch = knobs.epoch
    profiler.start()
    assert Calls.eager is not before[2] and (type(op).call, type(op).__call__) == before[:2]
    profiler.stop()
    assert (type(op).call, type(op).__call__, Calls.eager, Calls.learn) == before
    assert knobs.epoch >= epoch + 2  # named replays are not found again


def test_a_compiled_model_is_not_compiled_again():
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    model = torch.compile(lambda x: per_token_cast(x, 'e4m3_1x128_f32')[1] * 2, backend='eager')
    model(x)
    graphs = counters['stats']['unique_graphs']
    with profiler.profile() as found:
        model(x)
    assert counters['stats']['unique_graphs'] == graphs
    assert CAST in [record.name for record in found.records]  # by its operator


def test_replays_are_named_and_forgotten(monkeypatch):
    calls, results = per_token_cast.calls, iter(['hit', MISS])

    def learn(calls, key, first, tensors, given):
        calls.replays.setdefault(key, []).append(lambda *tensors: next(results))

    monkeypatch.setattr(Calls, 'learn', learn)
    naming = Naming(numbered=True)
    naming.install()
    try:
        given = {'x': torch.zeros(2, 128)}
        calls.learn('key', None, [], given)
        (replay,) = calls.replays.pop('key')
        with torch.profiler.profile() as prof:
            assert replay() == 'hit' and replay() is MISS
    finally:
        naming.remove()
    assert [e.name for e in prof.events() if CAST in e.name] == [f'{CAST}#0'] * 2
    assert naming.kinds[f'{CAST}#0'].misses == 1 and Calls.learn is learn


def test_start_twice_and_stop_without_start_are_one_sentence(monkeypatch):
    with pytest.raises(ArgumentError, match='stop without start'):
        profiler.stop()
    profiler.start()
    try:
        with pytest.raises(ArgumentError, match='start was called twice'):
            profiler.start()
    finally:
        profiler.stop()
    with torch.profiler.profile(), pytest.raises(ArgumentError, match=r'a torch\.profiler is active'):
        profiler.start()
    monkeypatch.setattr(profiler, '_last', None)
    with pytest.raises(ArgumentError, match='nothing was profiled yet'):
        profiler.summary()


def test_a_block_that_fails_ends_its_profile():
    with pytest.raises(ZeroDivisionError), profiler.profile():
        _ = 1 / 0
    with profiler.profile():
        pass


def test_op_of_knows_slices_and_operators():
    assert op_of({'cat': 'user_annotation', 'name': f'{CAST}#12'}) == CAST
    assert op_of({'cat': 'cpu_op', 'name': 'tile_kernels::quant_per_token_cast'}) == CAST
    assert op_of({'cat': 'user_annotation', 'name': 'my label'}) is None


# The command ------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
from helper import rows
from tile_kernels.quant import per_token_cast
per_token_cast(torch.zeros(rows, 128, dtype=torch.bfloat16), 'e4m3_1x128_f32')
print('arguments', sys.argv[1:])
sys.exit(int(sys.argv[1]))
"""


def test_the_command_runs_a_script_and_writes_a_trace(tmp_path, capsys):
    script, trace = tmp_path / 'script.py', tmp_path / 'trace.json'
    script.write_text(SCRIPT)
    (tmp_path / 'helper.py').write_text('rows = 4')
    argv, path = sys.argv, list(sys.path)
    status = main(['profile', '--trace', str(trace), '--sort', 'name', str(script), '3', '--flag'])
    out = capsys.readouterr().out
    assert status == 3 and "arguments ['3', '--flag']" in out and CAST in out and f'trace: {trace}' in out
    assert CAST in [e.get('name') for e in json.loads(trace.read_text())['traceEvents']]
    assert sys.argv is argv and sys.path == path


def test_the_command_prints_how_to_run_ncu(tmp_path, capsys):
    script = tmp_path / 'my script.py'
    script.write_text('')
    assert main(['profile', '--ncu', str(script), '1']) == 0
    out = capsys.readouterr().out
    assert out.startswith('ncu --set full ') and "--kernel-name 'regex:_kernel(_[0-9]+)?$'" in out
    assert f"'{script}' 1\n" in out
    assert main(['profile', str(tmp_path / 'none.py')]) == 1
    assert 'none.py does not exist' in capsys.readouterr().err
