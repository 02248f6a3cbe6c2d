"""Names of `tile_kernels.engram` at their path in TileKernels."""

from tile_kernels.engram import engram_gate_bwd, engram_gate_fwd
