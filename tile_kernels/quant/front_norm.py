"""The public RMS norm functions: any number of leading dimensions, memory of the caller, TileKernels' flags."""
