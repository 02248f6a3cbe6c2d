"""What is tuned: a kernel of an op on a case, or a kernel of the user, and the configs of its space."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import tuned
from tile_kernels.core.cases import Case, case_id
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.gpus import GPUS, Gpu, cuda_gpu
from tile_kernels.core.jit import Config, Kernel
from tile_kernels.core.launch import Launch, forced_config, on_gpu
from tile_kernels.core.op import Op
from tile_kernels.core.precompile import Variant, compile_variants
from tile_kernels.core.registry import launches_of
from tile_kernels.core.workers import Failed, spread
from tile_kernels.sight.subject import Subject, of_launch, resolve
from tile_kernels.tuning.rank import Estimate
from tile_kernels.tuning.runs import KernelRun, OpRun, Parameter, Run

#: How outputs of a user's kernel must agree with the reference, unless the caller says otherwise.
MATCH = {'rtol': 1e-2, 'rms': 1e-2}


def enumerate_configs(
    space: Mapping[str, Sequence[Any]], where: Callable[[Config], Any] | None = None, first: Config | None = None
) -> list[Config]:
    """Every config of a space that `where` accepts, in declared order, but `first` in front."""
    for name, values in space.items():
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
            raise ArgumentError(f'tune: space[{name!r}] must be a list of values, got {values!r}')
    found = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    if where is not None:
        found = [config for config in found if where(config)]
    if not found:
        raise ArgumentError('tune: where must accept a config of the space, got none')
    return [first, *(config for config in found if config != first)] if first is not None else found


@dataclass(frozen=True)
class Target:
    """The GPU to tune for.

    Attributes:
        gpu: its record, for predictions.
        table: the name of the folder of its tables.
        device: where kernels run: `'cuda'`, or `'cpu'` for the interpreter.
    """

    gpu: Gpu
    table: str
    device: str = 'cuda'

    @classmethod
    def here(cls, device: str | None) -> Target:
        """The GPU of this machine, or the named one, which nothing runs on."""
        if device is not None and device not in GPUS:
            raise ArgumentError(f'tune: device must be one of {", ".join(GPUS)}, got {device!r}')
        if device is None and torch.cuda.is_available():
            gpu = cuda_gpu(torch.cuda.current_device())
            return cls(GPUS.get(tuned.device_name(gpu), gpu), tuned.device_name(gpu))
        return cls(GPUS[device or 'h200'], device or 'h200')


@dataclass
class OpProblem:
    """A kernel with a space, as launched by one case of an op.

    Attributes:
        name: what is tuned, in words.
        kernel_name: the name of its table.
        declared: how many configs the space has.
        configs: those of them to examine, the one in force first.
        in_force: the config that calls use now.
    """

    op: Op
    case: Case
    target: Target
    launches: list[Launch]

    def __post_init__(self) -> None:
        self.tuned_kernel: Kernel = self.launches[0].kernel
        self.kernel_name = self.tuned_kernel.name
        self.name = f'{self.op.name}[{case_id(self.case)}] {self.kernel_name}'
        self.in_force: Config | None = self.launches[0].config
        self.declared = math.prod(len(values) for values in self.tuned_kernel.space.values())
        held = {name: (self.launches[0].config[name],) for name in self.tuned_kernel.fixed}
        self.configs = enumerate_configs({**self.tuned_kernel.space, **held}, first=self.in_force)

    @classmethod
    def all_of(cls, op: Op, case: Case, target: Target) -> list[OpProblem]:
        """The kernels with several configs that a case launches."""
        by_kernel: dict[Kernel, list[Launch]] = {}
        with on_gpu(target.gpu):
            for launch in launches_of(op, case):
                by_kernel.setdefault(launch.kernel, []).append(launch)
        found = [cls(op, case, target, launches) for kernel, launches in by_kernel.items() if kernel.space]
        return [problem for problem in found if len(problem.configs) > 1]

    def _launches(self, config: Config) -> list[Launch]:
        with on_gpu(self.target.gpu), forced_config(self.tuned_kernel, **config):
            return [made for made in launches_of(self.op, self.case) if made.kernel is self.tuned_kernel]

    def subjects(self, config: Config) -> list[Subject]:
        """The launches of this kernel, without tensors, so that another process can have them."""
        found = [of_launch(made, self.target.gpu) for made in self._launches(config)]
        return [replace(subject, tensors={}, launch=None) for subject in found]

    def prepare(self, folder: Path, estimate: Estimate) -> None:
        """Nothing: the cases of an op make their arguments."""

    def compile(self, configs: Sequence[Config], jobs: int | None, until: float) -> list[str | None]:
        """Compile into the cache directory; the interpreter needs nothing compiled."""
        if self.target.device == 'cpu':
            return [None] * len(configs)
        arch = self.target.gpu.target
        variants = [
            [Variant(self.tuned_kernel, made.static, tuple(config.items()), arch) for made in self._launches(config)]
            for config in configs
        ]
        failures = compile_variants(list(dict.fromkeys(v for of in variants for v in of)), jobs, progress=False)
        return [next((failures[v] for v in of if v in failures), None) for of in variants]

    def run(self, config: Config) -> Run:
        """The op with this config forced."""
        return OpRun(self.op, self.case, self.tuned_kernel, config, self.target.device)

    def entries(self, where: str) -> list[tuned.Entry]:
        """One entry per static arguments and size class of the launches."""
        found = {}
        for made in self.launches:
            static = [tuned.word(s) for s in made.static]
            code = tuned.stamp(self.tuned_kernel, made.static, where)
            choose = self.tuned_kernel.chosen(made.static, made.size, self.target.gpu)
            entry = {'static': static, 'size': tuned.size_class(made.size), 'code': code, 'choose': choose}
            found[tuple(static), entry['size']] = entry
        return list(found.values())

    def kernel(self, config: Config) -> Kernel:
        """The kernel itself: a table gives it its config."""
        return self.tuned_kernel


@dataclass
class KernelProblem:
    """A kernel of the user, a builder or a `tilelang.jit` function; has the attributes of `OpProblem`."""

    builder: Any
    args: tuple
    named: dict[str, Any]
    space: Mapping[str, Sequence[Any]]
    target: Target
    where: Callable[[Config], Any] | None = None
    reference: Callable[..., Any] | None = None
    inputs: Sequence[Tensor] | Callable[[], Sequence[Tensor]] | None = None
    match: str | dict[str, Any] = field(default_factory=MATCH.copy)
    seed: int = 0

    def __post_init__(self) -> None:
        function = getattr(self.builder, 'func', self.builder)
        function = getattr(function, 'orig_func', function)
        if not callable(function):
            raise ArgumentError(f'tune: kernel must be a builder, a tilelang.jit function or an op, got {function!r}')
        parameters = inspect.signature(function).parameters
        for name in self.space:
            if name not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                raise ArgumentError(
                    f'tune: {name} must be a parameter of {function.__name__}, which has {", ".join(parameters)}'
                )
        defaults = {name: parameters[name].default for name in self.space if name in parameters}
        self.configs = enumerate_configs(self.space, self.where)
        self.declared = math.prod(len(values) for values in self.space.values())
        self.in_force = defaults if defaults in self.configs else None
        self.configs = enumerate_configs(self.space, self.where, self.in_force)
        words = [*map(_word, self.args), *(f'{name}={_word(value)}' for name, value in self.named.items())]
        self.static = words
        self.name = f'{function.__name__}({", ".join(words)})'
        place = hashlib.sha256(f'{function.__module__}.{function.__qualname__}'.encode()).hexdigest()[:8]
        self.kernel_name = f'{function.__name__}-{place}'
        self.parameters: tuple[Parameter, ...] = ()
        self.data = Path()

    def subjects(self, config: Config) -> list[Subject]:
        """The one launch of the kernel."""
        device = tuned.known_name(self.target.gpu) or 'h200'
        found = resolve(self.builder, *self.args, device=device, **self.named, **config)
        gpu = self.target.gpu
        return [replace(subject, tensors={}, gpu=gpu, target=f'cuda -arch={gpu.target}') for subject in found]

    def describe(self, folder: Path, estimate: Estimate) -> None:
        """Find the parameters, and the file in this folder for their values."""
        (subject,) = self.subjects(self.configs[0])
        outputs = getattr(self.builder, 'out_idx', None)
        outputs = [] if outputs is None else [outputs] if isinstance(outputs, int) else outputs
        self.parameters, self.data = parameters_of(subject, estimate, outputs), folder / 'data.pt'

    def prepare(self, folder: Path, estimate: Estimate) -> None:
        """Write inputs and expected outputs to a file: the reference may be a lambda, which no worker could get."""
        self.describe(folder, estimate)
        if not any(p.writes for p in self.parameters):
            raise ArgumentError(
                f'tune: cannot tell which tensors {self.name} writes; name them in tilelang.jit(out_idx=)'
            )
        inputs = self._inputs()
        expected = None
        if self.reference is not None:
            given = [p.value if p.value is not None else inputs[p.name].clone() for p in self.parameters if p.given]
            result = self.reference(*given)
            results = result if isinstance(result, (tuple, list)) else (result,)
            written = [p for p in self.parameters if p.writes]
            if len(results) != len(written):
                names = ', '.join(p.name for p in written)
                raise ArgumentError(f'tune: reference must return {names}, got {len(results)} values')
            expected = {p.name: x.to(p.dtype).contiguous() for p, x in zip(written, results, strict=True)}
        torch.save((inputs, expected), self.data)
        if self.target.device == 'cuda':
            torch.cuda.empty_cache()  # the worker needs the memory

    def _inputs(self) -> dict[str, Tensor]:
        """Tensors of the parameters that the kernel reads: given, or normal numbers, and 0 or 1 for integers."""
        read = [p for p in self.parameters if p.given and p.value is None]
        given = self.inputs() if callable(self.inputs) else self.inputs
        given = given or [x for x in (*self.args, *self.named.values()) if isinstance(x, Tensor)]
        if given:
            if len(given) != len(read):
                raise ArgumentError(f'tune: inputs must be {", ".join(p.name for p in read)}, got {len(given)} values')
            return {p.name: x.to(self.target.device) for p, x in zip(read, given, strict=True)}
        random = torch.Generator().manual_seed(self.seed)
        drawn = [
            torch.randn(p.shape, generator=random)
            if p.dtype.is_floating_point
            else torch.randint(0, 2, p.shape, generator=random)
            for p in read
        ]
        return {p.name: x.to(p.dtype).to(self.target.device) for p, x in zip(read, drawn, strict=True)}

    def compile(self, configs: Sequence[Config], jobs: int | None, until: float) -> list[str | None]:
        """Compile into TileLang's cache; the interpreter needs nothing compiled."""
        if self.target.device == 'cpu':
            return [None] * len(configs)
        makers = [functools.partial(lambda config: (self.run(config),), config) for config in configs]
        return [str(r) if isinstance(r, Failed) else None for r in spread(KernelRun.compile, makers, jobs, until=until)]

    def run(self, config: Config) -> Run:
        """The kernel with this config."""
        (subject,) = self.subjects(config)
        attrs = subject.prim_func.attrs or {}
        returned = tuple(int(i) % len(self.parameters) for i in attrs.get('tilelang_out_idx', ()))
        compiler = {
            name: getattr(self.builder, name, None) for name in ('target', 'compile_flags', 'execution_backend')
        }
        compiler |= {'pass_configs': subject.pass_configs, 'target': compiler['target'] or self._target}
        return KernelRun(
            config, subject.prim_func, self.parameters, self.data, self.match, self.target.device, compiler, returned
        )

    @property
    def _target(self) -> dict[str, str]:
        """The GPU's target, which TileLang would otherwise find by asking the driver."""
        return {'kind': 'cuda', 'arch': self.target.gpu.target}

    def entries(self, where: str) -> list[tuned.Entry]:
        """One entry; its code is the TIR of the first config and the list of all."""
        (subject,) = self.subjects(self.configs[0])
        text = f'{subject.prim_func.script()}\n{sorted(subject.pass_configs.items())}\n{self.configs}'
        code = hashlib.sha256(text.encode()).hexdigest()[:24]
        return [{'static': self.static, 'size': 0, 'code': code, 'choose': self.in_force}]

    def kernel(self, config: Config) -> Any:
        """The compiled kernel; without a GPU an interpreted one."""
        if not torch.cuda.is_available():
            from tile_kernels.interpreter.jit_hook import InterpretedKernel

            (subject,) = self.subjects(config)
            return InterpretedKernel(
                subject.prim_func, getattr(self.builder, 'out_idx', None), subject.pass_configs, 'memory'
            )
        if hasattr(self.builder, 'compile'):
            return self.builder.compile(*self.args, **self.named, **config)
        import tilelang

        return tilelang.compile(self.builder(*self.args, **self.named, **config), target=self._target)


#: What can be tuned.
Problem = OpProblem | KernelProblem


def parameters_of(subject: Subject, estimate: Estimate, outputs: Sequence[int] = ()) -> tuple[Parameter, ...]:
    """The parameters of a kernel, with the extents of its dynamic dimensions; `outputs` are known positions."""
    from tilelang.engine.param import KernelParam

    found = []
    known = {place % len(subject.prim_func.params) for place in outputs}
    for place, param in enumerate(subject.prim_func.params):
        buffer = subject.prim_func.buffer_map.get(param)
        if buffer is None:
            found.append(Parameter(param.name, value=subject.symbols[param.name]))
            continue
        shape = tuple(int(subject.symbols[e.name] if hasattr(e, 'name') else e) for e in buffer.shape)
        writes = buffer.name in estimate.writes or place in known
        given, dtype = buffer.name in estimate.reads or not writes, KernelParam.from_buffer(buffer).torch_dtype()
        found.append(Parameter(buffer.name, None, shape, dtype, given, writes))
    return tuple(found)


def _word(value: Any) -> str:
    """An argument of a builder as text."""
    if isinstance(value, Tensor):
        return f'{tuned.word(value.dtype)}{list(value.shape)}'
    return tuned.word(value)
