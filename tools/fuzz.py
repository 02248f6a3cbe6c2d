"""Compare kernels with their twins on random calls: `python -m tools.fuzz --calls 10000`.

A call starts from a case that an op declares. Sizes, options, strides and bases are then drawn anew. The kernel runs on
the GPU, or in the interpreter with all checks, from poisoned memory. It must agree with the twin or refuse the call in
one sentence. A call that does neither is made as small as possible and printed as a case.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tile_kernels.core.cases import Case, case_id
from tile_kernels.core.errors import ArgumentError, UnsupportedError
from tile_kernels.core.op import Op
from tile_kernels.core.registry import load_ops
from tile_kernels.testing import contract
from tile_kernels.testing.poison import poisoned

#: Elements of all tensors of a call, at most.
LIMITS = {'cpu': 20_000, 'cuda': 1 << 24}
#: Values that `make` of a case may reject with any exception; such a draw is no call.
NO_CALL = 'no call'


@dataclass(frozen=True)
class Call:
    """A call of an op: the case that its arguments are made of, and the layouts of some of them."""

    op: Op
    case: Case
    layouts: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        layouts = ''.join(f', {name} {layout}' for name, layout in self.layouts.items())
        return f'{self.op.name} dict({", ".join(f"{k}={v!r}" for k, v in self.case.items())}){layouts}'

    def arguments(self, device: str, data: int = 0) -> dict[str, Any]:
        """Fresh arguments, the same at every time; `data` numbers the random contents."""
        given = contract._arguments(self.op, self.case, device, f'{self.op.name}#{data}' if data else None)
        return given | {name: LAYOUTS[layout](given[name]) for name, layout in self.layouts.items()}


def _behind_a_boundary(x: Tensor) -> Tensor:
    """The same elements and strides, one element behind a 16-byte boundary."""
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    memory = torch.empty(extent + 1, dtype=x.dtype, device=x.device)
    return memory[1:].as_strided(x.shape, x.stride(), 1).copy_(x)


def _in_wider_rows(x: Tensor) -> Tensor:
    """The same elements as the first columns of a wider matrix."""
    wide = torch.empty((*x.shape[:-1], x.shape[-1] + 16), dtype=x.dtype, device=x.device)
    return wide[..., : x.shape[-1]].copy_(x)


LAYOUTS = {'behind a boundary': _behind_a_boundary, 'in wider rows': _in_wider_rows}


def seen_values(op: Op) -> dict[str, list[Any]]:
    """For every key of the op's cases the values it has in them."""
    cases = contract.cases_of(op)
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for case in (*cases.smoke, *cases.full, *cases.bench):
        for key, value in case.items():
            found[key].setdefault(repr(value), value)
    return {key: list(values.values()) for key, values in found.items()}


def draw(op: Op, rng: random.Random, limit: int) -> Call | None:
    """A random call within the limit; None if the drawn values do not go together."""
    values = seen_values(op)
    case = dict(rng.choice(contract.cases_of(op).smoke))
    for key, known in values.items():
        if rng.random() < (0.35 if key in case else 0.1):
            case[key] = _drawn(case.get(key), known, rng)
    try:
        with FakeTensorMode():
            given = contract.cases_of(op).arguments(op.name, case)
    except Exception:  # any value may be one that the inputs cannot be made for
        return None
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor) and value.numel() > 0}
    if sum(x.numel() for x in tensors.values()) > limit:
        return None
    return Call(op, case, {name: _layout(x, rng) for name, x in tensors.items() if rng.random() < 0.08})


def _layout(x: Tensor, rng: random.Random) -> str:
    """A layout that a tensor can have; a single row is not wider than it is."""
    return rng.choice(list(LAYOUTS)) if x.dim() > 1 and x.numel() > x.shape[-1] else 'behind a boundary'


def _drawn(value: Any, known: list[Any], rng: random.Random) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.7:
        return max(0, rng.choice((0, 1, value - 1, value + 1, rng.randint(0, 2 * abs(value) + 2))))
    return rng.choice(known)


def outcome(call: Call, device: str) -> str:
    """'agrees', 'refused', `NO_CALL`, or what is wrong, in one line.

    Bounds are relative to the size of a result. Single results may be small by chance, so three are looked at.
    """
    found = 'agrees'
    for data in range(3):
        found = _outcome(call, device, data)
        if 'not close' not in found:
            break
    return found


