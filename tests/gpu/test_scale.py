"""Distributed programs on one GPU: several ranks of one process, one rank with NCCL, several processes that overlap."""

import os

import pytest
import tilelang.language as T
import torch
import torch.distributed as dist

from tests.distributed import workers
from tests.scale import cases
from tile_kernels import LaunchError, UnsupportedError, scale
from tile_kernels.distributed import MoEDistributed
from tile_kernels.scale import programs

if not torch.cuda.is_available():
    pytest.skip('needs a CUDA device', allow_module_level=True)


@pytest.mark.parametrize('world', [1, 2, 3, 4])
@pytest.mark.parametrize('name', cases.ALL)
def test_on_one_gpu(name, world):
    case = cases.ALL[name](world, 'cuda', **cases.LARGE[name])
    scale.on_one_gpu(case.kernel, world, case.args, launches=3)
    case.check()


def lonely(world):
    """Every rank waits for the next, and rank 1 signals nobody."""

    @T.prim_func
    def main(signals: scale.Signals(world), rank: T.int32):
        with T.Kernel(1, threads=32), scale.Scale('device', rank, world) as (dev_id, dev_num):
            if dev_id != 1:
                scale.signal(signals, dst=(dev_id + dev_num - 1) % dev_num)
            scale.wait(signals, src=(dev_id + 1) % dev_num)

    return main


def test_a_rank_that_never_signals_is_named_and_the_gpu_lives():
    with pytest.raises(LaunchError, match='rank 0 waited 1 s for a signal of rank 1, which did not come'):
        scale.on_one_gpu(lonely(3), 3, lambda rank: (None, rank), timeout=1.0)
    case = cases.shift(2, 'cuda')
    scale.on_one_gpu(case.kernel, 2, case.args)
    case.check()


def test_more_blocks_than_the_gpu_holds_are_refused():
    n = 128 * 4096
    kernel = programs.reduce_scatter(n, 2, block=128)
    x, y = torch.zeros(2, 2, n, device='cuda'), torch.zeros(2, n, device='cuda')
    with pytest.raises(UnsupportedError, match='the 2 ranks need 8192 resident blocks'):
        scale.on_one_gpu(kernel, 2, lambda rank: (x[rank], y[rank], None, rank))


@pytest.fixture
def group(tmp_path):
    dist.init_process_group('nccl', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_run_with_one_rank(group):
    a, b = torch.randn(300, device='cuda'), scale.empty(300, dtype=torch.float32, group=group)
    for _ in range(3):
        scale.run(programs.shift(300, 1), group, a, b, None, 0)
    assert torch.equal(a, b)


@pytest.mark.parametrize('fp8', [False, True])
def test_symmetric_tokens_are_those_of_alltoall(group, fp8):
    found = []
    for options in ({}, dict(strategy='symmetric', max_tokens=64)):
        router = MoEDistributed(4, 2, fp8_payload=fp8, **options)
        torch.manual_seed(0)
        x = torch.randn(50, 256, device='cuda', dtype=torch.bfloat16, requires_grad=True)
        rows = router.route_tokens(x, torch.randint(-1, 4, (50, 2), device='cuda'))
        y = router.gather_output(rows.hidden * 2, torch.rand(50, 2, device='cuda'))
        y.sum().backward()
        found.append((*rows, y, x.grad))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def overlapping(rank, world_size, results):
    """All-gather by processes that share one GPU; they take turns, so it is slow."""
    torch.cuda.set_device(0)
    group = dist.group.WORLD
    try:
        y = scale.empty(world_size, 100, dtype=torch.float32, group=group)
    except UnsupportedError as error:
        results[rank] = str(error)
        return
    x = torch.full((100,), float(rank + 1), device='cuda')
    scale.run(programs.all_gather(100, world_size), group, x, y, None, rank)
    results[rank] = y.cpu()


@pytest.mark.parametrize('world', [2, 4])
def test_processes_that_overlap_on_one_gpu(world, monkeypatch):
    monkeypatch.setitem(os.environ, 'TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES', '1')
    found = workers.spawn(overlapping, world)
    if isinstance(found[0], str):
        pytest.skip(found[0])
    for y in found.values():
        assert torch.equal(y, torch.arange(1.0, world + 1)[:, None].expand(world, 100))
