"""Names of `tile_kernels.modeling.engram` at their path in TileKernels."""

from tile_kernels.modeling.engram import EngramGateFn, engram_gate
