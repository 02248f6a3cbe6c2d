"""Attention, linear attention and products on a GPU: more than 2^31 elements, the same bits again, graphs replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tile_kernels import activation, attention, gemm, linear_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Call:
    """A call whose rows do not depend on each other.

    Attributes:
        rows: so many that the largest tensor has more than 2^31 elements.
        build: inputs by name, from a number of rows and a device.
        run: outputs; the first dimension of each is that of the rows.
        shared: inputs that all rows have in common.
    """

    rows: int
    build: Callable[[int, str], dict[str, Any]]
    run: Callable[..., Outputs]
    shared: tuple[str, ...] = ()


def normal(*shape: int, device: str, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device=device, dtype=dtype).normal_().mul_(scale)


def uniform(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device=device, dtype=dtype).uniform_()


def gates(*shape: int, device: str) -> Tensor:
    """Logarithms of decays."""
    return uniform(*shape, device=device).neg_()


def unit(x: Tensor) -> Tensor:
    """Rows of length 1; halves of the rows in turn, which saves memory."""
    for part in x.chunk(8):
        part.div_(torch.linalg.vector_norm(part, dim=-1, keepdim=True))
    return x


def gradients(function: Callable[..., Tensor], *names: str) -> Callable[..., Outputs]:
    """The result, and its gradients in the inputs of these names; the result is its own upstream gradient."""

    def run(**given: Any) -> Outputs:
        wanted = {name: given[name].detach().requires_grad_() for name in names}
        with torch.enable_grad():
            y = function(**given | wanted)
        return y.detach(), *torch.autograd.grad(y, list(wanted.values()), y.detach())

    return run


def only(function: Callable[..., Tensor]) -> Callable[..., Outputs]:
    """The result alone."""
    return lambda **given: (function(**given),)


# Calls --------------------------------------------------------------------------------------


def qkv(n: int, device: str) -> dict[str, Any]:
    return {name: normal(n, 256, 32, 128, device=device) for name in 'qkv'}


def sparse_mla(n: int, device: str) -> dict[str, Any]:
    indices = torch.empty(n, 1, 128, dtype=torch.int32, device=device).random_(0, 4096)
    q, kv = normal(n, 128, 576, device=device, scale=0.1), normal(4096, 1, 576, device=device)
    return dict(q=q, kv=kv, indices=indices)


def nsa(n: int, device: str) -> dict[str, Any]:
    given = {name: normal(n, 512, heads, 128, device=device) for name, heads in (('q', 64), ('k', 4), ('v', 4))}
    blocks = torch.arange(8, dtype=torch.int32, device=device).expand(n, 512, 4, 8).contiguous()
    return given | dict(g_slc=uniform(n, 512, 64, device=device), block_indices=blocks)


def logits(n: int, device: str) -> dict[str, Any]:
    return dict(logits=normal(n, 65536, device=device, dtype=torch.float32), k=2048)


def mqa(n: int, device: str) -> dict[str, Any]:
    q, k = (
        normal(rows, *dims, device=device).to(torch.float8_e4m3fn) for rows, dims in ((n, (64, 128)), (65536, (128,)))
    )
    zeros = torch.zeros(n, dtype=torch.int32, device=device)
    given = dict(q=q, k=k, factors=uniform(65536, device=device), weights=uniform(n, 64, device=device))
    return given | dict(cu_seq_len_k_start=zeros, cu_seq_len_k_end=zeros + 65536)


def mqa_logits(k: Tensor, factors: Tensor, **given: Tensor) -> Tensor:
    return attention.fp8_mqa_logits(kv=(k, factors), **given)


def delta(n: int, device: str) -> dict[str, Any]:
    q, k = (unit(normal(n, 256, 32, 128, device=device)) for _ in range(2))
    v, beta = normal(n, 256, 32, 128, device=device), uniform(n, 256, 32, device=device)
    return dict(q=q, k=k, v=v, g=gates(n, 256, 32, device=device), beta=beta)


def kda(n: int, device: str) -> dict[str, Any]:
    return delta(n, device) | dict(g=gates(n, 256, 32, 128, device=device))


def simple_gla(n: int, device: str) -> dict[str, Any]:
    return qkv(n, device) | dict(g=gates(n, 256, 32, device=device))


def gla(n: int, device: str) -> dict[str, Any]:
    return qkv(n, device) | dict(g=gates(n, 256, 32, 128, device=device))


def mamba(n: int, device: str) -> dict[str, Any]:
    given = {name: normal(n, 256, 1, 64, device=device) for name in 'BC'}
    x, a = normal(n, 256, 32, 64, device=device), -uniform(32, device=device)
    return given | dict(x=x, dt=uniform(n, 256, 32, device=device), A=a)


def recurrent(n: int, device: str) -> dict[str, Any]:
    q, k, v = (unit(normal(n, 1, 32, 128, device=device)) for _ in range(3))
    state = normal(n, 32, 128, 128, device=device, dtype=torch.float32)
    more = dict(g=gates(n, 1, 32, device=device), beta=uniform(n, 1, 32, device=device))
    return dict(q=q, k=k, v=v, initial_state=state, output_final_state=True) | more


def conv1d(n: int, device: str) -> dict[str, Any]:
    return dict(x=normal(n, 1024, 2048, device=device), weight=normal(2048, 4, device=device))


def gated_norm(n: int, device: str) -> dict[str, Any]:
    x, z = (normal(n, 128, device=device) for _ in range(2))
    return dict(x=x, z=z, weight=uniform(128, device=device))


def halves(n: int, device: str) -> dict[str, Any]:
    return dict(x=normal(n, 128, 16640, device=device))


def swiglu(x: Tensor) -> Outputs:
    """Blocks of 128 tokens are a row, so that no block has tokens of two rows."""
    y = activation.swiglu_forward_and_per_block_cast(x.flatten(0, 1), 'e4m3', (128, 128))
    return y.data.unflatten(0, (x.shape[0], 128)), y.sf


def product(k: int, columns: int) -> Callable[[int, str], dict[str, Any]]:
    return lambda n, device: dict(a=normal(n, k, device=device), b=normal(columns, k, device=device))


def fp8_product(n: int, device: str) -> dict[str, Any]:
    codes = [normal(rows, 8192, device=device).to(torch.float8_e4m3fn) for rows in (n, 128)]
    return dict(a=codes[0], a_sf=uniform(n, 64, device=device), b=codes[1], b_sf=uniform(1, 64, device=device))


def packed_product(n: int, device: str) -> dict[str, Any]:
    codes = torch.empty(256, 8192, dtype=torch.uint8, device=device).random_(0, 16)
    weight = gemm.pack_weight(codes, uniform(256, 64, device=device).to(torch.bfloat16), fmt='u4_1x128')
    return dict(a=normal(n, 8192, device=device), weight=weight)


def sparse_product(n: int, device: str) -> dict[str, Any]:
    return dict(a=normal(n, 8192, device=device), b=gemm.compress24(normal(256, 8192, device=device), prune=True))


def image(n: int, device: str) -> dict[str, Any]:
    return dict(x=normal(n, 64, 64, 64, device=device), weight=normal(64, 3, 3, 64, device=device))


CALLS = {
    'attend': Call(2050, qkv, gradients(lambda **given: attention.flash_attn_func(**given, causal=True), *'qkv')),
    'attend deterministic': Call(
        2050,
        qkv,
        gradients(lambda **given: attention.flash_attn_func(**given, causal=True, deterministic=True), *'qkv'),
    ),
    'sparse_mla': Call(
        29500, sparse_mla, lambda **given: attention.flash_mla_sparse_fwd(**given, sm_scale=0.1)[:1], ('kv',)
    ),
    'nsa': Call(515, nsa, only(attention.parallel_nsa)),
    'topk': Call(33000, logits, only(attention.topk_indices), ('k',)),
    'mqa_logits': Call(33000, mqa, only(mqa_logits), ('k', 'factors')),
    'gated delta rule': Call(
        2050,
        delta,
        gradients(lambda **given: linear_attention.chunk_gated_delta_rule(**given)[0], 'q', 'k', 'v', 'g', 'beta'),
    ),
    'KDA': Call(
        2050, kda, gradients(lambda **given: linear_attention.chunk_kda(**given)[0], 'q', 'k', 'v', 'g', 'beta')
    ),
    'simple GLA': Call(
        2050, simple_gla, gradients(lambda **given: linear_attention.chunk_simple_gla(**given)[0], *'qkvg')
    ),
    'GLA': Call(2050, gla, gradients(lambda **given: linear_attention.chunk_gla(**given)[0], *'qkvg')),
    'Mamba-2': Call(
        4100,
        mamba,
        gradients(lambda **given: linear_attention.mamba_chunk_scan_combined(**given), 'x', 'dt', 'B', 'C'),
        ('A',),
    ),
    'recurrent': Call(
        4200,
        recurrent,
        lambda **given: linear_attention.fused_recurrent_gated_delta_rule(**given),
        ('output_final_state',),
    ),
    'causal_conv1d': Call(
        1030, conv1d, gradients(lambda **given: linear_attention.causal_conv1d(**given)[0], 'x'), ('weight',)
    ),
    'l2norm': Call(2050, lambda n, device: dict(x=normal(n, 256, 32, 128, device=device)), linear_attention.l2norm),
    'gated_norm': Call(
        17_000_000, gated_norm, gradients(lambda **given: linear_attention.gated_norm(**given), 'x', 'z'), ('weight',)
    ),
    'SwiGLU, factors of blocks': Call(1024, halves, swiglu),
    'gemm, long rows': Call(265_000, product(8192, 128), only(gemm.gemm), ('b',)),
    'gemm, wide results': Call(265_000, product(128, 8192), only(gemm.gemm), ('b',)),
    'gemm_fp8': Call(265_000, fp8_product, only(gemm.gemm_fp8), ('b', 'b_sf')),
    'gemm_dequant': Call(265_000, packed_product, only(gemm.gemm_dequant), ('weight',)),
    'gemm_sparse24': Call(265_000, sparse_product, only(gemm.gemm_sparse24), ('b',)),
    'conv2d': Call(8300, image, only(lambda x, weight: gemm.conv2d(x, weight, padding=1)), ('weight',)),
}


@pytest.fixture(autouse=True)
def memory():
    """All of it, for the next test."""
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def rows_of(given: dict[str, Any], shared: tuple[str, ...], first: int, last: int) -> dict[str, Any]:
    return {name: value if name in shared else value[first:last].clone() for name, value in given.items()}


@pytest.mark.parametrize('name', CALLS)
def test_rows_beyond_2_31_elements_are_like_others(name):
    call = CALLS[name]
    given = call.build(call.rows, 'cuda')
    found = call.run(**given)
    assert max(x.numel() for x in [*given.values(), *found] if isinstance(x, Tensor)) > 1 << 31
    for first in (0, call.rows // 2, call.rows - 3):  # rows in the middle may lie across 2^30 elements, or 2^31 bytes
        expected = call.run(**rows_of(given, call.shared, first, first + 3))
        for got, wanted in zip(found, expected, strict=True):
            got = got[first : first + 3]
            assert torch.isfinite(wanted.float()).all()
            distance = (got.float() - wanted.float()).norm() / wanted.float().norm().clamp(1e-20)
            assert distance < 4e-3, f'rows {first} to {first + 2}: relative distance {distance:.2g}'


@pytest.mark.parametrize('name', [name for name in CALLS if name != 'attend'])  # its dq is a sum in any order
def test_repeats_have_the_same_bits(name):
    given = CALLS[name].build(3, 'cuda')
    first = CALLS[name].run(**given)
    different = torch.zeros((), dtype=torch.int64, device='cuda')
    for _ in range(1000):
        for got, wanted in zip(CALLS[name].run(**given), first, strict=True):
            different += (got != wanted).sum()
    assert different.item() == 0


# Lengths on the device, and caches -----------------------------------------------------------


def replayed(run: Callable[[], Outputs], change: Callable[[], None]) -> tuple[Outputs, Outputs]:
    """What a captured graph writes after a change of its inputs, and what a new call returns then."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    change()
    graph.replay()
    return found, run()


