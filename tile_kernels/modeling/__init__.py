"""Layers that use the ops: modules and autograd functions, imported at first use. There are no kernels here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tile_kernels.modeling.attention import Attention
    from tile_kernels.modeling.delta_net import GatedDeltaNet, KimiDeltaAttention
    from tile_kernels.modeling.engram import Engram, EngramGateLayer
    from tile_kernels.modeling.mamba2 import Mamba2
    from tile_kernels.modeling.mhc.block import MHCBlock, MixApply, MixSplit, SinkhornNormalizer
    from tile_kernels.modeling.mhc.pipeline import MHCPipeline
    from tile_kernels.modeling.mla import MLA
    from tile_kernels.modeling.moe import MoELayer
    from tile_kernels.modeling.nsa import NSA
    from tile_kernels.modeling.quant_linear import QuantLinear, quantize_model
    from tile_kernels.modeling.retention import Retention

#: Public name -> module that defines it.
_HOMES = {
    'Attention': 'attention',
    'Engram': 'engram',
    'EngramGateLayer': 'engram',
    'GatedDeltaNet': 'delta_net',
    'KimiDeltaAttention': 'delta_net',
    'MHCBlock': 'mhc.block',
    'MHCPipeline': 'mhc.pipeline',
    'MLA': 'mla',
    'Mamba2': 'mamba2',
    'MixApply': 'mhc.block',
    'MixSplit': 'mhc.block',
    'MoELayer': 'moe',
    'NSA': 'nsa',
    'QuantLinear': 'quant_linear',
    'Retention': 'retention',
    'SinkhornNormalizer': 'mhc.block',
    'quantize_model': 'quant_linear',
}
_MODULES = tuple(sorted({home.partition('.')[0] for home in _HOMES.values()}))

#: Without the modules: `import *` must not replace the families that have the same names.
__all__ = [*_HOMES]


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f'tile_kernels.modeling.{_HOMES[name]}'), name)
    if name in _MODULES:
        return importlib.import_module(f'tile_kernels.modeling.{name}')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
