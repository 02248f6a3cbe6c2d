"""Exercise 01: a copy."""

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target


def _inputs(case, generator):
    return {'x': torch.randn(case['n'], generator=generator)}


def _outputs(case):
    return {'y': ((case['n'],), torch.float32)}


def _reference(case, x):
    return {'y': x.clone()}


LARGE = Case('64 MB', {}, {'n': 1 << 24})

EXERCISE = Exercise(
    number=1,
    name='copy',
    title='copy a vector of any length',
    level='beginner',
    entry='copy',
    launches=(('x', 'y'),),
    inputs=_inputs,
    outputs=_outputs,
    reference=_reference,
    cases=(
        Case('two whole tiles', {}, {'n': 2048}),
        Case('a tail of one number', {}, {'n': 2049}),
        Case('less than one tile', {}, {'n': 1000}),
        Case('a tile and a long tail', {}, {'n': 2047}),
        Case('one number', {}, {'n': 1}),
    ),
    lean=(lean.traffic(x='read', y='write'), lean.wide(16), lean.whole_sectors()),
    lean_case=LARGE,
    target=Target('copy', 97, Case('1 GB', {}, {'n': 1 << 28})),
    ours='moe.mask_indices_by_tp',
    strict=True,
    docs='writing-an-op.md#loads-and-stores',
)
