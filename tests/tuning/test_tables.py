"""Tables of tuned configs: who decides, when an entry holds, and that every run leaves a valid file."""

import json
import multiprocessing
import pickle
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.tuning.kernels import by_threads, doubled, times
from tile_kernels import ArgumentError
from tile_kernels.core import launch, tuned
from tile_kernels.core.explain import decided_by, explain_case
from tile_kernels.core.gpus import GPUS
from tile_kernels.core.jit import kernels
from tile_kernels.core.knobs import knobs
from tile_kernels.core.nvcc import tilelang_version
from tile_kernels.core.precompile import find_variants
from tile_kernels.core.registry import load_ops
from tile_kernels.core.workers import Here
from tile_kernels.tuning import tables, tune
from tile_kernels.tuning.search import Lab

REAL = tuned.SHIPPED
H200 = GPUS['h200']
CASE = dict(num_tokens=64, hidden=128, dtype=torch.bfloat16)
STATIC = (128, torch.bfloat16)
TUNED = {'block_m': 4, 'num_threads': 128}
CHOSEN = {'block_m': 1, 'num_threads': 64}


@pytest.fixture
def kernel(toy, toy_module, monkeypatch):
    monkeypatch.setitem(kernels, 'double_kernel', toy_module.double_kernel)
    return toy_module.double_kernel


def entry(kernel, where='user', config=TUNED, **changes):
    made = {'static': ['128', 'bfloat16'], 'size': 64, 'code': tuned.stamp(kernel, STATIC, where), 'config': config}
    return made | {'tilelang': tilelang_version()} | changes


def put(kernel, where='user', **changes):
    tables.store(where, 'h200', kernel.name, entry(kernel, where, **changes))


def decision(toy):
    (made,) = explain_case(toy, CASE).launches
    return made.config, decided_by(made)


def test_forced_config_your_table_the_shipped_one_and_choose_decide_in_this_order(toy, kernel):
    assert decision(toy) == (CHOSEN, 'choose')
    put(kernel, 'shipped', config={'block_m': 4, 'num_threads': 64})
    assert decision(toy) == ({'block_m': 4, 'num_threads': 64}, 'shipped table')
    put(kernel, 'user')
    assert decision(toy) == (TUNED, 'your table')
    with launch.forced_config(kernel, block_m=1, num_threads=128):
        assert decision(toy) == ({'block_m': 1, 'num_threads': 128}, 'forced_config')
    with knobs(tuned='shipped'):
        assert decision(toy)[1] == 'shipped table'
    with knobs(tuned='off'):
        assert decision(toy) == (CHOSEN, 'choose')
    knobs.tuned = 'off'
    assert decision(toy) == (CHOSEN, 'choose')


