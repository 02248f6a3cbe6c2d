"""Batched transpose: swap the last two dimensions and write the result densely.

    y[b, n, m] = x[b, m, n]

One thread block transposes one tile through shared memory. Memory bound: the floor is reading x once and writing y
once. Elements are copied as bits, whatever their dtype.

Accesses to global memory have 16 bytes and cover whole spans of a row (`load_span`, `store_span` bytes). In
between, each thread transposes `vec` x `load_width` elements in registers; `vec` is the number of elements in 16 bytes.
The thread loads `load_width` neighbouring columns of `vec` rows. Each of these columns is then one 16-byte vector of
the output. Shared memory only exchanges such vectors. It holds the tile in the layout of the output: column c of x is
row c. Vector v of that row is stored at index v ^ (c // load_width % 8):

    write   8 neighbouring threads own 8 neighbouring groups of `load_width` columns of the same rows. Their rows are a
            multiple of 128 bytes apart, i.e. in the same banks, but the indices differ in their last three bits.
    read    8 neighbouring threads read 8 vectors of one row, each from a different index.

Shared memory serves 16-byte accesses 8 threads at a time from 8 x 16 bytes of banks, so neither has conflicts.

If the row length of y is not a multiple of 16 bytes, rows start at any address. Stores still have 16 bytes: a tile then
covers the aligned vectors of each of its rows of y. So every row is shifted against the tile by its misalignment. Each
vector is assembled from two adjacent vectors in shared memory. For this the tile also holds the `vec` rows of x before
it. Only the first and last vector of a whole row of y are written element by element. A misaligned base or row length
of x requires narrower loads (`load_width`). Their width divides the row length, so no load crosses the end of a row. At
the edges of x, threads load its first or last row or its last columns again, which avoids a branch.
"""

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op

VECTOR_BYTES = 16

#: Integer dtypes by element size, and the dtypes that kernels accept directly.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NATIVE = frozenset(
    (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
    + (torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.int32, torch.uint32, torch.float32)
    + (torch.int64, torch.uint64, torch.float64)
)

#: Up to this size a matrix would leave most of a thread block idle; a plain strided copy reads it through the L1 cache.
SMALL_MATRIX_BYTES = 1024


# Config -------------------------------------------------------------------------------------


def choose(dtype: torch.dtype, load_bytes: int, aligned: bool, size: int) -> dict:
    """Long spans keep DRAM pages open; a small problem gets smaller tiles, so that every SM has several.

    Tiles that have parts of the same vector of an unaligned row of y are written at about the same time.
    """
    large = size * dtype.itemsize >= (32 if aligned else 16) << 20
    return dict(
        load_span=256 if large else 128,
        store_span=256 if large or not aligned else 128,  # shifted rows read 16 bytes more than they store
        order='n' if dtype.itemsize == 1 and aligned else 'm',
    )


# Kernel -------------------------------------------------------------------------------------


@macro
def exchange(words, upper: int, lower: int, col: int, shift: int, mask: int):
    """Swap the high parts of a word in row `upper` with the low parts (those of `mask`) of a word in row `lower`."""
    above = words[upper, col]
    below = words[lower, col]
    words[upper, col] = (above & mask) | ((below & mask) << shift)
    words[lower, col] = ((above >> shift) & mask) | (below & (mask << shift))


@macro
def turn_bytes(block, turned, rows: int, cols: int):
    """`turned` = `block` transposed, in words of four bytes: single bytes would need twice the registers."""
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


@macro
def shift_vector(pair, shift, elem_size: int):
    """Replace the second vector of `pair` by the one that starts `shift` elements before it."""
    words = T.view(pair, (8,), 'uint32')
    for distance in (2, 1):
        if elem_size <= distance * 4:
            for i in T.unroll(8 - distance):
                words[7 - i] = T.if_then_else(
                    shift * elem_size & distance * 4 != 0, words[7 - i - distance], words[7 - i]
                )
    if elem_size < 4:
        for i in T.unroll(4):
            both = T.cast(words[7 - i], 'uint64') << 32 | T.cast(words[6 - i], 'uint64')
            words[7 - i] = T.cast(both >> T.cast(32 - shift * elem_size % 4 * 8, 'uint64'), 'uint32')


