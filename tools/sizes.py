"""Count the lines behind an op: every symbol that its public function reaches, and those of its twin.

    python tools/sizes.py                     the table of the ops below
    python tools/sizes.py quant.cast_back     of other public names
    python tools/sizes.py --list NAME         each symbol behind a number, with its lines
    python tools/sizes.py --root ../other     of another checkout

A symbol is a function, a class or a constant at the top of a module. It counts with its decorators, docstring and
comments. It reaches the symbols that it names, and an op also reaches its twin. The gradient of an op, the cases of
ops, `core` and the interpreter do not count. Nothing is imported: the table is computed from the syntax trees alone.
"""

from __future__ import annotations

import argparse
import ast
import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = 'tile_kernels'

#: Parts of the package that do not count.
EXCLUDED = ('core', 'interpreter', 'testing', 'cli')

#: Public names and their line limits; None if there is no limit.
TARGETS = {
    'quant.per_token_cast': 450,
    'quant.norm_forward': 400,
    'quant.swiglu_forward': 450,
    'moe.topk_gate': 450,
    'mhc.pre': 1800,
    'transform.rotary_embedding': None,
    'gemm.gemm': None,
    'mhc.post': None,
    'transpose.transpose': None,
    'moe.group_count': None,
    'moe.mask_indices_by_tp': None,
}

Key = tuple[str, str]


@dataclass
class Module:
    """Definitions and imports of a file: local name -> (module, symbol), or (module, '') for a module."""

    name: str
    lines: list[str]
    symbols: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, Key] = field(default_factory=dict)


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements at the top level of a module, including those under `if` and `try`."""
    for node in body:
        if isinstance(node, (ast.If, ast.Try)):
            yield from statements([*node.body, *node.orelse])
        else:
            yield node


def load(root: Path) -> dict[str, Module]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((root / PACKAGE).rglob('*.py')):
        parts = path.relative_to(root).with_suffix('').parts
        name = '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)
        text = path.read_text()
        module = found[name] = Module(name, text.splitlines())
        for node in statements(ast.parse(text).body):
            if isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == PACKAGE:
                for alias in node.names:
                    module.imports[alias.asname or alias.name] = (node.module or '', alias.name)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                module.symbols.setdefault(node.name, []).append(node)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name_node in (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)):
                    module.symbols.setdefault(name_node.id, []).append(node)
    return found


def resolve(modules: dict[str, Module], module: str, name: str) -> Key | None:
    """The module that defines `name` as used in `module`; None if the package does not define it."""
    for _ in range(10):
        here = modules.get(module)
        if here is None:
            return None
        if name in here.symbols:
            return module, name
        if name not in here.imports:
            return (f'{module}.{name}', '') if f'{module}.{name}' in modules else None
        module, name = here.imports[name]
        if f'{module}.{name}' in modules and name not in modules[module].symbols | modules[module].imports:
            return f'{module}.{name}', ''
    return None


def gradients_of(node: ast.stmt) -> list[ast.expr]:
    """The gradient arguments of an op's decorator."""
    calls = [d for d in getattr(node, 'decorator_list', ()) if isinstance(d, ast.Call)]
    return [word.value for call in calls for word in call.keywords if word.arg == 'backward']


def named(node: ast.stmt) -> Iterator[tuple[str, ...]]:
    """Names that a statement reads, as ('name',) or ('module', 'attribute'); local names do not count."""
    own = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    own |= {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef) and n is not node}
    skipped = {id(n) for word in gradients_of(node) for n in ast.walk(word)}
    for n in ast.walk(node):
        if id(n) in skipped:
            continue
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id not in own:
            yield n.value.id, n.attr
        elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id not in own:
            yield (n.id,)


def twin_of(node: ast.stmt, module: str) -> Key | None:
    """The location of the twin of an op, from its decorator."""
    for decorator in getattr(node, 'decorator_list', ()):
        call = decorator if isinstance(decorator, ast.Call) else None
        if call and isinstance(call.func, ast.Name) and call.func.id == 'op':
            given = {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
            name = given.get('twin') or given.get('name') or getattr(node, 'name', '').removeprefix('_')
            return f'{PACKAGE}.reference.{module.split(".")[1]}', str(name)
    return None


def reached(modules: dict[str, Module], start: Key) -> list[Key]:
    """Every symbol that `start` needs, in the order of discovery."""
    found: dict[Key, None] = {}
    waiting = [start]
    while waiting:
        key = waiting.pop()
        module, name = key
        if key in found or not name or module.split('.')[1] in EXCLUDED:
            continue
        found[key] = None
        for node in modules[module].symbols[name]:
            twin = twin_of(node, module)
            waiting += [k for k in [twin and resolve(modules, *twin)] if k]
            for first, *rest in named(node):
                target = resolve(modules, module, first)
                if target and not target[1] and rest:
                    target = resolve(modules, target[0], rest[0])
                if target and target[1]:
                    waiting.append(target)
    return list(found)


def extent(module: Module, nodes: list[ast.stmt]) -> set[int]:
    """Line numbers of a symbol with its decorators and the comment above it."""
    lines: set[int] = set()
    for node in nodes:
        first = min([node.lineno, *(d.lineno for d in getattr(node, 'decorator_list', ()))])
        while first > 1 and module.lines[first - 2].startswith('#') and '-----' not in module.lines[first - 2]:
            first -= 1
        lines.update(range(first, (node.end_lineno or first) + 1))
    return lines


def sizes(modules: dict[str, Module], public: str) -> dict[Key, int] | None:
    """Lines of each symbol behind a public name; None if there is no such name."""
    family, _, name = public.rpartition('.')
    start = resolve(modules, f'{PACKAGE}.{family}', name)
    if start is None or not start[1]:
        return None
    counted: dict[str, set[int]] = {}
    result = {}
    for module, symbol in reached(modules, start):
        lines = extent(modules[module], modules[module].symbols[symbol]) - counted.setdefault(module, set())
        counted[module] |= lines
        result[module, symbol] = len(lines)
    return result


def main() -> int:
    """Print the table; the exit status is 1 if a name is unknown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', help='public names such as quant.per_token_cast')
    parser.add_argument('--root', type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument('--list', action='store_true', help='list the symbols behind each number')
    options = parser.parse_args()
    modules = load(options.root)
    measure = functools.partial(sizes, modules)
    print('| public name | lines reachable | of these in device/ | files | target |')
    print('|---|---:|---:|---:|---:|')
    unknown = 0
    for public in options.names or TARGETS:
        found = measure(public)
        if found is None:
            print(f'| {public} | unknown | | | |')
            unknown += 1
            continue
        files = len({module for module, _ in found})
        shared = sum(lines for (module, _), lines in found.items() if module.startswith(f'{PACKAGE}.device.'))
        print(f'| {public} | {sum(found.values())} | {shared} | {files} | {TARGETS.get(public) or ""} |')
        if options.list:
            for (module, symbol), lines in sorted(found.items()):
                print(f'    {lines:5} {module.removeprefix(PACKAGE + ".")}.{symbol}')
    return 1 if unknown else 0


if __name__ == '__main__':
    sys.exit(main())