@pytest.mark.parametrize(
    'changes',
    [
        {'static': ['128', 'float32']},
        {'size': 128},
        {'code': 'other code'},
        {'tilelang': '0.0.1'},
        {'config': {'block_m': 4}},
        {'config': {'block_m': 3, 'num_threads': 64}},
        {'config': 'block_m=4'},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_entry_holds_only_for_its_key_and_only_with_values_of_the_space(toy, kernel, changes):
    put(kernel, **changes)
    assert decision(toy) == (CHOSEN, 'choose')


def test_a_size_class_is_a_power_of_two(toy, kernel):
    assert [tuned.size_class(size) for size in (1, 2, 3, 64, 65, 4096)] == [1, 2, 4, 64, 128, 4096]
    put(kernel)
    for size, config in ((33, TUNED), (64, TUNED), (32, CHOSEN)):
        assert kernel.config(STATIC, size, H200) == config


def test_an_entry_holds_for_one_gpu(kernel):
    put(kernel)
    assert kernel.config(STATIC, 64, GPUS['h100']) == CHOSEN
    names = {replace(H200, name='H200', sms=132): 'h200', replace(H200, name='H100 PCIe', sms=114): 'h100-pcie-114'}
    assert {gpu: tuned.device_name(gpu) for gpu in names} == names


def test_without_tables_a_config_does_not_depend_on_the_name_of_the_gpu(toy, kernel):
    """So contract tests see which ops run other kernels on other GPUs."""

    class Nameless:
        def __getattr__(self, name):
            raise AssertionError(f'{name} was read')

    assert kernel.config(STATIC, 64, Nameless()) == CHOSEN
    put(kernel)
    with pytest.raises(AssertionError, match='name was read'):
        kernel.config(STATIC, 64, Nameless())


def test_a_shipped_entry_holds_for_a_version_and_the_users_for_the_code(toy, kernel, monkeypatch):
    put(kernel, 'shipped')
    assert decision(toy)[1] == 'shipped table'
    monkeypatch.setattr(kernel, 'version', 2)
    knobs.touch()
    assert decision(toy)[1] == 'choose'


def test_an_entry_does_not_change_what_fixes_the_order_of_a_sum(toy, kernel, monkeypatch):
    """`choose` takes other blocks for more tokens; an entry tuned with one holds there only."""
    monkeypatch.setattr(kernel, 'fixed', frozenset({'block_m'}))
    put(kernel)
    assert decision(toy) == (CHOSEN, 'choose')
    put(kernel, config={'block_m': 1, 'num_threads': 128})
    assert decision(toy) == ({'block_m': 1, 'num_threads': 128}, 'your table')


def test_what_is_compiled_ahead_is_what_calls_use(kernel, toy):
    put(kernel)
    found = find_variants({toy.name: [CASE]}, 'h200')
    assert [dict(variant.config) for variant in found] == [TUNED]
    assert pickle.loads(pickle.dumps(kernel)) is kernel


@pytest.fixture
def on_gpu(kernel, monkeypatch):
    """A tensor that seems to be on a GPU, on which the kernel is loaded with two configs; and what was launched."""
    launched = []
    monkeypatch.setattr(launch, 'cuda_gpu', lambda index: H200)
    monkeypatch.setattr(launch, 'arch_of', lambda index: 'sm_90a')
    for config in (CHOSEN, TUNED):
        monkeypatch.setitem(kernel.loaded, (STATIC, tuple(config.items()), 0), lambda *_, c=config: launched.append(c))
    x = SimpleNamespace(shape=(64, 128), device=torch.device('cuda', 0), is_cuda=True, get_device=lambda: 0)
    yield lambda: launch.launch(kernel, STATIC, x, x), launched
    kernel.bound.clear()


def test_a_launch_asks_once_until_settings_or_tables_change(kernel, on_gpu, monkeypatch):
    call, launched = on_gpu
    asked = []
    find = tuned.find
    monkeypatch.setattr(tuned, 'find', lambda *args: asked.append(args) or find(*args))
    call()
    call()
    assert launched == [CHOSEN] * 2 and len(asked) == 1
    put(kernel)
    call()
    call()
    assert launched[2:] == [TUNED] * 2 and len(asked) == 2
    with knobs(tuned='off'):
        call()
        call()
    call()
    assert launched[4:] == [CHOSEN, CHOSEN, TUNED]
    knobs.tuned = 'off'
    call()
    assert launched[-1] == CHOSEN


def test_a_damaged_table_is_ignored_and_then_replaced(toy, kernel, caplog):
    path = tuned.table('user', 'h200', kernel.name)
    path.parent.mkdir(parents=True)
    path.write_text('{"entries": [')
    assert decision(toy) == (CHOSEN, 'choose') and 'no tuned configs that can be read' in caplog.text
    put(kernel)
    assert decision(toy)[1] == 'your table'


def test_an_entry_replaces_the_one_with_its_key(kernel):
    for threads in (64, 128):
        put(kernel, config={'block_m': 4, 'num_threads': threads})
    put(kernel, size=128)
    assert [e['size'] for e in tuned.read(tuned.table('user', 'h200', kernel.name))] == [64, 128]


def _store_many(folder, worker):
    knobs.cache_dir = folder
    for place in range(20):
        tables.store('user', 'h200', 'some_kernel', {'static': [str(worker)], 'size': place, 'config': {}})


def test_concurrent_runs_lose_no_entry(own_tables):
    context = multiprocessing.get_context('fork')
    workers = [context.Process(target=_store_many, args=(knobs.cache_dir, worker)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(tuned.read(tuned.table('user', 'h200', 'some_kernel'))) == 80


def test_a_killed_run_leaves_a_valid_table(own_tables):
    path = tuned.table('user', 'h200', 'some_kernel')
    worker = multiprocessing.get_context('fork').Process(target=_store_forever, args=(knobs.cache_dir,))
    worker.start()
    for _ in range(200):
        if path.exists():
            break
        time.sleep(0.02)
    worker.kill()
    worker.join()
    assert json.loads(path.read_text())['entries']
    tables.store('user', 'h200', 'some_kernel', {'static': [], 'size': 0, 'config': {}})
    assert len(tuned.read(path)) >= 2


def _store_forever(folder):
    for worker in range(10000):
        _store_many(folder, worker)


# What tuning stores --------------------------------------------------------------------------


def toy_times(run, effort):
    return times(10.0 / run.config['num_threads'])


def same_times(run, effort):
    return times(10.0)


def tune_toy(toy, timer, **options):
    return tune(toy, cases=[CASE | {'num_tokens': 5}], lab=Lab(timer, Here), progress=False, **options)


def test_tuning_an_op_stores_what_wins_and_calls_then_use_it(toy, kernel):
    (best,) = tune_toy(toy, toy_times, commit='abc')
    assert best.stored and best.config == {'block_m': 1, 'num_threads': 128} and best.gain == 2.0
    (stored,) = tuned.read(tuned.table('user', 'h200', kernel.name))
    assert stored['static'] == ['128', 'bfloat16'] and stored['size'] == 8
    assert stored['choose'] == CHOSEN and stored['config'] == best.config
    assert (stored['us'], stored['p20_us'], stored['p80_us'], stored['in_force_us']) == (10 / 128,) * 3 + (10 / 64,)
    assert stored['commit'] == 'abc' and stored['date'].startswith('20') and stored['tilelang'] == tilelang_version()
    (made,) = explain_case(toy, CASE | {'num_tokens': 7}).launches
    assert (made.config, decided_by(made)) == (best.config, 'your table')
    (again,) = tune_toy(toy, toy_times)
    assert again.problem.in_force == best.config and not again.stored


def test_what_does_not_beat_choose_by_more_than_noise_is_not_stored(toy, kernel):
    (best,) = tune_toy(toy, same_times)
    assert not best.stored and not tuned.table('user', 'h200', kernel.name).exists()


def test_shipped_tables_lie_in_the_package(toy, kernel, own_tables):
    tune_toy(toy, toy_times, store='shipped')
    (stored,) = tuned.read(own_tables / 'shipped' / 'h200' / f'{kernel.name}.json')
    assert stored['code'] == '1'


def test_an_op_with_a_wrong_kernel_says_so_and_stores_nothing(toy, kernel, monkeypatch):
    monkeypatch.setattr(toy, 'twin', lambda x: x * 3)
    found = tune_toy(toy, toy_times)
    (reason,) = found.failures.values()
    assert not found and 'kernel and twin' in reason and reason in str(found)


def test_a_users_kernel_is_measured_once(monkeypatch):
    def run(**options):
        options = dict(args=(128,), space=dict(threads=(32, 64)), lab=Lab(by_threads, Here), progress=False) | options
        return tune(doubled, reference=lambda x: 2 * x, **options)

    first = run()
    assert first.stored and first.trials and first.config == {'threads': 64}
    monkeypatch.setattr('tile_kernels.tuning.explore', None)
    second = run()
    assert (second.config, second.us, len(second.trials)) == (first.config, first.us, 1)
    assert 'found in your table, measured 20' in str(second)
    for options in (dict(again=True), dict(args=(64,)), dict(space=dict(threads=(32, 64, 96)))):
        with pytest.raises(TypeError):  # it would measure
            run(**options)


def test_a_table_that_cannot_be_written_is_one_sentence(kernel, own_tables):
    (own_tables / 'cache').write_text('a file')
    with pytest.raises(ArgumentError, match=r'^tune: cannot write .*double_kernel\.json'):
        put(kernel)


# Shipped tables ------------------------------------------------------------------------------


def stale(folder):
    """Entries of shipped tables that no launch can use: an unknown kernel or GPU, another version, other values."""
    found = []
    for path in sorted(folder.glob('*/*.json')):
        kernel = kernels.get(path.stem)
        for entry in json.loads(path.read_text())['entries']:
            good = kernel is not None and entry['code'] == str(kernel.version) and path.parent.name in GPUS
            values = good and entry['config'].keys() == kernel.space.keys()
            if not values or not all(value in kernel.space[name] for name, value in entry['config'].items()):
                found.append(f'{path.parent.name}/{path.name} {entry["static"]}')
    return found


def test_shipped_tables_fit_the_kernels():
    load_ops()
    assert stale(REAL) == []


def test_a_stale_shipped_table_is_seen(kernel, own_tables):
    put(kernel, 'shipped')
    assert stale(own_tables / 'shipped') == []
    put(kernel, 'shipped', code='2')
    assert len(stale(own_tables / 'shipped')) == 1
    put(kernel, 'shipped', config={'block_m': 3, 'num_threads': 64})
    assert len(stale(own_tables / 'shipped')) == 1
