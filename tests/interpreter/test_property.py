"""Random small tile programs, run by the interpreter and evaluated directly with PyTorch and NumPy: equal bits."""

import numpy as np
import tilelang.language as T
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tile_kernels.interpreter import interpret

bounded = settings(
    max_examples=16,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

FLOATS = ('float32', 'float16', 'bfloat16')
NARROW_INTS = ('int8', 'uint8', 'int16')
FP8_MAX = {'float8_e4m3fn': 448.0, 'float8_e5m2': 57344.0}


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def random_tensor(shape, dtype: str, seed: int) -> torch.Tensor:
    """Quarters between -2 and 2 for floats, small whole numbers for integers."""
    low = 0 if dtype.startswith('uint') else -8
    values = torch.randint(low, 9, shape, generator=torch.Generator().manual_seed(seed))
    return (values / 4 if 'float' in dtype else values).to(torch_dtype(dtype))


# Expressions. A tree is a nested tuple; `to_tir` writes it as TileLang and `to_torch` computes it. Narrow integers get
# ring operations only: whether an intermediate is wrapped or promoted then makes no difference to the stored result.
RING = {
    'add': lambda a, b: a + b,
    'sub': lambda a, b: a - b,
    'mul': lambda a, b: a * b,
}
BITS = {
    'and': lambda a, b: a & b,
    'or': lambda a, b: a | b,
    'xor': lambda a, b: a ^ b,
}
ORDER_TIR = {'max': T.max, 'min': T.min}
ORDER_TORCH = {'max': torch.maximum, 'min': torch.minimum}
COMPARE = {
    'lt': lambda a, b: a < b,
    'ge': lambda a, b: a >= b,
    'eq': lambda a, b: a == b,
}


def leaves(dtype: str, input_dtypes: tuple[str, str]):
    """Inputs of the wanted type, or cast to it; C leaves open what a negative float becomes as an unsigned integer."""
    usable = [k for k in range(2) if not (dtype == 'uint8' and input_dtypes[k] in FLOATS)]
    return st.sampled_from(
        [('input', k) if input_dtypes[k] == dtype else ('cast', dtype, ('input', k)) for k in usable]
    )


def trees(dtype: str, input_dtypes: tuple[str, str]):
    """Trees of one type, with constants only as right operands."""
    constant = st.sampled_from([('const', dtype, value) for value in (1, 2, 3)])
    binary = {*RING, *(ORDER_TIR if dtype in (*FLOATS, 'int32') else ()), *(BITS if 'int' in dtype else ())}

    def grow(child):
        options = [st.tuples(st.sampled_from(sorted(binary)), child, st.one_of(child, constant))]
        if dtype in FLOATS:
            options += [st.tuples(st.just('div'), child, child), st.tuples(st.just('abs'), child)]
        if dtype == 'int32':
            options.append(st.tuples(st.sampled_from(['floordiv', 'floormod']), child, st.integers(1, 7)))
        if dtype in (*FLOATS, 'int32'):
            options.append(st.tuples(st.just('select'), st.sampled_from(sorted(COMPARE)), child, child, child, child))
        return st.one_of(options)

    return st.recursive(leaves(dtype, input_dtypes), grow, max_leaves=6)


def to_tir(tree, inputs):
    """Write a tree as a TileLang expression."""
    kind, *args = tree
    if kind == 'input':
        return inputs[args[0]]
    if kind == 'const':
        return T.cast(args[1], args[0])
    if kind == 'cast':
        return T.cast(to_tir(args[1], inputs), args[0])
    if kind == 'select':
        a, b, then, otherwise = (to_tir(child, inputs) for child in args[1:])
        return T.if_then_else(COMPARE[args[0]](a, b), then, otherwise)
    if kind == 'floordiv':
        return T.floordiv(to_tir(args[0], inputs), args[1])
    if kind == 'floormod':
        return T.floormod(to_tir(args[0], inputs), args[1])
    operands = [to_tir(child, inputs) for child in args]
    if kind == 'abs':
        return T.abs(operands[0])
    if kind == 'div':
        return operands[0] / (T.abs(operands[1]) + T.cast(1, operands[1].dtype))
    return (RING | BITS | ORDER_TIR)[kind](*operands)


def to_torch(tree, inputs):
    """Compute a tree on tensors; every operation rounds to its type."""
    kind, *args = tree
    if kind == 'input':
        return inputs[args[0]]
    if kind == 'const':
        return torch.tensor(args[1], dtype=torch_dtype(args[0]))
    if kind == 'cast':
        return to_torch(args[1], inputs).to(torch_dtype(args[0]))
    if kind == 'select':
        a, b, then, otherwise = (to_torch(child, inputs) for child in args[1:])
        return torch.where(COMPARE[args[0]](a, b), then, otherwise)
    if kind == 'floordiv':
        return torch.div(to_torch(args[0], inputs), args[1], rounding_mode='floor')
    if kind == 'floormod':
        return torch.remainder(to_torch(args[0], inputs), args[1])
    operands = [to_torch(child, inputs) for child in args]
    if kind == 'abs':
        return operands[0].abs()
    if kind == 'div':
        return operands[0] / (operands[1].abs() + 1)
    return (RING | BITS | ORDER_TORCH)[kind](*operands)


@st.composite
def elementwise_programs(draw):
    """Types, two trees, a shape and a tile that need not divide it, and where the inputs are staged."""
    input_dtypes = (draw(st.sampled_from([*FLOATS, 'int32', *NARROW_INTS])), draw(st.sampled_from([*FLOATS, 'int32'])))
    dtype = draw(st.sampled_from([*FLOATS, 'int32', *({input_dtypes[0]} & set(NARROW_INTS))]))
    out_dtype = draw(st.sampled_from([dtype, *(FP8_MAX if dtype == 'float32' else ())]))
    tree = trees(dtype, input_dtypes)
    shape = (draw(st.integers(1, 20)), draw(st.integers(1, 40)))
    return (
        input_dtypes,
        dtype,
        out_dtype,
        draw(tree),
        draw(tree),
        shape,
        draw(st.sampled_from(['none', 'fragment', 'shared'])),
    )


def elementwise_kernel(input_dtypes, out_dtype, then_tree, else_tree, shape, staging, block_m=8, block_n=16):
    """`out = then_tree` where row + column is even, `else_tree` elsewhere."""
    staged = staging != 'none'
    alloc = T.alloc_shared if staging == 'shared' else T.alloc_fragment

    @T.prim_func
    def elementwise(
        a: T.Tensor(shape, input_dtypes[0]), b: T.Tensor(shape, input_dtypes[1]), out: T.Tensor(shape, out_dtype)
    ):
        with T.Kernel(T.ceildiv(shape[1], block_n), T.ceildiv(shape[0], block_m), threads=32) as (pid_n, pid_m):
            row, col = pid_m * block_m, pid_n * block_n
            if staged:
                a_tile = alloc((block_m, block_n), input_dtypes[0])
                b_tile = alloc((block_m, block_n), input_dtypes[1])
                T.copy(a[row, col], a_tile)
                T.copy(b[row, col], b_tile)
            for i, j in T.Parallel(block_m, block_n):
                inputs = (a_tile[i, j], b_tile[i, j]) if staged else (a[row + i, col + j], b[row + i, col + j])
                if (row + i + col + j) % 2 == 0:
                    out[row + i, col + j] = to_tir(then_tree, inputs)
                else:
                    out[row + i, col + j] = to_tir(else_tree, inputs)

    return elementwise


@bounded
@given(elementwise_programs(), st.integers(0, 1000))
def test_elementwise_expressions(program, seed):
    input_dtypes, dtype, out_dtype, then_tree, else_tree, shape, staging = program
    inputs = [random_tensor(shape, name, seed + k) for k, name in enumerate(input_dtypes)]
    even = (torch.arange(shape[0])[:, None] + torch.arange(shape[1])) % 2 == 0
    then, otherwise = (to_torch(tree, inputs).to(torch_dtype(dtype)).expand(shape) for tree in (then_tree, else_tree))
    expected = torch.where(even, then, otherwise)
    if out_dtype in FP8_MAX:
        expected = expected.clamp(-FP8_MAX[out_dtype], FP8_MAX[out_dtype])
    out = torch.empty(shape, dtype=torch_dtype(out_dtype))
    interpret(
        elementwise_kernel(input_dtypes, out_dtype, then_tree, else_tree, shape, staging), *inputs, out, checks='all'
    )
    assert torch.equal(out.float(), expected.to(out.dtype).float())


extents = st.integers(1, 9)


@st.composite
def copy_programs(draw):
    """A rectangle of the source goes into a tile, another of the tile into the destination; both may stick out."""
    tile = (draw(st.integers(8, 16)), draw(st.integers(8, 16)))
    height, width = draw(st.integers(1, tile[0])), draw(st.integers(1, tile[1]))
    inside = draw(st.integers(0, tile[0] - height)), draw(st.integers(0, tile[1] - width))
    source, target = (tuple(draw(st.integers(1, 24)) for _ in range(2)) for _ in range(2))
    source_at, target_at = (tuple(draw(st.integers(0, 20)) for _ in range(2)) for _ in range(2))
    scope = draw(st.sampled_from(['fragment', 'shared']))
    dtype = draw(st.sampled_from(['float32', 'bfloat16', 'float8_e4m3fn', 'int8', 'int64']))
    return scope, dtype, tile, (height, width), inside, source, source_at, target, target_at


def copy_kernel(scope, dtype, tile, size, inside, source, source_at, target, target_at):
    """Copy through a tile; offsets include the block index so that they are unknown to the front end."""
    alloc = {'fragment': T.alloc_fragment, 'shared': T.alloc_shared}[scope]
    (height, width), (top, left) = size, inside

    @T.prim_func
    def copy(x: T.Tensor(source, dtype), y: T.Tensor(target, dtype)):
        with T.Kernel(1, threads=32) as pid:
            x_tile = alloc(tile, dtype)
            row, col = pid + source_at[0], pid + source_at[1]
            T.copy(x[row : row + height, col : col + width], x_tile[top : top + height, left : left + width])
            row_out, col_out = pid + target_at[0], pid + target_at[1]
            T.copy(
                x_tile[top : top + height, left : left + width],
                y[row_out : row_out + height, col_out : col_out + width],
            )

    return copy


@bounded
@given(copy_programs(), st.integers(0, 1000))
def test_copies_pad_with_zero_and_drop_what_is_outside(program, seed):
    _, dtype, _, (height, width), _, source, source_at, target, target_at = program
    x, y = random_tensor(source, dtype, seed), random_tensor(target, dtype, seed + 1)
    padded = np.zeros((64, 64))
    padded[: source[0], : source[1]] = x.double()
    moved = padded[source_at[0] : source_at[0] + height, source_at[1] : source_at[1] + width]
    expected = np.zeros((64, 64))
    expected[: target[0], : target[1]] = y.double()
    expected[target_at[0] : target_at[0] + height, target_at[1] : target_at[1] + width] = moved
    interpret(copy_kernel(*program), x, y, checks='none')
    assert np.array_equal(y.double().numpy(), expected[: target[0], : target[1]])


@st.composite
def gather_programs(draw):
    """Shapes and the coefficients of two affine indices, taken modulo the extents of the source."""
    source, target = (tuple(draw(st.integers(1, 12)) for _ in range(2)) for _ in range(2))
    coefficients = tuple(tuple(draw(st.integers(-5, 5)) for _ in range(3)) for _ in range(2))
    return source, target, coefficients, draw(st.sampled_from(['global', 'shared']))


def gather_kernel(source, target, coefficients, scope):
    """`y[i, j] = x[f(i, j) mod rows, g(i, j) mod columns]`, where the modulus of a negative number is not negative."""
    (a, b, c), (d, e, f) = coefficients
    staged = scope == 'shared'

    @T.prim_func
    def gather(x: T.Tensor(source, 'float32'), y: T.Tensor(target, 'float32')):
        with T.Kernel(1, threads=64):
            x_shared = T.alloc_shared(source, 'float32')
            if staged:
                T.copy(x, x_shared)
            for i, j in T.Parallel(*target):
                row, col = (a * i + b * j + c) % source[0], (d * i + e * j + f) % source[1]
                y[i, j] = x_shared[row, col] if staged else x[row, col]

    return gather


@bounded
@given(gather_programs())
def test_gathers_by_affine_indices(program):
    source, target, ((a, b, c), (d, e, f)), _ = program
    x, y = random_tensor(source, 'float32', seed=a + 7 * b), torch.empty(target)
    interpret(gather_kernel(*program), x, y, checks='all')
    i, j = torch.arange(target[0])[:, None], torch.arange(target[1])
    assert torch.equal(y, x[(a * i + b * j + c) % source[0], (d * i + e * j + f) % source[1]])


def strided_kernel(hidden, vector, num_threads=32):
    """Reverse every group of `vector` channels of a strided tensor, through registers."""
    num_tokens, stride = T.dynamic('num_tokens'), T.dynamic('stride')

    @T.prim_func
    def strided(
        x: T.StridedTensor((num_tokens, hidden), (stride, 1), 'int16'), y: T.Tensor((num_tokens, hidden), 'int16')
    ):
        with T.Kernel(num_tokens, threads=num_threads) as token_idx:
            x_local = T.alloc_local((vector,), 'int16')
            for step in T.serial(T.ceildiv(hidden // vector, num_threads)):
                group = step * num_threads + T.get_thread_binding()
                if group < hidden // vector:
                    for k in T.vectorized(vector):
                        x_local[k] = x[token_idx, group * vector + k]
                    for k in T.unroll(vector):
                        y[token_idx, group * vector + k] = x_local[vector - 1 - k]

    return strided


@bounded
@given(st.integers(1, 5), st.integers(1, 40), st.sampled_from([1, 2, 4, 8]), st.integers(0, 9))
def test_strided_views_through_registers(num_tokens, num_groups, vector, padding):
    hidden = num_groups * vector
    x = random_tensor((num_tokens, hidden + padding), 'int16', seed=hidden)[:, :hidden]
    y = torch.empty(num_tokens, hidden, dtype=torch.int16)
    interpret(strided_kernel(hidden, vector), x, y, checks='all')
    assert torch.equal(y, x.unflatten(1, (-1, vector)).flip(-1).flatten(1))


REDUCTIONS = {
    'sum': np.add.reduce,
    'max': np.maximum.reduce,
    'min': np.minimum.reduce,
    'abssum': lambda x, axis: np.abs(x).sum(axis),
    'absmax': lambda x, axis: np.abs(x).max(axis),
    'bitand': np.bitwise_and.reduce,
    'bitor': np.bitwise_or.reduce,
    'bitxor': np.bitwise_xor.reduce,
}


@st.composite
def reduce_programs(draw):
    """An operation, a type it exists for, a shape of one to three axes and the axis to reduce."""
    name = draw(st.sampled_from(sorted(REDUCTIONS)))
    dtype = draw(st.sampled_from(['int32'] if name.startswith('bit') else ['int32', 'float32', 'float16']))
    shape = tuple(draw(st.lists(extents, min_size=1, max_size=3)))
    return name, dtype, shape, draw(st.integers(0, len(shape) - 1)), draw(st.booleans())


def reduce_kernel(name, dtype, shape, dim, keep):
    """`y[pid] = reduce(x[pid])`, or reduce with what `y` holds when `keep` is set."""
    out_shape = shape[:dim] + shape[dim + 1 :] or (1,)
    whole, out_whole = (tuple(slice(0, extent) for extent in extents) for extents in (shape, out_shape))

    @T.prim_func
    def reduce(x: T.Tensor((3, *shape), dtype), y: T.Tensor((3, *out_shape), dtype)):
        with T.Kernel(3, threads=32) as pid:
            x_frag = T.alloc_fragment(shape, dtype)
            y_frag = T.alloc_fragment(out_shape, dtype)
            T.copy(x[(pid, *whole)], x_frag)
            if keep:
                T.copy(y[(pid, *out_whole)], y_frag)
            T.reduce(x_frag, y_frag, name, dim, not keep)
            T.copy(y_frag, y[(pid, *out_whole)])

    return reduce


@bounded
@given(reduce_programs(), st.integers(0, 1000))
def test_reductions_over_any_axis(program, seed):
    name, dtype, shape, dim, keep = program
    x = random_tensor((3, *shape), dtype, seed).numpy()
    combine = REDUCTIONS[name]
    expected = combine(x, axis=dim + 1).reshape((3, *(shape[:dim] + shape[dim + 1 :] or (1,))))
    y = random_tensor(expected.shape, dtype, seed + 1)
    y = y.abs() if name.startswith('abs') else y
    if keep:
        expected = combine(np.stack([expected, y.numpy()]), axis=0)
    interpret(reduce_kernel(*program), torch.from_numpy(x), y, checks='all')
    assert np.array_equal(y.numpy(), expected.astype(x.dtype))


def cumsum_kernel(dtype, shape, dim, reverse, scope):
    """Prefix sums along one axis, in place."""
    alloc = {'fragment': T.alloc_fragment, 'shared': T.alloc_shared}[scope]

    @T.prim_func
    def cumsum(x: T.Tensor(shape, dtype), y: T.Tensor(shape, dtype)):
        with T.Kernel(1, threads=32):
            x_tile = alloc(shape, dtype)
            T.copy(x, x_tile)
            T.cumsum(x_tile, dim=dim, reverse=reverse)
            T.copy(x_tile, y)

    return cumsum


@bounded
@given(
    st.sampled_from(['int32', 'float32']),
    st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple),
    st.integers(0, 1),
    st.booleans(),
    st.sampled_from(['fragment', 'shared']),
)
def test_prefix_sums_in_both_directions(dtype, shape, dim, reverse, scope):
    dim = min(dim, len(shape) - 1)
    x = random_tensor(shape, dtype, seed=sum(shape))
    y = torch.empty_like(x)
    interpret(cumsum_kernel(dtype, shape, dim, reverse, scope), x, y, checks='all')
    expected = x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)
    assert torch.equal(y, expected.to(x.dtype))


GEMM_DTYPES = {
    'float16': 'float32',
    'bfloat16': 'float32',
    'float8_e4m3fn': 'float32',
    'int8': 'int32',
    'float32': 'float32',
}


@st.composite
def gemm_programs(draw):
    """A tile, operand types, transposes, the memory of the left operand and whether the second step starts afresh."""
    m, n, k = (16 * draw(st.integers(1, 4)) for _ in range(3))
    dtype = draw(st.sampled_from(sorted(GEMM_DTYPES)))
    return (
        dtype,
        m,
        n,
        k,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(['fragment', 'shared'])),
        draw(st.booleans()),
    )


