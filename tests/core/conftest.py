import pytest

from tile_kernels.core.op import ops


@pytest.fixture(scope='session')
def sample():
    """The sample ops, kept out of the registry so that generic tests see the library's ops only."""
    before = dict(ops)
    import tests.core.sample as module

    ops.clear()
    ops.update(before)
    return module
