"""What users call: interpret, its report, jit functions, external functions, refusal of the unknown."""

import subprocess
import sys
import time

import pytest
import tilelang
import tilelang.language as T
import torch

from tile_kernels import interpreter
from tile_kernels.interpreter import UnsupportedConstruct, extern, interpret, interpreting, unknown_constructs


@tilelang.jit(out_idx=[-1])
def add_one(hidden):
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def add(x: T.Tensor((num_tokens, hidden), 'float32'), y: T.Tensor((num_tokens, hidden), 'float32')):
        with T.Kernel(num_tokens, threads=32) as pid:
            for j in T.Parallel(hidden):
                y[pid, j] = x[pid, j] + 1.0

    return add


@tilelang.jit
def multiply(a, b, block_m: int = 16):
    m, n = T.const('m n')
    a: T.Tensor((m, n), 'float32')
    b: T.Tensor((m, n), 'float32')
    c = T.empty((m, n), dtype='float32')
    with T.Kernel(T.ceildiv(m, block_m), threads=64) as pid:
        for i, j in T.Parallel(block_m, n):
            c[pid * block_m + i, j] = a[pid * block_m + i, j] * b[pid * block_m + i, j]
    return c


def test_jit_functions_run_unchanged_in_both_styles():
    x = torch.randn(5, 16)
    with interpreting():
        assert torch.equal(add_one(16)(x), x + 1)
        assert torch.equal(multiply(x, x), x * x)
        assert torch.equal(multiply(x[:3], x[:3], block_m=2), x[:3] * x[:3])


def test_interpreting_leaves_nothing_behind():
    implementation = type(add_one)
    before = implementation.compile, implementation.__call__, tilelang.compile
    with interpreting(checks='all'):
        kernel = tilelang.compile(add_one.get_tir(16), out_idx=[1])
        assert torch.equal(kernel(torch.zeros(2, 16)), torch.ones(2, 16))
        assert kernel.report.kernel == 'add'
    assert (implementation.compile, implementation.__call__, tilelang.compile) == before
    assert not add_one._kernel_cache


def test_a_kernel_object_brings_its_function_and_switches():
    class Compiled:
        prim_func = add_one.get_tir(8)
        pass_configs = {tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True}

    x, y = torch.randn(3, 8), torch.empty(3, 8)
    report = interpret(Compiled(), x, y)
    assert torch.equal(y, x + 1) and report.kernel == 'add' and report.seconds > 0


def test_what_is_no_kernel_is_refused():
    with pytest.raises(
        TypeError, match=r'must be a T\.prim_func or a compiled kernel, got <lambda>, which may build one'
    ):
        interpret(lambda: None, torch.ones(1))
    with pytest.raises(TypeError, match=r'got NoneType$'):
        interpret(None)


def test_unknown_checks_are_refused():
    with pytest.raises(ValueError, match='checks'):
        interpret(add_one.get_tir(8), torch.zeros(1, 8), torch.zeros(1, 8), checks='some')


def test_external_functions_with_values_and_pointers():
    @extern('test_scale_pair')
    def scale_pair(pointer, factor):
        for element in range(2):
            pointer.store(element, pointer.load(element) * factor)

    @T.prim_func
    def scaled(x: T.Tensor((8, 2), 'float32')):
        with T.Kernel(1, threads=8):
            thread = T.get_thread_binding()
            T.call_extern('handle', 'test_scale_pair', T.address_of(x[thread, 0]), T.cast(thread, 'float32'))

    x = torch.randn(8, 2)
    want = x * torch.arange(8.0)[:, None]
    interpret(scaled, x)
    assert torch.equal(x, want)


def test_unknown_external_functions_are_named_with_their_line():
    @T.prim_func
    def mystery(x: T.Tensor((8,), 'float32')):
        with T.Kernel(1, threads=8):
            thread = T.get_thread_binding()
            x[thread] = T.call_extern('float32', 'no_such_function', x[thread])

    with pytest.raises(UnsupportedConstruct, match='no_such_function') as caught:
        interpret(mystery, torch.zeros(8))
    assert caught.value.line and caught.value.filename == __file__


def test_unsupported_operators_are_named_with_their_line():
    @T.prim_func
    def described(x: T.Tensor((8,), 'int32')):
        with T.Kernel(1, threads=8):
            x[T.get_thread_binding()] = T.call_intrin('int32', tilelang.tvm.ir.Op.get('tl.create_tma_descriptor'), 0)

    with pytest.raises(UnsupportedConstruct, match='create_tma_descriptor') as caught:
        interpret(described, torch.zeros(8, dtype=torch.int32))
    assert caught.value.line
    assert unknown_constructs(described) == ['operator tl.create_tma_descriptor']


def test_known_kernels_have_no_unknown_constructs():
    assert unknown_constructs(add_one.get_tir(8)) == []


