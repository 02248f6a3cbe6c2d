"""Exercise 03: row sums."""

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target


def _inputs(case, generator):
    return {'x': torch.randn(case['rows'], case['cols'], generator=generator).half()}


def _outputs(case):
    return {'y': ((case['rows'],), torch.float32)}


def _reference(case, x):
    return {'y': x.double().sum(1).float()}


def _bound(case, name, expected):
    """Any order of float32 additions stays within this; one addition in float16 does not."""
    return 2.0**-23 * (case['cols'] + 8)


def _case(label, rows, cols):
    return Case(label, {'cols': cols}, {'rows': rows})


LARGE = _case('8192 x 8192', 8192, 8192)

EXERCISE = Exercise(
    number=3,
    name='row_sums',
    title='sum every row of a matrix',
    level='beginner',
    entry='row_sums',
    launches=(('x', 'y'),),
    inputs=_inputs,
    outputs=_outputs,
    reference=_reference,
    bound=_bound,
    cases=(
        _case('two whole chunks', 6, 2048),
        _case('a tail in columns', 5, 2000),
        _case('an odd width', 2, 1027),
        _case('less than one chunk', 3, 100),
        _case('one number', 1, 1),
    ),
    lean=(
        lean.traffic(x='read', y='write'),
        lean.wide(16, 'x'),
        lean.whole_sectors(),
        lean.barriers(1, lambda case: case['rows'], 'row'),
    ),
    lean_case=LARGE,
    target=Target('copy', 95, _case('32768 x 8192', 32768, 8192)),
    ours='moe.normalize_weight',
    strict=True,
    bug='only the first row of each block is right',
    docs='writing-an-op.md#traps-of-tilelang-0115',
)
