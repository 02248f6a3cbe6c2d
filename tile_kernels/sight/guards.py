"""Finds stores in generated CUDA that lost their condition.

TileLang 0.1.15 moves a store that converts its dtype out of the loop body of `T.Parallel`. The numbers go to a local
buffer, `y_local_cast`, and one vector store follows. It repeats a single `if` around that store. Of nested conditions
it repeats only the outer one, and with an `else` none. The store then writes what nobody computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_CAST = re.compile(r'\b(\w+?)_local_cast(?:_\d+)?\b')
_DECLARED = re.compile(r'(?:alignas\(\d+\) )?[\w:]+ \w+_local_cast(?:_\d+)?\[\d+\];')
_ELSE = re.compile(r'\} else\b.*\{')

#: The conditions around a line: the text of each `if`, and the number of its branch.
_Path = tuple[tuple[str, int], ...]


def lost_guards(source: str) -> list[str]:
    """The buffers that a kernel stores to under fewer conditions than those under which it computes the numbers."""
    found: list[str] = []
    filled: dict[str, list[_Path]] = {}
    for line, path in _lines(source):
        target, _, value = line.partition(' = ')
        for match in _CAST.finditer(line):
            name, buffer = match.group(0), match.group(1)
            if _DECLARED.fullmatch(line):
                filled[name] = []
            elif name in target:
                filled.setdefault(name, []).append(path)
            elif name in value and not _covered(filled.get(name, []), path) and buffer not in found:
                found.append(buffer)
    return found


def _lines(source: str) -> Iterator[tuple[str, _Path]]:
    """The lines of generated code with the conditions around them."""
    blocks: list[tuple[str, int]] = []
    for text in source.splitlines():
        line = text.strip()
        closed = blocks.pop() if line.startswith('}') and blocks else ('', 0)
        yield line, tuple(block for block in blocks if block[0])
        if _ELSE.match(line):
            blocks.append((closed[0], closed[1] + 1))
        elif line.endswith('{'):
            blocks.append((line if line.startswith('if') else '', 0))


def _covered(fills: list[_Path], path: _Path) -> bool:
    """Whether the numbers of a store were computed whenever it runs: under its conditions, or in both branches."""
    branches = {(condition, 1 - branch) for fill in fills for condition, branch in fill[-1:]}
    both = any(fill[-1] in branches for fill in fills if fill)
    return not fills or both or any(set(fill) <= set(path) for fill in fills)
