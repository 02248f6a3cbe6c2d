"""Module paths of TileKernels inside `tile_kernels.transpose`, which finds them through its `__path__`."""
