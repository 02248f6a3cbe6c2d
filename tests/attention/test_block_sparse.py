"""What the contract does not see of attention to listed blocks: agreement with `attend`, hidden NaN, compile."""

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tile_kernels import ArgumentError, knobs
from tile_kernels.attention import block_sparse_attn_func, flash_attn_func

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16 = torch.bfloat16


def operands(queries=70, keys=100, heads=(2, 1), dim=32):
    torch.manual_seed(queries)
    shapes = ((1, queries, heads[0], dim), (1, keys, heads[1], dim), (1, keys, heads[1], dim))
    q, k, v = (torch.randn(shape, device=DEVICE).to(BF16) for shape in shapes)
    rows, columns = -(-queries // 64), -(-keys // 64)
    indices = torch.arange(columns, device=DEVICE).expand(1, heads[0], rows, columns)
    return (q, k, v), indices, torch.full((1, heads[0], rows), columns, device=DEVICE)


@pytest.mark.parametrize('given', [dict(), dict(causal=True, softcap=1.5, s_aux=torch.tensor([0.5, -math.inf]))])
def test_full_lists_are_plain_attention(given):
    leaves, indices, counts = operands()
    given = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    leaves = [x.requires_grad_() for x in leaves]
    found = []
    for call, extra in ((block_sparse_attn_func, (indices, counts)), (flash_attn_func, ())):
        with knobs(interpret=call is block_sparse_attn_func):
            own = dict(block=(64, 64)) if extra else {}
            o, lse = call(*leaves, *extra, return_lse=True, **own, **given)
            torch.manual_seed(0)
            upstream = torch.randn(o.shape, device=DEVICE).to(o.dtype)
            found.append(
                (o, lse, *torch.autograd.grad((o, lse.sum()), leaves, (upstream, torch.ones((), device=DEVICE))))
            )
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=2e-2, atol=2e-2)


def test_blocks_that_are_not_listed_have_no_effect():
    (q, k, v), indices, counts = operands(keys=150)
    k[:, 64:128], v[:, 64:128] = math.nan, math.nan
    lists = indices.clone()
    lists[..., :] = torch.tensor([-1, 2, 7], device=DEVICE)
    lists[:, 1, 1] = 1  # not among those that count
    counts[:, 1, 1] = 0
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with knobs(interpret=True):
        o, lse = block_sparse_attn_func(*leaves, lists, counts, block=(64, 64), return_lse=True)
        dq, dk, dv = torch.autograd.grad(o.float().square().sum(), leaves)
    part = flash_attn_func(q, k[:, 128:], v[:, 128:])
    torch.testing.assert_close(o[:, :64], part[:, :64], rtol=1e-2, atol=1e-2)
    assert not o[:, 64:, 1].any() and (lse[:, 1, 64:] == -math.inf).all() and not dq[:, 64:, 1].any()
    assert not dk[:, :128].any() and not dv[:, :128].any() and dv[:, 128:].any() and dq.isfinite().all()


def test_one_graph_serves_every_shape():
    counter = CompileCounter()
    run = lambda q, k, v, *lists: block_sparse_attn_func(q, k, v, *lists, block=(64, 64), causal=True)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for queries, keys in ((130, 260), (200, 330)):
        given, indices, counts = operands(queries, keys)
        assert torch.equal(compiled(*given, indices, counts), run(*given, indices, counts))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ('change', 'sentence'),
    [
        (dict(block=(64, 128)), r'block must be \(64, 64\) or \(128, 128\)'),
        (dict(indices=torch.zeros(1, 2, 1, 1).int()), r'indices must be .* with blocks = 2'),
        (dict(counts=torch.zeros(1, 2, 2)), 'counts must be int32 or int64'),
        (dict(dropout_p=0.5), 'dropout_p must be 0.0'),
        (dict(sink=torch.zeros(3)), r'sink must be \(heads\) with heads = 2'),
    ],
)
def test_bad_input_gets_one_sentence(change, sentence):
    (q, k, v), indices, counts = (
        [x.cpu() for x in part] if isinstance(part, tuple) else part.cpu() for part in operands()
    )
    given = dict(q=q, k=k, v=v, indices=indices, counts=counts, block=(64, 64))
    with pytest.raises(ArgumentError, match='attention.block_sparse_attn_func: ' + sentence):
        block_sparse_attn_func(**given | change)
