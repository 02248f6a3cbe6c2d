"""What users meet around a kernel: kernel objects, tuning, an imitated GPU, whole programs that run unchanged."""

import os
import subprocess
import sys

import pytest
import tilelang
import tilelang.language as T
import torch

from tile_kernels.interpreter import OutOfBounds, fake_cuda, interpreting
from tile_kernels.interpreter.__main__ import main


@tilelang.jit(out_idx=[-1])
def add(n, block=32, threads=32):
    @T.prim_func
    def adding(a: T.Tensor((n,), 'float32'), b: T.Tensor((n,), 'float32'), c: T.Tensor((n,), 'float32')):
        with T.Kernel(T.ceildiv(n, block), threads=threads) as pid:
            for i in T.Parallel(block):
                c[pid * block + i] = a[pid * block + i] + b[pid * block + i]

    return adding


def test_a_kernel_has_what_a_compiled_kernel_has(capsys):
    with fake_cuda(), interpreting():
        kernel = add(64)
        assert isinstance(kernel, tilelang.JITKernel)
        assert kernel.out_idx == [2]
        assert [param.shape for param in kernel.params] == [[64]] * 3
        assert kernel.adapter.params == kernel.params
        assert kernel.adapter.result_idx == [2]
        assert 'void' in kernel.get_kernel_source()
        assert 'blockIdx.x' in kernel.kernel_source
        assert kernel.get_host_source().startswith('# from')
        kernel.print_source_code()
        assert 'blockIdx.x' in capsys.readouterr().out
        assert kernel.run_once().shape == (64,)
        profiler = kernel.get_profiler()
        profiler.assert_allclose(lambda a, b: a + b, rtol=1e-6, atol=1e-6)
        with pytest.raises(AssertionError):
            profiler.assert_allclose(lambda a, b: a - b, rtol=1e-6, atol=1e-6)
        assert profiler.do_bench() > 0
        assert profiler.do_bench(warmup=10, quantiles=[0.5, 0.2])[0] > 0
        x = torch.ones(64)
        assert torch.equal(kernel(b=x, a=x), 2 * x)
        assert torch.equal(kernel(x, b=x), 2 * x)


def test_a_division_by_a_number_rounds_as_on_a_gpu():
    x = torch.arange(1.0, 200.0)
    inverse = torch.tensor(1.0) / torch.tensor(448.0)
    assert not torch.equal(x / 448.0, x * inverse)
    with fake_cuda():
        assert torch.equal(x / 448.0, x * inverse)
        assert torch.equal(torch.div(x.bfloat16(), 448), (x.bfloat16().float() * inverse).bfloat16())
        assert torch.equal(x.clone().div_(448.0), x * inverse)
        assert torch.equal(x / torch.full_like(x, 448.0), (x.double() / 448).float())
        assert torch.equal(torch.arange(4) / 2, torch.tensor([0.0, 0.5, 1.0, 1.5]))
        assert (1.0 / torch.tensor(0.0)).isinf()


def test_the_source_is_lowered_for_the_target():
    with fake_cuda((8, 0)), interpreting():
        assert kernel_arch(add(64)) == 'sm_80'
    with fake_cuda((10, 0)), interpreting():
        assert kernel_arch(add(64)) == 'sm_100a'


def kernel_arch(kernel):
    assert 'adding_kernel' in kernel.get_kernel_source()
    return str(kernel.target.attrs['arch'])


def test_autotune_runs_the_first_or_the_given_configuration():
    configs = [{'block': 16, 'threads': 32}, {'block': 32, 'threads': 64}]
    with fake_cuda(), interpreting():
        tuned = tilelang.autotune(configs=configs)(add)
        kernel = tuned(64)
        assert kernel.config == configs[0]
        assert kernel.latency > 0
        x = torch.randn(64, device='cuda')
        assert torch.equal(kernel(x, x), x + x)
        assert tuned(64, block=8, threads=32).config == {}
        by_size = tilelang.autotune(configs=lambda n: [{'block': n, 'threads': 32}])(add)
        assert by_size(32).config == {'block': 32, 'threads': 32}


