"""The search: what it tries, rejects, measures and decides; kernels run in the interpreter, clocks are tables."""

import itertools
import math
import os
import random
import signal
import threading

import pytest
import torch

import tile_kernels
from tests.tuning import kernels
from tests.tuning.kernels import added, by_parts, by_threads, doubled, exponential, matmul, one, summed
from tile_kernels import ArgumentError
from tile_kernels.core.gpus import GPUS
from tile_kernels.core.workers import Child, Failed, Here, spread
from tile_kernels.interpreter import fake_cuda, interpreting
from tile_kernels.tuning import Trial, decide, tune
from tile_kernels.tuning.rank import Estimate, estimate
from tile_kernels.tuning.result import Options
from tile_kernels.tuning.search import LONG, QUICK, Lab, explore, shortlist
from tile_kernels.tuning.space import KernelProblem, Target, parameters_of

CPU = Target(GPUS['h200'], 'h200', 'cpu')
FAULTS = ('off by one tile', 'race', 'unwritten tail', 'NaN', 'hang')


def problem(space, **options):
    return KernelProblem(doubled, (128,), {}, space, CPU, reference=lambda x: 2 * x, **options)


def tuned(space, timer=one, runner=Here, **options):
    options = dict(reference=lambda x: 2 * x, store='none', progress=False) | options
    return tune(doubled, (128,), space=space, lab=Lab(timer, runner), **options)


# Deciding ------------------------------------------------------------------------------------


def trial(place, us, predicted=1.0, spread=0.0, rounds=2, **rest):
    return Trial({'p': place}, place, predicted, us, us - spread, us + spread, us / 2, rounds, **rest)


def test_the_smallest_median_wins():
    assert decide([trial(0, 12.0), trial(1, 10.0), trial(2, 11.0)]).place == 1


def test_within_noise_the_earlier_in_predicted_then_declared_order_wins():
    assert decide([trial(0, 10.19), trial(1, 10.0)]).place == 0
    assert decide([trial(0, 10.21), trial(1, 10.0)]).place == 1
    assert decide([trial(0, 10.9), trial(1, 10.0, spread=0.5)]).place == 0
    assert decide([trial(0, 10.1, predicted=2.0), trial(1, 10.0, predicted=1.0)]).place == 1


def test_graph_times_decide_if_asked():
    slow_graph = Trial({}, 0, 1.0, 5.0, 5.0, 5.0, 9.0, 2)
    assert decide([slow_graph, trial(1, 6.0)], 'us').place == 0
    assert decide([slow_graph, trial(1, 6.0)], 'graph_us').place == 1


def test_only_the_last_round_counts_and_problems_never_win():
    assert decide([trial(0, 5.0, rounds=1), trial(1, 9.0), trial(2, 1.0, problem='wrong')]).place == 1
    assert decide([Trial({}, 0)]) is None and decide([]) is None


def test_the_same_trials_give_the_same_choice_in_any_order():
    measured = [(9.0, 3.0), (9.1, 2.0), (9.2, 2.0), (9.05, 4.0), (12.0, 1.0)]
    trials = [trial(place, us, predicted, 0.1) for place, (us, predicted) in enumerate(measured)]
    assert {decide(order).place for order in itertools.permutations(trials)} == {1}


# Choosing what to try ------------------------------------------------------------------------


def test_the_shortlist_has_the_promising_ones_the_one_in_force_and_some_at_random():
    trials = [Trial({'p': p}, p, predicted=float(p)) for p in range(100)]
    random.Random(1).shuffle(trials)
    kept = shortlist(trials, {'p': 60}, Options())
    assert kept[0].place == 60
    assert [t.place for t in kept[1:20]] == list(range(19))
    assert len(kept) == 30 and len({t.place for t in kept}) == 30
    assert shortlist(trials, {'p': 60}, Options()) == kept
    assert shortlist(trials, {'p': 60}, Options(seed=1)) != kept
    assert len(shortlist(trials, None, Options(every=True))) == 100
    assert [t.place for t in shortlist(trials, {'p': 60}, Options(trials=3))] == [60, 0, 1]
    assert len(shortlist(trials[:9], None, Options())) == 9


