"""Answers and planted bugs in one compressed file: out of sight, yet in the wheel.

`python -m tile_kernels.learn.pack` writes the file from a checkout.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

from tile_kernels.core.errors import ArgumentError

PACKED = Path(__file__).parent / 'answers.bin'
SOURCES = Path(__file__).parents[2] / 'tests' / 'learn'


def sources() -> dict[str, str]:
    """Answers and bugs of a checkout, e.g. 'answers/05b_transpose' and 'bugs/05b_transpose'."""
    paths = sorted(path for kind in ('answers', 'bugs') for path in SOURCES.glob(f'{kind}/[0-9]*.py'))
    return {f'{path.parent.name}/{path.stem}': path.read_text(encoding='utf-8') for path in paths}


def pack(answers: Mapping[str, str]) -> bytes:
    """The bytes of the packed file."""
    return zlib.compress(json.dumps(answers, sort_keys=True).encode(), 9)


def unpacked() -> dict[str, str]:
    """What the packed file holds."""
    return json.loads(zlib.decompress(PACKED.read_bytes()))


def packed(kind: str, name: str) -> str:
    """One source of a kind, 'answers' or 'bugs', and a name such as '05b_transpose'."""
    found = unpacked().get(f'{kind}/{name}')
    if found is None:
        raise ArgumentError(f'learn: the package holds nothing for {name}; reinstall it')
    return found


def main() -> int:
    """Write the packed file from a checkout."""
    found = sources()
    if not found:
        sys.stderr.write(f'learn.pack: needs a checkout with {SOURCES}\n')
        return 1
    PACKED.write_bytes(pack(found))
    return 0


if __name__ == '__main__':
    sys.exit(main())
