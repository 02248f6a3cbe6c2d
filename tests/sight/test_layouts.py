"""Layouts and passes of the introductory matmul, read from TileLang's compiler."""

import numpy as np
import pytest

from tests.sight.matmul import matmul
from tile_kernels.core.errors import ArgumentError
from tile_kernels.sight.layouts import evaluate, layouts
from tile_kernels.sight.passes import passes


def test_layouts_of_the_matmul_are_those_of_wgmma():
    found = layouts(matmul)
    assert set(found) == {'A_shared', 'B_shared', 'C_local'}
    tile = found['A_shared']
    assert tile.shape == (3, 64, 64) and tile.threads is None
    i, j = np.indices((64, 64))
    assert np.array_equal(tile.offsets[0], i * 64 + (j // 8 ^ i % 8) * 8 + j % 8)  # the swizzle of 128 bytes
    assert np.array_equal(np.sort(tile.offsets.ravel()), np.arange(3 * 64 * 64))
    assert np.array_equal(tile.banks, tile.offsets // 2 % 32)
    assert 'swizzled' in str(tile)


def test_a_fragment_names_the_thread_and_register_of_each_element():
    fragment = layouts(matmul)['C_local']
    assert fragment.threads is not None and fragment.threads.shape == (1, 64, 64)
    i, j = np.indices((64, 64))
    assert np.array_equal(fragment.threads[0], i // 16 * 32 + i % 8 * 4 + j % 8 // 2)
    assert np.array_equal(fragment.offsets, j // 8 * 4 + i % 16 // 8 * 2 + j % 2)
    assert str(fragment).endswith('128 threads x 32 registers')
    assert not fragment.banks.size


def test_a_replicated_fragment_names_every_copy():
    import tilelang.language as T

    fragment = T.Fragment((8,), forward_fn=lambda i, copy: (i + 8 * copy, 0), replicate=4)
    found = evaluate(fragment, 'x', 'local.fragment', 'float32')
    assert found.threads is not None
    assert np.array_equal(found.threads, np.arange(32).reshape(4, 8))
    assert not found.offsets.any() and str(found).endswith('32 threads x 1 registers, 4 copies')


def test_passes_are_those_that_changed_the_kernel():
    found = passes(matmul)
    names = [item.name for item in found]
    assert 'tl.LayoutInference' in names and len(found) < 85
    assert all(item.seconds >= 0 and item.added + item.removed > 0 for item in found)


def test_the_diff_of_one_pass_shows_what_it_added():
    (inference,) = passes(matmul, name='LayoutInference')
    assert any(line.startswith('+') and 'layout_map' in line for line in inference.diff.splitlines())
    with pytest.raises(ArgumentError, match='must be a pass that changed the kernel'):
        passes(matmul, name='tl.NoSuchPass')
