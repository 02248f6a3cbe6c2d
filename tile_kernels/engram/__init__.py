"""Engram: conditional memory; hashes of recent tokens select embeddings, and gates add them to the streams."""

from tile_kernels.engram.engram_gate_bwd import engram_gate_bwd
from tile_kernels.engram.engram_gate_forward import (
    EngramGatingFunction,
    engram_gate_backward,
    engram_gate_forward,
    engram_weight_grad,
)
from tile_kernels.engram.fused_weight import fused_weight
from tile_kernels.engram.gate import engram_gate_fwd
from tile_kernels.engram.grad_w_reduce import grad_w_reduce
from tile_kernels.engram.hash import engram_hash
from tile_kernels.engram.short_conv import short_conv
from tile_kernels.engram.sinkhorn_finalize import engram_sinkhorn_finalize
from tile_kernels.engram.sinkhorn_momentum_update import engram_sinkhorn_momentum_update
from tile_kernels.engram.sinkhorn_step import engram_sinkhorn_step
from tile_kernels.engram.sinkhorn_step_reduce import engram_sinkhorn_step_reduce

__all__ = [
    'EngramGatingFunction',
    'engram_gate_backward',
    'engram_gate_bwd',
    'engram_gate_forward',
    'engram_gate_fwd',
    'engram_hash',
    'engram_sinkhorn_finalize',
    'engram_sinkhorn_momentum_update',
    'engram_sinkhorn_step',
    'engram_sinkhorn_step_reduce',
    'engram_weight_grad',
    'fused_weight',
    'grad_w_reduce',
    'short_conv',
]


def __dir__() -> list[str]:
    return __all__
