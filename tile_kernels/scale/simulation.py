"""Run a distributed tile program on simulated devices, and check the order of everything that they share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.errors import ArgumentError
from tile_kernels.interpreter.api import CHECKS, Branch, Report, options_of
from tile_kernels.interpreter.errors import InterpreterError, UnsupportedConstruct
from tile_kernels.interpreter.session import PostMortem, Session
from tile_kernels.scale.language import EPOCH, EPOCH_WORD, Declared, declarations


def simulate(
    kernel: Any,
    world: int,
    args: Callable[[int], tuple[Any, ...]],
    checks: str = 'all',
    seed: int | None = None,
    launches: int = 1,
) -> Report:
    """Run one kernel on `world` simulated devices.

    Args:
        kernel: A `T.prim_func`, or a compiled kernel.
        world: Number of devices.
        args: Gives the arguments of each rank: CPU tensors and numbers in the order of the parameters. For a symmetric
            tensor it is the part of that rank, for signal pads None. Tensors are written in place.
        checks: As for `interpret`; races between devices are checked with 'races', 'all' and 'collect'.
        seed: Order in which blocks run: None for in turn, a number for an unfair order that prefers some devices.
        launches: How often each device runs the kernel, one run after the other; devices need not keep step.

    Returns:
        A report, as of `interpret`.

    Raises:
        InterpreterError: The kernel has an error; the subclass names it, `error.ranks` the devices concerned.
    """
    from tile_kernels.interpreter.engine.program import Shared, compiled

    check.one_of(checks, CHECKS, 'checks')
    check.integer(world, 'world', 1)
    check.integer(launches, 'launches', 1)
    prim_func = getattr(kernel, 'prim_func', kernel)
    declared = declarations(prim_func)
    arguments = [tuple(args(rank)) for rank in range(world)]
    for rank, given in enumerate(arguments):
        _check_arguments(prim_func, declared, given, world, rank)
    program = compiled(prim_func, options_of(kernel, None, checks))
    shared = Shared(Session(checks == 'collect'))
    run = _Run(program, shared, world, seed, declared, arguments)
    started = time.perf_counter()
    try:
        with np.errstate(all='ignore'):
            run.go(launches)
    except InterpreterError as error:
        frame, error.frame = error.frame, None
        if frame is not None and frame.block_ids:
            error.post_mortem = PostMortem(error, frame, program.compiler)
        if checks != 'collect' or isinstance(error, UnsupportedConstruct):
            raise
        shared.session.found(error)
    finally:
        run.copy_back()
        shared.session.close()
    branches = tuple(
        Branch(site.file, site.line, side, number in shared.covered)
        for number, (site, side) in enumerate(program.branches)
    )
    guarded = tuple(sorted({(site.line, buffer) for site, buffer in shared.guarded}))
    errors = tuple(shared.session.findings.values())
    return Report(program.name, time.perf_counter() - started, branches, guarded, errors, tuple(shared.session.prints))


def _check_arguments(
    prim_func: Any, declared: list[Declared | None], given: tuple[Any, ...], world: int, rank: int
) -> None:
    names = [str(getattr(prim_func.buffer_map.get(var, None), 'name', var.name)) for var in prim_func.params]
    if len(given) != len(names):
        raise ArgumentError(
            f'scale.simulate: args must give the {len(names)} arguments {", ".join(names)}, got {len(given)} for '
            f'rank {rank}'
        )
    for name, known, value in zip(names, declared, given, strict=True):
        if known is None:
            continue
        if known.world != world:
            raise ArgumentError(
                f'scale.simulate: world must be {known.world}, for which {name} is declared, got {world}'
            )
        if known.is_pad:
            if value is not None:
                raise ArgumentError(
                    f'scale.simulate: {name} are signal pads and must be None, got {type(value).__name__}'
                )
            continue
        fits = isinstance(value, Tensor) and tuple(value.shape) == known.shape and value.device.type == 'cpu'
        if not fits or not value.is_contiguous() or value.dtype != _torch_dtype(known.dtype):
            got = f'{tuple(value.shape)} {value.dtype}' if isinstance(value, Tensor) else type(value).__name__
            raise ArgumentError(
                f'scale.simulate: {name} of rank {rank} must be a contiguous CPU tensor of shape {known.shape} and '
                f'dtype {known.dtype}, got {got}'
            )


def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, 'float8_e4m3fn' if name == 'float8_e4m3' else name)


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


class _Run:
    """The state of one `simulate` call."""

    def __init__(
        self,
        program: Any,
        shared: Any,
        world: int,
        seed: int | None,
        declared: list[Declared | None],
        arguments: list[tuple[Any, ...]],
    ) -> None:
        from tile_kernels.interpreter.engine.world import Arena, World

        self.program, self.shared, self.arguments = program, shared, arguments
        self.world = shared.world = World(world, seed)
        self.arenas: dict[int, Arena] = {}  # by the position of the parameter
        self.pads: list[Arena] = []
        self.blocks: dict[int, list[int]] = {}  # numbers of the blocks of the last launch of each device
        for position, known in enumerate(declared):
            if known is None:
                continue
            param = program.params[position]
            itemsize = 8 if known.is_pad else _torch_dtype(known.dtype).itemsize
            size = int(np.prod(known.shape)) * itemsize
            arena = self.arenas[position] = Arena(param.name, size, world, not known.is_pad)
            self.world.arenas.append(arena)
            self.world.tables.add(param.storage.slot)
            if known.is_pad:
                self.pads.append(arena)
            elif program.options.races:
                self.world.watch(arena, _unit(program, itemsize))
            for rank in range(world):
                arena.bytes_of(rank)[:] = 0 if known.is_pad else _bytes(arguments[rank][position])

    def go(self, launches: int) -> None:
        """Run everything, then check the outputs."""
        self.hosts: dict[int, Any] = {}
        self.world.run(self._start, launches)
        for host in self.hosts.values():
            self.program.require_written(host)

    def _start(self, rank: int, launch: int) -> list[Any]:
        """The blocks of one launch of one device, after those of its last launch."""
        values = list(self.arguments[rank])
        for position, arena in self.arenas.items():
            values[position] = torch.tensor(arena.addresses, dtype=torch.int64).view(torch.uint64)
        host = self.hosts[rank] = self.program.bound(tuple(values), self.shared)
        host.rank, host.first_block = rank, self.world.first_block(rank, launch)
        tasks = self.world.collect(lambda: self.program.body(host))
        numbers = [task.frame.first_block + row for task in tasks for row in range(task.frame.blocks)]
        if launch:
            self.shared.flags.hand_over(self.blocks[rank], numbers)
            for pad in self.pads:
                pad.bytes_of(rank).view(np.int64)[EPOCH_WORD] += EPOCH
        self.blocks[rank] = numbers
        return tasks

    def copy_back(self) -> None:
        """Give every rank its part of the symmetric tensors."""
        for position, arena in self.arenas.items():
            if arena not in self.pads:
                for rank, given in enumerate(self.arguments):
                    _bytes(given[position])[:] = arena.bytes_of(rank)


def _unit(program: Any, itemsize: int) -> int:
    """Bits of the smallest element of any view of memory behind an address."""
    views = [buffer.dtype.bits for buffer in program.compiler.buffers.values() if buffer.pointer is not None]
    return min([itemsize * 8, *views])
