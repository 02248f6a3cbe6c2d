"""Engram: conditional memory, looked up by hashes of the last tokens and gated into the residual streams."""

from tile_kernels.engram.gate import engram_gate_fwd
from tile_kernels.engram.gate_bwd import engram_gate_bwd
from tile_kernels.engram.sum_partials import grad_w_reduce

__all__ = [
    'engram_gate_bwd',
    'engram_gate_fwd',
    'grad_w_reduce',
]
