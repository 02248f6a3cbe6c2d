"""Explain a call: its launches, their configs and the origin of each config, bytes moved and least time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tile_kernels.core import check
from tile_kernels.core.cases import Case, case_id
from tile_kernels.core.cost import Cost
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.gpus import GPUS, Gpu
from tile_kernels.core.launch import Launch, on_gpu
from tile_kernels.core.op import Op
from tile_kernels.core.registry import find_op, launches_of, typical_case


@dataclass(frozen=True)
class Explanation:
    """The launches and costs of one call, computed without the device; prints as one line per launch."""

    op: Op
    case: Case
    launches: tuple[Launch, ...]
    device: Gpu

    @property
    def bytes(self) -> int:
        """Bytes of all launches."""
        return sum(launch.cost.bytes for launch in self.launches)

    @property
    def floor_us(self) -> float:
        """The least possible time in microseconds on this GPU, with launches one after the other."""
        return sum(launch.cost.floor_us(self.device) for launch in self.launches)

    @property
    def copy_us(self) -> float:
        """Microseconds a copy of the same bytes takes."""
        return sum(launch.cost.copy_us(self.device) for launch in self.launches)

    def __str__(self) -> str:
        lines = [f'{self.op.name}[{case_id(self.case)}]']
        for launch in self.launches:
            cost, device = launch.cost, self.device
            lines.append(
                f'  {launch.kernel.name} {config_words(launch.config)} (by {decided_by(launch)})'
                f' | {size(cost.bytes)}'
                f' | floor {cost.floor_us(device):.1f} us on {device.name} ({bound(cost, device)})'
                f', a copy takes {cost.copy_us(device):.1f} us'
            )
        return '\n'.join(lines if self.launches else [*lines, '  launches nothing: the problem is empty'])

    __repr__ = __str__


def explain(op: str | Op, /, *, device: str = 'h200', **case: Any) -> Explanation:
    """Report what a call of an op launches and what it costs, without a GPU.

    Args:
        op: the op or its name, e.g. `quant.per_token_cast`.
        device: the target GPU, e.g. `h200`, `b200` or `a100`.
        case: entries of the case, as values or as text (`fmt='e4m3_1x128_f32'`). Missing entries are those of the op's
            first benchmark case.

    Returns:
        The launches with their config, bytes and floor; it prints as text.
    """
    found = find_op(op) if isinstance(op, str) else op
    return explain_case(found, typical_case(found, case), device)


def explain_case(op: Op, case: Case, device: str = 'h200') -> Explanation:
    """`explain` for a complete case."""
    if device not in GPUS:
        hint = check.did_you_mean(device, GPUS)
        raise ArgumentError(
            f'explain: device must be one of {", ".join(GPUS)}, got {device!r}' + (f'; {hint}' if hint else '')
        )
    with on_gpu(device):
        return Explanation(op, case, tuple(launches_of(op, case)), GPUS[device])


def bound(cost: Cost, device: Gpu) -> str:
    """The peak rate that limits a launch, of compute or of memory."""
    if cost.floor_us(device) > cost.bytes / device.bandwidth * 1e6:
        return f'{device.peaks[cost.dtype] / 1e12:.4g} TFLOP/s'
    return f'{device.bandwidth / 1e12:.3g} TB/s'


def config_words(config: Mapping[str, Any]) -> str:
    """`block_m=16 num_threads=128`."""
    return ' '.join(f'{name}={value}' for name, value in config.items()) or 'no config'


def decided_by(launch: Launch) -> str:
    """The origin of the config of a launch."""
    return launch.decided_by


def size(count: float) -> str:
    """A number of bytes in the unit that suits it: `89.0 MB`."""
    for unit in ('B', 'kB', 'MB', 'GB'):
        if count < 1000 or unit == 'GB':
            break
        count /= 1000
    return f'{count:.0f} {unit}' if unit == 'B' else f'{count:.1f} {unit}'
