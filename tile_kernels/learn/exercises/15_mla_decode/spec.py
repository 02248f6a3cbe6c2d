"""Exercise 15: decode with latent attention, split over the cache."""

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target

SCALE = 0.1


def _inputs(case, generator):
    lengths = torch.tensor(case['lengths'], dtype=torch.int32)
    batch, dim = len(case['lengths']), case['latent'] + case['rope']
    q = torch.randn(batch, case['heads'], dim, generator=generator).bfloat16()
    cache = torch.randn(batch, case['seq'], dim, generator=generator).bfloat16()
    stale = torch.arange(case['seq'])[None, :, None] >= lengths[:, None, None]
    return {'q': q, 'cache': torch.where(stale, 100.0, cache).bfloat16(), 'lengths': lengths}


def _outputs(case):
    return {'o': ((len(case['lengths']), case['heads'], case['latent']), torch.bfloat16)}


def _workspaces(case):
    shape = (len(case['lengths']), case['splits'], case['heads'])
    return {'parts': ((*shape, case['latent']), torch.float32), 'lse': (shape, torch.float32)}


def _reference(case, q, cache, lengths):
    o = torch.zeros(*q.shape[:2], case['latent'], dtype=torch.float64)
    for b, length in enumerate(lengths.tolist()):
        if length:
            keys = cache[b, :length].double()
            o[b] = (q[b].double() @ keys.T * SCALE).softmax(-1) @ keys[:, : case['latent']]
    return {'o': o}


def _bound(case, name, expected):
    """Probabilities and outputs have the 8 bits of bfloat16."""
    return 2**-7 * (0.5 + expected.abs())


def _products(case):
    """Operations of both products over all keys."""
    return 2 * case['heads'] * (2 * case['latent'] + case['rope']) * sum(case['lengths'])


def _case(label, lengths, heads=16, latent=64, rope=16, splits=2, seq=None):
    static = {'heads': heads, 'latent': latent, 'rope': rope, 'splits': splits, 'scale': SCALE}
    return Case(label, static, {'lengths': lengths, 'seq': max(lengths) if seq is None else seq})


EXERCISE = Exercise(
    number=15,
    name='mla_decode',
    title='one token attends to a long cache of latents',
    level='expert',
    entry='mla_decode',
    launches=(('q', 'cache', 'lengths', 'parts', 'lse'), ('parts', 'lse', 'o')),
    inputs=_inputs,
    outputs=_outputs,
    workspaces=_workspaces,
    reference=_reference,
    bound=_bound,
    cases=(
        _case('whole tiles', [256, 128]),
        _case('odd lengths, one of them 0', [300, 1, 0, 130], splits=3),
        _case('five heads', [70, 65], heads=5, seq=80),
        _case('forty heads, more splits than tiles', [64], heads=40, splits=4),
    ),
    lean=(lean.once('cache'), lean.wide(16, 'cache'), lean.tensor_cores(_products)),
    lean_case=_case('a sequence of 2048 tokens', [2048], latent=512, rope=64, splits=4),
    target=Target('us', 229, _case('64 sequences of 8192', [8192] * 64, latent=512, rope=64, splits=4)),
    ours='attention.mla_decode',
    ours_case={'queries': 1, 'lengths': (2048,), 'heads': 16, 'page': 64, 'splits': 0},
    devices=('h200',),
    real=True,
    bug='a split without keys',
    docs='interpreter.md#uninitializedread',
)
