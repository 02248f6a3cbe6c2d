"""Learn to write GPU kernels: exercises that are checked on your CPU, from a copy to a megakernel."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markdown import Markdown
from rich.syntax import Syntax

from tile_kernels.cli import console
from tile_kernels.core.errors import ArgumentError

if TYPE_CHECKING:
    from tile_kernels.learn.checks import Result
    from tile_kernels.learn.folder import Folder
    from tile_kernels.learn.track import Exercise

SOLVED = ('right', 'lean')

#: Seconds between two looks at the file that is watched.
PAUSE = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `learn`."""
    parser.set_defaults(action='table')
    parser.add_argument('--dir', help='folder with your exercises (default: this one, or ./tile-kernels-learn)')
    actions = parser.add_subparsers(dest='action', metavar='ACTION')
    for name, (number, text) in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text)
        if number == '?':
            action.add_argument('exercise', nargs='?', help='e.g. 5, or 5b for its bug')
        elif number:
            action.add_argument('exercise', help='e.g. 5, or 5b for its bug')
        if name == 'start':
            action.add_argument('folder', nargs='?', help='default ./tile-kernels-learn')
        if name == 'html':
            action.add_argument('folder', nargs='?', default='tile-kernels-learn-pages', help='where the pages go')
        if name == 'reveal':
            action.add_argument('--yes', action='store_true', help='do not ask')


#: Each action, how many exercises it takes, and what it does.
ACTIONS: dict[str, tuple[str, str]] = {
    'start': ('', 'copy tasks and lessons into a folder; existing files are kept'),
    'check': ('?', 'check one exercise, or all; the default is the first that is not solved'),
    'watch': ('?', 'check again whenever the file is saved'),
    'hint': ('1', 'show the next hint'),
    'reveal': ('1', 'show the answer, after a question'),
    'compare': ('1', 'your kernel beside the answer and our op: lines, bytes, predicted time'),
    'speed': ('1', 'on a GPU: the time of your kernel against the target'),
    'notebook': ('?', 'write one notebook for each exercise'),
    'html': ('', 'write the lessons as pages'),
}


def run(args: argparse.Namespace) -> int:
    """Run one action."""
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        'table': _table,
        'start': _start,
        'check': _check,
        'watch': _watch,
        'hint': _hint,
        'reveal': _reveal,
        'compare': _compare,
        'speed': _speed,
        'notebook': _notebook,
        'html': _html,
    }
    return actions[args.action or 'table'](args)


def _folder(args: argparse.Namespace) -> Folder:
    from tile_kernels.learn.folder import Folder

    folder = Folder.find(args.dir)
    if folder is None:
        raise ArgumentError('learn: there are no exercises here; run tile-kernels learn start, or give --dir')
    return folder


def _chosen(args: argparse.Namespace) -> tuple[Folder, str, Exercise, bool]:
    """The folder, the key, the exercise, and whether its bug is meant."""
    from tile_kernels.learn.track import parse

    folder = _folder(args)
    name = args.exercise or folder.next()
    if name is None:
        raise ArgumentError('learn: every exercise is solved; name one to check it again')
    exercise, bug = parse(name)
    return folder, f'{exercise.number:02d}{"b" if bug else ""}', exercise, bug


def _table(args: argparse.Namespace) -> int:
    from tile_kernels.learn.folder import Folder, entries
    from tile_kernels.learn.report import SIGNS
    from tile_kernels.learn.track import LEVELS

    folder = Folder.find(args.dir)
    rows, states = [], []
    for key, exercise, bug in entries():
        entry = folder.progress.get(key, {}) if folder else {}
        state = entry.get('state', 'open')
        states += [] if bug else [(exercise.level, state)]
        sign = SIGNS[state] + (SIGNS['seen'] if entry.get('seen') else '')
        title = f'bug: {exercise.bug}' if bug else exercise.title
        rows.append((sign, key, title, exercise.level, entry.get('attempts') or '', entry.get('speed', '')))
    out = console.output()
    out.print(console.table(('', '>', '~exercise', 'level', '>checks', '~on a GPU'), rows))
    for level in LEVELS:
        mine = [state in SOLVED for each, state in states if each == level]
        if mine:
            out.print(f'{level:<13}{"█" * sum(mine)}{"░" * (len(mine) - sum(mine))} {sum(mine)} of {len(mine)}')
    action = 'start' if folder is None else f'check {folder.next() or "all"}'
    out.print(f'✓ right  ★ right and lean  ◐ started  ○ open  · answer seen\nnext: tile-kernels learn {action}')
    return 0


