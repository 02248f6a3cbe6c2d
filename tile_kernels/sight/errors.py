"""Explain errors of TileLang, nvcc and CUDA: cause, action and source line of a text or an exception."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tile_kernels.core import diagnoses, nvcc
from tile_kernels.core.errors import KernelError, TileKernelsError
from tile_kernels.sight.count import Access, count
from tile_kernels.sight.layouts import layouts_of
from tile_kernels.sight.lower import lower
from tile_kernels.sight.subject import Subject, resolve

#: Places in a text: TileLang's `--> file:line:column` and nvcc's `file(line): error`.
_PLACES = (r'--> (?P<file>[^\s:]+):(?P<line>\d+)', r'(?m)^(?P<file>[^\s(]+)\((?P<line>\d+)\): error')

#: Files that are not the user's.
_FOREIGN = re.compile(r'/(site-packages|dist-packages|tile_kernels|lib/python[\d.]+)/|^<')


@dataclass(frozen=True)
class Diagnosis:
    """The explanation of an error.

    Attributes:
        cause: What is wrong; for an unknown error its text, unchanged.
        action: What to do; empty for an unknown error.
        line: Source line as `file:line`, if it is known.
        quoted: The words of the error that led to the diagnosis.
    """

    cause: str
    action: str
    line: str | None
    quoted: str

    @property
    def known(self) -> bool:
        """Whether the table has a row for this error."""
        return bool(self.action)

    def __str__(self) -> str:
        if not self.known:
            return self.cause
        return f'{self.cause}; {self.action}' + (f' (at {self.line})' if self.line else '')


def explain_error(
    error_or_text: BaseException | str, kernel: Any = None, *args: Any, device: str = 'h200', **named: Any
) -> Diagnosis:
    """Explain an exception, or the text of one; an unknown text passes through unchanged.

    Args:
        error_or_text: the exception or its text.
        kernel: the kernel, builder or op that failed, if it is known; it adds its numbers, buffers and lines.
        args: arguments of the kernel or the builder.
        device: the GPU on which it failed.
        named: dynamic extents, arguments of the builder or entries of the case.
    """
    text = error_or_text if isinstance(error_or_text, str) else str(error_or_text)
    line = _line_in(text)
    if line is None and isinstance(error_or_text, BaseException):
        line = _line_of(error_or_text)
    found = diagnoses.find(text)
    if found is None:
        return Diagnosis(text, '', line, text)
    cause, action = diagnoses.words(*found)
    if kernel is not None and found[0].topic:
        details, place = _details(found[0].topic, resolve(kernel, *args, device=device, **named))
        cause, line = f'{cause} ({details})' if details else cause, place or line
    return Diagnosis(cause, action, line, found[1][0])


def _details(topic: str, subjects: list[Subject]) -> tuple[str, str | None]:
    """What the kernel tells about an error: its buffers by size, its registers, or the access that is not aligned."""
    for subject in subjects:
        lowered = lower(subject)
        if topic == 'shared':
            shared = [item for item in layouts_of(subject).values() if item.scope.startswith('shared')]
            shared.sort(key=lambda item: -item.offsets.size * item.bits)
            return ', '.join(f'{item.buffer} {item.offsets.size * item.bits / 8192:.3g} KB' for item in shared), None
        if topic == 'registers':
            registers = nvcc.resources(lowered.source, subject.gpu.target)['registers']
            threads = max(counts.threads for counts in count(subject, lowered))
            return f'{registers} registers x {threads} threads = {registers * threads}', None
        wrong: list[Access] = []

        def watch(access: Access, address: Any, active: Any, weight: float, wrong: list[Access] = wrong) -> None:
            if (address[active] % min(16, access.width)).any():
                wrong.append(access)

        count(subject, lowered, watch)
        if wrong:
            return f'{wrong[0].width} bytes of {wrong[0].buffer}', f'{wrong[0].file}:{wrong[0].line}'
    return '', None


@contextmanager
def explaining(kernel: Any = None, *args: Any, **named: Any) -> Iterator[None]:
    """Raise known errors of the block as one sentence, a `KernelError`; the original is its `__cause__`.

    `kernel` and its arguments, if they are given, are those of `explain_error`.
    """
    try:
        yield
    except TileKernelsError:
        raise
    except Exception as error:
        found = explain_error(error, kernel, *args, **named)
        if not found.known:
            raise
        raise KernelError(str(found)) from error


def _line_in(text: str) -> str | None:
    for pattern in _PLACES:
        match = re.search(pattern, text)
        if match:
            return f'{match["file"]}:{match["line"]}'
    return None


def _line_of(error: BaseException) -> str | None:
    """The innermost line of the traceback that lies in the user's file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _FOREIGN.search(frame.filename)]
    return f'{frames[-1].filename}:{frames[-1].lineno}' if frames else None
