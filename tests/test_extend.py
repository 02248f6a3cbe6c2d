"""Call forms that guides to TileLang describe, exactly as they write them, on a CPU."""

import importlib.util
import json

import pytest
import tilelang
import tilelang as tl
import tilelang.language as T
import torch

import tile_kernels
from tile_kernels import ArgumentError, UnsupportedError
from tile_kernels.core.errors import KernelError
from tile_kernels.interpreter import interpreting
from tile_kernels.quant import per_token_cast

NAMES = [
    'tilelang.profiler.start',
    'tilelang.profiler.stop',
    'tilelang.profiler.summary',
    'tilelang.utils.plot_layout',
    'tilelang.jit',
    'torch.profiler',
]


@pytest.fixture(autouse=True)
def extended():
    assert tile_kernels.extend_tilelang() == NAMES
    yield
    assert tile_kernels.extend_tilelang(undo=True) == NAMES


def add(n, block=32):
    @T.prim_func
    def adding(a: T.Tensor((n,), 'float32'), b: T.Tensor((n,), 'float32'), c: T.Tensor((n,), 'float32')):
        with T.Kernel(T.ceildiv(n, block), threads=32) as pid:
            for i in T.Parallel(block):
                c[pid * block + i] = a[pid * block + i] + b[pid * block + i]

    return adding


@pytest.fixture
def kernel():
    return tilelang.jit(target='cpu', out_idx=[-1])(add)(64)


def test_it_is_idempotent_and_can_be_undone():
    jit, start = tilelang.jit, tilelang.profiler.start
    assert tile_kernels.extend_tilelang() == NAMES
    assert tilelang.jit is jit and tilelang.profiler.start is start
    tile_kernels.extend_tilelang(undo=True)
    assert not hasattr(tilelang.profiler, 'start') and not hasattr(tilelang.utils, 'plot_layout')
    assert tilelang.jit is jit.__wrapped__ is not jit
    tile_kernels.extend_tilelang()


def test_a_name_that_tilelang_has_stays(monkeypatch):
    tile_kernels.extend_tilelang(undo=True)
    monkeypatch.setattr(tilelang.profiler, 'start', 'its own', raising=False)
    tile_kernels.extend_tilelang()
    assert tilelang.profiler.start == 'its own'
    tile_kernels.extend_tilelang(undo=True)
    assert tilelang.profiler.start == 'its own'
    monkeypatch.undo()
    tile_kernels.extend_tilelang()


def test_profiler_start_stop_summary(kernel, capsys):
    a = b = torch.ones(64)
    tilelang.profiler.start()
    c = kernel(a, b)
    tilelang.profiler.stop()
    tilelang.profiler.summary()
    assert torch.equal(c, a + b)
    assert any(line.startswith('adding ') for line in capsys.readouterr().out.splitlines())


@pytest.mark.skipif(
    importlib.util.find_spec('tile_kernels.sight.draw') is None, reason='tile_kernels.sight.draw is missing'
)
def test_plot_layout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    A = torch.empty(64, 64, dtype=torch.float16)
    from tilelang.utils import plot_layout

    plot_layout(tensor=A, blocking=(64, 64, 64), swizzle=True, save_path='memory_layout.png')
    assert (tmp_path / 'memory_layout.png').stat().st_size > 0


def test_plot_layout_is_that_of_sight(monkeypatch):
    from tilelang.utils import plot_layout

    seen = {}
    monkeypatch.setattr(tile_kernels.sight, 'plot_layout', lambda **kwargs: seen.update(kwargs), raising=False)
    plot_layout(tensor='A', blocking=(64, 64, 64), swizzle=True, save_path='memory_layout.png')
    assert seen == dict(tensor='A', blocking=(64, 64, 64), swizzle=True, save_path='memory_layout.png')


