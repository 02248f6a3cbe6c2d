"""Print a table of how much of TileLang's own code the interpreter runs, from a checkout of TileLang.

    python tools/scoreboard.py /path/to/tilelang                     # examples and tests
    python tools/scoreboard.py /path/to/tilelang --part examples --only gemm

Every example file runs unchanged, as with `python -m tile_kernels.interpreter FILE.py`; pytest runs test files. Each
file runs in its own forked process. Nothing from the checkout is stored. The result of a program is one of

    right        it ended, and its own comparisons hold
    unsupported  it uses a construct that the interpreter rejects (named in the list below the table)
    finding      the interpreter reports a bug (a true one, or a false alarm: read it)
    wrong        one of its own comparisons fails
    crash        any other exception
    slow         it did not end within the time limit
    missing      it needs a package that is not installed, or something TileLang itself lacks here
    compiler     a test that wants the compiler to refuse a kernel, or reads what only the compiler has; not counted
    other        it launches no kernel, or pytest skips it; not counted

Most examples have sizes for a GPU. With `--small`, sizes above 1024 in defaults and in the main part become 512, and
batches become 1: the kernels stay as they are. `SETTINGS` names the programs that need other sizes, or another GPU.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = ('right', 'unsupported', 'finding', 'wrong', 'crash', 'slow', 'missing', 'compiler', 'other')
COUNTED = RESULTS[:6]


@dataclass(frozen=True)
class Outcome:
    """The result of one program."""

    name: str
    result: str
    words: str
    seconds: float


@dataclass(frozen=True)
class Setting:
    """What a program needs: a GPU, and with `--small` arguments of its command line or sizes of its main part."""

    capability: str = ''
    arguments: str = ''
    sizes: tuple[tuple[str, int], ...] = ()
    small: bool = True  # smaller sizes do not break it


#: Examples by the beginning of their path, the longest that fits counts.
SETTINGS = {
    'aws/gemm': Setting(arguments='--m 256 --n 4096 --k 256'),
    'blockscaled_gemm_sm100/gemm_mxfp8': Setting('10.0', sizes=(('M', 256), ('N', 8192), ('K', 512))),
    'blockscaled_gemm_sm100/grouped': Setting('10.0', '--batch-sizes 256,512 --N 8192 --K 512 --no-bench'),
    'convolution/': Setting(arguments='--n 1 --h 16 --w 16'),
    'deepseek_mla/example_mla_decode.py': Setting(arguments='--batch 1 --kv_ctx 2048'),
    'deepseek_mla/example_mla_decode_ws': Setting(arguments='--batch 1 --kv_ctx 2048'),
    'deepseek_v32/sparse_mla_fwd_': Setting(
        arguments='--test_correctness', sizes=(('S', 2), ('SKV', 2048), ('topk', 256), ('H', 64))
    ),
    'deepseek_v4/fp8_fp4': Setting('10.0', '--M 256 --N 8192 --K 512'),
    'cast/example_group': Setting(small=False),
    'dsa_hisa/hisa': Setting(sizes=(('M', 1024), ('topk_tokens', 256), ('block_topk', 16))),
    'dsa_hisa/pool': Setting(small=False),
    'dsa_sparse_finetune/indexer_bwd': Setting(small=False),
    'dsa_sparse_finetune/sparse_mla_topk': Setting(small=False),
    'dsa_sparse_finetune/sparse_mla_fwd': Setting(sizes=(('S', 288), ('H', 64), ('topk', 128))),
    'flash_attention/example_gqa_bwd.py': Setting(arguments='--batch 1 --h 4 --n_ctx 256 --groups 2'),
    'flash_attention/example_gqa_bwd_tma_reduce.py': Setting(arguments='--batch 1 --h 4 --n_ctx 256 --groups 2'),
    'flash_attention/example_mha_bwd_bshd': Setting(arguments='--batch 1 --h 2 --n_ctx 256'),
    'flash_attention_sm100/': Setting('10.0'),
    'gemm_int4/': Setting('8.0'),
    'gemm_sm120/': Setting('12.0', '--m 256 --n 256 --k 512 --verify'),
    'gemm_tcgen05/': Setting('10.0'),
    'gemm_tcgen05/gemm_tcgen5mma_ws_clc': Setting('10.0', '--m 256 --n 8192 --k 256 --group_size 8'),
    'gemm_tcgen05/gemm_tcgen5mma_ws_persistent.py': Setting('10.0', '--m 256 --n 8192 --k 256'),
}


def setting_of(name: str) -> Setting:
    """The setting of an example, by its path in the checkout."""
    fits = [key for key in SETTINGS if name.removeprefix('examples/').startswith(key)]
    return SETTINGS[max(fits, key=len)] if fits else Setting()


class OutOfTime(BaseException):
    """The time limit of a program has passed."""


def main() -> int:
    """Run the programs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkout', type=Path, help='a checkout of TileLang')
    parser.add_argument('--part', choices=('examples', 'tests', 'both'), default='both')
    parser.add_argument('--only', default='', help='run files whose path contains this regular expression')
    parser.add_argument(
        '--limit', type=int, default=60, help='seconds of CPU time a program may take, a sixth of those of the clock'
    )
    parser.add_argument('--capability', help='compute capability of the GPU that is imitated')
    parser.add_argument('--checks', default='memory')
    parser.add_argument('--small', action='store_true', help='give examples smaller sizes')
    parser.add_argument('--files', type=Path, help='run only the files named in the lines of this file')
    parser.add_argument('--json', type=Path, help='write every outcome here')
    args = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {}
    for part in ('examples', 'tests') if args.part == 'both' else (args.part,):
        outcomes[part] = []
        wanted = set(args.files.read_text().split()) if args.files else None
        for file in files_of(args.checkout, part, args.only):
            if wanted is not None and str(file.relative_to(args.checkout)) not in wanted:
                continue
            for outcome in run_file(file, part, args):
                outcomes[part].append(outcome)
                if outcome.result != 'other' or outcome.words:
                    sys.stdout.write(f'{outcome.result:12} {outcome.seconds:6.1f} s  {outcome.name}  {outcome.words}\n')
                    sys.stdout.flush()
            if args.json:
                args.json.write_text(
                    json.dumps({key: [asdict(one) for one in found] for key, found in outcomes.items()})
                )
    print_table(outcomes)
    return 0