@pytest.fixture(scope='module')
def ranking():
    space = dict(block_M=(64, 128, 8192), num_stages=(1, 2), threads=(128, 256))
    few = lambda c: c['num_stages'] * c['threads'] < 512
    return tune(matmul, (4096, 4096, 4096), space=space, where=few, device='h200', progress=False)


def test_without_a_gpu_configs_are_ranked_and_those_that_cannot_launch_are_named(ranking):
    assert ranking.us is None and ranking.trials[0].config == ranking.config
    good = [t for t in ranking.trials if t.problem is None]
    assert good == sorted(good, key=lambda t: t.predicted) and all(t.predicted < math.inf for t in good)
    assert ranking.steps == {'in the space': 12, 'configs': 9, 'fit': len(good), 'differ': len(good)}
    large = [t for t in ranking.trials if t.config['block_M'] == 8192]
    assert large and all('shared memory' in t.problem for t in large)
    text = str(ranking)
    assert 'ranked by prediction, nothing was timed' in text and 'left out: block_M=8192' in text
    assert max(map(len, text.splitlines()[:-3])) <= 80
    assert not ranking.stored


def test_the_ranked_kernel_can_be_called(ranking):
    small = tune(matmul, (32, 32, 32), space=dict(threads=(32, 64)), progress=False)
    a, b = torch.randn(32, 32).half(), torch.randn(32, 32).half()
    torch.testing.assert_close(small.kernel(a, b), (a @ b).relu(), rtol=1e-2, atol=1e-2)


def test_configs_with_equal_code_are_tried_once():
    best = tuned(dict(fault=('none', 'no'), threads=(32, 64)), by_threads)
    assert best.steps == {'configs': 4, 'fit': 4, 'differ': 2, 'timed': 2}
    assert sum(t.problem is not None and t.problem.startswith('same code as') for t in best.trials) == 2
    assert best.config == {'fault': 'none', 'threads': 64}


# Rejecting -----------------------------------------------------------------------------------


def test_planted_mistakes_are_rejected_and_a_hang_costs_one_config():
    """In a worker process, as on a GPU: it is killed at the limit and started again."""
    found = explore(problem(dict(fault=('none', *FAULTS))), Options(limit=2.0), Lab(one, Child))
    problems = {t.config['fault']: t.problem for t in found.board.values()}
    assert problems['none'] is None and found.board[0].rounds == 2
    assert problems['hang'].startswith('took longer than ')
    assert 'Mismatched elements: 1 / 128' in problems['unwritten tail']
    assert 'nothing orders the two' in problems['race']
    assert 'Mismatched elements' in problems['off by one tile'] and '128 / 128' in problems['NaN']
    assert decide(found.board.values()).config == {'fault': 'none'}


def test_without_a_reference_configs_are_compared_with_the_one_in_force():
    best = tuned(dict(fault=('none', 'unwritten tail')), reference=None)
    wrong = next(t for t in best.trials if t.config['fault'] == 'unwritten tail')
    assert best.config == {'fault': 'none'} and wrong.problem.startswith('changes the bits: y: 1 of 128 elements')


def test_a_config_that_changes_the_order_of_a_sum_is_refused_unless_allowed():
    def run(**options):
        options |= dict(reference=lambda x: x.sum(0, keepdim=True), lab=Lab(by_parts, Here), store='none')
        return tune(summed, (64,), space=dict(parts=(1, 4)), progress=False, **options)

    strict, free = run(), run(allow_numeric=True)
    assert strict.config == {'parts': 1} and free.config == {'parts': 4}
    assert strict.trials[-1].problem.startswith('changes the bits: y: 1 of 1 elements differ')
    assert strict.trials[-1].problem.endswith('allow_numeric=True accepts that')


