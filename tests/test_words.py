"""Prose that anyone can read: short cells, short sentences, the usual terms, links that lead somewhere.

Pages written by hand, and comments and docstrings of the package, must hold every rule.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / 'tile_kernels'

MAX_WORDS = 25
MAX_CELL = 160
MAX_README_LINES = 120
MAX_GLOSSARY = 30

#: The first words of a generated page: its sentences are docstrings, which the second half of this file counts.
GENERATED = '<!-- Generated'

PAGES = sorted(
    page
    for pattern in (
        'README.md',
        'CONTRIBUTING.md',
        'CHANGELOG.md',
        'docs/*.md',
        'docs/notes/*.md',
        'docs/notebooks/*.md',
    )
    for page in ROOT.glob(pattern)
    if not page.read_text().startswith(GENERATED)
)

#: Folders of pages that only the site has; `tests/cli/test_docs.py` checks links to them.
BUILT = (ROOT / 'docs' / 'ops', ROOT / 'docs' / 'api')

#: Phrases that only we used, and what the rest of the world says.
PRIVATE_WORDS = {
    r'(copies|stores|loads|of them|are|is) under way': 'in flight',
    r'who (copies|sends|reads|has read|asks|had time|waits)\b': 'the block, warp or thread that ...',
    r'(begins?|begun|launched) early\b': 'programmatic dependent launch (PDL)',
    r'asynchronous (matrix )?products?': 'wgmma',
    r'products? of warps': 'mma',
    r'turns? the first channels': 'rotate',
    r'barriers? of the cluster': 'cluster barrier',
    r'barriers? of the grid': 'grid barrier',
    r'share of a copy': '% of copy',
    r'room for tiles': 'stages, or shared memory for tiles',
    r'the (place|room) of (a|the) tile': 'stage',
    r'tiles? asked for': 'prefetched',
    r'(its|their|the) pull\b(?! request)': 'name the gradient term',
    r'grouped products?': 'grouped GEMM',
    r'makers? of tiles': 'producer warp',
}

ABBREVIATIONS = ('e.g.', 'i.e.', 'vs.', 'etc.', 'cf.', 'approx.')


# Markdown -----------------------------------------------------------------------------------


def blocks_of(text: str) -> list[str]:
    """Paragraphs and list items, without code, headings, tables and comments."""
    text = re.sub(r'<!--.*?-->', '', text, flags=re.DOTALL)
    text = re.sub(r'^ *(```|~~~).*?^ *\1', '\n', text, flags=re.DOTALL | re.MULTILINE)
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        inside_item = bool(blocks[-1]) and blocks[-1][0].startswith('- ')
        if not line.strip() or line.startswith(('#', '|', '![')) or (line.startswith('    ') and not inside_item):
            blocks.append([])
        elif item := re.match(r' *([-*]|\d+\.) +', line):
            blocks.append(['- ' + line[item.end() :]])
        else:
            blocks[-1].append(line.strip())
    return [' '.join(block).removeprefix('- ') for block in blocks if block]


def sentences_of(block: str) -> list[str]:
    """The sentences of a paragraph; inline code is one word, a link is its text."""
    block = re.sub(r'(`+).+?\1', 'Code', block)
    block = re.sub(r'!?\[([^]]*)\]\([^)]*\)', r'\1', block).replace('*', '')
    for word in ABBREVIATIONS:
        block = block.replace(word, word.replace('.', ''))
    return [part for part in re.split(r'(?<=[.!?])[)"\']*\s+(?=["\'(\[]?[A-Z0-9])', block) if part.strip()]


def num_words(sentence: str) -> int:
    """Words, and numbers with their sign; a dash or an operator alone is none."""
    return sum(any(c.isalnum() for c in word) for word in sentence.split())


def long_sentences(text: str) -> list[str]:
    """The sentences of a page that have too many words."""
    return [s for block in blocks_of(text) for s in sentences_of(block) if num_words(s) > MAX_WORDS]


def cells_of(text: str) -> list[str]:
    """Cells of all tables outside code."""
    text = re.sub(r'^ *(```|~~~).*?^ *\1', '', text, flags=re.DOTALL | re.MULTILINE)
    rows = [line.strip().strip('|') for line in text.splitlines() if line.lstrip().startswith('|')]
    return [cell.strip() for row in rows for cell in re.split(r'(?<!\\)\|', row)]


def private_words(text: str) -> list[tuple[str, str]]:
    """Private phrases of a text outside inline code, each with the plain word."""
    prose = re.sub(r'`[^`]*`', '', ' '.join(text.split()))
    return [(m.group(), plain) for words, plain in PRIVATE_WORDS.items() for m in re.finditer(words, prose, re.I)]


def anchors_of(page: Path) -> set[str]:
    """What `#...` may follow the name of a page: its headings as GitHub writes them."""
    headings = re.findall(r'^#+ (.*)$', page.read_text(), re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


def test_the_splitter_counts_as_a_reader_does():
    text = (
        '# A heading of words that nobody counts\n\n'
        'One two. `three.four five` six, e.g. [seven eight](there.md)! At 1.5 us\nit ends.\n'
        '- an item\n  goes on\n- another\n\n| a | table |\n\n```python\ncode. Code.\n```\n\n    indented code\n'
    )
    found = [sentence for block in blocks_of(text) for sentence in sentences_of(block)]
    assert [num_words(sentence) for sentence in found] == [2, 5, 5, 4, 1]
    assert cells_of(text) == ['a', 'table']
    assert long_sentences(' '.join(['word'] * 26) + '.') and not long_sentences(' '.join(['word'] * 25) + '.')


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_short_sentences_and_cells(page):
    text = page.read_text()
    assert not long_sentences(text), f'more than {MAX_WORDS} words'
    assert not [cell for cell in cells_of(text) if len(cell) > MAX_CELL], f'more than {MAX_CELL} characters'


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_the_usual_terms(page):
    assert not private_words(page.read_text()), 'write the plain word instead'


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_pages_lead_somewhere(page):
    for target, anchor in re.findall(r'\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)', page.read_text()):
        found = (page.parent / target).resolve() if target else page
        if found.parent in BUILT:
            continue
        assert found.exists(), target
        assert not anchor or anchor in anchors_of(found), f'{target}#{anchor}'


def test_readme_fits_two_screens():
    assert len((ROOT / 'README.md').read_text().splitlines()) <= MAX_README_LINES


def test_the_glossary_is_short_and_one_sentence_each():
    rows = re.findall(r'^\| \*\*(.+?)\*\* \| (.+?) \|$', (ROOT / 'docs' / 'glossary.md').read_text(), re.MULTILINE)
    assert 0 < len(rows) <= MAX_GLOSSARY
    assert [word for word, _ in rows] == sorted((word for word, _ in rows), key=str.lower)
    assert not [word for word, meaning in rows if len(sentences_of(meaning)) != 1 or num_words(meaning) > MAX_WORDS]
    others = ' '.join(page.read_text() for page in PAGES if page.name != 'glossary.md').lower()
    assert not [word for word, _ in rows if word.lower() not in others], 'explained, but not used on any page'


def test_a_decision_is_two_lines():
    text = (ROOT / 'docs' / 'decisions.md').read_text()
    found = re.findall(r'^- \*\*D(\d+)\*\* (.+)\n  Why: (.+)\n(?!  )', text, re.MULTILINE)
    numbers = [int(number) for number, _, _ in found]
    assert len(found) == text.count('- **D') and sorted(numbers) == list(range(1, len(numbers) + 1))
    assert not [number for number, what, why in found if max(len(what), len(why)) > MAX_CELL]


# Comments and docstrings --------------------------------------------------------------------


def with_items(docstring: str) -> str:
    """A docstring whose `Args:` and `Returns:` are list items, as a page would have them."""
    entry = re.compile(r'^    (?=\S)(?:[*\w, ]+: )?', re.MULTILINE)
    head, *parts = re.split(r'^(?:Args|Returns|Raises|Attributes|Yields):$', docstring, flags=re.MULTILINE)
    return '\n'.join([head, *(entry.sub('- ', part) for part in parts)])


def prose_of(source: str) -> list[str]:
    """Docstrings and runs of comment lines of a module."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [with_items(ast.get_docstring(n) or '') for n in ast.walk(ast.parse(source)) if isinstance(n, nodes)]
    last, column = -2, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        words = token.string.lstrip('#: ')
        if token.start[0] == last + 1 and token.start[1] == column:
            found[-1] += '\n' + words
        else:
            found.append(words)
        last, column = token.start
    return found


def test_comments_are_found_with_their_next_lines():
    arguments = 'Sum.\n\nArgs:\n    x: What is\n        summed.\n    y: Out.\n'
    assert blocks_of(with_items(arguments)) == ['Sum.', 'What is summed.', 'Out.']
    assert prose_of('"""Module."""\nx = 1  # one\n# two\n# three\n') == ['Module.', 'one', 'two\nthree']


def test_comments_and_docstrings_have_short_sentences_and_the_usual_terms():
    texts = {path: prose_of(path.read_text()) for path in PACKAGE.rglob('*.py')}
    long = [(path.name, s) for path, found in texts.items() for text in found for s in long_sentences(text)]
    assert not long, f'more than {MAX_WORDS} words'
    assert not [(path.name, w) for path, found in texts.items() for text in found for w in private_words(text)]
