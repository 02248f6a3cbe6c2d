"""Show kernels: TileLang, CUDA, PTX, resources, instructions, layouts, passes, lines, findings; no GPU needed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from rich.syntax import Syntax

from tile_kernels.cli import console, files
from tile_kernels.cli.explain import add_case_arguments, selected_case
from tile_kernels.core import nvcc
from tile_kernels.core.cases import case_id
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.explain import config_words
from tile_kernels.core.gpus import GPUS, Gpu, gpu_named
from tile_kernels.core.launch import Launch, on_gpu
from tile_kernels.core.registry import launches_of, words_to_case

SYNTAX = {'tilelang': 'python', 'cuda': 'cuda', 'ptx': 'gas'}

#: Parts that `RENDER` makes of a launch; without `--what` these are shown.
PARTS = ('tilelang', 'cuda', 'ptx', 'resources')
#: Parts that `tile_kernels.sight` makes of a kernel.
TOOLS = ('mix', 'layouts', 'passes', 'annotated', 'lint')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `show`."""
    add_case_arguments(parser)
    parser.add_argument('--arch', default='sm_90a', help='architecture or GPU to compile for (default sm_90a)')
    known = f'only this part; may be repeated: {", ".join((*PARTS, *TOOLS))}, or pass=NAME for the diff of a pass'
    parser.add_argument('--what', type=_part, action='append', metavar='PART', help=known)
    parser.add_argument('--json', action='store_true', help='print JSON')


def _part(word: str) -> str:
    if word not in (*PARTS, *TOOLS) and not word.startswith('pass='):
        raise argparse.ArgumentTypeError(f'must be one of {", ".join((*PARTS, *TOOLS))} or pass=NAME, got {word}')
    return word


def run(args: argparse.Namespace) -> int:
    """Print the requested parts of every kernel that the case launches."""
    gpu, out = gpu_named(args.arch), console.output()
    found: dict[str, dict[str, Any]] = {}
    for heading, part, value in _of_file(args, gpu) if files.is_file(args.op) else _of_op(args, gpu):
        if args.json:
            found.setdefault(heading, {})[part] = value
            continue
        if out.is_terminal:
            out.rule(part)
            out.print(heading, markup=False)
        else:
            out.out(f'=== {part}: {heading}')
        text = value if isinstance(value, str) else _text(part, value)
        if out.is_terminal and part in SYNTAX:
            out.print(Syntax(text, SYNTAX[part], theme='ansi_dark', word_wrap=True))  # without wrapping, it cuts lines
        else:
            out.out(text, highlight=False)
    if args.json:
        console.json_out(found)
    return 0


def _of_op(args: argparse.Namespace, gpu: Gpu) -> Iterator[tuple[str, str, Any]]:
    """Heading, part and value of each launch of a case; the tools see the case at once."""
    op, case = selected_case(args)
    wanted = args.what or PARTS
    with on_gpu(gpu):
        launches = launches_of(op, case)
    for launch in launches:
        static = ', '.join(str(s).removeprefix('torch.') for s in launch.static)
        heading = f'{launch.kernel.name}({static})  {config_words(launch.config)}  {gpu.target}'
        for part in wanted:
            if part in PARTS:
                yield heading, part, RENDER[part](launch, gpu.target)
    for part in wanted:
        if part not in PARTS:
            yield f'{op.name}  {case_id(case)}  {gpu.target}', part, _tool(part, gpu, op, **case)


def _of_file(args: argparse.Namespace, gpu: Gpu) -> Iterator[tuple[str, str, Any]]:
    """The same for a kernel of a file."""
    from tile_kernels.sight.lower import lower
    from tile_kernels.sight.subject import resolve

    name, defined = files.definitions(args.op)
    named = files.values(words_to_case(args.values))
    wanted = args.what or ('cuda', 'resources', *TOOLS[1:])
    for part in wanted:
        if part not in PARTS:
            yield f'{name}  {gpu.target}', part, _tool(part, gpu, defined[name], **named)
            continue
        for subject in resolve(defined[name], device=_known(gpu), **named):
            source = lower(subject).source
            made = {'tilelang': subject.prim_func.script, 'cuda': lambda source=source: source}
            made['ptx'] = lambda source=source: nvcc.ptx(source, gpu.target)
            made['resources'] = lambda source=source: nvcc.resources(source, gpu.target)
            yield f'{subject.name}  {gpu.target}', part, made[part]()


def _known(gpu: Gpu) -> str:
    """The name of a GPU for the tools, which know the limits of known GPUs only."""
    name = next((name for name, known in GPUS.items() if known == gpu), None)
    if name is None:
        raise ArgumentError(f'show: for this part, --arch must be a known GPU, which are {", ".join(GPUS)}')
    return name


def _tool(part: str, gpu: Gpu, kernel: Any, **named: Any) -> Any:
    """What a tool finds out about a kernel."""
    from tile_kernels import sight

    device = _known(gpu)
    if part == 'mix':
        return sight.mix(kernel, device=device, **named)
    if part == 'layouts':
        return {name: picture.text() for name, picture in sight.plot_layout(kernel, device=device, **named).items()}
    if part == 'annotated':
        return sight.annotate(kernel, device=device, **named)
    if part == 'lint':
        return sight.lint(kernel, device=device, **named)
    return sight.passes(kernel, name=part.partition('=')[2] or None, device=device, **named)


def _text(part: str, value: Any) -> str:
    """A value of a part as text."""
    if part == 'resources':
        return '\n'.join(f'{name.replace("_", " "):<15}{number:>8}' for name, number in value.items())
    if part == 'layouts':
        return '\n\n'.join(value.values())
    if part.startswith('pass='):
        return '\n\n'.join(item.diff for item in value)
    return '\n'.join(map(str, value)) if part == 'passes' else str(value)


def _tilelang(launch: Launch, arch: str) -> str:
    return launch.kernel.tir(*launch.static, **launch.config).script()


def _cuda(launch: Launch, arch: str) -> str:
    return launch.kernel.source(launch.static, launch.size, arch, **launch.config)


def _ptx(launch: Launch, arch: str) -> str:
    return nvcc.ptx(_cuda(launch, arch), arch)


def _resources(launch: Launch, arch: str) -> dict[str, int]:
    return launch.kernel.resources(launch.static, launch.size, arch, **launch.config)


RENDER: dict[str, Callable[[Launch, str], Any]] = {
    'tilelang': _tilelang,
    'cuda': _cuda,
    'ptx': _ptx,
    'resources': _resources,
}
