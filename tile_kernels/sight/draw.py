"""Pictures of layouts: where the elements of a tile lie in memory or registers, and which lanes meet in a bank."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tile_kernels.core import nvcc
from tile_kernels.core.errors import ArgumentError, UnsupportedError
from tile_kernels.sight.banks import PATTERNS, Lanes, executions, pattern
from tile_kernels.sight.cells import Grid, access_grid, fragment_grid, memory_grid
from tile_kernels.sight.layouts import BufferLayout, evaluate, layouts_of
from tile_kernels.sight.subject import resolve

#: Settings of matplotlib; the salt makes the names in an SVG file repeatable.
_STYLE = {'svg.hashsalt': 'sight', 'svg.fonttype': 'none', 'font.family': 'DejaVu Sans', 'hatch.linewidth': 0.5}

VIEWS = ('memory', 'fragment', 'access')

#: A picture has at most this many rows and columns of cells; a line of text has at most `_WIDTH` characters.
_MOST, _WIDTH = 18, 80

#: Eight colors that color-blind readers can tell apart (Okabe and Ito); lighter shades follow.
_COLORS = ('#E69F00', '#56B4E9', '#009E73', '#F0E442', '#0072B2', '#D55E00', '#CC79A7', '#999999')


@dataclass(frozen=True)
class Layout:
    """The picture of one layout.

    Attributes:
        name: the buffer.
        view: `'memory'`, `'fragment'` or `'access'`.
        layout: where the elements lie.
        conflicts: ways of bank conflict of each access; 1 means no conflict. A fragment has none.
        lanes: the access that the view `'access'` shows.
    """

    name: str
    view: str
    layout: BufferLayout = field(repr=False)
    conflicts: dict[str, int]
    lanes: Lanes | None = None

    @property
    def banks(self) -> NDArray[np.int64]:
        """For each element its bank of shared memory; empty for a fragment."""
        return self.layout.banks

    @property
    def title(self) -> str:
        """One line about the layout or the access."""
        return str(self.layout) if self.lanes is None else f'{self.lanes.name}: {self.lanes.ways}-way'

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """The picture in characters, at most 80 in a line."""
        grid = self._grid()
        wide = max(3 if len(grid.rows) > _MOST else 0, *map(len, [*grid.columns, *grid.labels.flat])) + 1
        side = max(map(len, [grid.corner, *grid.rows]))
        grid = grid.cut(_MOST, max(3, (_WIDTH - side) // wide))
        table = [(grid.corner, grid.columns), *zip(grid.rows, grid.labels, strict=True)]
        lines = [name.rjust(side) + ''.join(label.rjust(wide) for label in cells) for name, cells in table]
        return '\n'.join(line.rstrip() for line in (self.title, *grid.notes, *lines, *self._verdict()))

    @property
    def svg(self) -> str:
        """The picture as SVG; the same layout gives the same bytes."""
        return _rendered(self, 'svg').decode()

    def save(self, path: str | Path) -> None:
        """Write the picture to a file, whose suffix is `.svg`, `.png` or `.txt`."""
        path = Path(path)
        if path.suffix not in ('.svg', '.png', '.txt'):
            raise ArgumentError(f'plot_layout: save_path must end in .svg, .png or .txt, got {str(path)!r}')
        data = f'{self.text()}\n'.encode() if path.suffix == '.txt' else _rendered(self, path.suffix[1:])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def _verdict(self) -> list[str]:
        words = ', '.join(f'{name} {ways}-way' for name, ways in self.conflicts.items())
        return [f'bank conflicts: {words}'] if words and self.lanes is None else []

    def _grid(self) -> Grid:
        if self.lanes is not None:
            return access_grid(self.lanes)
        return memory_grid(self.layout) if self.layout.threads is None else fragment_grid(self.layout)


# What to draw ------------------------------------------------------------------------------------------------------


def plot_layout(
    kernel: Any = None,
    *args: Any,
    tensor: Any = None,
    blocking: Sequence[int] | None = None,
    swizzle: bool = False,
    dtype: str | None = None,
    buffer: str | None = None,
    view: str | None = None,
    access: int | str | None = None,
    save_path: str | Path | None = None,
    device: str = 'h200',
    **named: Any,
) -> Any:
    """Draw where the elements of a tile lie, and the bank conflicts of its accesses.

    Args:
        kernel: a kernel, a builder or an op, whose inferred layouts are drawn, or a `T.Layout` or `T.Fragment`.
        args: arguments of the kernel or the builder.
        tensor: instead of a kernel a tensor, a `T.Tensor` or a pair of shape and dtype, of which a tile is drawn.
        blocking: the tile of the tensor: two extents, or `(bM, bN, bK)` for the tile `(bM, bK)` of an operand.
        swizzle: whether the tile has the layout that TileLang gives an operand, else it is row-major.
        dtype: the element type of a `T.Layout`, float16 by default; for a builder its argument.
        buffer: only this buffer of the kernel.
        view: `'memory'`, `'fragment'` or `'access'`; by default what suits the layout.
        access: what the view `'access'` shows: a line of the kernel, or `'row'`, `'column'` or `'ldmatrix'`.
        save_path: a file that ends in `.svg`, `.png` or `.txt`, or a folder for the buffers of a kernel.
        device: the GPU to compile for.
        named: dynamic extents, arguments of the builder or entries of the case.

    Returns:
        The `Layout` picture; for a kernel without `buffer` a dictionary of pictures by name of the buffer.
    """
    if view not in (None, *VIEWS):
        raise ArgumentError(f'plot_layout: view must be one of {", ".join(VIEWS)}, got {view!r}')
    if isinstance(access, str) and access not in PATTERNS:
        raise ArgumentError(f'plot_layout: access must be a line or one of {", ".join(PATTERNS)}, got {access!r}')
    if (kernel is None) == (tensor is None):
        raise ArgumentError('plot_layout: give either a kernel or a layout, or tensor=')
    nvcc.require_tilelang()
    from tilelang.layout import Layout as TileLayout

    view = 'access' if access is not None else view
    alone = tensor is not None or isinstance(kernel, TileLayout)
    if alone:
        layout = _tile(tensor, blocking, swizzle) if tensor is not None else _given(kernel, dtype or 'float16')
        pictures, buffer = {layout.buffer: _picture(layout, view, access, None)}, layout.buffer
    else:
        named |= {} if dtype is None else {'dtype': dtype}
        pictures = _of_kernel(resolve(kernel, *args, device=device, **named), buffer, view, access)
    if save_path is not None:
        for name, picture in pictures.items():
            whole = alone or (buffer is not None and Path(save_path).suffix)
            picture.save(save_path if whole else Path(save_path) / f'{name}.svg')
    return pictures if buffer is None else pictures[buffer]


def _of_kernel(
    subjects: list[Any], buffer: str | None, view: str | None, access: int | str | None
) -> dict[str, Layout]:
    """Pictures of the buffers of a kernel that suit the view; a buffer that is named must suit it."""
    pictures: dict[str, Layout] = {}
    known = []
    for subject in subjects:
        seen = executions(subject) if view == 'access' and not isinstance(access, str) else None
        for name, layout in layouts_of(subject).items():
            known.append(key := name if len(subjects) == 1 else f'{subject.name}.{name}')
            own = layout.threads is None if view in ('memory', 'access') else view is None or layout.threads is not None
            if buffer == key or (buffer is None and own and (seen is None or name in seen)):
                pictures[key] = _picture(layout, view, access, seen)
    if buffer is not None and not pictures:
        raise ArgumentError(f'plot_layout: buffer must be one of {", ".join(known) or "none"}, got {buffer!r}')
    return pictures


def _picture(layout: BufferLayout, view: str | None, access: Any, seen: dict[str, list[Lanes]] | None) -> Layout:
    """The picture of a layout; `seen` has the accesses of its kernel by name of the buffer."""
    own = 'fragment' if layout.threads is not None else 'memory'
    if view not in (None, own) and (view != 'access' or own == 'fragment'):
        raise ArgumentError(f'plot_layout: {layout.buffer} has the view {own}, got {view}')
    patterns = [
        lanes for name in PATTERNS if own == 'memory' and access in (None, name) and (lanes := pattern(layout, name))
    ]
    if view != 'access':
        conflicts = {lanes.name.split()[0]: lanes.ways for lanes in patterns}
        return Layout(layout.buffer, own, layout, conflicts)
    every = patterns if seen is None else seen.get(layout.buffer, [])
    found = [lanes for lanes in every if not isinstance(access, int) or lanes.name.startswith(f'line {access}:')]
    if not found:
        names = ', '.join(dict.fromkeys(lanes.name.split(':')[0] for lanes in every)) or 'none'
        raise ArgumentError(f'plot_layout: access must be one of {names} of {layout.buffer}, got {access}')
    worst = max(found, key=lambda lanes: lanes.ways)
    return Layout(layout.buffer, view, layout, {lanes.name: lanes.ways for lanes in found}, worst)


def _given(layout: Any, dtype: str) -> BufferLayout:
    from tilelang.layout import Fragment

    fragment = isinstance(layout, Fragment)
    return evaluate(layout, 'fragment' if fragment else 'layout', 'local.fragment' if fragment else 'shared.dyn', dtype)


def _tile(tensor: Any, blocking: Sequence[int] | None, swizzle: bool) -> BufferLayout:
    """The layout of a tile of a tensor in shared memory."""
    import tilelang.language as T
    from tilelang.layout import make_linear_layout, make_swizzled_layout

    try:
        shape, dtype = tensor if isinstance(tensor, tuple) else (tensor.shape, tensor.dtype)
        tile = [int(extent) for extent in (tuple(shape)[-2:] if blocking is None else blocking)]
        block = T.Tensor((tile[0], tile[-1]), str(dtype).removeprefix('torch.'))
    except Exception as error:
        kinds = 'a tensor, a T.Tensor or a pair of shape and dtype, with two axes or blocking='
        raise ArgumentError(f'plot_layout: tensor must be {kinds}, got {tensor!r}') from error
    if len(tile) not in (2, 3) or min(tile) < 1:
        raise ArgumentError(f'plot_layout: blocking must be 2 or 3 positive extents, got {tuple(tile)}')
    made = make_swizzled_layout(block) if swizzle else make_linear_layout(block)
    return evaluate(made, 'tile', 'shared.dyn', str(block.dtype))


# Drawing -----------------------------------------------------------------------------------------------------------


def _color(index: int) -> tuple[float, ...]:
    """The first 8 indices are the base colors, each further 8 are lighter shades of them; -1 is white."""
    if index < 0:
        return (1.0, 1.0, 1.0)
    light = index // 8 % 4 * 0.22
    parts = [int(_COLORS[index % 8][start : start + 2], 16) / 255 for start in (1, 3, 5)]
    return tuple(part + (1 - part) * light for part in parts)


def _rendered(picture: Layout, kind: str) -> bytes:
    """The picture as SVG or PNG."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        how = 'run: pip install "open-tile-kernels[plots]", or use .text()'
        raise UnsupportedError(f'plot_layout: a picture needs matplotlib; {how}') from None
    grid = picture._grid().cut(_MOST, _MOST)
    rows, columns, tall = len(grid.rows), len(grid.columns), 0.3
    wide = max(0.42, 0.085 * max(map(len, grid.labels.flat)))
    top, bottom = 0.75 + 0.2 * len(grid.notes), 0.75
    size = (max(6.5, columns * wide + 1.1), rows * tall + top + bottom)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size)
        axes = figure.add_axes((0.9 / size[0], bottom / size[1], columns * wide / size[0], rows * tall / size[1]))
        axes.set(xlim=(0, columns), ylim=(rows, 0))
        axes.set_xticks(np.arange(columns) + 0.5, grid.columns, fontsize=8)
        axes.set_yticks(np.arange(rows) + 0.5, grid.rows, fontsize=8)
        axes.tick_params(length=0, labeltop=True, labelbottom=False)
        for (row, column), label in np.ndenumerate(grid.labels):
            color = _color(int(grid.colors[row, column]))
            hatch = '//' if grid.hatched and label != '...' else None
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=color, edgecolor='white', hatch=hatch, lw=1))
            ink = 'white' if np.dot(color, (0.3, 0.59, 0.11)) < 0.5 else 'black' if label != 'idle' else 'grey'
            axes.text(column + 0.5, row + 0.5, label, ha='center', va='center', fontsize=7.5, color=ink)
        _margins(figure, picture, grid)
        data = io.BytesIO()
        metadata = {'Date': None, 'Creator': 'tile_kernels'} if kind == 'svg' else {'Software': 'tile_kernels'}
        figure.savefig(data, format=kind, dpi=150, metadata=metadata)
    return data.getvalue()


def _margins(figure: Any, picture: Layout, grid: Grid) -> None:
    """Title and notes above the cells, legend and conflicts below."""
    from matplotlib.patches import Rectangle

    width, height = figure.get_size_inches()

    def write(x: float, y: float, text: str, points: float = 7.5, **style: Any) -> None:
        figure.text(x / width, y / height, text, fontsize=points, va='center', **style)

    write(0.15, height - 0.22, picture.title, 10, weight='bold')
    for number, note in enumerate(grid.notes):
        write(0.15, height - 0.47 - 0.2 * number, note)
    write(0.15, height - 0.62 - 0.2 * len(grid.notes), grid.corner, 7)
    write(0.9, 0.5, grid.colored_by)
    for number, (color, label) in enumerate(grid.legend):
        left = 1.4 + 0.6 * number
        figure.add_artist(
            Rectangle((left / width, 0.42 / height), 0.18 / width, 0.16 / height, facecolor=_color(color))
        )
        write(left + 0.22, 0.5, label, 7)
    for words in picture._verdict():
        write(0.9, 0.2, words, 8.5)
