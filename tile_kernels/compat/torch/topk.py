"""Names of `tile_kernels.reference` at their path in TileKernels."""

from tile_kernels.reference import stable_topk, top2_sum_gate, topk_sum_and_topk_group_idx