def _start(args: argparse.Namespace) -> int:
    from tile_kernels.learn.folder import NAME, Folder

    folder = Folder(Path(args.folder or args.dir or NAME))
    copied = folder.start()
    out = console.output()
    out.print(f'{folder.path}: {copied} tasks copied, others were there already', soft_wrap=True)
    out.print('Read 01_copy.md, edit 01_copy.py, then run: tile-kernels learn check 1')
    return 0


def _checked(folder: Folder, key: str, exercise: Exercise, bug: bool, resources: bool = True) -> Result:
    """Check a file and keep the result."""
    from tile_kernels.learn.checks import check_file

    path = folder.needed(exercise, bug)
    result = check_file(exercise, path, bug, resources)
    folder.record(key, result, path)
    folder.unlock(exercise)
    return result


def _check(args: argparse.Namespace) -> int:
    from tile_kernels.learn.folder import entries

    if args.exercise == 'all':
        folder = _folder(args)
        results = [_checked(folder, *entry, resources=False) for entry in entries() if folder.file(*entry[1:]).exists()]
        for result in results:
            console.output().out(result.headline)
        return int(any(result.state not in SOLVED for result in results if not result.bug))  # bugs are optional
    result = _checked(*_chosen(args))
    console.output().out(str(result))
    return int(result.state not in SOLVED)


def _watch(args: argparse.Namespace) -> int:
    folder, key, exercise, bug = _chosen(args)
    path, before = folder.needed(exercise, bug), 0
    while True:
        now = path.stat().st_mtime_ns if path.exists() else before  # some editors replace the file
        if now != before:
            before = now
            result = _checked(folder, key, exercise, bug, resources=False)
            console.output().out(f'{time.strftime("%H:%M:%S")} {result}')
            if result.state == 'lean':
                return 0
        time.sleep(PAUSE)


def _hint(args: argparse.Namespace) -> int:
    folder, key, exercise, bug = _chosen(args)
    out = console.output()
    if bug:
        out.out('a bug has no hints: its check names the place, tile-kernels learn reveal shows the repaired kernel')
        return 0
    hints, entry = exercise.hints(), folder.entry(key)
    shown = entry['hints'] = min(entry.get('hints', 0) + 1, len(hints) + 1)
    folder.save()
    if shown <= len(hints):
        out.print(f'hint {shown} of {len(hints)}')
        out.print(Markdown(hints[shown - 1]) if out.is_terminal else hints[shown - 1], markup=False)
    else:
        out.out(f'that was the last hint; docs/{exercise.docs} explains more, tile-kernels learn reveal {key} the rest')
    return 0


def _reveal(args: argparse.Namespace) -> int:
    from tile_kernels.learn.pack import packed

    folder, key, exercise, _ = _chosen(args)
    if not args.yes:
        sys.stdout.write(f'Show the answer of {key}? The table will mark it with a dot. [y/N] ')
        sys.stdout.flush()
        if sys.stdin.readline().strip().lower() not in ('y', 'yes'):
            return 1
    folder.entry(key)['seen'] = True
    folder.save()
    out, text = console.output(), packed('answers', f'{key}_{exercise.name}')
    if out.is_terminal:
        out.print(Syntax(text, 'python', theme='ansi_dark'))
    else:
        out.out(text)
    return 0


def _compare(args: argparse.Namespace) -> int:
    from tile_kernels.learn.compare import compared

    folder, key, exercise, bug = _chosen(args)
    columns, rows, words = compared(exercise, key, folder.needed(exercise, bug))
    out = console.output()
    out.print(console.table(('', *(f'>{name}' for name in columns)), rows))
    for line in words:
        out.print(line, markup=False)
    return 0


def _speed(args: argparse.Namespace) -> int:
    from tile_kernels.learn.checks import Failed, load
    from tile_kernels.learn.speed import measure, need_gpu

    need_gpu()
    folder, key, exercise, bug = _chosen(args)
    try:
        number, words = measure(load(exercise, folder.needed(exercise, bug)))
    except Failed as failure:
        raise ArgumentError(f'learn: {failure}') from failure
    folder.entry(key).update(speed=words.partition(',')[0], reached=number)
    folder.save()
    console.output().out(words)
    return 0


def _notebook(args: argparse.Namespace) -> int:
    from tile_kernels.learn.folder import entries
    from tile_kernels.learn.notebook import write_notebook
    from tile_kernels.learn.track import parse

    folder = _folder(args)
    for exercise, bug in [parse(args.exercise)] if args.exercise else [entry[1:] for entry in entries()]:
        if not bug or folder.solved(exercise):
            path = write_notebook(exercise, folder.path, bug)
            console.output().out(str(path or f'{exercise.label}: the notebook is there already'))
    return 0


def _html(args: argparse.Namespace) -> int:
    from tile_kernels.learn.notebook import write_pages

    paths = write_pages(Path(args.folder))
    console.output().out(f'{len(paths)} pages, the first is {paths[0]}')
    return 0
