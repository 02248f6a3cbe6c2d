"""Seed every test by `--seed` and its id."""

import pytest

from tile_kernels.testing.plugin import seed_test


@pytest.fixture(autouse=True)
def seed_of_test(request: pytest.FixtureRequest) -> int:
    """The seed of torch and random in this test."""
    return seed_test(request)
