"""Time the answers of the learning track on this GPU, and set the targets of the exercises from them.

    python tools/learn_targets.py [--json benchmarks/results/learn/h200.jsonl] [--seconds 60] [NN ...]

Every answer has a process of its own, so a crash costs one record. All of them compile at the same time, and run their
small cases on the GPU. An answer that is wrong there is not timed. The times are taken one after the other. Records are
written at once. At the end `tile_kernels/learn/targets.json` gets the numbers of the records.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tile_kernels.cli.bench import check_writable, circumstances, read_records, write_records
from tile_kernels.core.workers import Child, Failed
from tile_kernels.learn import checks, speed
from tile_kernels.learn.pack import packed
from tile_kernels.learn.track import Exercise, exercises
from tile_kernels.testing.records import Record

RESULTS = Path(__file__).parents[1] / 'benchmarks' / 'results' / 'learn' / 'h200.jsonl'


def answer_of(exercise: Exercise) -> checks.Submission:
    """Our answer, from the packed file."""
    path = Path(tempfile.mkdtemp()) / f'{exercise.label}.py'
    path.write_text(packed('answers', exercise.label), encoding='utf-8')
    return checks.load(exercise, path)


@functools.lru_cache(1)
def ready(number: int) -> tuple[Exercise, Any, Any]:
    """The exercise of this process, with tensors on the GPU and a function that runs the answer."""
    exercise = exercises()[number]
    return exercise, *speed.prepared(answer_of(exercise))


def prepare(number: int) -> int:
    """Compile the answer, and compare its small cases with PyTorch; returns how many were compared."""
    exercise, _, call = ready(number)
    call()
    torch.cuda.synchronize()
    answer = answer_of(exercise)
    same = [case for case in exercise.cases if case.static == exercise.cases[0].static]
    for case in same:  # each other choice of static arguments would compile once more
        tensors = checks.arguments(exercise, case)
        made = checks.made_by_check(exercise, case)
        expected = exercise.reference(case, **{name: x for name, x in tensors.items() if name not in made})
        on_gpu = checks.arguments(exercise, case, 'cuda')
        speed.launcher(answer, case, on_gpu)()
        for name, wanted in expected.items():
            bound = exercise.bound(case, name, wanted) if exercise.bound is not None else None
            if (wrong := int(checks._wrong(on_gpu[name].cpu(), wanted.to(on_gpu[name].dtype), bound).sum())) > 0:
                raise Failed(f'{case.label}: {wrong} of {wanted.numel()} elements of {name} are wrong on this GPU')
    return len(same)


def measure(number: int) -> tuple[float, str]:
    """The number that the target is about, and one line about it."""
    return speed.timed(*ready(number))


def targets_of(records: Iterable[Record]) -> dict[str, Record]:
    """What `targets.json` holds: the last record of every exercise, without what a learner does not need."""
    found: dict[str, Record] = {}
    for record in sorted(records, key=lambda r: r['date']):
        if 'reached' in record:
            found[record['exercise']] = {key: record[key] for key in ('reached', 'unit', 'device', 'commit')}
    return dict(sorted(found.items()))


def run(numbers: Sequence[int], seconds: float, path: Path, context: Record) -> int:
    """Prepare all answers at the same time, then time them one after the other; returns how many failed."""
    end = time.monotonic() + seconds
    children = {number: Child() for number in numbers}
    compared: dict[int, int] = {}
    failed: dict[int, str] = {}

    def begin(number: int) -> None:
        try:
            compared[number] = children[number].call(prepare, number, limit=seconds * 0.75)
        except Failed as failure:
            failed[number] = str(failure)

    threads = [threading.Thread(target=begin, args=(number,), daemon=True) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in numbers:
        record: Record = {'exercise': f'{number:02d}', 'unit': speed.KINDS[exercises()[number].target.kind][0]}
        words = failed.get(number, 'the budget ended before it')
        if number in compared and time.monotonic() < end:
            try:
                reached, words = children[number].call(measure, number, limit=max(end - time.monotonic(), 5.0))
                record |= {'reached': round(reached, 4), 'compared': compared[number]}
            except Failed as failure:
                words = str(failure)
        if 'reached' not in record:
            failed[number] = record['failed'] = words
        print(f'{number:02d} {words}', flush=True)
        write_records(path, [record | context])
        children[number].close()
    return len(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the answers, and write the targets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('exercises', nargs='*', type=int, metavar='NN', help='default: all')
    parser.add_argument('--json', type=Path, default=RESULTS, help='append a record for each answer to this file')
    parser.add_argument('--seconds', type=float, default=60.0, help='the whole run ends after about this time')
    parser.add_argument('--commit', help='commit the records carry')
    given = parser.parse_args(arguments)
    speed.need_gpu()
    check_writable(given.json)
    sys.path.insert(0, str(Path(__file__).parents[1]))  # processes import the functions of this file by that name
    from tools import learn_targets

    numbers = given.exercises or list(exercises())
    failures = learn_targets.run(numbers, given.seconds, given.json, circumstances('cuda', given.commit))
    text = json.dumps(targets_of(read_records(given.json)), indent=1) + '\n'
    speed.TARGETS.write_text(text, encoding='utf-8')
    print(f'{len(numbers) - failures} of {len(numbers)} answers timed; targets: {speed.TARGETS}')
    return int(failures > 0)


if __name__ == '__main__':
    sys.exit(main())
