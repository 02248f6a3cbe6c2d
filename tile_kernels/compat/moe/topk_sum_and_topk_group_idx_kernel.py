"""Names of `tile_kernels.moe` at their path in TileKernels."""

from tile_kernels.moe import topk_sum_and_topk_group_idx
