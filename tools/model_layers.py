"""Time one decoder layer of real models at its true size: `transformers` as it is, and after `patch`.

    python tools/model_layers.py --json FILE [--models llama-3-8b ...] [--seconds 150] [--jobs N]
    python tools/model_layers.py --compile sm_90a     compile our kernels beforehand; needs nvcc, no GPU

Weights are random, and nothing is downloaded. Every model has a process of its own, so a crash costs one row. All of
them compile at the same time. Then the rows are timed, one after the other, the most important shape first. A row is
timed only if its result agrees with the layer before `patch`. Without a GPU, small layers are compared and not timed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tile_kernels.cli.bench import check_writable, circumstances, write_records
from tile_kernels.core.collect import collecting
from tile_kernels.core.gpus import arch_of
from tile_kernels.core.precompile import Variant, attempt, compile_variants
from tile_kernels.core.workers import Child, Failed, Here, spread
from tile_kernels.testing.bench import benchmark_kernel, graph_time, host_time
from tile_kernels.testing.records import Record


@dataclass(frozen=True)
class Shape:
    """The tokens of a call, and how many tokens the key-value cache has before it."""

    batch: int
    tokens: int
    past: int = 0
    backward: bool = False


#: The shapes, the most important first.
SHAPES = {
    'prefill': Shape(1, 4096),
    'decode 64': Shape(64, 1, 2047),
    'decode 1': Shape(1, 1, 2047),
    'train': Shape(1, 4096, backward=True),
}
SMALL_SHAPES = {
    'prefill': Shape(1, 9),
    'decode 64': Shape(3, 1, 5),
    'decode 1': Shape(1, 1, 5),
    'train': Shape(1, 9, backward=True),
}
HOWS = ('eager', 'compile', 'patched', 'patched compile')

_DENSE = dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
_GEMMA = dict(num_attention_heads=16, num_key_value_heads=8, head_dim=256, query_pre_attn_scalar=256)

#: Class and configuration of every model, the most important first; entries that are left out have their default.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    'llama-3-8b': ('Llama', dict(hidden_size=4096, intermediate_size=14336, **_DENSE)),
    'qwen3-30b-a3b': (
        'Qwen3Moe',
        dict(
            hidden_size=2048,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
        ),
    ),
    'deepseek-v3': ('DeepseekV3', dict(first_k_dense_replace=0)),
    'mixtral-8x7b': (
        'Mixtral',
        dict(hidden_size=4096, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2, **_DENSE),
    ),
    'qwen3-8b': ('Qwen3', dict(hidden_size=4096, intermediate_size=12288, **_DENSE)),
    'gemma-3-12b': ('Gemma3Text', dict(hidden_size=3840, intermediate_size=15360, sliding_window=1024, **_GEMMA)),
    'gemma-2-9b': ('Gemma2', dict(hidden_size=3584, intermediate_size=14336, **_GEMMA)),
}
SMALL: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    query_pre_attn_scalar=16,
    sliding_window=4,
    num_experts=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_routed_experts=8,
    n_group=2,
    topk_group=1,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
)

#: Share of `--seconds` after which nothing more is compiled, so that the rows that are ready can be timed.
_COMPILE_SHARE = 0.7

#: Seconds after that in which what has begun may end, and the most that one row may take to be timed.
_SPARE_S = 15.0

#: Elements of the gradient of each parameter that are compared; all would need the memory of the model once more.
_COMPARED = 1 << 22


def settings(name: str, small: bool) -> tuple[str, dict[str, Any]]:
    """Class and configuration of a model with one layer."""
    kind, values = MODELS[name]
    if small:
        own = {'DeepseekV3': ('n_routed_experts', 'n_group', 'topk_group', 'q_lora_rank', 'kv_lora_rank', 'v_head_dim')}
        extra = own.get(kind, ()) + (('qk_rope_head_dim', 'qk_nope_head_dim') if kind == 'DeepseekV3' else ())
        extra += ('hidden_size', 'intermediate_size', 'num_attention_heads', 'num_key_value_heads')
        extra += ('moe_intermediate_size', 'num_experts_per_tok') if kind in ('DeepseekV3', 'Qwen3Moe') else ()
        values = values | {key: SMALL[key] for key in (*extra, *(key for key in values if key in SMALL))}
        values |= {'num_key_value_heads': 4} if kind == 'DeepseekV3' else {}
    return kind, values | dict(num_hidden_layers=1, vocab_size=256, max_position_embeddings=8192, pad_token_id=0)


class FixedCache:
    """Keys and values of a full cache; every call replaces those of the last token."""

    def __init__(self, past: int) -> None:
        self.past = past
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values, those of the call last."""
        if self.keys is None or self.values is None:
            self.keys, self.values = (self._filled(x) for x in (keys, values))
        self.keys[:, :, self.past :] = keys
        self.values[:, :, self.past :] = values
        return self.keys, self.values

    def _filled(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape[0], x.shape[1], self.past + 1, x.shape[3], dtype=x.dtype, device=x.device)


