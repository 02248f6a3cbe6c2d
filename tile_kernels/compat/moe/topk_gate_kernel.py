"""Names of `tile_kernels.moe` at their path in TileKernels."""

from tile_kernels.moe import topk_gate