def test_no_good_config_is_one_sentence():
    with pytest.raises(ArgumentError, match='no config that runs and agrees with its reference; kernel and reference'):
        tuned(dict(fault=('NaN', 'unwritten tail')))
    with pytest.raises(ArgumentError, match=r'no config that can run; the first: .*shared memory'):
        tuned(dict(pad=(1 << 20, 1 << 21)))


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(space={}), 'space must name config entries'),
        (dict(space=dict(threads=128)), r"space\['threads'\] must be a list of values, got 128"),
        (dict(space=dict(size=(1, 2))), 'size must be a parameter of doubled, which has n, fault, threads, pad'),
        (dict(space=dict(threads=(32,)), where=lambda c: False), 'where must accept a config'),
        (dict(space=dict(threads=(32,)), budget=0), 'budget must be positive'),
        (dict(space=dict(threads=(32,)), rank='ms'), "rank must be us or graph_us, got 'ms'"),
        (dict(space=dict(threads=(32,)), trials=0), 'trials must be at least 1'),
        (dict(space=dict(threads=(32,)), store='table'), "store must be one of user, shipped, none, got 'table'"),
        (dict(space=dict(threads=(32,)), device='h20'), "device must be one of h200, .* got 'h20'"),
        (dict(space=dict(threads=(32,)), reference=lambda x: (x, x)), 'reference must return y, got 2 values'),
        (dict(space=dict(threads=(32,)), inputs=[]), None),
        (dict(space=dict(threads=(32,)), inputs=[torch.zeros(128)] * 2), 'inputs must be x, got 2 values'),
    ],
)
def test_bad_input_is_one_sentence(options, words):
    if words is None:
        assert tuned(**options).config == {'threads': 32}
        return
    with pytest.raises(ArgumentError, match=f'^tune: .*{words}'):
        tuned(**options)


def test_parameters_are_inputs_outputs_or_both(monkeypatch):
    (subject,) = problem(dict(threads=(32,))).subjects({'threads': 32})
    x, y = parameters_of(subject, estimate([subject]))
    assert (x.name, x.given, x.writes, x.shape) == ('x', True, False, (128,))
    assert (y.name, y.given, y.writes, y.dtype) == ('y', False, True, torch.float32)
    assert y.poison('cpu').isnan().all()
    unseen = Estimate(1.0, '')
    assert [p.writes for p in parameters_of(subject, unseen, [-1])] == [False, True]
    monkeypatch.setattr('tile_kernels.tuning.search.estimate', lambda subjects: unseen)
    with pytest.raises(ArgumentError, match='cannot tell which tensors doubled'):
        tuned(dict(threads=(32,)))


def test_a_kernel_may_work_in_place_and_have_scalars_and_dynamic_extents():
    given = dict(space=dict(threads=(32, 64)), n=80, alpha=0.5, lab=Lab(by_threads, Here), store='none', progress=False)
    best = tune(added, reference=lambda x, y, alpha: y + alpha * x, **given)
    assert best.config == {'threads': 64} and best.name == 'added(n=80, alpha=0.5)'
    with pytest.raises(ArgumentError, match='agrees with its reference'):
        tune(added, reference=lambda x, y, alpha: y, **given)


@pytest.mark.parametrize(
    ('builder', 'args', 'space', 'reference', 'returned'),
    [
        (doubled, (128,), dict(threads=(32, 64)), lambda x: 2 * x, ()),
        (exponential, (torch.randn(128),), dict(block=(32, 64)), torch.exp, (1,)),
    ],
)
def test_compiled_kernels_run_as_on_a_gpu(builder, args, space, reference, returned, tmp_path):
    """The path of a GPU, with TileLang's compiler replaced by the interpreter."""
    gpu = Target(GPUS['h200'], 'h200', 'cuda')
    with fake_cuda(), interpreting():
        made = KernelProblem(builder, args, {}, space, gpu, reference=reference)
        made.prepare(tmp_path, estimate(made.subjects(made.configs[0])))
        run = made.run(made.configs[1])
        (found,) = run.outcome().values()
        with run.calling() as call:
            call()
        assert made.compile(made.configs, 1, math.inf) == [None, None]
    inputs, expected = torch.load(tmp_path / 'data.pt')
    torch.testing.assert_close(found, reference(*inputs.values()))
    assert run.returned == returned and len(expected) == 1