class _Caught(Exception):
    """Ends a forward when the arguments of its first layer are known."""


class Layer:
    """One decoder layer before and after `patch`, on the same weights."""

    def __init__(self, name: str, small: bool, device: str, *, experts: bool = True) -> None:
        import transformers

        from tile_kernels.integrations import transformers as ours

        kind, values = settings(name, small)
        self.name, self.device, self.shapes = name, device, SMALL_SHAPES if small else SHAPES
        config = getattr(transformers, f'{kind}Config')(**values)
        config._attn_implementation = 'eager' if kind == 'Gemma2' else 'sdpa'  # sdpa has no softcap
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device('meta'):
                plain = getattr(transformers, f'{kind}Model')(config)
            plain.to_empty(device=device)
            plain.rotary_emb = type(plain.rotary_emb)(config).to(device)
        finally:
            torch.set_default_dtype(before)
        self.mixed = any(p.dim() == 3 for p in plain.parameters())
        _fill(plain, kind.startswith('Gemma'), experts)
        patched = copy.deepcopy(plain, {id(x): x for x in (*plain.parameters(), *plain.buffers())})
        module = sys.modules[type(plain).__module__]
        rotary = {name: getattr(module, name) for name in ours._ROPE_NAMES if hasattr(module, name)}
        self.report = ours.patch(patched)
        self.functions = {False: rotary, True: {name: getattr(module, name) for name in rotary}}
        self.module, self.models = module, {False: plain, True: patched}
        self.window = getattr(plain.layers[0].self_attn, 'sliding_window', None)
        backend = 'inductor' if device == 'cuda' else 'aot_eager'
        self.calls: dict[str, Callable] = {}
        for how in HOWS:
            layer = self.models['patched' in how].layers[0]
            self.calls[how] = torch.compile(layer, dynamic=False, backend=backend) if 'compile' in how else layer

    @contextmanager
    def active(self, patched: bool) -> Iterator[None]:
        """`patch` replaces functions of the Python module too, which both layers share."""
        before = {name: getattr(self.module, name) for name in self.functions[patched]}
        try:
            vars(self.module).update(self.functions[patched])
            yield
        finally:
            vars(self.module).update(before)

    @functools.cached_property
    def inputs(self) -> dict[tuple[str, bool], tuple[Tensor, dict[str, Any]]]:
        """The arguments that the model itself passes to its layer, for every shape, before and after `patch`."""
        found = {}
        generator = torch.Generator().manual_seed(0)
        for shape_name, shape in self.shapes.items():
            hidden = self.models[False].config.hidden_size
            x = torch.randn(shape.batch, shape.tokens, hidden, generator=generator).to(self.device, torch.bfloat16)
            past = shape.past if self.window is None else min(shape.past, self.window - 1)
            cache = FixedCache(past) if shape.past else None
            for patched, model in self.models.items():
                with self.active(patched):
                    args = _layer_arguments(model, x, shape.past)
                found[shape_name, patched] = x, args | dict(past_key_values=cache, use_cache=cache is not None)
        return found

    def run(self, shape_name: str, how: str) -> tuple[Tensor, ...]:
        """Output; for a shape with a backward also the gradients of the input and of all parameters."""
        x, arguments = self.inputs[shape_name, 'patched' in how]
        call = self.calls[how]
        if not self.shapes[shape_name].backward:
            with torch.no_grad():
                return (_first(call(x, **arguments)),)
        weights = [p for p in self.models[False].layers[0].parameters() if p.requires_grad]
        x = x.detach().requires_grad_()
        y = _first(call(x, **arguments))
        return y, *torch.autograd.grad(y, (x, *weights), x.detach(), allow_unused=True)

    def expected(self, shape_name: str) -> tuple[Tensor, ...]:
        """What the layer computes before `patch`; of large gradients the first part."""
        if shape_name not in self._expected:
            with self.active(False):
                self._expected[shape_name] = _parts(self.run(shape_name, 'eager'), self.shapes[shape_name])
        return self._expected[shape_name]

    @functools.cached_property
    def _expected(self) -> dict[str, tuple[Tensor, ...]]:
        return {}


