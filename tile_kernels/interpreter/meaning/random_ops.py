"""Random numbers of cuRAND's generators; bits equal those of a GPU, floats up to rounding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.lanes import both
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_INVERSE = np.float32(2.3283064e-10)  # 2**-32 as written in cuRAND
_TWO_PI_INVERSE = np.float32(2.3283064e-10 * 6.2831855)
_TWO_PI = np.float32(6.2831855)


def philox(counter: list[np.ndarray], key: list[np.ndarray]) -> list[np.ndarray]:
    """Ten rounds of Philox4x32 over arrays of 64-bit integers that hold 32-bit words."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        first, second = a * _M0, c * _M1
        a, b, c, d = (second >> np.uint64(32)) ^ b ^ k0, second & _LOW, (first >> np.uint64(32)) ^ d ^ k1, first & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return [a, b, c, d]


class Generators(ABC):
    """One generator for every thread of a batch of blocks."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.extra = {kind: np.zeros(shape, kind) for kind in (np.float32, np.float64)}
        self.has_extra = {kind: np.zeros(shape, bool) for kind in (np.float32, np.float64)}

    def start(self, lanes: np.ndarray, seed: np.ndarray, sequence: np.ndarray, offset: np.ndarray) -> None:
        """`curand_init`."""
        self.has_extra = {kind: held & ~lanes for kind, held in self.has_extra.items()}
        self.seed(lanes, seed, sequence, offset)

    @abstractmethod
    def seed(self, lanes: np.ndarray, seed: np.ndarray, sequence: np.ndarray, offset: np.ndarray) -> None:
        """Set the generators of `lanes` to a position of a sequence."""

    @abstractmethod
    def draw(self, lanes: np.ndarray) -> np.ndarray:
        """`curand`: the next 32 bits; only the generators of `lanes` advance."""

    def uniform(self, lanes: np.ndarray) -> np.ndarray:
        """`curand_uniform`: from (0, 1]."""
        return _scaled(self.draw(lanes), _INVERSE)

    def uniform_double(self, lanes: np.ndarray) -> np.ndarray:
        """`curand_uniform_double`: from (0, 1]."""
        return _fraction(self.draw(lanes), self.draw(lanes))

    def normal(self, lanes: np.ndarray) -> np.ndarray:
        """`curand_normal`: two numbers at a time by Box-Muller; the second is kept for the next call."""
        return self._every_second(lanes, np.float32)

    def normal_double(self, lanes: np.ndarray) -> np.ndarray:
        """`curand_normal_double`."""
        return self._every_second(lanes, np.float64)

    def _every_second(self, lanes: np.ndarray, kind: Any) -> np.ndarray:
        held = self.has_extra[kind]
        fresh = lanes & ~held
        radius, angle = self._polar(fresh) if kind is np.float32 else self._polar_double(fresh)
        found = np.where(held, self.extra[kind], np.sin(angle) * radius)
        self.extra[kind] = np.where(fresh, np.cos(angle) * radius, self.extra[kind])
        self.has_extra[kind] = np.where(lanes, fresh, held)
        return found.astype(kind)

    def _polar(self, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        u, v = _scaled(self.draw(lanes), _INVERSE), _scaled(self.draw(lanes), _TWO_PI_INVERSE)
        return np.sqrt(np.float32(-2) * np.log(u)), v

    def _polar_double(self, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        u, v = (_fraction(self.draw(lanes), self.draw(lanes)) for _ in range(2))
        return np.sqrt(-2.0 * np.log(u)), 2 * np.pi * v


class Philox(Generators):
    """`curandStatePhilox4_32_10_t`."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__(shape)
        self.key = [np.zeros(shape, np.uint64) for _ in range(2)]
        self.sequence = np.zeros(shape, np.uint64)
        self.drawn = np.zeros(shape, np.uint64)  # numbers drawn so far, including the offset

    def seed(self, lanes: np.ndarray, seed: np.ndarray, sequence: np.ndarray, offset: np.ndarray) -> None:
        """The seed is the key; sequence and offset are the counter."""
        for word, shift in enumerate((0, 32)):
            self.key[word] = np.where(lanes, (seed >> np.uint64(shift)) & _LOW, self.key[word])
        self.sequence = np.where(lanes, sequence, self.sequence)
        self.drawn = np.where(lanes, offset, self.drawn)

    def draw(self, lanes: np.ndarray) -> np.ndarray:
        """The next word of the current block of four."""
        block = self.drawn >> np.uint64(2)
        counter = [block & _LOW, block >> np.uint64(32), self.sequence & _LOW, self.sequence >> np.uint64(32)]
        words = np.stack(philox(counter, self.key))
        picked = np.take_along_axis(words, (self.drawn & np.uint64(3)).astype(np.intp)[None], axis=0)[0]
        self.drawn = self.drawn + lanes.astype(np.uint64)
        return picked.astype(np.uint32)

    def uniform_double(self, lanes: np.ndarray) -> np.ndarray:
        """This generator uses 32 bits only."""
        return self.draw(lanes).astype(np.float64) * 2.0**-32 + 2.0**-33


