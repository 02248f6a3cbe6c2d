import pytest

from tile_kernels.core.jit import kernels


@pytest.fixture(autouse=True)
def own_kernels():
    """Kernels with planted mistakes leave the registry after the test."""
    before = dict(kernels)
    yield
    kernels.clear()
    kernels.update(before)