def _fill(model: Any, zero_centered: bool, experts: bool) -> None:
    """Random weights of the size that keeps activations near 1; stacked experts can be left out."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.normal_(0.0 if zero_centered else 1.0, 0.1, generator=generator)
            elif p.dim() == 2 or experts:
                p.normal_(0.0, p.shape[-1] ** -0.5, generator=generator)
        for module in model.modules():
            if hasattr(module, 'e_score_correction_bias'):
                module.e_score_correction_bias = torch.zeros_like(module.e_score_correction_bias, dtype=torch.float32)


def _layer_arguments(model: Any, x: Tensor, past: int) -> dict[str, Any]:
    """The keyword arguments of the first layer when the model is called with embeddings `x`."""
    caught: dict[str, Any] = {}

    def catch(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        caught.update(kwargs)
        raise _Caught

    positions = torch.arange(past, past + x.shape[1], device=x.device)[None]
    hook = model.layers[0].register_forward_pre_hook(catch, with_kwargs=True)
    try:
        with torch.no_grad():
            model(inputs_embeds=x, position_ids=positions, use_cache=False)
    except _Caught:
        pass
    finally:
        hook.remove()
    return caught


def _first(y: Any) -> Tensor:
    return y[0] if isinstance(y, tuple) else y


def _parts(results: Sequence[Tensor | None], shape: Shape) -> tuple[Tensor, ...]:
    """Output and gradient of the input by rows, then a part of every other gradient."""
    rows = [x.flatten(0, 1) for x in results[: 1 + shape.backward] if x is not None]
    others = [x.flatten()[:_COMPARED].clone() for x in results[2:] if x is not None]
    return *rows, *others


# What a process of a model does --------------------------------------------------------------


@functools.lru_cache(1)
def layer_of(name: str, small: bool, device: str) -> Layer:
    """The layer of this process."""
    torch._dynamo.config.recompile_limit = 64
    return Layer(name, small, device)


def prepare(name: str, small: bool, device: str) -> str:
    """Build the layer; what `patch` replaced, in one line."""
    found = layer_of(name, small, device).report
    counts = [f'{count} {kind}' for kind, count in found.replaced.items() if count]
    return '; '.join([', '.join(counts), *sorted({f'left: {reason}' for reason in found.skipped.values()})])


def kernels_of(name: str, small: bool, device: str, arch: str, experts: bool = True) -> list[Variant]:
    """The kernels that the patched layer launches for these shapes; nothing runs."""
    from torch._subclasses import FakeTensorMode

    layer = layer_of(name, small, device) if experts else Layer(name, small, device, experts=False)
    inputs = {shape: layer.inputs[shape, True] for shape in layer.shapes}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, layer.active(True), collecting() as found:

        def fake(x: Any) -> Any:
            return mode.from_tensor(x) if isinstance(x, Tensor) else x

        for shape, (x, arguments) in inputs.items():
            given = {key: torch.utils._pytree.tree_map(fake, value) for key, value in arguments.items()}
            given['position_ids'] = None  # packed rows are found by looking at its values
            if layer.shapes[shape].past:
                given['past_key_values'] = FixedCache(arguments['past_key_values'].past)
            layer.inputs[shape, True] = fake(x), given
            try:
                layer.run(shape, 'patched')
            finally:
                layer.inputs[shape, True] = x, arguments
    return found.variants(arch, every_size=False)


def compare(name: str, small: bool, device: str, shape: str, how: str) -> Record:
    """Run once, which compiles, and compare with the layer before `patch`; a difference is a failure."""
    layer = layer_of(name, small, device)
    expected = layer.expected(shape)
    with layer.active('patched' in how):
        found = _parts(layer.run(shape, how), layer.shapes[shape])
    rows = torch.cat([_difference(a, b) for a, b in zip(found, expected, strict=True) if a.dim() == 2])
    others = [(_difference(a[None], b[None])).item() for a, b in zip(found, expected, strict=True) if a.dim() == 1]
    record = {'error': round(rows.median().item(), 5), 'worst': round(rows.max().item(), 5)}
    record |= {'gradients': round(max(others), 5)} if others else {}
    _release()
    # rounding changes the choice of an expert for some tokens, which changes their rows and gradients
    limits = {'error': 0.02} if layer.mixed else {'error': 0.02, 'worst': 0.05, 'gradients': 0.05}
    for key, limit in limits.items():
        if not record.get(key, 0.0) <= limit:
            raise Failed(f'{key} {record[key]} from the layer before patch, more than {limit}')
    return record


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """For every row, the norm of the difference over the norm of `b`."""
    return (a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1).clamp_min(1e-6)


def times(name: str, small: bool, device: str, shape: str, how: str) -> Record:
    """Time on the device with a cold L2, in a CUDA graph if one can be captured, and of the host."""
    layer = layer_of(name, small, device)
    with layer.active('patched' in how):

        def call() -> None:
            layer.run(shape, how)

        result = benchmark_kernel(call, warmup=5, rep=40, num_bytes=0, device=device)
        record = {'us': result.median * 1e3, 'p20_us': result.p20 * 1e3, 'p80_us': result.p80 * 1e3}
        record['host_us'] = host_time(call, calls=10, rep=3) * 1e3
        graph = None
        if not layer.shapes[shape].backward:
            try:
                graph = graph_time(call, calls=10, rep=5) * 1e3
            except RuntimeError:  # the host has to wait for the device
                torch.cuda.synchronize()
    _release()
    return {key: round(value, 2) for key, value in record.items()} | {'graph_us': graph and round(graph, 2)}


def _release() -> None:
    """Give unused memory back: all models share the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# The whole run -------------------------------------------------------------------------------


