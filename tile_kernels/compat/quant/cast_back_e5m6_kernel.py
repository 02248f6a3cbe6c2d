"""`cast_back`, which reads e5m6 with `x_special_fmt='e5m6'`, at its path in TileKernels."""

from tile_kernels.quant import cast_back
