"""Pictures of layouts: golden files, bank conflicts, the three call forms, and bad input in one sentence."""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tilelang.language as T
import torch

from tests.sight.lint_kernels import turned_tile
from tests.sight.matmul import matmul
from tile_kernels.core.errors import ArgumentError, UnsupportedError
from tile_kernels.sight import plot_layout

#: Pictures need the extra `plots`, which is part of `dev`; everything else here runs without it.
needs_matplotlib = pytest.mark.skipif(find_spec('matplotlib') is None, reason='matplotlib is not installed')

GOLDEN = Path(__file__).parent / 'golden'


def replicated():
    return T.Fragment((8, 8), forward_fn=lambda i, j, copy: (i * 4 + j // 2 + 32 * copy, j % 2), replicate=2)


#: The pictures of the golden files.
PICTURES = {
    'row_major': lambda: plot_layout(tensor=((64, 64), 'float16')),
    'swizzled': lambda: plot_layout(tensor=((8, 64), 'float16'), swizzle=True),
    'fragment': lambda: plot_layout(replicated()),
    'column': lambda: plot_layout(tensor=((64, 64), 'float16'), access='column'),
    'ldmatrix': lambda: plot_layout(tensor=((64, 64), 'float16'), access='ldmatrix'),
}


@pytest.mark.parametrize('name', PICTURES)
def test_text_equals_the_golden_file(name):
    picture = PICTURES[name]()
    assert f'{picture.text()}\n' == (GOLDEN / f'{name}.txt').read_text()
    assert max(map(len, picture.text().splitlines())) <= 80 and str(picture) == picture.text()


@needs_matplotlib
@pytest.mark.parametrize('name', ['swizzled', 'fragment', 'ldmatrix'])
def test_svg_equals_the_golden_file(name):
    first, second = PICTURES[name]().svg, PICTURES[name]().svg
    assert first == second == (GOLDEN / f'{name}.svg').read_text()


@pytest.mark.parametrize(('swizzle', 'column', 'ldmatrix'), [(False, 32, 8), (True, 4, 1)])
def test_conflicts_of_a_half_precision_tile(swizzle, column, ldmatrix):
    found = plot_layout(tensor=torch.empty(128, 128, dtype=torch.float16), blocking=(64, 64, 64), swizzle=swizzle)
    assert found.conflicts == {'row': 1, 'column': column, 'ldmatrix': ldmatrix}
    assert found.banks.shape == (64, 64) and found.view == 'memory'
    shown = plot_layout(tensor=T.Tensor((64, 64), 'float16'), swizzle=swizzle, access='column')
    assert shown.lanes.ways == column and shown.conflicts == {'column of tile': column}


def test_blocking_of_three_extents_means_the_tile_of_an_operand():
    three = plot_layout(tensor=((256, 256), 'float16'), blocking=(16, 128, 32))
    two = plot_layout(tensor=((256, 256), 'float16'), blocking=(16, 32))
    assert three.banks.shape == (16, 32) and np.array_equal(three.banks, two.banks)


def test_a_large_tile_is_cut_with_an_ellipsis():
    text = plot_layout(tensor=((128, 128), 'float16')).text()
    assert text.count('\n') < 25 and '...' in text and '127' in text


@pytest.fixture(scope='module')
def buffers(tmp_path_factory):
    folder = tmp_path_factory.mktemp('pictures') / 'layouts'
    return folder, plot_layout(matmul, save_path=folder)


@needs_matplotlib
def test_a_large_picture_has_few_labels():
    assert 100 < plot_layout(tensor=((128, 128), 'float16')).svg.count('<text') < 400


@needs_matplotlib
def test_a_kernel_gives_a_picture_for_each_buffer(buffers):
    folder, found = buffers
    assert set(found) == {'A_shared', 'B_shared', 'C_local'}
    assert {path.name for path in folder.iterdir()} == {'A_shared.svg', 'B_shared.svg', 'C_local.svg'}
    assert found['A_shared'].conflicts == {'row': 1, 'column': 4, 'ldmatrix': 1}
    assert found['C_local'].view == 'fragment' and found['C_local'].conflicts == {} and not found['C_local'].banks.size
    assert 'the first tile of 3' in found['A_shared'].text()


def test_the_access_of_a_line_shows_the_lanes_that_meet():
    line = next(
        n
        for n, text in enumerate(Path(turned_tile.__code__.co_filename).read_text().splitlines(), 1)
        if 'bank-conflict' in text
    )
    found = plot_layout(turned_tile(0), buffer='tile', access=line)
    assert found.view == 'access' and found.lanes.ways == 32
    assert found.title == f'line {line}: load tile, 4 bytes: 32-way'
    assert all(len(words) == (32 if bank == 0 else 0) for bank, words in enumerate(found.lanes.met()))
    every = plot_layout(turned_tile(1), buffer='tile', view='access')
    assert sorted(every.conflicts.values()) == [1, 1]


@needs_matplotlib
def test_files_have_the_kind_of_their_suffix(tmp_path):
    for name, start in (('a.png', b'\x89PNG'), ('b.svg', b'<?xml'), ('c.txt', b'tile')):
        plot_layout(tensor=((8, 8), 'float32'), save_path=str(tmp_path / 'new' / name))
        assert (tmp_path / 'new' / name).read_bytes().startswith(start)


def test_text_needs_no_matplotlib_and_a_picture_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    picture = plot_layout(tensor=((8, 8), 'float32'))
    assert picture.text().startswith('tile  shared.dyn  float32[8x8]  row-major')
    with pytest.raises(UnsupportedError, match=r'needs matplotlib; run: pip install "open-tile-kernels\[plots\]"'):
        _ = picture.svg


@pytest.mark.parametrize(
    ('args', 'named', 'words'),
    [
        ((), {}, 'give either a kernel or a layout, or tensor='),
        ((), {'tensor': 5}, 'tensor must be a tensor, a T.Tensor or a pair'),
        ((), {'tensor': ((8, 8), 'float17x')}, 'tensor must be a tensor, a T.Tensor or a pair'),
        ((), {'tensor': ((8, 8), 'float32'), 'view': 'banks'}, 'view must be one of memory, fragment, access'),
        ((), {'tensor': ((8, 8), 'float32'), 'view': 'fragment'}, 'tile has the view memory'),
        (
            (),
            {'tensor': ((8, 8), 'float32'), 'access': 'diagonal'},
            'access must be a line or one of row, column, ldmatrix',
        ),
        ((), {'tensor': ((8, 8), 'float32'), 'blocking': (8, 0)}, 'blocking must be 2 or 3 positive extents'),
        ((), {'tensor': ((8, 8), 'float32'), 'save_path': 'x.gif'}, 'save_path must end in .svg, .png or .txt'),
        ((matmul,), {'buffer': 'D_shared'}, 'buffer must be one of A_shared, B_shared, C_local'),
    ],
)
def test_bad_input_is_one_sentence(args, named, words):
    with pytest.raises(ArgumentError, match=words):
        plot_layout(*args, **named)
