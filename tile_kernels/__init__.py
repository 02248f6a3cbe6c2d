"""GPU kernels for large language models, written in TileLang for PyTorch.

Importing this package neither imports TileLang nor touches CUDA; both happen at the first kernel.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from tile_kernels.compat import attach
from tile_kernels.core import distribution
from tile_kernels.core.collect import collecting
from tile_kernels.core.errors import ArgumentError, CompileError, LaunchError, TileKernelsError, UnsupportedError
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.jit import compile_count
from tile_kernels.core.knobs import knobs, misspelled
from tile_kernels.core.precompile import precompile

# isort: split
from tile_kernels import (  # registers all ops
    activation,
    attention,
    engram,
    gemm,
    linear_attention,
    mhc,
    moe,
    norm,
    quant,
    rand,
    transform,
    transpose,
)

if TYPE_CHECKING:
    from tile_kernels import (
        config,
        distributed,
        integrations,
        interpreter,
        modeling,
        profiler,
        reference,
        scale,
        sight,
        testing,
        torch,
        utils,
    )
    from tile_kernels.core.explain import explain
    from tile_kernels.extend import extend_tilelang
    from tile_kernels.tile_kernel import TileKernel
    from tile_kernels.tuning import tune

__version__ = '0.2.0'

for _warning in (distribution.warning(), *misspelled()):
    if _warning:
        warnings.warn(_warning, stacklevel=2)

#: The module of `precompile` keeps its earlier path, beside the function of that name.
sys.modules['tile_kernels.precompile'] = sys.modules['tile_kernels.core.precompile']

#: Subpackages that hold ops.
FAMILIES = (
    'activation',
    'attention',
    'engram',
    'gemm',
    'linear_attention',
    'mhc',
    'moe',
    'norm',
    'quant',
    'rand',
    'transform',
    'transpose',
)

# Module paths of TileKernels that have no file of their own here, `tile_kernels.torch` among them, are in compat/.
for _family in FAMILIES:
    attach(globals()[_family])
__path__.append(f'{__path__[0]}/compat')

#: Loaded when first used, and left out of `import *`, which must not load them nor replace PyTorch's own `torch`.
_LAZY = (
    'config',
    'distributed',
    'integrations',
    'modeling',
    'profiler',
    'utils',
    'reference',
    'scale',
    'sight',
    'torch',
    'testing',
    'interpreter',
)

#: Names that are loaded when first used, and their modules.
_FUNCTIONS = {
    'explain': 'core.explain',
    'extend_tilelang': 'extend',
    'TileKernel': 'tile_kernel',
    'tune': 'tuning',
}

_CONFIG = (
    'get_device_num_sms',
    'get_num_sms',
    'set_num_sms',
    'get_max_smem_per_sm',
    'get_max_ub_per_vector_core',
    'get_num_ai_cores',
    'get_num_cube_cores',
    'get_num_vec_cores',
    'get_token_alignment',
    'set_token_alignment',
    'get_amax_clamp_for_quant',
    'set_amax_clamp_for_quant',
    'get_deterministic_algorithms',
    'use_deterministic_algorithms',
    'get_device',
    'get_pdl',
    'set_pdl',
    'is_ascend',
)

__all__ = [
    'FAMILIES',
    'ArgumentError',
    'CompileError',
    'LaunchError',
    'QuantFormat',
    'QuantTensor',
    'TileKernel',
    'TileKernelsError',
    'UnsupportedError',
    'activation',
    'attention',
    'collecting',
    'compile_count',
    'engram',
    'explain',
    'extend_tilelang',
    'gemm',
    'knobs',
    'linear_attention',
    'mhc',
    'moe',
    'norm',
    'precompile',
    'quant',
    'rand',
    'transform',
    'transpose',
    'tune',
    *_CONFIG,
]


def __dir__() -> list[str]:
    return [*__all__, *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f'tile_kernels.{name}')
    if name in _CONFIG:
        return getattr(importlib.import_module('tile_kernels.config'), name)
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f'tile_kernels.{_FUNCTIONS[name]}'), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


if knobs.interpret:  # a user's own kernels are interpreted, too
    from tile_kernels.interpreter.startup import hook_tilelang

    hook_tilelang()
