"""Explicit wgmma instructions with descriptors of shared memory, compared with PyTorch."""

import pytest
import tilelang.language as T
import torch
from tilelang.cuda.language.intrinsics import WGMMATensorCoreIntrinEmitter
from tilelang.layout import (
    make_full_bank_swizzled_layout,
    make_half_bank_swizzled_layout,
    make_linear_layout,
    make_quarter_bank_swizzled_layout,
)

from tile_kernels.interpreter import (
    AsyncReadBeforeWait,
    BarrierDivergence,
    OutOfBounds,
    UnsupportedConstruct,
    interpret,
    unknown_constructs,
)

LAYOUTS = {
    128: make_full_bank_swizzled_layout,
    64: make_half_bank_swizzled_layout,
    32: make_quarter_bank_swizzled_layout,
    16: make_linear_layout,
}


def layout_for(width, size):
    """The widest layout whose rows divide a row of a matrix."""
    return LAYOUTS[next(row for row in LAYOUTS if width * size % row == 0)]


def gemm(m, n, k, dtype='float16', swapped=(False, False), wait=True, threads=None, annotated=True, beyond=0):
    """One tile; `swapped` operands have K as their first dimension (A) or last dimension (B)."""
    groups = m // 64
    threads = threads or 128 * groups
    emitter = WGMMATensorCoreIntrinEmitter(
        a_dtype=dtype,
        b_dtype=dtype,
        accum_dtype='float32',
        a_transposed=swapped[0],
        b_transposed=swapped[1],
        block_row_warps=4 * groups,
        block_col_warps=1,
        warp_row_tiles=m // (4 * groups),
        warp_col_tiles=n,
        chunk=k,
    )
    a_shape, b_shape = ((k, m) if swapped[0] else (m, k)), ((n, k) if swapped[1] else (k, n))
    a_layout, b_layout = (layout_for(shape[1], T.dtype(dtype).bits // 8) for shape in (a_shape, b_shape))

    @T.prim_func
    def main(a: T.Tensor(a_shape, dtype), b: T.Tensor(b_shape, dtype), c: T.Tensor((m, n), 'float32')):
        with T.Kernel(1, threads=threads):
            a_shared = T.alloc_shared(a_shape, dtype)
            b_shared = T.alloc_shared(b_shape, dtype)
            c_frag = T.alloc_fragment((m, n), 'float32')
            emitter._assign_a_shared_layout(a_layout(a_shared))
            emitter._assign_b_shared_layout(b_layout(b_shared))
            if annotated:
                T.annotate_layout(
                    {
                        a_shared: a_layout(a_shared),
                        b_shared: b_layout(b_shared),
                        c_frag: emitter.make_mma_store_layout(c_frag),
                    }
                )
            T.copy(a, a_shared)
            T.copy(b, b_shared)
            a_params = emitter.compute_wgmma_a_desc_params(a_shared)
            b_params = emitter.compute_wgmma_b_desc_params(b_shared)
            a_desc = T.alloc_wgmma_desc()
            b_desc = T.alloc_wgmma_desc()
            emitter.init_wgmma_a_desc(a_desc, a_shared, a_params)
            emitter.init_wgmma_b_desc(b_desc, b_shared, b_params)
            if beyond:
                T.increase_descriptor_offset(a_desc, beyond)
            emitter.wgmma_fence_c(c_frag)
            emitter.wgmma_arrive()
            for j in T.unroll(emitter.wgmma_num_inst_n):
                for i in T.unroll(emitter.wgmma_num_inst_m):
                    for ki in T.unroll(emitter.wgmma_num_k_atoms):
                        emitter.wgmma_ss_atom(a_desc, b_desc, c_frag, i, j, ki, a_params, b_params, T.bool(True))
            emitter.wgmma_commit()
            if wait:
                emitter.wgmma_wait(0)
            T.copy(c_frag, c)

    return main, a_shape, b_shape


@pytest.mark.parametrize(
    ('shape', 'dtype', 'swapped'),
    [
        ((64, 64, 32), 'float16', (False, False)),
        ((64, 64, 64), 'float16', (False, True)),
        ((64, 128, 128), 'bfloat16', (True, False)),
        ((128, 64, 64), 'float16', (False, False)),
        ((64, 32, 64), 'float8_e4m3fn', (False, True)),
    ],
)
def test_products_of_descriptors(shape, dtype, swapped):
    kernel, a_shape, b_shape = gemm(*shape, dtype, swapped)
    assert unknown_constructs(kernel) == []
    a, b = (torch.randn(size).to(getattr(torch, dtype)) for size in (a_shape, b_shape))
    c = torch.empty(shape[:2])
    interpret(kernel, a, b, c, checks='all')
    left, right = a.float().T if swapped[0] else a.float(), b.float().T if swapped[1] else b.float()
    torch.testing.assert_close(c, left @ right, rtol=1e-5, atol=1e-4)


def run(**how):
    kernel, a_shape, b_shape = gemm(64, 64, 64, **how)
    interpret(kernel, torch.randn(a_shape).half(), torch.randn(b_shape).half(), torch.empty(64, 64))


def test_a_product_is_read_before_its_wait():
    with pytest.raises(AsyncReadBeforeWait, match='c_frag is read at index'):
        run(wait=False)


def test_a_descriptor_beyond_its_buffer():
    with pytest.raises(OutOfBounds, match='a wgmma descriptor of a_shared reaches beyond its end'):
        run(beyond=1024)


def test_a_warpgroup_has_128_threads():
    with pytest.raises(BarrierDivergence, match='ptx_wgmma_ss runs on 64 threads'):
        run(threads=64)


def test_without_an_annotated_layout_a_descriptor_means_nothing():
    with pytest.raises(UnsupportedConstruct, match='a_shared, which has no annotated layout'):
        run(annotated=False)
