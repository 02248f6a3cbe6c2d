"""The command `tile-kernels learn`: every action, its exit status and its progress file."""

import json
import re
import threading
import time
from pathlib import Path

import pytest
import torch

from tile_kernels import learn
from tile_kernels.cli import learn as command
from tile_kernels.cli.main import main
from tile_kernels.core.errors import ArgumentError
from tile_kernels.learn import checks, lean, track
from tile_kernels.learn.folder import Folder
from tile_kernels.sight.count import Access, Counts

ANSWERS = Path(__file__).parent / 'answers'
ANSWER = (ANSWERS / '01_copy.py').read_text()


@pytest.fixture
def folder(tmp_path):
    assert main(['learn', 'start', str(tmp_path / 'mine')]) == 0
    return tmp_path / 'mine'


@pytest.fixture
def run(folder, capsys):
    capsys.readouterr()

    def call(*words):
        status = main(['learn', '--dir', str(folder), *words])
        found = capsys.readouterr()
        return status, found.out + found.err

    return call


def test_without_a_folder_the_table_names_the_first_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(['learn']) == 0
    out = capsys.readouterr().out
    assert 'next: tile-kernels learn start' in out and '01' in out and 'beginner' in out
    assert main(['learn', 'check', '1']) == 1
    assert 'run tile-kernels learn start' in capsys.readouterr().err


def test_start_copies_tasks_and_keeps_what_is_there(folder, run):
    task = folder / '01_copy.py'
    assert {path.name for path in folder.glob('0*')} >= {'01_copy.py', '01_copy.md', '02_fused.py'}
    assert not list(folder.glob('*b_*')), 'planted bugs show most of an answer'
    task.write_text('# mine\n')
    assert main(['learn', 'start', str(folder)]) == 0
    assert task.read_text() == '# mine\n'


def test_a_folder_below_the_current_one_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(['learn', 'start']) == 0
    assert (tmp_path / 'tile-kernels-learn' / '01_copy.py').exists()
    assert main(['learn', 'check']) == 1
    assert 'copy is not finished' in capsys.readouterr().out


def test_check_goes_from_the_stub_to_the_star(folder, run):
    status, text = run('check')
    assert status == 1 and text.startswith('◐ 01') and 'tile-kernels learn hint 01' in text
    (folder / '01_copy.py').write_text(ANSWER)
    status, text = run('check', '1')
    assert status == 0 and text.startswith('★ 01')
    progress = json.loads((folder / 'progress.json').read_text())['01']
    assert progress['state'] == 'lean' and progress['attempts'] == 2 and progress['counts']['bytes read'] == 1 << 26
    status, text = run()
    assert '★' in text and 'next: tile-kernels learn check 02' in text and '█' in text
    (folder / '01_copy.py').write_text('def copy(:\n')
    status, text = run('check', '1')
    assert status == 1 and 'is not Python' in text and 'line 1' in text
    assert Folder(folder).state('01') == 'lean', 'the best state is kept'


def test_the_planted_bug_comes_when_the_exercise_is_solved(folder, run):
    status, text = run('check', '2b')
    assert status == 1 and 'after exercise 02 is solved' in text
    (folder / '02_fused.py').write_text((ANSWERS / '02_fused.py').read_text())
    assert run('check', '2')[0] == 0
    status, text = run('check', '2b')
    assert status == 1 and text.startswith('◐ 02b')
    (folder / '02b_fused.py').write_text((ANSWERS / '02b_fused.py').read_text())
    assert run('check', '2b')[0] == 0


def test_all_exercises_are_checked_and_bugs_are_optional(folder, run):
    for path in folder.glob('[0-9][0-9]_*.py'):
        if path.name > '03':
            path.unlink()
    for name in ('01_copy.py', '02_fused.py'):
        (folder / name).write_text((ANSWERS / name).read_text())
    status, text = run('check', 'all')
    assert status == 0 and [line[:4] for line in text.splitlines()] == ['★ 01', '★ 02', '◐ 02']
    (folder / '01_copy.py').write_text('def copy():\n    return 5\n')
    assert run('check', 'all')[0] == 1


def test_a_damaged_or_deleted_progress_file_harms_nothing(folder, run):
    (folder / 'progress.json').write_text('{')
    assert run('hint', '1')[0] == 0
    (folder / 'progress.json').unlink()
    assert main(['learn', 'start', str(folder)]) == 0
    assert 'hint 1 of 3' in run('hint', '1')[1]


def test_hints_come_one_after_the_other_and_then_the_docs(run):
    texts = [run('hint', '1')[1] for _ in range(4)]
    assert [text.splitlines()[0] for text in texts[:3]] == ['hint 1 of 3', 'hint 2 of 3', 'hint 3 of 3']
    assert 'docs/writing-an-op.md' in texts[3]


def test_reveal_asks_first_and_marks_the_exercise(run, monkeypatch):
    answers = iter(['n\n', 'y\n'])
    monkeypatch.setattr('sys.stdin', type('Input', (), {'readline': lambda self: next(answers)})())
    status, text = run('reveal', '1')
    assert status == 1 and 'T.Parallel' not in text
    status, text = run('reveal', '1')
    assert status == 0 and ANSWER.strip() in text
    assert '·' in run()[1].splitlines()[1]


