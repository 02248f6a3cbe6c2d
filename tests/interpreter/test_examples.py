"""Every example program gives PyTorch's answer by interpreter, lowers for Hopper, and agrees with the GPU."""

import importlib
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / 'examples'
sys.path.insert(0, str(EXAMPLES))

from _run import run_compiled, run_interpreted, verify

# One shape per code path: tails in every extent, single tiles, single rows, more blocks than one.
SHAPES = {
    'gemm_pipelined': [{}, {'m': 1, 'n': 8, 'k': 8}, {'m': 64, 'n': 128, 'k': 160}],
    'ws_gemm': [{}, {'m': 64, 'n': 128, 'k': 64}],
    'cluster_gemm': [{}, {'m': 256, 'n': 64, 'k': 64}],
    'fp8_gemm': [{}, {'m': 64, 'n': 128, 'k': 128}, {'m': 7, 'n': 256, 'k': 512}],
    'causal_attention': [{}, {'seq': 64}, {'batch': 2, 'num_heads': 1, 'seq': 1, 'head_dim': 32}],
    'softmax': [{}, {'num_tokens': 1, 'hidden': 1}, {'num_tokens': 3, 'hidden': 2048}],
    'histogram_atomics': [{}, {'num_ids': 1, 'num_bins': 1}, {'num_ids': 2048, 'num_bins': 128}],
    'warp_topk': [{}, {'num_rows': 1, 'num_columns': 32, 'k': 32}, {'num_rows': 4, 'num_columns': 64, 'k': 1}],
    'warp_scan': [{}, {'num_rows': 1, 'length': 1}, {'num_rows': 2, 'length': 256}],
    'sinkhorn': [{}, {'num_matrices': 1, 'size': 16, 'num_iters': 1}],
}
#: Examples of layers, without a kernel of their own.
PROGRAMS = {'quantize_model'}
CASES = [
    pytest.param(name, shape, id='-'.join([name, *(f'{key}={value}' for key, value in shape.items())]))
    for name, shapes in SHAPES.items()
    for shape in shapes
]


def test_every_example_is_listed():
    found = {path.stem for path in EXAMPLES.glob('[!_]*.py') if '\ndef example(' in path.read_text()}
    assert found == set(SHAPES)  # programs without a kernel of their own are run by the tests of their family


@pytest.mark.parametrize('name', sorted(PROGRAMS))
def test_programs_run(name, capsys):
    runpy.run_path(str(EXAMPLES / f'{name}.py'), run_name='__main__')
    assert capsys.readouterr().out.startswith(f'{name}: ')


@pytest.mark.parametrize(('name', 'shape'), CASES)
def test_interpreter_agrees_with_pytorch(name, shape):
    example = importlib.import_module(name).example(**shape)
    verify(name, run_interpreted(example), example.expected, example.tolerance)


@pytest.mark.parametrize('name', SHAPES)
def test_runs_as_a_script(name, capsys):
    runpy.run_path(str(EXAMPLES / f'{name}.py'), run_name='__main__')
    assert capsys.readouterr().out.startswith(f'{name} interpreter vs PyTorch: ')


@pytest.mark.parametrize('name', SHAPES)
def test_lowers_for_hopper(name):
    import tilelang
    from tilelang import tvm

    example = importlib.import_module(name).example()
    target = tvm.target.Target({'kind': 'cuda', 'arch': 'sm_90a'})
    with target, tvm.transform.PassContext(opt_level=3, config=dict(example.pass_configs)):
        source = tilelang.lower(example.kernel, target=target).kernel_source
    assert '__global__' in source


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize(('name', 'shape'), CASES)
def test_gpu_agrees_with_interpreter(name, shape):
    example = importlib.import_module(name).example(**shape)
    compiled = run_compiled(example)
    verify(name, compiled, example.expected, example.tolerance)
    verify(name, compiled, run_interpreted(example), 2 * example.tolerance)