class Xorwow(Generators):
    """`curandStateXORWOW_t`: a linear recurrence of five words over GF(2), plus a counter."""

    WORDS, BITS = 5, 160
    SEQUENCE = 67  # a sequence has 2**67 numbers
    STEP = np.uint32(362437)

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__(shape)
        self.words = np.zeros((self.WORDS, *shape), np.uint32)
        self.counter = np.zeros(shape, np.uint32)

    def seed(self, lanes: np.ndarray, seed: np.ndarray, sequence: np.ndarray, offset: np.ndarray) -> None:
        """Mix the seed into the published start values, then jump."""
        low = np.uint32(1099087573) * ((seed & _LOW).astype(np.uint32) ^ np.uint32(0xAAD26B49))
        high = np.uint32(2591861531) * ((seed >> np.uint64(32)).astype(np.uint32) ^ np.uint32(0xF7DCEFDD))
        words = np.stack(
            [
                np.uint32(123456789) + low,
                np.uint32(362436069) ^ low,
                np.uint32(521288629) + high,
                np.uint32(88675123) ^ high,
                np.uint32(5783321) + low,
            ]
        )
        counter = np.uint32(6615241) + high + low + self.STEP * (offset & _LOW).astype(np.uint32)
        for number, power in ((sequence, self.SEQUENCE), (offset, 0)):
            words = self._jump(words, number, power)
        self.words = np.where(lanes, words, self.words)
        self.counter = np.where(lanes, counter, self.counter)

    def draw(self, lanes: np.ndarray) -> np.ndarray:
        """One step of the recurrence, plus the counter."""
        words, counter = self._stepped(self.words), self.counter + self.STEP
        self.words = np.where(lanes, words, self.words)
        self.counter = np.where(lanes, counter, self.counter)
        return words[-1] + counter

    @staticmethod
    def _stepped(words: np.ndarray) -> np.ndarray:
        first, last = words[0] ^ (words[0] >> np.uint32(2)), words[-1]
        fresh = (last ^ (last << np.uint32(4))) ^ (first ^ (first << np.uint32(1)))
        return np.concatenate([words[1:], fresh[None]])

    @classmethod
    def _jump(cls, words: np.ndarray, number: np.ndarray, power: int) -> np.ndarray:
        """Advance every generator by `number * 2**power` steps."""
        for bit in range(int(number.max()).bit_length()):
            chosen = (number >> np.uint64(bit)) & np.uint64(1) == 1
            if chosen.any():
                state = np.unpackbits(np.ascontiguousarray(words.reshape(cls.WORDS, -1).T).view(np.uint8), axis=1)
                moved = (state.astype(np.float32) @ cls._matrix(power + bit)) % 2
                there = np.packbits(moved.astype(np.uint8), axis=1).view(np.uint32).T.reshape(words.shape)
                words = np.where(chosen, there, words)
        return words

    @classmethod
    @cache
    def _matrix(cls, power: int) -> np.ndarray:
        """The matrix of `2**power` steps; a row is the result for one bit of the state."""
        if power:
            half = cls._matrix(power - 1)
            return (half @ half) % 2
        single = np.packbits(np.eye(cls.BITS, dtype=np.uint8), axis=1).view(np.uint32)
        moved = np.ascontiguousarray(cls._stepped(np.ascontiguousarray(single.T)).T)
        return np.unpackbits(moved.view(np.uint8), axis=1).astype(np.float32)


