import os

import pytest
import torch

import tile_kernels
from tile_kernels.core.cases import case_id
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.explain import explain
from tile_kernels.core.gpus import arch_of
from tile_kernels.core.jit import compile_count
from tile_kernels.core.knobs import knobs
from tile_kernels.core.precompile import find_variants, precompile
from tile_kernels.core.registry import load_ops

NAME = 'tests.double'


def test_cases_that_need_the_same_kernel_compile_it_once(toy):
    variants = find_variants(None, ('sm_90a', 'sm_100a'))
    assert {(v.static[0], dict(v.config)['block_m'], v.arch) for v in variants} == {
        (hidden, block_m, arch) for hidden, block_m in ((64, 1), (128, 1), (128, 4)) for arch in ('sm_90a', 'sm_100a')
    }
    assert len(variants) == 6
    given = [{'num_tokens': count, 'hidden': 256} for count in (1, 2, 64)]
    assert len(find_variants({NAME: given}, ('sm_90a',))) == 1


def test_precompiled_kernels_are_found_with_compiling_switched_off(toy, toy_module, tmp_path):
    given = {NAME: [{'num_tokens': 8, 'hidden': 64, 'dtype': 'float32'}]}
    with knobs(disable_jit=True):  # an image is built the way it will run
        done = precompile(given, out=tmp_path / 'kernels', jobs=2, progress=False)
    assert (done.num_compiled, done.num_found, done.failures) == (1, 0, {})
    assert str(done).startswith('1 kernels compiled, 0 already there')

    before = compile_count()
    with knobs(cache_dir=tmp_path / 'kernels', disable_jit=True):
        library = toy_module.double_kernel.library((64, torch.float32), {'block_m': 1, 'num_threads': 64}, 'sm_90a')
    assert library.exists() and library.parent == tmp_path / 'kernels' / 'sm_90a'
    assert (precompile(given, out=tmp_path / 'kernels', progress=False).num_found, compile_count()) == (1, before)


def test_a_kernel_that_does_not_compile_is_reported_and_the_rest_goes_on(toy, toy_module, tmp_path, monkeypatch, cli):
    def refuse(*static, **config):
        raise RuntimeError('no layout')

    monkeypatch.setattr(toy_module.double_kernel, 'builder', refuse)
    monkeypatch.setattr(toy_module.double_kernel, '_tir_cache', {})
    status, out, _ = cli('precompile', '--out', str(tmp_path), '--arch', 'sm_90a', 'sm_100a', NAME)
    assert status == 1
    assert 'failed: double_kernel(64, float32; block_m=1, num_threads=64) for sm_100a: no layout\n' in out
    assert '0 kernels compiled, 0 already there, 6 failed' in out
    assert f'TK_CACHE_DIR={tmp_path}' in out


def test_many_kernels_are_compiled_by_processes(tmp_path, monkeypatch):
    monkeypatch.setattr('tile_kernels.core.precompile._KERNELS_PER_WORKER', 1)
    given = {'moe.normalize_weight': [{'num_topk': k} for k in range(1, 4)]}
    done = precompile(given, out=tmp_path, jobs=2, progress=False)
    assert (done.num_compiled, done.num_found, done.failures) == (3, 0, {})
    assert precompile(given, out=tmp_path, jobs=2, progress=False).num_found == 3


def test_a_process_that_dies_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr('tile_kernels.core.precompile._KERNELS_PER_WORKER', 1)
    monkeypatch.setattr('sys.executable', '/bin/false')
    given = {'moe.normalize_weight': [{'num_topk': k} for k in range(1, 4)]}
    failures = precompile(given, out=tmp_path, jobs=2, progress=False).failures
    assert len(failures) == 3
    assert set(failures.values()) == {'its process ended with exit status 1'}


def test_the_function_is_the_name_of_the_package():
    assert tile_kernels.precompile is precompile
    assert tile_kernels.explain is explain


def test_dry_runs_find_the_kernels_that_real_tensors_launch():
    different = []
    for op in load_ops().values():
        for case in op.case_set.smoke:
            arguments = op.case_set.arguments(op.name, case, 'cpu')
            found, launched = (
                [(launch.kernel, launch.static, launch.config) for launch in launches]
                for launches in (op.trace_case(case), op.trace(**arguments))
            )
            if found != launched:
                different.append(f'{op.name}[{case_id(case)}]: {found} != {launched}')
    assert different == []


def test_architectures_a_kernel_does_not_claim_are_left_out(toy, toy_module, monkeypatch):
    monkeypatch.setattr(toy_module.double_kernel, 'serves', lambda static, gpu: gpu.arch >= 90)
    assert {variant.arch for variant in find_variants([NAME], ('sm_80', 'sm_90a'))} == {'sm_90a'}


def test_every_architecture_gets_the_kernels_it_runs():
    cases = {'gemm.gemm': [dict(m=4096)]}
    found = {variant.arch: variant.kernel.name for variant in find_variants(cases, ('sm_90a', 'sm_100a'))}
    assert found == {'sm_90a': 'grouped_gemm_kernel', 'sm_100a': 'portable_product_kernel'}


def test_an_architecture_is_that_of_its_devices(toy, monkeypatch):
    for given, found in (
        ('sm_90', {'sm_90a'}),
        (['sm_90', 'sm_90a'], {'sm_90a'}),
        (('sm_100f', 'sm_120'), {'sm_100a', 'sm_120a'}),
        ('sm_89', {'sm_89'}),
    ):
        assert {variant.arch for variant in find_variants([NAME], given)} == found
    monkeypatch.setattr('torch.cuda.get_device_capability', lambda index: (12, 1))
    assert find_variants([NAME], 'sm_121')[0].arch == arch_of.__wrapped__(0)


def test_bad_arguments_are_named(toy, tmp_path):
    with pytest.raises(ArgumentError, match="arch must be a name like sm_90a, sm_80 or newer, got 'hopper'"):
        precompile(archs='hopper', out=tmp_path)
    with pytest.raises(ArgumentError, match='arch must be a name like sm_90a, sm_80 or newer, got 90'):
        precompile(archs=[90], out=tmp_path)
    with pytest.raises(ArgumentError, match='jobs must be at least 1, got 0'):
        precompile(jobs=0, out=tmp_path)
    (tmp_path / 'file').touch()
    with pytest.raises(ArgumentError, match='out must be a directory that can be made'):
        precompile(out=tmp_path / 'file')


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write anywhere')
def test_the_directory_must_be_writable(toy, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ArgumentError, match='out must be a writable directory'):
        precompile(out=tmp_path)
