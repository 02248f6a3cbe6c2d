import pytest

import tile_kernels
from tile_kernels.cli.main import main
from tile_kernels.core.jit import kernels
from tile_kernels.core.op import ops


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """The same machine everywhere: the commands behave as without a GPU."""
    monkeypatch.setattr('torch.cuda.is_available', lambda: False)


@pytest.fixture(scope='session')
def toy_module():
    """The toy op, kept out of the registries so that generic tests see the library's ops only."""
    before = dict(ops), dict(kernels)
    import tests.cli.toy as module

    for registry, entries in zip((ops, kernels), before, strict=True):
        registry.clear()
        registry.update(entries)
    return module


@pytest.fixture
def toy(toy_module, monkeypatch):
    """A library whose only op is the toy."""
    registered = dict(ops)
    monkeypatch.setattr(tile_kernels, 'FAMILIES', ())
    ops.clear()
    ops[toy_module.double.name] = toy_module.double
    yield toy_module.double
    ops.clear()
    ops.update(registered)


@pytest.fixture
def cli(capsys):
    """Run a command line: exit status, stdout, stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        status = main(list(words))
        written = capsys.readouterr()
        return status, written.out, written.err

    return run
