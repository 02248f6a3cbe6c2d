"""Module paths of TileKernels inside `tile_kernels.mhc`, which finds them through its `__path__`."""
