"""A digest of the code that a kernel is made of: everything its builder reaches, and nothing else.

The search starts at a builder and follows every global name. It passes through functions, macros, constants, tables and
classes of the package, or of the folder of a user's kernel. The reached code is hashed as a syntax tree, so comments,
docstrings, formatting and host-only code do not count. The search neither traces nor imports anything, and does not
need TileLang.

A class contributes its header and those members whose names the reached code uses as attributes. A reference that
cannot be resolved from the sources adds the whole module. Host checks (`check.shape(...)` as a statement) are not
followed, because they can only raise.
"""

from __future__ import annotations

import ast
import builtins
import functools
import gc
import hashlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

PACKAGE = 'tile_kernels'

_CHECKS = f'{PACKAGE}.core.check'
_LANGUAGE = (f'{PACKAGE}.core.lang', 'T')
_DECLARATION = (f'{PACKAGE}.core.jit', 'kernel')
_COMPILER = f'{PACKAGE}.core.nvcc'
_SELF = f'{PACKAGE}.core.code_digest'

#: The functions of the compiler driver that affect a library. The rest of that module finds tools, loads, inspects and
#: explains.
_COMPILER_ROOTS = ('compile_library', '_pass_configs', '_for_arch')
_COMPILER_ONLY = {*_COMPILER_ROOTS, 'HOUSE_PASS_CONFIGS', 'HOPPER_CALLS', 'arch_number'}

#: Decorators of plain Python functions. Annotations of such functions do not affect a kernel.
_PLAIN_DECORATORS = {'cache', 'lru_cache', 'staticmethod', 'classmethod', 'property', 'cached_property', 'dataclass'}

#: Special methods that only pickling and copying call.
_COPYING = {'__reduce__', '__reduce_ex__', '__getstate__', '__setstate__', '__getnewargs__', '__copy__', '__deepcopy__'}

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DYNAMIC = {'globals', 'locals', 'vars', 'eval', 'exec', 'compile', '__import__'}
_SKIPPED_FIELDS = {'ctx', 'type_comment', 'kind', 'type_ignores'}
_MUTATORS = {'append', 'add', 'update', 'setdefault', 'insert', 'extend'}

#: A call instead of a decorator may turn a function into a kernel. Then the annotations of the whole module count.
_CALLED_LANGUAGE = re.compile(r'(?:prim_func|macro)\(')

Chain = tuple[str, ...]


class Node(NamedTuple):
    """One hashed item: a name of a module, a member of a class, or (with an empty name) the whole module."""

    module: str
    name: str = ''
    member: str = ''


@dataclass
class Scan:
    """The references of a statement, and its tree as text."""

    text: str = ''
    chains: set[Chain] = field(default_factory=set)
    checks: set[Chain] = field(default_factory=set)
    imports: set[tuple[str, str | None]] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    #: Names looked up at run time: on an object (its dotted name, if it has one), or in the module itself.
    looked_up: set[Chain] = field(default_factory=set)
    dynamic: bool = False


# Trees --------------------------------------------------------------------------------------


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _last_name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ''


_FIELDS: dict[type, tuple[str, ...]] = {}


def _fields_of(kind: type) -> tuple[str, ...]:
    """The fields of an AST node class that count; a field that some Python versions lack is empty elsewhere."""
    found = _FIELDS.get(kind)
    if found is None:
        found = _FIELDS[kind] = tuple(name for name in kind._fields if name not in _SKIPPED_FIELDS)
    return found


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for name in _fields_of(type(node)):
        value = getattr(node, name, None)
        if isinstance(value, list):
            for item in value:
                if isinstance(item, ast.AST):
                    yield item
        elif isinstance(value, ast.AST):
            yield value


