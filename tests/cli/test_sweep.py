import pytest

from tile_kernels.cli import bench, console, sweep
from tile_kernels.core import launch
from tile_kernels.core.cases import case_id
from tile_kernels.core.errors import LaunchError

TIMES = {(1, 64): 4.0, (1, 128): 3.0, (4, 64): 2.0, (4, 128): 5.0}


def by_config(op, arguments, effort):
    """A timer that knows the answer from the config in force."""
    config = launch.state.config
    us = TIMES[config['block_m'], config['num_threads']]
    return us, 10 - us


@pytest.fixture
def subject(toy):
    case = toy.case_set.smoke[1]
    (found,) = sweep.subjects([(toy, case)])
    return found


def test_every_config_of_the_space_is_a_candidate_and_the_chosen_one_comes_first(subject):
    assert subject.configs[0] == {'block_m': 1, 'num_threads': 64}
    assert len(subject.configs) == 4
    assert len({tuple(config.items()) for config in subject.configs}) == 4


def test_an_empty_case_has_nothing_to_sweep(toy):
    assert sweep.subjects([(toy, toy.case_set.smoke[0])]) == []


def test_configs_are_checked_timed_and_ranked(subject):
    trials = sweep.sweep(subject, 'cpu', by_config)
    assert [trial.us for trial in trials] == [2.0, 3.0, 4.0, 5.0]
    assert [trial.chosen for trial in trials] == [False, False, True, False]
    assert sweep.slowdown(trials, 'us') == 2.0


def test_graph_time_can_decide(subject):
    assert sweep.sweep(subject, 'cpu', by_config, rank='graph_us')[0].config == {'block_m': 4, 'num_threads': 128}


def test_only_the_best_and_the_chosen_are_timed_again(subject):
    efforts = []

    def timer(op, arguments, effort):
        efforts.append((effort, launch.state.config['block_m'], launch.state.config['num_threads']))
        return by_config(op, arguments, effort)

    sweep.sweep(subject, 'cpu', timer, top=1)
    assert [effort[1:] for effort in efforts if effort[0] is sweep.LONG] == [(4, 64), (1, 64)]


def test_a_config_that_fails_is_left_out_and_says_why(subject):
    def timer(op, arguments, effort):
        if launch.state.config['block_m'] == 4:
            raise LaunchError('too large')
        return by_config(op, arguments, effort)

    trials = sweep.sweep(subject, 'cpu', timer)
    assert [trial.us for trial in trials] == [3.0, 4.0, None, None]
    assert trials[-1].problem == 'too large'


def test_a_config_that_is_wrong_is_left_out(subject, monkeypatch):
    monkeypatch.setattr(subject.op, 'twin', lambda x: x * 3)
    trials = sweep.sweep(subject, 'cpu', by_config)
    assert all('kernel and twin' in trial.problem for trial in trials)
    assert sweep.slowdown(trials, 'us') is None


def test_a_config_that_does_not_compile_is_not_tried(subject):
    (variant,) = sweep.variants_of(subject, {'block_m': 4, 'num_threads': 64}, 'sm_90a')
    trials = sweep.sweep(subject, 'cpu', by_config, failures={variant: 'no layout'})
    assert trials[-1].problem == 'no layout'
    assert len([trial for trial in trials if trial.us]) == 3


