"""Scale factors of a weight for both of its GEMM operands: exponents packed along either side, one word for each row.

    row_sf[g, j, n] = bytes b: exponent of sf[g, n // B, 4 j + b]      B = block, 4 blocks of k to a word
    col_sf[g, j, k] = bytes b: exponent of sf[g, 4 j + b, k // B]      4 blocks of n to a word

A thread packs one word and writes it to four neighbouring rows, which share it. Memory bound, and small.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.device.bits import bits_of

BLOCKS = (32, 128)
NUM_THREADS = 256

#: Rows that a thread writes: 16 bytes.
ROWS = 4


# Kernel -------------------------------------------------------------------------------------


@macro
def pack(sf, y, index, block, across):
    """Write the word of four rows of `y`; its bytes come from blocks along k, or `across`, along n."""
    word = T.alloc_var(T.uint32)
    batch = T.alloc_var(T.int32)
    j = T.alloc_var(T.int32)
    row = T.alloc_var(T.int32)
    words, vectors = y.shape[1], y.shape[2] // ROWS
    batch = T.truncdiv(index, words * vectors)
    j = T.truncmod(T.truncdiv(index, vectors), words)
    row = T.truncmod(index, vectors)
    word = T.uint32(0)
    for b in T.unroll(4):
        if 4 * j + b < sf.shape[1 if across else 2]:
            factor = (
                sf[batch, 4 * j + b, row // (block // ROWS)] if across else sf[batch, row // (block // ROWS), 4 * j + b]
            )
            word = word | ((bits_of(factor) >> T.uint32(23)) & T.uint32(0xFF)) << T.cast(8 * b, T.uint32)
    for e in T.vectorized(ROWS):
        y[batch, j, row * ROWS + e] = T.reinterpret(word, T.int32)


@kernel(pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def transpose_weight_sf_kernel(block: int):
    """Both results in one launch, one after the other."""
    batch, blocks_n, blocks_k = T.dynamic('batch'), T.dynamic('blocks_n'), T.dynamic('blocks_k')
    words_n, words_k = T.ceildiv(blocks_n, 4), T.ceildiv(blocks_k, 4)

    @T.prim_func
    def transpose_weight_sf(
        sf: T.Tensor((batch, blocks_n, blocks_k), T.float32),
        row_sf: T.Tensor((batch, words_k, blocks_n * block), T.int32),
        col_sf: T.Tensor((batch, words_n, blocks_k * block), T.int32),
    ):
        row_vectors = batch * words_k * (blocks_n * (block // ROWS))
        col_vectors = batch * words_n * (blocks_k * (block // ROWS))
        with T.Kernel(T.ceildiv(row_vectors + col_vectors, NUM_THREADS), threads=NUM_THREADS) as pid:
            index = pid * NUM_THREADS + T.get_thread_binding()
            if index < row_vectors:
                pack(sf, row_sf, index, block, False)
            elif index < row_vectors + col_vectors:
                pack(sf, col_sf, index - row_vectors, block, True)

    return transpose_weight_sf


# Op -----------------------------------------------------------------------------------------


@op(outputs='row_sf col_sf')
def transpose_weight_sf(sf: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Pack the scale factors of weights along k and along n.

    Args:
        sf: (batch, n / block, k / block) float32 powers of two, contiguous; only the exponent counts.
        block: rows and columns that share a scale factor, 32 or 128.

    Returns:
        `row_sf` (batch, ceil(k / block / 4), n) and `col_sf` (batch, ceil(n / block / 4), k), int32, contiguous: the
        bytes of a word are the exponents of four neighbouring blocks; bytes without a block are 0.
    """
    batch, blocks_n, blocks_k = check.shape(sf, 'sf', 'batch blocks_n blocks_k', dtype=torch.float32)
    check.contiguous(sf, 'sf')
    check.one_of(block, BLOCKS, 'block')
    row_sf = torch.empty((batch, (blocks_k + 3) // 4, blocks_n * block), dtype=torch.int32, device=sf.device)
    col_sf = torch.empty((batch, (blocks_n + 3) // 4, blocks_k * block), dtype=torch.int32, device=sf.device)
    launch(transpose_weight_sf_kernel, (block,), sf, row_sf, col_sf, size=sf.numel())
    return row_sf, col_sf


# Cases --------------------------------------------------------------------------------------


def _make(shape: tuple[int, int, int], block: int) -> dict:
    return dict(sf=torch.exp2(torch.randint(-60, 60, shape).float()), block=block)


transpose_weight_sf.cases(
    make=_make,
    match='bitwise',
    smoke=grid(shape=[(1, 1, 1), (2, 5, 6), (0, 4, 4)], block=[32]) + grid(shape=[(1, 4, 3)], block=[128]),
    full=grid(shape=[(1, 56, 16), (32, 32, 56), (3, 7, 129)], block=BLOCKS),
    bench=grid(shape=[(32, 16, 56)], block=[128]) + grid(shape=[(1, 64, 224)], block=[32]),
)