class _Writer:
    """Writes a tree without positions, docstrings and irrelevant annotations, equally on every Python version."""

    def __init__(self, keep_annotations: bool, skip: Callable[[ast.expr], bool]) -> None:
        self.keep_annotations = keep_annotations
        self.skip = skip
        self.out: list[str] = []
        self.depth = 0

    def write(self, node: Any) -> None:
        kind, out = type(node), self.out
        if kind is ast.Name:
            out.append(f'{node.id},')
        elif kind is ast.Constant:
            out.append(f'{type(node.value).__name__}:{node.value!r},')
        elif kind is ast.Attribute:
            self.write(node.value)
            out.append(f'.{node.attr},')
        elif kind is list:
            out.append('[')
            for item in node:
                self.write(item)
            out.append(']')
        elif isinstance(node, ast.AST):
            out.append(f'{kind.__name__}(')
            special = kind in _DEFINITIONS
            for key in _fields_of(kind):
                value = getattr(node, key, None)
                if value is not None and value != [] and not special:
                    out.append(f'{key}=')
                    self.write(value)
            if special:
                self._write_definition(node)
            out.append(')')
        else:
            out.append(f'{node!r},')

    def _write_definition(self, node: Any) -> None:
        """Write a function or a class without docstrings, declarations and irrelevant annotations."""
        dropped, nested = self._dropped(node), isinstance(node, _FUNCTIONS)
        self.depth += nested
        for key in _fields_of(type(node)):
            value: Any = getattr(node, key, None)
            if key in dropped:
                continue
            if key == 'args' and 'annotation' in dropped:
                value = _without_annotations(value)
            elif key == 'body' and nested and value and _is_docstring(value[0]):
                value = value[1:]
            elif key == 'body' and not nested:
                value = [statement for statement in value if not _is_docstring(statement)]
            elif key == 'decorator_list':
                value = [decorator for decorator in value if not self.skip(decorator)]
            if value is not None and value != []:
                self.out.append(f'{key}=')
                self.write(value)
        self.depth -= nested

    def _dropped(self, node: ast.AST) -> tuple[str, ...]:
        if self.depth or self.keep_annotations:
            return ()
        if isinstance(node, _FUNCTIONS):
            others = [d for d in node.decorator_list if not self.skip(d) and _last_name(d) not in _PLAIN_DECORATORS]
            return () if others else ('returns', 'annotation')
        return ()


def _without_annotations(args: ast.arguments) -> ast.arguments:
    def bare(arg: Any) -> Any:
        return None if arg is None else ast.arg(arg=arg.arg, annotation=None)

    return ast.arguments(
        posonlyargs=[bare(a) for a in args.posonlyargs],
        args=[bare(a) for a in args.args],
        vararg=bare(args.vararg),
        kwonlyargs=[bare(a) for a in args.kwonlyargs],
        kw_defaults=args.kw_defaults,
        kwarg=bare(args.kwarg),
        defaults=args.defaults,
    )


def _chain(node: ast.expr) -> Chain:
    """`a.b.c` as a tuple of names; empty for an expression that does not begin with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ()
    return (node.id, *reversed(names))


def _root(node: ast.expr) -> str:
    """The first name of `name.a[i].b`."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ''


def _arguments(args: ast.arguments) -> Iterator[ast.arg]:
    yield from (*args.posonlyargs, *args.args, *args.kwonlyargs)
    yield from (arg for arg in (args.vararg, args.kwarg) if arg is not None)