def test_importing_the_interpreter_does_not_import_tilelang():
    code = 'import sys, tile_kernels.interpreter; sys.exit("tilelang" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0


def test_public_names_exist():
    assert all(hasattr(interpreter, name) for name in interpreter.__all__)


def gemm_kernel(size, block=128, block_k=32):
    @T.prim_func
    def gemm(
        a: T.Tensor((size, size), 'float16'), b: T.Tensor((size, size), 'float16'), c: T.Tensor((size, size), 'float16')
    ):
        with T.Kernel(size // block, size // block, threads=128) as (bx, by):
            a_shared, b_shared = (
                T.alloc_shared((block, block_k), 'float16'),
                T.alloc_shared((block_k, block), 'float16'),
            )
            c_frag = T.alloc_fragment((block, block), 'float32')
            T.clear(c_frag)
            for k in T.Pipelined(size // block_k, num_stages=3):
                T.copy(a[by * block, k * block_k], a_shared)
                T.copy(b[k * block_k, bx * block], b_shared)
                T.gemm(a_shared, b_shared, c_frag)
            T.copy(c_frag, c[by * block, bx * block])

    return gemm


def test_small_kernels_take_milliseconds():
    # The aims are 50 ms to build and 100 ms to run, in processor time of one thread: a busy machine does not matter.
    kernel = gemm_kernel(256)
    a, b, c = torch.randn(256, 256).half(), torch.randn(256, 256).half(), torch.empty(256, 256).half()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(4):
            started = time.thread_time()
            interpret(kernel, a, b, c)
            times.append(time.thread_time() - started)
    finally:
        torch.set_num_threads(threads)
    assert times[0] < 1.0 and min(times[1:]) < 0.1
    torch.testing.assert_close(c, a @ b, rtol=1e-2, atol=1e-1)


def test_arguments_by_name():
    @tilelang.jit(out_idx=[2])
    def difference(size: int):
        @T.prim_func
        def kernel(x: T.Tensor((size,), 'float32'), y: T.Tensor((size,), 'float32'), z: T.Tensor((size,), 'float32')):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(size):
                    z[i] = x[i] - y[i]

        return kernel

    x, y = torch.randn(32), torch.randn(32)
    with interpreting():
        assert torch.equal(difference(size=32)(x, y=y), x - y)
        assert torch.equal(difference(size=32)(y=y, x=x), x - y)


def test_outputs_of_every_small_float_type():
    @tilelang.jit(out_idx=[1])
    def convert(dtype: str):
        @T.prim_func
        def kernel(x: T.Tensor((32,), 'float32'), y: T.Tensor((32,), dtype)):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(32):
                    y[i] = T.cast(x[i], dtype)

        return kernel

    with interpreting():
        for dtype in ('float8_e4m3', 'float8_e4m3fn', 'float8_e5m2'):
            assert convert(dtype)(torch.ones(32)).float().tolist() == [1.0] * 32


def test_lowering_is_a_check_of_its_own():
    def product(left, right):
        @T.prim_func
        def kernel(x: T.Tensor((64, 64), 'float32'), y: T.Tensor((64,), 'float32')):
            with T.Kernel(1, threads=128):
                thread = T.get_thread_binding()
                x_frag, sum_frag = T.alloc_fragment((64, 64), 'float32'), T.alloc_fragment((64,), 'float32')
                T.copy(x, x_frag)
                T.reduce_sum(x_frag, sum_frag, dim=1)
                if left:
                    T.copy(sum_frag, y)
                elif thread < 64:
                    y[thread] = sum_frag[thread]
                if right:
                    tile = T.alloc_shared((right, 1024), 'float32')
                    T.clear(tile)

        return kernel

    x, y = torch.randn(64, 64), torch.empty(64)
    interpret(product(True, 0), x, y, lower=True)
    interpret(product(True, 40), x, y, lower='sm_90a')
    with pytest.raises(interpreter.ResourceLimit, match='163840 bytes of shared memory, and sm_120a has 101376'):
        interpret(product(True, 40), x, y, lower='sm_120a')
    with pytest.raises(interpreter.LoweringFailed, match=r'does not lower it for sm_90a: .*no available layout'):
        interpret(product(False, 0), x, y, lower=True)


def test_atomics_on_an_output_that_nobody_initialised():
    @tilelang.jit
    def histogram(x):
        size = T.const('size')
        x: T.Tensor((size,), 'int32')
        y = T.empty((4,), 'int32')
        with T.Kernel(1, threads=size):
            T.atomic_add(y[x[T.get_thread_binding()]], 1)
        return y

    with interpreting(), pytest.raises(interpreter.UninitializedRead, match='y is read at index'):
        histogram(torch.zeros(64, dtype=torch.int32))
