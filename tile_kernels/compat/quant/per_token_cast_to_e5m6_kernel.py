"""`per_token_cast`, which writes e5m6 with `fmt='e5m6'`, at its path in TileKernels."""

from tile_kernels.quant import per_token_cast
