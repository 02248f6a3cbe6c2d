"""Counts equal hand formulas, and kernels beyond a limit are refused with the right reason."""

import numpy as np
import pytest
import tilelang.language as T

from tile_kernels import ArgumentError, sight
from tile_kernels.sight.count import Counts, count, sectors, wavefronts
from tile_kernels.sight.lower import lower
from tile_kernels.sight.subject import resolve

LANES = np.arange(32)
ALL = np.ones(32, bool)


def counted(kernel, *args, **named) -> Counts:
    (subject,) = resolve(kernel, *args, **named)
    (found,) = count(subject, lower(subject))
    return found


def copy(n, threads=128, smem=0):
    @T.prim_func
    def copy_kernel(a: T.Tensor((n,), 'float32'), b: T.Tensor((n,), 'float32')):
        with T.Kernel(T.ceildiv(n, threads), threads=threads) as block:
            tx = T.get_thread_binding()
            if smem:
                tile = T.alloc_shared((smem,), 'float32')
                tile[tx] = a[block * threads + tx]
                b[block * threads + tx] = tile[tx]
            else:
                b[block * threads + tx] = a[block * threads + tx]

    return copy_kernel


@pytest.mark.parametrize(('stride', 'ways'), [(1, 1), (2, 2), (4, 4), (8, 8), (32, 32), (0, 1), (33, 1)])
def test_bank_conflicts(stride, ways):
    assert wavefronts(LANES * stride * 4, 4, ALL) == (ways, 1)


@pytest.mark.parametrize(('width', 'passes'), [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4)])
def test_dense_lanes_need_the_fewest_wavefronts(width, passes):
    assert wavefronts(LANES * width, width, ALL) == (passes, passes)


@pytest.mark.parametrize(('stride', 'used'), [(4, 4), (8, 8), (32, 32), (128, 32), (0, 1)])
def test_sectors_of_strided_loads(stride, used):
    least = 1 if stride == 0 else 4
    assert sectors(LANES * stride, 4, ALL) == (used, least)


def test_a_lone_lane_is_no_conflict():
    assert wavefronts(LANES * 128, 4, LANES == 3) == (1, 1)


@pytest.mark.parametrize('n', [128, 4096, 1 << 20])
def test_traffic_of_a_copy(n):
    found = counted(copy, n)
    assert found.requested(writes=False) == found.requested(writes=True) == 4 * n
    assert found.distinct() == 8 * n
    assert sum(a.sectors for a in found.accesses) == 8 * n // 32
    assert found.assumptions == []


def test_traffic_of_ops():
    cast = counted('quant.per_token_cast', num_tokens=64, hidden=7168)
    assert [cast.requested(name) for name in ('x', 'y', 'y_sf')] == [917504, 458752, 14336]
    transpose = counted('transpose.batched_transpose')
    assert transpose.requested(writes=False) == transpose.requested(writes=True) == 1 << 30
    shared = [a for a in transpose.accesses if a.space == 'shared']
    assert shared and all(a.wavefronts == a.least_wavefronts for a in shared)


def test_kernels_beyond_a_limit_are_refused():
    assert sight.fits(copy, 4096) is True
    assert '1024 threads, got 2048' in sight.fits(copy, 4096, threads=2048)
    assert '227 KB of shared memory, got 256 KB' in sight.fits(copy, 4096, smem=65536)
    assert '99 KB of shared memory, got 128 KB' in sight.fits(copy, 4096, smem=32768, device='l40s')


def test_bad_subjects():
    with pytest.raises(ArgumentError, match='device must be one of'):
        sight.fits(copy, 4096, device='h20')
    with pytest.raises(ArgumentError, match='must be a PrimFunc'):
        sight.fits(3)
