"""The second part of the calls a user reads about, as written, on the device at hand."""

import pytest
import torch

import tile_kernels
from tile_kernels import TileKernel, quant
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.registry import load_ops

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16, F32 = torch.bfloat16, torch.float32


def random(*shape, dtype=BF16):
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


# Routing ------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', [BF16, F32])
def test_gating_kernel_is_routing_and_its_map(dtype):
    gating = tile_kernels.moe.MoEGatingKernel()
    gate_weight, x = random(16, 64, dtype=dtype), random(9, 64, dtype=dtype)
    topk_scores, topk_indices, expert_ids = gating.forward(gate_weight, x, topk=8)
    logits = (x.double() @ gate_weight.double().T).float()
    chosen, indices = logits.sort(dim=1, descending=True, stable=True)
    assert torch.equal(topk_indices, indices[:, :8])
    torch.testing.assert_close(topk_scores, chosen[:, :8].softmax(1), rtol=1e-4, atol=1e-5)
    assert torch.equal(expert_ids.num_tokens_per_expert.long(), topk_indices.flatten().bincount(minlength=16))


def test_gating_kernel_has_true_gradients():
    gate_weight, x = (random(n, 64, dtype=F32).requires_grad_() for n in (12, 5))
    topk_scores, topk_indices, _ = tile_kernels.moe.MoEGatingKernel()(gate_weight, x, topk=3)
    dy = torch.randn_like(topk_scores)
    actual = torch.autograd.grad(topk_scores, (gate_weight, x), dy)
    plain = (x @ gate_weight.T).gather(1, topk_indices).softmax(1)
    for ours, expected in zip(actual, torch.autograd.grad(plain, (gate_weight, x), dy), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_equal_logits_take_the_smaller_expert():
    gate_weight = torch.ones(4, 64, device=DEVICE)
    _, indices, _ = tile_kernels.moe.MoEGatingKernel()(gate_weight, random(2, 64, dtype=F32), topk=2)
    assert indices.tolist() == [[0, 1], [0, 1]]


# Engram -------------------------------------------------------------------------------------


def test_engram_gating_function_has_gradients_of_all_three():
    x, engram_weight, gate_weight = (random(n, 64, dtype=F32).requires_grad_() for n in (5, 8, 8))
    y = tile_kernels.engram.EngramGatingFunction.apply(x, engram_weight, gate_weight)
    norm = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-6)
    plain = (norm @ gate_weight.double().T) * (norm @ engram_weight.double().T)
    torch.testing.assert_close(y.double(), plain, rtol=1e-4, atol=1e-4)
    dy, inputs = torch.randn_like(y), (x, engram_weight, gate_weight)
    expected = torch.autograd.grad(plain, inputs, dy.double())
    for ours, theirs in zip(torch.autograd.grad(y, inputs, dy), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


# Paths --------------------------------------------------------------------------------------


def plain_block(block, x):
    """What `MHCBlock` means, in plain PyTorch and float32 between the roundings of streams."""
    mix = tile_kernels.reference.sinkhorn_normalize(block.logits, 20, 1e-6)
    streams = (x.float()[..., None, :] * (mix @ block.split.gain)).bfloat16()
    outputs = torch.stack([path(streams[..., p, :]) for p, path in enumerate(block.blocks)], dim=-2)
    return (outputs.float() * block.merge.logits.softmax(0)[:, None]).sum(-2).bfloat16()


def some_block(num_paths=4, hidden=64):
    paths = [torch.nn.Linear(hidden, hidden, device=DEVICE, dtype=BF16) for _ in range(num_paths)]
    block = tile_kernels.modeling.MHCBlock(hidden, num_paths, blocks=paths).to(DEVICE)
    with torch.no_grad():
        for parameter in (block.logits, block.split.gain, block.merge.logits):
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return block


@pytest.mark.parametrize(('num_paths', 'lead'), [(2, (7,)), (4, (2, 3)), (8, ())])
def test_block_is_its_plain_form_with_gradients(num_paths, lead):
    block, x = some_block(num_paths), random(*lead, 64).requires_grad_()
    y, plain = block(x), plain_block(block, x)
    assert y.shape == x.shape and y.dtype == BF16
    torch.testing.assert_close(y, plain, rtol=2e-2, atol=2e-2)
    dy, wanted = torch.randn_like(y), (x, block.logits, block.split.gain, block.merge.logits)
    actual, expected = (torch.autograd.grad(out, wanted, dy) for out in (y, plain))
    for ours, theirs in zip(actual, expected, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2 * theirs.abs().max().item())


def test_block_without_blocks_is_close_to_x_and_survives_a_state_dict():
    block, x = tile_kernels.modeling.MHCBlock(hidden_dim=64, num_paths=4).to(DEVICE), random(5, 64)
    torch.testing.assert_close(block(x), x, rtol=0.1, atol=0.1)
    other = tile_kernels.modeling.MHCBlock(64, 4).to(DEVICE)
    other.load_state_dict(block.state_dict())
    assert torch.equal(block(x), other(x))
    assert torch.equal(block.to(BF16)(x), block(x)) and block(x).dtype == BF16


def test_block_trains():
    torch.manual_seed(0)
    block, x = some_block(2), random(32, 64)
    target, optimizer = random(32, 64) * 0.3, torch.optim.Adam(block.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = (block(x).float() - target.float()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_parts_of_the_block():
    mix = tile_kernels.modeling.SinkhornNormalizer(num_iters=20, eps=1e-6)(random(4, 4))
    for dim in (0, 1):
        torch.testing.assert_close(mix.sum(dim), torch.ones(4, device=DEVICE), rtol=1e-2, atol=1e-2)
    split, apply = (getattr(tile_kernels.modeling, name)(64, 4).to(DEVICE) for name in ('MixSplit', 'MixApply'))
    streams = split(random(3, 64), mix)
    assert streams.shape == (3, 4, 64) and apply(streams).shape == (3, 64)


# Errors -------------------------------------------------------------------------------------


def test_errors_are_one_sentence():
    modeling = tile_kernels.modeling
    identities = [torch.nn.Identity()] * 3
    gating, gated = tile_kernels.moe.MoEGatingKernel(), tile_kernels.engram.EngramGatingFunction.apply
    calls = {
        'MHCBlock: num_paths must be': lambda: modeling.MHCBlock(64, 3),
        'MHCBlock: blocks must be 4 modules': lambda: modeling.MHCBlock(64, 4, blocks=identities),
        'MHCBlock: x must be (..., 64)': lambda: modeling.MHCBlock(64, 2).to(DEVICE)(random(3, 128)),
        'MHCBlock: x must be bfloat16': lambda: modeling.MHCBlock(64, 2).to(DEVICE)(random(3, 64, dtype=F32)),
        'SinkhornNormalizer: num_iters must be': lambda: modeling.SinkhornNormalizer(num_iters=0),
        'MixApply: streams must be (..., 2, 64)': lambda: modeling.MixApply(64, 2).to(DEVICE)(random(3, 64)),
        'MoEGatingKernel: gate_weight must be': lambda: gating(random(16, 32), random(3, 64)),
        'engram.engram_gating: gate_weight must be a tensor': lambda: gated(random(3, 64), random(8, 64), None),
    }
    for start, call in calls.items():
        with pytest.raises(ArgumentError) as error:
            call()
        assert str(error.value).startswith(start), str(error.value)
        assert '\n' not in str(error.value)


# SwiGLU in blocks ---------------------------------------------------------------------------


def same_bits(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


@pytest.mark.parametrize('block', [(128, 128), (1, 128), (32, 32)])
def test_swiglu_in_blocks(block):
    x = random(130, 2 * 272)
    y = quant.swiglu_forward_and_per_block_cast(x, 'e4m3', block)
    assert y.fmt.sf_block == block and y.data.shape == (130, 272)
    assert y.sf.shape == (-(-130 // block[0]), -(-272 // block[1]))
    gate, up = x.float().chunk(2, dim=1)
    torch.testing.assert_close(quant.cast_back(y, 'fp32'), torch.nn.functional.silu(gate) * up, rtol=0.07, atol=0.05)
    same_bits(y, quant.swiglu_forward_and_per_block_cast(x, f'e4m3_{block[0]}x{block[1]}_f32'))
    same_bits(y, quant.fused_swiglu_quant_fp8(*x.chunk(2, dim=1), variant='per_block', block_size=block))


def test_swiglu_in_blocks_as_written():
    gate, up = random(7, 300), random(7, 300)
    out, scale = quant.fused_swiglu_quant_fp8(gate, up, variant='per_block')
    assert out.dtype == torch.float8_e4m3fn and scale.shape == (1, 3)
    same_bits((out, scale), quant.swiglu_forward_and_per_block_cast(torch.cat((gate, up), 1), 'e4m3'))
    same_bits((out, scale), tile_kernels.reference.fused_swiglu_quant_fp8(gate, up, variant='per_block'))


def test_blocks_of_padding_have_the_factor_zero_and_padding_changes_no_other():
    x, pos_to_expert = random(96, 2 * 64), torch.zeros(96, dtype=torch.int32, device=DEVICE)
    pos_to_expert[20:64] = -1  # the end of the first block and all of the second
    data, sf = quant.swiglu_forward_and_per_block_cast(x, 'e4m3', (32, 32), pos_to_expert=pos_to_expert)
    x[20:64] = torch.nan
    same_bits((data, sf), quant.swiglu_forward_and_per_block_cast(x, 'e4m3', (32, 32), pos_to_expert=pos_to_expert))
    assert data[20:64].float().abs().max() == 0 and sf[1].tolist() == [0.0, 0.0]
    assert (sf[[0, 2]] > 0).all() and (data.float().abs().amax(1)[:20] > 0).all()


def test_infinite_and_missing_numbers_spare_other_blocks():
    x = random(64, 2 * 64)
    x[3, 5] = torch.inf
    x[40, 70] = torch.nan
    y = quant.swiglu_forward_and_per_block_cast(x, 'e4m3', (32, 32))
    plain = tile_kernels.reference.activation.swiglu_forward_and_per_block_cast(x, y.fmt)
    same_bits(y, plain)


# Ops in words -------------------------------------------------------------------------------


def test_tile_kernel_of_swiglu_and_quantization():
    from tilelang import language as T

    k = tile_kernels.TileKernel(
        op='swiglu + fp8_quant',
        variants=['per_token', 'per_block', 'per_channel'],
        dtype=[T.float8_e4m3fn, T.float8_e5m2, T.float16],
    )
    assert k.variants == ['per_token', 'per_block', 'per_channel']
    assert k.dtypes == [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16]
    assert len(k.ops) == 4 and set(k.ops) <= set(load_ops())
    gate, up = random(40, 256), random(40, 256)
    same_bits(k(gate, up, variant='per_token', dtype=torch.float8_e4m3fn), quant.fused_swiglu_quant_fp8(gate, up))
    same_bits(k(gate, up), k(gate, up, variant='per_token', dtype='float8_e4m3fn'))
    blocks = k(gate, up, variant='per_block', dtype=T.float8_e5m2)
    same_bits(blocks, quant.fused_swiglu_quant_fp8(gate, up, dtype=torch.float8_e5m2, variant='per_block'))
    expected = (torch.nn.functional.silu(gate.float()) * up.float()).cpu()
    codes, scale = k(gate, up, variant='per_channel')
    assert scale.shape == (1, 256)
    torch.testing.assert_close((codes.float() * scale).cpu(), expected, rtol=0.07, atol=0.05)
    plain = k(gate, up, dtype='float16')
    assert plain.dtype == torch.float16
    torch.testing.assert_close(plain.float().cpu(), expected, rtol=2e-3, atol=2e-3)


def test_tile_kernel_of_mhc():
    forward = tile_kernels.TileKernel(module='mhc', op='forward')
    backward = tile_kernels.TileKernel(module='mhc', op='backward')
    assert (forward.ops, backward.ops) == (['mhc.pre'], ['mhc.pre_bwd']) and forward.variants == forward.dtypes == []
    residual, fn = random(3, 4, 64).requires_grad_(), random(24, 256, dtype=F32)
    scale, base = random(3, dtype=F32), random(24, dtype=F32)
    outputs = forward(residual, fn, scale, base)
    same_bits(outputs, tile_kernels.mhc.pre(residual, fn, scale, base))
    upstream = [torch.randn_like(output) for output in outputs[:3]]
    (expected,) = torch.autograd.grad(outputs[:3], residual, upstream)
    with torch.no_grad():
        assert torch.equal(backward(*upstream, residual, fn, scale, base, *outputs[3:])[0], expected)


def test_tile_kernel_takes_any_op_of_the_registry():
    x = random(2, 37, 65)
    for k in (
        TileKernel('transpose.batched_transpose'),
        TileKernel('batched_transpose', 'transpose'),
    ):
        assert torch.equal(k(x), x.mT) and 'batched_transpose' in repr(k)
    same_bits(TileKernel('fp8_quant', variants='per_block')(x[0]), quant.per_block_cast_fp8(x[0]))
    assert TileKernel('fp8_quant + swiglu', 'quant').variants == ['per_token', 'per_block', 'per_channel']


@pytest.mark.parametrize(
    ('call', 'said'),
    [
        (lambda: TileKernel(op='swiglu + fp8_quan'), "got 'swiglu + fp8_quan'; near it are swiglu + fp8_quant"),
        (lambda: TileKernel(op='forwards', module='mhc'), "got 'forwards'; near it are forward"),
        (lambda: TileKernel(op='forward', module='mch'), "got 'mch'; near it are mhc"),
        (lambda: TileKernel(op='fp8_quant', variants=['per_tokens']), "got 'per_tokens'; near it are per_token"),
        (lambda: TileKernel(op='fp8_quant', dtype=torch.float16), "got 'float16'; near it are float8"),
        (lambda: TileKernel('mhc.pre', dtype=torch.float16), 'dtype must not be given, since mhc.pre has none'),
        (
            lambda: TileKernel('fp8_quant')(random(3, 64), variant='per_row'),
            "variant must be a known word, got 'per_row'",
        ),
        (
            lambda: TileKernel('fp8_quant', dtype=torch.float8_e5m2)(random(3, 64), dtype='float8_e4m3fn'),
            'near it are float8_e5m2',
        ),
    ],
)
def test_unknown_words_get_the_nearest_known_ones(call, said):
    with pytest.raises(ArgumentError) as error:
        call()
    assert str(error.value).startswith('TileKernel: ') and said in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('call', 'said'),
    [
        (lambda x: quant.swiglu_forward_and_per_block_cast(x, 'e4m3', (64, 64)), 'block_size must be'),
        (lambda x: quant.swiglu_forward_and_per_block_cast(x, 'e4m3_1x64_f32'), 'fmt.sf_block must be'),
        (lambda x: quant.swiglu_forward_and_per_block_cast(x[:, 1:], 'e4m3'), 'columns of x must be a multiple of 2'),
        (
            lambda x: quant.fused_swiglu_quant_fp8(x, x, 128, variant='per_block'),
            'group_size must be None for per_block',
        ),
        (lambda x: quant.fused_swiglu_quant_fp8(x, x, block_size=32), 'block_size must be None for per_token'),
        (lambda x: quant.fused_swiglu_quant_fp8(x, x, variant='per_row'), 'variant must be'),
    ],
)
def test_bad_blocks_are_refused(call, said):
    with pytest.raises(ArgumentError) as error:
        call(random(3, 64))
    assert said in str(error.value) and '\n' not in str(error.value)
