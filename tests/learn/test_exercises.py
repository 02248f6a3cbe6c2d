"""Every exercise: its stub fails with a sentence, its answers are lean, wrong answers are caught at the right step.

By default one wrong answer of each exercise and a few notebooks and bugs are tried; all with `TK_FULL_TEST=1`.
"""

import ast
import linecache
import os
import re
import runpy
from pathlib import Path

import pytest

from tile_kernels.learn import checks, notebook, pack, track
from tile_kernels.learn.report import MOST_LINES
from tile_kernels.sight.count import Counts

HERE = Path(__file__).parent
FULL = os.environ.get('TK_FULL_TEST') == '1'

EXERCISES = track.exercises()
BUGS = [exercise for exercise in EXERCISES.values() if exercise.bug is not None]

#: Lines of answers that are at most this long are words of the language rather than ideas.
SHORT = 32

SNIPPET = re.compile(r'```python\n(# (?P<name>\w+\.py)\n.*?)```\n\n```text\n(?P<output>.*?)```', re.DOTALL)


def label(exercise):
    return exercise.label


def every(exercises):
    return pytest.mark.parametrize('exercise', exercises, ids=label)


def bug_file(exercise, kind):
    return HERE / kind / f'{exercise.number:02d}b_{exercise.name}.py'


def wrong_answers():
    for exercise in EXERCISES.values():
        paths = sorted((HERE / 'wrong' / exercise.label).glob('*.py'))
        assert len(paths) >= 3, exercise.label
        chosen = paths if FULL else [paths[exercise.number % len(paths)]]
        yield from (pytest.param(exercise, path, id=f'{exercise.label}-{path.stem}') for path in chosen)


def key_lines(exercise):
    """Lines of the answers and of the planted bug that the task does not have."""
    task = exercise.text('task.py')
    found = set()
    for path in HERE.glob(f'*/{exercise.number:02d}*.py'):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if ast.get_docstring(node) if isinstance(node, (ast.Module, ast.FunctionDef)) else None:
                node.body[0].value.value = ''
        rows = {row for node in ast.walk(tree) if (row := getattr(node, 'lineno', None))}
        lines = path.read_text().splitlines()
        docs = set(
            row
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node.value == ''
            for row in range(node.lineno, node.end_lineno + 1)
        )
        found |= {lines[row - 1].strip() for row in rows - docs}
    return {line for line in found if len(line) > SHORT and line not in task}


def test_numbers_follow_each_other_and_levels_are_known():
    assert list(EXERCISES) == sorted(EXERCISES)
    assert [track.LEVELS.index(e.level) for e in EXERCISES.values()] == sorted(
        track.LEVELS.index(e.level) for e in EXERCISES.values()
    )
    assert all(e.folder.is_dir() and e.target.kind in ('copy', 'tflops', 'us', 'ratio') for e in EXERCISES.values())


@every(EXERCISES.values())
def test_the_stub_fails_with_a_sentence(exercise):
    result = checks.check_file(exercise, exercise.folder / 'task.py')
    assert result.failed == 'right' and f'{exercise.entry} is not finished' in result.words[0]


@every(EXERCISES.values())
def test_the_answer_is_lean(exercise):
    result = checks.check_file(exercise, HERE / 'answers' / f'{exercise.label}.py', resources=FULL)
    assert result.state == 'lean', str(result)
    assert len(str(result).splitlines()) <= MOST_LINES and result.numbers['launches'] >= 1


@every(BUGS)
def test_the_planted_bug_is_caught(exercise):
    result = checks.check_file(exercise, bug_file(exercise, 'bugs'), bug=True)
    assert result.failed is not None and result.words


@every(BUGS if FULL else BUGS[::5])
def test_the_repaired_bug_is_lean(exercise):
    result = checks.check_file(exercise, bug_file(exercise, 'answers'), bug=True)
    assert result.state == 'lean', str(result)


