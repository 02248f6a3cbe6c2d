"""Names of parameter sets: test ids, keys of results files, lines of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_SHORT_DTYPES = {
    torch.float32: 'fp32',
    torch.bfloat16: 'bf16',
    torch.float16: 'fp16',
    torch.float8_e4m3fn: 'e4m3',
    torch.float8_e5m2: 'e5m2',
    torch.int8: 'e2m1',
}

_CAST_PARAMS = (
    'fmt',
    'num_per_channels',
    'x_block_size',
    'use_tma_aligned_col_major_sf',
    'round_sf',
    'use_packed_ue8m0',
    'use_e4m3_sf',
)


def dtype_to_str(dtype: torch.dtype) -> str:
    """Short name of a dtype of casts: fp32, bf16, fp16, e4m3, e5m2; int8 holds e2m1."""
    if dtype not in _SHORT_DTYPES:
        raise ValueError(f'dtype_to_str: dtype must be one of {", ".join(map(str, _SHORT_DTYPES))}, got {dtype}')
    return _SHORT_DTYPES[dtype]


def _word(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return _SHORT_DTYPES.get(value) or str(value).removeprefix('torch.')
    if isinstance(value, (tuple, list)):
        return 'x'.join(_word(v) for v in value)
    return str(value)


def make_param_id(params: Mapping[str, Any], display: bool = False) -> str:
    """Test id of a parameter set, `num_tokens=4001-dtype=bf16-block=32x32`; `display` gives `format_param_id`."""
    if display:
        return format_param_id(params)
    return '-'.join(f'{name}={_word(value)}' for name, value in params.items()) or 'default'


def make_param_key(params: Mapping[str, Any]) -> str:
    """Key of a parameter set in a results file, `num_tokens=4001,dtype=bf16`, sorted by name."""
    return ','.join(f'{name}={_word(params[name])}' for name in sorted(params))


def format_param_id(params: Mapping[str, Any]) -> str:
    """A parameter set as readable text: `num_tokens=4001, dtype=bf16`."""
    return ', '.join(f'{name}={_word(value)}' for name, value in params.items()) or 'default'


def get_cast_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a parameter set that describes a cast: format, block and layout of the scale factors."""
    return {name: params[name] for name in _CAST_PARAMS if name in params}
