import pytest

from tests.cli.conftest import toy, toy_module  # noqa: F401
from tile_kernels.core import tuned
from tile_kernels.core.knobs import knobs


@pytest.fixture(autouse=True)
def own_tables(tmp_path, monkeypatch):
    """Tables of this test alone, and the same machine everywhere: one without a GPU."""
    monkeypatch.setattr('torch.cuda.is_available', lambda: False)
    monkeypatch.setattr(tuned, 'SHIPPED', tmp_path / 'shipped')
    before = dict(knobs.of_process)
    knobs.cache_dir, knobs.tuned = tmp_path / 'cache', 'all'
    yield tmp_path
    knobs.of_process.update(before)
    knobs.touch()
