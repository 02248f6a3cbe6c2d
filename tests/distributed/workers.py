"""What the processes of the tests run; every function is called as `fn(rank, world_size, results)`."""

import datetime
import os
import tempfile
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tile_kernels import ArgumentError, TileKernelsError
from tile_kernels.distributed import MoEDistributed
from tile_kernels.distributed.moe import _Exchange
from tile_kernels.modeling import MoELayer


def spawn(fn, world_size, *args):
    """Run `fn` in processes joined by gloo; returns what each put into its results.

    They are forks of one process that has imported this module, because importing it takes seconds.
    """
    torch.set_num_threads(1)
    mp.get_context('forkserver').set_forkserver_preload([__name__])
    with tempfile.NamedTemporaryFile() as rendezvous, mp.Manager() as manager:
        results = manager.dict()
        given = (fn, world_size, rendezvous.name + '.store', results, args)
        mp.start_processes(_enter, given, nprocs=world_size, start_method='forkserver')
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
    os._exit(0)  # a thread of gloo that still holds a tensor may abort the process while Python ends


NUM_EXPERTS, TOPK, HIDDEN, WIDTH = 12, 3, 128, 128


def whole(seed=0, **options):
    """The layer of one process, and the tokens of all ranks."""
    torch.manual_seed(seed)
    layer = MoELayer(NUM_EXPERTS, TOPK, HIDDEN, intermediate_dim=WIDTH, **options)
    return layer, torch.randn(40, HIDDEN, dtype=torch.bfloat16)


def share(rank, world_size, sizes):
    """Rows of a rank: uneven, and none for some."""
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def spread(rank, world_size, full, **options):
    """A layer with the weights of a whole one and this rank's share of its experts."""
    layer = MoELayer(NUM_EXPERTS, TOPK, HIDDEN, intermediate_dim=WIDTH, group=dist.group.WORLD, **options)
    local = NUM_EXPERTS // world_size
    mine = slice(rank * local, (rank + 1) * local)
    weights = full.state_dict()
    weights |= {name: weights[name][mine] for name in weights if name.startswith('experts.')}
    layer.load_state_dict(weights)
    return layer


def gradient(sizes, rank):
    """The part of a rank of the gradient of the whole result."""
    torch.manual_seed(5)
    return torch.randn(40, HIDDEN).bfloat16()[share(rank, len(sizes), sizes)]


def layer_of_many(rank, world_size, results, sizes, fp8, shared=0):
    """Forward and every gradient of the layer with its experts spread over the ranks."""
    full, tokens = whole(num_shared_experts=shared)
    layer = spread(rank, world_size, full, fp8_payload=fp8, num_shared_experts=shared)
    x = tokens[share(rank, world_size, sizes)].clone().requires_grad_()
    y = layer(x)
    y.backward(gradient(sizes, rank))
    found = [y, x.grad, layer.gate.weight.grad, layer.experts.gate_up_proj.grad]
    found += [p.grad for p in layer.shared_experts.parameters()] if shared else []
    results[rank] = [t.detach().clone() for t in found]


def order_of_work(rank, world_size, results):
    """What happens between the start of an exchange and the wait for it, forward and backward."""
    full, tokens = whole(num_shared_experts=1)
    layer = spread(rank, world_size, full, num_shared_experts=1)
    said = []

    def tell(owner, name, word):
        before = getattr(owner, name)

        def call(*args, **kwargs):
            said.append(word)
            return before(*args, **kwargs)

        setattr(owner, name, call)

    tell(_Exchange, 'start', 'start')
    tell(_Exchange, 'arrived', 'arrived')
    layer.shared_experts.register_forward_hook(lambda *_: said.append('shared'))
    x = tokens.clone().requires_grad_()
    y = layer(x)
    forward = len(said)
    layer.shared_experts.down_proj.weight.register_hook(lambda grad: said.append('shared'))
    y.sum().backward()
    results[rank] = (said[:forward], said[forward:])


def around(rank, world_size, results, wrap):
    """One step of a layer inside DDP or FSDP2, every rank with its own tokens; its gradients, gathered."""
    full, tokens = whole(num_shared_experts=1, dtype=torch.float32)
    sizes = (25, 15)
    x = tokens[share(rank, world_size, sizes)].float().requires_grad_()
    layer, model = full, full
    if wrap == 'ddp':
        model = DistributedDataParallel(layer)
    elif wrap == 'fsdp':
        fully_shard(layer, mesh=init_device_mesh('cpu', (world_size,)))
    elif wrap == 'ddp, experts spread':
        layer = spread(rank, world_size, full, num_shared_experts=1, dtype=torch.float32)
        ignored = [name for name, _ in layer.named_parameters() if name.startswith('experts.')]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, ignored)
        model = DistributedDataParallel(layer)
    elif wrap == 'fsdp, experts spread':
        layer = model = spread(rank, world_size, full, num_shared_experts=1, dtype=torch.float32)
        fully_shard(layer, mesh=init_device_mesh('cpu', (world_size,)), ignored_params=set(layer.experts.parameters()))
    y = model(x)
    y.backward(gradient(sizes, rank).float())
    gradients = {}
    for name, parameter in layer.named_parameters():
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        gradients[name] = grad.detach().clone()
    results[rank] = (y.detach().clone(), x.grad.clone(), gradients)


