"""Exercise 14: causal attention."""

import math

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target


def _inputs(case, generator):
    shape = (case['batch'], case['heads'], case['seq'], case['dim'])
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    if case.sizes.get('special'):
        k = k * 20 - 10 * q  # sharp rows, and a first tile with large negative scores
    return {'q': q.bfloat16(), 'k': k.bfloat16(), 'v': v.bfloat16()}


def _outputs(case):
    return {'o': ((case['batch'], case['heads'], case['seq'], case['dim']), torch.bfloat16)}


def _reference(case, q, k, v):
    scores = q.double() @ k.double().mT / math.sqrt(case['dim'])
    hidden = torch.ones(case['seq'], case['seq'], dtype=torch.bool).triu(1)
    return {'o': scores.masked_fill(hidden, -math.inf).softmax(-1) @ v.double()}


def _bound(case, name, expected):
    """Probabilities and outputs have the 8 bits of bfloat16."""
    return 2**-7 * (1 + expected.abs())


def _products(case):
    """Operations of both products, for the scores that are not masked."""
    return 2 * case['batch'] * case['heads'] * case['seq'] ** 2 * case['dim']


@lean.condition('masked tiles are skipped')
def _skips(facts):
    done = sum(sum(counts.flops.values()) for counts in facts.launches) / _products(facts.case)
    return None if done <= 1.15 else f'the products take {done:.3g} times the operations below the diagonal'


@lean.condition('a tile of 64 queries or more reads the keys up to its own once')
def _reads_once(facts):
    tiles = facts.case['seq'] / 64
    for name in ('k', 'v'):
        times = facts.requested(name, False) / facts.sizes[name] / tiles
        if times > 0.6:
            return f'a tile of 64 queries reads {times:.3g} of {name}, half of it is enough'
    return None


def _case(label, batch, heads, seq, dim, **special):
    return Case(label, {'batch': batch, 'heads': heads, 'seq': seq, 'dim': dim}, special)


EXERCISE = Exercise(
    number=14,
    name='attention',
    title='attention with a causal mask',
    level='expert',
    entry='attention',
    launches=(('q', 'k', 'v', 'o'),),
    inputs=_inputs,
    outputs=_outputs,
    reference=_reference,
    bound=_bound,
    cases=(
        _case('whole tiles', 1, 2, 128, 64),
        _case('a tail and large scores', 2, 1, 150, 64, special=True),
        _case('one row in the last tile', 1, 1, 129, 32),
        _case('one token', 1, 1, 1, 64),
        _case('many tiles', 1, 1, 520, 32),
    ),
    lean=(_skips, _reads_once, lean.tensor_cores(_products)),
    lean_case=_case('2048 tokens, a head of 128', 1, 1, 2048, 128),
    target=Target('tflops', 350, _case('8192 tokens', 4, 32, 8192, 128), flops=2 * 4 * 32 * 8192**2 * 128),
    ours='attention.attend',
    ours_case={
        'queries': 2048,
        'keys': 2048,
        'heads': (1, 1),
        'dims': (128, 128),
        'batch': 1,
        'band': (-1, 0),
    },
    devices=('h200',),
    bug='right as long as one tile of keys is enough',
    docs='interpreter.md#which-branches-ran',
)