def gemm_kernel(dtype, m, n, k, trans_a, trans_b, scope_a, restart):
    """Two products of one tile each, accumulated unless the second clears the accumulator."""
    alloc = {'fragment': T.alloc_fragment, 'shared': T.alloc_shared}[scope_a]
    a_shape, b_shape = ((k, m) if trans_a else (m, k)), ((n, k) if trans_b else (k, n))

    @T.prim_func
    def gemm(
        a: T.Tensor((2, *a_shape), dtype), b: T.Tensor((2, *b_shape), dtype), c: T.Tensor((m, n), GEMM_DTYPES[dtype])
    ):
        with T.Kernel(1, threads=128):
            a_tile = alloc(a_shape, dtype)
            b_shared = T.alloc_shared(b_shape, dtype)
            c_frag = T.alloc_fragment((m, n), GEMM_DTYPES[dtype])
            T.clear(c_frag)
            for step in T.Pipelined(2, num_stages=2):
                T.copy(a[step, 0 : a_shape[0], 0 : a_shape[1]], a_tile)
                T.copy(b[step, 0 : b_shape[0], 0 : b_shape[1]], b_shared)
                T.gemm(a_tile, b_shared, c_frag, transpose_A=trans_a, transpose_B=trans_b, clear_accum=restart)
            T.copy(c_frag, c)

    return gemm


