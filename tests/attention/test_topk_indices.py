"""The k largest of a row: what the contract does not see. Results are compared with a sort that is written out."""

import math
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tile_kernels import ArgumentError, knobs
from tile_kernels.attention import topk_indices
from tile_kernels.attention.topk_indices import num_parts
from tile_kernels.attention.topk_indices_resident_kernels import resident_shape
from tile_kernels.core.launch import forced_config

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


@contextmanager
def lists(parts: int | None = None):
    """Rows do not stay in registers: their parts, so many if given, have lists of candidates."""
    module = sys.modules[num_parts.__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, 'resident_shape', lambda *shape: None)
        if parts is not None:
            patch.setattr(module, 'num_parts', lambda *shape: parts)
        yield


def expected(row: list[float], k: int) -> list[int]:
    """Sort by (number or not, value, -column) in plain Python."""
    order = sorted(range(len(row)), key=lambda j: (not math.isnan(row[j]), 0 if math.isnan(row[j]) else row[j], -j))
    best = sorted(order[::-1][:k])
    return best + [-1] * (k - len(best))


def check_rows(logits: Tensor, k: int, start: Tensor | None = None, end: Tensor | None = None) -> Tensor:
    found = topk_indices(logits, k, start, end)
    columns = logits.shape[1]
    for r, row in enumerate(logits.float().tolist()):
        first = 0 if start is None else min(max(int(start[r]), 0), columns)
        last = columns if end is None else max(min(int(end[r]), columns), first)
        assert found[r].tolist() == expected(row[first:last], k), (r, first, last)
    return found


def test_nan_infinities_and_zeros():
    row = [math.nan, -math.inf, 0.0, -0.0, math.inf, -1.0, math.nan, math.inf, -math.inf, 1e-45, -1e-45, 3e38]
    logits = torch.tensor([row, row[::-1], [math.nan] * 12, [-0.0, 0.0] * 6], device=DEVICE)
    for k in range(1, 14, 2):
        check_rows(logits, k)
        check_rows(logits.bfloat16(), k)
    end = torch.full((4,), 12, device=DEVICE)
    wide = torch.nn.functional.pad(logits, (0, 1100), value=math.inf)  # more columns than a warp holds
    for k in (1, 4, 6, 8, 11, 13):
        check_rows(wide, k, end=end)


def test_bounds_are_clamped_and_may_be_empty():
    logits = torch.randn(6, 33, device=DEVICE)
    start = torch.tensor([-5, 7, 32, 33, 40, 3], device=DEVICE)  # int64
    end = torch.tensor([4, 7, 99, 33, 50, -2], device=DEVICE, dtype=torch.int32)
    check_rows(logits, 5, start, end)
    check_rows(logits, 5, end=end)
    check_rows(logits, 40, start=start)


def test_what_lies_outside_has_no_effect():
    logits = torch.randn(3, 50, device=DEVICE)
    start, end = torch.tensor([3, 0, 20], device=DEVICE), torch.tensor([30, 11, 50], device=DEVICE)
    before = topk_indices(logits, 6, start, end)
    column = torch.arange(50, device=DEVICE)
    outside = (column < start[:, None]) | (column >= end[:, None])
    for garbage in (math.nan, math.inf, -math.inf):
        assert torch.equal(topk_indices(logits.masked_fill(outside, garbage), 6, start, end), before)


