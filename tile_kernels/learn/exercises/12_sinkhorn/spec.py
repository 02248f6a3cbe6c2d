"""Exercise 12: Sinkhorn in registers."""

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target

EPS = 1e-6


def _inputs(case, generator):
    n = case['n']
    x = torch.randn(case['matrices'], n, n, generator=generator)
    if case.sizes.get('special'):
        x[0] = 90.0
        x[1] = -90.0
        x[2] = x[2] + 1000.0
        x[3] = torch.eye(n) * 80.0
    return {'x': x}


def _outputs(case):
    return {'p': ((case['matrices'], case['n'], case['n']), torch.float32)}


def _reference(case, x):
    p = (x - x.amax((-2, -1), keepdim=True)).double().exp()
    for _ in range(case['rounds']):
        p = p / (p.sum(-1, keepdim=True) + EPS)
        p = p / (p.sum(-2, keepdim=True) + EPS)
    return {'p': p.float()}


def _bound(case, name, expected):
    return 2e-6 + 1e-5 * expected.abs()


def _case(label, matrices, n, rounds=20, **special):
    return Case(label, {'n': n, 'rounds': rounds}, {'matrices': matrices, **special})


LARGE = _case('262144 matrices of 4 x 4', 262144, 4)

EXERCISE = Exercise(
    number=12,
    name='sinkhorn',
    title='make many small matrices doubly stochastic',
    level='expert',
    entry='sinkhorn',
    launches=(('x', 'p'),),
    inputs=_inputs,
    outputs=_outputs,
    reference=_reference,
    bound=_bound,
    cases=(
        _case('whole blocks', 64, 4),
        _case('a tail in matrices', 33, 4),
        _case('large and equal numbers', 5, 4, special=True),
        _case('rows of 16 numbers', 3, 16),
        _case('rows of 8 numbers', 17, 8),
        _case('one matrix of 2 x 2', 1, 2),
        _case('one round', 32, 4, rounds=1),
    ),
    lean=(lean.no_shared(), lean.traffic(x='read', p='write'), lean.wide(16)),
    lean_case=LARGE,
    target=Target('us', 4, _case('4096 matrices of 4 x 4', 4096, 4)),
    ours='mhc.sinkhorn',
    ours_case={'lead': (262144,), 'shape': (4, 4), 'repeat': 20},
    bug='matrices that mix with their neighbors',
    docs='writing-an-op.md#numerics',
)
