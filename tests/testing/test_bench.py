"""The timer on a CPU, its result, and the names of parameter sets. The same calls run on a GPU where there is one."""

import math
import os
import sys
import time

import pytest
import torch

from tile_kernels.core.errors import UnsupportedError
from tile_kernels.testing import bench
from tile_kernels.testing.bench import (
    BenchResult,
    benchmark_kernel,
    dtype_to_str,
    empty_suppress,
    format_ms,
    format_param_id,
    get_cast_params,
    graph_time,
    host_time,
    make_param_id,
    make_param_key,
    print_average_perf,
    suppress_stdout_stderr,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')


def test_result_derives_everything_from_times_bytes_and_flops():
    result = BenchResult(tuple(float(t) for t in range(1, 102)), num_bytes=10**9, flops=10**12, copy=25.5)
    assert (result.mean, result.median, result.p20, result.p80) == (51, 51, 21, 81)
    assert result.gbps == pytest.approx(1 / 0.051)
    assert result.tflops == pytest.approx(1 / 0.051)
    assert result.pct_of_copy == pytest.approx(50)
    assert str(result) == '51.0 ms (p20 21.0 ms, p80 81.0 ms), 20 GB/s, 19.6 TFLOP/s, 50 % of copy on cpu'
    with pytest.raises(AttributeError):
        result.num_bytes = 1


def test_what_is_unknown_is_not_printed():
    result = BenchResult((0.0231, 0.0231), num_bytes=0)
    assert result.tflops is None
    assert result.pct_of_copy is None
    assert str(result) == '23.1 us (p20 23.1 us, p80 23.1 us), 0 GB/s on cpu'


@pytest.mark.parametrize(
    ('milliseconds', 'text'),
    [(0.00231, '2.31 us'), (0.0287, '28.7 us'), (0.2871, '287 us'), (1.25, '1.25 ms'), (250.4, '250 ms')],
)
def test_times_read_well(milliseconds, text):
    assert format_ms(milliseconds) == text


def test_a_call_is_timed_by_the_wall_clock_on_a_cpu():
    result = benchmark_kernel(fn=time.sleep, args=(0.005,), warmup=1, rep=30, device='cpu')
    assert 5 <= result.p20 <= result.median <= result.p80
    assert 5 <= len(result.times) <= 6
    assert result.num_bytes == 0
    assert result.pct_of_copy is None


def test_bytes_come_from_arguments_and_result_and_copy_is_measured():
    x = torch.randn(256, 256)
    result = benchmark_kernel(torch.add, (x,), {'other': x}, warmup=1, rep=2, flops=x.numel())
    assert result.num_bytes == 3 * x.numel() * 4
    assert result.device == 'cpu'
    assert result.gbps == pytest.approx(result.num_bytes / result.median / 1e6)
    assert result.pct_of_copy == pytest.approx(100 * result.copy / result.median)
    assert math.isfinite(result.tflops)
    assert benchmark_kernel(torch.add, (x, x), warmup=0, rep=0, num_bytes=8).num_bytes == 8


def test_a_copy_larger_than_the_limit_is_scaled(monkeypatch):
    copied = []
    monkeypatch.setattr(bench, 'COPY_LIMIT_BYTES', 1 << 10)
    monkeypatch.setattr(bench, '_times', lambda call, *_: copied.append(call().numel()) or [2.0])
    assert bench._copy_time(1 << 12, torch.device('cpu'), 0, 0) == 8.0
    assert copied == [64], 'a read and a write of 512 bytes'


def test_measuring_leaves_the_seed_alone():
    torch.manual_seed(3)
    benchmark_kernel(torch.neg, (torch.ones(8),), warmup=0, rep=0)
    after = torch.rand(())
    torch.manual_seed(3)
    assert torch.rand(()) == after


def test_what_is_timed_allocates_plain_memory():
    seen = []

    def call():
        seen.append(torch.utils.deterministic.fill_uninitialized_memory)

    benchmark_kernel(call, warmup=0, rep=0, device='cpu')
    host_time(call, calls=2, rep=2)
    assert len(seen) > 9
    assert not any(seen)
    assert torch.empty(3).isnan().all(), 'the fixture poisons again'


def test_host_time_is_that_of_one_call():
    assert 2 <= host_time(time.sleep, (0.002,), calls=2, rep=3) < 20


@pytest.mark.skipif(torch.cuda.is_available(), reason='a GPU is there')
def test_a_graph_needs_a_gpu():
    with pytest.raises(UnsupportedError, match='graph_time: needs a CUDA device'):
        graph_time(torch.neg, (torch.ones(8),))


@needs_gpu
def test_gpu_times_are_those_of_the_device():
    x = torch.randn(1 << 26, device='cuda')
    y = torch.empty_like(x)
    result = benchmark_kernel(y.copy_, (x,), num_bytes=2 * x.nbytes)
    assert 90 < result.pct_of_copy < 110
    slow_host = benchmark_kernel(lambda: (time.sleep(5e-4), y.copy_(x)), num_bytes=2 * x.nbytes, device='cuda')
    assert slow_host.median < 1.2 * result.median
    tiny = torch.ones(8, device='cuda')
    assert 0 < graph_time(tiny.neg) < 0.1
    assert host_time(tiny.neg) > 0


def test_dtypes_have_short_names():
    assert [dtype_to_str(d) for d in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8)] == [
        'fp32',
        'bf16',
        'e4m3',
        'e2m1',
    ]
    with pytest.raises(ValueError, match=r'got torch.int64'):
        dtype_to_str(torch.int64)


def test_parameter_sets_have_ids_and_keys():
    params = {'num_tokens': 4001, 'dtype': torch.bfloat16, 'index': torch.int64, 'block': (32, 128), 'fmt': 'e4m3'}
    assert make_param_id(params) == 'num_tokens=4001-dtype=bf16-index=int64-block=32x128-fmt=e4m3'
    assert make_param_key(params) == 'block=32x128,dtype=bf16,fmt=e4m3,index=int64,num_tokens=4001'
    assert make_param_key(dict(reversed(params.items()))) == make_param_key(params)
    assert format_param_id(params) == make_param_id(params, display=True)
    assert format_param_id(params).startswith('num_tokens=4001, dtype=bf16')
    assert make_param_id({}) == 'default'
    assert get_cast_params(params) == {'fmt': 'e4m3'}


def test_averages_are_printed_on_one_line(capsys):
    print_average_perf([BenchResult((1.0, 1.0), 10**6, copy=0.5), BenchResult((3.0, 3.0), 3 * 10**6, copy=3.0)])
    assert capsys.readouterr().out == 'average of 2: 2.00 ms, 1 GB/s, 75 % of copy\n'
    print_average_perf([])
    assert capsys.readouterr().out == ''


def test_output_is_suppressed_down_to_the_file_descriptors(capfd):
    with suppress_stdout_stderr():
        print('python')
        print('python', file=sys.stderr)
        os.write(1, b'compiler')
        os.write(2, b'compiler')
    with empty_suppress():
        os.write(1, b'kept')
    assert capfd.readouterr() == ('kept', '')
