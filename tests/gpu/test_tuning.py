"""Tuning and profiling on a GPU: measured configs, a hang that costs one of them, sums of device time."""

import pytest
import tilelang
import torch

import tile_kernels
from tests.tuning.kernels import doubled, matmul
from tile_kernels import profiler
from tile_kernels.core import tuned
from tile_kernels.core.knobs import knobs
from tile_kernels.quant import per_token_cast
from tile_kernels.testing.bench import benchmark_kernel

if not torch.cuda.is_available():
    pytest.skip('needs a CUDA device', allow_module_level=True)


@pytest.fixture(autouse=True)
def own_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, 'SHIPPED', tmp_path / 'shipped')
    before = dict(knobs.of_process)
    knobs.cache_dir = tmp_path / 'cache'
    yield
    knobs.of_process.update(before)
    knobs.touch()


def test_a_users_kernel_is_measured_and_stored():
    space = dict(block_M=(64, 128), block_N=(64, 128), num_stages=(2, 3), threads=(128,))
    arguments = dict(args=(1024, 1024, 1024), space=space, reference=lambda a, b: (a @ b).relu(), progress=False)
    best = tile_kernels.tune(matmul, **arguments)
    assert best.us is not None and best.stored
    a, b = (torch.randn(1024, 1024, device='cuda', dtype=torch.float16) for _ in range(2))
    torch.testing.assert_close(best.kernel(a, b), (a @ b).relu(), rtol=1e-2, atol=1e-1)
    assert tile_kernels.tune(matmul, **arguments).config == best.config


def test_planted_mistakes_are_rejected():
    faults = ('none', 'off by one tile', 'unwritten tail', 'NaN', 'hang')
    best = tile_kernels.tune(
        doubled, (1 << 16,), space=dict(fault=faults), reference=lambda x: 2 * x, store='none', progress=False
    )
    problems = {trial.config['fault']: trial.problem for trial in best.trials}
    assert best.config == {'fault': 'none'} and all(problems[fault] for fault in faults[1:])
    assert 'took longer than' in problems['hang']


def test_an_op_is_tuned():
    found = tile_kernels.tune('quant.per_token_cast', cases=[dict(num_tokens=4096, hidden=7168)], progress=False)
    (best,) = found
    assert not found.failures and best.us > 0 and best.gain >= 0.98


def test_device_time_agrees_with_events():
    x = torch.randn(8192, 7168, dtype=torch.bfloat16, device='cuda')
    for _ in range(3):
        per_token_cast(x, 'e4m3_1x128_f32')
    with profiler.profile() as found:
        for _ in range(20):
            per_token_cast(x, 'e4m3_1x128_f32')
    (row,) = (record for record in found.records if record.name == 'quant.per_token_cast')
    timed = benchmark_kernel(per_token_cast, (x, 'e4m3_1x128_f32'))
    assert row.calls == 20 and row.gbps and row.floor_us <= row.device_us
    assert row.mean_us == pytest.approx(timed.median * 1e3, rel=0.1)  # its L2 is warm, and no event is in between


def test_a_profiler_of_tilelang_times():
    tile_kernels.extend_tilelang()
    try:
        kernel = tilelang.jit(out_idx=[-1], options={'fastMath': True, 'maxRegisters': 128})(matmul.func.orig_func)
        built = kernel(1024, 1024, 1024)
        assert built.get_profiler(tensor_supply_type=tilelang.TensorSupplyType.Normal).do_bench() > 0
    finally:
        tile_kernels.extend_tilelang(undo=True)
