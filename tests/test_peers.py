"""The peer round: what becomes of right, wrong, refusing, failing, absent and crashing peers; every call of ours.

Calls of peers are bound to the signatures in their sources, where these are on `sys.path`; they need not be installed.
"""

import ast
import functools
import inspect
import json
import sys
from pathlib import Path

import pytest
import torch

from tile_kernels.core.workers import Failed
from tools import peer_products, peer_rows, peer_work, peers
from tools.peer_work import OURS, PACKAGES, Call, Work, direct

KEYS = [work.key for work in peers.WORKS]


# Fake peers ---------------------------------------------------------------------------------


def double(x):
    return 2 * x


def wrong(x):
    y = 2 * x
    y[0] += 1
    return y


def refusing(x):
    raise ValueError('only hidden sizes of 64')


def raising(x):
    raise TypeError('double() got an unexpected keyword argument')


def lacking(x):
    return peer_work.use('no_such_package:double')(x)


def reading(x):
    return Call(lambda: [2 * x, None], lambda found: found[0])


def bad_shape(x):
    return 2 * x[:1]


FAKES = {
    'right': direct(double),
    'reading': reading,
    'wrong': direct(wrong),
    'short': direct(bad_shape),
    'nan': direct(lambda x: x * torch.nan),
    'refusing': direct(refusing),
    'unsupported': direct(lambda x: torch.linalg.cholesky(x[0]) if x.dim() else x),
    'raising': direct(raising),
    'lacking': lacking,
    'fla': direct(double),
}
EXPECTED = {
    OURS: 'ok',
    'right': 'ok',
    'reading': 'ok',
    'wrong': 'differs',
    'short': 'refused',
    'nan': 'differs',
    'refusing': 'refused',
    'unsupported': 'failed',
    'raising': 'failed',
    'lacking': 'absent',
    'fla': 'absent',
}


def fake(ours=direct(double), others=FAKES, name=''):
    small = dict(tokens=3)
    return Work('quant.fake', lambda draw, tokens: dict(x=draw(tokens, 4)), ours, double, others, [], small, name=name)


@pytest.fixture(autouse=True)
def no_packages(request, monkeypatch):
    """Peers that happen to be installed are treated as absent, unless a test wants them."""
    if 'sources' not in request.fixturenames:
        monkeypatch.setattr(peers, 'missing', lambda peer: PACKAGES.get(peer.split()[0].rstrip(','), ''))


def test_every_peer_has_a_record_that_says_what_became_of_it(tmp_path, capsys):
    path = tmp_path / 'records.jsonl'
    assert peers.main(['--json', str(path), '--commit', 'abc'], [fake()]) == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {r['peer']: r['status'] for r in records} == EXPECTED
    found = {r['peer']: r for r in records}
    assert found['refusing']['reason'] == 'only hidden sizes of 64' and found[OURS]['error'] == 0
    assert found['nan']['reason'] == 'relative error inf' and found['fla']['reason'] == 'no module fla'
    assert all(('wall_us' in r) == (r['status'] == 'ok') and 'us' not in r for r in records)  # no GPU, no times
    assert {(r['op'], r['case'], r['commit']) for r in records} == {('quant.fake', 'tokens=3', 'abc')}
    assert 'refusing: refused in 1 cases: only hidden sizes of 64' in capsys.readouterr().out


def test_a_call_of_ours_that_is_wrong_fails_the_round(capsys):
    assert peers.main([], [fake(direct(wrong), {'right': direct(double)})]) == 1
    assert f'{OURS}: differs in 1 cases' in capsys.readouterr().out


