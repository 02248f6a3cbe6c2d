"""Module paths of TileKernels inside `tile_kernels.engram`, which finds them through its `__path__`."""
