"""Plant small mistakes, one at a time, and see whether the tests notice: `python -m tools.mutate --sample 30`.

A mistake is a rule applied to one place of one file. It is planted in a copy of the tree, never in the tree itself.
Each run appends its results to a file and skips the mistakes that the file already has.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import StringIO
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Mistakes that change no result: name of the mutant -> reason.
EQUIVALENTS = ROOT / 'tools' / 'mutate_equivalents.json'
#: What a copy of the tree does not need.
LEFT_OUT = shutil.ignore_patterns('.*', '__pycache__', 'results')

#: Rule -> pattern in a line of code and its replacement.
RULES = {
    'bounds': (r' < (?=\w)', ' <= '),
    'bounds end': (r' >= (?=\w)', ' > '),
    'indices': (r'\[(\w+) \+ 1\]', r'[\1]'),
    'barriers': (r'\bT\.sync_threads\(\)', 'T.int32(0)'),
    'fences': (r'\bT\.fence_proxy_async\(\)', 'T.int32(0)'),
    'parities': (r' & 1\)', ' & 1 ^ 1)'),
    'operands': (r' \+ (?=\w)', ' - '),
    'constants': (r'\b1\.0\b', '1.5'),
    'dtypes': (r'\bT\.float32\b(?!\()', 'T.float16'),
    'clamps': (r'\bT\.min\(', 'T.max('),
    'checks': (r'\bcheck\.(contiguous|same_device|shape)\((?=.*\)$)', r'(lambda *a, **k: None)('),
    'wiring': (r'\b(not )(?=\w)', ''),
}


#: Whether the tests of a file pass without a mistake.
_sound: dict[str, bool] = {}


@dataclass(frozen=True)
class Mutant:
    """One rule at one column of one line."""

    path: str
    line: int
    column: int
    rule: str

    @property
    def name(self) -> str:
        """How results and equivalents are called."""
        return f'{self.path}:{self.line}:{self.column}:{self.rule}'

    def apply(self, text: str) -> str:
        """The text with the mistake."""
        lines = text.splitlines(keepends=True)
        pattern, replacement = RULES[self.rule]
        head, tail = lines[self.line - 1][: self.column], lines[self.line - 1][self.column :]
        lines[self.line - 1] = head + re.sub(pattern, replacement, tail, count=1)
        return ''.join(lines)


def candidates(path: str, text: str) -> Iterator[Mutant]:
    """Every place of a file where a rule matches code."""
    kinds = (tokenize.STRING, tokenize.COMMENT)
    words = [t for t in tokenize.generate_tokens(StringIO(text).readline) if t.type in kinds]
    for number, line in enumerate(text.splitlines(), 1):
        near = [t for t in words if t.start[0] <= number <= t.end[0]]
        for rule, (pattern, _) in RULES.items():
            for match in re.finditer(pattern, line):
                if not any(t.start <= (number, match.start()) < t.end for t in near):
                    yield Mutant(path, number, match.start(), rule)


def is_valid(mutant: Mutant, text: str) -> bool:
    """Whether the mistake is other code that can be parsed."""
    try:
        return ast.dump(ast.parse(mutant.apply(text))) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def mutants(path: str, text: str) -> Iterator[Mutant]:
    """Every mistake of a file that is other valid code."""
    return (mutant for mutant in candidates(path, text) if is_valid(mutant, text))


def draw(folder: Path, number: int, seed: int) -> list[Mutant]:
    """Mistakes in the files of a folder; a larger number adds to those of a smaller one."""
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in sorted(folder.rglob('*/*.py'))}
    texts |= {
        str(file.relative_to(ROOT)): file.read_text() for file in folder.glob('*.py') if folder.name != 'tile_kernels'
    }
    found = [mutant for path in sorted(texts) for mutant in candidates(path, texts[path])]
    random.Random(seed).shuffle(found)
    return list(islice((mutant for mutant in found if is_valid(mutant, texts[mutant.path])), number))


def family(path: str) -> str:
    """The folder of a file in the package."""
    return Path(path).parts[1]


def imported(text: str) -> set[str]:
    """The modules that a module imports, and names that may be modules."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f'{node.module}.{alias.name}' for alias in node.names)}
    return found


@functools.cache
def users(root: Path = ROOT) -> dict[str, set[str]]:
    """The files that import a module, by module; packages that only collect names do not count."""
    found: dict[str, set[str]] = {}
    for file in sorted((root / 'tile_kernels').rglob('*.py')):
        if file.name != '__init__.py':
            for module in imported(file.read_text()):
                found.setdefault(module, set()).add(str(file.relative_to(root)))
    return found


def ops_of(path: str, root: Path = ROOT, most: int = 2) -> list[str]:
    """Ops whose files are this one or import it, the nearest first; twins are found by the name of their file."""
    if family(path) == 'reference':
        path = path.replace('/reference/', '/', 1)
    found: list[str] = []
    near, seen = [path], {path}
    while near and len(found) < most:
        found += [
            str(Path(file).with_suffix('')).split('/', 1)[1].replace('/', '.') for file in near if _has_op(root / file)
        ]
        modules = [str(Path(file).with_suffix('')).replace('/', '.') for file in near]
        near = sorted({user for module in modules for user in users(root).get(module, ())} - seen)
        random.Random(path).shuffle(near)
        seen.update(near)
    return found[:most]


