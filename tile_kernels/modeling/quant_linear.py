"""`QuantLinear`: a linear layer with packed weights of 4 or 8 bits; `quantize_model` puts it into any module.

y = x W^T + bias,    W constant, in a format of `tile_kernels.gemm.FORMATS`
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tile_kernels.core import check
from tile_kernels.gemm import (
    PackedWeight,
    from_awq,
    from_compressed_tensors,
    from_gptq,
    gemm_dequant,
    quantize_weight,
)
from tile_kernels.gemm.packed_weight import FORMATS

HALVES = (torch.bfloat16, torch.float16)
PARTS = ('codes', 'scale', 'zero', 'global_scale', 'perm')


class PackedModule(nn.Module):
    """A module whose buffers are the tensors of a `PackedWeight`; casting the module leaves them as they are."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    global_scale: Tensor | None
    perm: Tensor | None

    def __init__(
        self,
        fmt: str,
        n: int,
        k: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        lead: tuple[int, ...] = (),
    ) -> None:
        """Buffers of zeros for (*lead, n, k)."""
        super().__init__()
        check.one_of(fmt, FORMATS, 'fmt')
        form = FORMATS[fmt]
        self.fmt, self.n, self.k, self.dtype = fmt, n, k, dtype
        rows, cols = form.tiles(n, k)
        scale_dtype = dict(any=dtype, f32=torch.float32).get(form.factor, torch.uint8)
        shape = (*lead, *form.scale_shape(n, k))
        self.register_buffer('codes', torch.zeros(*lead, rows, cols, 32, 4, dtype=torch.int32, device=device))
        self.register_buffer('scale', torch.zeros(shape, dtype=scale_dtype, device=device))
        whole = torch.ones(lead or (1,), device=device) if form.factor == 'e4m3' else None
        for name, value in (('zero', None), ('global_scale', whole), ('perm', None)):
            self.register_buffer(name, value)

    @property
    def weight(self) -> PackedWeight:
        """The packed weight."""
        parts = (self.codes, self.scale, self.zero, self.global_scale, self.perm)
        return PackedWeight(self.fmt, self.n, self.k, *parts)

    def take(self, weight: PackedWeight) -> PackedModule:
        """Use the tensors of this weight; returns the module."""
        for name in PARTS:
            setattr(self, name, getattr(weight, name))
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        """Move the buffers but keep their dtypes."""
        kept = {name: getattr(self, name) for name in PARTS}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = getattr(self, name)
            if before is not None and after.dtype is not before.dtype:
                setattr(self, name, before.to(after.device))
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        """Zero points and permutations are there if the checkpoint has them; factors take its dtype."""
        for name in ('scale', 'zero', 'perm'):
            given, own = state_dict.get(prefix + name), getattr(self, name)
            if given is None and name != 'scale':
                setattr(self, name, None)
            elif given is not None and (own is None or own.dtype is not given.dtype):
                setattr(self, name, torch.empty(given.shape, dtype=given.dtype, device=self.codes.device))
        super()._load_from_state_dict(state_dict, prefix, *args)


