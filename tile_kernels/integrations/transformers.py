"""Hugging Face `transformers` models on our kernels, in one line: `print(patch(model))`.

    what              replaced                                         by
    norm              RMS norms, Llama's and Gemma's form              norm.norm_forward
    mlp               MLPs silu(gate) * up                             activation.swiglu_forward
    rope              `apply_rotary_pos_emb` of the model's module     transform.rotary_embedding
    router            softmax or sigmoid, groups, bias, top-k          moe.topk_gating
    experts           stacked SwiGLU experts                           grouped GEMM and moe.*
    attention         the attention function of the config             attention.flash_attn_func

A module keeps its class, parameters and names; only its `forward` changes. So `state_dict`, `save_pretrained` and
`from_pretrained` work before and after. What a module computes is tried on random numbers, not guessed from its name. A
module whose result differs from the known formulas is left alone, and the report says so.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tile_kernels.activation.swiglu_backward import swiglu_backward
from tile_kernels.activation.swiglu_forward import swiglu_forward
from tile_kernels.attention.attend import flash_attn_func, flash_attn_varlen_func
from tile_kernels.core import check
from tile_kernels.core.errors import UnsupportedError
from tile_kernels.modeling.moe import Experts
from tile_kernels.moe.expand_to_fused import expand_to_fused
from tile_kernels.moe.reduce_fused import reduce_fused
from tile_kernels.moe.token_to_expert_map import token_to_expert_map
from tile_kernels.moe.topk_gating import topk_gating
from tile_kernels.norm.norm_forward import norm_forward
from tile_kernels.transform.rotary_embedding import rotary_embedding

#: What `patch` can replace, in the order of the report.
KINDS = ('norm', 'mlp', 'rope', 'router', 'experts', 'attention')

#: The name of our attention function in `transformers`.
ATTENTION = 'tile_kernels'

#: The folder of layers for the `kernels` mapping of `transformers`; see `tile_kernels.integrations.kernels`.
KERNELS = Path(__file__).parent / 'kernels'

#: Up to so many tokens, a step of decoding spreads the keys of a sequence over the GPU.
FEW_QUERIES = 8

_PATCHED = '_tile_kernels_patched'
_HALF = (torch.bfloat16, torch.float16)


@dataclass
class Report:
    """The result of `patch`; prints as a table."""

    replaced: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f'{kind:10} {count} replaced' for kind in KINDS if (count := self.replaced[kind])]
        reasons = Counter(self.skipped.values())
        lines += [f'{"left":10} {count} modules: {reason}' for reason, count in reasons.items()]
        return '\n'.join(lines or ['nothing was replaced'])


def patch(model: nn.Module | type, *, only: Collection[str] | str | None = None) -> Report:
    """Let a `transformers` model compute with our kernels; `unpatch` restores it.

    Args:
        model: a model, or a model class, whose later instances are then patched when they are first called.
        only: names of `KINDS` to replace; all by default.

    Returns:
        What was replaced, and what was not and why.
    """
    _require_transformers()
    wanted = _kinds(only)
    if isinstance(model, type):
        return _patch_class(model, wanted)
    if not isinstance(model, nn.Module):
        check.fail('model', 'must be a module or a model class of transformers', check.describe(model))
    report = Report()
    for name, module in model.named_modules():
        kind, forward, reason = _forward_for(module, wanted)
        if forward is not None and kind is not None:
            setattr(module, 'forward', types.MethodType(forward, module))  # noqa: B010
            setattr(module, _PATCHED, kind)
            report.replaced[kind] += 1
        elif reason:
            report.skipped[name] = reason
    if 'rope' in wanted:
        report.replaced['rope'] += sum(_rope_modules(model, _replace_rope))
    if 'attention' in wanted:
        _patch_attention(model, report)
    return report


def unpatch(model: nn.Module | type) -> None:
    """Undo `patch`."""
    if isinstance(model, type):
        original = model.__dict__.get('_tile_kernels_init')
        if original is not None:
            setattr(model, '__init__', original)  # noqa: B010
            delattr(model, '_tile_kernels_init')
        return
    for module in model.modules():
        if hasattr(module, _PATCHED):
            module.__dict__.pop('forward', None)
            delattr(module, _PATCHED)
    sum(_rope_modules(model, _restore_rope))
    before = model.__dict__.pop('_tile_kernels_attention', None)
    if before is not None:
        getattr(model, 'set_attn_implementation')(before)  # noqa: B009


def _kinds(only: Collection[str] | str | None) -> set[str]:
    names = KINDS if only is None else (only,) if isinstance(only, str) else tuple(only)
    for name in names:
        check.one_of(name, KINDS, 'only')
    return set(names)


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            'integrations.transformers: needs transformers; install open-tile-kernels[transformers]'
        ) from error


def _patch_class(model: type, wanted: set[str]) -> Report:
    """Patch every later instance at the end of its `__init__`."""
    if '_tile_kernels_init' in model.__dict__:
        return Report()
    original: Any = model.__init__  # type: ignore[misc]

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is model:
            self.register_forward_pre_hook(_patch_at_first_call)

    def _patch_at_first_call(module: nn.Module, inputs: Any) -> None:
        if not module.__dict__.get('_tile_kernels_seen'):
            object.__setattr__(module, '_tile_kernels_seen', True)
            patch(module, only=wanted)

    setattr(model, '_tile_kernels_init', original)  # noqa: B010
    setattr(model, '__init__', init)  # noqa: B010
    return Report()


# Modules ------------------------------------------------------------------------------------


def _forward_for(module: nn.Module, wanted: set[str]) -> tuple[str | None, Callable | None, str]:
    """The kind of a module, the function that replaces its `forward`, or the reason why it is left alone."""
    if hasattr(module, _PATCHED):
        return None, None, ''
    for kind, looks_like, choose in (
        ('norm', _looks_like_norm, _norm_forward),
        ('mlp', _looks_like_mlp, _mlp_forward),
        ('router', _looks_like_router, _router_forward),
        ('experts', _looks_like_experts, _experts_forward),
    ):
        if kind in wanted and looks_like(module):
            if any(p.is_meta for p in module.parameters()):
                return kind, None, 'its weights are on the meta device; patch the model after loading them'
            forward, reason = choose(module)
            return kind, forward, reason
    return None, None, ''


def _looks_like_norm(module: nn.Module) -> bool:
    weight = getattr(module, 'weight', None)
    return type(module).__name__.endswith('RMSNorm') and isinstance(weight, Tensor) and weight.dim() == 1


def _norm_forward(module: Any) -> tuple[Callable | None, str]:
    eps = eps_of(module)
    if not isinstance(eps, float):
        return None, 'an RMS norm without variance_epsilon or eps'
    known = (o for o in (0.0, 1.0) if _tried(module, functools.partial(_plain_norm, module, eps, o)))
    offset = next(known, None)
    if offset is None:
        return None, 'its norm is neither x * weight nor x * (1 + weight)'

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight if offset == 0.0 else self.weight.float() + 1.0, eps)

    return forward, ''


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of the last dimension."""
    rows = _dense(x.reshape(-1, x.shape[-1]))
    return norm_forward(rows, weight, eps)[0].view(x.shape)


