"""Device code of attention: the rows of a thread block, its keys, and the loads of both.

Queries are taken by kv head, whose keys and values are then loaded once for all of them. `group` is the number of query
heads of a kv head. Row r of a sequence is query r // group of query head r % group of that kv head. Blocks of rows and
of keys are counted from the start of a sequence: results do not depend on the other sequences.

Packed sequences are found on the device. Sequence b owns the block numbers from start[b] * group // block + b on, one
more than it can need. The rows behind the last sequence are sequence N, which has no keys.
"""

from dataclasses import dataclass
from typing import Any

from tile_kernels.core.lang import T, macro

#: How keys are stored: (batch, tokens, ...), the same as a cache whose lengths are checked, (tokens, ...), pages.
DENSE, CACHE, PACKED, PAGED = 'dense', 'cache', 'packed', 'paged'

THREADS = 128


def padded(dim: int) -> int:
    """Columns of a tile of a head dimension; those behind it hold 0."""
    return -(-dim // 32) * 32


@dataclass(frozen=True)
class Block:
    """A block of rows of one sequence."""

    sequence: Any
    batch: Any  # index of the first dimension of the tensor
    start: Any  # first token of the sequence
    length: Any  # tokens of the sequence
    row: Any  # first row of the block, counted from the start of the sequence


@macro
def find_block(cu_seqlens, index, num_sequences, bits, num_tokens, group, size: int, is_packed: bool):
    """The block of a number. `bits` is the bit length of the number of sequences; dense ones have equal lengths."""
    sequence = T.alloc_var(T.int32, init=0)
    batch = T.alloc_var(T.int32, init=0)
    start = T.alloc_var(T.int32, init=0)
    length = T.alloc_var(T.int32, init=0)
    row = T.alloc_var(T.int32, init=0)
    if is_packed:
        for step in T.serial(bits):
            later = sequence + (1 << (bits - 1 - step))
            if later <= num_sequences:  # noqa: SIM102
                if T.truncdiv(cu_seqlens[T.min(later, num_sequences)] * group, size) + later <= index:
                    sequence = later
        start = T.min(cu_seqlens[sequence], num_tokens)
        length = num_tokens - start
        if sequence < num_sequences:
            length = T.min(cu_seqlens[T.min(sequence + 1, num_sequences)], num_tokens) - start
        row = (index - T.truncdiv(start * group, size) - sequence) * size
    else:
        blocks = T.truncdiv(num_tokens * group + size - 1, size)
        sequence = T.truncdiv(index, blocks)
        batch = sequence
        length = num_tokens
        row = (index - sequence * blocks) * size
    return Block(sequence, batch, start, length, row)


@macro
def used_length(used, sequence, num_sequences, length, is_given: bool):
    """Tokens of a sequence that count: all, or the first `used` of it; none behind the last sequence."""
    number = T.alloc_var(T.int32, init=0)
    if sequence < num_sequences:
        number = length
        if is_given:
            number = T.max(T.min(used[sequence], length), 0)
    return number


@dataclass(frozen=True)
class Keys:
    """The keys of one sequence."""

    batch: Any
    start: Any
    number: Any


@macro
def find_keys(cu_seqlens, used, sequence, num_sequences, num_tokens, keys: str, is_used: bool):
    """The keys of a sequence that are not in pages."""
    batch = T.alloc_var(T.int32, init=0)
    start = T.alloc_var(T.int32, init=0)
    number = T.alloc_var(T.int32, init=0)
    if sequence < num_sequences:
        if keys == PACKED:
            start = T.min(cu_seqlens[sequence], num_tokens)
            number = T.min(cu_seqlens[sequence + 1], num_tokens) - start
        else:
            batch = sequence
            number = num_tokens
        if is_used:
            number = T.max(T.min(used[sequence], number), 0)
    return Keys(batch, start, number)


@dataclass(frozen=True)
class Rows:
    """The rows of a block: `query` is the token counted from the start of the sequence, `head` the query head."""

    query: Any
    head: Any


@macro
def make_rows(size: int):
    """Where `place_rows` puts rows: shared memory, so that every row is divided once."""
    query_shared, head_shared = T.alloc_shared((size,), T.int32), T.alloc_shared((size,), T.int32)
    return Rows(query_shared, head_shared)


@macro
def place_rows(rows, head, group, row):
    """Find query and head of the rows from `row` on."""
    for i in T.Parallel(rows.query.shape[0]):
        rows.query[i] = T.truncdiv(row + i, group)
        rows.head[i] = head * group + T.truncmod(row + i, group)


@macro
def load_rows(x, batch, start, rows, row, num_rows, x_shared, width: int):
    """Load rows of queries, or of what has their shape; 0 behind the last row and behind the last column."""
    zero = T.cast(0.0, x_shared.dtype)
    for i, d in T.Parallel(x_shared.shape[0], x_shared.shape[1]):
        x_shared[i, d] = T.if_then_else(
            T.And(row + i < num_rows, T.truncdiv(d, 8) * 8 < width),
            x[batch, start + rows.query[i], rows.head[i], d],
            zero,
        )


def widened(x: Any, elem: Any) -> Any:
    """A number of a cache in the dtype of the model; there is no direct conversion from eight bits."""
    return x if x.dtype == elem else T.cast(T.cast(x, T.float32), elem)


@macro
def load_keys(x, batch, start, head, key, num_keys, x_shared, width: int):
    """Load keys or values; 0 behind the last key and behind the last column."""
    zero = T.cast(0.0, x_shared.dtype)
    for i, d in T.Parallel(x_shared.shape[0], x_shared.shape[1]):
        x_shared[i, d] = T.if_then_else(
            T.And(key + i < num_keys, T.truncdiv(d, 8) * 8 < width),
            widened(x[batch, start + key + i, head, d], x_shared.dtype),
            zero,
        )
