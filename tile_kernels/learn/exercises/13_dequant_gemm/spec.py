"""Exercise 13: a product with weights of 4 bits."""

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target

GROUP = 32


def _inputs(case, generator):
    """Small integers and powers of two: every sum is exact, so its order does not matter."""
    m, n, k = case['m'], case['n'], case['k']
    return {
        'x': torch.randint(-4, 5, (m, k), generator=generator).half(),
        'packed': torch.randint(-(2**31), 2**31 - 1, (n, k // 8), generator=generator, dtype=torch.int32),
        'scales': 0.5 ** torch.randint(0, 4, (n, k // GROUP), generator=generator).half(),
    }


def _outputs(case):
    return {'y': ((case['m'], case['n']), torch.float16)}


def _reference(case, x, packed, scales):
    shifts = 4 * torch.arange(8)
    codes = ((packed[:, :, None].long() >> shifts) & 15).flatten(1)
    weights = (codes - 8).double() * scales.double().repeat_interleave(GROUP, dim=1)
    return {'y': (x.double() @ weights.T).half()}


def _case(label, m, n, k):
    return Case(label, {'n': n, 'k': k}, {'m': m})


LARGE = _case('16 tokens, 16384 x 4096 weights', 16, 16384, 4096)

EXERCISE = Exercise(
    number=13,
    name='dequant_gemm',
    title='multiply by weights of 4 bits',
    level='expert',
    entry='dequant_gemm',
    launches=(('x', 'packed', 'scales', 'y'),),
    inputs=_inputs,
    outputs=_outputs,
    reference=_reference,
    cases=(
        _case('whole tiles', 16, 64, 128),
        _case('a tail in tokens', 5, 128, 256),
        _case('tails in rows and columns of the weights', 17, 80, 96),
        _case('one token, one group', 1, 24, 32),
    ),
    lean=(
        lean.once('packed'),
        lean.wide(16, 'packed'),
        lean.tensor_cores(lambda case: 2 * case['m'] * case['n'] * case['k']),
    ),
    lean_case=LARGE,
    target=Target('us', 11.5, LARGE),
    ours='gemm.gemm_dequant',
    ours_case={'m': 16, 'n': 16384, 'k': 4096, 'fmt': 'u4_1x128', 'dtype': torch.float16},
    bug='weights of one column in eight',
    docs='writing-an-op.md#loads-and-stores',
)
