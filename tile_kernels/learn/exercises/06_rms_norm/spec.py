"""Exercise 06: RMS norm with its gradient."""

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target

EPS = 1e-6
NUM_PARTS = 256


def _inputs(case, generator):
    shape = case['tokens'], case['hidden']
    x = torch.randn(shape, generator=generator)
    if case['zero_row']:
        x[0] = 0.0
    dy = torch.randn(shape, generator=generator)
    w = torch.randn(case['hidden'], generator=generator)
    return {'x': x.to(torch.bfloat16), 'dy': dy.to(torch.bfloat16), 'w': w}


def _outputs(case):
    rows, weights = (case['tokens'], case['hidden']), (case['hidden'],)
    return {
        'y': (rows, torch.bfloat16),
        'rstd': (rows[:1], torch.float32),
        'dx': (rows, torch.bfloat16),
        'dw': (weights, torch.float32),
    }


def _workspaces(case):
    return {'parts': ((NUM_PARTS, case['hidden']), torch.float32)}


def _reference(case, x, dy, w):
    x, dy, w = x.double(), dy.double(), w.double()
    rstd = 1 / (x.square().mean(1) + EPS).sqrt()
    n, g = x * rstd[:, None], dy * w
    dx = (g - n * (g * n).mean(1, keepdim=True)) * rstd[:, None]
    return {'y': n * w, 'rstd': rstd, 'dx': dx, 'dw': (dy * n).sum(0)}


def _bound(case, name, expected):
    """Two roundings to bfloat16, or sums of float32 in another order."""
    if name in ('y', 'dx'):
        return expected.abs() * 2**-7 + 1e-5
    return expected.abs() * 1e-5 + (0 if name == 'rstd' else 2e-5)


def _read_once(launch: int, name: str, buffer: str):
    @lean.condition(f'{name} reads {buffer} once')
    def against(facts):
        times = facts.launches[launch].requested(buffer, False) / facts.sizes[buffer]
        return None if times <= 1.05 else f'{name} reads {buffer} {times:.2g} times'

    return against


@lean.condition('every sum has one order, on every GPU')
def _one_order(facts):
    found = [a for a in facts.accesses('global') if a.how == 'atomic']
    return f'atomic additions to {found[0].buffer} have no fixed order{lean.where(found[0])}' if found else None


def _case(label, tokens, hidden, zero_row=False):
    return Case(label, {'hidden': hidden}, {'tokens': tokens, 'zero_row': zero_row})


EXERCISE = Exercise(
    number=6,
    name='rms_norm',
    title='RMS norm and its gradient',
    level='intermediate',
    entry='rms_norm',
    launches=(('x', 'w', 'y', 'rstd'), ('dy', 'x', 'w', 'rstd', 'dx', 'parts'), ('parts', 'dw')),
    inputs=_inputs,
    outputs=_outputs,
    workspaces=_workspaces,
    reference=_reference,
    bound=_bound,
    cases=(
        _case('a short row', 64, 128),
        _case('more rows than parts', 300, 128),
        _case('a tail in the row', 7, 1032),
        _case('a row of zeros', 5, 200, zero_row=True),
        _case('one row', 1, 64),
    ),
    lean=(
        _read_once(0, 'forward', 'x'),
        _read_once(1, 'backward', 'x'),
        _read_once(1, 'backward', 'dy'),
        _read_once(2, 'add_parts', 'parts'),
        _one_order,
    ),
    lean_case=_case('4096 tokens of 4096', 4096, 4096),
    target=Target('copy', 90, _case('32768 tokens of 4096', 32768, 4096)),
    ours='norm.norm_backward',
    ours_case={'num_tokens': 4096, 'hidden': 4096, 'dtype': torch.bfloat16, 'weight': torch.float32},
    bug='a sum that remembers the row before',
    docs='writing-an-op.md#numerics',
)