def test_options_of_jit():
    @tl.jit(target="cuda", options={"fastMath": True, "maxRegisters": 128})  # fmt: skip
    def exponential(A, block: int = 32):
        n = T.const('n')
        A: T.Tensor((n,), 'float32')
        B = T.empty((n,), 'float32')
        with T.Kernel(T.ceildiv(n, block), threads=32) as pid:
            for i in T.Parallel(block):
                B[pid * block + i] = T.exp(A[pid * block + i])
        return B

    assert exponential.pass_configs == {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}
    assert exponential.compile_flags == ['-maxrregcount=128'] and exponential.target == 'cuda'
    with interpreting():
        assert torch.equal(exponential(torch.zeros(64)), torch.ones(64))


def test_options_join_those_that_are_given():
    made = tl.jit(
        options={'maxRegisters': 64},
        pass_configs={'tl.disable_tma_lower': True},
        compile_flags='-lineinfo',
        out_idx=[-1],
    )(add)
    assert made.compile_flags == ['-lineinfo', '-maxrregcount=64'] and made.out_idx == [-1]
    assert made.pass_configs == {'tl.disable_tma_lower': True}
    plain = tl.jit(add)
    assert plain.pass_configs is None and plain.compile_flags is None


@pytest.mark.parametrize('options', [{'fast': True}, {'fastMath': 1}, {'maxRegisters': 1000}, {'maxRegisters': '128'}])
def test_unknown_options_are_one_sentence(options):
    ((name, value),) = options.items()
    known = r'options are fastMath \(True or False\) and maxRegisters \(16 to 255\)'
    with pytest.raises(ArgumentError, match=rf'^tilelang\.jit: {known}, got {name}={value!r}$'):
        tl.jit(options=options)


def test_target_cpu_is_the_interpreter(kernel):
    @tilelang.jit(target="cpu")  # fmt: skip
    def own(n):
        return add(n)

    c = torch.empty(64)
    own(64)(torch.ones(64), torch.ones(64), c)
    assert torch.equal(c, torch.full((64,), 2.0))
    assert isinstance(kernel, tilelang.JITKernel) and kernel.execution_backend == 'interpreter'


def test_get_profiler(kernel):
    made = kernel.get_profiler(tensor_supply_type=tilelang.TensorSupplyType.Normal)
    made.assert_allclose(lambda a, b: a + b, rtol=1e-6, atol=1e-6)
    with pytest.raises(AssertionError):
        made.assert_allclose(lambda a, b: a - b, rtol=1e-6, atol=1e-6)
    if torch.cuda.is_available():
        return  # tests/gpu has it
    with pytest.raises(UnsupportedError, match=r'there is no GPU.*tile_kernels\.sight\.predict\(kernel\)'):
        kernel.get_profiler(tensor_supply_type=tilelang.TensorSupplyType.Normal).do_bench()


def test_torch_profiler_names_our_slices(tmp_path):
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        per_token_cast(x, 'e4m3_1x128_f32')
    prof.export_chrome_trace(str(tmp_path / 'trace.json'))
    names = [event.get('name') for event in json.loads((tmp_path / 'trace.json').read_text())['traceEvents']]
    assert names.count('quant.per_token_cast') == 1
    with tile_kernels.profiler.profile() as found:
        per_token_cast(x, 'e4m3_1x128_f32')
    assert [r.calls for r in found.records if r.name == 'quant.per_token_cast'] == [1]


def test_print_of_a_formatted_string_is_refused_with_the_right_form():
    @tilelang.jit(target='cpu')
    def printing(n):
        @T.prim_func
        def wrong(C: T.Tensor((n, n), 'float32')):
            with T.Kernel(1, threads=32) as _:
                T.print(f"block (0,0), C[0,0] = {C[0,0]}")  # fmt: skip

        return wrong

    with pytest.raises(KernelError, match=r"write T\.print\(C\[0, 0\], msg='C\[0, 0\]'\) \(at .*test_extend\.py:\d+\)"):
        printing(32)
