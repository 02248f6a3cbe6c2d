"""TileKernels keeps here what its routing kernels share: no public function, so nothing is exported."""

__all__: list[str] = []
