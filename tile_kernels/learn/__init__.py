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
    from tile_kernels.learn.checks import Failed, Result, check_builder, check_submission, load
    from tile_kernels.learn.track import parse

    exercise, bug = parse(number)
    if (kernel is None) == (file is None):
        raise ArgumentError('learn.check: give either kernel or file')
    if kernel is not None:
        result = check_builder(exercise, kernel, bug)
    else:
        try:
            result = check_submission(load(exercise, Path(str(file))), bug)
        except Failed as failure:
            result = Result(exercise, bug, 'right', list(failure.args))
    print(result)  # noqa: T201
    return result