def _has_op(file: Path) -> bool:
    return file.exists() and re.search(r'^@op\b', file.read_text(), re.MULTILINE) is not None


def tests_of(path: str, root: Path = ROOT) -> list[list[str]]:
    """Arguments of pytest, one list for each run: contract tests of the ops that use a file, and tests that name it."""
    folder, stem = root / 'tests' / family(path), Path(path).stem.removesuffix('_kernels')
    files = sorted(folder.glob('test_*.py'))
    naming = [file for file in files if re.search(rf'\b{re.escape(stem)}\b', file.read_text())]
    ops = ops_of(path, root)
    runs = [['tests/test_contract.py', *(word for op in ops for word in ('--op', op))]] if ops else []
    chosen = naming or ([] if ops else files)
    return runs + ([[str(file.relative_to(root)) for file in chosen]] if chosen else [])


def passes(path: str, tree: Path, limit: float) -> bool | None:
    """Whether the tests of a file pass; None if they take too long."""
    end = time.monotonic() + limit
    environment = os.environ | {'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': os.pathsep.join([str(tree), *sys.path[1:]])}
    for tests in tests_of(path, tree):
        command = [sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', '-x', '-q', *tests]
        try:
            left = max(end - time.monotonic(), 0.1)
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            return None
        if done.returncode not in (0, 5):  # 5: nothing to run for this op
            return False
    return True


def run(mutant: Mutant, tree: Path, limit: float) -> str:
    """Plant one mistake in a copy of the tree: 'killed', 'survived', 'timeout', 'untested' or 'broken'.

    Tests that also fail without the mistake, or take too long, say nothing: 'broken'.
    """
    if not tests_of(mutant.path, tree):
        return 'untested'
    file = tree / mutant.path
    before = file.read_text()
    file.write_text(mutant.apply(before))
    try:
        passed = passes(mutant.path, tree, limit)
    finally:
        file.write_text(before)
    if passed:
        return 'survived'
    if mutant.path not in _sound:  # two threads may find out at the same time
        _sound[mutant.path] = bool(passes(mutant.path, tree, 2 * limit))
    if not _sound[mutant.path]:
        return 'broken'
    return 'timeout' if passed is None else 'killed'


def read_results(path: Path) -> dict[str, str]:
    """Results of earlier runs by name of the mutant."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record['mutant']: record['result'] for record in map(json.loads, lines)}


def report(results: dict[str, str], equivalents: dict[str, str]) -> str:
    """The score of each family and the survivors; a timeout counts as noticed, equivalents do not count."""
    silent = 'untested', 'broken'
    counted = {name: result for name, result in results.items() if name not in equivalents and result not in silent}
    every = Counter(family(name) for name in counted)
    noticed = Counter(family(name) for name, result in counted.items() if result != 'survived')
    lines = [f'{name}: {noticed[name]}/{every[name]}' for name in sorted(every)]
    lines.append(f'all: {sum(noticed.values())}/{sum(every.values())}')
    return '\n'.join(lines + [f'survived: {name}' for name, result in counted.items() if result == 'survived'])


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--sample', type=int, default=30, help='mistakes to plant')
    parser.add_argument('--family', default='', help='only this folder of tile_kernels')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--limit', type=float, default=120, help='seconds for each mistake')
    parser.add_argument('--jobs', type=int, default=1, help='mistakes at a time, each in its own copy of the tree')
    parser.add_argument('--seconds', type=float, default=float('inf'), help='start no mistake after this time')
    parser.add_argument('--results', type=Path, default=Path('mutants.jsonl'))
    given = parser.parse_args(arguments)
    drawn = draw(ROOT / 'tile_kernels' / given.family, given.sample, given.seed)
    results, equivalents = read_results(given.results), json.loads(EQUIVALENTS.read_text())
    missing = [mutant for mutant in drawn if mutant.name not in results and mutant.name not in equivalents]
    end, writing = time.monotonic() + given.seconds, threading.Lock()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for i in range(min(given.jobs, len(missing))):
            trees.put(Path(folder) / str(i))
            shutil.copytree(ROOT, Path(folder) / str(i), ignore=LEFT_OUT)

        def plant(mutant: Mutant) -> None:
            if time.monotonic() > end:
                return
            tree = trees.get()
            result = results[mutant.name] = run(mutant, tree, given.limit)
            trees.put(tree)
            with writing, given.results.open('a') as file:
                file.write(json.dumps({'mutant': mutant.name, 'result': result}) + '\n')

        list(pool.map(plant, missing))  # raises what a thread raised
    print(report({m.name: results[m.name] for m in drawn if m.name in results}, equivalents))
    return 0


if __name__ == '__main__':
    sys.exit(main())