class Run:
    """Processes of all models: they compile at the same time, and are timed one after the other."""

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[str],
        small: bool,
        seconds: float,
        save: Callable[[Record], None],
    ) -> None:
        self.device = 'cuda' if torch.cuda.is_available() else 'cpu'
        self.small, self.save = small, save
        self.shapes = {name: shape for name, shape in (SMALL_SHAPES if small else SHAPES).items() if name in shapes}
        start = time.monotonic()
        self.end, self.last_start = start + seconds, start + seconds * _COMPILE_SHARE
        self.late = self.last_start + _SPARE_S
        self.runners: dict[str, Here | Child] = {name: Child() if self.device == 'cuda' else Here() for name in names}
        self.compared: dict[tuple[str, str, str], Record] = {}
        self.variants: dict[str, list[Variant]] = {}
        self.finished: set[Variant] = set()
        self.rows = 0
        self.arch = arch_of(0) if self.device == 'cuda' else ''

    def call(self, name: str, function: Callable, *args: Any, until: float) -> Any:
        """Call a function in the process of a model; a hang is ended at the time `until`."""
        limit = max(until - time.monotonic(), 1.0)
        return self.runners[name].call(function, name, self.small, self.device, *args, limit=limit)

    def compare_all(self, name: str) -> None:
        """Compile and compare every row of a model, those without our kernels first."""
        try:
            print(f'{name:14} {self.call(name, prepare, until=self.late)}', flush=True)
            if self.device == 'cuda':
                self.variants[name] = self.call(name, kernels_of, self.arch, until=self.late)
        except Failed as failure:
            print(f'{name:14} failed: {failure}', flush=True)
        finally:
            self.variants.setdefault(name, [])
        for backward in (False, True):
            shapes = [shape for shape, size in self.shapes.items() if size.backward == backward]
            for how in HOWS:
                while 'patched' in how and not self.finished.issuperset(self.variants[name]):
                    if time.monotonic() > self.last_start:
                        return
                    time.sleep(0.1)
                for shape in shapes:
                    if time.monotonic() < self.last_start:
                        self._compare(name, shape, how)

    def _compare(self, name: str, shape: str, how: str) -> None:
        try:
            self.compared[name, shape, how] = self.call(name, compare, shape, how, until=self.late)
        except Failed as failure:
            self.failed(name, shape, how, failure)

    def compile_kernels(self, jobs: int | None) -> None:
        """Compile our kernels of all models when all are known, in the order of the models."""
        while len(self.variants) < len(self.runners) and time.monotonic() < self.last_start:
            time.sleep(0.1)
        known = [variant for name in self.runners for variant in self.variants.get(name, ())]
        missing = [variant for variant in dict.fromkeys(known) if not variant.stored()]
        self.finished |= set(known) - set(missing)
        print(f'{len(missing)} of {len(set(known))} kernels to compile', flush=True)
        started = threading.local()  # `spread` makes the arguments of a call in the thread that waits for its result

        def make(variant: Variant) -> tuple[Variant]:
            started.variant = variant
            return (variant,)

        def done() -> None:
            self.finished.add(started.variant)

        makers = [functools.partial(make, variant) for variant in missing]
        for reason in spread(attempt, makers, jobs, done, until=self.last_start, each=1):
            if reason is not None:
                print(reason, flush=True)

    def failed(self, name: str, shape: str, how: str, failure: Failed) -> None:
        """Report a failure; if it ended the process, also the rows whose compiled code is lost with it."""
        self.report(name, shape, how, {'failed': str(failure)})
        runner = self.runners[name]
        if isinstance(runner, Child) and runner.process is None:
            for row in [row for row in self.compared if row[0] == name and 'compile' in row[2]]:
                del self.compared[row]
                self.report(*row, {'failed': f'its process ended with {how}, {shape}'})

    def report(self, name: str, shape: str, how: str, values: Record) -> None:
        """Print and save one row."""
        size = self.shapes[shape]
        case = {'model': name, 'shape': shape, 'batch': size.batch, 'tokens': size.tokens, 'past': size.past}
        words = '  '.join(f'{key} {value}' for key, value in values.items())
        print(f'{name:14} {shape:9} {how:15} {words}', flush=True)
        self.rows += 1
        self.save(case | {'how': how} | values)

    def all(self, jobs: int | None) -> None:
        """Compile, compare and time every row."""
        start = time.monotonic()
        if self.device == 'cpu':
            for name in self.runners:
                self.compare_all(name)
        else:
            threads = [threading.Thread(target=self.compare_all, args=(name,), daemon=True) for name in self.runners]
            for thread in threads:
                thread.start()
            self.compile_kernels(jobs)
            for thread in threads:
                thread.join()
        for shape in self.shapes:
            for name in self.runners:
                for how in HOWS:
                    self._time(name, shape, how)
        for runner in self.runners.values():
            runner.close()
        rows = len(self.runners) * len(self.shapes) * len(HOWS)
        print(f'{self.rows} of {rows} rows in {time.monotonic() - start:.0f} s', flush=True)

    def _time(self, name: str, shape: str, how: str) -> None:
        record = self.compared.pop((name, shape, how), None)
        if record is None or time.monotonic() > self.end:
            return
        try:
            if self.device == 'cuda':
                record = record | self.call(name, times, shape, how, until=time.monotonic() + _SPARE_S)
            self.report(name, shape, how, record)
        except Failed as failure:
            self.failed(name, shape, how, failure)


