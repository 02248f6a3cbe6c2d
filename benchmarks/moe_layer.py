"""Time a whole MoE layer against what PyTorch offers: a loop over compiled experts, and `torch._grouped_mm` with glue.

    python benchmarks/moe_layer.py [--tokens 4096 64] [--json FILE]

Every variant computes the same layer from the same weights and is compared with the plain loop before it is timed. On a
CPU a small layer is compared only: nothing measured there says anything about the kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tile_kernels.cli.bench import circumstances, write_records
from tile_kernels.modeling import MoELayer
from tile_kernels.testing.bench import benchmark_kernel, graph_time, host_time

SHAPE = dict(num_experts=64, topk=6, hidden_dim=2048, intermediate_dim=1408)
SMALL_SHAPE = dict(num_experts=8, topk=2, hidden_dim=128, intermediate_dim=128)


def route(layer: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and experts of every token."""
    weight = layer.gate.weight.T
    logits = torch.mm(x, weight, out_dtype=torch.float32) if x.is_cuda else x.float() @ weight.float()
    weights, chosen = logits.softmax(-1).topk(layer.gate.topk)
    return weights / weights.sum(-1, keepdim=True), chosen


def expert(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One SwiGLU expert."""
    gate, up = (rows @ gate_up.T).chunk(2, -1)
    return (F.silu(gate) * up) @ down.T


def sort_by_expert(layer: MoELayer, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Slots in expert order, and how many each expert has; the host waits for nothing."""
    slots = chosen.flatten()
    counts = (slots.unsqueeze(1) == torch.arange(layer.num_experts, device=slots.device)).sum(0)
    return slots.argsort(stable=True), counts


def gather(x: Tensor, order: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """Weighted sums of the rows, which are in expert order."""
    weighted = rows.float() * weights.flatten()[order].unsqueeze(1)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return y.index_add(0, order // weights.shape[1], weighted).to(x.dtype)


def loop(layer: MoELayer, x: Tensor, run: Callable[..., Tensor] = expert) -> Tensor:
    """One expert after the other; the host waits once, for the sizes."""
    weights, chosen = route(layer, x)
    order, counts = sort_by_expert(layer, chosen)
    parts = x[order // layer.gate.topk].split(counts.tolist())
    gate_up, down = layer.experts.gate_up_proj, layer.experts.down_proj
    rows = torch.cat([run(part, gate_up[e], down[e]) for e, part in enumerate(parts)])
    return gather(x, order, weights, rows)


def glued(layer: MoELayer, x: Tensor) -> Tensor:
    """Grouped products of PyTorch with everything between them in PyTorch."""
    weights, chosen = route(layer, x)
    order, counts = sort_by_expert(layer, chosen)
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = x[order // layer.gate.topk]
    gate, up = torch._grouped_mm(rows, layer.experts.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * up, layer.experts.down_proj.transpose(1, 2), offs=ends)
    return gather(x, order, weights, rows)


def variants(layer: MoELayer, fp8: MoELayer, on_gpu: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is timed, by name; the plain loop is what all are compared with."""
    found: dict[str, Callable[[Tensor], Tensor]] = {
        'tile_kernels bf16': layer,
        'tile_kernels fp8': fp8,
        'loop': lambda x: loop(layer, x),
    }
    if on_gpu:
        compiled_expert = torch.compile(expert, dynamic=True)
        compiled_glued = torch.compile(glued)
        found['loop, torch.compile'] = lambda x: loop(layer, x, compiled_expert)
        found['torch._grouped_mm'] = lambda x: glued(layer, x)
        found['torch._grouped_mm, torch.compile'] = lambda x: compiled_glued(layer, x)
    return found


def launches_of(run: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Kernels the device runs for one call, copies and fills included."""
    run(x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(x)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def measure(run: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Any]:
    """Time with a cold L2, in a CUDA graph if one can be captured, of the host; launches."""
    result = benchmark_kernel(run, (x,), num_bytes=0)
    record: dict[str, Any] = {'us': result.median * 1e3, 'p20_us': result.p20 * 1e3, 'p80_us': result.p80 * 1e3}
    record['host_us'] = host_time(run, (x,), calls=10, rep=5) * 1e3
    record['launches'] = launches_of(run, x)
    try:
        record['graph_us'] = graph_time(run, (x,), calls=10) * 1e3
    except RuntimeError:  # the host has to wait for the device
        torch.cuda.synchronize()
        record['graph_us'] = None
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in record.items()}


@torch.no_grad()
def main() -> None:
    """Compare, time and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--tokens', type=int, nargs='+', default=[4096, 64])
    parser.add_argument('--only', nargs='+', help='words that a variant must contain one of')
    parser.add_argument('--json', type=Path, help='append a record for each variant to this file')
    parser.add_argument('--commit', help='commit the records carry')
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device, shape = ('cuda', SHAPE) if on_gpu else ('cpu', SMALL_SHAPE)
    torch.manual_seed(0)
    layer = MoELayer(**shape, device=device).eval()
    fp8 = MoELayer(**shape, device=device, compute='fp8').eval()
    fp8.load_state_dict(layer.state_dict())
    fp8.experts.prepare_fp8()
    context = circumstances(device, args.commit)
    for num_tokens in args.tokens:
        x = torch.randn(num_tokens, shape['hidden_dim'], device=device, dtype=torch.bfloat16)
        expected = loop(layer, x).float()
        for name, run in variants(layer, fp8, on_gpu).items():
            if args.only and not any(word in name for word in args.only):
                continue
            case = {'layer': name, 'num_tokens': num_tokens, **shape}
            try:
                error = ((run(x).float() - expected).norm() / expected.norm()).item()
                record = case | {'error': round(error, 5)} | (measure(run, x) if on_gpu else {})
            except Exception as failure:  # a variant that this PyTorch cannot run must not hide the others
                print(f'{num_tokens:5d} tokens  {name:34s} failed: {str(failure).splitlines()[0]}', flush=True)
                continue
            words = '  '.join(
                f'{key} {record[key]}' for key in ('us', 'graph_us', 'host_us', 'launches') if key in record
            )
            print(f'{num_tokens:5d} tokens  {name:34s} relative error {error:.4f}  {words}', flush=True)
            if args.json:
                write_records(args.json, [record | context])


if __name__ == '__main__':
    main()
