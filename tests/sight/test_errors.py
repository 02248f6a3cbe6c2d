"""Recorded error texts of TileLang, nvcc and CUDA, and what is said about them."""

import io
import json
import linecache
import re
from pathlib import Path

import pytest
import tilelang.language as T

from tests.sight import lint_kernels as kernels
from tests.sight.matmul import matmul
from tile_kernels.cli.main import main
from tile_kernels.core import diagnoses, nvcc
from tile_kernels.core.errors import ArgumentError, KernelError
from tile_kernels.core.nvcc import explain, lower
from tile_kernels.sight.errors import explain_error, explaining

RECORDED = json.loads((Path(__file__).parent / 'error_texts.json').read_text())


def test_enough_texts_come_from_the_compilers_themselves():
    assert sum(row['origin'].startswith('TileLang') for row in RECORDED) >= 25


@pytest.mark.parametrize('row', RECORDED, ids=lambda row: row['name'])
def test_a_recorded_text_gets_its_diagnosis(row):
    found = explain_error(row['text'])
    assert found.known and row['says'] in str(found) and found.quoted in row['text']
    assert found.cause in explain(row['text']) and '{' not in str(found)


def test_unknown_text_passes_through_unchanged():
    text = 'line one\nnobody has seen this\n'
    found = explain_error(text)
    assert (str(found), found.action, found.line, found.quoted) == (text, '', None, text)
    with pytest.raises(ZeroDivisionError), explaining():
        _ = 1 / 0


def test_the_line_is_that_of_the_text():
    row = next(row for row in RECORDED if row['name'] == 'copy_shape')
    assert explain_error(row['text']).line == 'kernel.py:188'
    assert explain_error('k.cu(3): error: identifier "__nv_fp8_e4m3" is undefined').line == 'k.cu:3'


def test_explaining_raises_one_sentence_and_keeps_the_original():
    @T.prim_func
    def loop(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        for i in T.serial(64):
            y[i] = x[i]

    with (
        pytest.raises(KernelError, match=r'outside a kernel; put the loop inside `with T\.Kernel') as caught,
        explaining(),
    ):
        lower(loop, {}, 'sm_90a')
    assert 'Memory verification' in str(caught.value.__cause__)


def test_explaining_leaves_our_own_errors_alone():
    with pytest.raises(ArgumentError, match='no kernel image'), explaining():
        raise ArgumentError('no kernel image is available')


def test_the_line_of_an_exception_is_in_the_file_of_the_user():
    try:
        raise RuntimeError('CUDA error: misaligned address')
    except RuntimeError as error:
        assert explain_error(error).line.startswith(f'{__file__}:')


def test_every_row_explains_a_recorded_text():
    explained = {id(diagnoses.find(row['text'])[0]) for row in RECORDED}
    unused = [row.pattern for row in diagnoses.ROWS if id(row) not in explained]
    assert unused == ['packed ABI constraint']  # the values are missing from none of the recorded texts


def test_the_command_explains_a_file_and_the_input(tmp_path, capsys, monkeypatch):
    file = tmp_path / 'error.txt'
    file.write_text('CUDA error: misaligned address')
    assert main(['explain', '--error', str(file)]) == 0
    assert 'no multiple of 16; check strides' in capsys.readouterr().out
    monkeypatch.setattr('sys.stdin', io.StringIO('unknown'))
    assert main(['explain', '--error', '-']) == 0
    assert capsys.readouterr().out == 'unknown\n'


@pytest.mark.parametrize('words', [[], ['moe.topk_gate', '--error', '-'], ['--error', '/does/not/exist']])
def test_the_command_refuses_other_arguments_in_a_sentence(words, capsys):
    assert main(['explain', *words]) == 1
    assert capsys.readouterr().err.startswith('tile-kernels explain: ')


@pytest.mark.parametrize('name', ['threads_90', 'no_warp_partition90', 'wgmma_partition'])
def test_the_nearest_tiles_are_legal(name):
    row = next(row for row in RECORDED if row['name'] == name)
    threads = 32 * int(re.search(r'by (\d+) warps', row['text'])[1])
    for m, n in re.findall(r'(\d+) x (\d+)', explain_error(row['text']).action):
        lower(kernels.product(int(m), int(n), threads), {}, 'sm_90a')


def test_a_known_kernel_names_its_buffers_by_size():
    text = 'Failed to set the allowed dynamic shared memory size to 294912'
    found = explain_error(text, matmul, block_M=256, block_N=128)
    assert found.cause.endswith('(A_shared 96 KB, B_shared 48 KB)') and 'asks for 288 KB' in found.cause
    assert explain_error(text).cause in found.cause.replace(' (A_shared 96 KB, B_shared 48 KB)', '')


def test_a_known_kernel_names_its_registers(monkeypatch):
    monkeypatch.setattr(nvcc, 'resources', lambda source, arch: {'registers': 96})
    found = explain_error('too many resources requested for launch', kernels.copy(threads=1024))
    assert '(96 registers x 1024 threads = 98304)' in found.cause


def test_a_known_kernel_names_the_access_that_is_not_aligned():
    func, line = kernels.strided_row(True), 16
    assert 'T.copy(x[row' in linecache.getline(kernels.__file__, line)
    found = explain_error('CUDA error: misaligned address', func, rows=8, stride=2052)
    assert '(16 bytes of x)' in found.cause and found.line == f'{kernels.__file__}:{line}'
    assert explain_error('CUDA error: misaligned address', func, rows=8, stride=2048).line is None
    with pytest.raises(KernelError, match=r'16 bytes of x.*lint_kernels\.py:16'), explaining(func, rows=8, stride=2052):
        raise RuntimeError('CUDA error: misaligned address')


def test_print_of_an_f_string_is_refused_with_the_right_form():
    def build():
        @T.prim_func
        def kernel(c: T.Tensor((64, 64), 'float32')):
            with T.Kernel(1, threads=128):
                T.print(f'c[0, 0] = {c[0, 0]}')

        return kernel

    with pytest.raises(KernelError, match=r"write T\.print\(C\[0, 0\], msg='C\[0, 0\]'\)"), explaining():
        build()
