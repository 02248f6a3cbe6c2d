"""The pages of `docs/notebooks` as Jupyter notebooks: one for each family, made of Markdown with programs and outputs.

python -m tools.docs.notebooks FOLDER
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tile_kernels.learn.notebook import cell, document

PAGES = Path(__file__).parents[2] / 'docs' / 'notebooks'

#: A program of a page, and what it prints.
PROGRAM = re.compile(r'```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?', re.DOTALL)


def notebook(page: str) -> dict[str, Any]:
    """A page as a notebook; links to other pages, which a notebook does not have beside it, become text."""
    cells: list[dict[str, Any]] = []
    prose, *rest = PROGRAM.split(page)
    for text, program, output in zip([prose, *rest[2::3]], [*rest[::3], None], [*rest[1::3], None], strict=True):
        if said := re.sub(r'!?\[([^]]*)\]\((?!http)[^)]*\)', r'\1', text).strip():
            cells.append(cell('markdown', said, f'text-{len(cells)}'))
        if program is not None:
            made = cell('code', program.rstrip(), f'code-{len(cells)}')
            if output is not None:
                made['outputs'] = [
                    {'output_type': 'stream', 'name': 'stdout', 'text': output.splitlines(keepends=True)}
                ]
            cells.append(made)
    return document(cells)


def write(folder: Path) -> list[Path]:
    """Write the notebooks of all pages; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f'{page.stem}.ipynb' for page in sorted(PAGES.glob('*.md'))]
    for path in paths:
        made = notebook((PAGES / f'{path.stem}.md').read_text())
        path.write_text(json.dumps(made, indent=1) + '\n', encoding='utf-8')
    return paths


if __name__ == '__main__':
    for written in write(Path(sys.argv[1] if len(sys.argv) > 1 else 'notebooks')):
        sys.stdout.write(f'{written}\n')
