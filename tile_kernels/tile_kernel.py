"""One front over the registry of ops: an op in words, its variants and its dtypes.

It has no kernels of its own: every call goes to a public function or to an op of the registry.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from tile_kernels.activation import (
    fused_swiglu_quant_fp8,
    swiglu_forward,
    swiglu_forward_and_per_channel_cast_and_transpose,
)
from tile_kernels.core import check
from tile_kernels.core.registry import load_ops
from tile_kernels.quant import per_block_cast_fp8, per_channel_cast_fp8, per_token_cast_fp8
from tile_kernels.quant._checks import FP8_NAMES

FP8 = tuple(FP8_NAMES)
PLAIN = (torch.float16, torch.bfloat16, torch.float32)


class Form(NamedTuple):
    """One form of an op in words: the op of the registry that runs, and the function that calls it."""

    op: str
    call: Callable[..., Any]


def _swiglu_per_block(gate: Tensor, up: Tensor, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor]:
    return fused_swiglu_quant_fp8(gate, up, dtype=dtype, variant='per_block', **options)


def _swiglu_per_channel(gate: Tensor, up: Tensor, dtype: torch.dtype, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """Codes like gate and one scale for `group_size` rows of a channel; gate and up are joined first, by a copy."""
    return swiglu_forward_and_per_channel_cast_and_transpose(
        torch.cat((gate, up), dim=-1), FP8_NAMES[dtype], group_size, without_transpose=True
    )


def _swiglu(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """Without quantization; gate and up are joined first, by a copy."""
    return swiglu_forward(torch.cat((gate, up), dim=-1), dtype)


#: Ops in words -> variant -> form.
FORMS: Mapping[str, Mapping[str, Form]] = {
    'swiglu + fp8_quant': {
        'per_token': Form('activation.swiglu_forward_and_per_token_cast', fused_swiglu_quant_fp8),
        'per_block': Form('activation.swiglu_forward_and_per_block_cast', _swiglu_per_block),
        'per_channel': Form('activation.swiglu_forward_and_per_channel_cast_and_transpose', _swiglu_per_channel),
    },
    'fp8_quant': {
        'per_token': Form('quant.per_token_cast', per_token_cast_fp8),
        'per_block': Form('quant.per_block_cast', per_block_cast_fp8),
        'per_channel': Form('quant.per_channel_cast', per_channel_cast_fp8),
    },
}

#: What runs for a dtype that needs no quantization.
UNQUANTIZED = {'swiglu + fp8_quant': Form('activation.swiglu_forward', _swiglu)}

#: The op that stands for a whole module, with its gradient.
DIRECTIONS = {
    'activation': {'forward': 'activation.swiglu_forward', 'backward': 'activation.swiglu_backward'},
    'engram': {'forward': 'engram.gate', 'backward': 'engram.gate_bwd'},
    'mhc': {'forward': 'mhc.pre', 'backward': 'mhc.pre_bwd'},
    'norm': {'forward': 'norm.norm_forward', 'backward': 'norm.norm_backward'},
}


class TileKernel:
    """An op by name, or in words with variants and dtypes.

    >>> kernel = TileKernel(op='swiglu + fp8_quant', variants=['per_token', 'per_block'])
    >>> out, scale = kernel(torch.randn(3, 256), torch.randn(3, 256), variant='per_token', dtype='float8_e4m3fn')
    >>> out.shape, scale.shape
    (torch.Size([3, 256]), torch.Size([3, 1]))
    >>> TileKernel(module='mhc', op='forward').ops
    ['mhc.pre']

    Ops in words are 'swiglu + fp8_quant' and 'fp8_quant'. With a module, 'forward' and 'backward' name its main op and
    the gradient of that. Any op of the registry also has its own name, such as 'quant.per_token_cast'.

    Args:
        op: the op in words or by name; the words around + have no order.
        module: a family of ops such as 'mhc'; the name of the op then needs no family.
        variants: those that a call may choose; None for all.
        dtype: one or more dtypes that a call may choose, as torch, TileLang or string; None for all. One that is no
            fp8 dtype means no quantization.

    Attributes:
        variants: names of the variants; empty for an op by name.
        dtypes: torch dtypes; empty for an op by name.
        ops: names of the registered ops that calls may run.
    """

    def __init__(
        self, op: str, module: str | None = None, variants: Iterable[str] | str | None = None, dtype: Any = None
    ) -> None:
        known = load_ops()
        families = sorted({one.family for one in known.values()})
        if module is not None and module not in families:
            _unknown('module', module, families)
        phrase = ' + '.join(sorted((word.strip() for word in str(op).split('+')), reverse=True))
        self._forms = FORMS.get(phrase, {}) if module in (None, 'activation', 'quant') else {}
        self._plain = UNQUANTIZED.get(phrase) if self._forms else None
        if not self._forms:
            name = DIRECTIONS.get(module or '', {}).get(op) or (op if module is None else f'{module}.{op}')
            if name not in known:
                ours = [name.partition('.')[2] for name in known if name.startswith(f'{module}.')]
                _unknown('op', op, [*known, *FORMS] if module is None else [*ours, *DIRECTIONS.get(module, ())])
            for argument, value in (('variants', variants), ('dtype', dtype)):
                if value is not None:
                    check.fail(argument, f'must not be given, since {name} has none', repr(value))
            self._op = known[name]
            self.variants, self.dtypes, self.ops = [], [], [name]
            return
        self.variants = [_choice('variants', one, self._forms) for one in _listed(variants, self._forms)]
        offered = FP8 + (PLAIN if self._plain else ())
        self.dtypes = [_dtype(one, offered) for one in _listed(dtype, offered)]
        self.ops = [self._forms[variant].op for variant in self.variants if set(self.dtypes) & set(FP8)]
        self.ops += [self._plain.op] if self._plain and set(self.dtypes) & set(PLAIN) else []

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run the op on `args`; in words it also takes `variant` and `dtype`, by default the first of each.

        Without quantization all variants are the same.
        """
        if not self._forms:
            return self._op(*args, **options)
        variant = _choice('variant', options.pop('variant', self.variants[0]), self.variants)
        dtype = _dtype(options.pop('dtype', self.dtypes[0]), self.dtypes)
        form = self._forms[variant] if dtype in FP8 or self._plain is None else self._plain
        return form.call(*args, dtype=dtype, **options)

    def __repr__(self) -> str:
        return f'TileKernel(ops={self.ops}, variants={self.variants}, dtypes={self.dtypes})'


def _listed(given: Any, known: Iterable[Any]) -> list[Any]:
    """What was given as a list: everything known for None, and one value alone."""
    if given is None:
        return list(known)
    found = list(given) if isinstance(given, (list, tuple, set)) else [given]
    return found or list(known)


def _choice(argument: str, given: Any, known: Iterable[str]) -> str:
    return given if given in known else _unknown(argument, given, known)


def _dtype(given: Any, known: Iterable[torch.dtype]) -> torch.dtype:
    """The torch dtype of a torch, TileLang or string dtype, if it is known."""
    words = {str(dtype).removeprefix('torch.'): dtype for dtype in known}
    word = str(given).removeprefix('torch.')
    return words[word] if word in words else _unknown('dtype', word, words)


def _unknown(argument: str, given: Any, known: Iterable[str]) -> NoReturn:
    words = list(known)
    near = difflib.get_close_matches(str(given), words, n=3, cutoff=0.4) or sorted(words)[:8]
    check.fail(argument, 'must be a known word', repr(given), f'near it are {", ".join(near)}')
