"""The contract of every op, checked from its declaration alone: cases, twin, schema, backward.

The clauses of the contract:

    kernel     its results equal those of the twin (bitwise, or within the bounds of the op), starting from
               poisoned memory; on a CPU the kernel runs in the interpreter
    operator   `torch.ops.tile_kernels.*` and the direct call give the same results
    fake       fake tensors have the shapes, dtypes, strides and device of real ones
    opcheck    `torch.library.opcheck` passes
    gradient   the backward op agrees with autograd through the twin
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from tile_kernels.core.autograd import IDENTITY
from tile_kernels.core.cases import Case, bounds_of, case_id
from tile_kernels.core.errors import UnsupportedError
from tile_kernels.core.gpus import DEFAULT_GPU, GPUS, Gpu, cuda_gpu
from tile_kernels.core.knobs import knobs
from tile_kernels.core.launch import Launch, on_gpu
from tile_kernels.core.op import Op, ops
from tile_kernels.core.registry import cases_of, find_op
from tile_kernels.testing.numeric import assert_equal
from tile_kernels.testing.poison import poisoned

Outcome = dict[str, Tensor]

#: PyTorch's schema check compares inputs before and after a call; on a CPU it cannot do so for these dtypes.
_NOT_COMPARABLE = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class ContractCase:
    """One op with one of its cases; its text is `quant.per_token_cast[num_tokens=37-hidden=256]`.

    With a `gpu`, the case runs the kernels of that GPU; the text is then `gemm.gemm[m=1-n=136-k=72-bfloat16]@a100`.
    """

    op: Op
    case: Case
    gpu: str | None = None

    def __str__(self) -> str:
        return f'{self.op.name}[{case_id(self.case)}]' + (f'@{self.gpu}' if self.gpu else '')

    def choosing(self) -> AbstractContextManager:
        """A context that chooses the kernels of the case."""
        return on_gpu(self.gpu) if self.gpu else nullcontext()


def contract_cases(
    level: str | None = None, variants: bool = False, names: Collection[str] | None = None
) -> list[ContractCase]:
    """Every registered op with every case of a level: 'smoke', or 'full', which includes smoke (`TK_FULL_TEST=1`).

    `names` restricts the ops. With `variants`, a smoke case that runs other kernels on other GPUs appears once for each
    set of kernels. On a CUDA device, sets that the device cannot run are left out.
    """
    if level is None:
        level = 'full' if knobs.full_test else 'smoke'
    found = []
    for op in ops.values():
        if op.case_set is not None and (names is None or op.name in names):
            cases = op.case_set.smoke + (op.case_set.full if level == 'full' else [])
            found += [ContractCase(op, case) for case in cases]
            if variants:
                found += [ContractCase(op, case, gpu) for case in op.case_set.smoke for gpu in other_gpus(op, case)]
    return found


@functools.cache
def _cases(level: str, name: str) -> list[ContractCase]:
    return contract_cases(level, variants=True, names=(name,))


def check_case(level: str, name: str, index: int, device: str) -> None:
    """Check one case of an op by its position in `contract_cases`; for worker processes."""
    case = _cases(level, find_op(name).name)[index]
    with case.choosing():
        check_kernel(case.op, case.case, device)
    if device == 'cuda':
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > 4 << 30:  # other processes use the device, too
            torch.cuda.empty_cache()


class _Watched:
    """A GPU record that remembers whether any property was read."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.asked = False

    def __getattr__(self, name: str) -> Any:
        self.asked = True
        return getattr(self._gpu, name)


def other_gpus(op: Op, case: Case) -> list[str]:
    """Known GPUs on which a case runs other kernels, or with other static arguments; the first of each such set."""
    here = cuda_gpu(torch.cuda.current_device()) if torch.cuda.is_available() else DEFAULT_GPU
    watched = _Watched(here)
    with FakeTensorMode():
        given = cases_of(op).arguments(op.name, case)
        with on_gpu(cast('Gpu', watched)):
            seen = [_kernels(op.trace(**given))]
        names: list[str] = []
        for name in GPUS if watched.asked else ():
            with on_gpu(name), suppress(UnsupportedError):
                launches = op.trace(**given)
                runs = not torch.cuda.is_available() or all(made.kernel.claims(made.static, here) for made in launches)
                if runs and _kernels(launches) not in seen:
                    seen.append(_kernels(launches))
                    names.append(name)
    return names


