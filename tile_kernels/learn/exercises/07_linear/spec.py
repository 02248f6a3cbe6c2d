"""Exercise 07: a matrix product on tensor cores."""

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target

#: Tiles of 128 x 128 read the operands of 4096 x 4096 results 32 times.
MOST_READS = 40


def _inputs(case, generator):
    """Small integers: every partial sum is exact in float32, so any order of summation gives the same bits."""
    a = torch.randint(-4, 5, (case['m'], case['k']), generator=generator)
    b = torch.randint(-4, 5, (case['k'], case['n']), generator=generator)
    bias = torch.randint(-20, 21, (case['n'],), generator=generator)
    return {'a': a.to(torch.bfloat16), 'b': b.to(torch.bfloat16), 'bias': bias.float() / 4}


def _outputs(case):
    return {'c': ((case['m'], case['n']), torch.bfloat16)}


def _reference(case, a, b, bias):
    return {'c': (a.float() @ b.float() + bias).relu().to(torch.bfloat16)}


@lean.condition(f'operands are read at most {MOST_READS} times')
def _few_reads(facts):
    times = {name: facts.requested(name, False) / facts.sizes[name] for name in ('a', 'b')}
    worst = max(times, key=times.__getitem__)
    return None if times[worst] <= MOST_READS else f'{worst} is read {times[worst]:.3g} times'


def _case(label, m, n, k):
    return Case(label, {'n': n, 'k': k}, {'m': m})


EXERCISE = Exercise(
    number=7,
    name='linear',
    title='matrix product with bias and ReLU',
    level='intermediate',
    entry='linear',
    launches=(('a', 'b', 'bias', 'c'),),
    inputs=_inputs,
    outputs=_outputs,
    reference=_reference,
    cases=(
        _case('whole tiles', 128, 256, 192),
        _case('a tail in m', 200, 128, 64),
        _case('a tail in n', 64, 136, 128),
        _case('a tail in k', 128, 128, 104),
        _case('one row', 1, 72, 40),
    ),
    lean=(
        lean.tensor_cores(lambda case: 2.0 * case['m'] * case['n'] * case['k']),
        lean.once('c', writes=True),
        _few_reads,
    ),
    lean_case=_case('4096 x 4096 x 4096', 4096, 4096, 4096),
    target=Target('tflops', 450, _case('8192 x 8192 x 8192', 8192, 8192, 8192), flops=2.0 * 8192**3),
    ours='gemm.gemm',
    ours_case={'m': 4096, 'n': 4096, 'k': 4096, 'dtype': torch.bfloat16},
    bug='the second tile of a block is wrong',
    docs='tuning-and-profiling.md',
)
