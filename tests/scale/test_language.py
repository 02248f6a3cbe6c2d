"""Scopes of ids, and calls that make no sense."""

import pytest
import tilelang.language as T
import torch

from tile_kernels import ArgumentError
from tile_kernels import scale as S
from tile_kernels.core import nvcc
from tile_kernels.interpreter import UnsupportedConstruct, interpret


@T.prim_func
def ids_of_blocks(ids: T.Tensor((4, 4), 'int32')):
    with (
        T.Kernel(4, threads=32, cluster_dims=2) as pid,
        S.Scale('cta_cluster') as (block, size),
        S.Scale('block') as (number, count),
    ):
        if T.get_thread_binding() == 0:
            ids[pid, 0] = block
            ids[pid, 1] = size
            ids[pid, 2] = number
            ids[pid, 3] = count


def test_scopes_of_clusters_and_blocks():
    ids = torch.zeros(4, 4, dtype=torch.int32)
    interpret(ids_of_blocks, ids)
    assert ids.tolist() == [[pid % 2, 2, pid, 4] for pid in range(4)]
    assert 'cluster' in nvcc.lower(ids_of_blocks, {}, 'sm_90a')[0]


def built(body, world=2):
    """A kernel whose statements `body` writes."""

    @T.prim_func
    def main(
        a: T.Tensor((8,), 'float32'), b: S.Symmetric((8,), 'float32', 2), signals: S.Signals(2, slots=3), rank: T.int32
    ):
        with T.Kernel(1, threads=32), S.Scale('device', rank, world):
            body(a, b, signals)

    return main


@pytest.mark.parametrize(
    ('body', 'text'),
    [
        (lambda a, b, signals: S.signal(signals, dst=0, slot=3), 'scale.signal: slot must be from 0 to 2, got 3'),
        (lambda a, b, signals: S.wait(signals, src=0, slot=-1), 'scale.wait: slot must be from 0 to 2, got -1'),
        (lambda a, b, signals: S.barrier(b), 'scale.barrier: needs a parameter declared as Signals, got b'),
        (lambda a, b, signals: S.copy(a, signals, dst=0), 'scale.peer: needs a parameter declared as Symmetric'),
        (lambda a, b, signals: S.peer(a, 0), 'scale.peer: needs a parameter declared as Symmetric, got a'),
    ],
)
def test_wrong_calls_are_told_when_the_kernel_is_built(body, text):
    with pytest.raises(ArgumentError, match=text):
        built(body)


def test_wrong_scopes_are_told_when_the_kernel_is_built():
    with pytest.raises(ArgumentError, match='is declared for 2 devices, the scope has 3'):
        built(lambda a, b, signals: S.barrier(signals), world=3)
    with pytest.raises(ArgumentError, match='name must be one of device, cta_cluster, block'):
        S.Scale('warp')
    for arguments in (('device',), ('block', 0, 2)):
        with pytest.raises(ArgumentError, match="rank and world belong to 'device'"):
            S.Scale(*arguments)
    with pytest.raises(ArgumentError, match=r"must be inside `with Scale\('device'"):

        @T.prim_func
        def main(signals: S.Signals(2)):
            with T.Kernel(1, threads=32):
                S.barrier(signals)


def test_a_signal_needs_the_simulator():
    kernel = built(lambda a, b, signals: S.barrier(signals))
    pad = torch.zeros(64, dtype=torch.int64)
    table = torch.tensor([pad.data_ptr()] * 2, dtype=torch.int64).view(torch.uint64)
    with pytest.raises(UnsupportedConstruct, match=r'use scale\.simulate'):
        interpret(kernel, torch.zeros(8), table, table, 0)
