"""Module paths of TileKernels inside `tile_kernels.quant`, which finds them through its `__path__`."""
