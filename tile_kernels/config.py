"""Process-wide settings in TileKernels' form. Everything else is a knob (`tile_kernels.knobs`)."""

from __future__ import annotations

import torch

from tile_kernels.core import check
from tile_kernels.core.errors import UnsupportedError
from tile_kernels.core.formats import AMAX_FLOOR, AMAX_FLOOR_E4M3_SF, ELEMENTS
from tile_kernels.core.gpus import cuda_gpu
from tile_kernels.core.knobs import KNOBS, knobs

#: Settings that are accepted for TileKernels' users and change nothing here.
_kept = {'pdl': False, 'deterministic': False}

_FLOORS = {False: dict(AMAX_FLOOR), True: dict(AMAX_FLOOR_E4M3_SF)}


def _current_device(function: str) -> int:
    if not torch.cuda.is_available():
        raise UnsupportedError(f'config.{function}: needs a GPU, found none')
    return torch.cuda.current_device()


def get_device_num_sms() -> int:
    """Multiprocessors of the current CUDA device."""
    return cuda_gpu(_current_device('get_device_num_sms')).sms


def set_num_sms(num_sms: int) -> None:
    """Limit the blocks of persistent kernels to `num_sms`."""
    check.integer(num_sms, 'num_sms')
    check.at_least(num_sms, 1, 'num_sms')
    check.at_most(num_sms, get_device_num_sms(), 'num_sms')
    knobs.num_sms = num_sms


def get_num_sms() -> int:
    """The limit in force, else the number of multiprocessors of the current device."""
    return knobs.num_sms or get_device_num_sms()


def get_max_smem_per_sm() -> int:
    """Shared memory of one multiprocessor of the current device, in bytes."""
    device = _current_device('get_max_smem_per_sm')
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def is_ascend() -> bool:
    """Whether the kernels run on an Ascend NPU: never, they are written for NVIDIA GPUs."""
    return False


def get_device() -> str:
    """Type of the device that kernels run on."""
    return 'cuda'


def get_num_vec_cores() -> int:
    """Vector cores as TileKernels counts them, two for each multiprocessor; there are none on a GPU."""
    return 2 * get_num_sms()


def get_max_ub_per_vector_core(use_simt: bool = True) -> int:
    """Unified buffer of a vector core: only an Ascend NPU has one."""
    raise UnsupportedError('config.get_max_ub_per_vector_core: needs an Ascend NPU; kernels here run on NVIDIA GPUs')


get_num_ai_cores = get_num_cube_cores = get_num_sms


def set_pdl(enabled: bool) -> None:
    """Accept TileKernels' setting for programmatic dependent launches; it is kept but changes nothing."""
    _kept['pdl'] = bool(enabled)


def get_pdl() -> bool:
    """What `set_pdl` was told last, False at first."""
    return _kept['pdl']


def use_deterministic_algorithms(enabled: bool) -> None:
    """Accept TileKernels' setting; it is kept but changes nothing: results are deterministic either way."""
    _kept['deterministic'] = bool(enabled)


def get_deterministic_algorithms() -> bool:
    """What `use_deterministic_algorithms` was told last, False at first."""
    return _kept['deterministic']


def set_token_alignment(token_alignment: int) -> None:
    """Rows of an expert start at multiples of `token_alignment` in the prefix-sum layout of the SwiGLU functions."""
    if not isinstance(token_alignment, int) or isinstance(token_alignment, bool):
        raise TypeError(f'config.set_token_alignment: token_alignment must be an int, got {token_alignment!r}')
    check.at_least(token_alignment, 1, 'token_alignment')
    knobs.token_alignment = token_alignment


def get_token_alignment() -> int:
    """The multiple at which the rows of an expert start, 128 unless set."""
    return knobs.token_alignment


def get_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool) -> float:
    """Smallest amax a block of `fmt` is scaled by."""
    check.one_of(fmt, ('e4m3', 'e2m1'), 'fmt')
    return AMAX_FLOOR_E4M3_SF[fmt] if use_e4m3_sf else AMAX_FLOOR[fmt]


def set_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool, clamp_min_value: float) -> None:
    """Change the smallest amax a block of `fmt` is scaled by; takes effect at the next call, nothing is recompiled."""
    check.one_of(fmt, ('e4m3', 'e2m1'), 'fmt')
    smallest_sf = 2.0**-9 if use_e4m3_sf else torch.finfo(torch.float32).tiny
    check.at_least(clamp_min_value, ELEMENTS[fmt].max * smallest_sf, 'clamp_min_value')  # or factors become 0
    (AMAX_FLOOR_E4M3_SF if use_e4m3_sf else AMAX_FLOOR)[fmt] = clamp_min_value
    knobs.touch()


def reset_runtime_config() -> None:
    """Restore every default of this module."""
    knobs.num_sms = KNOBS['num_sms'].default
    knobs.token_alignment = KNOBS['token_alignment'].default
    _kept.update(pdl=False, deterministic=False)
    AMAX_FLOOR.update(_FLOORS[False])
    AMAX_FLOOR_E4M3_SF.update(_FLOORS[True])
