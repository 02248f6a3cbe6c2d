"""What the Engram ops mean, in plain PyTorch."""

from tile_kernels.reference.engram.gate import (
    engram_gate_ref,
    fused_weight,
    gate,
    gate_,
    gate_bwd,
    gate_bwd_partial,
    gate_inference,
    grad_w_reduce,
    packed_gate_bwd_partial,
)
from tile_kernels.reference.engram.hash import engram_hash, engram_hash_ref, make_offsets
from tile_kernels.reference.engram.projection import engram_gate_backward, engram_gate_forward, engram_weight_grad
from tile_kernels.reference.engram.short_conv import short_conv, short_conv_bwd
from tile_kernels.reference.engram.sinkhorn import (
    engram_sinkhorn_finalize,
    engram_sinkhorn_finalize_ref,
    engram_sinkhorn_momentum_update,
    engram_sinkhorn_momentum_update_ref,
    engram_sinkhorn_step,
    engram_sinkhorn_step_reduce,
    engram_sinkhorn_step_ref,
    sinkhorn_finalize,
    sinkhorn_finalize_,
)

__all__ = [
    'engram_gate_backward',
    'engram_gate_forward',
    'engram_gate_ref',
    'engram_hash',
    'engram_hash_ref',
    'engram_sinkhorn_finalize',
    'engram_sinkhorn_finalize_ref',
    'engram_sinkhorn_momentum_update',
    'engram_sinkhorn_momentum_update_ref',
    'engram_sinkhorn_step',
    'engram_sinkhorn_step_reduce',
    'engram_sinkhorn_step_ref',
    'engram_weight_grad',
    'fused_weight',
    'gate',
    'gate_',
    'gate_bwd',
    'gate_bwd_partial',
    'gate_inference',
    'grad_w_reduce',
    'make_offsets',
    'packed_gate_bwd_partial',
    'short_conv',
    'short_conv_bwd',
    'sinkhorn_finalize',
    'sinkhorn_finalize_',
]
