"""Exercise 08: tuning values from counts, without a run."""

import math

import torch

from tile_kernels.core.gpus import GPUS
from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target

SMS = GPUS['h200'].sms

#: Rows of an operand, and numbers along k, that one wgmma multiplies; columns vary from 8 to 256.
WGMMA_ROWS, WGMMA_DEPTH = 64, 16


def _inputs(case, generator):
    a = torch.randint(-4, 5, (case['m'], case['k']), generator=generator)
    b = torch.randint(-4, 5, (case['n'], case['k']), generator=generator)
    return {'a': a.to(torch.bfloat16), 'b': b.to(torch.bfloat16)}


def _outputs(case):
    return {'c': ((case['m'], case['n']), torch.bfloat16)}


def _reference(case, a, b):
    return {'c': (a.float() @ b.float().T).to(torch.bfloat16)}


def _flops(case):
    return 2.0 * case['m'] * case['n'] * case['k']


@lean.condition('at most half of the reads of 64 x 64 tiles')
def _few_reads(facts):
    small = 2 * _flops(facts.case) / 64  # two operands of two bytes, each read once for every 64 columns or rows
    share = (facts.requested('a', False) + facts.requested('b', False)) / small
    return None if share <= 0.5 else f'the operands are read {100 * share:.0f} % as often as with tiles of 64 x 64'


@lean.condition('less than 15 % of the tensor cores idle')
def _short_tail(facts):
    (counts,) = facts.launches
    rounds = math.ceil(counts.blocks / SMS)
    done = sum(counts.flops.values()) / counts.blocks * SMS * rounds
    idle = 1 - _flops(facts.case) / done
    words = f'{counts.blocks} blocks take {rounds} rounds of {SMS} SMs'
    return None if idle < 0.15 else f'{words}, and {100 * idle:.0f} % of the tensor cores idle or multiply padding'


@lean.condition('a wgmma has at least 64 columns')
def _wide_products(facts):
    flops, number = sum(sum(c.flops.values()) for c in facts.launches), facts.event('wgmma')
    if not number:
        return 'no product runs as wgmma'
    columns = flops / number / (2 * WGMMA_ROWS * WGMMA_DEPTH)
    return None if columns >= 64 else f'a wgmma has {columns:.0f} columns: the tile does not divide into wider ones'


def _case(label, m, n, k):
    return Case(label, {'m': m, 'n': n, 'k': k}, {})


LARGE = _case('4096 x 2112 x 7168', 4096, 2112, 7168)

EXERCISE = Exercise(
    number=8,
    name='tiles',
    title='choose the tiles of a matrix product',
    level='intermediate',
    entry='tiled',
    launches=(('a', 'b', 'c'),),
    inputs=_inputs,
    outputs=_outputs,
    reference=_reference,
    cases=(
        _case('less than a tile', 64, 64, 64),
        _case('tails in m and n', 200, 136, 96),
        _case('a tail in k', 128, 256, 200),
        _case('one row', 1, 264, 64),
    ),
    lean=(lean.tensor_cores(_flops), _few_reads, _short_tail, _wide_products, lean.once('c', writes=True)),
    lean_case=LARGE,
    target=Target('tflops', 650, _case('8192 x 8192 x 8192', 8192, 8192, 8192), flops=2.0 * 8192**3),
    ours='gemm.gemm',
    ours_case={'m': 4096, 'n': 2112, 'k': 7168, 'dtype': torch.bfloat16},
    devices=('h200',),
    bug='stages that do not fit',
    docs='tuning-and-profiling.md#tune-your-own-kernel',
)
