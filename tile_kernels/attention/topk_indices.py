"""The k largest numbers of every row, as the selection of sparse attention needs them: exact, in the order of columns.

    indices[r] = the columns j in [start[r], end[r]) of the k largest logits[r, j], minus start[r], in rising order

NaN is below -inf, both zeros are equal, and of equal numbers the smaller column wins. Behind the last one is -1.

Few rows stay in registers: up to eight thread blocks of a cluster own a row. Histograms over the digits of the keys
find the cut, and every block writes its own part of the result (`topk_indices_resident_kernels`).

Of other rows, a thread block reads a part once, 16 bytes per thread. It keeps a list of the numbers that may be among
the k largest, in the order of columns. When the list is full, it is cut to little more than its k best entries. From
then on only larger numbers enter. A cut takes up to three histograms of 2048 bins over the keys that are left, from the
smallest to the largest one. So the worst input costs more cuts, never another pass over memory. If rows are few and
long, several blocks take parts of a row, and a second launch merges their lists. A row of up to 1024 columns belongs to
a warp, which finds the cut in registers, bit by bit. Memory bound: the floor is reading the logits once.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import lengths_int32
from tile_kernels.attention.topk_indices_kernels import (
    MAX_K,
    SHORT_COLUMNS,
    SHORT_LIST_K,
    num_slots,
    topk_indices_kernel,
    topk_short_kernel,
)
from tile_kernels.attention.topk_indices_resident_kernels import resident_shape, topk_resident_kernel
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import gpu_of, launch
from tile_kernels.core.op import op

MAX_COLUMNS = 1 << 20
DTYPES = (torch.float32, torch.bfloat16)
#: Parts of rows that run at once, and the fewest columns of a part. Results do not depend on them.
BLOCKS, PART_COLUMNS = 132, 8192


def num_parts(rows: Any, columns: Any, k: Any) -> int:
    """Parts of a row: enough for all SMs, but so few that merging their k entries costs less than it saves."""
    if not all(isinstance(n, int) for n in (rows, columns, k)):
        return 1  # fake tensors: nothing is launched
    return max(1, min(BLOCKS // max(rows, 1), math.isqrt(columns // max(k, 1)), columns // PART_COLUMNS))


# Op -----------------------------------------------------------------------------------------


@op(outputs='indices values')
def _topk_indices(
    logits: Tensor, k: int, start: Tensor | None = None, end: Tensor | None = None, return_values: bool = False
) -> tuple[Tensor, Tensor]:
    """See `topk_indices`; values have shape (rows, 0) unless `return_values`."""
    rows, columns = check.shape(logits, 'logits', 'rows columns', dtype=DTYPES)
    check.unit_stride(logits, 'logits')
    check.at_most(columns, MAX_COLUMNS, 'the columns of logits')
    check.at_least(k, 0, 'k')
    check.at_most(k, MAX_K, 'k')
    check.packed(start, 'start', 'rows', torch.int32, rows=rows)
    check.packed(end, 'end', 'rows', torch.int32, rows=rows)
    check.same_device(logits=logits, start=start, end=end)
    return select(logits, k, start, end, return_values)


def select(
    logits: Tensor, k: int, start: Tensor | None, end: Tensor | None, return_values: bool
) -> tuple[Tensor, Tensor]:
    """The columns and numbers of arguments that are checked."""
    rows, columns = logits.shape
    indices = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    values = torch.empty((rows, k if return_values else 0), dtype=logits.dtype, device=logits.device)
    if columns == 0:
        indices.fill_(-1)
        values.fill_(-math.inf)
        return indices, values
    if isinstance(columns, int) and columns <= SHORT_COLUMNS:
        static: tuple = (logits.dtype, num_slots(columns), start is not None, end is not None, return_values)
        written = values if return_values else None
        launch(topk_short_kernel, static, logits, start, end, indices, written, size=rows if k else 0)
        return indices, values
    shape = resident_shape(
        rows, columns, check.vector_bytes(logits) // logits.element_size(), gpu_of(logits).max_cluster
    )
    if shape is not None:
        static = (logits.dtype, check.vector_bytes(logits), start is not None, end is not None, return_values, *shape)
        written = values if return_values else None
        launch(topk_resident_kernel, static, logits, start, end, indices, written, size=rows if k else 0)
        return indices, values
    parts = num_parts(rows, columns, k)
    large = k > SHORT_LIST_K
    size = rows * parts if k else 0
    static = (logits.dtype, check.vector_bytes(logits), start is not None, end is not None, False)
    if parts == 1:
        launch(
            topk_indices_kernel,
            (*static, return_values, large),
            logits,
            start,
            end,
            None,
            indices.view(rows, 1, k),
            values.view(rows, 1, values.shape[1]) if return_values else None,
            size=size,
        )
        return indices, values
    part_indices = torch.empty((rows, parts, k), dtype=torch.int32, device=logits.device)
    part_values = torch.empty((rows, parts, k), dtype=logits.dtype, device=logits.device)
    launch(topk_indices_kernel, (*static, True, large), logits, start, end, None, part_indices, part_values, size=size)
    merged = part_values.view(rows, parts * k)
    launch(
        topk_indices_kernel,
        (logits.dtype, check.vector_bytes(merged), False, False, True, return_values, large),
        merged,
        None,
        None,
        part_indices.view(rows, parts * k),
        indices.view(rows, 1, k),
        values.view(rows, 1, values.shape[1]) if return_values else None,
        size=rows if k else 0,
    )
    return indices, values


@_topk_indices.public
def topk_indices(
    logits: Tensor,
    k: int,
    start: Tensor | None = None,
    end: Tensor | None = None,
    *,
    return_values: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The columns of the k largest numbers of every row, in rising order: exact, and the same bits in every run.

    Args:
        logits: (rows, columns) float32 or bfloat16 with dense rows, up to 2^20 columns.
        k: how many, up to 4096.
        start: (rows,) int32 or int64 on the device, the first column of a row that counts; 0 unless given.
        end: the same, the column behind the last one; all columns unless given. Both are clamped to the columns.
        return_values: also return the numbers.

    Returns:
        (rows, k) int32, columns relative to `start`. NaN is below -inf, -0 equals 0, of equal numbers the smaller
        column wins. If fewer than k columns lie in the bounds, -1 follows them. With `return_values` also the numbers
        (rows, k), -inf where the index is -1.
    """
    check.integer(k, 'k', least=0)
    starts, ends = lengths_int32(start, 'start'), lengths_int32(end, 'end')
    indices, values = topk_indices.call(logits, k, starts, ends, return_values)
    return (indices, values) if return_values else indices


