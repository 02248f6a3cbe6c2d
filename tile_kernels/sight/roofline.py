"""Where kernels and records lie under the roofline of a GPU: operations per byte, achieved and attainable speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tile_kernels.core.errors import ArgumentError, UnsupportedError
from tile_kernels.core.gpus import Gpu
from tile_kernels.sight.model import Prediction, predict
from tile_kernels.sight.subject import gpu_for


@dataclass(frozen=True)
class Point:
    """A kernel under the roofline.

    Attributes:
        name: the kernel or the case.
        intensity: operations of products per byte of device memory.
        bandwidth: bytes per second, predicted or measured; None if unknown.
        attainable: operations per second that the roofline allows at this intensity.
        measured: whether the speed comes from a record.
    """

    name: str
    intensity: float
    bandwidth: float | None
    attainable: float
    measured: bool

    @property
    def achieved(self) -> float | None:
        """Operations per second; None if the time is unknown."""
        return None if self.bandwidth is None else self.intensity * self.bandwidth


@dataclass(frozen=True)
class Roofline:
    """Points under the roofline of a GPU; prints as a table."""

    gpu: Gpu
    points: list[Point] = field(repr=False)

    @property
    def ridge(self) -> float:
        """Operations per byte above which products of half precision limit, not memory."""
        return self.gpu.peaks[torch.bfloat16] / self.gpu.bandwidth

    def table(self) -> str:
        """The points as text, at most 80 columns wide."""
        lines = [f'{self.gpu.name}: ridge at {self.ridge:.0f} FLOP/B for half precision']
        lines += [f'{"FLOP/B":>9}{"TFLOP/s":>10}{"of":>9}{"TB/s":>7}  kernel']
        for p in self.points:
            achieved = '–' if p.achieved is None else f'{p.achieved / 1e12:.4g}'
            speed = '–' if p.bandwidth is None else f'{p.bandwidth / 1e12:.3g}'
            name = f'{p.name[:36]}{" (measured)" if p.measured else ""}'
            lines.append(f'{p.intensity:>9.4g}{achieved:>10}{p.attainable / 1e12:>9.4g}{speed:>7}  {name}')
        return '\n'.join(lines)

    __str__ = table

    def plot(self, path: str | Path) -> None:
        """Write the picture as SVG or PNG; needs matplotlib."""
        if Path(path).suffix not in ('.svg', '.png'):
            raise ArgumentError(f'roofline: path must end in .svg or .png, got {path}')
        try:
            from matplotlib.figure import Figure
        except ImportError:
            how = 'run: pip install "open-tile-kernels[plots]", or use .table()'
            raise UnsupportedError(f'roofline: a picture needs matplotlib; {how}') from None
        figure = Figure(figsize=(7, 4.5))
        axes = figure.add_subplot(xscale='log', yscale='log', xlabel='FLOP per byte', ylabel='TFLOP/s')
        peak = self.gpu.peaks[torch.bfloat16] / 1e12
        axes.plot([0.1, self.ridge, 1e4], [0.1 * self.gpu.bandwidth / 1e12, peak, peak], color='black')
        for p in self.points:
            if p.achieved and p.intensity:
                axes.plot(p.intensity, p.achieved / 1e12, 'o' if p.measured else 'x', label=p.name)
        axes.set_title(f'{self.gpu.name}: x predicted, o measured')
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
        figure.savefig(path, bbox_inches='tight')


def roofline(subjects_or_records: Iterable[Any] | Any, device: str = 'h200') -> Roofline:
    """Points under the roofline.

    Args:
        subjects_or_records: predictions, lines of a results file, kernels or names of ops; one or several.
        device: the GPU.
    """
    gpu = gpu_for(device)
    single = isinstance(subjects_or_records, (str, Mapping, Prediction)) or not isinstance(
        subjects_or_records, Iterable
    )
    return Roofline(
        gpu, [_point(one, gpu, device) for one in ([subjects_or_records] if single else subjects_or_records)]
    )


def _point(one: Any, gpu: Gpu, device: str) -> Point:
    if isinstance(one, Mapping):
        if not one.get('gbps'):
            raise ArgumentError(f'roofline: a record must have gbps, got one with {", ".join(one)}')
        bandwidth = 1e9 * one['gbps']
        intensity = 1e12 * (one.get('tflops') or 0.0) / bandwidth
        name = f'{one.get("op", "record")} {one.get("case", "")}'.strip()
        return Point(name, intensity, bandwidth, _attainable(intensity, torch.bfloat16, gpu), True)
    found = one if isinstance(one, Prediction) else predict(one, device=device, compile=False)
    bandwidth = None if not found.us else 1e6 * found.traffic.get('hbm', 0.0) / found.us
    dtype = getattr(torch, max(found.flops, key=lambda name: found.flops[name]) if found.flops else 'bfloat16', None)
    return Point(found.name, found.intensity, bandwidth, _attainable(found.intensity, dtype, gpu), False)


def _attainable(intensity: float, dtype: Any, gpu: Gpu) -> float:
    return min(gpu.peaks.get(dtype, gpu.peaks[torch.bfloat16]), intensity * gpu.bandwidth)
