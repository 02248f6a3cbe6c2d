"""Every rule of the linter finds its mistake at the right line, and is silent about the corrected kernel."""

import re
from pathlib import Path

import pytest
import tilelang.language as T

from tests.sight import lint_kernels as kernels
from tile_kernels.core import nvcc
from tile_kernels.core.errors import CompileError, UnsupportedError
from tile_kernels.sight import lint
from tile_kernels.sight.lint import Findings
from tile_kernels.sight.rules import RULES

COMPILED = list(RULES['compiled'])
SOURCE = Path(kernels.__file__)
MARKS = {
    rule: number
    for number, text in enumerate(SOURCE.read_text().splitlines(), 1)
    if '# <-' in text
    for rule in text.split('# <-')[1].split()
}

#: For each rule the broken kernel, the corrected one, and values of dynamic extents.
CASES = {
    'narrow-access': (
        lambda: kernels.strided_row(False),
        lambda: kernels.strided_row(True),
        {'rows': 264, 'stride': 2048},
    ),
    'scattered-access': (lambda: kernels.columns(True), lambda: kernels.columns(False), {}),
    'bank-conflict': (lambda: kernels.turned_tile(0), lambda: kernels.turned_tile(1), {}),
    'int64-index': (lambda: kernels.long_loop(False), lambda: kernels.long_loop(True), {'rows': 64}),
    'missing-fence': (lambda: kernels.staged_product(False), lambda: kernels.staged_product(True), {}),
    'lost-guard': (lambda: kernels.guarded_cast(False), lambda: kernels.guarded_cast(True), {'rows': 60}),
    'store-not-waited': (lambda: kernels.stored_and_read(False), lambda: kernels.stored_and_read(True), {}),
    'shared-memory': (lambda: kernels.copy(floats=65536), kernels.copy, {}),
    'threads': (lambda: kernels.copy(threads=2048, floats=2048), kernels.copy, {}),
    'idle-tail': (lambda: kernels.copy(blocks=64), kernels.copy, {}),
    'accumulator': (lambda: kernels.product(128, 512), kernels.product, {}),
    'wgmma-width': (lambda: kernels.product(n=24), kernels.product, {}),
    'reduction-width': (lambda: kernels.row_sum(96), lambda: kernels.row_sum(128), {}),
    'dynamic-pipeline': (lambda: kernels.pipeline(T.dynamic('rows')), kernels.pipeline, {'rows': 1024}),
    'pipeline-overwrite': (lambda: kernels.pipeline(overwrite=True), kernels.pipeline, {}),
    'fragment-in-loop': (lambda: kernels.fragment_sum(False), lambda: kernels.fragment_sum(True), {}),
    'large-index': (lambda: kernels.far_element(65536), lambda: kernels.far_element(65535), {}),
}


def found_by(build, dynamic) -> Findings:
    func = build()
    names = {
        extent.name
        for buffer in func.buffer_map.values()
        for extent in [*buffer.shape, *buffer.strides]
        if hasattr(extent, 'name')
    }
    return lint(func, compile=False, **{name: value for name, value in dynamic.items() if name in names})


def test_every_rule_has_a_case():
    assert {*CASES, *COMPILED} == {name for rules in RULES.values() for name in rules}


@pytest.mark.parametrize('rule', CASES)
def test_a_rule_finds_its_mistake_at_its_line(rule):
    bad, _, dynamic = CASES[rule]
    found = [finding for finding in found_by(bad, dynamic) if finding.rule == rule]
    assert found, 'no finding'
    place = f'{SOURCE}:{MARKS[rule]}' if rule in MARKS else ''
    assert place in {finding.line for finding in found}
    assert len({finding.line for finding in found}) <= 2  # a narrow layout concerns the load and the store
    for finding in found:
        assert len(re.split(r'\s+', finding.why)) <= 25 and finding.action and rule in str(finding)


@pytest.mark.parametrize('rule', CASES)
def test_a_rule_is_silent_about_the_corrected_kernel(rule):
    _, good, dynamic = CASES[rule]
    assert rule not in [finding.rule for finding in found_by(good, dynamic)]


def test_a_load_that_lost_its_condition_is_found():
    bad, good = (found_by(lambda alone=alone: kernels.guarded_load(alone), {}) for alone in (False, True))
    assert [(f.rule, f.line) for f in bad if f.rule == 'lost-guard'] == [('lost-guard', f'{SOURCE}:{MARKS["load"]}')]
    assert 'lost-guard' not in [finding.rule for finding in good]


def test_registers_and_spills_come_from_nvcc():
    assert [finding.rule for finding in lint(kernels.crowded(8)) if finding.rule in COMPILED] == ['spills']
    found = lint(kernels.crowded(1))
    assert not [finding for finding in found if finding.rule in COMPILED] and not found.unchecked


@pytest.mark.parametrize(('registers', 'findings'), [(64, 0), (65, 1)])
def test_registers_of_all_threads_must_fit_an_sm(registers, findings, monkeypatch):
    monkeypatch.setattr(nvcc, 'resources', lambda source, arch: {'registers': registers, 'spill_stores': 0})
    found = lint(kernels.copy(threads=1024))
    assert [finding.rule for finding in found] == ['registers'] * findings


def test_what_is_not_checked_is_said(monkeypatch):
    def missing(source, arch):
        raise UnsupportedError('compiler: no CUDA toolkit found (nvcc)')

    monkeypatch.setattr(nvcc, 'resources', missing)
    found = lint(kernels.copy())
    assert found.unchecked == dict.fromkeys(COMPILED, 'compiler: no CUDA toolkit found (nvcc)')
    assert str(found) == 'no findings\nnot checked: spills, registers: compiler: no CUDA toolkit found (nvcc)'


def test_a_kernel_that_does_not_compile_for_another_reason_is_an_error():
    @T.prim_func
    def loop(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        for i in T.serial(64):
            y[i] = x[i]

    with pytest.raises(CompileError, match='outside a kernel'):
        lint(loop)
