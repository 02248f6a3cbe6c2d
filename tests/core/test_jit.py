import os
import re
import stat
import subprocess
import sys
import threading

import pytest
import torch

from tile_kernels import ArgumentError, CompileError, UnsupportedError, compile_count, knobs
from tile_kernels.core import jit, launch, nvcc
from tile_kernels.core.code_digest import code
from tile_kernels.core.errors import LaunchError
from tile_kernels.core.lang import T
from tile_kernels.moe.expand_and_per_token_cast import expand_and_per_token_cast_kernel
from tile_kernels.transpose.batched_transpose import batched_transpose_kernel

STATIC = (32, 4)


@pytest.fixture(scope='module')
def warm_cache(sample, tmp_path_factory):
    """A cache directory that holds the sample kernel for sm_90a."""
    folder = tmp_path_factory.mktemp('cache')
    with knobs(cache_dir=folder):
        sample.spread_kernel.library(STATIC, {'num_threads': 128}, 'sm_90a')
    return folder


def test_cross_compiles_without_a_gpu_and_counts(sample, tmp_path):
    before = compile_count()
    with knobs(cache_dir=tmp_path):
        path = sample.spread_kernel.library(STATIC, {'num_threads': 64}, 'sm_90a')
        assert path.exists() and compile_count() == before + 1
        assert sample.spread_kernel.library(STATIC, {'num_threads': 64}, 'sm_90a') == path
    assert compile_count() == before + 1
    assert not list(tmp_path.rglob('*.tmp'))


def test_a_cached_kernel_loads_without_tilelang(warm_cache):
    code = (
        'import sys; from tests.core.sample import spread_kernel as k;'
        "k.load((32, 4), {'num_threads': 128}, 'sm_90a');"
        "sys.exit('tilelang' in sys.modules)"
    )
    env = {**os.environ, 'TK_CACHE_DIR': str(warm_cache), 'TK_DISABLE_JIT': '1'}
    assert subprocess.run([sys.executable, '-c', code], env=env, timeout=120, check=False).returncode == 0


def test_a_kernel_is_known_by_all_it_is_built_from():
    def modules(kernel):
        return {node.module.removeprefix('tile_kernels.') for node in code().reached(kernel.builder)}

    assert modules(batched_transpose_kernel) == {'core.gpus', 'core.lang', 'core.nvcc', 'transpose.batched_transpose'}
    assert 'device.reduce' in modules(expand_and_per_token_cast_kernel)


def test_disable_jit_names_the_missing_kernel(sample, warm_cache):
    with knobs(cache_dir=warm_cache, disable_jit=True):
        sample.spread_kernel.library(STATIC, {'num_threads': 128}, 'sm_90a')
        with pytest.raises(
            CompileError, match=r'spread_kernel\(64, 4; num_threads=128\) for sm_90a is not in .*precompile'
        ):
            sample.spread_kernel.library((64, 4), {'num_threads': 128}, 'sm_90a')


@pytest.mark.skipif(os.geteuid() == 0, reason='root writes everywhere')
def test_a_read_only_cache_serves_what_it_holds_user(sample, warm_cache):
    os.chmod(warm_cache / 'sm_90a', stat.S_IRUSR | stat.S_IXUSR)
    with knobs(cache_dir=warm_cache):
        assert sample.spread_kernel.library((16, 4), {'num_threads': 128}, 'sm_90a').exists()


def test_an_unwritable_cache_is_no_failure(sample, tmp_path, caplog):
    blocked = tmp_path / 'file'
    blocked.write_text('not a directory')
    with knobs(cache_dir=blocked):
        path = sample.spread_kernel.library((16, 4), {'num_threads': 128}, 'sm_90a')
    assert path.exists() and 'TK_CACHE_DIR' in caplog.text


