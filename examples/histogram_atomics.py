"""Histogram: `counts[e] += number of i with ids[i] == e`.

Every block counts its slice in shared memory, where atomics are cheap, and adds the result to global memory once per
bin. Integer addition does not depend on the order, so the result is exact whichever thread comes first. Ids outside
`[0, num_bins)` are not counted.
"""

import tilelang.language as T
import torch
from _run import Example, main


def histogram_kernel(num_bins: int, slice_size: int = 1024, num_threads: int = 128):
    """Build the kernel for one number of bins."""
    num_ids = T.dynamic('num_ids')

    @T.prim_func
    def histogram(ids: T.Tensor((num_ids,), 'int32'), counts: T.Tensor((num_bins,), 'int32')):
        with T.Kernel(T.ceildiv(num_ids, slice_size), threads=num_threads) as pid:
            thread = T.get_thread_binding()
            counts_shared = T.alloc_shared((num_bins,), 'int32')
            T.clear(counts_shared)
            T.sync_threads()
            for step in T.serial(slice_size // num_threads):
                i = pid * slice_size + step * num_threads + thread
                if i < num_ids:
                    bin_idx = ids[i]
                    if bin_idx >= 0 and bin_idx < num_bins:
                        T.atomic_add(counts_shared[bin_idx], 1)
            T.sync_threads()
            for step in T.serial(T.ceildiv(num_bins, num_threads)):
                if step * num_threads + thread < num_bins:
                    T.atomic_add(counts[step * num_threads + thread], counts_shared[step * num_threads + thread])

    return histogram


def example(num_ids: int = 5000, num_bins: int = 200) -> Example:
    """Ids with a few strays on both sides; counting continues from what `counts` holds."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-3, num_bins + 3, (num_ids,), generator=generator, dtype=torch.int32)
    counts = torch.randint(0, 10, (num_bins,), generator=generator, dtype=torch.int32)
    valid = ids[(ids >= 0) & (ids < num_bins)].long()
    expected = counts + torch.bincount(valid, minlength=num_bins).int()
    return Example(histogram_kernel(num_bins), (ids,), (counts,), (expected,))


if __name__ == '__main__':
    main('histogram_atomics', example())