def _outcome(call: Call, device: str, data: int) -> str:
    try:
        call.arguments(device, data)
    except Exception:
        return NO_CALL
    with poisoned():
        try:
            with contract._running_kernels(device):
                actual = contract._outcome(call.op, call.op.call, call.arguments(device, data))
        except (ArgumentError, UnsupportedError) as error:
            return 'refused' if '\n' not in str(error) else f'refused in several lines: {error}'
        except Exception as error:
            return _line(error)
        try:
            expected = contract._outcome(call.op, call.op.twin, call.arguments(device, data))
            contract.compare('kernel and twin', actual, expected, contract._match(call.op))
        except Exception as error:
            return _line(error)
    return 'agrees'


def _line(error: Exception) -> str:
    text = ' '.join(str(error).split())
    return f'{type(error).__name__}: {text[:300]}'


def is_wrong(found: str) -> bool:
    """Whether an outcome is a fault."""
    return found not in ('agrees', 'refused', NO_CALL)


def smaller(call: Call) -> Iterator[Call]:
    """Calls with one thing less: a layout, a key that some case does without, a smaller number."""
    for name in call.layouts:
        yield replace(call, layouts={key: value for key, value in call.layouts.items() if key != name})
    least = min(contract.cases_of(call.op).smoke, key=len)
    for key, value in call.case.items():
        rest = {other: kept for other, kept in call.case.items() if other != key}
        if key not in least:
            yield replace(call, case=rest)
        if isinstance(value, int) and not isinstance(value, bool):
            yield from (replace(call, case=call.case | {key: less}) for less in {0, 1, value // 2, value - 1} - {value})


def shrink(call: Call, device: str, tries: int = 200) -> Call:
    """The smallest call found that is wrong as well."""
    for other in smaller(call):
        if tries <= 0:
            break
        tries -= 1
        if all(v >= 0 for v in other.case.values() if isinstance(v, int)) and is_wrong(outcome(other, device)):
            return shrink(other, device, tries)
    return call


@dataclass
class Tally:
    """Outcomes of a run: how many calls of each family ended how, and the wrong ones."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    wrong: list[tuple[Call, str]] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [f'{"family":<18}{"calls":>9}{"agree":>9}{"refused":>9}{"wrong":>7}']
        for family, found in sorted(self.counts.items()):
            rows.append(f'{family:<18}{found.total():>9}{found["agrees"]:>9}{found["refused"]:>9}{found["wrong"]:>7}')
        rows += [f'{call}\n    {what}' for call, what in self.wrong]
        return '\n'.join(rows)


def fuzz(ops: list[Op], calls: int, seed: int, device: str, seconds: float = float('inf')) -> Tally:
    """Draw calls of the ops in turn until there are enough, or the time is over."""
    rng, tally, end = random.Random(seed), Tally(), time.monotonic() + seconds
    made, turns = 0, 0
    faulty: Counter[str] = Counter()
    while made < calls and time.monotonic() < end and turns < 50 * calls:
        op = ops[turns % len(ops)]
        turns += 1
        call = draw(op, rng, LIMITS[device]) if faulty[op.name] < 3 else None
        found = outcome(call, device) if call is not None else NO_CALL
        if call is None or found == NO_CALL:
            continue
        made += 1
        tally.counts[op.family]['wrong' if is_wrong(found) else found] += 1
        if is_wrong(found):
            faulty[op.name] += 1
            least = shrink(call, device)
            tally.wrong.append((least, outcome(least, device)))
    return tally


def selected(words: list[str]) -> list[Op]:
    """Ops with cases, by name or family; all of them without a word."""
    ops = [op for op in load_ops().values() if op.case_set is not None]
    chosen = [op for op in ops if not words or op.name in words or op.family in words]
    if not chosen:
        raise SystemExit(f'fuzz: no op is called {", ".join(words)}')
    return chosen


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('ops', nargs='*', metavar='OP', help='names of ops or families (default: all)')
    parser.add_argument('--calls', type=int, default=1000)
    parser.add_argument('--seconds', type=float, default=float('inf'), help='stop after this time')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--json', type=Path, help='write the counts and the wrong calls')
    given = parser.parse_args(arguments)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    logging.getLogger('torch._subclasses.fake_tensor').setLevel(logging.CRITICAL)  # draws that do not go together
    tally = fuzz(selected(given.ops), given.calls, given.seed, device, given.seconds)
    print(tally)
    if given.json:
        wrong = [{'op': c.op.name, 'case': case_id(c.case), 'layouts': c.layouts, 'found': w} for c, w in tally.wrong]
        given.json.write_text(
            json.dumps({'seed': given.seed, 'device': device, 'counts': tally.counts, 'wrong': wrong})
        )
    return 1 if tally.wrong else 0


if __name__ == '__main__':
    sys.exit(main())
