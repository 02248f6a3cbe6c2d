"""The fp8 tokens of latent attention: bytes, slots, rounding."""

import math

import pytest
import torch

from tile_kernels import ArgumentError, knobs
from tile_kernels.attention import pack_mla_cache, unpack_mla_cache

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


def test_a_token_has_these_bytes():
    kv = torch.zeros(1, 576, device=DEVICE, dtype=BF16)
    kv[0, 0], kv[0, 1], kv[0, 128], kv[0, 575] = 448.0, -3.25, 450.0, 1.5
    token = pack_mla_cache(kv)[0].cpu()
    assert token.shape == (656,) and token.dtype is torch.uint8
    assert token[:2].tolist() == [0x7E, 0xC5] and token[128].item() == 0x76  # 448, -3.25 as e4m3; 225 becomes 224
    assert token[512:528].view(torch.float32).tolist() == [1.0, 2.0, 2.0**-13, 2.0**-13]
    assert token[528:].view(BF16)[63].item() == 1.5


def test_packing_twice_changes_nothing():
    kv = (torch.randn(7, 576, device=DEVICE) * 10 ** torch.randn(7, 1, device=DEVICE)).to(BF16)
    once = pack_mla_cache(kv)
    wide = unpack_mla_cache(once)
    assert torch.equal(
        pack_mla_cache(wide)[:, :512].view(torch.float8_e4m3fn).float(), once[:, :512].view(torch.float8_e4m3fn).float()
    )
    error = (wide.float() - kv.float()).abs()[:, :512].unflatten(1, (4, 128)).amax(-1)
    assert (error <= kv.float().abs()[:, :512].unflatten(1, (4, 128)).amax(-1) * 2**-4).all()
    assert torch.equal(wide[:, 512:], kv[:, 512:])


def test_slots_choose_where_tokens_go():
    kv = torch.randn(4, 576, device=DEVICE).to(BF16)
    cache = torch.full((2, 3, 1, 656), 0x55, dtype=torch.uint8, device=DEVICE)
    slots = torch.tensor([4, -1, 0, 6], device=DEVICE)
    assert pack_mla_cache(kv, cache, slots) is cache
    rows, packed = cache.view(6, 656), pack_mla_cache(kv)
    assert torch.equal(rows[4], packed[0]) and torch.equal(rows[0], packed[2])
    assert (rows[[1, 2, 3, 5]] == 0x55).all()
    codes = torch.zeros(2, 3, 1, 656, device=DEVICE).to(torch.float8_e4m3fn)
    pack_mla_cache(kv, codes)
    assert torch.equal(codes.view(torch.uint8).view(6, 656)[:4], packed)


def test_nan_stays_nan_and_spoils_nothing_else():
    kv = torch.randn(1, 576, device=DEVICE).to(BF16)
    clean = unpack_mla_cache(pack_mla_cache(kv))
    kv[0, 5] = math.nan
    wide = unpack_mla_cache(pack_mla_cache(kv))
    assert wide[0, 5].isnan() and wide.isnan().sum() == 1 and torch.equal(wide[0, 128:], clean[0, 128:])


def test_pages_of_584_bytes():
    kv = torch.zeros(2, 4, 1, 512, device=DEVICE, dtype=BF16)
    kv[0, 1, 0, 0], kv[0, 1, 0, 64], kv[0, 1, 0, 511] = 448.0, 450.0, 1.5
    cache = pack_mla_cache(kv)
    page = cache[0].cpu().flatten()
    assert cache.shape == (2, 4, 1, 584) and page[576].item() == 0x7E and page[576 + 64].item() == 0x76
    assert page[576 : 2 * 576][448:].view(BF16)[63].item() == 1.5
    assert page[4 * 576 :].view(4, 8)[1].tolist() == [127, 128, 114, 114, 114, 114, 114, 0]
    wide = torch.randn(2, 4, 1, 512, device=DEVICE).to(BF16)
    slots = torch.tensor([7, -1, 0, 8], device=DEVICE)
    assert pack_mla_cache(wide.view(8, 512)[:4], cache, slots) is cache
    read, whole = unpack_mla_cache(cache).view(8, 512), unpack_mla_cache(pack_mla_cache(wide)).view(8, 512)
    assert torch.equal(read[7], whole[0]) and torch.equal(read[0], whole[2]) and read[1, 64].item() == 448.0
    assert (read[2:7] == 0).all() and (whole.float() - wide.view(8, 512).float()).abs().max() <= 0.25
    with pytest.raises(ArgumentError, match='page_size must be a multiple of 2, got 3'):
        pack_mla_cache(wide[:, :3])
    with pytest.raises(ArgumentError, match='cache must have contiguous pages'):
        unpack_mla_cache(cache[:, 1:3])


@pytest.mark.parametrize(
    ('arguments', 'sentence'),
    [
        ((torch.zeros(2, 512, dtype=BF16),), r'kv must be \(tokens, 576\)'),
        ((torch.zeros(2, 576),), 'kv must be bfloat16'),
        ((torch.zeros(2, 576, dtype=BF16), None, torch.zeros(2).long()), 'slots must come with a cache'),
        ((torch.zeros(2, 576, dtype=BF16), torch.zeros(1, 1, 1, 656).byte()), 'slots of cache must be at least 2'),
        ((torch.zeros(2, 576, dtype=BF16), torch.zeros(2, 656)), 'cache must be uint8 or float8_e4m3fn'),
        ((torch.zeros(2, 576, dtype=BF16), torch.zeros(2, 656).byte(), torch.zeros(2).int()), 'slots must be int64'),
        ((torch.zeros(2, 600, dtype=BF16)[:, 1:577],), 'kv must have a base and strides that are multiples of 16'),
    ],
)
def test_bad_arguments_are_told(arguments, sentence):
    with pytest.raises(ArgumentError, match='attention.pack_mla_cache: ' + sentence):
        pack_mla_cache(*arguments)
    with pytest.raises(ArgumentError, match=r'attention.unpack_mla_cache: cache must be \(..., 656\) or'):
        unpack_mla_cache(torch.zeros(2, 600).byte())