def files_of(checkout: Path, part: str, only: str) -> list[Path]:
    """The files of a part, sorted by name."""
    folder = checkout / ('examples' if part == 'examples' else 'testing/python')
    found = []
    for file in sorted(folder.rglob('*.py')):
        test = file.name.startswith('test_')
        runs = re.search(r'__name__ == .__main__.', file.read_text())
        wanted = (runs and not test and 'tilelang' in file.read_text()) if part == 'examples' else test
        if wanted and re.search(only, str(file.relative_to(checkout))):
            found.append(file)
    return found


def run_file(file: Path, part: str, args: argparse.Namespace) -> list[Outcome]:
    """Run one file in its own process."""
    context = multiprocessing.get_context('fork')
    here, there = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(file, part, args, there))
    started = time.monotonic()
    worker.start()
    there.close()
    found: list[Outcome] = []
    limit = (7 if part == 'examples' else 100) * args.limit  # of the clock, which others may stop
    while time.monotonic() - started < limit:
        if here.poll(1.0):
            try:
                outcome = here.recv()
            except EOFError:
                break
            if outcome is None:
                break
            found.append(outcome)
        elif not worker.is_alive():
            break
    seconds = time.monotonic() - started
    if worker.is_alive() and seconds >= limit:
        worker.kill()
        found.append(Outcome(str(file.relative_to(args.checkout)), 'slow', '', seconds))
    worker.join()
    if worker.exitcode not in (0, None) and worker.exitcode != -signal.SIGKILL:
        found.append(Outcome(str(file.relative_to(args.checkout)), 'crash', f'exit status {worker.exitcode}', seconds))
    return found


def _work(file: Path, part: str, args: argparse.Namespace, there: Any) -> None:
    import torch

    from tile_kernels.interpreter.cuda_device import fake_cuda
    from tile_kernels.interpreter.jit_hook import interpreting

    torch.set_num_threads(1)
    os.chdir(_scratch())
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(sink, stream)
    wanted = args.capability or setting_of(str(file.relative_to(args.checkout))).capability or '9.0'
    major, minor = (int(number) for number in wanted.split('.'))
    sys.path.insert(0, str(file.parent))
    try:
        with fake_cuda((major, minor)), interpreting(args.checks):
            if part == 'examples':
                there.send(_run_example(file, args))
            else:
                _run_tests(file, args, there)
        there.send(None)
    except BaseException as error:
        there.send(Outcome(str(file.relative_to(args.checkout)), 'crash', repr(error)[:200], 0.0))
    finally:
        os._exit(0)


