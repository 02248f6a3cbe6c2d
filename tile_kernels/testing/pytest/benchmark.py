"""Skip tests marked `benchmark` unless `--run-benchmark` is given."""

import pytest

from tile_kernels.testing.plugin import skip_benchmarks


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip benchmarks unless `--run-benchmark` is given."""
    skip_benchmarks(config, items)
