"""Processes that compile, check and time kernels: a crash or a hang costs one call, not the run.

TileLang's tracer is not reentrant and holds the interpreter lock, so threads would wait for one another. A worker is a
separate program, not a child of `multiprocessing`. So a script without a `__main__` guard can use workers. Parent and
worker exchange functions of modules, by name, and their arguments.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tile_kernels.core import diagnoses
from tile_kernels.core.knobs import cache_dir, knobs

#: Seconds in which a new worker must be ready.
START_S = 180.0


class Failed(Exception):
    """A call failed; the text is the reason."""


class Here:
    """Runs calls in this process, without a limit; has the methods of `Child`."""

    def call(self, function: Callable[..., Any], *args: Any, limit: float = 0) -> Any:
        """Run a call; raises `Failed` with the reason."""
        try:
            return function(*args)
        except Exception as error:
            raise Failed(sentence(error)) from error

    def close(self) -> None:
        """Do nothing: nothing was started."""


class Child:
    """Runs calls in a worker process, which is started when needed and again after a crash or a hang."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.pipe: Any = None
        self.folder = cache_dir()  # of this thread; the call may come from another
        self.loaded = 'tilelang' if 'tilelang' in sys.modules else ''

    def call(self, function: Callable[..., Any], *args: Any, limit: float) -> Any:
        """Run a call; raises `Failed` with the reason, also after `limit` seconds, when the worker is killed."""
        try:
            if self.process is None:
                self._start()
            self.pipe.send((function, args))
            done, answer, works = self._receive(limit)
        except (EOFError, ConnectionError):
            raise Failed(f'its process ended with {self.close()}') from None
        if not works:  # an illegal access: the next call gets a new process
            self.close()
        if not done:
            raise Failed(answer)
        return answer

    def _start(self) -> None:
        # the worker finds the same modules as this process
        program = f'import sys; sys.path[:] = {sys.path!r}; from tile_kernels.core.workers import serve; serve()'
        device = str(torch.cuda.current_device()) if torch.cuda.is_initialized() else ''
        self.pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, '-c', program, str(theirs.fileno()), str(self.folder), self.loaded, device],
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent, which then ends the worker
            )
        self._receive(START_S)

    def _receive(self, limit: float) -> tuple[bool, Any, bool]:
        if not self.pipe.poll(None if limit == math.inf else limit):
            self.close()
            raise Failed(f'took longer than {limit:.0f} s')
        return self.pipe.recv()

    def close(self) -> str:
        """End the worker; returns what became of it in words."""
        if self.process is None:
            return 'nothing'
        self.pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)  # one that crashed, or waits for work, ends by itself
        ended = self.process.poll() is not None
        if not ended:
            self.process.kill()
        code = self.process.wait()
        self.process = None
        return f'signal {-code}' if ended and code < 0 else f'exit status {code}'


def serve() -> None:
    """Run the calls that arrive at the pipe given as argument, until it is closed."""
    pipe, folder, loaded, device = sys.argv[1:5]
    orders: Any = Connection(int(pipe))
    knobs.cache_dir = Path(folder)
    if loaded:  # here, because it must not count as time of the first call
        importlib.import_module(loaded)
    if device:
        torch.cuda.set_device(int(device))
        torch.zeros(1, device='cuda')
    orders.send((True, None, True))
    while True:
        try:
            data = orders.recv_bytes()
        except EOFError:
            return
        orders.send((*_answer(data), _device_works()))


def _answer(data: bytes) -> tuple[bool, Any]:
    try:
        function, args = pickle.loads(data)
        return True, function(*args)
    except Exception as error:
        return False, sentence(error)


def _device_works() -> bool:
    """Whether kernels can still run here; after an illegal access none can."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def sentence(error: BaseException) -> str:
    """An error in one sentence: a known diagnosis, or its first line."""
    text = str(error).strip()
    found = diagnoses.find(text)
    if found is not None:
        return '; '.join(diagnoses.words(*found))
    lines = [line for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return lines[0].replace('Tensor-likes are not close!', lines[1] if len(lines) > 1 else '')


def spread(
    function: Callable[..., Any],
    makers: Iterable[Callable[[], tuple]],
    jobs: int | None,
    done: Callable[[], None] = lambda: None,
    until: float = math.inf,
    each: int = 16,
) -> list[Any]:
    """The results of calls by several workers, or for a call that failed its `Failed`; none starts after `until`.

    A maker returns the arguments of one call. It may trace a kernel, which one thread may do at a time. Starting a
    worker takes seconds, so there is one for `each` so many calls, and with fewer than two this process runs them.
    """
    waiting = list(enumerate(makers))
    results: list[Any] = [Failed('the budget ended before it')] * len(waiting)
    waiting.reverse()
    tracing = threading.Lock()

    def work(runner: Here | Child) -> None:
        while waiting and time.monotonic() < until:
            try:
                place, make = waiting.pop()
                with tracing:
                    args = Here().call(make)
                results[place] = runner.call(function, *args, limit=math.inf)
            except Failed as error:
                results[place] = error
            except (IndexError, OSError):  # another thread was faster, or an interruption closed the pipe
                return
            done()

    count = min(jobs or os.cpu_count() or 1, len(waiting) // each)
    if count < 2:
        work(Here())
        return results
    children = [Child() for _ in range(count)]
    threads = [threading.Thread(target=work, args=(child,), daemon=True) for child in children]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        waiting.clear()
        for child in children:
            child.close()
    return results
