"""Checks of the Engram ops, and the numbers of partial sums."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.gpus import SUM_SMS
from tile_kernels.core.lang import resident_blocks
from tile_kernels.engram._macros import MAX_HIDDEN, SLOT, row_layout

BF16, F32 = torch.bfloat16, torch.float32


MAX_STREAMS = 8


def check_gate(
    x: Tensor, k: Tensor, v: Tensor, weight_fused: Tensor, image_token_mask: Tensor | None
) -> tuple[int, int, int]:
    """Check the inputs of the gate; returns num_tokens, num_streams, hidden."""
    num_tokens, num_streams, hidden = check.shape(x, 'hidden_states', 'num_tokens num_streams hidden', dtype=BF16)
    known = {'num_tokens': num_tokens, 'hidden': hidden}
    check.shape(k, 'k', 'num_tokens num_streams hidden', dtype=BF16, num_streams=num_streams, **known)
    check.shape(v, 'v', 'num_tokens hidden', dtype=BF16, **known)
    check.shape(weight_fused, 'weight_fused', 'num_streams hidden', dtype=F32, num_streams=num_streams, hidden=hidden)
    if image_token_mask is not None:
        check.shape(image_token_mask, 'image_token_mask', 'num_tokens', dtype=torch.bool, num_tokens=num_tokens)
        check.contiguous(image_token_mask, 'image_token_mask')
    check.at_least(num_streams, 1, 'num_streams')
    check.at_most(num_streams, MAX_STREAMS, 'num_streams')
    check.multiple(hidden, 64, 'hidden')
    check.at_least(hidden, 64, 'hidden')
    check.at_most(hidden, MAX_HIDDEN, 'hidden')
    check.contiguous(x, 'hidden_states')
    check.contiguous(weight_fused, 'weight_fused')
    check.unit_stride(k, 'k')
    check.unit_stride(v, 'v')
    check.same_device(hidden_states=x, k=k, v=v, weight_fused=weight_fused, image_token_mask=image_token_mask)
    return num_tokens, num_streams, hidden


def bwd_config(hidden: int) -> dict:
    """Config of the gradient kernel: threads for two blocks per SM, or for one with prefetch if rows are too long.

    With more tokens in flight, dy is more often evicted from the L2 cache before the block of another stream reads it.
    So many threads share a row, and few rows are in flight.
    """
    if hidden <= 4096:
        return dict(vectors=2, resident_threads=576, ahead=False)
    return dict(vectors=4, resident_threads=384, ahead=6144 < hidden <= 8192)


def num_partials_for(num_tokens: int, num_streams: int, hidden: int) -> int:
    """The number of partial sums of the weight gradient: resident blocks per stream, at most num_tokens."""
    config = bwd_config(hidden)
    row_threads, _ = row_layout(hidden, config['vectors'])
    most = max(1, SUM_SMS * resident_blocks(config['resident_threads'], row_threads) // num_streams)
    return torch.sym_min(num_tokens, most)


def as_bytes(image_token_mask: Tensor | None) -> Tensor | None:
    """The mask as bytes, as the kernels read it."""
    return None if image_token_mask is None else image_token_mask.view(torch.uint8)


def is_packed(x: Tensor, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call passes keys and values in one tensor: `kv, weight_fused, ...` instead of `k, v, ...`."""
    if not args:
        return 'kv' in kwargs
    if isinstance(x, Tensor) and isinstance(args[0], Tensor) and x.dim() == args[0].dim() == 3:
        extra = args[0].shape[1] - x.shape[1]
        if extra in (0, 1):
            return extra == 1
    num_streams = check.shape(x, 'hidden_states', 'num_tokens num_streams hidden')[1]
    num_rows = check.shape(args[0], 'k or kv', 'num_tokens num_rows hidden')[1]
    if num_rows not in (num_streams, num_streams + 1):
        rule = f'must have {num_streams} rows for each token, or {num_streams + 1} with the value'
        check.fail('k or kv', rule, check.describe(args[0]))
    return num_rows == num_streams + 1


def split_packed(kv: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the keys (num_tokens, num_streams, hidden) and values (num_tokens, hidden) of a packed tensor."""
    num_tokens, num_streams, hidden = check.shape(x, 'hidden_states', 'num_tokens num_streams hidden')
    known = {'num_tokens': num_tokens, 'hidden': hidden}
    check.shape(kv, 'kv', 'num_tokens num_rows hidden', dtype=BF16, num_rows=num_streams + 1, **known)
    return kv[:, :num_streams], kv[:, num_streams]


DTYPES = (torch.float32, torch.bfloat16)


#: Thread blocks that loop over the rows of a matrix: two on each of 128 SMs.
MAX_PARTIALS = 256


def sinkhorn_partials(num_rows: int) -> int:
    """The number of partial sums of a step; at least one, so that the reduction always has an input."""
    return torch.sym_max(1, torch.sym_min(num_rows, MAX_PARTIALS))


def check_matrix(matrix: Tensor, row_scale: Tensor, col_scale: Tensor) -> tuple[int, int]:
    """Check a matrix and its scales; returns num_rows and num_columns."""
    num_rows, num_columns = check.shape(matrix, 'matrix', 'num_rows num_columns', dtype=DTYPES)
    check.shape(row_scale, 'row_scale', 'num_rows', dtype=torch.float32, num_rows=num_rows)
    check.shape(col_scale, 'col_scale', 'num_columns', dtype=torch.float32, num_columns=num_columns)
    check.multiple(num_columns, SLOT, 'num_columns')
    check.at_least(num_columns, SLOT, 'num_columns')
    check.at_most(num_columns, MAX_HIDDEN, 'num_columns')
    check.contiguous(matrix, 'matrix')
    check.contiguous(row_scale, 'row_scale')
    check.contiguous(col_scale, 'col_scale')
    check.same_device(matrix=matrix, row_scale=row_scale, col_scale=col_scale)
    return num_rows, num_columns
