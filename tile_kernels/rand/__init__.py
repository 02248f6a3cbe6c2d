"""Normal random numbers that are the same on a CPU and on a GPU, for the same seed and the same order of calls."""

from tile_kernels.rand.randn import randn, randn_like, set_seed

__all__ = ['randn', 'randn_like', 'set_seed']


def __dir__() -> list[str]:
    return __all__
