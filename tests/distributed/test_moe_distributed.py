"""Experts spread over processes give what one process gives; failures are told on every rank."""

import pytest
import torch

from tests.distributed import workers
from tile_kernels import ArgumentError
from tile_kernels.distributed import MoEDistributed


@pytest.mark.parametrize(
    ('world_size', 'sizes'), [(2, (25, 15)), (3, (40, 0, 0)), (4, (10, 0, 29, 1))], ids=['uneven', 'one', 'four']
)
def test_many_processes_equal_one(world_size, sizes):
    layer, tokens = workers.whole()
    x = tokens.clone().requires_grad_()
    y = layer(x)
    torch.manual_seed(5)
    y.backward(torch.randn(40, workers.HIDDEN).bfloat16())
    found = workers.spawn(workers.layer_of_many, world_size, sizes, False)
    joined = [torch.cat([found[rank][i] for rank in range(world_size)]) for i in (0, 1, 3)]
    gate = sum(found[rank][2].float() for rank in range(world_size))
    torch.testing.assert_close(joined[0], y, rtol=0, atol=0)
    torch.testing.assert_close(joined[1], x.grad, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(joined[2], layer.experts.gate_up_proj.grad, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(gate, layer.gate.weight.grad.float(), rtol=3e-2, atol=3e-1)


def test_shared_experts_give_the_same_beside_the_exchange():
    layer, tokens = workers.whole(num_shared_experts=2)
    x = tokens.clone().requires_grad_()
    y = layer(x)
    y.backward(workers.gradient((40,), 0))
    found = workers.spawn(workers.layer_of_many, 2, (40, 0), False, 2)
    torch.testing.assert_close(found[0][0], y, rtol=0, atol=0)
    torch.testing.assert_close(found[0][1], x.grad, rtol=2e-2, atol=2e-2)
    for i, weight in enumerate(layer.shared_experts.parameters()):
        torch.testing.assert_close(found[0][4 + i] + found[1][4 + i], weight.grad, rtol=2e-2, atol=2e-2)


def test_shared_experts_work_while_tokens_travel():
    found = workers.spawn(workers.order_of_work, 2)
    for rank in (0, 1):
        forward, backward = found[rank]
        assert forward == ['start', 'shared', 'arrived', 'start', 'arrived']
        assert backward.index('shared') < len(backward) - 1 and backward[-1] == 'arrived'
        assert backward.count('start') == backward.count('arrived') == 2


@pytest.mark.parametrize('wrap', ['ddp', 'fsdp', 'ddp, experts spread', 'fsdp, experts spread'])
def test_it_works_inside_ddp_and_fsdp(wrap):
    layer, tokens = workers.whole(num_shared_experts=1, dtype=torch.float32)
    x = tokens.float().requires_grad_()
    y = layer(x)
    y.backward(workers.gradient((40,), 0).float())
    found = workers.spawn(workers.around, 2, wrap)
    torch.testing.assert_close(torch.cat([found[0][0], found[1][0]]), y, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat([found[0][1], found[1][1]]), x.grad, rtol=2e-2, atol=2e-2)
    for name, parameter in layer.named_parameters():
        if name.startswith('experts.') and 'spread' in wrap:
            actual = torch.cat([found[rank][2][name] for rank in (0, 1)])  # of all tokens already: the sum
        else:
            actual = 2 * found[0][2][name]  # both average over the ranks
            torch.testing.assert_close(found[0][2][name], found[1][2][name], rtol=0, atol=0)
        bound = 3e-2 * parameter.grad.abs().max().item()
        torch.testing.assert_close(actual, parameter.grad, rtol=0, atol=bound)


def test_a_mesh_of_experts_and_fsdp_equals_one_process():
    layer, tokens = workers.whole(num_shared_experts=1, dtype=torch.float32)
    x = tokens.float().requires_grad_()
    y = layer(x)
    y.backward(workers.gradient((40,), 0).float())
    found = workers.spawn(workers.mesh_step, 4)
    torch.testing.assert_close(torch.cat([found[rank][0] for rank in range(4)]), y, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat([found[rank][1] for rank in range(4)]), x.grad, rtol=2e-2, atol=2e-2)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for p in layer.parameters():
        p.grad /= 4  # FSDP averages over the ranks
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    for name, p in layer.named_parameters():
        ranks = (0, 1) if name.startswith('experts.') else (0,)  # rank 1 has the other half of the experts
        gradient, stepped = (torch.cat([found[rank][i][name] for rank in ranks]) for i in (2, 3))
        bound = 3e-2 * p.grad.abs().max().item()
        torch.testing.assert_close(gradient, p.grad, rtol=0, atol=bound)
        torch.testing.assert_close(stepped, p, rtol=0, atol=0.1 * bound)
        assert not torch.equal(stepped, before[name])
        for other, source in ((2, 0), (3, 1 if name.startswith('experts.') else 0)):
            assert torch.equal(found[other][3][name], found[source][3][name])


def test_an_fp8_payload_changes_little():
    layer, tokens = workers.whole()
    y = layer(tokens).float()
    found = workers.spawn(workers.layer_of_many, 2, (25, 15), True)
    assert (torch.cat([found[0][0], found[1][0]]).float() - y).norm() < 0.05 * y.norm()


def test_a_rank_that_leaves_is_reported_and_nobody_hangs():
    found = workers.spawn(workers.one_rank_leaves, 3)
    for rank in (0, 2):
        assert f'the exchange failed on rank {rank} of 3' in found[rank]


def test_bad_arguments_are_told_on_every_rank():
    found = workers.spawn(workers.bad_arguments, 2)
    for rank in (0, 1):
        assert [sentence.partition(', got')[0] for sentence in found[rank]] == [
            'MoEDistributed: num_experts must be a multiple of the 2 ranks',
            'MoEDistributed: topk must be at most 4',
            'MoEDistributed: strategy must be one of alltoall, symmetric',
            'MoEDistributed: group must be a process group this rank belongs to',
            'MoEDistributed: gather_output must follow route_tokens',
            'MoEDistributed.route_tokens: topk_indices must be (num_tokens, topk) with num_tokens = 3',
            'MoEDistributed: topk_scores must be float32',
            'MoEDistributed: expert_output must be (num_rows, out_hidden) with num_rows = 6',
        ]


def test_without_shared_memory_symmetric_is_alltoall_with_one_warning():
    found = workers.spawn(workers.symmetric_rows, 2)
    for rank in (0, 1):
        (plain, none), (first, warned), (second, again) = found[rank][0]
        for other in (first, second):
            for a, b in zip(plain, other, strict=True):
                assert torch.equal(a, b)
        assert none == again == []
        assert len(warned) == 1 and "falls back to 'alltoall': scale.empty: needs one GPU per rank" in warned[0]
        assert len(found[rank][1]) == 3 and all('max_tokens' in sentence for sentence in found[rank][1])


def test_rows_of_any_stride_travel():
    found = workers.spawn(workers.strided_rows, 2)
    for rank in (0, 1):
        torch.testing.assert_close(*found[rank], rtol=0, atol=0)


def test_without_a_process_group_it_says_so():
    with pytest.raises(ArgumentError, match='needs a process group'):
        MoEDistributed(4, 2)


def test_two_groups_of_ranks_keep_to_themselves():
    found = workers.spawn(workers.subgroups, 4)
    for rank in range(4):
        assert found[rank]['place'] == (rank % 2, 2)
        torch.testing.assert_close(found[rank]['back'], found[rank]['tokens'], rtol=0, atol=0)
        partners = [found[other]['tokens'] for other in range(rank // 2 * 2, rank // 2 * 2 + 2)]
        torch.testing.assert_close(found[rank]['rows'], torch.cat([x[rank % 2 :: 2] for x in partners]), rtol=0, atol=0)


def test_results_are_gathered_once():
    found = workers.spawn(workers.gather_twice, 2)
    for rank in (0, 1):
        assert found[rank] == 'MoEDistributed: gather_output must follow route_tokens'
