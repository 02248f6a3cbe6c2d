"""The spaces of the library's kernels: tuning changes no bits, because what fixes the order of a sum is not tuned."""

import random
from contextlib import suppress

import pytest

from tile_kernels.core.errors import TileKernelsError
from tile_kernels.core.jit import kernels
from tile_kernels.core.knobs import knobs
from tile_kernels.core.launch import forced_config
from tile_kernels.core.registry import load_ops
from tile_kernels.interpreter import InterpreterError
from tile_kernels.testing.contract import _arguments, _outcome
from tile_kernels.testing.numeric import assert_equal
from tile_kernels.tuning.space import OpProblem, Target

OPS = load_ops()
TUNABLE = {name: kernel for name, kernel in kernels.items() if any(len(v) > 1 for v in kernel.space.values())}

#: Run without TK_FULL_TEST: kernels with sums, and ops that launch them.
SAMPLE = {
    'sinkhorn_kernel': 'mhc.sinkhorn',
    'reduce_rows_bwd_kernel': 'moe.weighted_reduce_rows_bwd',
    'post_bwd_kernel': 'mhc.post_bwd',
    'topk_gating_kernel': 'moe.topk_gating',
}


def launched(ops):
    """For each kernel the smoke case that launches it and moves most bytes: its op, case and launch."""
    found = {}
    for op in ops:
        for case in op.case_set.smoke:
            launches = op.trace_case(case)
            size = sum(made.cost.bytes for made in launches)
            for made in launches:
                if made.kernel.name in TUNABLE and size > found.get(made.kernel.name, (0,))[0]:
                    found[made.kernel.name] = size, op, case, made
    return found


@pytest.mark.parametrize('kernel', TUNABLE.values(), ids=TUNABLE)
def test_fixed_entries_are_entries_of_the_space(kernel):
    assert kernel.fixed <= kernel.space.keys()
    assert kernel.choose is not None


def test_fixed_entries_stay_as_choose_took_them():
    op = OPS['norm.norm_backward']
    problems = OpProblem.all_of(op, op.case_set.bench[0], Target.here('h200'))
    (problem,) = (p for p in problems if p.kernel_name == 'norm_backward_kernel')
    assert problem.declared == 6528 and len(problem.configs) == 12
    assert {(c['warps'], c['block_warps']) for c in problem.configs} == {
        (problem.in_force['warps'], problem.in_force['block_warps'])
    }


def others(kernel, config):
    """Configs that differ from one in one entry that is tuned."""
    free = [(name, v) for name, values in kernel.space.items() if name not in kernel.fixed for v in values]
    return [config | {name: value} for name, value in free if config[name] != value]


def outcome(op, case, kernel, config):
    with knobs(interpret=True, checks='none'), forced_config(kernel, **config):
        return _outcome(op, op.call, _arguments(op, case, 'cpu'))


@pytest.fixture(scope='module')
def cases():
    return launched(OPS.values() if knobs.full_test else [OPS[name] for name in SAMPLE.values()])


@pytest.mark.parametrize('name', sorted(TUNABLE) if knobs.full_test else SAMPLE)
def test_no_entry_that_is_tuned_changes_bits(cases, name):
    if name not in cases:
        pytest.skip('no smoke case launches it on an H200')
    _, op, case, made = cases[name]
    tried = others(made.kernel, made.config)
    if not knobs.full_test:
        tried = random.Random(name).sample(tried, min(2, len(tried)))
    expected = outcome(op, case, made.kernel, made.config)
    for config in tried:
        with suppress(TileKernelsError, InterpreterError):  # builders refuse some configs
            found = outcome(op, case, made.kernel, config)
            differing = [key for key in expected if not same(found[key], expected[key])]
            if differing:
                pytest.fail(f'{config} changes {", ".join(differing)}')


def same(x, y):
    try:
        assert_equal(x, y)
    except AssertionError:
        return False
    return True


def test_an_entry_that_fixes_the_order_of_a_sum_is_seen(cases):
    """The test above can fail: with other lanes, rows are summed in another order."""
    _, op, case, made = cases['sinkhorn_kernel']
    lanes = next(v for v in made.kernel.space['lanes'] if v != made.config['lanes'])
    expected, found = (outcome(op, case, made.kernel, made.config | extra) for extra in ({}, {'lanes': lanes}))
    assert not all(same(found[key], expected[key]) for key in expected)
