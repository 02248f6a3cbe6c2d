"""Matrix products of groups of rows, each with its own matrix."""

from tile_kernels.gemm.grouped_gemm import grouped_gemm, grouped_gemm_bwd

__all__ = ['grouped_gemm', 'grouped_gemm_bwd']
