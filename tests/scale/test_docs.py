"""The snippets of the page about distributed programs run and print what the page says."""

import runpy
from pathlib import Path

import pytest

from tests.interpreter.test_docs import SNIPPET

TEXT = (Path(__file__).parents[2] / 'docs' / 'scale.md').read_text()
SNIPPETS = list(SNIPPET.finditer(TEXT))


@pytest.mark.parametrize('snippet', SNIPPETS, ids=lambda snippet: snippet['name'])
def test_snippet_prints_what_the_page_says(snippet, tmp_path, capsys):
    script = tmp_path / snippet['name']
    script.write_text(snippet[1])
    runpy.run_path(str(script), run_name='__main__')
    assert capsys.readouterr().out.replace(f'{tmp_path}/', '') == snippet['output']


def test_every_snippet_is_run():
    assert len(SNIPPETS) == TEXT.count('```python') == TEXT.count('```text') > 0
