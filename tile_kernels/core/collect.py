"""Collect the kernels that a model needs: run it once on fake or real tensors, then compile them ahead of time.

    with FakeTensorMode():                      # no GPU, no memory
        model, x = build()
        with tile_kernels.collecting() as kernels:
            model(x).sum().backward()
    kernels.precompile('sm_90a', out='kernels')

A launch is collected with its static arguments, which hold no token count. The config may depend on the token count. So
`Collected.variants` evaluates `choose` over all sizes. Some ops launch other kernels for few tokens than for many. So
run the model with all of `TOKEN_COUNTS` in one block; then the kernels serve every token count.
"""

from __future__ import annotations

import bisect
import inspect
import runpy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tile_kernels.core import launch
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.gpus import gpu_named
from tile_kernels.core.knobs import knobs
from tile_kernels.core.precompile import Precompiled, Variant, compile_into

#: Sizes at which `choose` is evaluated: all small ones, then 64 in every octave, each with its neighbors.
_SIZES = sorted(
    set(range(1, 1025))
    | {(64 + step) << octave for octave in range(4, 26) for step in range(64)}
    | {((1 << octave) + step) for octave in range(10, 32) for step in (-1, 1)}
)


#: Token counts at which an op may launch other kernels lie between these.
TOKEN_COUNTS = tuple(sorted({1 << k for k in range(17)} | {3 << k for k in range(15)}))


class Collected:
    """The launches that a block made: kernels and static arguments, with the sizes that occurred."""

    def __init__(self) -> None:
        self.sizes: dict[tuple[launch.Variants, tuple], set[int]] = {}

    def add(self, kernel: launch.Variants, static: tuple, size: int) -> None:
        """Add a launch."""
        self.sizes.setdefault((kernel, static), set()).add(size)

    def variants(self, archs: str | Sequence[str] = 'sm_90a', *, every_size: bool = True) -> list[Variant]:
        """The distinct kernels of these architectures or GPUs, for all sizes or only for those that occurred."""
        found: dict[Variant, None] = {}
        for gpu in dict.fromkeys(gpu_named(arch) for arch in ([archs] if isinstance(archs, str) else archs)):
            for (kernels, static), sizes in self.sizes.items():
                kernel = launch.variant_for(kernels, static, gpu)
                for config in _configs(lambda size: kernel.config(static, size, gpu), sizes, every_size):  # noqa: B023
                    found[Variant(kernel, static, config, gpu.target)] = None
        return list(found)

    def precompile(
        self,
        arch: str | Sequence[str] = 'sm_90a',
        out: str | Path | None = None,
        jobs: int | None = None,
        progress: bool = True,
    ) -> Precompiled:
        """Compile the collected kernels; needs nvcc but no GPU. Arguments are those of `tile_kernels.precompile`."""
        if not self.sizes:
            raise ArgumentError('precompile: the block must call ops of tile_kernels, got none')
        return compile_into(out, lambda: self.variants(arch), jobs, progress)

    def __len__(self) -> int:
        return len(self.sizes)

    def __str__(self) -> str:
        names = sorted({_name(kernel) for kernel, _ in self.sizes})
        return f'{len(self)} kernels: {", ".join(names)}'


def _name(kernel: launch.Variants) -> str:
    return kernel[0].name if isinstance(kernel, tuple) else kernel.name


def _configs(config: object, sizes: Iterable[int], every_size: bool) -> list[tuple]:
    """The distinct configs over the sizes that occurred, or over all up to far beyond them."""
    largest = max(sizes)
    tried = [*(_SIZES[: bisect.bisect(_SIZES, max(largest, 1 << 20) * 64)] if every_size else ()), *sizes]
    return list(dict.fromkeys(tuple(config(size).items()) for size in tried))  # type: ignore[operator]


def collect_function(address: str) -> Collected:
    """Call `FILE.py:FUNCTION` on fake tensors and collect its launches.

    A function with a parameter is called with token counts from 1 to 65,536, one without is called once.
    """
    from torch._subclasses import FakeTensorMode

    path, _, name = address.rpartition(':')
    if not (path and name):
        raise ArgumentError(f'precompile: model must be FILE.py:FUNCTION, got {address!r}')
    if not Path(path).is_file():
        raise ArgumentError(f'precompile: model must name a file, got {path!r}, which does not exist')
    function = runpy.run_path(path, run_name='__tile_kernels__').get(name)
    if not callable(function):
        raise ArgumentError(f'precompile: {path} must define the function {name}')
    with FakeTensorMode(allow_non_fake_inputs=True), collecting() as collected:
        if inspect.signature(function).parameters:
            for num_tokens in TOKEN_COUNTS:
                function(num_tokens)
        else:
            function()
    return collected


@contextmanager
def collecting() -> Iterator[Collected]:
    """Collect the launches of the block, in all threads, so that `backward` counts too.

    On fake tensors nothing runs and no GPU is needed. On real tensors everything runs as usual.

    >>> import tile_kernels, torch
    >>> with tile_kernels.collecting() as kernels:
    ...     _ = tile_kernels.quant.per_token_cast(torch.randn(4, 128), 'e4m3', 128)
    >>> len(kernels)
    1
    """
    collected = Collected()
    knobs.touch()  # no call of the block is replayed from before
    launch.collectors.append(collected)
    try:
        yield collected
    finally:
        launch.collectors.remove(collected)
