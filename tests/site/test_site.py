"""The built site: no warning of Sphinx, no request to elsewhere, links that lead somewhere, pages of bounded size."""

import re
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tile_kernels import FAMILIES
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.registry import load_ops
from tools.docs import site
from tools.docs.api import documented

pytest.importorskip('sphinx', reason='builds with Sphinx')
pytest.importorskip('myst_parser', reason='builds with MyST')
pytest.importorskip('furo', reason='builds with furo')

MAX_PAGE, MAX_SITE = 400 << 10, 25 << 20


def test_every_op_and_every_public_name_has_its_place(built):
    assert not [op for op in load_ops() if not (built / 'docs' / 'ops' / f'{op}.html').is_file()]
    for name in documented():
        part, _, own = name.partition('.')
        assert f'<h2>{own}<' in (built / 'docs' / 'api' / f'{part}.html').read_text(), name


def test_the_home_page_leads_to_every_page(built):
    home = (built / 'index.html').read_text()
    assert '<figure class="plot" id="families">' in home
    reached, left = set(), {'index.html'}
    while left:
        page = left.pop()
        reached.add(page)
        text = (built / page).read_text()
        links = [urldefrag(unquote(link))[0] for link in re.findall(r'<a [^>]*href="([^"]+)"', text)]
        own = [link for link in links if link and not re.match('[a-z]+:', link)]
        found = {((built / page).parent / link).resolve().relative_to(built.resolve()).as_posix() for link in own}
        assert not [link for link in found if not (built / link).exists()], page
        left |= {link for link in found if link.endswith('.html')} - reached
    pages = {path.relative_to(built).as_posix() for path in built.rglob('*.html')}
    assert pages - reached <= {'search.html', 'genindex.html'}


def test_a_page_of_an_op_has_its_plot_and_the_command_that_repeats_it(built):
    text = (built / 'docs' / 'ops' / 'quant.per_token_cast.html').read_text()
    words = re.sub('<[^>]+>', '', text)
    assert 'id="sizes-quant.per_token_cast"' in text and 'tile-kernels bench quant.per_token_cast' in words


def test_the_model_page_has_a_row_for_every_term_and_a_plot(built):
    words = re.sub('<[^>]+>', ' ', (built / 'docs' / 'model.html').read_text())
    assert 'id="model"' in (built / 'docs' / 'model.html').read_text() and 'are not counted yet' in words
    assert not [term for term in ('model', *site.TERM_WORDS.values()) if term not in words]


def test_a_notebook_lies_beside_its_page(built):
    for family in FAMILIES:
        text = (built / 'docs' / 'notebooks' / f'{family}.html').read_text()
        (target,) = re.findall(r'href="([^"]+\.ipynb)"', text)
        assert (built / 'docs' / 'notebooks' / target).is_file()


def test_pages_say_where_their_source_is(built):
    words = {path: re.sub('<[^>]+>', '', path.read_text()) for path in (built / 'docs').rglob('*.html')}
    source = re.compile(r'Source of this page|Source:? tile_kernels/[\w/]+\.py')
    without = {path.relative_to(built / 'docs').as_posix() for path, text in words.items() if not source.search(text)}
    made = {'benchmarks.html', 'benchmarks-small.html', 'examples.html', 'model.html'}
    made |= {'benchmarks-peers.html'} | {name for name in without if name.startswith('peers/')}
    assert without == made | {f'{part}/README.html' for part in ('ops', 'api')}


def test_nothing_is_requested_from_elsewhere(built):
    for path in built.rglob('*'):
        if path.suffix in ('.html', '.css', '.js', '.svg'):
            text = path.read_text()
            asked = re.findall(r'(?:<(?:script|img|iframe|source)[^>]*src|<link[^>]*href)="(?:https?:)?//[^"]*"', text)
            asked += re.findall(r'@import[^;]*//|url\(["\']?(?:https?:)?//[^)]*\)', text)
            assert not asked, path


def test_pages_and_site_have_bounded_size(built):
    sizes = {path: path.stat().st_size for path in built.rglob('*') if path.is_file()}
    assert not [path for path, size in sizes.items() if path.suffix == '.html' and size > MAX_PAGE]
    assert sum(sizes.values()) < MAX_SITE


def test_a_fault_in_a_page_stops_the_build(tmp_path, monkeypatch):
    folder = tmp_path / 'pages'
    (folder / 'docs').mkdir(parents=True)
    (folder / 'docs' / 'conf.py').write_text((Path(site.ROOT) / 'docs' / 'conf.py').read_text())
    (folder / 'index.md').write_text('# Home\n\n[nowhere](docs/gone.md)\n')
    monkeypatch.setattr(
        site, 'stage', lambda target, root, ops: site.shutil.copytree(folder, target, dirs_exist_ok=True)
    )
    with pytest.raises(ArgumentError, match='Sphinx found faults'):
        site.build(tmp_path / 'out')
