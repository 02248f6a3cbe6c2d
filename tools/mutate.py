"""Plant small mistakes, one at a time, and see whether the tests notice: `python -m tools.mutate --sample 30`.

A mistake is a rule applied to one place of one file. It is planted in a copy of the tree, never in the tree itself.
Each run appends its results to a file and skips the mistakes that the file already has.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Mistakes that change no result: name of the mutant -> reason.
EQUIVALENTS = ROOT / 'tools' / 'mutate_equivalents.json'

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


def tests_of(path: str, root: Path = ROOT) -> list[str]:
    """The test files in the folder of the family that name the module, or all of them, as arguments of pytest."""
    folder, stem = root / 'tests' / family(path), Path(path).stem.removesuffix('_kernels')
    files = sorted(folder.glob('test_*.py'))
    naming = [file for file in files if re.search(rf'\b{re.escape(stem)}\b', file.read_text())]
    return [str(file.relative_to(root)) for file in naming or files]


def run(mutant: Mutant, tree: Path, limit: float) -> str:
    """Plant one mistake in a copy of the tree: 'killed', 'survived', 'timeout' or 'untested'."""
    tests = tests_of(mutant.path, tree)
    if not tests:
        return 'untested'
    file = tree / mutant.path
    before = file.read_text()
    file.write_text(mutant.apply(before))
    command = [sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', '-n0', '-x', '-q', *tests]
    try:
        code = subprocess.run(command, cwd=tree, capture_output=True, timeout=limit, check=False).returncode
    except subprocess.TimeoutExpired:
        return 'timeout'
    finally:
        file.write_text(before)
    return 'survived' if code == 0 else 'killed'


def read_results(path: Path) -> dict[str, str]:
    """Results of earlier runs by name of the mutant."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record['mutant']: record['result'] for record in map(json.loads, lines)}


def report(results: dict[str, str], equivalents: dict[str, str]) -> str:
    """The score of each family and the survivors; a timeout counts as noticed, equivalents do not count."""
    counted = {name: result for name, result in results.items() if name not in equivalents and result != 'untested'}
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
    parser.add_argument('--results', type=Path, default=Path('mutants.jsonl'))
    given = parser.parse_args(arguments)
    drawn = draw(ROOT / 'tile_kernels' / given.family, given.sample, given.seed)
    results, equivalents = read_results(given.results), json.loads(EQUIVALENTS.read_text())
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / 'tree'
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns('.git', '.venv', '__pycache__'))
        for mutant in drawn:
            if mutant.name not in results and mutant.name not in equivalents:
                results[mutant.name] = run(mutant, tree, given.limit)
                with given.results.open('a') as file:
                    file.write(json.dumps({'mutant': mutant.name, 'result': results[mutant.name]}) + '\n')
    print(report({m.name: results[m.name] for m in drawn if m.name in results}, equivalents))
    return 0


if __name__ == '__main__':
    sys.exit(main())
