"""The origin of statements: file and line of the user's program."""

from __future__ import annotations

import linecache
import re
from typing import Any

from tile_kernels.interpreter.errors import Site

# Operators that are macros: their statements have line numbers of TileLang's own files.
_MACRO_FILES = {
    'reduce_op.py': r'\breduce\w*\(',
    'scan_op.py': r'\bcum(sum|max)\w*\(',
    'debug.py': r'\bdevice_assert\(',
    'print.py': r'\bprint\(',
}
_REACH = 40  # number of lines to search for the call of a macro


class Source:
    """Finds the site of each statement; statements are visited in program order."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.last = Site(kernel)
        self.sites: dict[tuple[str, int], Site] = {}

    def site_of(self, node: Any, outer: Site) -> Site:
        """The user's line of a statement; a statement without a line gets that of its parent."""
        from tilelang.ir import get_stmt_span

        span = get_stmt_span(node)
        if span is None:
            return outer
        file, line = str(span.source_name.name), int(span.line)
        if '/site-packages/tilelang/' in file or '/tilelang/language/' in file:
            return self._call_of(_MACRO_FILES.get(file.rsplit('/', 1)[-1]))
        known = self.sites.get((file, line))
        if known is None:
            known = self.sites[file, line] = Site(self.kernel, file, line)
        self.last = known
        return known

    def _call_of(self, pattern: str | None) -> Site:
        """The line that calls a macro: the first match after the last user statement."""
        if pattern is not None:
            for line in range(self.last.line, self.last.line + _REACH):
                if re.search(pattern, linecache.getline(self.last.file, line)):
                    return Site(self.kernel, self.last.file, line)
        return self.last
