"""Inputs: the shapes promised, the properties tests rely on."""

import itertools

import pytest
import torch

from tile_kernels.core.knobs import knobs
from tile_kernels.testing import clear_unused_sf, clear_unused_sf_col_pack, generator, quant_level_rank
from tile_kernels.testing.moe import construct_logits


@pytest.fixture(params=[False, True], ids=['default', 'full'])
def full(request):
    with knobs(full_test=request.param):
        yield request.param


def test_token_counts(full):
    assert generator.generate_num_tokens() == ([0] if full else []) + [4001, 8001]
    assert generator.generate_num_tokens(64) == ([0] if full else []) + [4032, 8064]
    assert generator.generate_num_tokens(128, is_benchmark=True) == [4096, 8064]
    assert generator.generate_num_tokens_at_level(1) == [512, 8001]
    assert generator.generate_num_tokens_at_level(2, alignment=2) == [0, 2, 512, 8002]
    assert generator.get_test_level() == (2 if full else 1)


def test_hidden_sizes_are_multiples():
    assert generator.generate_hidden_sizes() == [576, 2048, 2560, 3072, 4096, 6144, 7168]
    assert generator.generate_hidden_sizes(256) == [2048, 2560, 3072, 4096, 6144, 7168]


def test_sm_counts(full):
    counts = generator.generate_num_sms()
    assert counts[-1] - counts[-2] == 20
    assert (counts[0] == 1) == full
    assert all(count > 0 for count in counts)
    everything = counts[-1]
    assert [generator.generate_num_sms_at_level(level) for level in (0, 1, 2)] == [
        [everything],
        [everything - 19, everything],
        [1, everything - 19, everything],
    ]


def test_moe_settings(full):
    params = list(generator.generate_moe_params())
    assert len(params) == (6 * 13 + 1 if full else 4 * 3)
    assert {(p['num_experts'], p['num_ep_ranks']) for p in generator.generate_moe_params(is_benchmark=True)} == {
        (9, 8),
        (32, 8),
        (4, 64),
    }
    assert (params[0]['num_send_tokens'] == 0) == full
    assert all(p['num_topk'] <= p['num_experts'] * p['num_ep_ranks'] for p in params)


def test_topk_indices_belong_to_the_first_rank():
    params = dict(num_send_tokens=50, num_topk=6, num_experts=9, num_ep_ranks=8)
    topk_idx = generator.generate_topk_idx(params, device='cpu')
    assert topk_idx.dtype == torch.int64
    assert topk_idx.shape[1] == 6
    assert 0 < topk_idx.shape[0] < 400, 'tokens that choose no local expert are dropped'
    assert topk_idx.min() == -1
    assert topk_idx.max() == 8
    assert (topk_idx >= 0).any(dim=1).all()
    chosen = topk_idx.sort(dim=1).values
    assert ((chosen[:, 1:] != chosen[:, :-1]) | (chosen[:, 1:] < 0)).all(), 'an expert is chosen once'
    assert generator.generate_topk_idx(params | dict(num_send_tokens=0), device='cpu').shape == (0, 6)


def test_e5m6_inputs():
    (random, special), *constant = generator.generate_e5m6_inputs(3, 8, torch.float32, device='cpu')
    assert not special
    assert random.std() > 0
    assert [(float(x[0, 0]), float(x[0, -1]), flag) for x, flag in constant] == [
        (2.0**-20, 65024, True),
        (63 * 2.0**-20, 65024, True),
        (2.0**-14, 65024, True),
    ]


def test_random_floats_span_the_exponents_and_follow_the_seed():
    torch.manual_seed(1)
    drawn = [generator.generate_rand_float((4, 8), device='cpu') for _ in range(50)]
    torch.manual_seed(1)
    assert torch.equal(drawn[0], generator.generate_rand_float((4, 8), device='cpu'))
    largest = torch.stack([x.abs().amax() for x in drawn])
    assert largest.isfinite().all()
    assert largest.max() <= torch.finfo(torch.float32).max / 8
    assert largest.max() / largest.min() > 2.0**100


