"""A layer over NCCL. One GPU is one rank: the exchange, its streams and its gradients, with nobody else to talk to."""

import pytest
import torch
import torch.distributed as dist

from tile_kernels.modeling import MoELayer

if not torch.cuda.is_available():
    pytest.skip('needs a CUDA device', allow_module_level=True)

NUM_EXPERTS, TOPK, HIDDEN, WIDTH, NUM_TOKENS = 8, 2, 256, 128, 300


@pytest.fixture
def group(tmp_path):
    dist.init_process_group('nccl', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def run(layer, x):
    """The result of a layer and the gradients of its input and weights."""
    x = x.clone().requires_grad_()
    y = layer(x)
    torch.manual_seed(2)
    y.backward(torch.randn_like(y))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize('shared', [0, 1])
def test_one_rank_gives_what_no_group_gives(group, shared):
    torch.manual_seed(0)
    options = dict(intermediate_dim=WIDTH, num_shared_experts=shared, device='cuda')
    alone = MoELayer(NUM_EXPERTS, TOPK, HIDDEN, **options)
    spread = MoELayer(NUM_EXPERTS, TOPK, HIDDEN, group=group, **options)
    spread.load_state_dict(alone.state_dict())
    x = torch.randn(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16, device='cuda')
    expected, actual = run(alone, x), run(spread, x)
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=0)
    for a, e in zip(actual[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-2 * e.abs().max().item())


def test_an_fp8_payload_changes_little(group):
    torch.manual_seed(0)
    alone = MoELayer(NUM_EXPERTS, TOPK, HIDDEN, intermediate_dim=WIDTH, device='cuda')
    spread = MoELayer(NUM_EXPERTS, TOPK, HIDDEN, intermediate_dim=WIDTH, device='cuda', group=group, fp8_payload=True)
    spread.load_state_dict(alone.state_dict())
    x = torch.randn(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16, device='cuda')
    expected, actual = run(alone, x), run(spread, x)
    for a, e in zip(actual[:2], expected[:2], strict=True):
        assert (a.float() - e.float()).norm() < 0.06 * e.float().norm()
