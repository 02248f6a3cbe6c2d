"""Finds loads and stores in generated CUDA that lost their condition.

TileLang 0.1.15 moves loads and stores out of a vectorized loop of `T.Parallel` that converts a dtype. The numbers pass
through a local buffer, `y_local_cast`, which one vector load fills or one vector store empties. That access repeats a
single `if` of the loop body. It drops inner conditions of nested ones, those with an `else`, and those of
`T.if_then_else`. The store then writes what nobody computed; the load reads behind the end of its tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_CAST = re.compile(r'\b(\w+?)_local_cast(?:_\d+)?\b')
_DECLARED = re.compile(r'(?:alignas\(\d+\) )?[\w:]+ \w+_local_cast(?:_\d+)?\[\d+\];')
_ELSE = re.compile(r'\} else\b.*\{')
_POINTER = re.compile(r'\* (?:__restrict__ )?(\w+)')
#: The loop over the numbers of a vector has another name in every copy of it.
_STEP = re.compile(r'\bvec(?:_copy)?(?:_s)?(?:_\d+)?\b')

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


def unguarded_loads(source: str) -> list[str]:
    """The tensors that a kernel loads from under fewer conditions than those under which it needs the numbers."""
    signatures = (re.split(r'\) \{\n', part, maxsplit=1)[0] for part in source.split('__launch_bounds__')[1:])
    tensors = {name for signature in signatures for name in _POINTER.findall(signature)}
    loaded: dict[str, tuple[str, _Path]] = {}
    bare: dict[str, str] = {}  # buffers that were only used under more conditions so far
    found: list[str] = []
    for line, path in _lines(source):
        target, _, value = line.partition(' = ')
        for match in _CAST.finditer(line):
            name = match.group(0)
            if _DECLARED.fullmatch(line):
                found += [bare.pop(name)] if name in bare else []
                loaded.pop(name, None)
            elif name in target:
                source_of = next((tensor for tensor in tensors if re.search(rf'\b{tensor}\b(?: \+|\[)', value)), '')
                loaded |= {name: (source_of, path)} if source_of else {}
            elif name in value and name in loaded:
                tensor, outer = loaded[name]
                if '?' in value or set(outer) < set(path):
                    bare[name] = tensor
                else:
                    bare.pop(name, None)
                    del loaded[name]
    return list(dict.fromkeys([*found, *bare.values()]))


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
            blocks.append((_STEP.sub('vec', line) if line.startswith('if') else '', 0))


def _covered(fills: list[_Path], path: _Path) -> bool:
    """Whether the numbers of a store were computed whenever it runs: under its conditions, or in both branches."""
    branches = {(condition, 1 - branch) for fill in fills for condition, branch in fill[-1:]}
    both = any(fill[-1] in branches for fill in fills if fill)
    return not fills or both or any(set(fill) <= set(path) for fill in fills)