def eps_of(norm: Any) -> Any:
    """The number that a norm module adds to mean squares, None if it has none."""
    return getattr(norm, 'variance_epsilon', getattr(norm, 'eps', None))


def _plain_norm(module: Any, eps: float, offset: float, x: Tensor) -> Tensor:
    z = x.float()
    return z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps) * (module.weight.float() + offset)


def _looks_like_mlp(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in ('gate_proj', 'up_proj', 'down_proj'))


def _mlp_forward(module: Any) -> tuple[Callable | None, str]:
    linears = (module.gate_proj, module.up_proj, module.down_proj)
    other = next((type(linear).__name__ for linear in linears if type(linear) is not nn.Linear), None)
    if other is not None:
        return None, f'its projections are {other}, not nn.Linear'
    if not _tried(module, lambda x: _plain_mlp(module, x)):
        return None, 'its MLP is not down(silu(gate(x)) * up(x))'

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(_swiglu(x, self.gate_proj, self.up_proj))

    return forward, ''


def _plain_mlp(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(nn.functional.silu(module.gate_proj(x)) * module.up_proj(x))


def _swiglu(x: Tensor, gate: nn.Linear, up: nn.Linear) -> Tensor:
    """Both products side by side in one buffer, then SwiGLU in one launch."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type) or gate.bias is not None:
        hidden = torch.cat((gate(x), up(x)), -1)  # the compiler lets both products write into the joint buffer
        flat = hidden.view(-1, hidden.shape[-1])
        return swiglu_forward.call(flat, dtype=hidden.dtype).view(*x.shape[:-1], gate.out_features)
    rows = x.reshape(-1, x.shape[-1])
    return _GateUp.apply(rows, gate.weight, up.weight).view(*x.shape[:-1], gate.out_features)


class _GateUp(torch.autograd.Function):
    """SwiGLU of two products; it saves their joint buffer only, not the activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """(rows, hidden) and two (width, hidden) to (rows, width)."""
        width = gate.shape[0]
        hidden = x.new_empty(x.shape[0], 2 * width)
        torch.mm(x, gate.T, out=hidden[:, :width])
        torch.mm(x, up.T, out=hidden[:, width:])
        ctx.save_for_backward(x, gate, up, hidden)
        return swiglu_forward.call(hidden, dtype=x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and both weights."""
        x, gate, up, hidden = ctx.saved_tensors
        width = gate.shape[0]
        dhidden = swiglu_backward.call(dy.contiguous(), hidden)[0]
        dgate, dup = dhidden[:, :width], dhidden[:, width:]
        need_x, need_gate, need_up = ctx.needs_input_grad
        dx = torch.addmm(dgate @ gate, dup, up) if need_x else None
        return dx, dgate.T @ x if need_gate else None, dup.T @ x if need_up else None


def _looks_like_experts(module: nn.Module) -> bool:
    gate_up, down = getattr(module, 'gate_up_proj', None), getattr(module, 'down_proj', None)
    return isinstance(gate_up, Tensor) and isinstance(down, Tensor) and gate_up.dim() == 3 and down.dim() == 3


def _experts_forward(module: Any) -> tuple[Callable | None, str]:
    (num_experts, twice, hidden), down = module.gate_up_proj.shape, module.down_proj.shape
    if down != (num_experts, hidden, twice // 2):
        return None, 'its experts are not stacked as (experts, 2 * width, hidden)'
    if any(hasattr(module, f'{name}_bias') for name in ('gate_up_proj', 'down_proj')):
        return None, 'its experts have a bias'
    if module.gate_up_proj.dtype not in _HALF:
        return None, 'its experts are not bfloat16 or float16'
    if hidden % 8 or twice % 16:
        return None, 'the widths of its experts are not multiples of 8'
    if not isinstance(getattr(module, 'act_fn', None), nn.SiLU) and not _is_silu(getattr(module, 'act_fn', None)):
        return None, 'its experts do not use silu'

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens = hidden_states.reshape(-1, hidden).to(self.gate_up_proj.dtype)
        indices = torch.where(top_k_index < num_experts, top_k_index, -1).to(torch.int64)
        routing = token_to_expert_map(indices, num_experts)
        expanded = expand_to_fused(tokens, routing.token_topk_to_pos, routing.pos_to_expert)
        rows = Experts.forward(self, expanded, routing.expert_end)
        y = reduce_fused(rows, top_k_weights.float(), routing.token_topk_to_pos)
        return y.to(hidden_states.dtype).view(hidden_states.shape)

    return forward, ''


def _is_silu(function: Any) -> bool:
    """Whether a function, or a module without parameters, computes silu."""
    if not callable(function) or list(getattr(function, 'parameters', list)()):
        return False
    x = torch.linspace(-3, 3, 7)
    return torch.allclose(function(x), nn.functional.silu(x))


def _looks_like_router(module: nn.Module) -> bool:
    weight = getattr(module, 'weight', None)
    return hasattr(module, 'top_k') and isinstance(weight, Tensor) and weight.dim() == 2


def _router_forward(module: Any) -> tuple[Callable | None, str]:
    """A router that returns logits, weights and indices; its options are found by trying."""
    bias = getattr(module, 'e_score_correction_bias', None)
    groups = getattr(module, 'num_group', getattr(module, 'n_group', None)) or 1
    grouped = dict(num_groups=groups, num_topk_groups=module.topk_group) if groups > 1 else {}
    scale = float(getattr(module, 'routed_scaling_factor', None) or 1.0)
    renormalize = bool(getattr(module, 'norm_topk_prob', True))
    scoring = 'softmax' if bias is None else 'sigmoid'
    options = dict(scoring=scoring, renormalize=renormalize, routed_scaling_factor=scale, **grouped)
    hidden = module.weight.shape[1]
    x = torch.randn(16, hidden, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            found = module(x.to(module.weight))
            logits, weights, indices = copy.deepcopy(module).float().cpu()(x)  # equal logits are rare in float32
            correction = None if bias is None else bias.float().cpu()
            ours, chosen = topk_gating(logits, module.top_k, bias=correction, **options)
        theirs = torch.zeros_like(logits).scatter(1, indices, weights)
        same = torch.allclose(theirs, torch.zeros_like(logits).scatter(1, chosen, ours), atol=1e-5, rtol=1e-5)
    except Exception:
        return None, 'its router takes or returns something else'
    if not same:
        return None, 'its router is neither softmax nor grouped sigmoid top-k'
    in_float = found[0].dtype is torch.float32 and module.weight.dtype is not torch.float32
    out = found[1].dtype

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden_states.reshape(-1, hidden)
        rows, matrix = (rows.float(), self.weight.float()) if in_float else (rows, self.weight)
        logits = nn.functional.linear(rows, matrix)
        correction = None if bias is None else self.e_score_correction_bias.float()
        weights, indices = topk_gating(logits, self.top_k, bias=correction, **options)
        return logits, weights.to(out), indices

    return forward, ''


def _tried(module: Any, formula: Callable[[Tensor], Tensor]) -> bool:
    """Whether a module computes a formula, tried on random rows of its own width."""
    weight = next(module.parameters())
    width = weight.shape[-1]
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        try:
            found, expected = module(x).float(), formula(x).float()
        except Exception:
            return False
    tolerance = 1e-4 if weight.dtype is torch.float32 else 3e-2
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max() + 1e-6))


# Rotary embedding ---------------------------------------------------------------------------

_ROPE_NAMES = {'apply_rotary_pos_emb': False, 'apply_rotary_pos_emb_interleave': True}


def _rope_modules(model: nn.Module, change: Callable[[Any, str, bool], bool]) -> Iterator[bool]:
    """Apply `change` to the rotary functions of every Python module that defines a part of the model."""
    for name in sorted({type(module).__module__ for module in model.modules()}):
        if name.startswith('transformers.models.'):
            for function, interleaved in _ROPE_NAMES.items():
                if hasattr(sys.modules[name], function):
                    yield change(sys.modules[name], function, interleaved)


def _replace_rope(module: Any, name: str, interleaved: bool) -> bool:
    original = getattr(module, name)
    if hasattr(original, '_tile_kernels_original'):
        original._tile_kernels_users += 1
        return True

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        plain = not args and set(kwargs) <= {'unsqueeze_dim'} and kwargs.get('unsqueeze_dim', 1) == 1
        if not plain or q.dim() != 4 or cos.dim() != 3 or q.shape[-1] < cos.shape[-1] or q.dtype is torch.float64:
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate(q, k, cos, sin, interleaved)

    apply._tile_kernels_original, apply._tile_kernels_users = original, 1  # type: ignore[attr-defined]
    setattr(module, name, apply)
    return True


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotary embedding as `transformers` calls it: (batch, tokens, rotary) cosines and sines, two equal halves.

    Like there, interleaved queries and keys come back in halves: a cache then holds the same before and after `patch`.
    """
    batch, length, rotary = cos.shape
    if interleaved:
        q, k = (torch.cat((x[..., 0::2], x[..., 1::2]), -1) for x in (q, k))
    cache = torch.cat((cos[..., : rotary // 2], sin[..., : rotary // 2]), -1).float().view(-1, rotary)
    if batch == 1 and q.shape[0] > 1:
        positions = torch.arange(length, device=q.device).expand(q.shape[0], length).contiguous()
    else:
        positions = torch.arange(batch * length, device=q.device).view(batch, length)
    swap = unsqueeze_dim == 1  # our op takes tokens before heads
    query, key = (_dense(x.transpose(1, 2) if swap else x) for x in (q, k))
    query, key = rotary_embedding(query, cache, key, positions)
    return (query.transpose(1, 2), key.transpose(1, 2)) if swap else (query, key)


def _restore_rope(module: Any, name: str, interleaved: bool) -> bool:
    current = getattr(module, name)
    if not hasattr(current, '_tile_kernels_original'):
        return False
    current._tile_kernels_users -= 1
    if current._tile_kernels_users == 0:
        setattr(module, name, current._tile_kernels_original)
    return True


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# Attention ----------------------------------------------------------------------------------


def _patch_attention(model: Any, report: Report) -> None:
    config = getattr(model, 'config', None)
    if config is None or not hasattr(model, 'set_attn_implementation'):
        report.skipped['attention'] = 'the model has no attention function to choose'
        return
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if dtype not in _HALF:
        report.skipped['attention'] = f'attention needs bfloat16 or float16, the model is {dtype}'
        return
    if getattr(config, 'attention_dropout', 0.0):
        report.skipped['attention'] = 'attention has no dropout, and the config sets attention_dropout'
        return
    register_attention()
    before = config._attn_implementation
    if before == ATTENTION:
        return
    try:
        model.set_attn_implementation(ATTENTION)
    except Exception as error:
        report.skipped['attention'] = f'transformers refused our attention function: {error}'.partition('\n')[0]
        return
    model.__dict__['_tile_kernels_attention'] = before
    layers = getattr(config, 'num_hidden_layers', 1)
    report.replaced['attention'] += int(layers)


def register_attention() -> None:
    """Make `attn_implementation='tile_kernels'` known to `transformers`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attention_forward)
    AttentionMaskInterface.register(ATTENTION, valid_tokens)


def valid_tokens(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of `attention_forward`: which keys are valid, then which queries, (batch, keys + queries) bool.

    It is None if all are valid. The keys of a static cache behind the queries are not valid. Nothing waits for the
    device, except for a look at `attention_mask` outside of compiled code and CUDA graphs.
    """
    start = q_offset - kv_offset
    full = isinstance(start, int) and start + q_length == kv_length
    if attention_mask is not None:
        attention_mask = attention_mask[:, -kv_length:].bool()
        device = attention_mask.device
        if full and not _recording(attention_mask) and bool(attention_mask.all()):
            attention_mask = None
    if full and attention_mask is None:
        return None
    columns = torch.arange(kv_length, device=device)
    keys = (columns < start + q_length).expand(batch_size, kv_length)
    if attention_mask is not None:
        missing = kv_length - attention_mask.shape[1]
        keys = keys & nn.functional.pad(attention_mask, (0, missing), value=True)
    queries = keys[:, torch.arange(q_length, device=device) + start]
    return torch.cat((keys, queries), 1)


def _recording(x: Tensor) -> bool:
    """Whether values must not be looked at: code is compiled, or a CUDA graph is captured."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as `transformers` calls it: heads before tokens, the mask of `valid_tokens` or None.

    Packed sequences are given by `cu_seq_lens_q` and `cu_seq_lens_k`. Without them, a batch of one row whose
    `position_ids` start again is packed too; `torch.compile` does not see this.
    """
    if dropout:
        raise UnsupportedError('integrations.transformers: attention has no dropout; set attention_dropout=0')
    causal = getattr(module, 'is_causal', True) if is_causal is None else is_causal
    q, k, v = (_dense(x.transpose(1, 2)) for x in (query, key, value))
    options: dict[str, Any] = dict(softmax_scale=scaling, causal=causal, softcap=softcap or 0.0, sink=s_aux)
    options['num_splits'] = 0 if q.shape[1] <= FEW_QUERIES else 1
    if sliding_window is not None:
        options['window_size'] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    if cu_seq_lens_q is None and attention_mask is None:
        cu_seq_lens_q = cu_seq_lens_k = _packed(kwargs.get('position_ids'), q, k)
    if cu_seq_lens_q is not None:
        rows: Any = [x.flatten(0, 1) for x in (q, k, v)]
        lengths: Any = (cu_seq_lens_q, cu_seq_lens_k, q.shape[1], k.shape[1])
        out: Any = flash_attn_varlen_func(*rows, *lengths, **options)
        return out.view(*q.shape[:-1], v.shape[-1]), None
    if attention_mask is not None and attention_mask.shape != (q.shape[0], k.shape[1] + q.shape[1]):
        given = check.describe(attention_mask)
        raise UnsupportedError(f'integrations.transformers: a mask must be (batch, tokens), got {given}')
    if attention_mask is None:
        dense: Any = flash_attn_func(q, k, v, **options)
        return dense, None
    return _padded(q, k, v, attention_mask, options), None


def _padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    """Attention of padded sequences: valid tokens move to the front, so that nothing waits for the device."""
    batch, num_queries = q.shape[:2]
    rows, row_ends = _front(mask[:, k.shape[1] :])
    columns, column_ends = _front(mask[:, : k.shape[1]])
    packed: Any = flash_attn_varlen_func(
        q.flatten(0, 1)[rows],
        k.flatten(0, 1)[columns],
        v.flatten(0, 1)[columns],
        row_ends,
        column_ends,
        num_queries,
        k.shape[1],
        **options,
    )
    out = torch.zeros_like(packed).index_copy(0, rows, packed)
    return out.view(batch, num_queries, *out.shape[1:])


def _front(valid: Tensor) -> tuple[Tensor, Tensor]:
    """Indices that move the valid tokens of all sequences to the front, and where the sequences end."""
    order = torch.argsort((~valid).flatten().to(torch.uint8), stable=True)
    ends = torch.zeros(valid.shape[0] + 1, dtype=torch.int32, device=valid.device)
    ends[1:] = valid.sum(1).cumsum(0)
    return order, ends


def _packed(positions: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Where the sequences of a packed row end, if positions start again inside it."""
    one_row = q.shape[0] == 1 and q.shape[1] == k.shape[1] > 1
    if positions is None or not one_row or torch.compiler.is_compiling():
        return None
    version, ends = getattr(positions, '_tile_kernels_ends', (None, None))
    if version != positions._version:  # all layers get the same positions, and the host waits for the first one only
        starts = (positions.flatten().diff() != 1).nonzero().flatten() + 1
        bounds = [starts.new_zeros(1), starts, starts.new_full((1,), q.shape[1])]
        ends = torch.cat(bounds).to(torch.int32) if starts.numel() else None
        positions._tile_kernels_ends = positions._version, ends  # type: ignore[attr-defined]
    return ends
