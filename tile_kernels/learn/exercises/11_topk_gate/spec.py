"""Exercise 11: top-k by one warp per row."""

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target


def _inputs(case, generator):
    logits = torch.randn(case['tokens'], case['num_experts'], generator=generator)
    if case.sizes.get('special'):
        logits[0] = torch.nan
        logits[1, 3:] = torch.nan
        logits[2] = -torch.inf
        logits[2, -1] = -1e30
        logits[3] = logits[3].sign()
        logits[4] = torch.where(logits[4] > 0, 0.0, -0.0)
        logits[5, ::7] = torch.nan
        logits[5, 1::5] = torch.inf
    return {'logits': logits}


def _outputs(case):
    shape = (case['tokens'], case['k'])
    return {'experts': (shape, torch.int32), 'values': (shape, torch.float32)}


def _reference(case, logits):
    wide = torch.where(logits.isnan(), -torch.inf, logits)
    by_value = wide.sort(dim=1, descending=True, stable=True).indices
    late = logits.isnan().gather(1, by_value).sort(dim=1, stable=True).indices
    chosen = by_value.gather(1, late)[:, : case['k']]
    return {'experts': chosen.int(), 'values': logits.gather(1, chosen)}


def _case(label, tokens, num_experts=256, k=8, **special):
    return Case(label, {'num_experts': num_experts, 'k': k}, {'tokens': tokens, **special})


EXERCISE = Exercise(
    number=11,
    name='topk_gate',
    title='choose the k best experts of every token',
    level='expert',
    entry='topk_gate',
    launches=(('logits', 'experts', 'values'),),
    inputs=_inputs,
    outputs=_outputs,
    reference=_reference,
    cases=(
        _case('whole blocks', 8),
        _case('a tail in tokens', 5),
        _case('NaN, infinities, zeros and ties', 6, special=True),
        _case('experts that are no multiple of 32', 3, 40, 5),
        _case('one token', 1, 64, 2),
    ),
    lean=(lean.no_shared(), lean.once('logits'), lean.whole_sectors()),
    lean_case=_case('4096 tokens, 256 experts', 4096),
    target=Target('us', 3, _case('64 tokens, 256 experts', 64)),
    ours='moe.topk_gate',
    ours_case={'num_tokens': 4096, 'num_experts': 256, 'num_topk': 8},
    bug='lanes that disagree about the winner',
    docs='interpreter.md#barrierdivergence',
)