def _scratch() -> str:
    folder = f'/tmp/scoreboard.{os.getuid()}'
    os.makedirs(folder, exist_ok=True)
    return folder


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    open_ = [True]

    def ring(*_: Any) -> None:
        if open_:
            raise OutOfTime

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, seconds), signal.SIGALRM: (signal.ITIMER_REAL, 6 * seconds)}
    for number, (timer, limit) in timers.items():
        signal.signal(number, ring)
        signal.setitimer(timer, limit, 5)  # again: code that calls back may swallow the first
    try:
        yield
    finally:
        open_.clear()
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)


def _run_example(file: Path, args: argparse.Namespace) -> Outcome:
    setting = setting_of(str(file.relative_to(args.checkout)))
    sys.argv = [str(file), *(setting.arguments.split() if args.small else ())]
    started = time.monotonic()
    before = _launches()
    error: BaseException | None = None
    try:
        with _limited(args.limit):
            if args.small and setting.small:
                run_smaller(file, dict(setting.sizes))
            else:
                runpy.run_path(str(file), run_name='__main__')
    except BaseException as caught:
        error = caught
    return _judge(str(file.relative_to(args.checkout)), error, _launches() > before, time.monotonic() - started)


class Smaller(ast.NodeTransformer):
    """Shrinks the sizes of a program: numbers in defaults, keywords and the main part, never those in a kernel."""

    def __init__(self, sizes: dict[str, int] | None = None) -> None:
        self.main = False
        self.sizes = sizes or {}  # sizes of the main part, by name

    def visit_If(self, node: ast.If) -> ast.AST:
        """The main part of a program: every size in it."""
        main, self.main = self.main, self.main or '__name__' in ast.unparse(node.test)
        self.generic_visit(node)
        self.main = main
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Defaults of a function; a function called main belongs to the main part."""
        names = [arg.arg for arg in node.args.args][len(node.args.args) - len(node.args.defaults) :]
        node.args.defaults = [self._less(name, one) for name, one in zip(names, node.args.defaults, strict=True)]
        main, self.main = self.main, self.main or node.name in ('main', 'test', 'run')
        node.body = [self.visit(one) for one in node.body]
        self.main = main
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Arguments of calls in the main part, and defaults of command-line options."""
        self.generic_visit(node)
        option = isinstance(node.func, ast.Attribute) and node.func.attr == 'add_argument'
        if option or self.main:
            first = next((str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)), '').lstrip('-')
            for keyword in node.keywords:
                keyword.value = self._less(first if option else keyword.arg or '', keyword.value)
            node.args = [self._less('', arg) for arg in node.args]
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        """Sizes in the tuples over which the main part loops."""
        self.generic_visit(node)
        if self.main and isinstance(node.iter, ast.List):
            for row in node.iter.elts:
                if isinstance(row, ast.Tuple):
                    row.elts = [self._less('', value) for value in row.elts]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Sizes that the main part gives names to."""
        self.generic_visit(node)
        if self.main:
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=False)
                node.value.elts = [self._less(getattr(name, 'id', ''), value) for name, value in pairs]
            else:
                node.value = self._less(getattr(target, 'id', ''), node.value)
        return node

    def _less(self, name: str, node: ast.expr) -> ast.expr:
        if self.main and name in self.sizes and isinstance(node, ast.Constant):
            return ast.copy_location(ast.Constant(self.sizes[name]), node)
        return _less(name, node)


def _less(name: str, node: ast.expr) -> ast.expr:
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        return node
    if name.lower() in ('b', 'batch', 'batch_size', 'bs', 'batches'):
        return ast.copy_location(ast.Constant(min(1, node.value)), node)
    return ast.copy_location(ast.Constant(512), node) if node.value > 1024 and node.value % 512 == 0 else node


def run_smaller(file: Path, sizes: dict[str, int]) -> None:
    """Run an example with smaller sizes."""
    import types

    tree = ast.fix_missing_locations(Smaller(sizes).visit(ast.parse(file.read_text())))
    module = types.ModuleType('__main__')
    module.__file__ = str(file)
    before, sys.modules['__main__'] = sys.modules['__main__'], module
    try:
        exec(compile(tree, str(file), 'exec', dont_inherit=True), module.__dict__)
    finally:
        sys.modules['__main__'] = before


def _run_tests(file: Path, args: argparse.Namespace, there: Any) -> None:
    import pytest

    class Plugin:
        """Sends the outcome of every test."""

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_call(self, item: Any) -> Any:
            started, before = time.monotonic(), _launches()
            error = None
            try:
                with _limited(args.limit):
                    return (yield)
            except BaseException as caught:
                error = caught
                if isinstance(caught, OutOfTime):
                    return None
                raise
            finally:
                name = f'{file.relative_to(args.checkout)}::{item.name}'
                there.send(_judge(name, error, _launches() > before, time.monotonic() - started))

    pytest.main(
        ['-q', '-p', 'no:cacheprovider', '-p', 'no:xdist', '--rootdir', str(file.parent), str(file)], plugins=[Plugin()]
    )


_counter: list[int] = []


def _launches() -> int:
    """Number of kernels launched, or rejected, so far."""
    return len(_counter)


def _count_launches() -> None:
    from tile_kernels.interpreter import jit_hook

    run = jit_hook.InterpretedKernel.run

    def counted(self: Any, *tensors: Any, **named: Any) -> Any:
        _counter.append(1)
        return run(self, *tensors, **named)

    jit_hook.InterpretedKernel.run = counted  # type: ignore[method-assign]


def _judge(name: str, error: BaseException | None, launched: bool, seconds: float) -> Outcome:
    """Classify the result of a program."""
    from tile_kernels.interpreter import InterpreterError, UnsupportedConstruct

    chain: list[BaseException] = []
    at = error
    while at is not None and len(chain) < 9:
        chain.append(at)
        at = at.__cause__ or at.__context__
    words = ''
    if error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        last = f' at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}' if frames else ''
        words = (
            f'{type(error).__name__}: {str(error).strip().splitlines()[0][:150] if str(error).strip() else ""}{last}'
        )
    refused = next((one for one in chain if isinstance(one, UnsupportedConstruct)), None)
    found = next((one for one in chain if isinstance(one, InterpreterError)), None)
    skipped = type(error).__name__ in ('Skipped', 'Exit')
    if error is None or (isinstance(error, SystemExit) and not error.code):
        result = 'right' if launched else 'other'
    elif isinstance(error, OutOfTime):
        result = 'slow'
    elif 'DID NOT RAISE' in str(error) or "'Adapter' object has no attribute" in str(error):
        result = 'compiler'
    elif refused is not None:
        result, words = 'unsupported', str(refused)[:200]
    elif found is not None:
        result, words = 'finding', str(found)[:250]
    elif skipped:
        result = 'other'
    elif isinstance(error, (ImportError, SystemExit)) or (
        'has no attribute' in str(error) and 'tilelang' in str(error)
    ):
        result = 'missing'
    elif isinstance(error, AssertionError):
        result = 'wrong' if launched else 'other'
    else:
        result = 'crash' if launched else 'missing'
    return Outcome(name, result, words, seconds)


def print_table(outcomes: dict[str, list[Outcome]]) -> None:
    """Counts by result, then what is refused, most frequent first."""
    sys.stdout.write('\n| part | programs | ' + ' | '.join(RESULTS[:-1]) + ' | right, of those that build and end |\n')
    sys.stdout.write('|---|---|' + '---|' * len(RESULTS) + '\n')
    for part, found in outcomes.items():
        counts = Counter(one.result for one in found)
        total = sum(counts[result] for result in RESULTS[:-1])
        built = max(1, sum(counts[result] for result in COUNTED) - counts['slow'])
        row = ' | '.join(str(counts[result]) for result in RESULTS[:-1])
        sys.stdout.write(f'| {part} | {total} | {row} | {100 * counts["right"] / built:.1f} % |\n')
    refused = Counter(
        re.sub(r'^[^:]*: ', '', re.sub(r', at .*', '', one.words))
        for found in outcomes.values()
        for one in found
        if one.result == 'unsupported'
    )
    for words, count in refused.most_common():
        sys.stdout.write(f'{count:4}  {words}\n')


if __name__ == '__main__':
    import tilelang  # noqa: F401  (once, before the forks)
    import torch.utils._sympy.functions  # noqa: F401  (a time limit must not end it half imported)

    _count_launches()
    sys.exit(main())
