"""The source line of every statement of a lowered kernel.

TileLang keeps the line of most loops and stores. Copies by TMA, stores by intrinsics and expanded products lose theirs.
They get the line of the tile-level statement that names the same buffers, else that of the loop around them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tile_kernels.interpreter.engine.source import Source
from tile_kernels.interpreter.errors import Site

#: File and line of a statement.
Place = tuple[str, int]

#: The place of what the compiler added and no line asked for.
GENERATED: Place = ('', 0)

_FOREIGN = ('/site-packages/tilelang/', '/tilelang/language/')


# Reading TIR -------------------------------------------------------------------------------------------------------


def walk(node: Any) -> list[Any]:
    """All nodes of a statement or expression, children first."""
    from tilelang import tvm

    found: list[Any] = []
    tvm.tirx.stmt_functor.post_order_visit(node, found.append)
    return found


def calls_of(node: Any) -> dict[str, Any]:
    """The intrinsics in a statement or expression by name, without their namespace."""
    return {part.op.name.split('.')[-1]: part for part in walk(node) if type(part).__name__ == 'Call'}


def pointers_of(node: Any, scope: str = '') -> dict[Any, str]:
    """The data pointers in a statement or expression with the names of their buffers, in a scope or all."""
    found: dict[Any, str] = {}
    for part in walk(node):
        kind = type(part).__name__
        if kind in ('BufferLoad', 'BufferStore') and str(part.buffer.scope()).startswith(scope):
            found[part.buffer.data] = part.buffer.name
        elif kind == 'Var' and str(part.dtype) == 'handle' and part.type_annotation.storage_scope.startswith(scope):
            found.setdefault(part, part.name)
    return found


def buffers_of(node: Any, scope: str = '') -> set[str]:
    """Names of the buffers in a statement or expression; a TMA descriptor has the name of its tensor."""
    found = pointers_of(node, scope)
    return {name.removesuffix('_desc') for pointer, own in found.items() for name in (pointer.name, own)}


def is_loop(node: Any) -> bool:
    """Whether a statement is a `for` loop."""
    return type(node).__name__ == 'For'


def targets_of(node: Any) -> set[str]:
    """The buffers to which a tile-level statement copies or stores."""
    if type(node).__name__ == 'BufferStore':
        return {node.buffer.name}
    return {
        name for call, found in calls_of(node).items() if call.endswith('copy') for name in buffers_of(found.args[1])
    }


def children(node: Any) -> list[Any]:
    """The statements directly inside a statement."""
    kind = type(node).__name__
    if kind == 'SeqStmt':
        return list(node.seq)
    if kind == 'IfThenElse':
        return [node.then_case] if node.else_case is None else [node.then_case, node.else_case]
    inner = node.block if kind == 'SBlockRealize' else getattr(node, 'body', None)
    return [] if inner is None else [inner]


def leaves(node: Any, twice: bool = False, loops: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The innermost statements in program order with the loops around them; `twice` runs sequential loops two times."""
    inner, kind = children(node), type(node).__name__
    if not inner:
        yield node, loops
    loops = (*loops, node) if kind == 'For' else loops
    for _ in range(2 if twice and kind == 'For' and int(node.kind) == 0 else 1):
        for part in inner:
            yield from leaves(part, twice, loops)


# Places ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """A loop, a condition or an innermost statement of the tile-level TIR, its place, and the loops around it."""

    node: Any
    place: Place
    loops: tuple[Any, ...]


def written(prim_func: Any) -> list[Written]:
    """The loops, conditions and innermost statements of a PrimFunc in program order."""
    source, found = Source(''), []

    def read(node: Any, outer: Site, loops: tuple[Any, ...]) -> None:
        site, inner, loop = source.site_of(node, outer), children(node), is_loop(node)
        if loop or not inner or type(node).__name__ == 'IfThenElse':
            found.append(Written(node, (site.file, site.line), loops))
        for part in inner:
            read(part, site, (*loops, node) if loop else loops)

    read(prim_func.body, Site(''), ())
    return found


def places(prim_func: Any, device_func: Any) -> dict[Any, Place]:
    """The place of every statement of a device function that was lowered from a PrimFunc."""
    return _Places(prim_func).of(device_func.body)


