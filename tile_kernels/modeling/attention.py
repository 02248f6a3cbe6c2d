"""`Attention`: a whole causal attention layer with rotary embedding, grouped heads and a cache for generation.

    q_proj, k_proj, v_proj -> rotary embedding -> attention -> o_proj

Rotary angles are those of Llama: pairs (i, dim / 2 + i), angle position * theta^(-2i / dim).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from tile_kernels.attention import flash_attn_func, flash_attn_varlen_func
from tile_kernels.attention.kv_cache import LayerCache
from tile_kernels.core import check
from tile_kernels.core.autograd import needs_gradient
from tile_kernels.transform import rotary_embedding


class Attention(nn.Module):
    """Causal attention from hidden states to hidden states; parameters have Llama's names.

    The layer is differentiable and may be compiled; a call with a cache has no gradient.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rope_theta: float = 1e4,
        window: int | None = None,
        softcap: float = 0.0,
        sink: bool = False,
        bias: bool = False,
        dtype: torch.dtype | str = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        """A layer with random weights.

        Args:
            hidden_size: extent of hidden states.
            num_heads: query heads.
            num_kv_heads: heads of keys and values, as many as query heads unless given.
            head_dim: extent of a head, hidden_size // num_heads unless given; a multiple of 8 up to 256.
            rope_theta: base of the rotary angles.
            window: keys that a token sees, itself included; all before it unless given.
            softcap: bound of the scores, 0 for none.
            sink: whether every head has a learned logit in its denominator, the parameter `sinks`.
            bias: whether projections of queries, keys and values have a bias.
            dtype: of the parameters.
            device: where they live.
        """
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, value in (('hidden_size', hidden_size), ('num_heads', num_heads), ('num_kv_heads', num_kv_heads)):
            check.integer(value, name, least=1)
        check.multiple(num_heads, num_kv_heads, 'num_heads')
        if head_dim is None:
            check.multiple(hidden_size, num_heads, 'hidden_size')
            head_dim = hidden_size // num_heads
        check.multiple(head_dim, 8, 'head_dim')
        check.at_most(head_dim, 256, 'head_dim')
        if window is not None:
            check.integer(window, 'window', least=1)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.rope_theta, self.window, self.softcap = rope_theta, window, softcap
        dtype = check.to_dtype(dtype, 'dtype')
        factory: dict[str, Any] = dict(dtype=dtype, device=device)
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias, **factory)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias, **factory)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias, **factory)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False, **factory)
        self.sinks = nn.Parameter(torch.zeros(num_heads, **factory)) if sink else None

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: (batch, tokens, hidden_size), or (tokens, hidden_size) with `cu_seqlens`.
            positions: positions of the tokens for the rotary embedding, the shape of x without its last extent; counted
                from the start of the sequence unless given.
            cu_seqlens: (sequences + 1,) int32 or int64: 0, and where every packed sequence ends. With a cache, its
                sequences in their order; some may get no token.
            cache: the part of this layer of a `KVCache`: new tokens are appended to it and see all of it.

        Returns:
            The same shape as x.
        """
        dims = 'batch tokens hidden_size' if cu_seqlens is None else 'tokens hidden_size'
        rows = check.shape(x, 'x', dims, hidden_size=self.q_proj.in_features)[:-1]
        if cache is not None and needs_gradient(x, *self.parameters()):
            check.fail('cache', 'must come without gradients', 'a call that records them', hint='use torch.no_grad')
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        q, k = self._rotate(q, k, self._positions(x, positions, rows, cu_seqlens, cache))
        window = (-1 if self.window is None else self.window - 1, 0)
        options: dict[str, Any] = dict(window_size=window, softcap=self.softcap, sink=self.sinks)
        if cache is not None:
            cache.append(k, v, cu_seqlens)
            o = cache.attend(q, cu_seqlens, **options)
        elif cu_seqlens is not None:
            o = cast('Tensor', flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, causal=True, **options))
        else:
            o = cast('Tensor', flash_attn_func(q, k, v, causal=True, **options))
        return self.o_proj(o.flatten(-2))

    def _positions(
        self,
        x: Tensor,
        positions: Tensor | None,
        rows: tuple[int, ...],
        cu_seqlens: Tensor | None,
        cache: LayerCache | None,
    ) -> Tensor:
        if positions is not None:
            if tuple(check.tensor(positions, 'positions').shape) != tuple(rows):
                check.fail('positions', 'must have the shape of x without its last extent', check.describe(positions))
            return positions
        counted = torch.arange(rows[-1], device=x.device)
        if cu_seqlens is not None:
            sequence = torch.searchsorted(cu_seqlens, counted.to(cu_seqlens.dtype), right=True) - 1
            own = counted - cu_seqlens[sequence]
            if cache is not None:
                own = own + cache.lengths[sequence.clamp(max=cache.lengths.shape[0] - 1)]
            return own
        if cache is not None:
            return counted + cache.lengths[:, None]
        return counted.expand(rows)

    def _rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated: every token has its own row of angles."""
        exponent = torch.arange(0, self.head_dim, 2, device=q.device, dtype=torch.float32) / self.head_dim
        angles = positions.reshape(-1, 1).float() * self.rope_theta**-exponent
        table = torch.cat((angles.cos(), angles.sin()), dim=1)
        q2, k2 = rotary_embedding(q.flatten(0, -3), table, k.flatten(0, -3))
        return q2.view_as(q), k2.view_as(k)
