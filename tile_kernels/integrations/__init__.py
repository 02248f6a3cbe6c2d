"""Other libraries' models on our kernels. Each module imports its library only when it is used."""

__all__ = ['transformers']


def __getattr__(name: str) -> object:
    if name == 'transformers':
        import importlib

        return importlib.import_module('tile_kernels.integrations.transformers')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
    return list(__all__)
