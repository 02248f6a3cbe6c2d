"""Module paths of TileKernels inside `tile_kernels.modeling.engram`, which finds them through its `__path__`."""