@pytest.mark.parametrize('words', [['nothing'], ['--json', '/dev/null/x']])
def test_bad_arguments_get_one_sentence(words, capsys):
    assert peers.main(words, [fake()]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_peer_that_ends_its_process_costs_one_record():
    """The runner stands for a worker process that dies while the named peer runs."""
    seen = []

    class Runner:
        def call(self, function, works, key, case, without, notes, device, limit):
            seen.append(dict(without))
            for peer in ('crashing', 'hanging'):
                if peer not in without:
                    Path(notes).write_text(peer)
                    raise Failed(f'{peer} did it')
            return function([work], key, case, without, notes, device)

    work = fake(others={'crashing': direct(double), 'right': direct(double), 'hanging': direct(double)})
    plan = peers.chosen([work], [], 'cpu')
    (records,) = peers.measure_all(plan, Runner(), {}, float('inf'), 'cpu')
    assert [len(found) for found in seen] == [0, 1, 2]
    assert {r['peer']: (r['status'], r.get('reason')) for r in records} == {
        OURS: ('ok', None),
        'crashing': ('failed', 'crashing did it'),
        'right': ('ok', None),
        'hanging': ('failed', 'hanging did it'),
    }
    assert not list(peers.measure_all(plan, Runner(), {}, 0.0, 'cpu'))  # no time is left


def test_inputs_that_cannot_be_made_cost_one_case():
    class Runner:
        def call(self, *args, **more):
            raise Failed('out of memory')

    plan = [(work, work.tiny) for work in (fake(name='one'), fake(name='two'))]
    found = list(peers.measure_all(plan, Runner(), {}, float('inf'), 'cpu'))
    assert [(r['peer'], r['status'], r['reason']) for (r,) in found] == [(OURS, 'failed', 'inputs: out of memory')] * 2


def test_the_table_names_the_best_peer_and_counts_losses():
    def record(case, peer, us, status='ok', **more):
        found = {'op': 'a.b', 'work': 'a.b', 'case': case, 'peer': peer, 'status': status, 'host_us': us, **more}
        return found if us is None else found | {'us': us, 'graph_us': us / 2}

    text = peers.report(
        [
            record('tokens=1', OURS, 10.0),
            record('tokens=1', 'slow', 40.0),
            record('tokens=1', 'fast', 5.0),
            record('tokens=2', OURS, 10.0),
            record('tokens=2', 'slow', 20.0),
            record('tokens=2', 'fast', None, 'refused', reason='too small'),
        ]
    )
    lines = text.splitlines()
    assert lines[1].split() == ['b', 'tokens=1', '10.0', '5.0', 'fast', '0.50', '0.50', '0.50']
    assert lines[2].split() == ['b', 'tokens=2', '10.0', '20.0', 'slow', '2.00', '2.00', '2.00']
    assert 'cold: 1.00 x the best peer in 2 cases, slower by over 3 % in 1' in lines
    assert 'fast: refused in 1 cases: too small' in lines and max(map(len, lines)) <= 100


def test_the_first_case_of_every_work_comes_before_the_second_of_any():
    plan = peers.chosen(peers.WORKS, ['norm', 'gemm'], 'cuda')
    own = [work for work in peers.WORKS if work.op.startswith(('norm.', 'gemm.'))]
    assert [work for work, _ in plan[: len(own)]] == own and len(plan) == sum(len(work.cases) for work in own)
    assert [work.key for work, _ in peers.chosen(peers.WORKS, ['attention.decode'], 'cpu')] == ['attention.decode']


# Real works ---------------------------------------------------------------------------------


def test_every_work_has_a_name_of_its_own_and_an_op():
    from tile_kernels.core.registry import load_ops

    assert len(set(KEYS)) == len(KEYS)
    functions = {'linear_attention.mamba_chunk_scan_combined', 'moe.reduce_fused'}  # made of ops
    assert {work.op for work in peers.WORKS} - set(load_ops()) == functions


@pytest.mark.parametrize('key', KEYS)
def test_our_call_agrees_with_its_meaning_in_pytorch(key):
    work = peers.find(peers.WORKS, key)
    given = peers.inputs_of(work, work.tiny, 'cpu')
    with torch.no_grad():
        call, outcome = peers.compare(work, OURS, given, work.truth(**given))
        assert outcome['status'] == 'ok', outcome
        assert outcome['error'] < work.bound / 1.4  # a bound that is nearly reached would be luck
        call.run()  # repeated calls work, too


def eager(work):
    """The peers of a work that are calls of PyTorch and run without a compiler."""
    own = [peer for peer in work.peers if peer.startswith(('torch ', 'torch.', 'cuBLAS', 'cuDNN'))]
    return [] if work.gradient else [peer for peer in own if peer != 'torch.compile']


@pytest.mark.parametrize('key', [work.key for work in peers.WORKS if eager(work)])
def test_peers_of_pytorch_agree_where_they_run_on_a_cpu(key):
    work = peers.find(peers.WORKS, key)
    given = peers.inputs_of(work, work.tiny, 'cpu')
    with torch.no_grad():
        truth = work.truth(**given)
        outcomes = {peer: peers.compare(work, peer, given, truth)[1] for peer in eager(work)}
    assert not {peer: found for peer, found in outcomes.items() if found['status'] == 'differs'}
    if key in ('gemm.gemm', 'norm.norm_forward', 'moe.expand_to_fused', 'mhc.expand', 'gemm.conv2d'):
        assert 'ok' in [found['status'] for found in outcomes.values()]


# Signatures of peers ------------------------------------------------------------------------


class Anything:
    """The result of a call that was bound only."""

    __iter__ = None

    def __getitem__(self, index):
        return self


def definition(module, name):
    """The file and the syntax of a function or class, through re-exports."""
    files = [Path(folder, *module.split('.')) for folder in sys.path]
    both = [file for base in files for file in (base.with_suffix('.py'), base / '__init__.py')]
    path = next((file for file in both if file.exists()), None)
    assert path is not None, f'no module {module}'
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            package = module.split('.')[: None if path.name == '__init__.py' else -1]
            base = package[: len(package) - node.level + 1] if node.level else []
            return definition('.'.join([*base, *filter(None, [node.module])]), name)
    raise AssertionError(f'{module} has no {name}')


def signature(function):
    """The signature of a function that is not imported."""
    plain = ast.FunctionDef('f', function.args, [ast.Pass()], [], type_params=[])
    for argument in ast.walk(plain.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    plain.args.defaults = [ast.Constant(None) for _ in plain.args.defaults]
    plain.args.kw_defaults = [default and ast.Constant(None) for default in plain.args.kw_defaults]
    space = {}
    exec(compile(ast.fix_missing_locations(ast.Module([plain], [])), '<peer>', 'exec'), space)
    return inspect.signature(space['f'])


def bound(path, bindings):
    """A stand-in for an object of a peer, which only checks how it is called."""
    node = definition(*path.split(':'))

    def checked(function, *args, **kwargs):
        signature(function).bind(*args, **kwargs)
        bindings.append(function.name)
        return Anything()

    if isinstance(node, ast.FunctionDef):
        return functools.partial(checked, node)
    methods = {found.name: found for found in node.body if isinstance(found, ast.FunctionDef)}

    class Made:
        def __init__(self, *args, **kwargs):
            checked(methods['__init__'], self, *args, **kwargs)

        def __call__(self, *args, **kwargs):
            return checked(methods['forward'], self, *args, **kwargs)

        def repack(self, weight):
            checked(methods['repack'], self, weight)
            return weight

    return Made


@pytest.fixture
def sources():
    return {name for name in PACKAGES.values() for folder in sys.path if Path(folder, name, '__init__.py').exists()}


@pytest.mark.parametrize('package', sorted(set(PACKAGES.values())))
def test_calls_of_a_peer_fit_its_signatures(package, sources, monkeypatch):
    if package not in sources:
        pytest.skip(f'{package} is not on sys.path')
    bindings = []
    for module in (peer_work, peer_rows, peer_products):
        monkeypatch.setattr(module, 'use', functools.partial(bound, bindings=bindings))
    wanted = {name for name, module in PACKAGES.items() if module == package}
    tried = 0
    for work in peers.WORKS:
        for peer, adapter in work.peers.items():
            if peer.split()[0].rstrip(',') in wanted:
                given, tried, before = peers.inputs_of(work, work.tiny, 'cpu'), tried + 1, len(bindings)
                try:
                    adapter(**given).run()
                except TypeError as error:  # autograd takes tensors only
                    assert work.gradient and 'Anything' in str(error), (work.key, peer, error)
                assert len(bindings) > before, (work.key, peer)
    assert tried