def _bound(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that statements or targets bind in their own scope."""
    names: set[str] = set()
    globals_: set[str] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind is ast.Name:
            if type(node.ctx) is not ast.Load:
                names.add(node.id)
        elif kind in _DEFINITIONS:
            names.add(node.name)
        elif kind is ast.Import or kind is ast.ImportFrom:
            names |= {alias.asname or alias.name.partition('.')[0] for alias in node.names}
        elif kind in _COMPREHENSIONS or kind is ast.Lambda:
            names |= {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}
        elif kind is ast.Global:
            globals_ |= set(node.names)
        elif kind is not ast.Constant:
            if kind in (ast.ExceptHandler, ast.MatchAs, ast.MatchStar) and node.name:
                names.add(node.name)
            elif kind is ast.MatchMapping and node.rest:
                names.add(node.rest)
            stack += _children(node)
    return names - globals_


def _bound_by_statements(body: list[ast.stmt]) -> set[str]:
    """`_bound` for a function body in which no expression binds a name, so that expressions can be skipped."""
    targets: list[ast.AST] = []
    stack: list[Any] = list(body)
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind in (ast.Assign, ast.Delete):
            targets += node.targets
        elif kind in (ast.AugAssign, ast.AnnAssign):
            targets.append(node.target)
        elif kind in (ast.For, ast.AsyncFor):
            targets.append(node.target)
            stack += node.body
            stack += node.orelse
        elif kind in (ast.If, ast.While):
            stack += node.body
            stack += node.orelse
        elif kind in (ast.With, ast.AsyncWith):
            targets += [item.optional_vars for item in node.items if item.optional_vars is not None]
            stack += node.body
        elif kind not in (ast.Expr, ast.Return, ast.Raise, ast.Assert, ast.Pass):
            targets.append(node)  # definitions, imports, try and match
    return _bound(targets)


class _Reader:
    """Collects the outside names that a tree refers to."""

    def __init__(self, scan: Scan, skip: Callable[[ast.expr], bool], module: Module) -> None:
        self.scan = scan
        self.skip = skip
        self.keep_annotations = module.keep_annotations
        self.has_walrus = module.has_walrus
        self.package = module.package
        self.depth = 0

    def read(self, node: Any, local: frozenset[str]) -> None:
        reader = _READERS.get(type(node))
        if reader is not None:
            reader(self, node, local)
        else:
            for child in _children(node):
                self.read(child, local)

    def _all(self, nodes: Iterable[ast.AST | None], local: frozenset[str]) -> None:
        for node in nodes:
            if node is not None:
                self.read(node, local)

    def name(self, node: ast.Name, local: frozenset[str]) -> None:
        if node.id not in local and isinstance(node.ctx, ast.Load):
            self.scan.chains.add((node.id,))
            self.scan.dynamic |= node.id in _DYNAMIC

    def attribute(self, node: ast.Attribute, local: frozenset[str]) -> None:
        chain = _chain(node)
        if chain and chain[0] not in local:
            self.scan.chains.add(chain)
            return
        self.scan.attributes.add(node.attr)
        self.read(node.value, local)

    def call(self, node: ast.Call, local: frozenset[str]) -> None:
        called = _last_name(node.func)
        words = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        if called == 'import_module' or (called == '__import__' and words):
            if words:
                self.scan.imports.add((words[0], None))
            else:
                self.scan.dynamic = True
        elif called in ('getattr', 'hasattr', 'attrgetter', 'methodcaller'):
            self.scan.attributes |= {part for word in words for part in word.split('.')}
            named = len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
            of_module = bool(node.args) and isinstance(node.args[0], ast.Call) and _last_name(node.args[0].func)
            if called == 'getattr' and not named and of_module != 'import_module':
                chain = _chain(node.args[0]) if node.args else ()
                self.scan.looked_up.add(chain if chain and chain[0] not in local else ())
        for child in _children(node):
            self.read(child, local)

    def statement(self, node: ast.Expr, local: frozenset[str]) -> None:
        if isinstance(node.value, ast.Call):
            chain = _chain(node.value.func)
            if chain and chain[0] not in local:
                self.scan.checks.add(chain)
                self._all((*node.value.args, *node.value.keywords), local)
                if chain[-1] in ('exec', 'eval', 'import_module', 'getattr', '__import__'):
                    self.call(node.value, local)
                return
        self.read(node.value, local)

    def function(self, node: Any, local: frozenset[str]) -> None:
        decorators = [d for d in node.decorator_list if not self.skip(d)]
        self._all(decorators, local)
        self._all((*node.args.defaults, *node.args.kw_defaults), local)
        others = [d for d in decorators if _last_name(d) not in _PLAIN_DECORATORS]
        if self.depth or self.keep_annotations or others:
            self._all((*(arg.annotation for arg in _arguments(node.args)), node.returns), local)
        bound = _bound(node.body) if self.has_walrus else _bound_by_statements(node.body)
        inside = frozenset(bound | {arg.arg for arg in _arguments(node.args)})
        self.depth += 1
        self._all(node.body, local | inside)
        self.depth -= 1

    def lambda_(self, node: ast.Lambda, local: frozenset[str]) -> None:
        self._all((*node.args.defaults, *node.args.kw_defaults), local)
        self.read(node.body, local | {arg.arg for arg in _arguments(node.args)})

    def comprehension(self, node: Any, local: frozenset[str]) -> None:
        self.read(node.generators[0].iter, local)
        inside = local | _bound(generator.target for generator in node.generators)
        for index, generator in enumerate(node.generators):
            self._all((*([generator.iter] if index else []), *generator.ifs), inside)
        self._all([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt], inside)

    def import_(self, node: ast.Import, local: frozenset[str]) -> None:
        self.scan.imports |= {(alias.name, None) for alias in node.names}

    def import_from(self, node: ast.ImportFrom, local: frozenset[str]) -> None:
        base = _absolute(node, self.package)
        self.scan.imports |= {(base, None if alias.name == '*' else alias.name) for alias in node.names}

    def match_class(self, node: ast.MatchClass, local: frozenset[str]) -> None:
        self.scan.attributes |= set(node.kwd_attrs)
        for child in _children(node):
            self.read(child, local)


_READERS: dict[type, Callable[[_Reader, Any, frozenset[str]], None]] = {
    ast.Name: _Reader.name,
    ast.Attribute: _Reader.attribute,
    ast.Call: _Reader.call,
    ast.Expr: _Reader.statement,
    ast.FunctionDef: _Reader.function,
    ast.AsyncFunctionDef: _Reader.function,
    ast.Lambda: _Reader.lambda_,
    **dict.fromkeys(_COMPREHENSIONS, _Reader.comprehension),
    ast.Import: _Reader.import_,
    ast.ImportFrom: _Reader.import_from,
    ast.MatchClass: _Reader.match_class,
}


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The absolute name of the module in `from ... import`."""
    if not node.level:
        return node.module or ''
    parts = package.split('.')
    base = '.'.join(parts[: len(parts) - node.level + 1])
    return f'{base}.{node.module}' if node.module else base


# Modules ------------------------------------------------------------------------------------


class Module:
    """The top level of a module: the statements that define each name, and the origins of imported names."""

    def __init__(self, name: str, text: str, is_package: bool) -> None:
        self.name = name
        self.package = name if is_package else name.rpartition('.')[0]
        self.tree = ast.parse(text)
        self.keep_annotations = _CALLED_LANGUAGE.search(text) is not None
        self.has_walrus = ':=' in text
        self.statements: dict[str, list[ast.stmt]] = {}
        self.imports: dict[str, list[tuple[str, str | None]]] = {}
        self.stars: list[str] = []
        #: Names that functions assign at run time, so their values are not constants.
        self.variables = {n.strip() for names in re.findall(r'^\s+global (.+)$', text, re.M) for n in names.split(',')}
        for statement in self.tree.body:
            self._add(statement)

    def _add(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            self._add_imports(statement)
        elif isinstance(statement, ast.If) and _last_name(statement.test) == 'TYPE_CHECKING':
            for other in statement.orelse:
                self._add(other)
        else:
            names = set()
            if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
                names = {statement.name}
            elif isinstance(statement, ast.Expr):
                if isinstance(statement.value, ast.Call):
                    names |= {_root(statement.value.func)} - self.imports.keys()
                    names |= {arg.id for arg in statement.value.args if isinstance(arg, ast.Name)}
            else:
                names |= _bound([statement])
                names |= {_root(n) for n in ast.walk(statement) if isinstance(n, ast.expr) and _is_changed(n)}
                if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                    for inner in ast.walk(statement):
                        if isinstance(inner, (ast.Import, ast.ImportFrom)):
                            self._add_imports(inner)
                        elif isinstance(inner, ast.Call):
                            names |= {_root(inner.func)} | {a.id for a in inner.args if isinstance(a, ast.Name)}
            for name in names - {''}:
                self.statements.setdefault(name, []).append(statement)

    def _add_imports(self, statement: ast.Import | ast.ImportFrom) -> None:
        for alias in statement.names:
            if isinstance(statement, ast.Import):
                top = alias.name if alias.asname else alias.name.partition('.')[0]
                self.imports.setdefault(alias.asname or top, []).append((top, None))
            elif alias.name == '*':
                self.stars.append(_absolute(statement, self.package))
            else:
                source = (_absolute(statement, self.package), alias.name)
                self.imports.setdefault(alias.asname or alias.name, []).append(source)

    def at_line(self, line: int) -> ast.stmt | None:
        """The top-level statement that contains a line."""
        for statement in self.tree.body:
            decorators = getattr(statement, 'decorator_list', [])
            first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
            if first <= line <= (statement.end_lineno or first):
                return statement
        return None


def _is_changed(node: ast.expr) -> bool:
    """Whether an expression is a mutated part of an object: `table[key]`, `thing.field`."""
    return isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load)


class Sources:
    """Finds the text of modules of the package and of modules in the folder of a user's kernel."""

    def __init__(self) -> None:
        self._folders: set[str] = set()
        package = sys.modules.get(PACKAGE)
        self._package = str(Path(package.__file__ if package and package.__file__ else __file__).parent)
        if not package:
            self._package = str(Path(__file__).parents[1])

    def include(self, module: str, file: str) -> None:
        """Also use the modules in the folder of a user's kernel."""
        if module.partition('.')[0] != PACKAGE:
            depth = 0 if module == '__main__' else module.count('.') - (Path(file).stem == '__init__')
            folder = Path(file).resolve().parents[max(depth, 0)]
            self._folders.add(str(folder / module.partition('.')[0]) if '.' in module else str(folder))

    def file(self, module: str) -> Path | None:
        """The file of a module whose code counts; nothing is imported."""
        loaded = sys.modules.get(module)
        if loaded is not None:
            name = getattr(loaded, '__file__', None)
            return Path(name) if name and name.endswith('.py') and self._counts(name) else None
        parent, _, last = module.rpartition('.')
        if parent:
            holder = sys.modules.get(parent)
            above = self.file(parent)
            searched = list(getattr(holder, '__path__', [])) or ([str(above.parent)] if above else [])
        else:
            searched = list(self._folders)
        for folder in searched:
            for path in (Path(folder) / last / '__init__.py', Path(folder) / f'{last}.py'):
                if self._counts(str(path)) and path.exists():
                    return path
        return None

    def _counts(self, name: str) -> bool:
        if name.startswith(self._package + '/'):
            return True
        resolved = str(Path(name).resolve()) if self._folders else name
        for folder in self._folders:
            if resolved.startswith(folder + '/'):
                beyond = resolved[len(folder) :]
                return '/site-packages/' not in beyond and '/lib/python' not in beyond
        return False

    def read(self, module: str) -> tuple[str, bool] | None:
        """The text of a module whose code counts, and whether the module is a package."""
        path = self.file(module)
        if path is None:
            return None
        try:
            return path.read_text(encoding='utf-8'), path.name == '__init__.py'
        except OSError:
            return None

    def value(self, module: str, name: str) -> Any:
        """The value of a name in a loaded module; the class `Sources` if there is none."""
        return getattr(sys.modules.get(module), name, Sources)


# The graph ----------------------------------------------------------------------------------


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection, which takes longer than parsing: trees are many small objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Code:
    """The code of the package and of what it reaches; every module is parsed once."""

    def __init__(self, sources: Sources | None = None) -> None:
        self.sources = sources or Sources()
        self._modules: dict[str, Module | None] = {}
        self._scans: dict[tuple[str, int], Scan] = {}
        self._digests: dict[Any, str] = {}
        self._texts: dict[str, str] = {}
        self._targets: dict[tuple[str, Chain], tuple[tuple[Node, ...], Chain]] = {}
        self._used: dict[int, tuple[tuple[Node, ...], frozenset[str]]] = {}
        #: What unresolved lookups add; memoized together with the scan.
        self._everything: dict[int, bool] = {}

    def module(self, name: str) -> Module | None:
        """The module, if its code counts."""
        if name not in self._modules:
            found = self.sources.read(name)
            self._modules[name] = None if found is None else Module(name, *found)
        return self._modules[name]

    # Digests

    def types(self, values: Iterable[Any]) -> tuple[Node, ...]:
        """The classes of the objects passed to a builder."""
        return tuple(sorted({node for value in values for node in self._types(value)}))

    def digest(self, builder: Callable, types: tuple[Node, ...] = ()) -> str:
        """The digest of everything a builder reaches when it is called with objects of these types."""
        builder = inspect.unwrap(builder)
        key = (builder, types)
        if key not in self._digests:
            with _no_collection():
                roots, extra = self._roots(builder)
                self._digests[key] = self._hash(self.reach([*roots, *types]), extra)
        return self._digests[key]

    def record(self, builder: Callable, types: tuple[Node, ...]) -> dict[str, Any]:
        """The digest of a kernel of the package together with its inputs: source texts and values of constants."""
        digest = self.digest(builder, types)
        constants = {
            f'{node.module}:{node.name}': value
            for node in self.reached(builder, types)
            if node.name and (value := self._constant(node))
        }
        known = [name for name, module in self._modules.items() if module is not None]
        texts = {name: self._text(name) for name in known if name.partition('.')[0] == PACKAGE}
        return {'digest': digest, 'texts': {**texts, _SELF: self._text(_SELF)}, 'constants': constants}

    def holds(self, record: Any) -> bool:
        """Whether a recorded digest is still valid: all texts and values are unchanged."""
        try:
            texts, constants = record['texts'], record['constants']
            return (
                isinstance(record['digest'], str)
                and _SELF in texts
                and all(self._text(name) == text for name, text in texts.items())
                and all(_plain(self.sources.value(*key.split(':'))) == value for key, value in constants.items())
            )
        except (KeyError, TypeError, AttributeError):
            return False

    def _text(self, name: str) -> str:
        """The digest of a module's whole text."""
        if name not in self._texts:
            found = self.sources.read(name)
            self._texts[name] = '' if found is None else hashlib.sha256(found[0].encode()).hexdigest()
        return self._texts[name]

    def _hash(self, reached: Iterable[Node], extra: Iterable[str]) -> str:
        digest = hashlib.sha256()
        for line in sorted(self._line(node) for node in reached):
            digest.update(line.encode())
        for line in extra:
            digest.update(line.encode())
        return digest.hexdigest()

    @functools.cached_property
    def _lines(self) -> dict[Node, str]:
        return {}

    def _line(self, node: Node) -> str:
        if node not in self._lines:
            file = self.sources.file('__main__') if node.module == '__main__' else None
            name = file.stem if file is not None else node.module
            texts = [self._scan(node.module, statement).text for statement in self._statements(node)]
            value = self._constant(node)
            self._lines[node] = '\n'.join((f'{name}:{node.name}:{node.member}', *texts, value, ''))
        return self._lines[node]

    def _constant(self, node: Node) -> str:
        """The value of a constant, which its expression alone may not determine."""
        module = self.module(node.module)
        if module is None or node.member or node.name in module.variables:
            return ''
        statements = module.statements.get(node.name, ())
        if not statements or not all(isinstance(s, (ast.Assign, ast.AnnAssign)) for s in statements):
            return ''
        return _plain(self.sources.value(node.module, node.name)) or ''

    # Reaching

    def reached(self, builder: Callable, types: tuple[Node, ...] = ()) -> set[Node]:
        """Everything a builder reaches."""
        roots, _ = self._roots(inspect.unwrap(builder))
        return self.reach([*roots, *types])

    def reach(self, roots: Iterable[Node]) -> set[Node]:
        """Everything that is reachable from some names."""
        reached: set[Node] = set()
        attributes: set[str] = set()
        classes: dict[Node, list[str]] = {}
        everything = False
        work = list(roots)
        while work:
            node = work.pop()
            if node in reached:
                continue
            reached.add(node)
            for statement in self._statements(node):
                targets, used, looks_up = self._uses(node, statement)
                everything |= looks_up
                attributes |= used
                work += [target for target in targets if target not in reached]
                if isinstance(statement, ast.ClassDef) and not node.member:
                    owner = Node(node.module, statement.name)
                    classes[owner] = [s.name for s in statement.body if isinstance(s, _FUNCTIONS)]
            if not work:
                for owner, members in classes.items():
                    work += [
                        found
                        for name in members
                        if (everything or name in attributes or (_is_special(name) and name not in _COPYING))
                        and (found := Node(owner.module, owner.name, name)) not in reached
                    ]
        return reached

    def _statements(self, node: Node) -> list[ast.stmt]:
        module = self.module(node.module)
        if module is None:
            return []
        if node.name.startswith('@'):
            found = module.at_line(int(node.name[1:]))
            return [found] if found is not None else list(module.tree.body)
        if node.name not in module.statements:
            return list(module.tree.body)
        statements = module.statements[node.name]
        if not node.member:
            return [*statements, *self._registered(module, node.name)]
        bodies = [s.body for s in statements if isinstance(s, ast.ClassDef)]
        return [s for body in bodies for s in body if isinstance(s, _FUNCTIONS) and s.name == node.member]

    def _registered(self, module: Module, name: str) -> list[ast.stmt]:
        """Statements that a decorator of the same module adds to a table that starts empty."""
        first = module.statements.get(name, [None])[0]
        value = getattr(first, 'value', None)
        if not isinstance(first, (ast.Assign, ast.AnnAssign)) or not _is_empty(value):
            return []
        functions = [s for s in module.tree.body if isinstance(s, _FUNCTIONS)]
        filling = {f.name for f in functions if any(_fills(n, name) for n in ast.walk(f))}
        return [
            s
            for s in module.tree.body
            if isinstance(s, (*_FUNCTIONS, ast.ClassDef)) and any(_last_name(d) in filling for d in s.decorator_list)
        ]

    def _scan(self, name: str, statement: ast.stmt) -> Scan:
        key = (name, id(statement))  # trees live as long as this object
        found = self._scans.get(key)
        if found is None:
            found = self._scans[key] = self._read(name, statement)
        return found

    def _read(self, name: str, statement: ast.stmt) -> Scan:
        module = self.module(name)
        scan = Scan()
        local: frozenset[str] = frozenset()
        if module is None:
            return scan

        def skip(decorator: ast.expr) -> bool:
            chain = _chain(decorator.func if isinstance(decorator, ast.Call) else decorator)
            return bool(chain) and Node(*_DECLARATION) in self._resolve(name, chain)[0]

        writer = _Writer(module.keep_annotations, skip)
        reader = _Reader(scan, skip, module)
        if isinstance(statement, ast.ClassDef):  # its methods are separate nodes
            header = [s for s in statement.body if not isinstance(s, _FUNCTIONS) and not _is_docstring(s)]
            shown: ast.AST = ast.ClassDef(
                name=statement.name,
                bases=statement.bases,
                keywords=statement.keywords,
                body=header,
                decorator_list=statement.decorator_list,
            )
            local = frozenset(n for n in _bound(header) if not self._defines(module, n))
        elif isinstance(statement, ast.AnnAssign):
            value: Any = statement.value
            shown = ast.Assign(targets=[statement.target], value=value)
        else:
            shown = statement
        writer.write(shown)
        reader.read(shown, local)
        scan.text = ''.join(writer.out)
        return scan

    def _uses(self, node: Node, statement: ast.stmt) -> tuple[tuple[Node, ...], frozenset[str], bool]:
        """The references of a statement, the attributes it uses, and whether it looks up names at run time."""
        key = id(statement)
        if key not in self._used:
            self._used[key], self._everything[key] = self._find_uses(node.module, statement)
        targets, used = self._used[key]
        if not node.name and isinstance(statement, ast.ClassDef):  # when a whole module counts, every method counts
            methods = [s.name for s in statement.body if isinstance(s, _FUNCTIONS)]
            targets = (*targets, *(Node(node.module, statement.name, method) for method in methods))
        return targets, used, self._everything[key]

    def _find_uses(self, name: str, statement: ast.stmt) -> tuple[tuple[tuple[Node, ...], frozenset[str]], bool]:
        scan = self._scan(name, statement)
        targets: list[Node] = []
        used = set(scan.attributes)
        everything = scan.dynamic
        for chain in scan.chains | scan.checks:
            found, rest = self._resolve(name, chain)
            if chain not in scan.chains and all(target.module == _CHECKS for target in found):
                continue
            targets += found
            used |= set(rest)
        for base, attribute in scan.imports:
            targets += self._imported(base, attribute, ())[0] if attribute else self._of_module(base, ())[0]
        for chain in scan.looked_up:
            found, _ = self._resolve(name, chain) if chain else ((Node(name),), ())
            everything |= bool(found)
            targets += [Node(target.module) for target in found]
        if scan.dynamic:
            targets.append(Node(name))
        if name == _COMPILER:
            targets = [target for target in targets if target.name in _COMPILER_ONLY]
        return (tuple(targets), frozenset(used)), everything

    # Names

    def _resolve(self, name: str, chain: Chain) -> tuple[tuple[Node, ...], Chain]:
        """The target of a dotted name in a module, and the remaining attributes."""
        key = (name, chain)
        if key not in self._targets:
            self._targets[key] = (), ()  # stops the recursion for circular imports
            self._targets[key] = self._find(name, chain)
        return self._targets[key]

    def _find(self, name: str, chain: Chain) -> tuple[tuple[Node, ...], Chain]:
        module = self.module(name)
        if module is None:
            return (), ()
        first, *rest = chain
        nodes: list[Node] = []
        left: Chain = ()
        if first in module.statements:
            nodes.append(Node(name, first))
            left = () if (name, first) == _LANGUAGE else tuple(rest)
        for base, attribute in module.imports.get(first, ()):
            found, more = (
                self._imported(base, attribute, tuple(rest)) if attribute else self._of_module(base, tuple(rest))
            )
            nodes += found
            left += more
        if nodes or first in module.imports:
            return tuple(nodes), left
        for star in module.stars:
            if (other := self.module(star)) is not None and self._defines(other, first):
                return self._resolve(star, chain)
        if hasattr(builtins, first) or first.startswith('__') or any(self.module(s) is None for s in module.stars):
            return (), ()
        return (Node(name),), tuple(rest)

    def _defines(self, module: Module, name: str) -> bool:
        if name in module.statements or name in module.imports:
            return True
        return any((m := self.module(star)) is not None and self._defines(m, name) for star in module.stars)

    def _imported(self, base: str, attribute: str, rest: Chain) -> tuple[tuple[Node, ...], Chain]:
        """`from base import attribute`, followed by attributes."""
        module = self.module(base)
        if module is not None and self._defines(module, attribute):
            return self._resolve(base, (attribute, *rest))
        if self.module(f'{base}.{attribute}') is not None:
            return self._of_module(f'{base}.{attribute}', rest)
        return ((Node(base),), rest) if module is not None else ((), ())

    def _of_module(self, name: str, rest: Chain) -> tuple[tuple[Node, ...], Chain]:
        """A module, followed by attributes."""
        module = self.module(name)
        if module is None:
            return (), ()
        if rest and not self._defines(module, rest[0]) and self.module(f'{name}.{rest[0]}') is not None:
            return self._of_module(f'{name}.{rest[0]}', rest[1:])
        if rest and self._defines(module, rest[0]):
            return self._resolve(name, rest)
        return (Node(name),), rest

    # Objects

    def _roots(self, builder: Callable) -> tuple[list[Node], list[str]]:
        """The start nodes for a builder, and the other things its result depends on: values it captures."""
        name = builder.__module__
        code = getattr(builder, '__code__', None)
        roots = [Node(_COMPILER, root) for root in _COMPILER_ROOTS]
        extra: list[str] = []
        if code is None:
            return [*roots, *self._types(builder)], extra
        self._include(builder)
        module = self.module(name)
        for variable, cell in zip(code.co_freevars, builder.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # the cell is empty
                continue
            extra.append(f'{variable}={_plain(value)}\n')
            roots += self._types(value)
        if module is None:
            return roots, [*extra, *_without_module(builder)]
        simple = builder.__qualname__ == builder.__name__ and builder.__name__ in module.statements
        roots.append(Node(name, builder.__name__ if simple else f'@{code.co_firstlineno}'))
        return roots, extra

    def _include(self, builder: Callable) -> None:
        name, file = builder.__module__, builder.__code__.co_filename
        if name not in self._modules and Path(file).suffix == '.py':
            self.sources.include(name, file)
            for other, known in list(self._modules.items()):
                if known is None:  # its code may count now
                    del self._modules[other]

    def _types(self, value: Any) -> list[Node]:
        """The classes and functions that an object passed to a builder adds."""
        if value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, torch.dtype):
            return []
        if isinstance(value, (tuple, list, set, frozenset)) and type(value).__module__ == 'builtins':
            return [node for item in value for node in self._types(item)]
        if isinstance(value, dict):
            return [node for pair in value.items() for item in pair for node in self._types(item)]
        owner = value if isinstance(value, type) or hasattr(value, '__code__') else type(value)
        nodes = []
        name = owner.__module__
        if isinstance(name, str) and self.sources.file(name) is not None:  # `file` does not parse the module
            top = owner.__qualname__.partition('.')[0]
            nodes.append(Node(name, '' if '<locals>' in owner.__qualname__ else top))
        if is_dataclass(value) and not isinstance(value, type):
            nodes += [node for f in fields(value) for node in self._types(getattr(value, f.name, None))]
        return nodes


def _is_special(name: str) -> bool:
    return name.startswith('__') and name.endswith('__')


def _is_empty(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return _last_name(value) in ('dict', 'list', 'set', 'defaultdict', 'OrderedDict')
    return (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)


def _fills(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return _root(node) == name
    return isinstance(node, ast.Call) and _chain(node.func)[:1] == (name,) and _last_name(node) in _MUTATORS


def _plain(value: Any) -> str | None:
    """A constant as text that is the same in every process; None for any other value."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes) or isinstance(value, torch.dtype):
        return repr(value)
    if type(value) in (tuple, frozenset):
        words = [_plain(item) for item in value]
        if None not in words:
            return f'{type(value).__name__}{words if type(value) is tuple else sorted(map(str, words))}'
    return None


def _without_module(builder: Callable) -> list[str]:
    """The sources of all functions and constants next to a builder without a file (in a notebook)."""
    lines = []
    for name, value in sorted(builder.__globals__.items()):
        value = getattr(value, 'builder', value)
        if getattr(value, '__module__', None) == builder.__module__ and hasattr(value, '__code__'):
            try:
                lines.append(ast.dump(ast.parse(textwrap.dedent(inspect.getsource(value)))))
            except (OSError, SyntaxError):
                lines.append(value.__code__.co_code.hex())
        elif (word := _plain(value)) is not None and not name.startswith('_'):
            lines.append(f'{name}={word}\n')
    return [*lines, builder.__code__.co_code.hex()]


@functools.cache
def code() -> Code:
    """The code of this process."""
    return Code()
