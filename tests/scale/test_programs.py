"""The six programs give what PyTorch gives, in any order of the devices, and the simulator finds nothing wrong."""

import re

import pytest
import torch

from tests.scale import cases
from tile_kernels import ArgumentError, CompileError, LaunchError, UnsupportedError, knobs, scale
from tile_kernels.core import nvcc
from tile_kernels.scale import devices, programs

WORLDS = range(1, 9) if knobs.full_test else (1, 2, 3, 8)


def seeds(world):
    """Orders of the devices; large worlds take one, unless everything is tested."""
    return (None, 1, 2, 3) if knobs.full_test else (None, 1) if world < 4 else (2,)


@pytest.mark.parametrize('world', WORLDS)
@pytest.mark.parametrize('name', cases.ALL)
def test_program(name, world):
    if world == 8 and ',' in name and not knobs.full_test:
        pytest.skip('one size of the exchange for 8 ranks')
    case = cases.ALL[name](world)
    for seed in seeds(world):
        report = scale.simulate(case.kernel, world, case.args, seed=seed, launches=1 if world > 3 else 2)
        assert not report.findings
        case.check()


def test_rows_that_do_not_fit_are_counted_and_not_sent():
    case = cases.all_to_all(2, capacity=4, counts=torch.tensor([[1, 3], [0, 2]], dtype=torch.int32))
    assert not scale.simulate(case.kernel, 2, case.args).findings
    case.check()


def test_arguments_that_do_not_fit_are_told_before_anything_runs():
    kernel = programs.shift(8, 2)
    a = torch.zeros(8)
    for world, args, text in (
        (3, (a, a, None, 0), 'world must be 2, for which b is declared, got 3'),
        (2, (a, a, None), 'args must give the 4 arguments a, b, signals, rank, got 3 for rank 0'),
        (2, (a, a[:4], None, 0), r'b of rank 0 must be a contiguous CPU tensor of shape \(8,\) and dtype float32'),
        (2, (a, a, a, 0), 'signals are signal pads and must be None, got Tensor'),
        (0, (a, a, None, 0), 'world must be'),
    ):
        with pytest.raises(ArgumentError, match=text):
            scale.simulate(kernel, world, lambda rank, given=args: given)
    with pytest.raises(ArgumentError, match='world must be at most 32'):
        programs.shift(8, 33)


@pytest.mark.parametrize('name', ['all_gather', 'reduce_scatter', 'all_to_all', 'all_gather_gemm', 'gemm_all_to_all'])
def test_programs_lower_for_hopper_without_tma(name):
    case = cases.ALL[name](2, **cases.LARGE[name])
    source, _ = nvcc.lower(case.kernel, {}, 'sm_90a')
    assert 'st.release.sys.global.u64' in source and 'ld.acquire.sys.global.u64' in source
    assert 'tk_scale_signal(' in source and 'tk_scale_wait(' in source and 'tma_' not in source
    if name != 'reduce_scatter':
        assert re.search(r'\*\((uint4|float4|longlong4)\*\)\(', source)  # at least 16 bytes at a time
    if knobs.full_test:
        found = nvcc.resources(source, 'sm_90a')
        assert found['registers'] and not found['spill_stores']


@pytest.mark.parametrize('world', [2, 3])
def test_the_row_of_a_tile_is_not_folded_to_a_maximum(world):
    kernel = cases.ALL['all_gather_gemm'](world, **cases.LARGE['all_gather_gemm']).kernel
    body = nvcc.lower(kernel, {}, 'sm_90a')[0].partition('extern "C"')[2]
    assert 'blockIdx.x' in body and 'max(' not in body


def test_a_library_is_compiled_once(tmp_path, monkeypatch):
    kernel = programs.shift(8, 1)
    source, _ = nvcc.lower(kernel, {}, 'sm_90a')
    with knobs(cache_dir=tmp_path):
        path = devices.library_of(kernel, source, 'sm_90a')
        monkeypatch.setattr(nvcc, 'compile_library', None)
        with knobs(disable_jit=True):
            assert devices.library_of(kernel, source, 'sm_90a') == path
            with pytest.raises(CompileError, match=r'shift for sm_90a is not in .* and TK_DISABLE_JIT is set'):
                devices.library_of(programs.shift(9, 1), source + ' ', 'sm_90a')
    assert path.is_relative_to(tmp_path) and path.stat().st_size


@pytest.mark.skipif(torch.cuda.is_available(), reason='tells what to do without a GPU')
def test_without_a_gpu_one_sentence_says_what_to_do():
    kernel = programs.shift(8, 2)
    for call in (
        lambda: scale.run(kernel, None),
        lambda: scale.on_one_gpu(kernel, 2, lambda rank: ()),
        lambda: scale.empty(4, dtype=torch.float32, group=None),
    ):
        with pytest.raises(UnsupportedError, match='got none; use scale'):
            call()


def test_ranks_that_cannot_share_memory_are_told_what_they_need():
    text = r'on GPUs of one node that access each other \(overlapping devices\)$'
    with pytest.raises(UnsupportedError, match=text), devices._explained():
        raise RuntimeError('overlapping devices\nand a trace')


def test_blocks_that_cannot_be_resident_together_are_refused():
    assert devices.launch_size(cases.gemm_all_to_all(4).kernel) == (4, programs.THREADS)
    assert devices.launch_size(programs.all_gather(100, 3)) == (3, programs.THREADS)
    hopper = 228 << 10
    assert devices.resident_blocks(128, 32, 0, hopper) == 16
    assert devices.resident_blocks(1024, 64, 0, hopper) == 1
    assert devices.resident_blocks(128, 168, 0, hopper) == 3
    assert devices.resident_blocks(256, 32, 100 << 10, hopper) == 2
    devices.check_resident(33, 4, 132)
    with pytest.raises(UnsupportedError, match='the 4 ranks need 136 resident blocks, the GPU holds 132'):
        devices.check_resident(34, 4, 132)


def test_a_wait_that_gave_up_names_the_missing_rank():
    class Done:
        def record_event(self):
            return self

        def query(self):
            return True

    pads = [[torch.zeros(8, dtype=torch.int64)] for _ in range(3)]
    devices._finish('scale.run', [0, 1, 2], [Done()], pads, 1.0)
    pads[1][0][devices.FAILED_WORD] = 1 + 2
    with pytest.raises(LaunchError, match='rank 1 waited 1 s for a signal of rank 2, which did not come'):
        devices._finish('scale.run', [0, 1, 2], [Done()], pads, 1.0)
    assert not pads[1][0].any()
