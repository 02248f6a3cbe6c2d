"""`tools/fuzz.py`: random calls of every op, and what it makes of a kernel that is wrong."""

import random

import pytest
import torch

from tile_kernels import knobs
from tile_kernels.core.registry import load_ops
from tools import fuzz


def test_calls_of_many_ops_agree_or_are_refused():
    """A few in CI, 10,000 with `TK_FULL_TEST=1`."""
    tally = fuzz.fuzz(fuzz.selected([]), 10_000 if knobs.full_test else 40, seed=2, device='cpu')
    assert tally.wrong == [], str(tally)
    assert sum(found['agrees'] for found in tally.counts.values()) > 20


def test_a_wrong_result_is_found_and_made_small(monkeypatch):
    op = load_ops()['moe.group_count']
    right = op.twin

    def wrong(**given):
        result = right(**given)
        return result + (given['group_idx'].numel() > 9)

    monkeypatch.setattr(op, 'twin', wrong)
    tally = fuzz.fuzz([op], 30, seed=0, device='cpu')
    assert tally.wrong and 'wrong' in str(tally)
    sizes = [call.arguments('cpu')['group_idx'].numel() for call, _ in tally.wrong]
    assert min(sizes) == 10
    assert all('kernel and twin' in what for _, what in tally.wrong)


def test_draws_repeat_and_stay_within_the_limit():
    op = load_ops()['quant.per_token_cast']
    first, second = ([str(fuzz.draw(op, random.Random(seed), 5000)) for seed in range(30)] for _ in range(2))
    assert first == second and len(set(first)) > 10
    for seed in range(30):
        call = fuzz.draw(op, random.Random(seed), 5000)
        if call is not None:
            given = call.arguments('cpu').values()
            assert sum(x.numel() for x in given if isinstance(x, torch.Tensor)) <= 5000


def test_layouts_keep_the_elements():
    x = torch.arange(12.0).reshape(3, 4)
    for layout in fuzz.LAYOUTS.values():
        assert torch.equal(layout(x), x)
    assert fuzz.LAYOUTS['behind a boundary'](x).data_ptr() % 16 == 4
    assert fuzz.LAYOUTS['in wider rows'](x).stride() == (20, 1)


def test_an_unknown_op_is_an_error():
    with pytest.raises(SystemExit, match=r'no op is called moe\.nothing'):
        fuzz.selected(['moe.nothing'])
