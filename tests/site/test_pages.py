"""Pages written for newcomers: their snippets run and print what the page says."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / 'docs'
PAGES = ('start', 'known-calls')
SNIPPET = re.compile(r'```python\n(# (?P<name>\w+\.py)\n.*?)```\n\n```text\n(?P<output>.*?)```', re.DOTALL)
SNIPPETS = [(page, found) for page in PAGES for found in SNIPPET.finditer((DOCS / f'{page}.md').read_text())]


@pytest.mark.parametrize(
    ('page', 'snippet'), SNIPPETS, ids=lambda value: value if isinstance(value, str) else value['name']
)
def test_snippet_prints_what_the_page_says(page, snippet, tmp_path, capsys):
    script = tmp_path / snippet['name']
    script.write_text(snippet[1])
    runpy.run_path(str(script), run_name='__main__')
    assert capsys.readouterr().out == snippet['output']


def test_every_snippet_is_run():
    assert len(SNIPPETS) == sum((DOCS / f'{page}.md').read_text().count('```python') for page in PAGES)
