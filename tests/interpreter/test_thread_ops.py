"""Thread-level operators: shuffles, votes, matches, warp reductions, atomics on elements."""

import pytest
import tilelang.language as T
import torch

from tile_kernels.interpreter import interpret

from .kernels import per_thread

THREADS = torch.arange(64)
LANES = THREADS % 32


@pytest.fixture
def values():
    return torch.randint(-1000, 1000, (3, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(0))


def test_numbers_of_threads_lanes_and_warps(values):
    assert torch.equal(per_thread(lambda t, v: T.get_lane_idx(), values)[0], LANES.int())
    assert torch.equal(per_thread(lambda t, v: T.get_warp_idx(), values)[0], (THREADS // 32).int())
    wide = torch.zeros(1, 256, dtype=torch.int32)
    assert torch.equal(per_thread(lambda t, v: T.get_warp_group_idx(), wide)[0], (torch.arange(256) // 128).int())


@pytest.mark.parametrize('distance', [1, 2, 7, 16])
def test_shuffles_within_a_warp(values, distance):
    warps = values.view(3, 2, 32)
    lane = torch.arange(32)
    assert torch.equal(
        per_thread(lambda t, v: T.shfl_xor(v, distance), values), warps[..., lane ^ distance].view(3, 64)
    )
    up = torch.where(lane >= distance, lane - distance, lane)
    assert torch.equal(per_thread(lambda t, v: T.shfl_up(v, distance), values), warps[..., up].view(3, 64))
    down = torch.where(lane + distance < 32, lane + distance, lane)
    assert torch.equal(per_thread(lambda t, v: T.shfl_down(v, distance), values), warps[..., down].view(3, 64))
    one = torch.full((32,), distance)
    assert torch.equal(per_thread(lambda t, v: T.shfl_sync(v, distance), values), warps[..., one].view(3, 64))


def test_shuffle_from_a_lane_each_thread_chooses(values):
    source = (LANES * 5 + 3) % 32
    got = per_thread(lambda t, v: T.shfl_sync(v, (t * 5 + 3) % 32), values)
    assert torch.equal(got, values.view(3, 2, 32).gather(2, source.view(2, 32).expand(3, 2, 32)).view(3, 64))


def test_shuffles_within_segments(values):
    segments = values.view(3, 8, 8)
    lane = torch.arange(8)
    up = torch.where(lane >= 3, lane - 3, lane)
    assert torch.equal(per_thread(lambda t, v: T.shfl_up(v, 3, width=8), values), segments[..., up].view(3, 64))
    first = per_thread(lambda t, v: T.shfl_sync(v, 0, width=8), values)
    assert torch.equal(first, segments[..., :1].expand(3, 8, 8).reshape(3, 64))


@pytest.mark.parametrize('name', ['sum', 'max', 'min', 'bitand', 'bitor'])
def test_warp_reductions(values, name):
    got = per_thread(lambda t, v: getattr(T, f'warp_reduce_{name}')(v), values)
    warps = values.view(6, 32)
    if name.startswith('bit'):
        want = warps[:, 0].clone()
        for column in warps.T[1:]:
            want = want & column if name == 'bitand' else want | column
    else:
        want = {'sum': warps.sum(1), 'max': warps.amax(1), 'min': warps.amin(1)}[name].int()
    assert torch.equal(got, want.view(3, 2, 1).expand(3, 2, 32).reshape(3, 64))


def test_float_warp_sums_round_like_the_butterfly():
    values = torch.randn(1, 32)
    want = values[0].clone()
    for distance in (16, 8, 4, 2, 1):
        want = want + want[torch.arange(32) ^ distance]
    assert torch.equal(per_thread(lambda t, v: T.warp_reduce_sum(v), values)[0], want)


def test_votes(values):
    positive = (values > 0).view(6, 32)
    bits = (positive.long() << torch.arange(32)).sum(1).view(3, 2, 1).expand(3, 2, 32).reshape(3, 64)
    assert torch.equal(per_thread(lambda t, v: T.cast(T.ballot(v > 0), 'int64'), values, out=torch.int64), bits)
    some = positive.any(1).int().view(3, 2, 1).expand(3, 2, 32).reshape(3, 64)
    assert torch.equal(per_thread(lambda t, v: T.any_sync(v > 0), values), some)
    every = (values > -900).view(6, 32).all(1).int().view(3, 2, 1).expand(3, 2, 32).reshape(3, 64)
    assert torch.equal(per_thread(lambda t, v: T.all_sync(v > -900), values), every)


def test_ballot_counts_active_lanes_only():
    @T.prim_func
    def active(y: T.Tensor((64,), 'int64')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            y[thread] = 0
            if thread % 4 == 0:
                y[thread] = T.cast(T.activemask(), 'int64')

    y = torch.empty(64, dtype=torch.int64)
    interpret(active, y)
    assert y[::4].tolist() == [0x11111111] * 16 and y[1].item() == 0


def test_match_any_and_all():
    values = torch.tensor([[lane % 3 for lane in range(32)] + [5] * 32], dtype=torch.int32)
    got = per_thread(lambda t, v: T.cast(T.match_any_sync(v), 'int64'), values, out=torch.int64)[0]
    groups = [sum(1 << lane for lane in range(32) if lane % 3 == kind) for kind in range(3)]
    assert got[:32].tolist() == [groups[lane % 3] for lane in range(32)]
    assert got[32:].tolist() == [0xFFFFFFFF] * 32
    everyone = per_thread(lambda t, v: T.cast(T.match_all_sync(v), 'int64'), values, out=torch.int64)[0]
    assert everyone.tolist() == [0] * 32 + [0xFFFFFFFF] * 32


def test_block_votes(values):
    count = (values > 0).sum(1, keepdim=True).int().expand(3, 64)
    assert torch.equal(per_thread(lambda t, v: T.syncthreads_count(v > 0), values), count)
    assert (per_thread(lambda t, v: T.syncthreads_or(v > 5000), values) == 0).all()
    assert (per_thread(lambda t, v: T.syncthreads_and(v > -5000), values) != 0).all()


def test_one_thread_is_elected():
    got = per_thread(lambda t, v: T.cast(T.shuffle_elect(64), 'int32'), torch.zeros(2, 128, dtype=torch.int32))
    assert got.nonzero().tolist() == [[0, 0], [0, 64], [1, 0], [1, 64]]


def test_find_set_bits():
    masks = torch.tensor([[0, 1, 0b1000, -(2**31), 0b101100]], dtype=torch.int32)
    assert per_thread(lambda t, v: T.__ffs(v), masks)[0].tolist() == [0, 1, 4, 32, 3]
    nth = per_thread(lambda t, v: T.cast(T.__fns(T.cast(v, 'uint32'), 0, 2), 'int64'), masks, out=torch.int64)
    assert nth[0].tolist() == [2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1, 3]


@pytest.mark.parametrize('scope', ['global', 'shared'])
def test_histogram_with_atomics(scope):
    @T.prim_func
    def histogram(x: T.Tensor((4, 256), 'int32'), y: T.Tensor((8,), 'int32')):
        with T.Kernel(4, threads=64) as pid:
            thread = T.get_thread_binding()
            counts = T.alloc_shared((8,), 'int32')
            T.clear(counts)
            for i in T.serial(4):
                if scope == 'shared':
                    T.atomic_add(counts[x[pid, i * 64 + thread]], 1)
                else:
                    T.atomic_add(y[x[pid, i * 64 + thread]], 1)
            if scope == 'shared':
                T.sync_threads()
                if thread < 8:
                    T.atomic_add(y[thread], counts[thread])

    x = torch.randint(0, 8, (4, 256), dtype=torch.int32)
    y = torch.zeros(8, dtype=torch.int32)
    interpret(histogram, x, y, checks='all')
    assert torch.equal(y, torch.bincount(x.flatten(), minlength=8).int())


def test_atomics_give_the_old_value_once_each():
    @T.prim_func
    def tickets(y: T.Tensor((2, 64), 'int32'), counter: T.Tensor((1,), 'int32')):
        with T.Kernel(2, threads=64) as pid:
            thread = T.get_thread_binding()
            y[pid, thread] = -1
            if thread % 2 == 0:
                y[pid, thread] = T.atomic_add(counter[0], 1, return_prev=True)

    y, counter = torch.empty(2, 64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    interpret(tickets, y, counter)
    assert counter.item() == 64 and sorted(y[:, ::2].flatten().tolist()) == list(range(64)) and (y[:, 1::2] == -1).all()


def test_atomic_max_min_or_load_and_store():
    @T.prim_func
    def extremes(x: T.Tensor((64,), 'int32'), y: T.Tensor((5,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            T.atomic_max(y[0], x[thread])
            T.atomic_min(y[1], x[thread])
            T.atomic_or(y[2], x[thread])
            if thread == 3:
                T.atomic_store(y[3], x[thread])
            T.sync_threads()
            if thread == 0:
                y[4] = T.atomic_load(y[3])

    x = torch.randint(0, 1 << 20, (64,), dtype=torch.int32)
    y = torch.tensor([0, 1 << 30, 0, 0, 0], dtype=torch.int32)
    interpret(extremes, x, y)
    union = 0
    for value in x.tolist():
        union |= value
    assert y.tolist() == [x.max().item(), x.min().item(), union, x[3].item(), x[3].item()]


def test_atomics_inside_parallel_count_every_iteration():
    @T.prim_func
    def count(x: T.Tensor((100,), 'float32'), y: T.Tensor((1,), 'float32')):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(100):
                T.atomic_add(y[0], x[i])

    x, y = torch.randint(0, 9, (100,)).float(), torch.zeros(1)
    interpret(count, x, y)
    assert y.item() == x.sum()


def test_wide_atomics():
    @T.prim_func
    def pairs(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(2, threads=16):
            thread = T.get_thread_binding()
            T.atomic_addx4(y[thread * 4], x[thread * 4])

    x, y = torch.randint(0, 9, (64,)).float(), torch.zeros(64)
    interpret(pairs, x, y)
    assert torch.equal(y, 2 * x)


def test_block_with_threads_that_do_not_fill_a_warp():
    values = torch.randint(-9, 9, (2, 40), dtype=torch.int32)
    got = per_thread(lambda t, v: T.shfl_down(v, 1), values)
    assert torch.equal(got[:, :31], values[:, 1:32]) and torch.equal(got[:, 32:39], values[:, 33:40])


@pytest.mark.parametrize('words', [False, True])
def test_product_of_a_warp(words):
    """The operands as the PTX manual places them in registers, two of the first to a word if the program says so."""

    @T.prim_func
    def multiply(
        a: T.Tensor((2, 16, 16), 'bfloat16'), b: T.Tensor((2, 16, 8), 'bfloat16'), c: T.Tensor((2, 16, 8), 'float32')
    ):
        with T.Kernel(1, threads=64) as _:
            a_local = T.alloc_local((8,), 'bfloat16')
            word_local = T.alloc_local((4,), 'uint32')
            b_local = T.alloc_local((4,), 'bfloat16')
            c_local = T.alloc_local((4,), 'float32')
            warp, lane = T.get_thread_binding() // 32, T.get_thread_binding() % 32
            for e in T.unroll(8):
                a_local[e] = a[warp, lane // 4 + e // 2 % 2 * 8, lane % 4 * 2 + e % 2 + e // 4 * 8]
            for e in T.unroll(4):
                low, high = (T.cast(T.reinterpret(a_local[e * 2 + half], 'uint16'), 'uint32') for half in range(2))
                word_local[e] = low | (high << 16)
            for e in T.unroll(4):
                b_local[e] = b[warp, lane % 4 * 2 + e % 2 + e // 2 * 8, lane // 4]
                c_local[e] = 1.0
            for _ in T.serial(2):
                T.ptx_mma(
                    'float32',
                    'm16n8k16',
                    'row',
                    'col',
                    'bf16',
                    'bf16',
                    'fp32',
                    T.access_ptr(word_local[0], 'r', 4) if words else T.access_ptr(a_local[0], 'r', 8),
                    0,
                    T.access_ptr(b_local[0], 'r', 4),
                    0,
                    T.access_ptr(c_local[0], 'rw', 4),
                    0,
                    T.bool(False),
                )
            for e in T.unroll(4):
                c[warp, lane // 4 + e // 2 * 8, lane % 4 * 2 + e % 2] = c_local[e]

    a, b = (torch.randint(-9, 9, (2, 16, n)).bfloat16() for n in (16, 8))
    c = torch.empty(2, 16, 8)
    interpret(multiply, a, b, c, checks='all')
    assert torch.equal(c, 1 + 2 * (a.float() @ b.float()))


@pytest.mark.parametrize('checks', ['none', 'memory', 'all'])
def test_fragment_used_by_element_is_a_register_of_each_thread(checks):
    @T.prim_func
    def own(x: T.Tensor((2, 64), 'float32'), y: T.Tensor((2, 64), 'float32'), z: T.Tensor((2, 64), 'float32')):
        with T.Kernel(2, threads=64) as pid:
            thread = T.get_thread_binding()
            value = T.alloc_fragment((1,), 'float32')
            table = T.alloc_fragment((4,), 'float32')
            value[0] = x[pid, thread]
            T.fill(table, 1.0)
            table[thread % 4] = value[0]
            if thread < 10:
                value[0] = 0.0
            y[pid, thread] = value[0] * 2
            z[pid, thread] = table[0] + table[1] + table[2] + table[3]

    x, y, z = torch.randn(2, 64), torch.empty(2, 64), torch.empty(2, 64)
    interpret(own, x, y, z, checks=checks)
    assert torch.equal(y, torch.where(torch.arange(64) < 10, 0.0, 2 * x))
    assert torch.allclose(z, x + 3)
