"""Entry point of `tile-kernels`: parse the command line, run one subcommand, report errors as one sentence."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import tile_kernels
from tile_kernels.cli import (
    bench,
    cache,
    calibrate,
    catalog,
    debug,
    demo,
    doctor,
    explain,
    learn,
    precompile,
    profile,
    report,
    show,
    tune,
)
from tile_kernels.core.errors import TileKernelsError

COMMANDS = {
    'doctor': doctor,
    'list': catalog,
    'show': show,
    'explain': explain,
    'bench': bench,
    'report': report,
    'tune': tune,
    'profile': profile,
    'calibrate': calibrate,
    'debug': debug,
    'precompile': precompile,
    'cache': cache,
    'demo': demo,
    'learn': learn,
}


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    made = argparse.ArgumentParser('tile-kernels', description=(tile_kernels.__doc__ or '').splitlines()[0])
    made.add_argument('--version', action='version', version=f'tile-kernels {tile_kernels.__version__}')
    commands = made.add_subparsers(dest='command', required=True, metavar='COMMAND')
    for name, module in COMMANDS.items():
        headline = (module.__doc__ or '').splitlines()[0]
        command = commands.add_parser(name, help=headline, description=headline)
        module.add_arguments(command)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        return COMMANDS[args.command].run(args)
    except TileKernelsError as error:
        prefix = f'{args.command}: '  # errors of the function with that name already have this prefix
        sys.stderr.write(f'tile-kernels {prefix}{str(error).removeprefix(prefix)}\n')
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has ended: exit silently
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == '__main__':
    sys.exit(main())