class QuantLinear(PackedModule):
    """A drop-in for `nn.Linear` whose weight is packed and constant; the input has a gradient.

    Inputs that are not in half precision are cast to `dtype` and back.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        fmt: str = 'u4_1x128',
        dtype: torch.dtype | str = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        """A layer of zeros, for `load_state_dict`; `from_linear` and `from_checkpoint` make one with weights.

        Args:
            in_features: channels of the input.
            out_features: channels of the output.
            bias: whether there is a bias.
            fmt: a name of `tile_kernels.gemm.FORMATS`.
            dtype: of the bias, of factors that the format leaves open, and of products of other inputs.
            device: where the tensors live.
        """
        check.one_of(fmt, FORMATS, 'fmt')
        check.integer(in_features, 'in_features', 1)
        check.integer(out_features, 'out_features', 1)
        half = check.to_dtype(dtype, 'dtype')
        check.one_of(half, HALVES, 'dtype')
        check.multiple(in_features, FORMATS[fmt].multiple, 'in_features')
        super().__init__(fmt, out_features, in_features, half, device)
        self.in_features, self.out_features = in_features, out_features
        own = torch.zeros(out_features, dtype=half, device=device) if bias else None
        self.bias = None if own is None else nn.Parameter(own, requires_grad=False)

    @classmethod
    def from_packed(
        cls, weight: PackedWeight, bias: Tensor | None = None, dtype: torch.dtype | str = torch.bfloat16
    ) -> QuantLinear:
        """A layer with this weight."""
        layer = cls(weight.k, weight.n, bias is not None, fmt=weight.fmt, dtype=dtype, device='meta')
        layer.take(weight)
        if bias is not None:
            check.shape(bias, 'bias', 'out_features', out_features=weight.n)
            layer.bias = nn.Parameter(bias.detach().to(layer.dtype).clone(), requires_grad=False)
        return layer

    @classmethod
    def from_linear(cls, linear: nn.Linear, fmt: str = 'u4_1x128') -> QuantLinear:
        """Quantize a linear layer to the nearest codes.

        Args:
            linear: the layer; its weight and bias are not changed.
            fmt: a name of `tile_kernels.gemm.FORMATS`.
        """
        dtype = linear.weight.dtype if linear.weight.dtype in HALVES else torch.bfloat16
        return cls.from_packed(quantize_weight(linear.weight, fmt), linear.bias, dtype).train(linear.training)

    @classmethod
    def from_checkpoint(
        cls,
        tensors: Mapping[str, Tensor],
        prefix: str = '',
        *,
        dtype: torch.dtype | str = torch.bfloat16,
        **options: Any,
    ) -> QuantLinear:
        """A layer from the tensors of a GPTQ, AWQ or compressed-tensors checkpoint, told apart by names and shapes.

        Args:
            tensors: a state_dict.
            prefix: of the names of this layer, such as `model.layers.0.mlp.up_proj.`.
            dtype: of the bias and of products of inputs that are not in half precision.
            options: of `from_gptq`, `from_awq` or `from_compressed_tensors`.
        """
        own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        bias = own.pop('bias', None)
        reader: Callable[..., PackedWeight]
        if 'weight_packed' in own:
            reader = from_compressed_tensors
            names: tuple[str, ...] = (
                'weight_packed',
                'weight_scale',
                'weight_zero_point',
                'weight_shape',
                'weight_g_idx',
            )
        elif 'qweight' in own and 'scales' in own:
            gptq = own['qweight'].shape[-1] == own['scales'].shape[-1]
            reader = from_gptq if gptq else from_awq
            names = ('qweight', 'qzeros', 'scales', 'g_idx') if gptq else ('qweight', 'qzeros', 'scales')
        else:
            check.fail('tensors', 'must have qweight and scales, or weight_packed', f'{sorted(own)[:8]}')
        given: dict[str, Any] = {name: own[name] for name in names if name in own}
        return cls.from_packed(reader(**given, **options), bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The product with x of (..., in_features)."""
        if check.tensor(x, 'x').shape[-1:] != (self.in_features,):
            check.fail('x', f'must be (..., {self.in_features})', check.describe(x))
        kind = x.device.type
        cast = x
        if torch.is_autocast_enabled(kind):
            cast = x.to(torch.get_autocast_dtype(kind))
        dtype = cast.dtype
        cast = cast if dtype in HALVES else cast.to(self.dtype)
        rows = cast.reshape(-1, self.in_features)
        bias = (
            self.bias
            if self.bias is None or self.bias.dtype in (rows.dtype, torch.float32)
            else self.bias.to(rows.dtype)
        )
        y = gemm_dequant(rows, self.weight, bias)
        return y.reshape(*x.shape[:-1], self.out_features).to(dtype)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f'{self.in_features}, {self.out_features}, bias={self.bias is not None}, fmt={self.fmt}'


