"""Notebooks and pages of the exercises: lesson, task, check and hints; no answers."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from tile_kernels.learn.pack import packed
from tile_kernels.learn.track import Exercise, exercises

STYLE = (
    'body{max-width:50em;margin:2em auto;padding:0 1em;font:16px/1.5 sans-serif;color:#222;background:#fff}'
    'pre{background:#f4f4f4;padding:.8em;overflow-x:auto;font-size:14px}code{font-family:monospace}'
    'table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}'
    '@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}pre{background:#262626}a{color:#8bf}}'
)


def hints(exercise: Exercise) -> str:
    """The hints as Markdown, each folded."""
    folded = [
        f'<details><summary>Hint {number}</summary>\n\n{text}\n\n</details>'
        for number, text in enumerate(exercise.hints(), 1)
    ]
    return '\n\n'.join(folded)


def notebook(exercise: Exercise, bug: bool = False) -> dict[str, Any]:
    """A Jupyter notebook, version 4."""
    number = f"'{exercise.number:02d}b'" if bug else str(exercise.number)
    check = f'from tile_kernels import learn\n\nlearn.check({number}, kernel={exercise.entry});'
    cells = [
        cell('markdown', exercise.text('lesson.md') if not bug else f'# {exercise.bug}', 'lesson'),
        cell(
            'code',
            (packed('bugs', f'{exercise.number:02d}b_{exercise.name}') if bug else exercise.text('task.py')).rstrip(),
            'task',
        ),
        cell('code', check, 'check'),
    ]
    if not bug:
        cells.append(cell('markdown', hints(exercise), 'hints'))
    return document(cells)


def document(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """A notebook of version 4 with these cells."""
    kernel = {'display_name': 'Python 3', 'language': 'python', 'name': 'python3'}
    return {'cells': cells, 'metadata': {'kernelspec': kernel}, 'nbformat': 4, 'nbformat_minor': 5}


def cell(kind: str, text: str, name: str) -> dict[str, Any]:
    """A cell, 'markdown' or 'code', with an id."""
    made = {'cell_type': kind, 'id': name, 'metadata': {}, 'source': text.splitlines(keepends=True)}
    return made | ({'execution_count': None, 'outputs': []} if kind == 'code' else {})


def write_notebook(exercise: Exercise, folder: Path, bug: bool = False) -> Path | None:
    """Write the notebook of an exercise; an existing one is kept."""
    path = folder / f'{exercise.number:02d}{"b" if bug else ""}_{exercise.name}.ipynb'
    if path.exists():
        return None
    path.write_text(json.dumps(notebook(exercise, bug), indent=1) + '\n', encoding='utf-8')
    return path


def page(exercise: Exercise) -> str:
    """A page with lesson, task and hints."""
    render = MarkdownIt('commonmark').enable('table').render
    task = f'\n## The task\n\n```python\n{exercise.text("task.py").rstrip()}\n```\n\n## Hints\n'
    folded = ''.join(
        f'<details><summary>Hint {number}</summary>{render(text)}</details>'
        for number, text in enumerate(exercise.hints(), 1)
    )
    steps = [other for number in (-1, 1) if (other := exercises().get(exercise.number + number))]
    links = ' · '.join(f'<a href="{other.label}.html">{other.number:02d} {other.title}</a>' for other in steps)
    body = f'{render(exercise.text("lesson.md"))}{render(task)}{folded}<p><a href="index.html">All</a> · {links}</p>'
    return _html(f'{exercise.number:02d} {exercise.title}', body)


def index() -> str:
    """The page that lists all exercises."""
    rows = ''.join(
        f'<tr><td>{e.number:02d}<td><a href="{e.label}.html">{html.escape(e.title)}</a><td>{e.level}'
        for e in exercises().values()
    )
    return _html('Learn to write GPU kernels', f'<h1>Learn to write GPU kernels</h1><table>{rows}</table>')


def _html(title: str, body: str) -> str:
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    return f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n'


def write_pages(folder: Path) -> list[Path]:
    """Write the pages of all exercises and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {'index.html': index()} | {f'{e.label}.html': page(e) for e in exercises().values()}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding='utf-8')
    return [folder / name for name in texts]
