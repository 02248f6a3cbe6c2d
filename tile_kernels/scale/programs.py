"""Six distributed programs, written as their textbook says. They are examples and tests of the language.

Tensors may be overwritten by the next launch of a peer. So a program begins with a barrier of all devices: behind it,
every device has finished what came before on its stream.
"""

from typing import Any

from tile_kernels.core.lang import T
from tile_kernels.scale import language as S

THREADS = 128


def shift(n: int, world: int, dtype: str = 'float32') -> Any:
    """Every device gives its tensor to the next one: `b[r] = a[r - 1]`."""

    @T.prim_func
    def shift(
        a: T.Tensor((n,), dtype),
        b: S.Symmetric((n,), dtype, world),
        signals: S.Signals(world),
        rank: T.int32,
    ):
        with T.Kernel(1, threads=THREADS), S.Scale('device', rank, world) as (dev_id, dev_num):
            S.barrier(signals)
            S.copy(a, b, dst=(dev_id + 1) % dev_num)
            S.barrier(signals)

    return shift


def all_gather(n: int, world: int, dtype: str = 'float32') -> Any:
    """Every device gets the tensors of all: `y[r] = (x[0], x[1], ...)`. One block per peer."""

    @T.prim_func
    def all_gather(
        x: T.Tensor((n,), dtype),
        y: S.Symmetric((world, n), dtype, world),
        signals: S.Signals(world, blocks=world),
        rank: T.int32,
    ):
        with T.Kernel(world, threads=THREADS) as pid, S.Scale('device', rank, world) as (dev_id, dev_num):
            S.barrier(signals, block=pid)
            S.copy(x, S.peer(y, (dev_id + pid) % dev_num)[dev_id, 0:n])
            S.signal(signals, dst=(dev_id + pid) % dev_num)
            S.wait(signals, src=(dev_id + dev_num - pid) % dev_num)

    return all_gather


