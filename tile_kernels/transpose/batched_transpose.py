"""Batched transpose: swap the last two dimensions and write the result densely.

    y[b, n, m] = x[b, m, n]

One thread block turns one tile of `block_m` rows by `block_n` columns through shared memory. Memory bound: the floor
is reading x once and writing y once. Elements move as bits, so there is one kernel per element size.

Both sides of global memory see 16-byte accesses over whole spans of a row (`load_span`, `store_span` bytes). What lies
between is a transpose of `vec` x `load_width` elements in the registers of each thread, `vec` being the elements of 16
bytes: the thread loads `load_width` neighbouring columns of `vec` rows, and each of these columns is then one 16-byte
vector of the output. Shared memory only exchanges such vectors. It holds the tile as the output wants it, column c of
x as row c, and vector v of that row lies at place v ^ (c // load_width % 8):

    write   8 neighbouring threads own 8 neighbouring groups of `load_width` columns of the same rows: their rows lie a
            multiple of 128 bytes apart, i.e. in the same banks, but the places differ in their last three bits
    read    8 neighbouring threads read 8 vectors of one row, each from another place

Shared memory serves 16-byte accesses 8 threads at a time from 8 x 16 bytes of banks, so neither has conflicts.

A misaligned base or an odd row length allows only narrower accesses; the widths are static and `load_width` and
`store_width` divide the row lengths of x and y, so no access straddles the end of a row. At the edges of x threads
read its last row or columns again, which costs no branch, and only stores are guarded.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op

VECTOR_BYTES = 16
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Config -------------------------------------------------------------------------------------


def choose(elem_size: int, load_bytes: int, store_bytes: int, size: int) -> dict:
    """Long spans keep DRAM pages open; a problem of few tiles gets smaller ones, so that every SM has several."""
    span = 256 if size * elem_size >= 32 << 20 else 128
    return dict(load_span=span, store_span=span, depth=1, resident_threads=512, order='n')


# Kernel -------------------------------------------------------------------------------------


@macro
def exchange(words, upper: int, lower: int, col: int, shift: int, mask: int):
    """Swap the high parts of a word in row `upper` with the low parts (those of `mask`) of the one in row `lower`."""
    above = words[upper, col]
    below = words[lower, col]
    words[upper, col] = (above & mask) | ((below & mask) << shift)
    words[lower, col] = ((above >> shift) & mask) | (below & (mask << shift))


@macro
def turn_bytes(block, turned, rows: int, cols: int):
    """`turned` = `block` transposed, four bytes at a time: moved one by one they need twice the registers."""
    words = T.view(block, (rows, cols // 4), 'uint32')
    turned_words = T.view(turned, (cols, rows // 4), 'uint32')
    for row in T.unroll(rows // 4):
        for col in T.unroll(cols // 4):
            for i in T.unroll(2):
                exchange(words, row * 4 + i, row * 4 + i + 2, col, 16, 0x0000FFFF)
            for i in T.unroll(2):
                exchange(words, row * 4 + i * 2, row * 4 + i * 2 + 1, col, 8, 0x00FF00FF)
            for i in T.unroll(4):
                turned_words[col * 4 + i, row] = words[row * 4 + i, col]


@macro
def turn_elements(block, turned, rows: int, cols: int):
    """`turned` = `block` transposed."""
    for j in T.unroll(cols):
        for i in T.unroll(rows):
            turned[j, i] = block[i, j]


@kernel(
    choose=choose,
    space=dict(
        load_span=(128, 256),
        store_span=(128, 256),
        depth=(1, 2),
        resident_threads=(512, 768, 1024, 1536),
        order=('n', 'm'),
    ),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def batched_transpose_kernel(
    elem_size: int,
    load_bytes: int,
    store_bytes: int,
    *,
    load_span: int,
    store_span: int,
    depth: int,
    resident_threads: int,
    order: str,
):
    """One thread block per tile of `store_span` bytes of rows by `load_span` bytes of columns.

    A thread turns `depth` x 16 bytes of `vec` rows; registers are limited so that `resident_threads` fit on an SM;
    neighbouring thread blocks take neighbouring tiles along `order`.
    """
    dtype = T.dtype(BITS[elem_size])
    vec, load_width, store_width = (n // elem_size for n in (VECTOR_BYTES, load_bytes, store_bytes))
    block_m, block_n = store_span // elem_size, load_span // elem_size
    row_groups, col_groups = block_m // vec, block_n // load_width
    turn = turn_bytes if elem_size == 1 and load_width >= 4 else turn_elements
    num_threads = (load_span // VECTOR_BYTES) * (store_span // VECTOR_BYTES) // depth
    num_loads = row_groups * col_groups // num_threads
    num_stores = block_m * block_n // (store_width * num_threads)
    batch, num_rows, num_cols, batch_stride, row_stride = (
        T.dynamic(name, 'int64') for name in ('batch', 'num_rows', 'num_cols', 'batch_stride', 'row_stride')
    )

    @T.prim_func
    def batched_transpose(
        x: T.StridedTensor((batch, num_rows, num_cols), (batch_stride, row_stride, 1), dtype),
        y: T.Tensor((batch, num_cols, num_rows), dtype),
    ):
        T.assume(num_cols % load_width == 0)
        T.assume(row_stride % load_width == 0)
        T.assume(batch_stride % load_width == 0)
        T.assume(num_rows % store_width == 0)
        tiles_m = T.cast(T.ceildiv(num_rows, block_m), 'int32')
        tiles_n = T.cast(T.ceildiv(num_cols, block_n), 'int32')
        with T.Kernel(T.cast(batch, 'int32') * tiles_m * tiles_n, threads=num_threads) as pid:
            T.annotate_min_blocks_per_sm(max(1, resident_threads // num_threads))
            tile_shared = T.alloc_shared((block_n, row_groups, vec), dtype)  # [column, row // vec, row % vec]
            block_local = T.alloc_local((vec, load_width), dtype)
            turned_local = T.alloc_local((load_width, vec), dtype)
            tx = T.get_thread_binding()
            tile_m = T.truncmod(T.truncdiv(pid, tiles_n), tiles_m) if order == 'n' else T.truncmod(pid, tiles_m)
            tile_n = T.truncmod(pid, tiles_n) if order == 'n' else T.truncmod(T.truncdiv(pid, tiles_m), tiles_n)
            pid_b = T.truncdiv(pid, tiles_m * tiles_n)
            row = T.cast(tile_m, 'int64') * block_m
            col = T.cast(tile_n, 'int64') * block_n
            rows_left = T.cast(T.min(num_rows - row, block_m), 'int32')
            cols_left = T.cast(T.min(num_cols - col, block_n), 'int32')

            for k in T.unroll(num_loads, unroll_factor=max(1, 32 // vec)):
                group = k * num_threads + tx
                row_group, col_group = group // col_groups, group % col_groups
                for i in T.unroll(vec):
                    for j in T.vectorized(load_width):
                        block_local[i, j] = x[
                            pid_b,
                            row + T.min(row_group * vec + i, rows_left - 1),
                            col + T.min(col_group * load_width, cols_left - load_width) + j,
                        ]
                turn(block_local, turned_local, vec, load_width)
                for j in T.unroll(load_width):
                    for i in T.vectorized(vec):
                        tile_shared[col_group * load_width + j, row_group ^ (col_group % 8), i] = turned_local[j, i]

            for k in T.unroll(num_stores, unroll_factor=8):
                first = (k * num_threads + tx) * store_width
                i, j = first % block_m, first // block_m
                if i < rows_left and j < cols_left:
                    for e in T.vectorized(store_width):
                        y[pid_b, col + j, row + i + e] = tile_shared[j, (i // vec) ^ (j // load_width % 8), i % vec + e]

    return batched_transpose


# Op -----------------------------------------------------------------------------------------


def _widest(*extents: int) -> int:
    """Bytes of the widest access that fits all `extents`, given in bytes; symbolic ones are taken to fit any."""
    return math.gcd(VECTOR_BYTES, *[extent for extent in extents if type(extent) is int])


def _transpose(x: Tensor, name: str) -> Tensor:
    batch, num_rows, num_cols = check.shape(x, name, 'batch num_rows num_cols')
    size = x.element_size()
    if size not in BITS:
        check.fail(name, 'must have elements of 1, 2, 4 or 8 bytes', check.describe(x))
    if x.stride(1) == 1 or num_rows == 1 or num_cols == 1:  # the rows of the result are dense in x already
        return x.mT.clone(memory_format=torch.contiguous_format)
    if x.stride(2) != 1 or x.is_conj() or x.is_neg():
        x = x.clone(memory_format=torch.contiguous_format)
    y = x.new_empty(batch, num_cols, num_rows)
    load_bytes = _widest(check.vector_bytes(x), x.stride(0) * size, num_cols * size)
    static = (size, load_bytes, _widest(num_rows * size))
    launch(batched_transpose_kernel, static, x.view(BITS[size]), y.view(BITS[size]), size=x.numel())
    return y


@op(outputs='dx')
def batched_transpose_bwd(dy: Tensor) -> Tensor:
    """Gradient of `batched_transpose`: transpose the upstream gradient back.

    Args:
        dy: (batch, num_cols, num_rows), as `batched_transpose` returned its result.

    Returns:
        (batch, num_rows, num_cols), contiguous.
    """
    return _transpose(dy, 'dy')


@op(outputs='y', backward=batched_transpose_bwd)
def batched_transpose(x: Tensor) -> Tensor:
    """Transpose every matrix of a batch.

    Args:
        x: (batch, num_rows, num_cols) of any dtype of 1, 2, 4 or 8 bytes and any size, also empty. Rows may lie apart
            (any batch and row stride); an input without dense rows or columns is first copied to one that has them.

    Returns:
        (batch, num_cols, num_rows), contiguous, never sharing memory with `x`; bits are moved, not converted.
    """
    return _transpose(x, 'x')


# Cases --------------------------------------------------------------------------------------


def _make(shape: tuple[int, int, int], dtype: torch.dtype, layout: str = 'dense') -> dict:
    """Rows that are `dense`, `padded` by 16 bytes, `odd` by one element, `sparse` (stride 2), or dense `columns`."""
    batch, num_rows, num_cols = shape

    def random(*shape: int) -> Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype).to(dtype)
        return torch.randint(0, 2 if dtype is torch.bool else 127, shape, dtype=BITS[dtype.itemsize]).view(dtype)

    if layout == 'columns':
        return dict(x=random(batch, num_cols, num_rows).mT)
    if layout == 'sparse':
        return dict(x=random(batch, num_rows, num_cols, 2).select(-1, 1))
    pad = {'dense': 0, 'padded': VECTOR_BYTES // dtype.itemsize, 'odd': 1}[layout]
    return dict(x=random(batch, num_rows, num_cols + pad).narrow(-1, pad, num_cols))


SIZES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex64]
FP8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32

batched_transpose.cases(
    make=_make,
    match='bitwise',
    smoke=grid(shape=[(2, 80, 144)], dtype=SIZES)  # 16-byte accesses, several tiles, tails of both kinds
    + grid(shape=[(3, 37, 65)], dtype=SIZES)  # single elements on both sides
    + grid(shape=[(1, 64, 66), (1, 36, 68), (1, 34, 72)], dtype=[torch.uint8])  # loads and stores of 2, 4 and 8 bytes
    + grid(shape=[(2, 20, 24)], dtype=[BF16], layout=['padded', 'odd', 'sparse', 'columns'])
    + grid(shape=[(0, 8, 8), (2, 0, 8), (2, 8, 0), (2, 1, 9), (2, 9, 1)], dtype=[torch.int64]),
    full=grid(
        shape=[(8, 576, 2048), (3, 4001, 577), (70000, 8, 24)],  # the last: more matrices than a grid has rows
        dtype=[*SIZES, FP8, torch.float64],
        layout=['dense', 'padded', 'odd', 'columns'],
    )
    + grid(shape=[(1, 50048, 45056), (3, 40001, 24003)], dtype=[torch.uint8]),  # past 2^31 elements: one matrix, all
    bench=grid(shape=[(64, 4096, 4096)], dtype=[FP8, BF16, F32])
    + grid(shape=[(32, 2048, 7168), (8, 4001, 576), (8, 576, 2048), (1, 64, 64)], dtype=[BF16])
    + grid(shape=[(8, 4001, 576)], dtype=[FP8, F32]),
)

batched_transpose_bwd.cases(
    make=lambda **case: dict(dy=_make(**case)['x']),
    match='bitwise',
    smoke=grid(shape=[(2, 20, 24)], dtype=[BF16]),
)