def mesh_step(rank, world_size, results):
    """One optimizer step on a mesh: experts spread over `ep` and sharded over `dp`, all else sharded over all ranks."""
    full, tokens = whole(num_shared_experts=1, dtype=torch.float32)
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'ep'))
    ep = mesh.get_local_rank('ep')
    layer = MoELayer(
        NUM_EXPERTS,
        TOPK,
        HIDDEN,
        intermediate_dim=WIDTH,
        group=mesh['ep'],
        num_shared_experts=1,
        dtype=torch.float32,
    )
    weights = full.state_dict()
    mine = slice(ep * NUM_EXPERTS // 2, (ep + 1) * NUM_EXPERTS // 2)
    layer.load_state_dict({n: w[mine] if n.startswith('experts.') else w for n, w in weights.items()})
    with pytest.raises(
        ArgumentError, match=r"group must be a mesh of one dimension, got 2 dimensions; pass mesh\['ep'\]"
    ):
        MoELayer(NUM_EXPERTS, TOPK, HIDDEN, group=mesh)
    fully_shard(layer.experts, mesh=mesh['dp'])
    layer.experts.set_gradient_divide_factor(world_size)
    layer.experts.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it sums
    fully_shard(layer, mesh=init_device_mesh('cpu', (world_size,)))
    sizes = (13, 7, 0, 20)
    x = tokens[share(rank, world_size, sizes)].float().requires_grad_()
    y = layer(x)
    y.backward(gradient(sizes, rank).float())
    gradients = {name: p.grad.full_tensor().clone() for name, p in layer.named_parameters()}
    torch.optim.SGD(layer.parameters(), lr=0.1, foreach=False).step()
    stepped = {name: p.full_tensor().detach().clone() for name, p in layer.named_parameters()}
    results[rank] = (y.detach().clone(), x.grad.clone(), gradients, stepped)


def one_rank_leaves(rank, world_size, results):
    """Rank 1 never arrives: the others are told within the timeout."""
    results['aborted'] = True
    dist.barrier()  # all are connected: a rank that leaves while others connect fails them there
    if rank == 1:
        time.sleep(1)  # until all have left the barrier
        return
    router = MoEDistributed(6, 2)
    try:
        router.route_tokens(torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.int64))
    except TileKernelsError as error:
        results[rank] = str(error)


def bad_arguments(rank, world_size, results):
    """Each sentence a rank reads, on every rank."""
    said = []
    router = MoEDistributed(4, 2)
    router.route_tokens(torch.zeros(3, 8), torch.tensor([[0, 2]] * 3))
    for call in (
        lambda: MoEDistributed(5, 2),
        lambda: MoEDistributed(4, 5),
        lambda: MoEDistributed(4, 2, strategy='ring'),
        lambda: MoEDistributed(4, 2, group=dist.GroupMember.NON_GROUP_MEMBER),
        lambda: MoEDistributed(4, 2).gather_output(torch.zeros(1, 1)),
        lambda: MoEDistributed(4, 2).route_tokens(torch.zeros(3, 8), torch.zeros(2, 2, dtype=torch.int64)),
        lambda: router.gather_output(torch.zeros(6, 8), torch.zeros(3, 2).half()),
        lambda: router.gather_output(torch.zeros(5, 8), torch.zeros(3, 2)),
    ):
        try:
            call()
        except ArgumentError as error:
            said.append(str(error))
    results[rank] = said


def symmetric_rows(rank, world_size, results):
    """Both strategies: outputs, gradients and warnings."""
    found = []
    for options in ({}, dict(strategy='symmetric', max_tokens=9), dict(strategy='symmetric', max_tokens=5)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            router = MoEDistributed(4, 2, **options)
        torch.manual_seed(rank)
        x = torch.randn(5 * rank + 1, 16, dtype=torch.bfloat16, requires_grad=True)
        experts = torch.randint(-1, 4, (len(x), 2))
        rows = router.route_tokens(x, experts)
        y = router.gather_output(rows.hidden * 2, torch.rand(len(x), 2))
        y.sum().backward()
        found.append(([t.detach().clone() for t in (*rows, y, x.grad)], [str(w.message) for w in caught]))
    said = []
    for options in (dict(strategy='symmetric'), dict(max_tokens=3), dict(strategy='symmetric', max_tokens=0)):
        try:
            MoEDistributed(4, 2, **options)
        except ArgumentError as error:
            said.append(str(error))
    results[rank] = found, said


def strided_rows(rank, world_size, results):
    """Transposed tokens there and back; the other rank has none, whose strides look contiguous."""
    router = MoEDistributed(4, 1)
    x = torch.randn(8, 3 * rank).T
    rows = router.route_tokens(x, torch.arange(3 * rank).unsqueeze(1)).hidden
    results[rank] = (router.gather_output(rows.T.contiguous().T), x.contiguous())


def subgroups(rank, world_size, results):
    """Two pairs of ranks, each with a router of its own; expert e of a pair belongs to its rank e."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    router = MoEDistributed(2, 1, group=groups[rank // 2])
    torch.manual_seed(rank)
    x = torch.randn(4, 8)
    rows = router.route_tokens(x, torch.tensor([[0], [1], [0], [1]])).hidden
    back = router.gather_output(rows)
    results[rank] = dict(place=(router.rank, router.world_size), tokens=x, rows=rows, back=back)


def gather_twice(rank, world_size, results):
    """The state of an exchange serves one `gather_output`."""
    router = MoEDistributed(4, 1)
    rows = router.route_tokens(torch.randn(3, 8), torch.tensor([[0], [2], [3]])).hidden
    router.gather_output(rows)
    try:
        router.gather_output(rows)
    except ArgumentError as error:
        results[rank] = str(error)