def test_a_thing_that_is_no_kernel_is_refused():
    with pytest.raises(ArgumentError, match='kernel must be a builder'):
        tune(3, space=dict(threads=(32,)))
    assert tile_kernels.tune is tune


# Timing --------------------------------------------------------------------------------------


def test_rounds_halve_the_field_and_the_last_four_are_timed_long():
    efforts = []

    def timer(run, effort):
        efforts.append((run.config['threads'], effort))
        return by_threads(run, effort)

    best = tuned(dict(threads=tuple(32 * k for k in range(1, 17))), timer, every=True)
    rounds = [[t for t, _ in group] for _, group in itertools.groupby(efforts, key=lambda e: e[1])]
    assert [len(group) for group in rounds] == [16, 9, 6, 5]  # with the one in force, which is slow
    assert efforts[0] == (32, QUICK) and efforts[-1][1] == LONG and efforts[-1][0] == 32
    assert best.config == {'threads': 512} and best.us == pytest.approx(1000 / 512)
    assert best.gain == pytest.approx(16.0) and best.problem.in_force == {'threads': 32}


def test_two_runs_choose_alike():
    assert tuned(dict(threads=(32, 64, 96, 128)), one).config == tuned(dict(threads=(32, 64, 96, 128)), one).config


def test_an_ended_budget_keeps_the_rounds_that_were_complete(monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr('time.monotonic', lambda: float(next(seconds)))
    best = tuned(dict(threads=tuple(32 * k for k in range(1, 9))), by_threads, budget=24)
    assert best.us is not None and {t.rounds for t in best.trials if t.problem is None} == {1}
    assert any(t.problem == 'the budget ended before it' for t in best.trials)
    assert best.config == max((t.config for t in best.trials if t.us), key=lambda c: c['threads'])


def test_ctrl_c_keeps_what_was_measured():
    calls = itertools.count()

    def timer(run, effort):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return by_threads(run, effort)

    best = tuned(dict(threads=(32, 64, 128)), timer, store='user')
    assert best.interrupted and not best.stored and 'interrupted' in str(best)
    timed = [t.config for t in best.trials if t.us is not None]
    assert len(timed) == 2 and best.config == max(timed, key=lambda config: config['threads'])
    with pytest.raises(KeyboardInterrupt):
        tuned(dict(threads=(32, 64)), lambda *_: signal.raise_signal(signal.SIGINT))


# Workers -------------------------------------------------------------------------------------


def crash(code):
    os._exit(code) if code > 0 else os.kill(os.getpid(), -code)


def fail():
    raise RuntimeError('too many resources requested for launch')


def test_a_worker_survives_errors_and_is_replaced_after_a_crash():
    child = Child()
    child.loaded = ''  # no call here needs TileLang
    try:
        assert child.call(max, 1, 2, limit=10) == 2
        first = child.process.pid
        with pytest.raises(Failed, match='registers'):
            child.call(fail, limit=10)
        assert child.process.pid == first
        with pytest.raises(Failed, match='its process ended with signal 11'):
            child.call(crash, -signal.SIGSEGV, limit=10)
        assert child.call(max, 1, 2, limit=10) == 2 and child.process.pid != first
    finally:
        child.close()
    assert child.process is None


def test_calls_are_spread_over_workers_and_stop_at_the_limit(monkeypatch):
    seen, children = [], []

    class Thread(Here):
        def __init__(self):
            children.append(self)

        def call(self, function, *args, limit):
            seen.append(threading.current_thread().name)
            return super().call(function, *args, limit=limit)

    monkeypatch.setattr('tile_kernels.core.workers.Child', Thread)
    makers = [lambda value=value: (value,) for value in range(31)] + [lambda: 1 / 0]
    results = spread(abs, makers, 2)
    assert results[:31] == list(range(31)) and str(results[31]) == 'division by zero'
    assert len(children) == 2 and threading.main_thread().name not in seen
    late = spread(abs, makers, 1, until=0.0)
    assert {str(result) for result in late} == {'the budget ended before it'}
    assert kernels.one(None, QUICK).us == 1.0
