"""Exercise 04: softmax."""

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target


def _inputs(case, generator):
    x = torch.randn(case['rows'], case['cols'], generator=generator).half()
    if case.sizes.get('special'):
        x[0] *= 15000  # exp overflows without the maximum
        x[1, ::3] = -torch.inf
        x[2] = -torch.inf
        x[3, 7] = torch.nan
        x[4] -= 1000
        x[5] = 0  # ties
        x[6, 11] = torch.inf
    return {'x': x}


def _outputs(case):
    return {'y': ((case['rows'], case['cols']), torch.float16)}


def _reference(case, x):
    return {'y': torch.softmax(x.double(), 1).half()}


def _bound(case, name, expected):
    """Half of a step of float16 for the rounding, and as much again for sums and exponentials."""
    return expected.double().abs() * 2.0**-10 + 2.0**-24


def _case(label, rows, cols, **more):
    return Case(label, {'cols': cols}, {'rows': rows, **more})


EXERCISE = Exercise(
    number=4,
    name='softmax',
    title='softmax of every row',
    level='beginner',
    entry='softmax',
    launches=(('x', 'y'),),
    inputs=_inputs,
    outputs=_outputs,
    reference=_reference,
    bound=_bound,
    cases=(
        _case('whole tiles', 3, 2048),
        _case('a tail in columns', 2, 1500),
        _case('large numbers, -inf, NaN and ties', 7, 40, special=True),
        _case('a long row', 1, 8200),
        _case('one number', 1, 1),
    ),
    lean=(lean.traffic(x='read', y='write'), lean.wide(16), lean.whole_sectors()),
    lean_case=_case('8192 x 8192', 8192, 8192),
    target=Target('copy', 93, _case('32768 x 8192', 32768, 8192)),
    ours='mhc.sinkhorn',
    bug='rows of very negative numbers become NaN',
    docs='writing-an-op.md#numerics',
)
