"""Faults nobody planned: killed processes, a clock that goes back, two versions in one cache, memory that runs out."""

import multiprocessing
import os
import signal
import time

import pytest
import torch

from tests.core.test_cache import CONFIG, STATIC, fake_compiler, library_of
from tile_kernels import compile_count, knobs
from tile_kernels.cli.main import main
from tile_kernels.core import cache, nvcc

FORK = multiprocessing.get_context('fork')  # without importing torch again


def killed_at(monkeypatch, module, name, work):
    """Run `work` in a process that is killed when it calls a function."""
    reached = FORK.Event()

    def wait(*args, **kwargs):
        reached.set()
        time.sleep(60)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, wait)
        process = FORK.Process(target=work, daemon=True)
        process.start()
        assert reached.wait(60)
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize('moment', ['compiling', 'writing the manifest', 'moving the library'])
def test_the_kernel_of_a_killed_process_is_compiled_by_the_next(sample, tmp_path, monkeypatch, moment):
    def library():
        return sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a')

    sample.spread_kernel.tir(*STATIC, **CONFIG)
    with knobs(cache_dir=tmp_path / 'cache'):
        if moment == 'compiling':
            killed_at(monkeypatch, nvcc, 'compile_library', library)
        else:
            fake_compiler(monkeypatch, b'first')
            killed_at(monkeypatch, cache.os, 'replace' if moment == 'moving the library' else 'chmod', library)
        fake_compiler(monkeypatch, b'second')
        before = compile_count()
        assert library().read_bytes() == b'second'  # the lock of a dead process holds nobody up
        assert compile_count() == before + 1
        assert library() == library_of(tmp_path / 'cache')
        assert compile_count() == before + 1
    left = tmp_path / 'cache' / 'sm_90a'
    for path in left.glob('.*.tmp'):
        os.utime(path, (time.time() - 7200,) * 2)
    assert main(['cache', 'prune', '--dir', str(tmp_path / 'cache')]) == 0
    assert list(left.glob('.*.tmp')) == []


def test_a_clock_that_goes_back_changes_nothing(sample, tmp_path, monkeypatch):
    fake_compiler(monkeypatch)
    with knobs(cache_dir=tmp_path / 'cache'):
        path = sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a')
        future = time.time() + 10 * 365 * 86400
        for file in (tmp_path / 'cache').rglob('*'):
            os.utime(file, (future, future))
        monkeypatch.setattr(time, 'time', lambda: 0.0)
        before = compile_count()
        assert sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a') == path
        assert compile_count() == before


def test_two_versions_share_a_cache(sample, tmp_path, monkeypatch):
    with knobs(cache_dir=tmp_path / 'cache'):
        fake_compiler(monkeypatch, b'old')
        old = sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a')
        with monkeypatch.context() as patch:  # the other version has another kernel under this name
            patch.setattr(cache, 'code_digest', lambda folder, builder, static: 'code of the other version')
            fake_compiler(patch, b'new')
            new = sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a')
        before = compile_count()
        assert sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a') == old
        assert compile_count() == before
    assert old.read_bytes() == b'old' and new.read_bytes() == b'new'


@pytest.mark.parametrize('replayed', [False, True])
def test_a_call_after_one_without_memory_works(sample, monkeypatch, replayed):
    x = torch.randn(7, 64)
    expected = sample.spread.twin(x, 4)
    with knobs(interpret=True):
        if replayed:
            sample.spread(x, 4)
            sample.spread(x, 4)
        with monkeypatch.context() as patch:
            for name in ('empty', 'empty_strided', 'empty_like'):
                patch.setattr(torch, name, out_of_memory)
            patch.setattr(torch.Tensor, 'new_empty', out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                sample.spread(x, 4)
        assert torch.equal(sample.spread(x, 4), expected)
        assert torch.equal(sample.spread(x, 4), expected)


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError('CUDA out of memory')
