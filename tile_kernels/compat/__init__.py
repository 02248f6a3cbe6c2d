"""Module paths of TileKernels, one re-export in each file. Packages find them here through their `__path__`."""