def test_concurrent_compilations_leave_one_library(sample, tmp_path):
    def build():
        with knobs(cache_dir=tmp_path):
            sample.spread_kernel.library((24, 4), {'num_threads': 128}, 'sm_90a')

    sample.spread_kernel.tir(24, 4, num_threads=128)
    work = [threading.Thread(target=build) for _ in range(2)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(list(tmp_path.rglob('*.so'))) == 1 and not list(tmp_path.rglob('*.tmp'))


def test_runtime_values_are_not_compile_keys(sample):
    keys = set()
    for num_tokens, stride, factor in ((3, 32, 1.0), (5, 64, 2.0), (4096, 96, 0.5)):
        x = torch.empty(num_tokens, stride)[:, :32]
        (made,) = sample.spread.trace(x, 4, factor)
        keys.add((made.static, tuple(made.config.items())))
    assert len(keys) == 1


def test_source_and_resources_need_no_gpu(sample):
    source = sample.spread_kernel.source(STATIC)
    assert 'spread_kernel' in source
    used = sample.spread_kernel.resources(STATIC)
    assert 0 < used['registers'] < 255 and used['spill_stores'] == 0


def test_choose_outside_its_space_is_an_error(sample):
    bad = jit.Kernel(sample.spread_kernel.builder, lambda *a: {'num_threads': 96}, {'num_threads': (64,)}, {})
    with pytest.raises(ArgumentError, match=r'num_threads must be in \(64,\), got 96'):
        bad.config(STATIC, 5)


def test_compiler_failures_carry_kernel_and_arguments(sample):
    def broken(hidden, *, num_threads):
        raise ValueError('no available layout found for x')

    made = jit.Kernel(broken, None, {}, {})
    with pytest.raises(CompileError, match=r'broken\(32; num_threads=64\): TileLang found no layout'):
        made.tir(32, num_threads=64)


@pytest.mark.parametrize(
    ('message', 'sentence'),
    [
        ('nvcc fatal   : Unsupported gpu architecture', 'does not know the GPU architecture'),
        ("error: identifier '__nv_fp8_e4m3' is undefined", 'does not know the FP8 types'),
        ('Failed to set the allowed dynamic shared memory size to 300000', 'asks for 293 KB of shared memory'),
        ('CUDA_ERROR: too many resources requested for launch', 'more than the 65536 registers'),
        ('Could not find CUDA installation', 'no CUDA toolkit found'),
        ('line one\nfoo.cu(3): error: expected a ;\nmore', 'foo.cu(3): error: expected a ;'),
    ],
)
def test_compiler_messages_become_sentences(message, sentence):
    assert sentence in nvcc.explain(message)


@pytest.mark.parametrize('version', ['0.1.14', '0.2.0'])
def test_untested_tilelang_is_refused_in_words(monkeypatch, version):
    monkeypatch.setattr(nvcc, 'tilelang_version', lambda: version)
    nvcc.require_tilelang.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match=re.escape(f'tilelang {version} is outside the tested range')):
            nvcc.require_tilelang()
    finally:
        nvcc.require_tilelang.cache_clear()


def test_other_devices_are_refused_in_words(sample):
    class Elsewhere(torch.Tensor):
        device = torch.device('mps')

    with pytest.raises(UnsupportedError, match='runs on CUDA and CPU tensors, got a tensor on mps'):
        launch._bind(sample.spread_kernel, STATIC, 5, Elsewhere(), ())


def test_refused_launches_name_the_kernel(sample, warm_cache):
    with knobs(cache_dir=warm_cache):
        bound = sample.spread_kernel.load(STATIC, {'num_threads': 128}, 'sm_90a')
    x, y = torch.randn(2, 32), torch.empty(2, 4, 32)
    sample.spread_kernel.bound[(STATIC, 2, -1)] = bound
    try:
        with pytest.raises(LaunchError, match=r'spread_kernel\(32, 4\).*device_type'):
            launch.launch(sample.spread_kernel, STATIC, x, y, 1.0)
    finally:
        sample.spread_kernel.bound.clear()


def test_pass_configs_are_a_part_of_the_key(sample):
    def digest(pass_configs):
        kernel = jit.Kernel(sample.spread_kernel.builder, None, {}, pass_configs)
        return kernel._digest(STATIC, {'num_threads': 128}, 'sm_90a')

    some = [{}, {'TL_DISABLE_WGMMA': True}, {'TL_DISABLE_WGMMA': False}, {'TL_DISABLE_SAFE_MEMORY_ACCESS': True}]
    assert len({digest(pass_configs) for pass_configs in some}) == len(some)
    assert digest({'a': 1, 'b': 2}) == digest({'b': 2, 'a': 1})


def test_a_builder_that_fails_prints_no_program(caplog, capfd):
    @jit.kernel()
    def broken_kernel(n: int):
        @T.prim_func
        def broken(x: T.Tensor((n,), T.float32)):
            with T.Kernel(1, threads=128):
                x[0] = T.float32(1 // (n - n))

        return broken

    try:
        with pytest.raises(CompileError, match='broken_kernel'):
            broken_kernel.tir(4)
    finally:
        del jit.kernels['broken_kernel']
    assert capfd.readouterr().err == '' and caplog.text == ''