def compile_only(names: Sequence[str], small: bool, arch: str, jobs: int | None) -> None:
    """Compile our kernels of all models into the cache directory, without a GPU."""
    wanted: dict[Variant, None] = {}
    for name in names:
        found = kernels_of(name, small, 'cpu', arch, False)
        print(f'{name:14} {len(found)} kernels', flush=True)
        wanted |= dict.fromkeys(found)
    failures = compile_variants(list(wanted), jobs, progress=True)
    print(f'{len(wanted)} kernels, {len(failures)} failed', *map(str, failures), sep='\n')


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, compare, time and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--models', nargs='+', choices=MODELS, default=list(MODELS), metavar='MODEL')
    parser.add_argument('--shapes', nargs='+', choices=SHAPES, default=list(SHAPES), metavar='SHAPE')
    parser.add_argument('--json', type=Path, help='append a record for each row to this file, at once')
    parser.add_argument('--seconds', type=float, default=150.0, help='the whole run ends after about this time')
    parser.add_argument('--jobs', type=int, help='kernels of ours that compile at the same time; default: one per core')
    parser.add_argument('--commit', help='commit the records carry')
    parser.add_argument('--small', action='store_true', help='small layers; they are the only ones without a GPU')
    parser.add_argument('--compile', metavar='ARCH', help='only compile our kernels, for this architecture')
    given = parser.parse_args(arguments)
    if given.compile:
        compile_only(given.models, given.small, given.compile, given.jobs)
        return 0
    if given.json:
        check_writable(given.json)
    os.environ.setdefault('TORCHINDUCTOR_COMPILE_THREADS', '4')  # for each of the processes
    context = circumstances('cuda' if torch.cuda.is_available() else 'cpu', given.commit)

    def save(record: Record) -> None:
        if given.json:
            write_records(given.json, [record | context])

    sys.path.insert(0, str(Path(__file__).parents[1]))  # processes import the functions of this file by that name
    from tools import model_layers

    run = model_layers.Run(
        given.models, given.shapes, given.small or not torch.cuda.is_available(), given.seconds, save
    )
    run.all(given.jobs)
    return 0


if __name__ == '__main__':
    sys.exit(main())