# Cases --------------------------------------------------------------------------------------


def random_logits(
    rows: int,
    columns: int,
    k: int,
    dtype: torch.dtype = torch.float32,
    bounds: str = '',
    content: str = 'normal',
    pad: int = 0,
    return_values: bool = False,
) -> dict:
    """Arguments of `topk_indices`.

    `bounds` names the bounds that are given; what lies outside is NaN. `content` is 'normal', 'ties', 'equal', 'rising'
    or 'near'. Ties are few different numbers, NaN, inf and both zeros. Near numbers differ in their last bits. Rows
    are `pad` elements apart.
    """
    whole = torch.randn(rows, columns + pad)
    if content == 'ties':
        whole = (whole * 1.5).round() * 0.5
        whole = whole.masked_fill(torch.rand(whole.shape) < 0.1, math.nan).masked_fill(whole == 1.0, -0.0)
        whole = whole.masked_fill(whole == -1.0, -math.inf).masked_fill(whole == 1.5, math.inf)
    elif content == 'equal':
        whole = torch.full_like(whole, 0.5)
    elif content == 'rising':
        whole = torch.arange(columns + pad).float().expand(rows, -1) * 0.25 - 100
    elif content == 'near':
        whole = 1.0 + (whole * 100).round() * 2.0**-23
    whole = whole.to(dtype).contiguous()
    made: dict[str, Any] = dict(logits=whole[:, :columns], k=k, return_values=return_values)
    column = torch.arange(columns + pad)
    for name in ('start', 'end'):
        if name in bounds.split():
            cut = torch.randint(-3, columns + 4, (rows,), dtype=torch.int32)
            cut = cut // 2 if name == 'start' else cut
            made[name] = cut
            hidden = column < cut[:, None] if name == 'start' else column >= cut[:, None]
            whole.masked_fill_(hidden, math.nan)
    return made


F32, BF16 = torch.float32, torch.bfloat16
topk_indices.cases(
    make=random_logits,
    match='bitwise',
    smoke=grid(rows=[0, 3], columns=[1, 37], k=[0, 1, 5, 40])
    + grid(rows=[2], columns=[1100], k=[0, 1])
    + grid(rows=[3], columns=[0], k=[2], return_values=[True])
    + grid(rows=[5], columns=[64, 75], k=[7], dtype=[F32, BF16], bounds=['start end'], content=['ties'], pad=[5, 8])
    + grid(rows=[3], columns=[1030], k=[7], dtype=[F32, BF16], bounds=['start end'], content=['ties'], pad=[5, 8])
    + grid(rows=[6], columns=[300, 1024], k=[70], bounds=['end'], content=['ties', 'near'], return_values=[True])
    + grid(rows=[4], columns=[2300], k=[600], bounds=['end'], content=['normal', 'ties', 'near'], return_values=[True])
    + grid(rows=[1], columns=[9001], k=[2048], content=['rising', 'equal'])
    + grid(rows=[1], columns=[16400], k=[33], bounds=['start'], content=['normal', 'ties'], return_values=[True])
    + grid(rows=[1], columns=[5000], k=[4096], dtype=[BF16], content=['ties'])
    + grid(rows=[133], columns=[1030], k=[7], bounds=['start end'], content=['ties'], pad=[5])  # rows of lists
    + grid(rows=[1], columns=[262_145], k=[2048], bounds=['end'], return_values=[True]),  # and with parts
    full=grid(rows=[1, 7, 300], columns=[8191, 65536, 1 << 20], k=[1, 2048, 4096], bounds=['start end'])
    + grid(rows=[64], columns=[100_000], k=[2048], dtype=[F32, BF16], content=['ties', 'rising', 'equal', 'near'])
    + grid(rows=[33], columns=[65_537], k=[513], dtype=[BF16], pad=[0, 1, 7], return_values=[True]),
    bench=grid(rows=[64], columns=[8192, 65536], k=[2048])
    + grid(rows=[4096], columns=[65536], k=[2048])
    + grid(rows=[1], columns=[131072, 1 << 20], k=[2048])
    + grid(rows=[131072], columns=[512], k=[16]),
)
