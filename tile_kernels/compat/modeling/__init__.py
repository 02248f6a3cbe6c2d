"""Module paths of TileKernels inside `tile_kernels.modeling`, which finds them through its `__path__`."""
