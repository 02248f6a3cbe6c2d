"""Module paths of TileKernels inside `tile_kernels.moe`, which finds them through its `__path__`."""
