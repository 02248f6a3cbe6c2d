"""Random numbers of cuRAND's Philox4_32_10 generator; bits equal those of a GPU, floats up to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_INVERSE = np.float32(2.3283064e-10)  # 2**-32 as written in cuRAND
_TWO_PI_INVERSE = np.float32(2.3283064e-10 * 6.2831855)


def philox(counter: list[np.ndarray], key: list[np.ndarray]) -> list[np.ndarray]:
    """Ten rounds of Philox4x32 over arrays of 64-bit integers that hold 32-bit words."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        first, second = a * _M0, c * _M1
        a, b, c, d = (second >> np.uint64(32)) ^ b ^ k0, second & _LOW, (first >> np.uint64(32)) ^ d ^ k1, first & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return [a, b, c, d]


class Generators:
    """One generator for every thread of a batch of blocks."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.key = [np.zeros(shape, np.uint64) for _ in range(2)]
        self.sequence = np.zeros(shape, np.uint64)
        self.drawn = np.zeros(shape, np.uint64)  # numbers drawn so far, including the offset
        self.extra = np.zeros(shape, np.float32)
        self.has_extra = np.zeros(shape, bool)

    def start(self, lanes: np.ndarray, seed: np.ndarray, sequence: np.ndarray, offset: np.ndarray) -> None:
        """`curand_init`."""
        for word, shift in enumerate((0, 32)):
            self.key[word] = np.where(lanes, (seed >> np.uint64(shift)) & _LOW, self.key[word])
        self.sequence = np.where(lanes, sequence, self.sequence)
        self.drawn = np.where(lanes, offset, self.drawn)
        self.has_extra = self.has_extra & ~lanes

    def draw(self, lanes: np.ndarray) -> np.ndarray:
        """`curand`: the next 32 bits; only the generators of `lanes` advance."""
        block = self.drawn >> np.uint64(2)
        counter = [block & _LOW, block >> np.uint64(32), self.sequence & _LOW, self.sequence >> np.uint64(32)]
        words = np.stack(philox(counter, self.key))
        picked = np.take_along_axis(words, (self.drawn & np.uint64(3)).astype(np.intp)[None], axis=0)[0]
        self.drawn = self.drawn + lanes.astype(np.uint64)
        return picked.astype(np.uint32)

    def uniform(self, lanes: np.ndarray) -> np.ndarray:
        """`curand_uniform`: from (0, 1]."""
        return _scaled(self.draw(lanes), _INVERSE)

    def normal(self, lanes: np.ndarray) -> np.ndarray:
        """`curand_normal`: two numbers at a time by Box-Muller; the second is kept for the next call."""
        fresh = lanes & ~self.has_extra
        u, v = _scaled(self.draw(fresh), _INVERSE), _scaled(self.draw(fresh), _TWO_PI_INVERSE)
        radius = np.sqrt(np.float32(-2) * np.log(u))
        found = np.where(self.has_extra, self.extra, np.sin(v) * radius)
        self.extra = np.where(fresh, np.cos(v) * radius, self.extra)
        self.has_extra = np.where(lanes, fresh, self.has_extra)
        return found.astype(np.float32)


def _scaled(bits: np.ndarray, factor: np.float32) -> np.ndarray:
    """`bits * factor + factor / 2` with one rounding."""
    value = bits.astype(np.float32).astype(np.float64)
    return (value * np.float64(factor) + np.float64(factor) / 2).astype(np.float32)


def _slot(compiler: Compiler) -> int:
    """The memory slot of the generators of a kernel."""
    found = getattr(compiler, 'generators', None)
    if found is None:
        found = compiler.num_slots
        compiler.num_slots += 1
        compiler.generators = found  # type: ignore[attr-defined]
    return int(found)


def _lanes(frame: Frame) -> np.ndarray:
    shape = (frame.blocks, frame.threads)
    return np.ones(shape, bool) if frame.mask is None else np.broadcast_to(frame.mask, shape)


@op('tl.rng_init')
def _init(compiler: Compiler, call: Any) -> Closure:
    """Give every active thread a generator."""
    kind = str(call.args[3].value)
    if kind != 'curandStatePhilox4_32_10_t':
        raise compiler.unsupported(f'T.rng_init with {kind}')
    if compiler.depth:
        raise compiler.unsupported('T.rng_init inside T.Parallel')
    parts = [compiler.expr(part) for part in call.args[:3]]
    slot = _slot(compiler)

    def run(frame: Frame) -> None:
        shape = (frame.blocks, frame.threads)
        if frame.env[slot] is None:
            frame.env[slot] = Generators(shape)
        seed, sequence, offset = (
            np.broadcast_to(np.asarray(part(frame)).astype(np.int64).view(np.uint64), shape) for part in parts
        )
        frame.env[slot].start(_lanes(frame), seed, sequence, offset)

    return run


@op('tl.rng_rand', 'tl.rng_rand_float')
def _draw(compiler: Compiler, call: Any) -> Closure:
    """The next number of every active thread's generator."""
    if compiler.depth:
        raise compiler.unsupported('T.rng_rand inside T.Parallel')
    if str(call.dtype) == 'float64':
        raise compiler.unsupported('T.rng_rand_float of 64 bits')
    name = 'draw' if str(call.op.name) == 'tl.rng_rand' else str(call.args[0].value)
    slot = _slot(compiler)
    unready = compiler.unsupported('T.rng_rand before T.rng_init')

    def run(frame: Frame) -> Any:
        if frame.env[slot] is None:
            raise unready
        return getattr(frame.env[slot], name)(_lanes(frame))

    return run
