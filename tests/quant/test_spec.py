"""Facts of TileKernels' interface: references and what is returned."""

import pytest
import torch

from tile_kernels import ArgumentError, config, quant, reference
from tile_kernels.testing.numeric import assert_equal


@pytest.mark.parametrize('hidden', [40, 1])
@pytest.mark.parametrize('num_per_tokens', [32, 128])
def test_the_reference_packs_factors_of_columns(num_per_tokens, hidden):
    """Byte b of word (i, channel) is the exponent of block 4 i + b of the rows."""
    x = torch.randn(300, hidden) * torch.exp(torch.randn(300, 1))
    data, sf = reference.cast(x, 'e4m3', (num_per_tokens, 1), round_sf=True, use_packed_ue8m0=True)
    num_blocks = -(-300 // num_per_tokens)
    assert sf.dtype is torch.int32 and sf.shape == (-(-num_blocks // 4), hidden) and sf.is_contiguous()
    exponents = sf.view(torch.uint8).view(-1, hidden, 4).transpose(1, 2).reshape(-1, hidden)[:num_blocks]
    plain = reference.cast(x, 'e4m3', (num_per_tokens, 1), round_sf=True)
    assert torch.equal((exponents.int() << 23).view(torch.float32), plain[1])
    op = quant.per_channel_cast(x, 'e4m3', num_per_tokens, round_sf=True, use_packed_ue8m0=True)
    assert torch.equal(data.view(torch.uint8), op.data.view(torch.uint8)) and torch.equal(sf, op.sf)


@pytest.mark.parametrize('block', [(1, 32), (128, 128), (32, 1)])
@pytest.mark.parametrize('shape', [(0, 64), (33, 0), (0, 0)])
def test_the_reference_packs_factors_of_nothing(shape, block):
    data, sf = reference.cast(torch.empty(shape), 'e4m3', block, round_sf=True, use_packed_ue8m0=True)
    assert data.shape == shape and sf.dtype is torch.int32 and sf.numel() == 0


def test_rows_of_experts_follow_the_token_alignment():
    psum = torch.tensor([3, 9], dtype=torch.int32)
    try:
        config.set_token_alignment(4)
        rows = reference.get_mapping_from_psum(torch.empty(10, 1), psum)
    finally:
        config.reset_runtime_config()
    assert rows.nonzero().flatten().tolist() == [0, 1, 2, 4, 5, 6, 7, 8]


@pytest.mark.parametrize('shape', [(6, 64), (2, 3, 64)])
def test_memory_of_the_caller_is_what_is_returned(shape):
    x, residual = torch.randn(shape, dtype=torch.bfloat16), torch.randn(shape, dtype=torch.bfloat16)
    out, summed = torch.empty_like(x), torch.empty_like(x)
    y, _, norm_input = quant.norm_forward(x, None, 1e-6, residual, out=out, residual_out=summed)
    assert y is out and norm_input is summed
    results = quant.norm_forward_and_per_token_cast(
        x, None, 1e-6, 'e4m3', 32, residual, out_bf16=out, residual_out=summed, with_rstd=True
    )
    assert results[1] is out and results[2].shape == shape[:-1] and results[3] is summed
    assert quant.norm_forward(x, None, 1e-6)[2] is x


def test_a_map_to_no_weights_says_nothing_and_no_clamp_counts_nothing():
    x, slots, counts = torch.randn(3, 64), torch.tensor([0, 1, -1], dtype=torch.int32), torch.zeros(4).long()
    expected = quant.swiglu_forward_and_per_token_cast(x, 'e4m3', 32)
    y = quant.swiglu_forward_and_per_token_cast(x, 'e4m3', 32, slots, clamped_count=counts)
    assert_equal(y.data, expected.data)
    assert_equal(y.sf, expected.sf)
    assert_equal(reference.swiglu_forward(x, slots, clamped_count=counts), quant.swiglu_forward(x, 'fp32'))
    assert_equal(quant.swiglu_forward(x, 'fp32', clamped_count=counts), quant.swiglu_forward(x, 'fp32'))
    assert counts.tolist() == [0, 0, 0, 3 * 3 * 32]
    with pytest.raises(ArgumentError, match=r'pos_to_token_topk must be .* with num_rows = 3'):
        quant.swiglu_forward_and_per_token_cast(x, 'e4m3', 32, slots[:2])  # a prefix sum that came by position


def test_a_map_to_a_token_without_experts_gives_every_row_the_weight_0():
    x, slots = torch.randn(3, 64), torch.tensor([0, 1, -1], dtype=torch.int32)
    y = quant.swiglu_forward_and_per_token_cast(x, 'e4m3', 32, slots, torch.empty(0, 2))
    assert not y.data.float().any()