def _span(node: Any) -> Place:
    """The line that a statement itself carries, which may lie in a file of TileLang."""
    from tilelang.ir import get_stmt_span

    span = get_stmt_span(node)
    return GENERATED if span is None else (str(span.source_name.name), int(span.line))


def _is_users(place: Place) -> bool:
    return place != GENERATED and not any(part in place[0] for part in _FOREIGN)


def _kind(words: set[str]) -> str:
    """What a statement does, from the names of its intrinsics and of TileLang's file that wrote it."""
    if any('gemm' in word or 'mma' in word or 'ldmatrix' in word for word in words):
        return 'product'
    return 'reduce' if any('reduce' in word for word in words) else 'other'


@dataclass(frozen=True)
class _Candidate:
    place: Place
    kind: str
    buffers: frozenset[str]
    targets: frozenset[str]
    loops: frozenset[str]


class _Places:
    """Finds places in one kernel; statements that differ in nothing else are told apart by their order."""

    def __init__(self, prim_func: Any) -> None:
        statements = written(prim_func)
        self.candidates = []
        for item in statements:
            node = getattr(item.node, 'condition', item.node)
            if item.place[1] and not is_loop(node):
                kind, loops = _kind(set(calls_of(node))), frozenset(loop.loop_var.name for loop in item.loops)
                names = frozenset(buffers_of(node)), frozenset(targets_of(node))
                self.candidates.append(_Candidate(item.place, kind, *names, loops))
        every = [item for item in statements if is_loop(item.node)]
        self.loops = {item.place: item.node.loop_var.name for item in reversed(every)}
        self.loop_of = {name: place for place, name in self.loops.items()}
        self.turns: dict[tuple[_Candidate, ...], int] = defaultdict(int)
        self.chosen: dict[tuple[Any, tuple[_Candidate, ...]], Place] = {}
        self.found: dict[Any, Place] = {}

    def of(self, body: Any) -> dict[Any, Place]:
        """Places of all statements under `body`."""
        self._visit(body, GENERATED, frozenset(), None)
        return self.found

    def _visit(self, node: Any, outer: Place, loops: frozenset[str], scope: Any) -> None:
        kind, inner, place = type(node).__name__, children(node), _span(node)
        if kind == 'For':
            place = place if place != GENERATED else self.loop_of.get(node.loop_var.name, GENERATED)
            loops |= {node.loop_var.name}
        elif kind == 'AttrStmt' and str(node.attr_key) == 'lexical_alloc_scope':
            scope = node
        if not _is_users(place) and (not inner or kind == 'IfThenElse' or (kind == 'For' and place != GENERATED)):
            place = self._by_buffers(getattr(node, 'condition', node), place[0], loops, scope)
        elif not inner and place in self.loops:  # a vectorized loop gives its place to the statement inside
            inside = self._by_buffers(node, '', frozenset({self.loops[place]}), None, inside=True)
            place = inside if inside != GENERATED else place
        self.found[node] = place = place if _is_users(place) else outer
        for part in inner:
            self._visit(part, place if kind == 'For' else outer, loops, scope)

    def _by_buffers(self, node: Any, file: str, loops: frozenset[str], scope: Any, inside: bool = False) -> Place:
        """The place of the written statement with the same buffers: of a product its operands and accumulator.

        With `inside` only statements inside one of the loops count.
        """
        names, own = set(calls_of(node)), buffers_of(node)
        kind = _kind({*names, file.rpartition('/')[2]})
        near = own | buffers_of(scope) if kind == 'product' and scope is not None else own
        target = own if any(name.startswith(('stg', 'tma_store', 'atomic')) for name in names) else targets_of(node)
        marks = {
            item: [
                len(both)
                for both in (item.targets & target, item.buffers & own, item.buffers & near, item.loops & loops)
            ]
            for item in self.candidates
            if item.kind == kind and item.buffers & near and (not inside or item.loops & loops)
        }
        best = max(marks.values(), default=None)
        equal = tuple(item for item, mark in marks.items() if mark == best)
        if not equal:
            return GENERATED
        key = (scope, equal)
        if scope is None or key not in self.chosen:
            self.chosen[key] = equal[self.turns[equal] % len(equal)].place
            self.turns[equal] += 1
        return self.chosen[key]
