"""Snippets of `docs/layouts-and-lint.md` run and print what the page says, and its table has every rule."""

import re
import runpy
from pathlib import Path

import pytest

from tile_kernels.sight.rules import RULES

PAGE = (Path(__file__).parents[2] / 'docs' / 'layouts-and-lint.md').read_text()
SNIPPET = re.compile(r'```python\n(# (?P<name>\w+\.py)\n.*?)```\n\n```text\n(?P<output>.*?)```', re.DOTALL)
SNIPPETS = list(SNIPPET.finditer(PAGE))


@pytest.mark.parametrize('snippet', SNIPPETS, ids=lambda snippet: snippet['name'])
def test_snippet_prints_what_the_page_says(snippet, tmp_path, capsys):
    script = tmp_path / snippet['name']
    script.write_text(snippet[1])
    runpy.run_path(str(script), run_name='__main__')
    assert capsys.readouterr().out.replace(f'{tmp_path}/', '') == snippet['output']


def test_every_snippet_is_run_and_every_rule_is_listed():
    assert len(SNIPPETS) == PAGE.count('```python') == PAGE.count('```text') == 5
    listed = {
        name for row in re.findall(r'^\| (`.*?) \|', PAGE, re.MULTILINE) for name in re.findall(r'`([\w-]+)`', row)
    }
    assert {name for rules in RULES.values() for name in rules} <= listed
