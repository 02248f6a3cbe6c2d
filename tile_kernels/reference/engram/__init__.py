"""What the Engram ops mean, in plain PyTorch."""

from tile_kernels.reference.engram.engram_gate_forward import (
    engram_gate_backward,
    engram_gate_forward,
    engram_weight_grad,
)
from tile_kernels.reference.engram.fused_weight import fused_weight
from tile_kernels.reference.engram.gate import engram_gate_ref, gate, gate_
from tile_kernels.reference.engram.gate_bwd import gate_bwd
from tile_kernels.reference.engram.gate_bwd_partial import gate_bwd_partial
from tile_kernels.reference.engram.gate_inference import gate_inference
from tile_kernels.reference.engram.grad_w_reduce import grad_w_reduce
from tile_kernels.reference.engram.hash import engram_hash, engram_hash_ref, make_offsets
from tile_kernels.reference.engram.packed_gate_bwd_partial import packed_gate_bwd_partial
from tile_kernels.reference.engram.short_conv import short_conv, short_conv_bwd
from tile_kernels.reference.engram.sinkhorn_finalize import (
    engram_sinkhorn_finalize,
    engram_sinkhorn_finalize_ref,
    sinkhorn_finalize,
    sinkhorn_finalize_,
)
from tile_kernels.reference.engram.sinkhorn_momentum_update import (
    engram_sinkhorn_momentum_update,
    engram_sinkhorn_momentum_update_ref,
)
from tile_kernels.reference.engram.sinkhorn_step import engram_sinkhorn_step, engram_sinkhorn_step_ref
from tile_kernels.reference.engram.sinkhorn_step_reduce import engram_sinkhorn_step_reduce

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
