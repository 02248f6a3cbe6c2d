"""What the processes of the tests run; every function is called as `fn(rank, world_size, results)`."""

import datetime
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tile_kernels import ArgumentError, TileKernelsError
from tile_kernels.distributed import MoEDistributed
from tile_kernels.modeling import MoELayer


def spawn(fn, world_size, *args):
    """Run `fn` in processes joined by gloo; returns what each put into its results."""
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as rendezvous, mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_enter, (fn, world_size, rendezvous.name + '.store', results, args), nprocs=world_size)
        return dict(results)


def _enter(rank, fn, world_size, store, results, args):
    os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo')
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=20)
    dist.init_process_group('gloo', init_method=f'file://{store}', rank=rank, world_size=world_size, timeout=timeout)
    try:
        fn(rank, world_size, results, *args)
    finally:
        if results.get('aborted') is None:
            dist.destroy_process_group()


NUM_EXPERTS, TOPK, HIDDEN, WIDTH = 12, 3, 128, 128


def whole(seed=0):
    """The layer of one process, and the tokens of all ranks."""
    torch.manual_seed(seed)
    layer = MoELayer(NUM_EXPERTS, TOPK, HIDDEN, intermediate_dim=WIDTH)
    return layer, torch.randn(40, HIDDEN, dtype=torch.bfloat16)


def share(rank, world_size, sizes):
    """Rows of a rank: uneven, and none for some."""
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def layer_of_many(rank, world_size, results, sizes, fp8):
    """Forward and every gradient of the layer with its experts spread over the ranks."""
    full, tokens = whole()
    layer = MoELayer(NUM_EXPERTS, TOPK, HIDDEN, intermediate_dim=WIDTH, group=dist.group.WORLD, fp8_payload=fp8)
    local = NUM_EXPERTS // world_size
    mine = slice(rank * local, (rank + 1) * local)
    with torch.no_grad():
        layer.gate.weight.copy_(full.gate.weight)
        layer.experts.gate_up_proj.copy_(full.experts.gate_up_proj[mine])
        layer.experts.down_proj.copy_(full.experts.down_proj[mine])
    x = tokens[share(rank, world_size, sizes)].clone().requires_grad_()
    y = layer(x)
    torch.manual_seed(5)
    dy = torch.randn(40, HIDDEN).bfloat16()[share(rank, world_size, sizes)]
    y.backward(dy)
    results[rank] = [t.detach().clone() for t in (y, x.grad, layer.gate.weight.grad, layer.experts.gate_up_proj.grad)]


def one_rank_leaves(rank, world_size, results):
    """Rank 1 never arrives: the others are told within the timeout."""
    results['aborted'] = True
    if rank == 1:
        return
    router = MoEDistributed(6, 2)
    try:
        router.route_tokens(torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.int64))
    except TileKernelsError as error:
        results[rank] = str(error)


def bad_arguments(rank, world_size, results):
    """Each sentence a rank reads, on every rank."""
    said = []
    for call in (
        lambda: MoEDistributed(5, 2),
        lambda: MoEDistributed(4, 2, strategy='ring'),
        lambda: MoEDistributed(4, 2).gather_output(torch.zeros(1, 1)),
        lambda: MoEDistributed(4, 2).route_tokens(torch.zeros(3, 8), torch.zeros(2, 2, dtype=torch.int64)),
    ):
        try:
            call()
        except ArgumentError as error:
            said.append(str(error))
    results[rank] = said