def test_samples_are_fixed_and_ordered():
    chosen = generator.generate_samples(range(100), 10)
    assert chosen == sorted(chosen)
    assert len(set(chosen)) == 10
    assert chosen == generator.generate_samples(range(100), 10) != generator.generate_samples(range(100), 10, seed=1)
    assert generator.generate_samples('abc', 9) == ['a', 'b', 'c']


def test_cast_configs_are_the_legal_ones():
    configs = [tuple(config.values()) for config in generator.generate_cast_config()]
    assert sorted(configs) == sorted(
        (col, rounded, packed)
        for col, rounded, packed in itertools.product((False, True), repeat=3)
        if rounded or not packed
    )
    with_e4m3 = list(generator.generate_cast_config(use_e4m3_sf=True))
    assert len(with_e4m3) == len(configs) + 2
    assert all(not (c['use_e4m3_sf'] and c['round_sf']) for c in with_e4m3)


def test_prefix_sums_start_experts_aligned():
    psum, num_rows = generator.generate_psum_layout(8, 100, alignment=16, device='cpu')
    assert psum.dtype == torch.int32
    starts = [0] + [-(-end // 16) * 16 for end in psum.tolist()]
    counts = [end - start for start, end in zip(starts, psum.tolist(), strict=False)]
    assert all(0 <= count <= 100 for count in counts)
    assert len(set(counts)) > 1
    assert num_rows == starts[-1]


@pytest.mark.parametrize('num_experts', [1, 36, 256])
def test_logits_leave_no_doubt(num_experts):
    logits = construct_logits(64, num_experts, device='cpu')
    assert logits.shape == (64, num_experts)
    gaps = logits.sort(dim=1).values.diff(dim=1)
    assert (gaps > 0.4 * 8 / max(num_experts - 1, 1)).all()
    if num_experts > 1:
        assert logits.argmax(dim=1).unique().numel() > 10, 'every expert can win'


@pytest.mark.parametrize('num_blocks', [1, 4, 5])
def test_unused_bytes_of_packed_factors_are_cleared(num_blocks):
    words = -(-num_blocks // 4)
    sf = torch.full((words, 8), -1, dtype=torch.int32)[:, :3].T  # column-major, as the kernels return it
    cleared = clear_unused_sf(sf, hidden=128 * num_blocks - 7, num_per_channels=128)
    assert cleared.shape == (3, 4 * words)
    assert (cleared[:, :num_blocks] == 255).all()
    assert (cleared[:, num_blocks:] == 0).all()


def test_a_single_word_of_factors_is_cleared_in_any_layout():
    sf = torch.full((1, 4), -1, dtype=torch.int32)[:, :1].T
    assert clear_unused_sf(sf, hidden=128, num_per_channels=128).tolist() == [[255, 0, 0, 0]]
    assert clear_unused_sf(sf[:0], hidden=128, num_per_channels=128).shape == (0, 4)


@pytest.mark.parametrize('num_blocks', [1, 4, 5])
def test_unused_bytes_of_column_packed_factors_are_cleared(num_blocks):
    words = -(-num_blocks // 4)
    cleared = clear_unused_sf_col_pack(torch.full((words, 6), -1, dtype=torch.int32), 32 * num_blocks - 1, 32)
    per_block = cleared.permute(0, 2, 1).reshape(4 * words, 6)
    assert (per_block[:num_blocks] == 255).all()
    assert (per_block[num_blocks:] == 0).all()


@pytest.mark.parametrize(('fmt', 'dtype'), [('e4m3', torch.float8_e4m3fn), ('e5m2', torch.float8_e5m2)])
def test_levels_of_float8_are_ranked_like_their_values(fmt, dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = codes.float().isfinite()
    values, ranks = codes.float()[finite], quant_level_rank(codes, fmt)[finite]
    order = values.argsort(stable=True)
    steps = ranks[order].diff()
    assert set(steps.tolist()) == {0, 1}
    assert (steps == 0).sum() == 1, 'the two zeros'


def test_levels_of_packed_e2m1_are_ranked_in_column_order():
    packed = torch.tensor([[0x21, 0xF8]], dtype=torch.uint8).view(torch.int8)
    assert quant_level_rank(packed, 'e2m1').tolist() == [[1, 2, 0, -7]]
    with pytest.raises(ValueError, match="got 'bf16'"):
        quant_level_rank(packed, 'bf16')