def paged(pages: int, *dims: int) -> tuple[Tensor, Tensor]:
    """A cache, and tables of 64 pages for each of 8 sequences, scattered over it."""
    cache = normal(pages, 64, *dims, device='cuda')
    return cache, torch.randperm(pages, device='cuda')[:512].int().view(8, 64)


def decode(pages: int) -> tuple[Callable[..., Outputs], Tensor, Tensor, Tensor]:
    (k, table), v = paged(pages, 8, 128), normal(pages, 64, 8, 128, device='cuda')
    q, lengths = (
        normal(8, 1, 32, 128, device='cuda'),
        torch.tensor([4096, 1, 0, 77, 4000, 64, 63, 65], device='cuda').int(),
    )

    def run(table: Tensor = table, k: Tensor = k, v: Tensor = v) -> Outputs:
        return attention.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, block_table=table, causal=True, return_softmax_lse=True
        )

    return run, lengths, table, k


def latent(pages: int) -> tuple[Callable[..., Outputs], Tensor, Tensor, Tensor]:
    cache, table = paged(pages, 1, 576)
    q, lengths = (
        normal(8, 1, 128, 576, device='cuda'),
        torch.tensor([4096, 1, 0, 77, 4000, 64, 63, 65], device='cuda').int(),
    )

    def run(table: Tensor = table, cache: Tensor = cache) -> Outputs:
        return attention.flash_mla_with_kvcache(q, cache, table, lengths, 512, causal=True)

    return run, lengths, table, cache