def _kernels(launches: list[Launch]) -> list[tuple]:
    return [(made.kernel, made.static) for made in launches]


def check_contract(op: Op, case: Case, device: str | torch.device = 'cpu') -> None:
    """Assert every clause of the contract for one case on one device."""
    check_kernel(op, case, device)
    check_fake(op, case, device, check_operator(op, case, device))
    check_opcheck(op, case, device)
    check_gradient(op, case, device)


def check_kernel(op: Op, case: Case, device: str | torch.device = 'cpu') -> tuple[Outcome, Outcome]:
    """Assert that kernel and twin agree, both starting from poisoned memory; returns the outputs of both."""
    with poisoned():
        expected = _outcome(op, op.twin, _arguments(op, case, device))
        for _ in range(3 if torch.device(device).type == 'cuda' else 1):  # the third call on a GPU is a replay
            with _running_kernels(device):
                actual = _outcome(op, op.call, _arguments(op, case, device))
            compare('kernel and twin', actual, expected, _match(op))
    return actual, expected


def check_operator(op: Op, case: Case, device: str | torch.device = 'cpu') -> Outcome:
    """Assert that the operator returns the same as the direct call; returns what the latter does."""
    direct = _outcome(op, op.call, _arguments(op, case, device))
    operator = _outcome(op, lambda **kwargs: op.operator_form(kwargs), _arguments(op, case, device))
    compare('direct call and operator', direct, operator, _match(op))
    return direct


def check_fake(op: Op, case: Case, device: str | torch.device = 'cpu', real: Outcome | None = None) -> None:
    """Assert that fake results match the real results, those of a direct call if they are not given."""
    if real is None:
        real = _outcome(op, op.call, _arguments(op, case, device))
    mode = FakeTensorMode()
    arguments = tree_map_only(Tensor, mode.from_tensor, _arguments(op, case, device))
    with mode:
        fake = _outcome(op, op.call, arguments)
    for name, tensor in real.items():
        if _meta(fake[name]) != _meta(tensor):
            raise AssertionError(f'fake and real: {name}: {_meta(fake[name])} != {_meta(tensor)}')


def check_opcheck(op: Op, case: Case, device: str | torch.device = 'cpu') -> None:
    """Assert PyTorch's own requirements of an operator: schema, fake, autograd, tracing with dynamic shapes."""
    arguments = _arguments(op, case, device)
    _require_gradients(op, arguments)
    flat, keywords = op.operator_form.arguments(arguments)
    checks = ['test_schema', 'test_autograd_registration', 'test_faketensor', 'test_aot_dispatch_dynamic']
    if any(isinstance(value, Tensor) and value.dtype in _NOT_COMPARABLE for value in (*flat, *keywords.values())):
        checks.remove('test_schema')
    torch.library.opcheck(op.operator, flat, keywords, test_utils=checks)


def check_gradient(op: Op, case: Case, device: str | torch.device = 'cpu') -> None:
    """Assert that the backward op, if there is one, agrees with autograd through the twin."""
    if op.backward is None or op.backward == IDENTITY:
        return
    taken = {param.name for param in op.backward.params}
    outputs = [name for name in op.outputs if f'd{name}' in taken]
    with poisoned():
        expected = _gradients(op, op.twin, outputs, _arguments(op, case, device))
        with _running_kernels(device):
            actual = _gradients(op, op.call, outputs, _arguments(op, case, device))
    match = _match(op.backward)
    compare('gradient and autograd of the twin', actual, expected, match if isinstance(match, dict) else {})


# Running -------------------------------------------------------------------------------------


def _arguments(op: Op, case: Case, device: str | torch.device, seed: str | None = None) -> dict[str, Any]:
    """The arguments of a case; overwritten arguments hold NaN or -1, unless they are also inputs.

    The name of the op, or `seed` instead of it, decides the random contents.
    """
    ones = torch.full((16,), 0xFF, dtype=torch.uint8, device=device)
    arguments = cases_of(op).arguments(seed or op.name, case, device)
    names = [param.name for param in op.params if param.overwritten]
    read = {id(value) for name, value in arguments.items() if name not in names}
    for name in names:
        value = arguments.get(name)
        for x in value if isinstance(value, (list, tuple)) else (value,):
            if x is not None and id(x) not in read:
                x.copy_(ones.view(x.dtype)[0].expand_as(x))
    return arguments


