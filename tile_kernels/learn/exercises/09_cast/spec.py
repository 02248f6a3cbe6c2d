"""Exercise 09: a per-token cast to FP8 with power-of-two scale factors."""

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target

GROUP = 128


def _inputs(case, generator):
    x = torch.randn(case['tokens'], case['hidden'], generator=generator)
    if case['special']:
        x[0] = 0.0  # the least amax counts
        x[1] = -x[1].abs()  # the largest magnitude is negative
        x[2] *= 1e30
        x[3] = torch.arange(x.shape[1]) % 17 / 8 + 16  # ties between two codes
        x[3, 0] = 448.0  # the quotient is a power of two already
        x[4] *= 1e-9
    return {'x': x.to(torch.bfloat16)}


def _outputs(case):
    shape = case['tokens'], case['hidden']
    return {
        'y': (shape, torch.float8_e4m3fn),
        'sf': ((shape[0], -(-shape[1] // GROUP)), torch.float32),
    }


def _reference(case, x):
    width = -(-case['hidden'] // GROUP) * GROUP
    padded = torch.nn.functional.pad(x.float(), (0, width - case['hidden'])).unflatten(1, (-1, GROUP))
    wanted = padded.abs().amax(2).clamp_min(1e-4) / 448.0
    mantissa, exponent = torch.frexp(wanted)
    sf = torch.ldexp(torch.ones_like(wanted), exponent - (mantissa == 0.5).int())
    y = (padded / sf[..., None]).flatten(1)[:, : case['hidden']]
    return {'y': y.to(torch.float8_e4m3fn), 'sf': sf}


def _case(label, tokens, hidden, special=False):
    return Case(label, {'hidden': hidden}, {'tokens': tokens, 'special': special})


EXERCISE = Exercise(
    number=9,
    name='cast',
    title='cast tokens to FP8 with scale factors',
    level='intermediate',
    entry='cast',
    launches=(('x', 'y', 'sf'),),
    inputs=_inputs,
    outputs=_outputs,
    reference=_reference,
    cases=(
        _case('whole groups', 64, 256),
        _case('a tail in tokens', 37, 128),
        _case('a tail in channels', 16, 200),
        _case('zeros, signs, ties and extremes', 5, 256, special=True),
        _case('one short token', 1, 8),
    ),
    lean=(
        lean.launches(1),
        lean.traffic(x='read', y='write', sf='write'),
        lean.wide(16, 'x', 'y'),
    ),
    lean_case=_case('4096 tokens of 7168', 4096, 7168),
    target=Target('copy', 95, _case('16384 tokens of 7168', 16384, 7168)),
    ours='quant.per_token_cast',
    ours_case={'num_tokens': 4096, 'hidden': 7168, 'dtype': torch.bfloat16, 'fmt': 'e4m3_1x128_f32p2'},
    bug='channels that do not exist',
    docs='formats.md#from-an-amax-to-a-factor',
)
