"""TileKernels' pytest plugins by name, for conftest files that load them one by one.

`tile_kernels.testing.plugin` is part of the package and does all of this in projects that enable it. Each module here
does its own part in any project.
"""