@pytest.mark.parametrize('exercise, path', wrong_answers())
def test_a_wrong_answer_fails_at_its_step_with_the_words(exercise, path):
    expected = dict(re.findall(r'^(?:""")?(step|words): (.*)$', path.read_text(), re.MULTILINE))
    result = checks.check_file(exercise, path)
    assert result.failed == expected['step'], str(result)
    assert expected['words'] in ' '.join(str(result).split())
    assert len(str(result).splitlines()) <= MOST_LINES


@every(EXERCISES.values())
def test_hints_and_lesson_are_short_and_hold_no_key_line(exercise):
    assert len(exercise.hints()) == 3
    lesson = exercise.text('lesson.md')
    prose = re.sub(r'```.*?```', '', lesson, flags=re.DOTALL)
    assert len(prose.split()) <= 700
    assert lesson.startswith(f'# {exercise.number:02d} ')
    assert re.search('^## What our kernels? do(es)? beyond this$', lesson, re.MULTILINE)
    keys = key_lines(exercise)
    assert keys
    for path in exercise.folder.glob('*.*'):
        assert not [key for key in keys if key in path.read_text()], path.name


@every(EXERCISES.values())
def test_code_of_the_lesson_prints_what_the_lesson_says(exercise, tmp_path, capsys):
    lesson = exercise.text('lesson.md')
    snippets = list(SNIPPET.finditer(lesson))
    assert len(snippets) == lesson.count('```python')
    for snippet in snippets:
        script = tmp_path / snippet['name']
        script.write_text(snippet[1])
        runpy.run_path(str(script), run_name='__main__')
        assert capsys.readouterr().out.replace(f'{tmp_path}/', '') == snippet['output']


@every(EXERCISES.values())
def test_files_that_the_lesson_names_exist(exercise):
    named = re.findall(r'`(tile_kernels/[\w/.]+)`', exercise.text('lesson.md'))
    assert named and all((HERE.parents[1] / name).exists() for name in named)
    page, _, _ = exercise.docs.partition('#')
    assert (HERE.parents[1] / 'docs' / page).exists()


def test_the_packed_file_is_fresh():
    assert pack.unpacked() == pack.sources(), 'run python -m tile_kernels.learn.pack'


def run_notebook(made, answer, capsys, folder):
    """Execute the code cells as Jupyter does; the answer takes the place of the task."""
    names = {}
    for number, cell in enumerate(cell for cell in made['cells'] if cell['cell_type'] == 'code'):
        source = answer if cell['id'] == 'task' else ''.join(cell['source'])
        name = f'{folder}/ipykernel_{number}.py'
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        exec(compile(source, name, 'exec'), names)
    return capsys.readouterr().out


@every(list(EXERCISES.values()) if FULL else list(EXERCISES.values())[::9])
def test_notebooks_run_with_the_answer_put_in(exercise, capsys, tmp_path):
    made = notebook.notebook(exercise)
    assert [cell['id'] for cell in made['cells']] == ['lesson', 'task', 'check', 'hints']
    answer = (HERE / 'answers' / f'{exercise.label}.py').read_text()
    assert run_notebook(made, answer, capsys, tmp_path).startswith('★')


def test_pages_link_every_exercise_and_hold_no_answer(tmp_path):
    paths = notebook.write_pages(tmp_path)
    assert [path.name for path in paths] == ['index.html', *(f'{e.label}.html' for e in EXERCISES.values())]
    texts = {path.name: path.read_text() for path in paths}
    for exercise in EXERCISES.values():
        assert f'{exercise.label}.html' in texts['index.html']
        assert '<table>' in texts['02_fused.html'] and '<details>' in texts[f'{exercise.label}.html']
        assert not [key for key in key_lines(exercise) if key in texts[f'{exercise.label}.html']]


def test_counts_keep_their_numbers_when_buffers_are_renamed():
    counts = Counts('kernel', (1, 1, 1), 32, 0, sizes={'a': 4})
    assert checks._renamed(counts, {'a': 'x'}).name == 'kernel'
