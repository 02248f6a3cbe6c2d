"""TileKernels keeps here how its casts choose layouts: no public function; `QuantFormat` takes that part here."""

__all__: list[str] = []