@pytest.mark.parametrize(('num_threads', 'vectors'), [(512, 2), (512, 4), (1024, 2), (1024, 4)])
@pytest.mark.parametrize('content', ['rising', 'falling', 'equal', 'two', 'near'])
def test_rows_that_fill_the_list_again_and_again(content, num_threads, vectors):
    """Lists are cut several times, with ties across the cut."""
    columns = 30_000 if num_threads == 512 else 40_000
    column = torch.arange(columns, device=DEVICE)
    row = dict(
        rising=column.float(),
        falling=-column.float(),
        equal=torch.zeros(columns, device=DEVICE),
        two=(column * 7919 % 5 == 0).float(),
        near=1 + (column // 700 % 23 * 2.0**-23),
    )[content]
    k = 1500
    with forced_config(num_threads=num_threads, vectors=vectors), lists(parts=1), knobs(checks='races'):
        found = topk_indices(row[None], k)
    order = torch.sort(row, descending=True, stable=True).indices[:k].sort().values
    assert torch.equal(found[0], order.int())


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_many_rows_have_smaller_blocks(dtype):
    """Blocks of many rows take two vectors of a thread in a step; a row of numbers and one that rises."""
    columns = 13_001
    logits = torch.stack((torch.randn(columns, device=DEVICE), torch.arange(columns, device=DEVICE) * 0.5)).to(dtype)
    wide = torch.nn.functional.pad(logits, (0, 7), value=math.nan)[:, :columns]
    start = torch.tensor([5, 0], device=DEVICE)
    with forced_config(num_threads=512, vectors=4), lists():
        found = topk_indices(wide, 2000, start)
    for r in range(2):
        own = logits[r, int(start[r]) :]
        best = torch.sort(own.float(), descending=True, stable=True).indices[:2000].sort().values
        assert torch.equal(found[r], best.int())


def test_parts_are_merged():
    assert num_parts(1, 17_000, 9) == 2 and num_parts(200, 17_000, 9) == 1
    logits = (torch.randn(2, 17_000, device=DEVICE) * 4).round()
    logits[:, 5000:5040] = math.nan
    start, end = torch.tensor([100, 9000], device=DEVICE), torch.tensor([16_990, 9003], device=DEVICE)
    with lists():
        indices, values = topk_indices(logits, 9, start, end, return_values=True)
    assert torch.equal(indices, check_rows(logits, 9, start, end))
    assert torch.equal(values[0], logits[0, 100:][indices[0].long()])
    assert values[1, 3:].eq(-math.inf).all() and indices[1].tolist() == [0, 1, 2, *[-1] * 6]


def special(columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Rows that need every digit, or end in ties."""
    column = torch.arange(columns, device=DEVICE)
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0], device=DEVICE)
    rows = dict(
        rising=column * 0.5 - 100.0,
        equal=torch.zeros(columns, device=DEVICE),
        two=(column * 7919 % 5 == 0).float(),
        near=1 + (column * 7919 % 23 * 2.0**-23),
        odd=odd[column * 31 % 6],
    )
    return {name: row.to(dtype) for name, row in rows.items()}


SHAPES = [(1100, torch.bfloat16), (9001, torch.float32), (40_000, torch.float32)]
MORE_SHAPES = [(1100, torch.float32), (9001, torch.bfloat16), (20_480, torch.float32), (40_000, torch.bfloat16)]


@pytest.mark.parametrize(('columns', 'dtype'), SHAPES + MORE_SHAPES * knobs.full_test)
def test_rows_in_the_registers_of_a_cluster(columns, dtype):
    """One, two, four and eight blocks; aligned vectors and single numbers; the k-th number is tied across blocks."""
    rows = special(columns, dtype)
    logits = torch.stack([*rows.values(), torch.randn(columns, device=DEVICE).to(dtype)])
    if columns > 10_000 and not knobs.full_test:
        logits = logits[[1, 5]]
    with knobs(checks='all'):
        for k in (1, 700, 4096) if knobs.full_test else (700,):
            found = topk_indices(logits, k)
            with lists():
                assert torch.equal(found, topk_indices(logits, k)), k
        if logits.shape[0] < 6:
            return
        start = torch.tensor([0, 5, columns // 2 + 1, 0, columns, 3], device=DEVICE)
        end = torch.tensor([columns, columns - 3, columns, 2, 9, columns // 2], device=DEVICE)
        found, values = topk_indices(logits, 700, start, end, return_values=True)
        with lists():
            for one, other in zip(
                (found, values), topk_indices(logits, 700, start, end, return_values=True), strict=True
            ):
                assert torch.equal(one, other)


def test_blocks_of_a_row_that_stays_in_registers():
    assert resident_shape(64, 8192, 4, 16) == (8, 1) and resident_shape(64, 65_536, 4, 16) == (32, 2)
    assert resident_shape(1, 1 << 18, 4, 8) == (32, 8) and resident_shape(1, (1 << 18) + 1, 4, 8) is None
    assert resident_shape(133, 2000, 4, 16) is None and resident_shape(1, 20_000, 8, 1) == (32, 1)


def test_a_planted_error_is_found():
    logits = torch.tensor([[1.0, 1.0, 0.0, 1.0]], device=DEVICE)
    assert check_rows(logits, 2).tolist() == [[0, 1]]
    with pytest.raises(AssertionError):
        assert topk_indices(logits, 2)[0].tolist() == expected(logits[0].flip(0).tolist(), 2)


def test_compile():
    counter = CompileCounter()
    compiled = torch.compile(lambda x, end: topk_indices(x, 3, end=end), backend=counter, fullgraph=True, dynamic=True)
    for rows in (3, 5):
        logits, end = torch.randn(rows, 9, device=DEVICE), torch.full((rows,), 7, device=DEVICE)
        assert torch.equal(compiled(logits, end), topk_indices(logits, 3, end=end))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ('given', 'sentence'),
    [
        (dict(k=5000), 'topk_indices: k must be at most 4096, got 5000'),
        (dict(k=-1), 'k must be at least 0'),
        (dict(k=1.5), 'k must be an integer'),
        (dict(logits=torch.zeros(2, 3, dtype=torch.float16)), 'logits must be float32 or bfloat16'),
        (dict(logits=torch.zeros(3)), r'logits must be \(rows, columns\)'),
        (dict(start=torch.zeros(3, dtype=torch.int32)), r'start must be \(rows\) with rows = 2'),
        (dict(end=torch.zeros(2)), 'end must be int32 or int64'),
        (dict(logits=torch.zeros(3, 2).t()), 'logits must have stride 1 in the last dimension'),
    ],
)
def test_bad_input_gets_one_sentence(given, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        topk_indices(**dict(logits=torch.zeros(2, 3), k=2) | given)