# Models -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerReport:
    """One quantized layer: bytes before and after, and the relative RMS error of its weight."""

    name: str
    shape: tuple[int, int]
    bytes_before: int
    bytes_after: int
    error: float


@dataclass(frozen=True)
class QuantReport:
    """What `quantize_model` did: the replaced layers, and the others with the reason."""

    fmt: str
    layers: tuple[LayerReport, ...]
    skipped: Mapping[str, str]

    @property
    def bytes_saved(self) -> int:
        """Bytes of weights that are no longer stored."""
        return sum(layer.bytes_before - layer.bytes_after for layer in self.layers)

    @property
    def largest_error(self) -> float:
        """The largest relative RMS error of a weight."""
        return max((layer.error for layer in self.layers), default=0.0)

    def __str__(self) -> str:
        lines = [f'{layer.name}: {layer.shape} error {layer.error:.4f}' for layer in self.layers]
        lines += [f'{name}: skipped, {reason}' for name, reason in self.skipped.items()]
        lines.append(f'{self.fmt}: {len(self.layers)} layers, {self.bytes_saved / 2**20:.1f} MiB saved')
        return '\n'.join(lines)


@torch.no_grad()
def quantize_model(
    model: nn.Module, fmt: str = 'u4_1x128', skip: Iterable[str] | Callable[[str, nn.Linear], bool] = ('*lm_head',)
) -> QuantReport:
    """Replace the linear layers of a model by `QuantLinear`, in place.

    Args:
        model: any module; layers that are exactly `nn.Linear` are replaced.
        fmt: a name of `tile_kernels.gemm.FORMATS`.
        skip: shell patterns of the names of layers to leave alone, or a function `(name, layer) -> bool`.

    Returns:
        A report of bytes and errors; layers whose channels are no multiple of the group are skipped and listed.
    """
    if not isinstance(model, nn.Module):
        check.fail('model', 'must be a module', check.describe(model), op='quantize_model')
    if isinstance(model, nn.Linear):
        check.fail('model', 'must contain linear layers', 'one', 'QuantLinear.from_linear takes one', 'quantize_model')
    if fmt not in FORMATS:
        check.fail('fmt', f'must be one of {", ".join(FORMATS)}', repr(fmt), op='quantize_model')
    patterns = (skip,) if isinstance(skip, str) else skip
    if callable(patterns):
        left_out = patterns
    else:
        names = tuple(patterns)

        def left_out(name: str, layer: nn.Linear) -> bool:
            return any(fnmatch.fnmatchcase(name, pattern) for pattern in names)

    group = FORMATS[fmt].multiple
    done: list[LayerReport] = []
    replaced: dict[int, QuantLinear] = {}
    skipped: dict[str, str] = {}
    for name, layer in [(name, module) for name, module in model.named_modules(remove_duplicate=False)]:
        if type(layer) is not nn.Linear:
            continue
        if left_out(name, layer):
            skipped[name] = 'as asked'
        elif layer.in_features % group:
            skipped[name] = f'{layer.in_features} channels are no multiple of {group}'
        else:
            parent = model.get_submodule(name.rpartition('.')[0])
            if id(layer) not in replaced:
                made = replaced[id(layer)] = QuantLinear.from_linear(layer, fmt)
                weight = layer.weight.float()
                error = (made.weight.dequantize() - weight).norm() / weight.norm().clamp(min=1e-30)
                before = layer.weight.numel() * layer.weight.element_size()
                shape = (layer.out_features, layer.in_features)
                done.append(LayerReport(name, shape, before, made.weight.nbytes, float(error)))
            setattr(parent, name.rpartition('.')[2], replaced[id(layer)])
    return QuantReport(fmt, tuple(done), skipped)
