"""Every program with inputs and the expected result, for any number of ranks, on a CPU or a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.scale import programs


@dataclass
class Case:
    """A kernel, the arguments of each rank, and a check of the results."""

    kernel: Any
    args: Callable[[int], tuple]
    check: Callable[[], None]


def shift(world, device='cpu', n=300):
    a, b = torch.randn(world, n, device=device), torch.zeros(world, n, device=device)

    def check():
        assert torch.equal(b, a.roll(1, 0))

    return Case(programs.shift(n, world), lambda rank: (a[rank], b[rank], None, rank), check)


def all_gather(world, device='cpu', n=100):
    x, y = torch.randn(world, n, device=device), torch.zeros(world, world, n, device=device)

    def check():
        assert all(torch.equal(part, x) for part in y)

    return Case(programs.all_gather(n, world), lambda rank: (x[rank], y[rank], None, rank), check)


def reduce_scatter(world, device='cpu', n=300):
    x = torch.randn(world, world, n, device=device).bfloat16()
    y = torch.zeros(world, n, device=device).bfloat16()

    def check():
        total = torch.zeros(world, n, device=device)
        for part in x:
            total += part.float()
        assert torch.equal(y, total.bfloat16())

    return Case(programs.reduce_scatter(n, world, 'bfloat16'), lambda rank: (x[rank], y[rank], None, rank), check)


def sizes(world, kind):
    """Rows from each rank to each rank."""
    found = torch.randint(1, 5, (world, world), dtype=torch.int32)
    if kind == 'one takes all':
        found[:, : world - 1] = 0
    if kind == 'empty':
        found[world // 2] = 0
        found[:, 0] = 0
    return found


def all_to_all(world, device='cpu', kind='uneven', hidden=64, capacity=None, counts=None):
    counts = sizes(world, kind) if counts is None else counts
    capacity = capacity or 5 * world
    sent = [torch.randn(int(mine.sum()), hidden).bfloat16().to(device) for mine in counts]
    rows = torch.zeros(world, capacity, hidden, device=device).bfloat16()
    table = torch.zeros(world, world, world, dtype=torch.int32, device=device)
    needed = torch.zeros(world, world, dtype=torch.int32, device=device)
    there = counts.to(device)

    def args(rank):
        return sent[rank], there[rank], rows[rank], table[rank], needed[rank], None, rank

    def check():
        pieces = [list(own.split(mine.tolist())) for own, mine in zip(sent, counts, strict=True)]
        assert torch.equal(needed.cpu(), counts.sum(0).expand(world, world).int())
        for rank in range(world):
            expected = torch.cat([pieces[source][rank] for source in range(world)])
            if len(expected) > capacity:
                expected = expected[:0]
            assert torch.equal(rows[rank, : len(expected)], expected)
            assert not rows[rank, len(expected) :].any()

    return Case(programs.all_to_all(capacity, hidden, world), args, check)


def _integers(*shape, device):
    """Small numbers, whose products are exact."""
    return torch.randint(-3, 4, shape).bfloat16().to(device)


def _product(a, b):
    return (a.float() @ b.float().T).bfloat16()


def all_gather_gemm(world, device='cpu', m=32, tile=(16, 32, 16)):
    a, b = _integers(world, m, m, device=device), _integers(world, m, m, device=device)
    gathered = torch.zeros(world, world * m, m, device=device).bfloat16()
    c = torch.zeros(world, world * m, m, device=device).bfloat16()

    def check():
        for rank in range(world):
            assert torch.equal(c[rank], _product(a.flatten(0, 1), b[rank]))

    kernel = programs.all_gather_gemm(m, m, m, world, tile=tile)
    return Case(kernel, lambda rank: (a[rank], b[rank], gathered[rank], c[rank], None, rank), check)


def gemm_all_to_all(world, device='cpu', m=32, tile=(32, 32, 16)):
    a, b = _integers(world, world, m, m, device=device), _integers(world, m, m, device=device)
    y = torch.zeros(world, world, m, m, device=device).bfloat16()

    def check():
        for rank in range(world):
            for source in range(world):
                assert torch.equal(y[rank, source], _product(a[source, rank], b[source]))

    kernel = programs.gemm_all_to_all(m, m, m, world, tile=tile)
    return Case(kernel, lambda rank: (a[rank], b[rank], y[rank], None, rank), check)


ALL = {
    'shift': shift,
    'all_gather': all_gather,
    'reduce_scatter': reduce_scatter,
    'all_to_all': all_to_all,
    'all_to_all, empty': lambda world, device='cpu', **shape: all_to_all(world, device, 'empty', **shape),
    'all_to_all, one takes all': lambda world, device='cpu', **shape: all_to_all(
        world, device, 'one takes all', **shape
    ),
    'all_gather_gemm': all_gather_gemm,
    'gemm_all_to_all': gemm_all_to_all,
}

#: Sizes for a GPU: several blocks, 16-byte vectors and the tiles of a real product.
LARGE = {
    'shift': dict(n=1 << 20),
    'all_gather': dict(n=1 << 20),
    'reduce_scatter': dict(n=4096),
    'all_to_all': dict(hidden=2048),
    'all_to_all, empty': dict(hidden=2048),
    'all_to_all, one takes all': dict(hidden=2048),
    'all_gather_gemm': dict(m=256, tile=(64, 64, 32)),
    'gemm_all_to_all': dict(m=128, tile=(64, 64, 32)),
}
