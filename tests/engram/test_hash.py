"""The Engram hash against Python's own integers."""

import pytest
import torch

from tile_kernels import ArgumentError, knobs
from tile_kernels.engram import engram_hash
from tile_kernels.reference.engram import make_offsets
from tile_kernels.testing import assert_equal


def wrap(value):
    """An integer as int64 holds it."""
    return (value + 2**63) % 2**64 - 2**63


def by_hand(ids, multipliers, sizes, offsets):
    out = torch.empty(len(multipliers), len(ids), offsets.shape[1], dtype=torch.int32)
    for layer, factors in enumerate(multipliers.tolist()):
        for token, row in enumerate(ids.tolist()):
            mix, columns = 0, []
            for i, (number, factor) in enumerate(zip(row, factors, strict=True)):
                mix ^= wrap(number * factor)
                if i > 0:
                    columns += [mix % size for size in sizes[layer, i - 1].tolist()]
            out[layer, token] = torch.tensor(columns) + offsets[layer]
    return out


@pytest.mark.parametrize('interpret', [False, True], ids=['twin', 'kernel'])
def test_hash_equals_exact_integers(interpret):
    edges = [0, 1, -1, 2**31 - 1, -(2**31), 129279]
    factors = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 2**32 - 1, -(2**31), 6364136223846793005]
    ids = torch.tensor([[a, b, c] for a in edges for b in edges for c in (7, 2**31 - 1)], dtype=torch.int32)
    multipliers = torch.tensor([[a, b, 3] for a in factors for b in (1, -(2**63), 2**62 + 12345)])
    sizes = torch.tensor([1, 2, 3, 65536, 65537, 2**31 - 1, 2**30 + 1, 99991], dtype=torch.int32)
    sizes = sizes.repeat(len(multipliers), 2, 1).contiguous()
    offsets = torch.zeros(len(multipliers), 16, dtype=torch.int32)
    with knobs(interpret=interpret):
        assert_equal(engram_hash(ids, multipliers, sizes, offsets), by_hand(ids, multipliers, sizes, offsets))


def test_offsets_are_where_tables_start():
    sizes = torch.tensor([[[3, 5], [7, 11]]], dtype=torch.int32)
    assert make_offsets(sizes).tolist() == [[0, 3, 8, 15]]
    assert make_offsets(sizes).dtype == torch.int32


def test_bad_input_is_named():
    ids, multipliers = torch.zeros(3, 3, dtype=torch.int32), torch.ones(2, 3, dtype=torch.int64)
    sizes, offsets = torch.ones(2, 2, 4, dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r'engram\.engram_hash: ngram_token_ids must be int32'):
        engram_hash(ids.long(), multipliers, sizes, offsets)
    with pytest.raises(ArgumentError, match=r'engram\.engram_hash: offsets must be .* with columns = 8'):
        engram_hash(ids, multipliers, sizes, offsets[:, :5])


def test_exact_multiples_and_their_neighbors_have_the_right_remainder():
    """Here the estimate of the quotient in float64 is one too high or too low."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.cat([torch.arange(1, 65), torch.randint(2**20, 2**31 - 1, (192,), generator=generator)]).int()
    quotients = torch.randint(2**20, 2**32, (24,), generator=generator)
    factors = [int(q) * int(s) + d for q, s in zip(quotients.repeat(8), sizes[64:], strict=True) for d in (-1, 0)]
    multipliers = torch.tensor([[0, factor] for factor in factors])
    sizes = sizes.repeat(len(factors), 1, 1).contiguous()
    ids, offsets = torch.ones(1, 2, dtype=torch.int32), torch.zeros(len(factors), 256, dtype=torch.int32)
    with knobs(interpret=True):
        assert_equal(engram_hash(ids, multipliers, sizes, offsets), by_hand(ids, multipliers, sizes, offsets))
