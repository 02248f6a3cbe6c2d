"""The tool that plants mistakes: they are valid and different code, and a run continues where the last one stopped."""

import ast
import json

import pytest

from tile_kernels import knobs
from tools import mutate


def test_every_mistake_is_valid_and_other_code():
    seen = set()
    for path in ('tile_kernels/gemm/_macros.py', 'tile_kernels/engram/hash.py', 'tile_kernels/core/launch.py'):
        text = (mutate.ROOT / path).read_text()
        for mutant in mutate.mutants(path, text):
            assert ast.dump(ast.parse(mutant.apply(text))) != ast.dump(ast.parse(text))
            seen.add(mutant.rule)
    assert {'bounds', 'barriers', 'fences', 'parities', 'operands', 'clamps', 'checks'} <= seen


def test_words_are_left_alone():
    assert list(mutate.mutants('a/b.py', '"""a < b"""\n# c < d\n')) == []


def test_a_run_continues_from_its_file(tmp_path, monkeypatch, capsys):
    planted = []
    monkeypatch.setattr(mutate, 'run', lambda mutant, tree, limit: planted.append(mutant) or 'survived')
    command = ['--family', 'transpose', '--results', str(tmp_path / 'results')]
    mutate.main([*command, '--sample', '3'])
    mutate.main([*command, '--sample', '3'])
    assert len(planted) == 3 and 'all: 0/3' in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / 'results').read_text().splitlines()]
    assert [record['mutant'] for record in records] == [mutant.name for mutant in planted]


def test_equivalents_and_untested_code_do_not_count():
    results = {'t/moe/a.py:1:0:x': 'killed', 't/moe/b.py:1:0:x': 'survived', 't/moe/c.py:1:0:x': 'untested'}
    assert 'all: 1/1' in mutate.report(results, {'t/moe/b.py:1:0:x': 'the bound is never reached'})


@pytest.mark.skipif(not knobs.full_test, reason='takes several minutes')
def test_a_sample_is_mostly_noticed(tmp_path, capsys):
    mutate.main(['--sample', '30', '--results', str(tmp_path / 'results')])
    results = mutate.read_results(tmp_path / 'results')
    counted = [result for result in results.values() if result != 'untested']
    assert sum(result != 'survived' for result in counted) >= 0.6 * len(counted), capsys.readouterr().out