def test_the_report_marks_the_chosen_config(subject, capsys):
    trials = sweep.sweep(subject, 'cpu', by_config)
    sweep.report(console.output(), subject, trials, 'us', 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == 'tests.double[num_tokens=5-hidden=64-float32] double_kernel'
    assert lines[3].split() == ['4', '64', '2.00', '8.00', '2.00x']
    assert lines[4].split() == ['1', '64', '4.00', '6.00', '1.00x', 'chosen']


def test_forcing_one_kernel_leaves_the_others_alone(toy, toy_module):
    case = toy.case_set.bench[0]
    with launch.forced_config(toy_module.double_kernel, block_m=4, num_threads=128):
        assert toy.trace_case(case)[0].config == {'block_m': 4, 'num_threads': 128}
    with launch.forced_config(object(), block_m=4, num_threads=128):
        assert toy.trace_case(case)[0].config == {'block_m': 1, 'num_threads': 64}


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Enough of a GPU for the commands around the measurements."""
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    monkeypatch.setattr('torch.cuda.current_device', lambda: 0)
    monkeypatch.setattr('torch.cuda.get_device_name', lambda index=None: 'NVIDIA H200')
    for module in (bench, sweep):
        monkeypatch.setattr(module, 'arch_of', lambda index: 'sm_90a')


def test_the_command_sweeps_all_cases_and_says_where_choose_is_behind(toy, cli, pretended_gpu, monkeypatch, tmp_path):
    real = sweep.sweep
    compiled = []
    monkeypatch.setattr(sweep, 'compile_variants', lambda variants, jobs, progress: compiled.extend(variants) or {})
    monkeypatch.setattr(sweep, 'sweep', lambda subject, device, timer, *rest: real(subject, 'cpu', by_config, *rest))
    path = tmp_path / 'sweep.jsonl'
    status, out, _ = cli('bench', '--sweep', '--level', 'smoke', '--json', str(path), '--commit', 'abc')
    assert status == 0
    assert len(compiled) == 4
    assert 'choose is within 10% of the best in 0 of 1 sweeps.' in out
    assert 'slower: tests.double[num_tokens=5-hidden=64-float32] double_kernel: 2.00x' in out
    records = bench.read_records(path)
    assert [(record['us'], record['chosen']) for record in records] == [
        (2.0, False),
        (3.0, False),
        (4.0, True),
        (5.0, False),
    ]
    assert records[0]['config'] == {'block_m': 4, 'num_threads': 64}
    assert (records[0]['device'], records[0]['arch'], records[0]['commit']) == ('NVIDIA H200', 'sm_90a', 'abc')


def test_arguments_of_a_sweep_need_one(toy, cli):
    status, _, err = cli('bench', '--top', '3')
    assert status != 0
    assert '--top is for a sweep' in err


def test_a_lost_gpu_ends_the_sweep_and_names_the_config(toy, cli, pretended_gpu, monkeypatch):
    def lose(*arguments):
        raise sweep.DeviceLost('the GPU is in an error state after block_m=4')

    monkeypatch.setattr(sweep, 'sweep', lose)
    monkeypatch.setattr(sweep, 'compile_all', lambda *arguments: {})
    status, out, _ = cli('bench', '--sweep', '--level', 'smoke')
    assert status == 1
    assert 'stopped: tests.double[num_tokens=5-hidden=64-float32] double_kernel: the GPU is in an error state' in out


def test_a_problem_that_poisons_the_gpu_is_told_from_one_that_does_not(monkeypatch):
    monkeypatch.setattr('torch.cuda.synchronize', lambda: None)
    sweep._still_alive('cuda', {'block_m': 4}, 'too large')

    def poisoned():
        raise RuntimeError('illegal memory access')

    monkeypatch.setattr('torch.cuda.synchronize', poisoned)
    with pytest.raises(sweep.DeviceLost, match='after block_m=4: too large'):
        sweep._still_alive('cuda', {'block_m': 4}, 'too large')


def test_gpu_records_carry_what_reproduces_them(toy, cli, pretended_gpu, monkeypatch, tmp_path):
    numbers = {'us': 2.0, 'graph_us': 1.5, 'gbps': 16.4, 'pct_of_copy': 97.5, 'host_us': 9.0}
    checked = []
    monkeypatch.setattr(bench, 'check_kernel', lambda op, case, device: checked.append(device))
    monkeypatch.setattr(bench, 'measure', lambda op, case, device: {'op': op.name, 'case': case_id(case)} | numbers)
    path = tmp_path / 'bench.jsonl'
    status, out, _ = cli('bench', '--json', str(path))
    assert status == 0 and 'No GPU' not in out and '97.5' in out
    first, second = bench.read_records(path)
    assert checked == ['cuda', 'cuda']
    assert first['case'] == 'num_tokens=64-hidden=128-bfloat16' and first['pct_of_copy'] == 97.5
    assert first['launches'] == [{'kernel': 'double_kernel', 'config': {'block_m': 1, 'num_threads': 64}}]
    assert second['launches'] == [{'kernel': 'double_kernel', 'config': {'block_m': 4, 'num_threads': 64}}]
    assert first['device'] == 'NVIDIA H200' and first['timer'] == bench.GPU_TIMER
    assert first['commit'] and first['date'] and first['torch'] and first['tilelang']


def test_a_sweep_needs_a_gpu(toy, cli):
    status, _, err = cli('bench', '--sweep')
    assert status == 1
    assert err == 'tile-kernels bench: --sweep times kernels and needs a GPU; without one see explain and show\n'
