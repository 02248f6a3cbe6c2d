"""One notebook for each family: its programs run on a CPU, print what the page says, and interpret a kernel."""

import linecache

import pytest

from tile_kernels import FAMILIES
from tile_kernels.core import launch
from tools.docs import notebooks


def test_every_family_has_a_notebook():
    assert {path.stem for path in notebooks.PAGES.glob('*.md')} == set(FAMILIES)


@pytest.mark.parametrize('family', FAMILIES)
def test_a_notebook_prints_what_the_page_says(family, tmp_path, capsys, monkeypatch):
    interpreted, interpret = [], launch._interpret
    monkeypatch.setattr(
        launch, '_interpret', lambda kernel, *rest: interpreted.append(kernel) or interpret(kernel, *rest)
    )
    made = notebooks.notebook((notebooks.PAGES / f'{family}.md').read_text())
    names = {'__name__': '__main__'}
    for number, cell in enumerate(cell for cell in made['cells'] if cell['cell_type'] == 'code'):
        source = ''.join(cell['source'])
        name = f'{tmp_path}/ipykernel_{number}.py'
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        exec(compile(source, name, 'exec'), names)
        assert capsys.readouterr().out == ''.join(text for output in cell['outputs'] for text in output['text']), number
    assert interpreted


def test_a_notebook_has_the_text_and_the_programs_of_its_page(tmp_path):
    for path in notebooks.write(tmp_path):
        page = (notebooks.PAGES / f'{path.stem}.md').read_text()
        made = notebooks.notebook(page)
        programs = [''.join(cell['source']) + '\n' for cell in made['cells'] if cell['cell_type'] == 'code']
        assert programs == [program for program, _ in notebooks.PROGRAM.findall(page)] and len(programs) >= 4
        assert made['cells'][0]['source'][0].startswith('# ') and page.count('```') % 2 == 0
        assert len({cell['id'] for cell in made['cells']}) == len(made['cells'])
        assert '](' not in path.read_text().replace('](http', '')
