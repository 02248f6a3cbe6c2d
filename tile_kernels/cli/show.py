"""Show the kernels of an op: TileLang, CUDA, PTX, and registers, spills and shared memory; no GPU needed."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rich.syntax import Syntax

from tile_kernels.cli import console
from tile_kernels.cli.explain import add_case_arguments, selected_case
from tile_kernels.core import nvcc
from tile_kernels.core.explain import config_words
from tile_kernels.core.gpus import gpu_named
from tile_kernels.core.launch import Launch, on_gpu
from tile_kernels.core.registry import launches_of

PARTS = ('tilelang', 'cuda', 'ptx', 'resources')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `show`."""
    add_case_arguments(parser)
    parser.add_argument('--arch', default='sm_90a', help='architecture or GPU to compile for (default sm_90a)')
    parser.add_argument('--what', choices=PARTS, action='append', help='only this part; may be repeated')


def run(args: argparse.Namespace) -> int:
    """Print the requested parts of every kernel that the case launches."""
    gpu = gpu_named(args.arch)
    arch = gpu.target
    op, case = selected_case(args)
    out = console.output()
    with on_gpu(gpu):
        launches = launches_of(op, case)
    for launch in launches:
        static = ', '.join(str(s).removeprefix('torch.') for s in launch.static)
        heading = f'{launch.kernel.name}({static})  {config_words(launch.config)}  {arch}'
        for part in args.what or PARTS:
            if out.is_terminal:
                out.rule(part)
                out.print(heading, markup=False)
            else:
                out.out(f'=== {part}: {heading}')
            text = RENDER[part](launch, arch)
            if out.is_terminal and part != 'resources':
                language = {'tilelang': 'python', 'cuda': 'cuda', 'ptx': 'gas'}[part]
                out.print(Syntax(text, language, theme='ansi_dark', word_wrap=True))  # without wrapping, it cuts lines
            else:
                out.out(text)
    return 0


def _tilelang(launch: Launch, arch: str) -> str:
    return launch.kernel.tir(*launch.static, **launch.config).script()


def _cuda(launch: Launch, arch: str) -> str:
    return launch.kernel.source(launch.static, launch.size, arch, **launch.config)


def _ptx(launch: Launch, arch: str) -> str:
    return nvcc.ptx(_cuda(launch, arch), arch)


def _resources(launch: Launch, arch: str) -> str:
    """The resources of a kernel, one line per number."""
    numbers = launch.kernel.resources(launch.static, launch.size, arch, **launch.config)
    return '\n'.join(f'{name.replace("_", " "):<15}{value:>8}' for name, value in numbers.items())


RENDER: dict[str, Callable[[Launch, str], str]] = {
    'tilelang': _tilelang,
    'cuda': _cuda,
    'ptx': _ptx,
    'resources': _resources,
}
