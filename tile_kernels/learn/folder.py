"""The folder of a learner: copies of the tasks, and a JSON file with the progress, which may be deleted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tile_kernels.core.errors import ArgumentError
from tile_kernels.learn.checks import Result
from tile_kernels.learn.pack import packed
from tile_kernels.learn.track import Exercise, exercises

NAME = 'tile-kernels-learn'
PROGRESS = 'progress.json'

SOLVED = ('right', 'lean')


class Folder:
    """A learner's folder.

    Attributes:
        path: where it is.
        progress: what is known of every exercise, by its number: state, attempts, hints, counts, times.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            known = json.loads((path / PROGRESS).read_text(encoding='utf-8'))
        except (OSError, ValueError):  # none yet, or a damaged one
            known = {}
        self.progress: dict[str, dict[str, Any]] = known if isinstance(known, dict) else {}

    @classmethod
    def find(cls, given: str | None) -> Folder | None:
        """The folder of this name, or the one here or below, if there is one."""
        places = [Path(given)] if given else [Path.cwd(), Path.cwd() / NAME]
        return next((cls(place) for place in places if (place / PROGRESS).exists()), None)

    def start(self) -> int:
        """Copy tasks and lessons that are not there yet; returns how many tasks were."""
        self.path.mkdir(parents=True, exist_ok=True)
        copied = sum(self._copy(exercise, bug) for _, exercise, bug in entries() if not bug)
        for exercise in exercises().values():
            self.unlock(exercise)
        self.save()
        return copied

    def _copy(self, exercise: Exercise, bug: bool) -> bool:
        """Copy a task with its lesson, or a bug; whether the task was missing."""
        target, lesson = self.file(exercise, bug), self.path / f'{exercise.label}.md'
        if not bug and not lesson.exists():
            lesson.write_text(exercise.text('lesson.md'), encoding='utf-8')
        if target.exists():
            return False
        target.write_text(packed('bugs', target.stem) if bug else exercise.text('task.py'), encoding='utf-8')
        return True

    def solved(self, exercise: Exercise) -> bool:
        """Whether the exercise is right, or its answer was seen."""
        entry = self.progress.get(f'{exercise.number:02d}', {})
        return entry.get('state') in SOLVED or bool(entry.get('seen'))

    def unlock(self, exercise: Exercise) -> bool:
        """Copy the planted bug of a solved exercise; it shows most of the answer."""
        return exercise.bug is not None and self.solved(exercise) and self._copy(exercise, True)

    def file(self, exercise: Exercise, bug: bool = False) -> Path:
        """The file that the learner edits."""
        return self.path / f'{exercise.number:02d}{"b" if bug else ""}_{exercise.name}.py'

    def needed(self, exercise: Exercise, bug: bool) -> Path:
        """The same, which must exist."""
        path = self.file(exercise, bug)
        if not path.exists():
            after = f'after exercise {exercise.number:02d} is solved, ' if bug else ''
            raise ArgumentError(f'learn: there is no {path}; {after}tile-kernels learn start copies what is missing')
        return path

    def entry(self, key: str) -> dict[str, Any]:
        """What is known of an exercise; changes are kept by `save`."""
        return self.progress.setdefault(key, {})

    def state(self, key: str) -> str:
        """'lean', 'right', 'started' or 'open'."""
        return str(self.progress.get(key, {}).get('state', 'open'))

    def record(self, key: str, result: Result, path: Path) -> None:
        """Keep the best state, its counts and the digest of its file."""
        entry = self.entry(key)
        entry['attempts'] = entry.get('attempts', 0) + 1
        order = ('open', 'started', 'right', 'lean')
        if order.index(result.state) >= order.index(self.state(key)):
            entry['state'] = result.state
            if result.state != 'started':
                entry |= {'counts': result.numbers, 'file': hashlib.sha256(path.read_bytes()).hexdigest()}
        self.save()

    def save(self) -> None:
        """Write the progress; an interrupted write leaves the old one."""
        temporary = self.path / f'{PROGRESS}.new'
        temporary.write_text(json.dumps(self.progress, indent=1, sort_keys=True) + '\n', encoding='utf-8')
        temporary.replace(self.path / PROGRESS)

    def next(self) -> str | None:
        """The first exercise that is not solved; bugs are optional."""
        return next((key for key, _, bug in entries() if not bug and self.state(key) not in SOLVED), None)


def entries() -> Iterator[tuple[str, Exercise, bool]]:
    """Every exercise and then its bug: a key such as '05' or '05b', the exercise, and whether it is the bug."""
    for exercise in exercises().values():
        yield f'{exercise.number:02d}', exercise, False
        if exercise.bug is not None:
            yield f'{exercise.number:02d}b', exercise, True