def reduce_scatter(n: int, world: int, dtype: str = 'float32', block: int = 256) -> Any:
    """Every device gets one part of the sum: `y[r] = x[0][r] + x[1][r] + ...`, in float32 and in the order of ranks."""
    blocks = -(-n // block)

    @T.prim_func
    def reduce_scatter(
        x: S.Symmetric((world, n), dtype, world),
        y: T.Tensor((n,), dtype),
        signals: S.Signals(world, blocks=blocks),
        rank: T.int32,
    ):
        with T.Kernel(blocks, threads=THREADS) as pid, S.Scale('device', rank, world) as (dev_id, dev_num):
            total = T.alloc_fragment((block,), 'float32')
            T.clear(total)
            S.barrier(signals, block=pid)
            for source in T.serial(dev_num):
                part = S.peer(x, source)
                for i in T.Parallel(block):
                    if pid * block + i < n:
                        total[i] += T.cast(part[dev_id, pid * block + i], 'float32')
            for i in T.Parallel(block):
                if pid * block + i < n:
                    y[pid * block + i] = T.cast(total[i], dtype)
            S.barrier(signals, block=pid)  # nobody may overwrite x before all have read it

    return reduce_scatter


def all_to_all(capacity: int, hidden: int, world: int, dtype: str = 'bfloat16') -> Any:
    """Rows of different numbers to every device, as the tokens of a mixture of experts.

    The rows for device d follow those for d - 1 in `x`, and `counts[d]` of them go there. Device d finds them in
    `rows`, those of rank 0 first. If they do not fit into its `capacity`, it gets none. `needed` says how many rows
    each device should get, and the caller must compare.
    """
    num_rows = T.dynamic('num_rows')

    @T.prim_func
    def all_to_all(
        x: T.Tensor((num_rows, hidden), dtype),
        counts: T.Tensor((world,), 'int32'),
        rows: S.Symmetric((capacity, hidden), dtype, world),
        table: S.Symmetric((world, world), 'int32', world),
        needed: T.Tensor((world,), 'int32'),
        signals: S.Signals(world, blocks=world),
        rank: T.int32,
    ):
        with T.Kernel(world, threads=THREADS) as pid, S.Scale('device', rank, world) as (dev_id, dev_num):
            thread = T.get_thread_binding()
            target = (dev_id + pid) % dev_num
            S.barrier(signals, block=pid)
            S.copy(counts, S.peer(table, target)[dev_id, 0:world])
            S.barrier(signals, block=pid)
            everything = S.peer(table, dev_id)
            first = T.alloc_var('int32', init=0)
            place = T.alloc_var('int32', init=0)
            total = T.alloc_var('int32', init=0)
            mine = T.alloc_var('int32', init=0)
            for other in T.serial(dev_num):
                if other < target:
                    first += counts[other]
                if other < dev_id:
                    place += everything[other, target]
                total += everything[other, target]
            mine = counts[target]
            if thread == 0:
                needed[target] = total
            if total <= capacity:
                for i in T.serial(mine):
                    S.copy(x[first + i, 0:hidden], S.peer(rows, target)[place + i, 0:hidden])
            S.barrier(signals, block=pid)

    return all_to_all


def all_gather_gemm(
    m: int, n: int, k: int, world: int, dtype: str = 'bfloat16', tile: tuple[int, int, int] = (64, 64, 32)
) -> Any:
    """`c = (a[0], a[1], ...) @ b.T`: a tile of the product starts as soon as its rows have come.

    The first `world` blocks send the rows of this device, tile by tile, and signal each tile in a slot of its own. The
    other blocks wait for the rows of one tile and multiply.
    """
    block_m, block_n, block_k = tile
    tiles, columns = m // block_m, n // block_n

    @T.prim_func
    def all_gather_gemm(
        a: T.Tensor((m, k), dtype),
        b: T.Tensor((n, k), dtype),
        gathered: S.Symmetric((world * m, k), dtype, world),
        c: T.Tensor((world * m, n), dtype),
        signals: S.Signals(world, slots=tiles, blocks=world),
        rank: T.int32,
    ):
        with (
            T.Kernel(world + world * tiles * columns, threads=THREADS) as pid,
            S.Scale('device', rank, world) as (dev_id, dev_num),
        ):
            a_shared = T.alloc_shared((block_m, block_k), dtype)
            b_shared = T.alloc_shared((block_n, block_k), dtype)
            c_frag = T.alloc_fragment((block_m, block_n), 'float32')
            if pid < world:
                target = (dev_id + pid) % dev_num
                S.barrier(signals, block=pid)
                for i in T.serial(tiles):
                    S.copy(
                        a[i * block_m : (i + 1) * block_m, 0:k],
                        S.peer(gathered, target)[dev_id * m + i * block_m : dev_id * m + (i + 1) * block_m, 0:k],
                    )
                    S.signal(signals, dst=target, slot=i)
            else:
                owner = T.alloc_var('int32')  # a variable: TVM folds this expression and those below to wrong rows
                owner = (dev_id + (pid - world) // (tiles * columns)) % dev_num  # own rows first
                row = (pid - world) // columns % tiles
                column = (pid - world) % columns
                S.wait(signals, src=owner, slot=row)
                start = owner * m + row * block_m
                T.clear(c_frag)
                for step in T.serial(k // block_k):
                    S.copy(
                        S.peer(gathered, dev_id)[start : start + block_m, step * block_k : (step + 1) * block_k],
                        a_shared,
                    )
                    T.copy(b[column * block_n, step * block_k], b_shared)
                    T.gemm(a_shared, b_shared, c_frag, transpose_B=True)
                T.copy(c_frag, c[start, column * block_n])

    return all_gather_gemm


def gemm_all_to_all(
    m: int, n: int, k: int, world: int, dtype: str = 'bfloat16', tile: tuple[int, int, int] = (64, 64, 32)
) -> Any:
    """`y[r][s] = a[s][r] @ b[s].T`: the rows of part r of device s go to device r, each tile when it is done."""
    block_m, block_n, block_k = tile
    tiles, columns = m // block_m, n // block_n
    per_rank = tiles * columns

    @T.prim_func
    def gemm_all_to_all(
        a: T.Tensor((world, m, k), dtype),
        b: T.Tensor((n, k), dtype),
        y: S.Symmetric((world, m, n), dtype, world),
        signals: S.Signals(world, slots=per_rank, blocks=world * per_rank),
        rank: T.int32,
    ):
        with T.Kernel(world * per_rank, threads=THREADS) as pid, S.Scale('device', rank, world) as (dev_id, dev_num):
            a_shared = T.alloc_shared((block_m, block_k), dtype)
            b_shared = T.alloc_shared((block_n, block_k), dtype)
            c_frag = T.alloc_fragment((block_m, block_n), 'float32')
            target = (dev_id + pid // per_rank) % dev_num
            index = pid % per_rank
            row, column = index // columns * block_m, index % columns * block_n
            S.barrier(signals, block=pid)
            T.clear(c_frag)
            for step in T.serial(k // block_k):
                T.copy(a[target, row : row + block_m, step * block_k : (step + 1) * block_k], a_shared)
                T.copy(b[column, step * block_k], b_shared)
                T.gemm(a_shared, b_shared, c_frag, transpose_B=True)
            S.copy(c_frag, S.peer(y, target)[dev_id, row : row + block_m, column : column + block_n])
            S.signal(signals, dst=target, slot=index)
            S.wait(signals, src=(dev_id + dev_num - pid // per_rank) % dev_num, slot=index)

    return gemm_all_to_all