@bounded
@given(gemm_programs(), st.integers(0, 1000))
def test_gemm_with_transposes(program, seed):
    dtype, m, n, k, trans_a, trans_b, _, restart = program
    a = random_tensor((2, k, m) if trans_a else (2, m, k), dtype, seed)
    b = random_tensor((2, n, k) if trans_b else (2, k, n), dtype, seed + 1)
    c = torch.empty(m, n, dtype=torch_dtype(GEMM_DTYPES[dtype]))
    interpret(gemm_kernel(*program), a, b, c, checks='all')
    left, right = a.double().mT if trans_a else a.double(), b.double().mT if trans_b else b.double()
    products = left @ right
    expected = products[1] if restart else products.sum(0)
    assert torch.equal(c.double(), expected)


ATOMICS = {'add': (T.atomic_add, np.add.at), 'max': (T.atomic_max, np.maximum.at), 'min': (T.atomic_min, np.minimum.at)}


def atomic_kernel(name, num_ids, num_bins, level, block=32):
    """`bins[ids[i]] = op(bins[ids[i]], x[i])` from many blocks, by tile loop or thread by thread."""
    atomic_op = ATOMICS[name][0]

    @T.prim_func
    def atomic(
        x: T.Tensor((num_ids,), 'int32'), ids: T.Tensor((num_ids,), 'int32'), bins: T.Tensor((num_bins,), 'int32')
    ):
        with T.Kernel(T.ceildiv(num_ids, block), threads=32) as pid:
            if level == 'tile':
                for i in T.Parallel(block):
                    if pid * block + i < num_ids:
                        atomic_op(bins[ids[pid * block + i]], x[pid * block + i])
            else:
                i = pid * block + T.get_thread_binding()
                if i < num_ids:
                    atomic_op(bins[ids[i]], x[i])

    return atomic