@pytest.mark.parametrize('make', [decode, latent])
def test_a_graph_is_replayed_with_other_lengths(make):
    run, lengths, *_ = make(600)
    found, expected = replayed(run, lambda: lengths.copy_(lengths.flip(0)))
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert found[0][5].abs().sum() == 0 and found[0][7].abs().sum() > 0  # the empty sequence has moved


def test_a_graph_of_packed_sequences_is_replayed_with_other_lengths():
    q, k, v = (normal(1000, 8, 128, device='cuda') for _ in range(3))
    ends = torch.tensor([0, 300, 301, 1000], dtype=torch.int32, device='cuda')

    def run() -> Outputs:
        given = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=1000, max_seqlen_k=1000)
        return (attention.flash_attn_varlen_func(q, k, v, causal=True, **given),)

    (found,), (expected,) = replayed(run, lambda: ends.copy_(torch.tensor([0, 1, 999, 1000])))
    assert torch.equal(found, expected)


@pytest.mark.parametrize('make, pages', [(decode, 33_000), (latent, 59_000)])
def test_pages_beyond_2_31_elements(make, pages):
    run, _, table, cache = make(pages)
    assert cache.numel() > 1 << 31 and table.max() * cache[0].numel() > 1 << 31
    found = run()
    small = torch.arange(512, dtype=torch.int32, device='cuda').view(8, 64)
    caches = {name: value[table.flatten().long()] for name, value in caches_of(run).items()}
    for got, wanted in zip(found, run(small, **caches), strict=True):
        assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))


def caches_of(run: Callable[..., Outputs]) -> dict[str, Tensor]:
    """The caches that are defaults of `run`, by name, behind the table."""
    names = run.__code__.co_varnames[1 : run.__code__.co_argcount]
    return dict(zip(names, run.__defaults__[1:], strict=True))
