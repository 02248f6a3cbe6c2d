"""Conditions on the counts of a kernel: what makes it lean, in one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tile_kernels.learn.track import Case, Condition
from tile_kernels.sight.count import Access, Counts

#: An access with less than this part of the traffic does not matter.
SMALL = 0.02


@dataclass(frozen=True)
class Facts:
    """What is known of a kernel at its lean case.

    Attributes:
        case: the case.
        launches: the counts of every launch.
        sources: the CUDA source of every launch.
        sizes: bytes of every argument by name, after the names of `Exercise.launches`.
    """

    case: Case
    launches: tuple[Counts, ...]
    sources: tuple[str, ...]
    sizes: dict[str, int]

    def accesses(self, space: str, buffer: str | None = None, writes: bool | None = None) -> list[Access]:
        """Accesses of 'global' or 'shared' memory, of one buffer or all, of reads, writes or both."""
        return [
            a
            for counts in self.launches
            for a in counts.accesses
            if a.space == space and buffer in (None, a.buffer) and writes in (None, a.writes)
        ]

    def requested(self, buffer: str | None = None, writes: bool | None = None) -> float:
        """Requested bytes of global memory."""
        return float(sum(a.bytes for a in self.accesses('global', buffer, writes)))

    def event(self, name: str) -> float:
        """Instructions of a class, e.g. 'barrier', 'shuffle', 'sfu', 'wgmma', 'mma'."""
        return sum(counts.events.get(name, 0) for counts in self.launches)

    @property
    def blocks(self) -> int:
        """Thread blocks of all launches."""
        return sum(counts.blocks for counts in self.launches)


def where(access: Access) -> str:
    """The line of an access, in words."""
    return f' (line {access.line})' if access.line else ''


def _large(facts: Facts, space: str) -> list[Access]:
    found = facts.accesses(space)
    total = sum(a.bytes for a in found)
    return [a for a in found if a.bytes > SMALL * total]


def _first(accesses: Iterable[Access], fault: Callable[[Access], str | None]) -> str | None:
    return next((text for text in map(fault, accesses) if text is not None), None)


def condition(sentence: str) -> Callable[[Callable[[Facts], str | None]], Condition]:
    """A decorator: the function returns None, or what was counted instead."""
    return lambda against: Condition(sentence, against)


def launches(number: int = 1) -> Condition:
    """There are so many launches."""

    def against(facts: Facts) -> str | None:
        got = len(facts.launches)
        return None if got == number else f'{got} launches instead of {number}'

    return Condition(f'{number} launch{"es" if number > 1 else ""}', against)


def traffic(most: float = 1.05, **names: str) -> Condition:
    """All launches together move at most `most` times the bytes of the tensors; `names` are 'read' or 'write'."""

    def against(facts: Facts) -> str | None:
        least = sum(facts.sizes[name] for name in names)
        got = facts.requested()
        if got <= most * least:
            return None
        spare = {
            (name, how): facts.requested(name, how == 'write') - facts.sizes[name] * (names[name] == how)
            for name in names
            for how in ('write', 'read')
        }
        name, how = max(spare, key=lambda key: spare[key])
        times = facts.requested(name, how == 'write') / facts.sizes[name]
        word = 'written' if how == 'write' else 'read'
        return f'{got / 1e6:.1f} MB move, {least / 1e6:.1f} MB are needed: {name} is {word} {times:.2g} times'

    return Condition('every byte moves once', against)


def once(buffer: str, writes: bool = False, most: float = 1.05) -> Condition:
    """One tensor is read, or written, once."""
    how = 'written' if writes else 'read'

    def against(facts: Facts) -> str | None:
        times = facts.requested(buffer, writes) / max(facts.sizes[buffer], 1)
        lines = sorted({a.line for a in facts.accesses('global', buffer, writes) if a.line})
        place = f' (line {", ".join(map(str, lines))})' if lines else ''
        return None if times <= most else f'{buffer} is {how} {times:.3g} times{place}'

    return Condition(f'{buffer} is {how} once', against)


def wide(size: int = 16, *buffers: str) -> Condition:
    """A lane moves so many bytes of global memory at a time; of all large accesses, or of these buffers."""

    def fault(access: Access) -> str | None:
        if access.width >= size or (buffers and access.buffer not in buffers):
            return None
        return (
            f'a thread {"writes" if access.writes else "reads"} {access.width} bytes of {access.buffer} at a time'
            + (where(access))
        )

    return Condition(f'a thread moves {size} bytes at a time', lambda facts: _first(_large(facts, 'global'), fault))


def whole_sectors(most: float = 1.1) -> Condition:
    """Warps touch at most `most` times the fewest sectors that hold their bytes."""

    def fault(access: Access) -> str | None:
        if access.sectors <= most * access.least_sectors:
            return None
        times = access.sectors / access.least_sectors
        how = 'write' if access.writes else 'read'
        return f'warps {how} {times:.3g} times the sectors that {access.buffer} needs' + where(access)

    return Condition('whole 32-byte sectors', lambda facts: _first(_large(facts, 'global'), fault))


def no_conflicts(most: float = 1.0) -> Condition:
    """Accesses to shared memory take the fewest passes."""

    def fault(access: Access) -> str | None:
        if access.wavefronts <= most * access.least_wavefronts:
            return None
        times = access.wavefronts / access.least_wavefronts
        how = 'write' if access.writes else 'read'
        return f'lanes that {how} {access.buffer} meet {times:.3g}-way in its banks' + where(access)

    return Condition('no bank conflicts', lambda facts: _first(_large(facts, 'shared'), fault))


def no_shared() -> Condition:
    """No launch uses shared memory."""

    def against(facts: Facts) -> str | None:
        got = max(counts.shared for counts in facts.launches)
        found = facts.accesses('shared')
        return f'a block uses {got} bytes of shared memory' + (where(found[0]) if found else '') if got else None

    return Condition('no shared memory', against)


def barriers(most: float, per: Callable[[Case], Any], of: str) -> Condition:
    """At most so many block-wide barriers per unit of work, e.g. `barriers(1, lambda case: case['rows'], 'row')`."""

    def against(facts: Facts) -> str | None:
        got = facts.event('block_barrier') / per(facts.case)
        return None if got <= most * (1 + 1e-6) else f'{got:.3g} barriers of the whole block for a {of}'

    return Condition(f'at most {most:g} barrier{"s" if most > 1 else ""} for a {of}', against)


def tensor_cores(flops: Callable[[Case], float]) -> Condition:
    """All operations of the products run on tensor cores."""

    def against(facts: Facts) -> str | None:
        got = sum(sum(counts.flops.values()) for counts in facts.launches)
        share = got / flops(facts.case)
        return None if share >= 0.99 else f'{100 * share:.0f} % of the operations run on tensor cores'

    return Condition('products run on tensor cores', against)
