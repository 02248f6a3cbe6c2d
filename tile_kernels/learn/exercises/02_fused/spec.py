"""Exercise 02: an addition, a ReLU and a product with a number of the row, in one pass."""

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target


def _inputs(case, generator):
    shape = case['rows'], case['cols']
    return {
        'a': torch.randn(shape, generator=generator),
        'b': torch.randn(shape, generator=generator),
        'scale': torch.randn(case['rows'], generator=generator),
    }


def _outputs(case):
    return {'y': ((case['rows'], case['cols']), torch.float32)}


def _reference(case, a, b, scale):
    return {'y': torch.relu(a + b) * scale[:, None]}


def _case(label, rows, cols):
    return Case(label, {'cols': cols}, {'rows': rows})


EXERCISE = Exercise(
    number=2,
    name='fused',
    title='relu(a + b) * scale in one kernel',
    level='beginner',
    entry='fused',
    launches=(('a', 'b', 'scale', 'y'),),
    inputs=_inputs,
    outputs=_outputs,
    reference=_reference,
    cases=(
        _case('whole tiles', 8, 512),
        _case('a tail in rows', 6, 256),
        _case('a tail in columns', 8, 300),
        _case('tails in both', 5, 259),
        _case('one number', 1, 1),
    ),
    lean=(lean.traffic(a='read', b='read', scale='read', y='write'), lean.wide(16), lean.whole_sectors()),
    lean_case=_case('4096 x 4096', 4096, 4096),
    target=Target('copy', 95, _case('16384 x 8192', 16384, 8192)),
    ours='activation.swiglu_forward',
    strict=True,
    bug='some columns of the result are never computed',
    docs='layouts-and-lint.md#lint',
)
