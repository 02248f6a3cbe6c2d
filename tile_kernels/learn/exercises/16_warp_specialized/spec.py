"""Exercise 16: a warp-specialized product."""

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target


def _inputs(case, generator):
    """Small integers: every partial sum is exact in float32, so its order does not matter."""
    sizes = {'a': (case['m'], case['k']), 'b': (case['n'], case['k'])}
    return {name: torch.randint(-4, 5, size, generator=generator).bfloat16() for name, size in sizes.items()}


def _outputs(case):
    return {'c': ((case['m'], case['n']), torch.bfloat16)}


def _reference(case, a, b):
    return {'c': (a.double() @ b.double().T).bfloat16()}


def _products(case):
    return 2 * case['m'] * case['n'] * case['k']


@lean.condition('no barrier of the whole block in the loop')
def _no_block_barriers(facts):
    got = facts.event('block_barrier') / facts.blocks
    return None if got <= 2 else f'a block has {got:.0f} barriers of all its threads for {facts.case["k"] // 64} steps'


@lean.condition('TMA loads the tiles')
def _tma(facts):
    others = [a for a in facts.accesses('global', writes=False) if a.how != 'tma_load']
    return f'threads load {others[0].buffer} by themselves{lean.where(others[0])}' if others else None


@lean.condition('a tile is loaded once for 128 rows and 256 columns')
def _traffic(facts):
    case = facts.case
    least = 2 * case['k'] * (case['m'] * case['n'] // 256 + case['m'] * case['n'] // 128)
    got = facts.requested(writes=False)
    return None if got <= 1.05 * least else f'{got / 1e9:.1f} GB are loaded, tiles of 128 x 256 need {least / 1e9:.1f}'


def _case(label, m, n, k):
    return Case(label, {'m': m, 'n': n, 'k': k}, {})


LARGE = _case('8192 x 8192 x 8192', 8192, 8192, 8192)

EXERCISE = Exercise(
    number=16,
    name='warp_specialized',
    title='a product in which some warps load and others multiply',
    level='expert',
    entry='product',
    launches=(('a', 'b', 'c'),),
    inputs=_inputs,
    outputs=_outputs,
    reference=_reference,
    cases=(
        _case('whole tiles, more steps than the ring has tiles', 128, 256, 640),
        _case('tails in m, n and k', 130, 72, 136),
        _case('one step', 64, 64, 64),
        _case('one row', 1, 8, 8),
    ),
    lean=(_no_block_barriers, _tma, lean.tensor_cores(_products), _traffic),
    lean_case=_case('4096 x 4096 x 4096', 4096, 4096, 4096),
    target=Target('tflops', 600, LARGE, flops=2 * 8192**3),
    ours='gemm.gemm',
    ours_case={'m': 4096, 'n': 4096, 'k': 4096, 'dtype': torch.bfloat16},
    devices=('h200',),
    bug='a phase that is off by one',
    docs='interpreter.md#deadlock',
)