class Mrg(Generators):
    """`curandStateMRG32k3a_t`: the difference of two linear recurrences of three numbers."""

    MODULI = (4294967087, 4294944443)
    STEPS = (((0, 1, 0), (0, 0, 1), (-810728, 1403580, 0)), ((0, 1, 0), (0, 0, 1), (-1370589, 0, 527612)))
    SEQUENCE = 76  # a sequence has 2**76 numbers
    NORM, BITS_NORM = 2.3283065498378288e-10, 1.000000048662

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__(shape)
        self.states = [np.zeros((3, *shape), np.int64) for _ in self.MODULI]

    def seed(self, lanes: np.ndarray, seed: np.ndarray, sequence: np.ndarray, offset: np.ndarray) -> None:
        """Multiply the start values by parts of the seed, then jump."""
        low = ((seed & _LOW) ^ np.uint64(0x55555555)).astype(object)
        high = ((seed >> np.uint64(32)) ^ np.uint64(0xAAAAAAAA)).astype(object)
        none = seed == 0
        for which, parts in enumerate(((low, high, low), (high, low, high))):
            modulus = self.MODULI[which]
            state = np.stack([np.where(none, 12345, part * 12345 % modulus) for part in parts]).astype(object)
            for number, power in ((sequence & np.uint64((1 << 51) - 1), self.SEQUENCE), (offset, 0)):
                state = self._jump(which, state, number, power)
            self.states[which] = np.where(lanes, state, self.states[which]).astype(np.int64)

    def draw(self, lanes: np.ndarray) -> np.ndarray:
        """The difference, stretched to 32 bits."""
        return (self._next(lanes) * self.BITS_NORM).astype(np.uint32)

    def uniform(self, lanes: np.ndarray) -> np.ndarray:
        """The difference, scaled."""
        return self.uniform_double(lanes).astype(np.float32)

    def uniform_double(self, lanes: np.ndarray) -> np.ndarray:
        """The same in double precision."""
        return self._next(lanes) * self.NORM

    def _next(self, lanes: np.ndarray) -> np.ndarray:
        fresh = []
        for which, modulus in enumerate(self.MODULI):
            state, last = self.states[which], self.STEPS[which][2]
            made = sum((state[k] * last[k] for k in range(3)), np.zeros(self.shape, np.int64)) % modulus
            fresh.append(made)
            self.states[which] = np.where(lanes, np.concatenate([state[1:], made[None]]), state)
        first, second = fresh
        return (first - second + np.where(first <= second, self.MODULI[0], 0)).astype(np.float64)

    def _polar(self, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        u, v = self.uniform(lanes), self.uniform(lanes) * _TWO_PI
        return np.sqrt(np.float32(-2) * np.log(u)), v

    def _polar_double(self, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        u, v = self.uniform_double(lanes), self.uniform_double(lanes)
        return np.sqrt(-2.0 * np.log(u)), 2 * np.pi * v

    @classmethod
    def _jump(cls, which: int, state: np.ndarray, number: np.ndarray, power: int) -> np.ndarray:
        for bit in range(int(number.max()).bit_length()):
            chosen = (number >> np.uint64(bit)) & np.uint64(1) == 1
            if chosen.any():
                moved = np.tensordot(cls.matrix(which, power + bit), state, 1) % cls.MODULI[which]
                state = np.where(chosen, moved, state)
        return state

    @classmethod
    @cache
    def matrix(cls, which: int, power: int) -> np.ndarray:
        """The matrix of `2**power` steps of one recurrence."""
        if power:
            half = cls.matrix(which, power - 1)
            return half.dot(half) % cls.MODULI[which]
        return np.array(cls.STEPS[which], object) % cls.MODULI[which]


_GENERATORS: dict[str, type[Generators]] = {
    'curandStatePhilox4_32_10_t': Philox,
    'curandStateXORWOW_t': Xorwow,
    'curandStateMRG32k3a_t': Mrg,
}


def _scaled(bits: np.ndarray, factor: np.float32) -> np.ndarray:
    """`bits * factor + factor / 2` with one rounding."""
    value = bits.astype(np.float32).astype(np.float64)
    return (value * np.float64(factor) + np.float64(factor) / 2).astype(np.float32)


def _fraction(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """A number from (0, 1] of 53 bits."""
    bits = low.astype(np.uint64) ^ (high.astype(np.uint64) << np.uint64(21))
    return bits.astype(np.float64) * 2.0**-53 + 2.0**-54


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
    kind = _GENERATORS.get(str(call.args[3].value))
    if kind is None:
        raise compiler.unsupported(f'T.rng_init with {call.args[3].value}')
    if compiler.depth:
        raise compiler.unsupported('T.rng_init inside T.Parallel')
    parts = [compiler.expr(part) for part in call.args[:3]]
    slot = _slot(compiler)

    def run(frame: Frame) -> None:
        shape = (frame.blocks, frame.threads)
        if not isinstance(frame.env[slot], kind):
            frame.env[slot] = kind(shape)
        seed, sequence, offset = (
            np.broadcast_to(np.asarray(part(frame)).astype(np.int64).view(np.uint64), shape) for part in parts
        )
        frame.env[slot].start(_lanes(frame), seed, sequence, offset)

    return run


@op('tl.rng_rand', 'tl.rng_rand_float')
def _draw(compiler: Compiler, call: Any) -> Closure:
    """The next number of every active thread's generator.

    In T.Parallel, a block of one thread draws in the order of the iterations; with more, the layout decides.
    """
    if compiler.depth and compiler.thread_dims != (1, 1, 1):
        raise compiler.unsupported('T.rng_rand inside T.Parallel of a block with several threads')
    name = 'draw' if str(call.op.name) == 'tl.rng_rand' else str(call.args[0].value)
    if str(call.dtype) == 'float64':
        name += '_double'
    slot, depth = _slot(compiler), compiler.depth
    unready = compiler.unsupported('T.rng_rand before T.rng_init')

    def run(frame: Frame) -> Any:
        if frame.env[slot] is None:
            raise unready
        draw = getattr(frame.env[slot], name)
        if not depth:
            return draw(_lanes(frame))
        shape = (frame.blocks, 1, *frame.extents[:depth])
        active = np.broadcast_to(both(np.ones(shape, bool), frame.mask), shape).reshape(frame.blocks, -1)
        found: Any = None
        for iteration in range(active.shape[1]):
            number = draw(active[:, iteration : iteration + 1])
            found = np.zeros(active.shape, number.dtype) if found is None else found
            found[:, iteration] = number[:, 0]
        return found.reshape(shape)

    return run
