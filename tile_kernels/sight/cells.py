"""The cells of a picture: labels and colors for a tile in memory, a fragment, and an access to shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tile_kernels.sight.banks import Lanes, matrix, run_length
from tile_kernels.sight.layouts import BANK_BYTES, BANKS, BufferLayout


@dataclass
class Grid:
    """Labels and colors of cells; a color is a number below 32, -1 means none."""

    corner: str
    rows: list[str]
    columns: list[str]
    labels: NDArray[np.str_]
    colors: NDArray[np.int64]
    notes: list[str]
    colored_by: str
    legend: list[tuple[int, str]] = field(default_factory=list)
    hatched: bool = False

    def cut(self, rows: int, columns: int) -> Grid:
        """The grid with at most so many rows and columns: the first ones, an ellipsis and the last."""
        down, across = _kept(len(self.rows), rows), _kept(len(self.columns), columns)
        gap = np.add.outer(np.less(down, 0), np.less(across, 0))
        return replace(
            self,
            rows=['...' if row < 0 else self.rows[row] for row in down],
            columns=['...' if column < 0 else self.columns[column] for column in across],
            labels=np.where(gap, '...', self.labels[np.ix_(down, across)]),
            colors=np.where(gap, -1, self.colors[np.ix_(down, across)]),
        )


def _kept(number: int, most: int) -> list[int]:
    """Indices to show; -1 stands for the ellipsis."""
    return list(range(number)) if number <= most else [*range(most - 2), -1, number - 1]


def _tile_grid(layout: BufferLayout, size: int, parts: list[Any], colors: Any, note: str) -> Grid:
    """Cells of `size` neighbors in a row, each labeled with two numbers."""
    shape = matrix(layout.offsets).shape
    rows, columns = [str(row) for row in range(shape[0])], [str(column) for column in range(0, shape[1], size)]
    labels = np.array([[f'{a}:{b}' for a, b in zip(*pair, strict=True)] for pair in zip(*parts, strict=True)])
    notes = [f'a cell is {"1 element" if size == 1 else f"{size} elements"}: {note}']
    if layout.offsets.ndim > 2:
        notes.append(f'the first tile of {"x".join(map(str, layout.shape[:-2]))}')
    return Grid('row\\col', rows, columns, labels, colors, notes, '')


def memory_grid(layout: BufferLayout) -> Grid:
    """Byte address and bank of each element, or of neighbors that lie together."""
    offsets = matrix(layout.offsets)
    most = 1 if offsets.shape[1] <= 16 else max(1, 128 // layout.bits)
    size = run_length(np.diff(offsets, axis=1) == 1, most)
    places = offsets[:, ::size] * layout.bits // 8
    banks = places // BANK_BYTES % BANKS
    grid = _tile_grid(layout, size, [places, banks], banks // 4 + 8 * (banks % 4), 'byte address, then its bank')
    grid.colored_by = 'banks'
    grid.legend = [(quarter, _range(4 * quarter, 4)) for quarter in range(8)]
    return grid


def fragment_grid(layout: BufferLayout) -> Grid:
    """Thread and register of each element, or of neighbors in one thread."""
    every = np.asarray(layout.threads)
    threads, registers = matrix(every[0]), matrix(layout.offsets)
    most = 1 if registers.shape[1] <= 16 else 8
    size = run_length((np.diff(registers, axis=1) == 1) & (np.diff(threads, axis=1) == 0), most)
    parts = [threads[:, ::size], registers[:, ::size]]
    grid = _tile_grid(layout, size, parts, parts[0] % 32, 'thread, then its first register')
    grid.colored_by, grid.hatched = 'the color is the thread, modulo 32', len(every) > 1
    if grid.hatched:
        steps = ', '.join(f'+{step}' for step in (every - every[:1]).reshape(len(every), -1)[1:4, 0])
        more = ', ...' if len(every) > 4 else ''
        grid.notes.append(f'{len(every)} threads hold each element (hatched): also thread {steps}{more}')
    return grid


def access_grid(lanes: Lanes) -> Grid:
    """For each bank the lanes that one pass after the other serves."""
    met, rows, cells, first = lanes.met(), [], [], 0
    for bank in range(1, BANKS + 1):  # neighboring banks with the same lanes form one row
        if bank == BANKS or met[bank] != met[first]:
            rows.append(_range(first, bank - first))
            cells.append([_lanes(each) for each in met[first]] or ['idle'])
            first = bank
    passes = max(map(len, cells))
    labels = np.array([row + [''] * (passes - len(row)) for row in cells])
    colors = [
        [int(f'{label}-'.replace(',', '-').split('-')[0]) if label[:1].isdigit() else -1 for label in row]
        for row in labels
    ]
    notes = ['a cell is the lanes that one pass serves in these banks']
    return Grid(
        'banks\\pass',
        rows,
        [str(n + 1) for n in range(passes)],
        labels,
        np.array(colors),
        notes,
        'the color is the lane',
    )


def _range(first: int, number: int) -> str:
    return str(first) if number == 1 else f'{first}-{first + number - 1}'


def _lanes(numbers: list[int]) -> str:
    dense = len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1))
    return _range(numbers[0], len(numbers)) if dense else ','.join(map(str, numbers))
