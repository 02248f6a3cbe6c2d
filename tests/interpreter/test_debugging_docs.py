"""The page `docs/debugging.md`: its snippets run and print what it says, and its commands find the planted bug."""

import re
import runpy
from pathlib import Path

import pytest

from tile_kernels.cli.main import main
from tile_kernels.interpreter import OutOfBounds
from tile_kernels.interpreter.__main__ import main as run_file

PAGE = (Path(__file__).parents[2] / 'docs' / 'debugging.md').read_text()
SNIPPETS = {
    match['name']: match
    for match in re.finditer(
        r'```python\n(# (?P<name>\w+\.py)\n.*?)```\n(?:\n```text\n(?P<output>.*?)```)?', PAGE, re.DOTALL
    )
}


@pytest.fixture
def smooth(tmp_path):
    path = tmp_path / 'smooth.py'
    path.write_text(SNIPPETS['smooth.py'][1])
    return path


def test_every_snippet_is_tested():
    assert PAGE.count('```python') == len(SNIPPETS) == 4


@pytest.mark.parametrize('name', ['look_closer.py', 'printing.py', 'conflicts.py'])
def test_snippet_prints_what_the_page_says(name, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(SNIPPETS[name][1])
    runpy.run_path(str(path), run_name='__main__')
    assert capsys.readouterr().out.replace(f'{tmp_path}/', '') == SNIPPETS[name]['output']


def test_the_planted_bug_is_found_as_the_page_says(smooth, tmp_path, capsys):
    with pytest.raises(OutOfBounds) as caught:
        run_file([str(smooth)])
    said = f'{type(caught.value).__module__}.{type(caught.value).__name__}: {caught.value}'
    assert said.replace(f'{tmp_path}/', '') in PAGE
    assert main(['debug', f'{smooth}:smooth', '--set', 'n=256']) == 1
    shown = capsys.readouterr().out
    assert 'index (64) of shared buffer tile is outside its shape (64)' in shown
    assert 'y[pid * block + thread] = (tile[thread] + tile[thread + 1]) * 0.5' in shown


def test_the_fix_of_the_page_works(smooth, tmp_path, capsys):
    fixed = (
        smooth.read_text()
        .replace('T.alloc_shared((block,)', 'T.alloc_shared((block + 1,)')
        .replace(
            '            T.sync_threads()\n',
            '            if thread == 0 and (pid + 1) * block < n:\n'
            '                tile[block] = x[(pid + 1) * block]\n'
            '            T.sync_threads()\n',
        )
    )
    smooth.write_text(fixed)
    assert run_file(['--checks', 'all', str(smooth)]) == 0
    assert capsys.readouterr().out == 'tensor([60.5000, 61.5000, 62.5000, 63.5000, 64.5000, 65.5000])\n'


def test_sentences_and_cells_are_short():
    text = re.sub(r'```.*?```', '', PAGE, flags=re.DOTALL)
    for row in (line for line in text.splitlines() if line.startswith('|')):
        assert all(len(cell) <= 160 for cell in row.split('|'))
    prose = ' '.join(line for line in text.splitlines() if not line.startswith(('|', '#')))
    for sentence in re.split(r'(?<=[.:?!])\s', prose):
        assert len(sentence.split()) <= 25, sentence
