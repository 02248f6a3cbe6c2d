"""Engram layers: the gate with hand-written gradients, the published module around it, and the simple gate.

    value = gate(hidden_states, keys, value)                                 no residual
    hidden_states + value + silu(conv(rms_norm(value)))                      `Engram`

Keys and values are projections of embeddings; the hashes of the last tokens select them (`engram_hash`).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tile_kernels.compat import attach
from tile_kernels.core import check
from tile_kernels.engram import (
    engram_gate_bwd,
    engram_gate_forward,
    engram_gate_fwd,
    fused_weight,
    grad_w_reduce,
    short_conv,
)
from tile_kernels.engram._checks import MAX_STREAMS
from tile_kernels.engram.short_conv import MAX_TAPS
from tile_kernels.modeling._parameters import float32_of


class EngramGateFn(torch.autograd.Function):
    """The Engram gate over any number of leading dimensions; see `engram_gate`."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, *args: Any) -> Tensor:
        """Apply the gate; save the tensors of the gradient only if one is needed."""
        sources, weight_hidden, weight_embed, clamp_value, eps, mask, residual = _by_name(args)
        x, flat, mask = _flatten(hidden_states, sources, mask)
        weight = fused_weight(weight_hidden, weight_embed)
        saving = any(ctx.needs_input_grad)
        y, *saved = engram_gate_fwd(
            x, *flat, weight, eps, clamp_value, save_for_backward=saving, image_token_mask=mask, residual=residual
        )
        if saving:
            ctx.save_for_backward(x, *flat, weight, *saved, *([] if mask is None else [mask]))
            ctx.weights = weight_hidden, weight_embed
            ctx.options = clamp_value, residual, mask is not None
            ctx.shapes = [hidden_states.shape, *(source.shape for source in sources)]
        return y.view(hidden_states.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple:
        """Gradients of all tensors; that of a weight with a `main_grad` is added to it."""
        clamp_value, residual, masked = ctx.options
        tensors = ctx.saved_tensors
        mask = tensors[-1] if masked else None
        forward_tensors = tensors[:-1] if masked else tensors
        dy = grad_out.reshape(forward_tensors[0].shape).contiguous()
        *grads, partial = engram_gate_bwd(dy, *forward_tensors, clamp_value, image_token_mask=mask, residual=residual)
        grads = [grad.view(shape) for grad, shape in zip(grads, ctx.shapes, strict=True)]
        first = len(grads)
        num_rest = len(ctx.needs_input_grad) - first - 2
        weight_grads = (
            _weight_grads(partial, *ctx.weights) if any(ctx.needs_input_grad[first : first + 2]) else (None,) * 2
        )
        return (*grads, *weight_grads, *(None,) * num_rest)


def _by_name(args: tuple) -> tuple:
    """Both forms of the arguments as ((k, v) or (kv,), both weights, clamp_value, eps, image_token_mask, residual)."""
    if len(args) < 5:
        check.fail(
            'hidden_states', 'must come with k and v or kv, two weights, clamp_value and eps', f'{len(args)} more'
        )
    num_sources = 2 if isinstance(args[3], Tensor) else 1
    sources, (weight_hidden, weight_embed, clamp_value, eps, *rest) = args[:num_sources], args[num_sources:]
    mask = rest[0] if rest else None
    return sources, weight_hidden, weight_embed, clamp_value, eps, mask, rest[1] if len(rest) > 1 else True


def _flatten(
    hidden_states: Tensor, sources: tuple[Tensor, ...], mask: Tensor | None
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Flatten the leading dimensions into one dimension of tokens."""
    if hidden_states.dim() < 2:
        check.fail('hidden_states', 'must be (..., num_streams, hidden)', check.describe(hidden_states))
    *lead, num_streams, hidden = hidden_states.shape
    shapes = {'kv': (*lead, (num_streams + 1) * hidden)}
    if len(sources) == 2:
        shapes = {'k': (*lead, num_streams, hidden), 'v': (*lead, hidden)}
    for (name, shape), source in zip(shapes.items(), sources, strict=True):
        if check.tensor(source, name).shape != shape:
            check.fail(name, f'must be {shape}', check.describe(source))
    if len(sources) == 1:
        flat = [sources[0].reshape(-1, num_streams + 1, hidden)]
    else:
        flat = [sources[0].reshape(-1, num_streams, hidden), sources[1].reshape(-1, hidden)]
    if mask is not None:
        mask = check.tensor(mask, 'image_token_mask').reshape(-1)
    return hidden_states.reshape(-1, num_streams, hidden), flat, mask


def _traced_gate(hidden_states: Tensor, args: tuple) -> Tensor:
    """The gate inside a compiled graph: the differentiable operator, which does not support `main_grad`."""
    sources, weight_hidden, weight_embed, clamp_value, eps, mask, residual = _by_name(args)
    x, flat, mask = _flatten(hidden_states, sources, mask)
    weight = weight_hidden.float() * weight_embed.float()
    y, *_ = engram_gate_fwd(x, *flat, weight, eps, clamp_value, image_token_mask=mask, residual=residual)
    return y.view(hidden_states.shape)


def _weight_grads(partial: Tensor, weight_hidden: Tensor, weight_embed: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of both norm weights; None for a gradient that was added to a `main_grad`."""
    weights = weight_hidden, weight_embed
    mains = [getattr(weight, 'main_grad', None) for weight in weights]
    buffers = [
        torch.zeros_like(weight, dtype=torch.float32) if main is None else main
        for weight, main in zip(weights, mains, strict=True)
    ]
    grad_w_reduce(partial, weight_hidden.detach(), weight_embed.detach(), *buffers)
    first, second = (buffer if main is None else None for buffer, main in zip(buffers, mains, strict=True))
    return first, second


def engram_gate(hidden_states: Tensor, *args: Any) -> Tensor:
    """Gate the value of each token into its residual streams, with gradients for all tensors.

    There are two forms, with keys and values separate or packed in one tensor; arguments are positional:

        engram_gate(hidden_states, k, v, weight_hidden, weight_embed, clamp_value, eps,
                    image_token_mask=None, residual=True)
        engram_gate(hidden_states, kv, weight_hidden, weight_embed, clamp_value, eps,
                    image_token_mask=None, residual=True)

    The gradient of a weight that has a `main_grad` is added to it, and its `grad` does not change. This does not apply
    inside `torch.compile`, where gradients are part of the graph.

    Args:
        hidden_states: (..., num_streams, hidden) bfloat16.
        args: the other arguments of either form:
            - k: (..., num_streams, hidden) bfloat16.
            - v: (..., hidden) bfloat16.
            - kv: (..., (num_streams + 1) * hidden) bfloat16, the keys and then the value of each token.
            - weight_hidden: (num_streams, hidden) bfloat16 or float32, norm weight of the hidden states.
            - weight_embed: (num_streams, hidden), norm weight of the keys.
            - clamp_value: lower bound of |z| under the root.
            - eps: added to the mean squares.
            - image_token_mask: (...) bool, tokens that get no value.
            - residual: add hidden_states to the result.

    Returns:
        Like hidden_states.
    """
    check.tensor(hidden_states, 'hidden_states')
    if torch.compiler.is_compiling():
        return _traced_gate(hidden_states, args)
    return EngramGateFn.apply(hidden_states, *args)


class Engram(nn.Module):
    """The published Engram module: gate, short convolution, residual.

    Parameters are float32 (or the dtype that `.to()` sets), activations bfloat16.

    Args:
        hidden_size: channels of a residual stream, a multiple of 64.
        embed_size: channels of the looked-up embeddings of a token.
        num_streams: residual streams, 1 to 8.
        taps: number of tokens that each output of the convolution uses.
        dilation: distance between these tokens.
        eps: added to the mean squares of all norms.
        clamp_value: lower bound of |z| under the root.
    """

    def __init__(
        self,
        hidden_size: int,
        embed_size: int,
        num_streams: int = 4,
        taps: int = 4,
        dilation: int = 3,
        eps: float = 1e-6,
        clamp_value: float = 1e-6,
    ) -> None:
        super().__init__()
        check.integer(hidden_size, 'hidden_size', 1)
        check.multiple(hidden_size, 64, 'hidden_size')
        check.integer(embed_size, 'embed_size', 1)
        check.integer(num_streams, 'num_streams', 1)
        check.at_most(num_streams, MAX_STREAMS, 'num_streams')
        check.integer(taps, 'taps', 1)
        check.at_most(taps, MAX_TAPS, 'taps')
        check.integer(dilation, 'dilation', 1)
        check.at_least(eps, 0, 'eps')
        check.at_least(clamp_value, 0, 'clamp_value')
        self.dilation, self.eps, self.clamp_value = dilation, eps, clamp_value
        self.kv_proj = nn.Linear(embed_size, (num_streams + 1) * hidden_size, bias=False)
        self.weight_hidden = nn.Parameter(torch.ones(num_streams, hidden_size))
        self.weight_embed = nn.Parameter(torch.ones(num_streams, hidden_size))
        self.norm_weight = nn.Parameter(torch.ones(num_streams, hidden_size))
        self.conv_weight = nn.Parameter(torch.zeros(num_streams * hidden_size, taps))  # zeros: adds plain `value`

    def forward(self, hidden_states: Tensor, embeddings: Tensor, image_token_mask: Tensor | None = None) -> Tensor:
        """Add the gated embeddings to the hidden states.

        Args:
            hidden_states: (batch, num_tokens, num_streams, hidden) bfloat16.
            embeddings: (batch, num_tokens, embed_size).
            image_token_mask: (batch, num_tokens) bool, tokens that get no value.

        Returns:
            Like hidden_states.
        """
        check.shape(hidden_states, 'hidden_states', 'batch num_tokens num_streams hidden', dtype=torch.bfloat16)
        kv = functional.linear(embeddings.to(hidden_states.dtype), self.kv_proj.weight.to(hidden_states.dtype))
        weights = self.weight_hidden, self.weight_embed
        if weights[0].dtype is not torch.bfloat16:  # the gate reads bfloat16 directly
            weights = float32_of(weights[0]), float32_of(weights[1])
        value = engram_gate(hidden_states, kv, *weights, self.clamp_value, self.eps, image_token_mask, False)
        norm = functional.rms_norm(value.float(), value.shape[-1:], eps=self.eps) * self.norm_weight
        seen = short_conv(norm.to(value.dtype).flatten(2), self.conv_weight.float(), self.dilation)
        return hidden_states + (value + seen.view(value.shape))


class EngramGateLayer(nn.Module):
    """RMS norm and projection to `num_experts` scores.

    Args:
        hidden_size: channels of a token.
        num_experts: scores of a token.
        gated: multiply by a second projection.
        eps: added to the mean square of a row.
    """

    def __init__(self, hidden_size: int = 2048, num_experts: int = 256, gated: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        check.integer(hidden_size, 'hidden_size', 1)
        check.integer(num_experts, 'num_experts', 1)
        check.at_least(eps, 0, 'eps')
        self.eps = eps
        self.weight = nn.Parameter(torch.randn(num_experts, hidden_size) * hidden_size**-0.5)
        self.gate_weight = nn.Parameter(torch.randn(num_experts, hidden_size) * hidden_size**-0.5) if gated else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Scores of each token, (..., num_experts), for (..., hidden_size)."""
        if check.tensor(hidden, 'hidden').shape[-1:] != self.weight.shape[1:]:
            check.fail('hidden', f'must be (..., {self.weight.shape[1]})', check.describe(hidden))
        weight = self.weight.to(hidden.dtype)
        gate_weight = None if self.gate_weight is None else self.gate_weight.to(hidden.dtype)
        output, _ = engram_gate_forward(hidden.reshape(-1, hidden.shape[-1]), weight, gate_weight, self.eps)
        return output.view(*hidden.shape[:-1], -1)


attach(sys.modules[__name__], 'engram_gate')  # TileKernels has a module of the function's name