def test_the_tuner_itself_takes_the_first_configuration():
    def kernel(block=None):
        return add.get_tir(64, block)

    with fake_cuda(), interpreting():
        tuner = tilelang.autotuner.AutoTuner.from_kernel(kernel=kernel, configs=[{'block': 8}, {'block': 16}])
        result = tuner.set_compile_args(out_idx=[-1], target='auto').run(warmup=3, rep=20)
        assert result.config == {'block': 8}
        assert torch.equal(result.kernel(torch.ones(64), torch.ones(64)), torch.full((64,), 2.0))


def test_par_compile_gives_interpreted_kernels():
    with fake_cuda(), interpreting():
        kernels = add.par_compile([{'n': 32}, {'n': 64}])
        assert torch.equal(kernels[1](torch.ones(64), torch.ones(64)), torch.full((64,), 2.0))


def test_cuda_tensors_live_on_the_cpu():
    with fake_cuda((9, 0), num_sms=78):
        assert torch.cuda.is_available()
        x = torch.randn(4, device='cuda')
        assert x.is_cuda
        for made in (
            x,
            x.cuda(),
            x.to('cuda:0'),
            torch.zeros(2, device=torch.device('cuda')),
            torch.empty_like(x, device='cuda'),
            torch.tensor([1.0]).cuda(),
            torch.arange(3, device='cuda', dtype=torch.int32),
        ):
            assert made.device.type == 'cpu'
        assert torch.randn(2, generator=torch.Generator(device='cuda').manual_seed(1)).shape == (2,)
        facts = torch.cuda.get_device_properties(0)
        assert (facts.multi_processor_count, facts.major) == (78, 9)
        assert torch.cuda.get_device_capability() == (9, 0)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record()
        torch.cuda.synchronize()
        assert start.elapsed_time(end) > 0
        with torch.cuda.stream(torch.cuda.Stream()):
            assert torch.cuda.current_stream().cuda_stream == 0
        from tilelang.carver.arch import CUDA
        from tilelang.contrib import nvcc

        assert nvcc.get_target_compute_version() == '9.0'
        assert CUDA('cuda').compute_max_core == 78
    assert not torch.cuda.is_available()
    assert not torch.randn(1).is_cuda


PROGRAM = """
import argparse
import sys

import tilelang
import tilelang.language as T
import torch


@tilelang.jit(out_idx=[-1])
def twice(n):
    @T.prim_func
    def main(x: T.Tensor((n,), 'float16'), y: T.Tensor((n,), 'float16')):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((n,), 'float16')
            T.copy(x, s)
            for i in T.Parallel(n):
                y[i] = s[i + SHIFT] * T.float16(2)

    return main


def run():
    parser = argparse.ArgumentParser()
    parser.add_argument('--n', type=int, default=8)
    n = parser.parse_args().n
    kernel = twice(n)
    x = torch.randn(n, device='cuda', dtype=torch.float16)
    torch.testing.assert_close(kernel(x), x * 2)
    print('latency', kernel.get_profiler().do_bench() > 0, n)


if __name__ == '__main__':
    run()
"""


def test_a_program_runs_unchanged(tmp_path, capsys):
    path = tmp_path / 'program.py'
    path.write_text(PROGRAM.replace('SHIFT', '0'))
    assert main([str(path), '--n', '64']) == 0
    assert 'latency True 64' in capsys.readouterr().out
    path.write_text(PROGRAM.replace('SHIFT', '1'))
    with pytest.raises(OutOfBounds):
        main(['--checks', 'all', str(path)])


def run_python(code, tmp_path, **environment):
    path = tmp_path / 'user.py'
    path.write_text(code)
    return subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_tk_interpret_reaches_the_users_own_kernels(tmp_path):
    code = PROGRAM.replace('SHIFT', '0').split('def run')[0] + (
        "x = torch.randn(8).half()\nassert torch.equal(twice(8)(x), x * 2)\nprint('ran', type(twice(8)).__name__)\n"
    )
    for first in ('import tile_kernels\n', 'import tilelang\nimport tile_kernels\n'):
        found = run_python(first + code, tmp_path, TK_INTERPRET='1', TK_CHECKS='all')
        assert found.returncode == 0, found.stderr
        assert 'ran InterpretedKernel' in found.stdout
    lazily = "import sys, tile_kernels\nprint('tilelang' in sys.modules)"
    assert run_python(lazily, tmp_path, TK_INTERPRET='1').stdout.strip() == 'False'
