"""What Python spends on a repeated call.

    python -m tools.host_path                    # all calls
    python -m tools.host_path norm engram        # calls whose name contains a word

Without a GPU, CPU tensors count as CUDA tensors, and launches do nothing. Columns, in microseconds: the call; finding
its replay; the guard; allocations; launches; the rest of the replay, which is views and the result. The smallest of
many short runs counts, because other processes disturb.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from tile_kernels.core import launch, replay
from tile_kernels.core.gpus import DEFAULT_GPU
from tools.decode_calls import FORWARD, HOST, Call

CALLS, RUNS = 200, 60

#: The replays that were written, newest last: their guard, tensors, arguments, allocations and launches.
_written: list[dict[str, Any]] = []


def pretend() -> None:
    """Let CPU tensors take the path of CUDA tensors, up to the launch."""
    answers: dict[str, Callable[[Any], bool]] = {'is_cuda': lambda x: True, 'is_cpu': lambda x: False}
    for name, answer in answers.items():
        setattr(torch.Tensor, name, property(answer))

    def bind(kernels: Any, static: tuple, size: int, first: Any, rest: tuple) -> Callable:
        table = kernels[0].bound if isinstance(kernels, tuple) else kernels.bound
        found = table[(kernels, static, size, -1) if isinstance(kernels, tuple) else (static, size, -1)] = _no_launch
        return found

    launch._bind, launch.cuda_gpu = bind, lambda index: DEFAULT_GPU  # type: ignore[assignment]


def watch() -> None:
    """Keep the parts of every replay that is written."""
    work = replay._Writer._work

    def watched(writer: Any, launches: Any, result: Any) -> list[str] | None:
        lines = work(writer, launches, result)
        if lines is not None:
            makes = [line for line in lines if ' = empty' in line]
            constants = writer.constants | writer.inputs
            exec('\n'.join(['def allocate():', *makes, '    return']), constants)
            entry = dict(allocate=constants['allocate'], guard=constants['guard'], tensors=list(writer.inputs.values()))
            entry |= dict(given=[writer.inputs.get(name) for name in writer.parameters], of=writer.constants)
            _written.append(entry | dict(launches=launches))
        return lines

    replay._Writer._work = watched  # type: ignore[method-assign, assignment]


def _no_launch(*given: Any) -> None:
    """What stands for a bound function."""


def microseconds(call: Call) -> float:
    """The fastest run of a call."""
    for _ in range(5):
        call()
    best = float('inf')
    for _ in range(RUNS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a full queue of launches would block the host
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - start)
    return best / CALLS * 1e6


def parts(call: Call) -> list[float]:
    """The columns of a call; only the first if it is not one replay."""
    _written.clear()
    total = microseconds(call)
    if len(_written) != 1:
        return [total]
    (made,) = _written
    repeat, given, tensors = made['of']['replay'], made['given'], made['tensors']

    def relaunch() -> None:
        for bound, args in made['launches']:
            bound(*args)

    inside = microseconds(lambda: repeat(*given))
    guard, allocate = microseconds(lambda: made['guard'](*tensors)), microseconds(made['allocate'])
    launching = microseconds(relaunch)
    return [total, total - inside, guard, allocate, launching, inside - guard - allocate - launching]


def main() -> None:
    """Print the table."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        pretend()
    watch()
    columns = ('all', 'find', 'guard', 'alloc', 'launch', 'rest')
    sys.stdout.write(f'{"call":26}' + ''.join(f'{column:>7}' for column in columns) + '\n')
    for name, make in (FORWARD | HOST).items():
        if not sys.argv[1:] or any(word in name for word in sys.argv[1:]):
            with torch.device('cuda') if on_gpu else nullcontext():
                call = make(64, 4096) if on_gpu else make(8, 256)
            sys.stdout.write(f'{name:26}' + ''.join(f'{part:7.2f}' for part in parts(call)) + '\n')


if __name__ == '__main__':
    main()
