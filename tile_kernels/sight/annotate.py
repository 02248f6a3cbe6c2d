"""The generated CUDA beside the source lines it comes from, with bytes, sectors, conflicts and FLOP of each line."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tile_kernels.core import nvcc
from tile_kernels.sight.count import Counts, count
from tile_kernels.sight.lines import GENERATED, Place, places
from tile_kernels.sight.lower import lower
from tile_kernels.sight.subject import Subject, resolve

_MARK = 'tile_kernels_line'


@dataclass
class Line:
    """What one source line does over the grid.

    Attributes:
        file: the source file; empty for what the compiler added.
        line: the line of the file.
        bytes: requested bytes of global memory.
        sectors: 32-byte sectors of global memory.
        least_sectors: the fewest sectors that hold these bytes.
        wavefronts: passes through shared memory.
        least_wavefronts: the passes without bank conflicts.
        flops: operations of matrix products.
    """

    file: str
    line: int
    bytes: float = 0
    sectors: float = 0
    least_sectors: float = 0
    wavefronts: float = 0
    least_wavefronts: float = 0
    flops: float = 0

    @property
    def source(self) -> str:
        """The text of the line."""
        return linecache.getline(self.file, self.line).strip() if self.line else 'generated'

    def __str__(self) -> str:
        cells = [f'{self.line:5}' if self.line else '    -', _short(self.bytes), _short(self.sectors)]
        cells += [_times(self.sectors, self.least_sectors), _times(self.wavefronts, self.least_wavefronts)]
        return f'{cells[0]}{cells[1]:>9}{cells[2]:>9}{cells[3]:>7}{cells[4]:>10}{_short(self.flops):>9}  {self.source}'


@dataclass(frozen=True)
class Annotated:
    """One device function: its source lines that move data or multiply, and its CUDA with the place of each line."""

    name: str
    lines: list[Line]
    cuda: list[tuple[Place | None, str]] = field(repr=False)

    def __str__(self) -> str:
        return '\n'.join([*self._table(), '', *self._cuda()]).rstrip()

    def _table(self) -> Iterator[str]:
        yield f'{self.name}: totals of the grid; waste is sectors, conflicts are passes, each over the fewest possible'
        for number, line in enumerate(self.lines):
            if number == 0 or self.lines[number - 1].file != line.file:
                yield Path(line.file).name if line.file else 'added by the compiler'
                yield ' line    bytes  sectors  waste conflicts     FLOP  source'
            yield str(line)

    def _cuda(self) -> Iterator[str]:
        before: Place | None = None
        first = next(n for n, (_, text) in enumerate(self.cuda) if text.startswith('extern') and text.endswith('{'))
        for place, text in self.cuda[first:]:
            if place is not None and place != before:
                line, indent = Line(*place), text[: len(text) - len(text.lstrip())]
                yield (
                    f'{indent}// {Path(line.file).name}:{line.line}  {line.source}'
                    if line.line
                    else f'{indent}// generated'
                )
                before = place
            yield text


class Annotations(list[Annotated]):
    """The device functions of a kernel; prints as text."""

    def __str__(self) -> str:
        return '\n\n'.join(map(str, self))


def annotate(kernel: Any, *args: Any, device: str = 'h200', **named: Any) -> Annotations:
    """The CUDA of a kernel with the source lines it comes from; needs neither a GPU nor nvcc.

    Args:
        kernel: a kernel, a builder or an op, as `tile_kernels.sight.subject.resolve` takes it.
        args: arguments of the kernel or the builder.
        device: the GPU to compile for.
        named: dynamic extents, arguments of the builder or entries of the case.
    """
    found = Annotations()
    for subject in resolve(kernel, *args, device=device, **named):
        lowered = lower(subject)
        for counts, (name, function) in zip(count(subject, lowered), lowered.functions.items(), strict=True):
            found.append(Annotated(name, lines_of(counts), _placed_cuda(subject, name, function)))
    return found


def lines_of(counts: Counts) -> list[Line]:
    """What each source line does, in the order of files and lines; what the compiler added comes last."""
    found: dict[Place, Line] = {}
    for access in counts.accesses:
        line = found.setdefault((access.file, access.line), Line(access.file, access.line))
        line.bytes += access.bytes if access.space == 'global' else 0
        for name in ('sectors', 'least_sectors', 'wavefronts', 'least_wavefronts'):
            setattr(line, name, getattr(line, name) + getattr(access, name))
    for place, flops in counts.flops_at.items():
        found.setdefault(place, Line(*place)).flops += flops
    return [found[place] for place in sorted(found, key=lambda place: (place == GENERATED, place))]


def _placed_cuda(subject: Subject, name: str, function: Any) -> list[tuple[Place | None, str]]:
    """The lines of the CUDA of a function, each with its place, or None for braces, conditions and declarations.

    The function is generated a second time, with a mark before each statement. The marks are then taken out.
    """
    from tilelang import tvm
    from tilelang.engine.lower import create_backend_context, device_codegen_without_compile

    tirx, place_of = tvm.tirx, places(subject.prim_func, function)
    place_of |= {node.loop_var: place for node, place in place_of.items() if type(node).__name__ == 'For'}
    known = list(dict.fromkeys(place_of.values()))

    def mark(node: Any) -> Any:
        place = place_of.get(node.loop_var if type(node).__name__ == 'For' else node)
        if place is None:
            return None
        return tirx.SeqStmt([tirx.Evaluate(tirx.call_extern('int32', _MARK, known.index(place))), node])

    kinds = [f'tirx.{kind}' for kind in ('Evaluate', 'BufferStore', 'Bind', 'For')]
    marked = function.with_body(tirx.stmt_functor.ir_transform(function.body, None, mark, kinds))
    target = tvm.target.Target({'kind': 'cuda', 'arch': subject.gpu.target})
    with nvcc.quiet(), target, tvm.transform.PassContext(opt_level=3, config=subject.pass_configs):
        module = tvm.IRModule({tvm.ir.GlobalVar(name): marked})
        source = device_codegen_without_compile(module, create_backend_context(target, None, 'auto')).inspect_source()
    found: list[tuple[Place | None, str]] = []
    place: Place | None = None
    for text in source.splitlines():
        number = re.match(rf'\s*{_MARK}\((\d+)\)', text)
        if number:
            place = known[int(number[1])]
        else:
            found.append((None if re.match(r'\s*(if\b|[{}]|$)', text) else place, text))
    return found


def _short(number: float) -> str:
    """A count in at most five characters."""
    for unit, size in (('T', 1e12), ('G', 1e9), ('M', 1e6), ('k', 1e3)):
        if number >= size:
            return f'{number / size:.3g}{unit}' if number < 999.5 * size else f'{number / size:.0f}{unit}'
    return f'{number:.0f}' if number else '-'


def _times(used: float, least: float) -> str:
    return f'{used / least:.3g}x' if least and used > least else '-'
