"""TileKernels' pytest plugins by name, for the conftest files of suites that load them one by one.

`tile_kernels.testing.plugin` comes with the package and does all of it for projects that switch it on; these modules do
their part in any project.
"""
