"""Tools to test and measure kernels, ours and yours: numerics, timers, inputs, the contract of an op.

The pytest plugin (`tile_kernels_pytest`) is part of the package. In every project of an environment pytest loads the
plugin, which there imports neither the package nor torch. The modules here are imported at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tile_kernels.testing.bench import BenchResult, benchmark_kernel, graph_time, host_time
    from tile_kernels.testing.contract import check_contract, contract_cases
    from tile_kernels.testing.numeric import (
        assert_equal,
        assert_within_twice,
        calc_diff,
        check_bias,
        count_bytes,
        max_error,
        rms_error,
    )
    from tile_kernels.testing.poison import poisoned
    from tile_kernels.testing.quant import clear_unused_sf, clear_unused_sf_col_pack, quant_level_rank

_MODULES = ('bench', 'contract', 'generator', 'moe', 'numeric', 'poison', 'quant', 'records')

__all__ = [
    'BenchResult',
    'assert_equal',
    'assert_within_twice',
    'benchmark_kernel',
    'calc_diff',
    'check_bias',
    'check_contract',
    'clear_unused_sf',
    'clear_unused_sf_col_pack',
    'contract_cases',
    'count_bytes',
    'graph_time',
    'host_time',
    'max_error',
    'poisoned',
    'quant_level_rank',
    'rms_error',
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import the modules at the first use of any name."""
    if name not in __all__ and name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    for module in _MODULES:
        loaded = importlib.import_module(f'{__name__}.{module}')
        globals().update({export: getattr(loaded, export) for export in __all__ if hasattr(loaded, export)})
    return globals()[name]