@bounded
@given(st.sampled_from(sorted(ATOMICS)), st.integers(1, 200), st.integers(1, 20), st.sampled_from(['tile', 'thread']))
def test_atomics_from_many_blocks(name, num_ids, num_bins, level):
    rng = np.random.default_rng(num_ids * 31 + num_bins)
    x, ids = (rng.integers(0, high, num_ids, dtype=np.int32) for high in (1000, num_bins))
    bins = rng.integers(0, 500, num_bins, dtype=np.int32)
    expected = bins.copy()
    ATOMICS[name][1](expected, ids, x)
    interpret(atomic_kernel(name, num_ids, num_bins, level), *map(torch.from_numpy, (x, ids, bins)), checks='all')
    assert np.array_equal(bins, expected)


def tickets_kernel(num_ids, num_bins, block=32):
    """Every id draws a ticket from the counter of its bin."""

    @T.prim_func
    def tickets(
        ids: T.Tensor((num_ids,), 'int32'),
        counters: T.Tensor((num_bins,), 'int32'),
        drawn: T.Tensor((num_ids,), 'int32'),
    ):
        with T.Kernel(T.ceildiv(num_ids, block), threads=block) as pid:
            i = pid * block + T.get_thread_binding()
            if i < num_ids:
                drawn[i] = T.atomic_add(counters[ids[i]], 1, return_prev=True)

    return tickets