def _running_kernels(device: str | torch.device) -> AbstractContextManager:
    """A context in which kernels run: on a GPU always; on a CPU in the interpreter, which also checks races."""
    return knobs(interpret=True, checks='races') if torch.device(device).type == 'cpu' else nullcontext()


def _outcome(op: Op, call: Callable[..., Any], arguments: dict[str, Any]) -> Outcome:
    """All outputs of a call by name: its results and the arguments it wrote in place."""
    result = call(**arguments)
    results = () if result is None else result if isinstance(result, tuple) else (result,)
    mutated: Outcome = {}
    for param in op.params:
        if param.mutated and arguments.get(param.name) is not None:
            value = arguments[param.name]
            mutated |= {f'{param.name}[{i}]': x for i, x in enumerate(value)} if param.many else {param.name: value}
    return dict(zip(op.outputs, results, strict=True)) | mutated


def _require_gradients(op: Op, arguments: dict[str, Any]) -> list[str]:
    """Make leaves of the arguments that have a gradient, if their dtype allows; returns their names."""
    outputs = op.backward.outputs if op.backward is not None and op.backward != IDENTITY else ()
    given = {name: arguments.get(name) for name in (output.removeprefix('d') for output in outputs)}
    leaves = [name for name, value in given.items() if isinstance(value, Tensor) and value.is_floating_point()]
    for name in leaves:
        arguments[name].requires_grad_()
    return leaves


def _gradients(op: Op, call: Callable[..., Any], outputs: list[str], arguments: dict[str, Any]) -> Outcome:
    """Gradients of the inputs for one random gradient of the outputs; 0 for an input without influence."""
    leaves = _require_gradients(op, arguments)
    if not leaves:
        return {}
    produced = _outcome(op, call, arguments)
    torch.manual_seed(0)
    upstream = [torch.randn(produced[name].shape, device=produced[name].device) for name in outputs]
    upstream = [dy.to(produced[name].dtype) for name, dy in zip(outputs, upstream, strict=True)]
    torch.autograd.backward([produced[name] for name in outputs], upstream)
    gradients = {name: arguments[name].grad for name in leaves}
    return {f'd{name}': torch.zeros_like(arguments[name]) if dx is None else dx for name, dx in gradients.items()}


# Comparing -----------------------------------------------------------------------------------


def _match(op: Op) -> str | dict[str, Any]:
    return 'bitwise' if op.case_set is None else op.case_set.match


def compare(what: str, actual: Outcome, expected: Outcome, match: str | dict[str, Any]) -> None:
    """Assert that two outcomes agree bitwise, or within bounds."""
    __tracebackhide__ = True
    for name, tensor in expected.items():
        try:
            if isinstance(match, dict) and tensor.is_floating_point():
                _assert_close(actual[name], tensor, bounds_of(match, name, tensor))
            else:
                assert_equal(actual[name], tensor)
        except AssertionError as error:
            raise AssertionError(f'{what}: {name}: {error}') from error


def _assert_close(actual: Tensor, expected: Tensor, bounds: dict[str, Any]) -> None:
    if _meta(actual) != _meta(expected):
        raise AssertionError(f'{_meta(actual)} != {_meta(expected)}')
    if expected.element_size() <= 2 and bounds:  # both sides round once at the end, perhaps to adjacent values
        bounds = bounds | {'rtol': max(bounds['rtol'], 2 * torch.finfo(expected.dtype).eps)}
    if expected.element_size() == 1:  # torch compares 8-bit floats bitwise only
        actual, expected = actual.float(), expected.float()
    torch.testing.assert_close(actual, expected, equal_nan=True, **bounds)


def _meta(x: Tensor) -> tuple:
    """The properties that a fake tensor must have; strides of an empty tensor do not count."""
    return tuple(x.shape), x.dtype, x.stride() if x.numel() else None, x.device
