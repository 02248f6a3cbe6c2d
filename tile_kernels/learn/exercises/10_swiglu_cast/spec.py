"""Exercise 10: SwiGLU and a per-token cast in one kernel."""

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target

GROUP = 128


def _inputs(case, generator):
    gate, up = (2 * torch.randn(case['tokens'], case['hidden'], generator=generator) for _ in range(2))
    if case['special']:
        gate[0] = 0.0
        gate[1] = -200.0  # exp overflows, and silu is zero
        gate[2] = 200.0
        up[3] = -up[3].abs()  # the largest magnitude is negative
    return {'gate': gate.to(torch.bfloat16), 'up': up.to(torch.bfloat16)}


def _outputs(case):
    shape = case['tokens'], case['hidden']
    return {
        'y': (shape, torch.float8_e4m3fn),
        'sf': ((shape[0], -(-shape[1] // GROUP)), torch.float32),
    }


def _reference(case, gate, up):
    act = torch.nn.functional.silu(gate.double()) * up.double()
    width = -(-case['hidden'] // GROUP) * GROUP
    padded = torch.nn.functional.pad(act.float(), (0, width - case['hidden'])).unflatten(1, (-1, GROUP))
    wanted = padded.abs().amax(2).clamp_min(1e-4) / 448.0
    mantissa, exponent = torch.frexp(wanted)
    sf = torch.ldexp(torch.ones_like(wanted), exponent - (mantissa == 0.5).int())
    y = (padded / sf[..., None]).flatten(1)[:, : case['hidden']]
    return {'y': y.to(torch.float8_e4m3fn), 'sf': sf}


def _bound(case, name, expected):
    """The last bits of exp may differ: a code may be the next one, a factor may not."""
    return expected.double().abs() / 8 + 2**-9 if name == 'y' else 0.0


def _case(label, tokens, hidden, special=False):
    return Case(label, {'hidden': hidden}, {'tokens': tokens, 'special': special})


EXERCISE = Exercise(
    number=10,
    name='swiglu_cast',
    title='SwiGLU and the cast to FP8 in one kernel',
    level='intermediate',
    entry='swiglu_cast',
    launches=(('gate', 'up', 'y', 'sf'),),
    inputs=_inputs,
    outputs=_outputs,
    reference=_reference,
    bound=_bound,
    cases=(
        _case('whole groups', 64, 256),
        _case('a tail in tokens', 37, 128),
        _case('a tail in channels', 16, 200),
        _case('zeros, signs and overflow', 5, 256, special=True),
        _case('one short token', 1, 8),
    ),
    lean=(
        lean.launches(1),
        lean.traffic(gate='read', up='read', y='write', sf='write'),
        lean.once('gate'),
        lean.once('up'),
    ),
    lean_case=_case('4096 tokens of 2048', 4096, 2048),
    target=Target('copy', 92, _case('16384 tokens of 2048', 16384, 2048)),
    ours='activation.swiglu_forward_and_per_token_cast',
    ours_case={'num_tokens': 4096, 'hidden': 2048, 'dtype': torch.bfloat16, 'fmt': 'e4m3_1x128_f32p2'},
    bug='channels that nobody writes',
    docs='writing-an-op.md#loads-and-stores',
)