@kernel(
    choose=choose,
    space=dict(load_span=(128, 256), store_span=(128, 256), order=('n', 'm')),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def batched_transpose_kernel(
    dtype: torch.dtype, load_bytes: int, aligned: bool, *, load_span: int, store_span: int, order: str
):
    """One thread block per tile of `store_span` bytes of rows by `load_span` bytes of columns.

    Loads have `load_bytes` bytes; `aligned` means that every row of y starts at a multiple of 16 bytes. Neighbouring
    thread blocks process neighbouring tiles along `order`.
    """
    elem_size = dtype.itemsize
    bits = T.dtype(BITS[elem_size])
    vec, load_width = VECTOR_BYTES // elem_size, load_bytes // elem_size
    row_groups, col_groups = store_span // VECTOR_BYTES, load_span // load_bytes
    before = 0 if aligned else vec  # rows of the tile before its first vector of y
    block_m, block_n = row_groups * vec - before, col_groups * load_width
    turn = turn_bytes if elem_size == 1 and load_width >= 4 else turn_elements
    num_threads = row_groups * load_span // VECTOR_BYTES
    num_loads = row_groups * col_groups // num_threads
    num_stores = row_groups * block_n // num_threads
    resident_threads = 768 if elem_size == 1 else 1024  # the limit allows one more block per SM
    batch, num_rows, num_cols, batch_stride, row_stride = (
        T.dynamic(name, 'int64') for name in ('batch', 'num_rows', 'num_cols', 'batch_stride', 'row_stride')
    )
    strides = (batch_stride, row_stride, 1)

    @T.prim_func
    def batched_transpose(
        x: T.StridedTensor((batch, num_rows, num_cols), strides, dtype),
        y: T.Tensor((batch, num_cols, num_rows), dtype),
    ):
        # shifted rows of y extend `vec - 1` elements further; small matrices take another path, so tiles stay below
        # 2^31
        tiles_m = T.cast(T.truncdiv(num_rows + max(before - 1, 0) + block_m - 1, block_m), 'int32')
        tiles_n = T.cast(T.truncdiv(num_cols + block_n - 1, block_n), 'int32')
        with T.Kernel(T.cast(batch, 'int32') * tiles_m * tiles_n, threads=num_threads) as pid:
            T.annotate_min_blocks_per_sm(resident_threads // num_threads)
            # inside the kernel, because the host does not check them: torch may use any stride for a batch of one
            T.assume(num_cols % load_width == 0)
            T.assume(row_stride % load_width == 0)
            T.assume(batch_stride % load_width == 0)
            x_bits = T.view(x, dtype=bits, strides=strides)
            y_bits = T.view(y, dtype=bits)
            y_vectors = T.Tensor((T.ceildiv(batch * num_cols * num_rows, vec), VECTOR_BYTES), 'uint8', y.data)
            tile_shared = T.alloc_shared((block_n, row_groups, vec), bits)  # [column, row // vec, row % vec]
            block_local = T.alloc_local((vec, load_width), bits)
            turned_local = T.alloc_local((load_width, vec), bits)
            pair_local = T.alloc_local((2, vec), bits)
            pair_bytes = T.view(pair_local, (2, VECTOR_BYTES), 'uint8')
            tx = T.get_thread_binding()
            tile_m = T.truncmod(T.truncdiv(pid, tiles_n), tiles_m) if order == 'n' else T.truncmod(pid, tiles_m)
            tile_n = T.truncmod(pid, tiles_n) if order == 'n' else T.truncmod(T.truncdiv(pid, tiles_m), tiles_n)
            pid_b = T.truncdiv(pid, tiles_m * tiles_n)
            row = T.cast(tile_m, 'int64') * block_m
            col = T.cast(tile_n, 'int64') * block_n
            rows_left = T.cast(T.min(num_rows - row, block_m), 'int32')
            cols_left = T.cast(T.min(num_cols - col, block_n), 'int32')
            rows_before = T.cast(T.min(row, before), 'int32')

            for k in T.unroll(num_loads, unroll_factor=max(1, 32 // vec)):
                group = k * num_threads + tx
                row_group, col_group = group // col_groups, group % col_groups
                for i in T.unroll(vec):
                    for j in T.vectorized(load_width):
                        block_local[i, j] = x_bits[
                            pid_b,
                            row + T.max(T.min(row_group * vec + i - before, rows_left - 1), -rows_before),
                            col + T.min(col_group * load_width, cols_left - load_width) + j,
                        ]
                turn(block_local, turned_local, vec, load_width)
                for j in T.unroll(load_width):
                    for i in T.vectorized(vec):
                        tile_shared[col_group * load_width + j, row_group ^ (col_group % 8), i] = turned_local[j, i]

            for k in T.unroll(num_stores, unroll_factor=8 if aligned else 4):
                vector = k * num_threads + tx
                i, j = vector % row_groups, vector // row_groups
                place = j // load_width % 8
                if aligned:
                    T.assume(num_rows % vec == 0)
                    if i * vec < rows_left and j < cols_left:
                        for e in T.vectorized(vec):
                            y_bits[pid_b, col + j, row + i * vec + e] = tile_shared[j, i ^ place, e]
                elif i < row_groups - 1 and j < cols_left:
                    start = (pid_b * num_cols + col + j) * num_rows  # start of the row in y
                    shift = T.cast(start % vec, 'int32')
                    for half in T.unroll(2):
                        for e in T.vectorized(vec):
                            pair_local[half, e] = tile_shared[j, (i + half) ^ place, e]
                    shift_vector(pair_local, shift, elem_size)
                    first = i * vec - shift
                    if first >= -rows_before and first + vec <= rows_left:
                        for e in T.vectorized(VECTOR_BYTES):
                            y_vectors[(start + row) // vec + i, e] = pair_bytes[1, e]
                    else:
                        for e in T.unroll(vec):
                            if first + e >= -rows_before and first + e < rows_left:
                                y_bits[pid_b, col + j, row + first + e] = pair_local[1, e]

    return batched_transpose


# Op -----------------------------------------------------------------------------------------


def bits_of(x: Tensor, name: str) -> torch.dtype:
    """The integer dtype with the element size of `x`; raises if there is none."""
    bits = BITS.get(x.dtype.itemsize)
    if bits is None:
        check.fail(name, 'must have elements of 1, 2, 4 or 8 bytes', check.describe(x))
    return bits


def _transpose(x: Tensor, name: str) -> Tensor:
    batch, num_rows, num_cols = check.shape(x, name, 'batch num_rows num_cols')
    dtype = x.dtype
    if dtype not in NATIVE:
        return _transpose_as_bits(x, name)
    y = x.new_empty((batch, num_cols, num_rows))
    size = batch * num_rows * num_cols
    elem_size = dtype.itemsize
    row_bytes = num_rows * elem_size  # of y
    batch_stride, row_stride, col_stride = x.stride()
    fake = type(x) is FakeTensor
    if fake and type(size * batch_stride * row_stride) is not int:
        return y  # symbolic: nothing runs, and a comparison would make a size a constant of the graph
    dense_columns = row_stride == 1 or num_cols == 1
    if dense_columns or row_bytes <= VECTOR_BYTES or row_bytes * num_cols <= SMALL_MATRIX_BYTES:
        return y.copy_(x.mT)
    if col_stride != 1 or x.is_neg():
        x = x.clone(memory_format=torch.contiguous_format)
        batch_stride, row_stride, _ = x.stride()
    address = int(x.storage_offset()) * elem_size if fake else x.data_ptr()
    widths = VECTOR_BYTES | address | (batch_stride | row_stride | num_cols) * elem_size
    load_bytes = widths & -widths  # the lowest set bit: the largest common power of two
    launch(batched_transpose_kernel, (dtype, load_bytes, row_bytes % VECTOR_BYTES == 0), x, y, size=size)
    return y


def _transpose_as_bits(x: Tensor, name: str) -> Tensor:
    """Transpose a tensor whose dtype TileLang does not support (bool, complex) as integers of the same size."""
    return _transpose(x.resolve_conj().resolve_neg().view(bits_of(x, name)), name).view(x.dtype)


@op(outputs='dx')
def batched_transpose_bwd(dy: Tensor) -> Tensor:
    """Gradient of `batched_transpose`: transpose the upstream gradient back.

    Args:
        dy: (batch, num_cols, num_rows), like the result of `batched_transpose`.

    Returns:
        (batch, num_rows, num_cols), contiguous.
    """
    return _transpose(dy, 'dy')


@op(outputs='y', backward=batched_transpose_bwd)
def batched_transpose(x: Tensor) -> Tensor:
    """Transpose every matrix of a batch.

    Args:
        x: (batch, num_rows, num_cols) of any dtype of 1, 2, 4 or 8 bytes and any size, also empty. It may have any
            batch and row stride. An input without dense rows or columns is first copied to one that has them.

    Returns:
        (batch, num_cols, num_rows), contiguous, never an alias of `x`; bits are copied, not converted.
    """
    return _transpose(x, 'x')


# Cases --------------------------------------------------------------------------------------


def _make(shape: tuple[int, int, int], dtype: torch.dtype, layout: str = 'dense') -> dict:
    """Rows are `dense`, `padded` by 16 bytes, `odd` by one element, `sparse` (stride 2), or dense `columns`."""
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
    smoke=grid(shape=[(2, 80, 144)], dtype=SIZES)  # 16-byte accesses, several tiles, partial tiles of both dimensions
    + grid(shape=[(3, 37, 65)], dtype=SIZES)  # loads of single elements, shifted stores
    + grid(shape=[(1, 64, 66), (1, 36, 68), (1, 34, 72)], dtype=[torch.uint8])  # loads of 2, 4 and 8 bytes
    + grid(shape=[(2, 24, 40)], dtype=[BF16], layout=['padded', 'odd', 'sparse', 'columns'])
    + grid(shape=[(0, 8, 8), (2, 0, 8), (2, 8, 0), (2, 1, 9), (2, 9, 1), (3, 4, 4)], dtype=[torch.int64]),
    full=grid(
        shape=[(8, 576, 2048), (3, 4001, 577), (70000, 24, 48)],  # the last: more matrices than the y extent of a grid
        dtype=[*SIZES, FP8, torch.float64],
        layout=['dense', 'padded', 'odd', 'columns'],
    )
    + grid(shape=[(1 << 20, 4, 4), (1 << 18, 8, 8), (64, 4, 70000), (64, 70000, 4)], dtype=[FP8, BF16, F32])
    + grid(shape=[(1, 50048, 45056), (3, 40001, 24003)], dtype=[torch.uint8]),  # over 2^31 elements: one matrix, all
    bench=grid(shape=[(64, 4096, 4096)], dtype=[FP8, BF16, F32])
    + grid(shape=[(32, 2048, 7168), (8, 4001, 576), (8, 576, 2048), (1, 64, 64)], dtype=[BF16])
    + grid(shape=[(8, 4001, 576)], dtype=[FP8, F32]),
)

batched_transpose_bwd.cases(
    make=lambda **case: dict(dy=_make(**case)['x']),
    match='bitwise',
    smoke=grid(shape=[(2, 24, 40)], dtype=[BF16]),
    bench=grid(shape=[(64, 4096, 4096), (8, 576, 4001)], dtype=[BF16]),
)
