"""Exercise 05: a transpose through shared memory."""

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target


def _inputs(case, generator):
    return {'x': torch.randn(case['batch'], case['rows'], case['cols'], generator=generator)}


def _outputs(case):
    return {'y': ((case['batch'], case['cols'], case['rows']), torch.float32)}


def _reference(case, x):
    return {'y': x.mT.contiguous()}


def _case(label, batch, rows, cols):
    return Case(label, {}, {'batch': batch, 'rows': rows, 'cols': cols})


EXERCISE = Exercise(
    number=5,
    name='transpose',
    title='transpose every matrix of a batch',
    level='beginner',
    entry='transpose',
    launches=(('x', 'y'),),
    inputs=_inputs,
    outputs=_outputs,
    reference=_reference,
    cases=(
        _case('whole tiles', 2, 64, 96),
        _case('a tail in rows', 1, 33, 64),
        _case('a tail in columns', 1, 64, 33),
        _case('tails in both', 3, 70, 41),
        _case('one column', 2, 40, 1),
        _case('one number', 1, 1, 1),
    ),
    lean=(lean.traffic(x='read', y='write'), lean.whole_sectors(1.0), lean.no_conflicts()),
    lean_case=_case('8192 x 8192', 1, 8192, 8192),
    target=Target('copy', 90, _case('4 GB', 64, 4096, 4096)),
    ours='transpose.batched_transpose',
    ours_case={'shape': (1, 8192, 8192), 'dtype': torch.float32},
    bug='a swizzle that does not spread the lanes',
    docs='layouts-and-lint.md#layouts',
)
