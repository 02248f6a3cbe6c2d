"""The learning track: exercises from a copy to a megakernel, checked without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tile_kernels.learn.checks import Result

__all__ = ['check']


def __dir__() -> list[str]:
    return __all__


def check(number: int | str, kernel: Callable[..., Any] | None = None, file: str | Path | None = None) -> Result:
    """Check an exercise, print the report and return it.

    Args:
        number: the exercise, e.g. 5, or '05b' for its planted bug.
        kernel: the builder; not needed with `file`.
        file: a file that defines the builder.
    """
    from tile_kernels.core.errors import ArgumentError
    from tile_kernels.learn.checks import check_builder, check_file
    from tile_kernels.learn.track import parse

    exercise, bug = parse(number)
    if kernel is not None and file is None:
        result = check_builder(exercise, kernel, bug)
    elif file is not None and kernel is None:
        result = check_file(exercise, Path(file), bug)
    else:
        raise ArgumentError('learn.check: give either kernel or file')
    print(result)  # noqa: T201
    return result