@bounded
@given(st.integers(1, 150), st.integers(1, 10))
def test_atomics_return_what_was_there_before(num_ids, num_bins):
    rng = np.random.default_rng(num_ids * 17 + num_bins)
    ids = rng.integers(0, num_bins, num_ids, dtype=np.int32)
    counters = np.arange(num_bins, dtype=np.int32) * 100
    drawn = np.full(num_ids, -1, dtype=np.int32)
    interpret(tickets_kernel(num_ids, num_bins), *map(torch.from_numpy, (ids, counters, drawn)), checks='all')
    for bin_idx in range(num_bins):
        tickets = np.sort(drawn[ids == bin_idx])
        assert np.array_equal(tickets, bin_idx * 100 + np.arange(tickets.size))
        assert counters[bin_idx] == bin_idx * 100 + tickets.size


SHUFFLES = {
    'xor': (T.shfl_xor, lambda lane, arg, width: lane ^ arg),
    'up': (T.shfl_up, lambda lane, arg, width: np.where(lane % width >= arg, lane - arg, lane)),
    'down': (T.shfl_down, lambda lane, arg, width: np.where(lane % width + arg < width, lane + arg, lane)),
    'sync': (T.shfl_sync, lambda lane, arg, width: lane // width * width + arg % width),
}


def shuffle_kernel(steps, num_threads):
    """`value = 3 * value + shuffle(value)` for every step."""

    @T.prim_func
    def shuffle(x: T.Tensor((num_threads,), 'int32'), y: T.Tensor((num_threads,), 'int32')):
        with T.Kernel(1, threads=num_threads):
            thread = T.get_thread_binding()
            value = T.alloc_var('int32')
            value = x[thread]
            for name, arg, width in steps:
                value = value * 3 + SHUFFLES[name][0](value, arg, width)
            y[thread] = value

    return shuffle


@st.composite
def shuffle_steps(draw):
    """Some shuffles within groups of 8, 16 or 32 lanes; a butterfly stays inside its group."""
    width = draw(st.sampled_from([8, 16, 32]))
    return draw(st.sampled_from(sorted(SHUFFLES))), draw(st.integers(0, width - 1)), width


@bounded
@given(st.lists(shuffle_steps(), min_size=1, max_size=4), st.sampled_from([32, 64]))
def test_shuffles_within_groups_of_lanes(steps, num_threads):
    x = np.arange(num_threads, dtype=np.int32) ** 2
    y = np.empty_like(x)
    interpret(shuffle_kernel(steps, num_threads), torch.from_numpy(x), torch.from_numpy(y), checks='all')
    lanes = np.arange(num_threads)
    for name, arg, width in steps:
        x = x * 3 + x[SHUFFLES[name][1](lanes, arg, width)]
    assert np.array_equal(y, x)


def collatz_kernel(num_starts):
    """Steps each start needs to reach one: a while loop whose length differs from thread to thread."""

    @T.prim_func
    def collatz(starts: T.Tensor((num_starts,), 'int32'), steps: T.Tensor((num_starts,), 'int32')):
        with T.Kernel(T.ceildiv(num_starts, 32), threads=32) as pid:
            i = pid * 32 + T.get_thread_binding()
            if i < num_starts:
                value = T.alloc_var('int32', init=starts[i])
                count = T.alloc_var('int32', init=0)
                while value > 1:
                    value = T.if_then_else(value % 2 == 0, value // 2, 3 * value + 1)
                    count += 1
                steps[i] = count

    return collatz


@bounded
@given(st.lists(st.integers(1, 300), min_size=1, max_size=70))
def test_while_loops_end_when_each_thread_ends(starts):
    def length(value: int) -> int:
        return 0 if value == 1 else 1 + length(value // 2 if value % 2 == 0 else 3 * value + 1)

    steps = torch.empty(len(starts), dtype=torch.int32)
    interpret(collatz_kernel(len(starts)), torch.tensor(starts, dtype=torch.int32), steps, checks='all')
    assert steps.tolist() == [length(start) for start in starts]


# Whole programs: random statements on three tiles and one vector of row values, as TileLang macros and as NumPy.
ROWS, COLS = 8, 16


@T.macro
def combine_tir(tiles, vector, dst, a, b, name):
    for i, j in T.Parallel(ROWS, COLS):
        tiles[dst][i, j] = (RING | ORDER_TIR)[name](tiles[a][i, j], tiles[b][i, j])


@T.macro
def shift_tir(tiles, vector, dst, a, down, right):
    for i, j in T.Parallel(ROWS, COLS):
        tiles[dst][i, j] = tiles[(dst + a) % 3][(i + down) % ROWS, (j + right) % COLS]


@T.macro
def raise_tir(tiles, vector, dst, a, bound, step):
    for i, j in T.Parallel(ROWS, COLS):
        if i + j < bound:
            tiles[dst][i, j] = tiles[a][i, j] + step
        else:
            tiles[dst][i, j] -= step


@T.macro
def reduce_tir(tiles, vector, a, name):
    T.reduce(tiles[a], vector, name, 1, True)


@T.macro
def spread_tir(tiles, vector, dst, a):
    for i, j in T.Parallel(ROWS, COLS):
        tiles[dst][i, j] = tiles[a][i, j] + vector[i]


@T.macro
def cumsum_tir(tiles, vector, a, dim, reverse):
    T.cumsum(tiles[a], dim=dim, reverse=reverse)


@T.macro
def copy_tir(tiles, vector, dst, a):
    T.copy(tiles[a], tiles[dst])


def combine_numpy(tiles, vector, dst, a, b, name):
    tiles[dst][:] = (RING | {'max': np.maximum, 'min': np.minimum})[name](tiles[a], tiles[b])


def shift_numpy(tiles, vector, dst, a, down, right):
    tiles[dst][:] = np.roll(tiles[(dst + a) % 3], (-down, -right), axis=(0, 1))


def raise_numpy(tiles, vector, dst, a, bound, step):
    below = np.add.outer(np.arange(ROWS), np.arange(COLS)) < bound
    tiles[dst][:] = np.where(below, tiles[a] + step, tiles[dst] - step)


def reduce_numpy(tiles, vector, a, name):
    vector[:] = {'sum': np.add, 'max': np.maximum, 'min': np.minimum}[name].reduce(tiles[a], axis=1, dtype=np.int32)


def spread_numpy(tiles, vector, dst, a):
    tiles[dst][:] = tiles[a] + vector[:, None]


def cumsum_numpy(tiles, vector, a, dim, reverse):
    along = slice(None, None, -1 if reverse else 1)
    view = tiles[a][along] if dim == 0 else tiles[a][:, along]
    view[:] = view.cumsum(dim, dtype=np.int32)


def copy_numpy(tiles, vector, dst, a):
    tiles[dst][:] = tiles[a]


tile = st.integers(0, 2)
STATEMENTS = {
    'combine': (combine_tir, combine_numpy, (tile, tile, tile, st.sampled_from(['add', 'sub', 'mul', 'max', 'min']))),
    'shift': (shift_tir, shift_numpy, (tile, st.integers(1, 2), st.integers(0, 9), st.integers(0, 20))),
    'raise': (raise_tir, raise_numpy, (tile, tile, st.integers(0, 24), st.integers(-3, 3))),
    'reduce': (reduce_tir, reduce_numpy, (tile, st.sampled_from(['sum', 'max', 'min']))),
    'spread': (spread_tir, spread_numpy, (tile, tile)),
    'cumsum': (cumsum_tir, cumsum_numpy, (tile, st.integers(0, 1), st.booleans())),
    'copy': (copy_tir, copy_numpy, (tile, tile)),
}
statements = st.sampled_from(sorted(STATEMENTS)).flatmap(lambda kind: st.tuples(st.just(kind), *STATEMENTS[kind][2]))


def program_kernel(body, repeats, scopes):
    """Run the statements `repeats + pid` times on the tiles of block `pid`."""
    allocs = [{'fragment': T.alloc_fragment, 'shared': T.alloc_shared}[scope] for scope in scopes]

    @T.prim_func
    def program(x: T.Tensor((2, 3, ROWS, COLS), 'int32'), y: T.Tensor((2, 3, ROWS, COLS), 'int32')):
        with T.Kernel(2, threads=32) as pid:
            tiles = [alloc((ROWS, COLS), 'int32') for alloc in allocs]
            vector = T.alloc_fragment((ROWS,), 'int32')
            T.clear(vector)
            for k in (0, 1, 2):
                T.copy(x[pid, k, 0:ROWS, 0:COLS], tiles[k])
            for _ in T.serial(repeats + pid):
                for statement in body:
                    STATEMENTS[statement[0]][0](tiles, vector, *statement[1:])
            for k in (0, 1, 2):
                T.copy(tiles[k], y[pid, k, 0:ROWS, 0:COLS])

    return program


@bounded
@given(
    st.lists(statements.filter(lambda s: not (s[0] == 'copy' and s[1] == s[2])), min_size=1, max_size=6),
    st.integers(1, 3),
    st.tuples(*[st.sampled_from(['fragment', 'shared'])] * 3),
)
def test_sequences_of_tile_statements(body, repeats, scopes):
    x = random_tensor((2, 3, ROWS, COLS), 'int32', seed=len(body))
    y = torch.empty_like(x)
    interpret(program_kernel(body, repeats, scopes), x, y, checks='all')
    expected = x.clone().numpy()
    for pid, tiles in enumerate(expected):
        vector = np.zeros(ROWS, dtype=np.int32)
        for _ in range(repeats + pid):
            for kind, *args in body:
                STATEMENTS[kind][1](tiles, vector, *args)
    assert np.array_equal(y.numpy(), expected)
