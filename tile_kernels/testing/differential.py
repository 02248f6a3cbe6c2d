"""Outputs of kernels as data: a GPU's results for the smoke cases, to compare the interpreter with.

Outputs of bit-exact ops are stored as digests, other outputs as samples of their values. Random inputs differ between
releases of PyTorch, so the inputs are stored, too; their digest is stored with the outputs.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tile_kernels.core.cases import bounds_of
from tile_kernels.testing.contract import ContractCase, cases_of
from tile_kernels.testing.poison import poisoned

Entry = dict[str, Any]

#: Number of stored values for each output that is not bit-exact.
SAMPLES = 1000


def digest(tensors: list[Tensor]) -> str:
    """Digest of values, shapes and dtypes."""
    state = hashlib.sha256()
    for x in tensors:
        state.update(f'{x.dtype}{tuple(x.shape)}'.encode())
        state.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:32]


def moved(x: Tensor, device: str | torch.device) -> Tensor:
    """`x` on another device, with the same strides and offset and the surrounding memory."""
    flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return flat.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def arguments_of(case: ContractCase) -> dict[str, Any]:
    """The arguments of a case, made on the CPU from its seed; output memory is poisoned."""
    with poisoned():
        return cases_of(case.op).arguments(case.op.name, case.case, 'cpu')


def run_case(case: ContractCase, device: str | torch.device, arguments: dict[str, Any] | None = None) -> Entry:
    """Run the kernel of a case on a device; returns the entry to store or to compare."""
    op = case.op
    arguments = arguments_of(case) if arguments is None else arguments
    inputs = digest([leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)])
    arguments = tree_map_only(Tensor, lambda x: moved(x, device), arguments)
    with case.choosing():
        result = op.call(**arguments)
    results = () if result is None else result if isinstance(result, tuple) else (result,)
    written = [x for x in tree_leaves([arguments.get(name) for name in op.written]) if x is not None]
    outputs = [*results, *written]
    if cases_of(op).match == 'bitwise':
        return {'inputs': inputs, 'outputs': digest(outputs)}
    return {'inputs': inputs, 'values': [_sampled(x.detach().cpu().double().flatten().tolist()) for x in outputs]}


def _sampled(values: list[float]) -> list[float]:
    return values[:: max(1, -(-len(values) // SAMPLES))]


def difference(case: ContractCase, stored: Entry, found: Entry) -> str | None:
    """The difference between two entries of a case; None if they agree within the bounds of the op."""
    if stored['inputs'] != found['inputs']:
        return 'the inputs are not those the GPU had'
    match = cases_of(case.op).match
    if isinstance(match, str):
        return None if stored['outputs'] == found['outputs'] else 'the outputs have other bits'
    for i, (expected, actual) in enumerate(zip(stored['values'], found['values'], strict=True)):
        e, a = torch.tensor(expected, dtype=torch.float64), torch.tensor(actual, dtype=torch.float64)
        name = case.op.outputs[i] if i < len(case.op.outputs) else ''  # written arguments are last, nameless
        if not torch.allclose(a, e, equal_nan=True, **bounds_of(match, name, e)):
            return f'output {i} is off by {(a - e).abs().max():.3g}'
    return None