def test_compare_shows_the_answer_and_our_op_beside_yours(folder, run):
    wrong = Path(__file__).parent / 'wrong' / '02_fused' / 'two_passes.py'
    (folder / '02_fused.py').write_text(wrong.read_text())
    status, text = run('compare', '2')
    assert status == 0 and 'activation.swiglu_forward' in text
    assert re.search(r'yours has 1\.5 times the bytes (read|written)|yours has 2 times the bytes written', text), text
    status, text = run('compare', '3')
    assert status == 0 and 'yours cannot be counted yet' in text


def test_speed_says_what_to_do_without_a_gpu(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    status, text = run('speed', '1')
    assert status == 1 and 'learn compare' in text


def test_watch_checks_again_after_a_save(folder, monkeypatch, capsys):
    monkeypatch.setattr(command, 'PAUSE', 0.01)

    def save():
        time.sleep(0.5)
        (folder / '01_copy.py').write_text(ANSWER)

    thread = threading.Thread(target=save)
    thread.start()
    assert main(['learn', '--dir', str(folder), 'watch', '1']) == 0
    thread.join()
    out = capsys.readouterr().out
    assert 'copy is not finished' in out and '★ 01' in out


def test_notebooks_and_pages_are_written_once(folder, run, tmp_path):
    status, text = run('notebook', '1')
    assert status == 0 and json.loads((folder / '01_copy.ipynb').read_text())['nbformat'] == 4
    assert 'there already' in run('notebook', '1')[1]
    assert run('html', str(tmp_path / 'pages'))[0] == 0
    assert (tmp_path / 'pages' / 'index.html').exists()


def test_python_can_check_a_builder(capsys):
    names = {}
    exec(compile(ANSWER, str(ANSWERS / '01_copy.py'), 'exec'), names)
    result = learn.check(1, kernel=names['copy'])
    assert result.state == 'lean' and capsys.readouterr().out.startswith('★ 01')
    with pytest.raises(ArgumentError, match='give either kernel or file'):
        learn.check(1)
    with pytest.raises(ArgumentError, match='the exercise must be one of 01'):
        learn.check(99, kernel=names['copy'])


@pytest.mark.parametrize(
    'body, words',
    [
        ('def copy():\n    return 5\n', 'must return a kernel'),
        ('def other():\n    pass\n', 'must define the function copy'),
        ('import nothing_of_that_name\n', 'cannot be imported: ModuleNotFoundError'),
        ('def copy():\n    return 1 / 0\n', 'ZeroDivisionError: division by zero (line 2)'),
    ],
)
def test_a_file_that_is_no_answer_gets_a_sentence(body, words, tmp_path):
    path = tmp_path / 'mine.py'
    path.write_text(body)
    result = checks.check_file(track.exercises()[1], path)
    assert result.failed == 'right' and words in result.words[0]


def facts(**changes):
    read = Access('global', 'load', 'x', 16, 7, 'f.py', bytes=64, sectors=2, least_sectors=2)
    write = Access('global', 'store', 'y', 16, 8, 'f.py', bytes=64, sectors=2, least_sectors=2)
    shared = Access('shared', 'load', 'tile', 4, 9, 'f.py', bytes=64, wavefronts=2, least_wavefronts=2)
    for name, value in changes.items():
        setattr({'x': read, 'y': write, 'tile': shared}[name.partition('_')[0]], name.partition('_')[2], value)
    counts = Counts('k', (2, 1, 1), 64, 0, 1, [read, write, shared], {'float16': 100.0}, events={'block_barrier': 4})
    return lean.Facts(track.Case('', {}, {'rows': 4}), (counts,), ('',), {'x': 64, 'y': 64})


@pytest.mark.parametrize(
    'condition, broken, words',
    [
        (lean.traffic(x='read', y='write'), {'x_bytes': 128}, 'x is read 2 times'),
        (lean.once('y', writes=True), {'y_bytes': 192}, 'y is written 3 times (line 8)'),
        (lean.wide(16), {'x_width': 4}, 'reads 4 bytes of x at a time (line 7)'),
        (lean.whole_sectors(), {'y_sectors': 8}, '4 times the sectors that y needs (line 8)'),
        (lean.no_conflicts(), {'tile_wavefronts': 8}, '4-way'),
    ],
    ids=lambda value: getattr(value, 'sentence', None),
)
def test_a_condition_holds_or_says_what_was_counted(condition, broken, words):
    assert condition.against(facts()) is None
    assert words in condition.against(facts(**broken))


def test_conditions_on_launches_products_and_barriers():
    assert lean.launches(1).against(facts()) is None and '1 launches instead of 2' in lean.launches(2).against(facts())
    assert lean.tensor_cores(lambda case: 100).against(facts()) is None
    assert '50 %' in lean.tensor_cores(lambda case: 200).against(facts())
    assert lean.barriers(1, lambda case: case['rows'], 'row').against(facts()) is None
    assert '2 barriers' in lean.barriers(1, lambda case: 2, 'row').against(facts())
    assert lean.no_shared().against(facts()) is None
