"""`MLA`: a whole layer of latent attention with the parameters of DeepSeek-V3, and a latent cache for generation.

    q  = q_b_proj(norm(q_a_proj(x)))                        heads of `nope` and rotary channels
    c, r = split(kv_a_proj_with_mqa(x)); c = norm(c)        the latent key and its rotary channels
    k, v = split(kv_b_proj(c))                              heads; r is rotated and joins every head of k
    y  = o_proj(attention(q, k, v))

Training and prefill run in this multi-head form. Decoding runs in latent form: the part of `kv_b_proj` that makes keys
is applied to the queries, the part that makes values to the result. So the cache holds c and r only, 576 numbers of a
token, for all heads. Rotary pairs are channels (2i, 2i + 1), angle position * theta^(-2i / dim).

With `index_topk` every token sees only so many keys. An indexer scores all earlier tokens with small fp8 keys, as
DeepSeek-V3.2 does. Attention to the best runs in latent form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from tile_kernels import attention
from tile_kernels.attention import flash_attn_func, flash_attn_varlen_func, flash_mla_sparse_fwd
from tile_kernels.attention._checks import lengths_int32
from tile_kernels.attention.latent_cache import LatentLayerCache
from tile_kernels.attention.pack_mla_cache import LATENT, ROTARY
from tile_kernels.core import check
from tile_kernels.core.autograd import needs_gradient
from tile_kernels.norm import norm_forward
from tile_kernels.transform import rotary_embedding

EPS = 1e-6
FP8 = torch.float8_e4m3fn
#: New tokens of a call of `fp8_paged_mqa_logits`.
INDEX_TOKENS = 4


class RMSNorm(nn.Module):
    """RMS norm with a weight; one parameter, `weight`."""

    def __init__(self, size: int, **factory: Any) -> None:
        """A norm of `size` channels whose weights are 1."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, **factory))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return norm_forward(x.flatten(0, -2), self.weight, EPS)[0].view(x.shape)


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of the last dimension and one factor for it."""
    wide = x.float()
    factor = wide.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0
    return (wide / factor).clamp(-448.0, 448.0).to(FP8), factor.squeeze(-1)


class Indexer(nn.Module):
    """Scores of earlier tokens, by which every token selects the keys it sees; parameters as in DeepSeek-V3.2.

    The public layer also rotates queries and keys by a Hadamard matrix before they become fp8. That changes no score
    but for rounding and is left out. Selecting has no gradient.
    """

    def __init__(self, hidden_size: int, q_lora_rank: int, heads: int, dim: int, rope: int, **factory: Any) -> None:
        """An indexer of `heads` heads of `dim` channels, the first `rope` of which are rotated."""
        super().__init__()
        self.heads, self.dim, self.rope = heads, dim, rope
        self.wq_b = nn.Linear(q_lora_rank, heads * dim, bias=False, **factory)
        self.wk = nn.Linear(hidden_size, dim, bias=False, **factory)
        self.k_norm = nn.LayerNorm(dim, eps=EPS, **factory)
        self.weights_proj = nn.Linear(hidden_size, heads, bias=False, **factory)

    def forward(self, x: Tensor, compressed: Tensor, angles: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Queries and keys in fp8, both over all tokens, and the weights of heads with all factors of queries."""
        q = self.wq_b(compressed).view(-1, self.heads, self.dim)
        k = self.k_norm(self.wk(x)).view(-1, 1, self.dim)
        q, k = rotary_embedding(q, angles, k)
        codes, factor = to_fp8(q)
        weights = self.weights_proj(x).view(-1, self.heads).float() * factor * (self.heads * self.dim) ** -0.5
        key, key_factor = to_fp8(k.squeeze(1))
        return codes, (key, key_factor), weights


class MLA(nn.Module):
    """Causal latent attention from hidden states to hidden states; parameters have the names of DeepSeek-V3.

    The layer is differentiable and may be compiled; a call with a cache has no gradient.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        q_lora_rank: int | None = 1536,
        kv_lora_rank: int = 512,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        rope_theta: float = 1e4,
        index_topk: int | None = None,
        index_heads: int = 64,
        index_dim: int = 128,
        dtype: torch.dtype | str = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        """A layer with random weights.

        Args:
            hidden_size: extent of hidden states.
            num_heads: heads.
            q_lora_rank: extent between the two projections of queries; None has one projection, `q_proj`.
            kv_lora_rank: extent of the latent key; 512 with a cache.
            qk_nope_head_dim: channels of a head of queries and keys that are not rotated.
            qk_rope_head_dim: channels that are; 64 with a cache.
            v_head_dim: channels of a head of values.
            rope_theta: base of the rotary angles.
            index_topk: keys that a token sees, selected by an indexer; all unless given. Needs `q_lora_rank`.
            index_heads: heads of the indexer.
            index_dim: channels of a head of the indexer: 32, 64 or 128.
            dtype: of the parameters.
            device: where they live.
        """
        super().__init__()
        sizes = dict(hidden_size=hidden_size, num_heads=num_heads, kv_lora_rank=kv_lora_rank)
        sizes |= dict(qk_nope_head_dim=qk_nope_head_dim, qk_rope_head_dim=qk_rope_head_dim, v_head_dim=v_head_dim)
        for name, value in sizes.items():
            check.integer(value, name, least=1)
        for name in ('qk_nope_head_dim', 'qk_rope_head_dim', 'v_head_dim'):
            check.multiple(sizes[name], 8, name)
        check.at_most(qk_nope_head_dim + qk_rope_head_dim, 256, 'qk_nope_head_dim + qk_rope_head_dim')
        check.at_most(v_head_dim, 256, 'v_head_dim')
        self.num_heads, self.kv_lora_rank, self.rope_theta = num_heads, kv_lora_rank, rope_theta
        self.nope, self.rope, self.value = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5
        dtype = check.to_dtype(dtype, 'dtype')
        factory: dict[str, Any] = dict(dtype=dtype, device=device)
        head_dim = qk_nope_head_dim + qk_rope_head_dim
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False, **factory)
        else:
            check.integer(q_lora_rank, 'q_lora_rank', least=1)
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias=False, **factory)
            self.q_a_layernorm = RMSNorm(q_lora_rank, **factory)
            self.q_b_proj = nn.Linear(q_lora_rank, num_heads * head_dim, bias=False, **factory)
        self.q_lora_rank = q_lora_rank
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, kv_lora_rank + qk_rope_head_dim, bias=False, **factory)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, **factory)
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False, **factory)
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=False, **factory)
        self.index_topk = index_topk
        if index_topk is not None:
            check.integer(index_topk, 'index_topk', least=1)
            for name, value in (('index_heads', index_heads), ('index_dim', index_dim)):
                check.integer(value, name, least=1)
            if q_lora_rank is None:
                check.fail('q_lora_rank', 'must be a number with index_topk', 'None')
            check.equal((kv_lora_rank, qk_rope_head_dim), (LATENT, ROTARY), 'kv_lora_rank, qk_rope_head_dim')
            self.indexer = Indexer(hidden_size, q_lora_rank, index_heads, index_dim, qk_rope_head_dim, **factory)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: LatentLayerCache | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: (batch, tokens, hidden_size), or (tokens, hidden_size) with `cu_seqlens`.
            positions: positions of the tokens for the rotary embedding, the shape of x without its last extent; counted
                from the start of the sequence unless given.
            cu_seqlens: (sequences + 1,) int32 or int64: 0, and where every packed sequence ends. With a cache, its
                sequences in their order; some may get no token.
            cache: the part of this layer of a `LatentCache`: new tokens are appended to it and see all of it. The
                first tokens of an empty cache see each other in multi-head form, all later ones in latent form.

        Returns:
            The same shape as x.
        """
        dims = 'batch tokens hidden_size' if cu_seqlens is None else 'tokens hidden_size'
        rows = check.shape(x, 'x', dims, hidden_size=self.o_proj.out_features)[:-1]
        if cache is not None:
            self._check_cache(x)
        angles = self._angles(self._positions(x, positions, rows, cu_seqlens, cache))
        compressed = x if self.q_lora_rank is None else self.q_a_layernorm(self.q_a_proj(x))
        q = (self.q_proj if self.q_lora_rank is None else self.q_b_proj)(compressed)
        q_nope, q_rope = q.unflatten(-1, (self.num_heads, -1)).split((self.nope, self.rope), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((self.kv_lora_rank, self.rope), dim=-1)
        latent = self.kv_a_layernorm(latent.contiguous())
        q_rope, k_rope = rotary_embedding(q_rope.flatten(0, -3), angles, k_rope.reshape(-1, 1, self.rope), None, True)
        q_rope, k_rope = q_rope.view(*rows, self.num_heads, self.rope), k_rope.view(*rows, 1, self.rope)
        selector = None
        if self.index_topk is not None:
            with torch.no_grad():
                selector = self.indexer(x, compressed, angles)
        if cache is None:
            o = self._own_keys(q_nope, q_rope, latent, k_rope, cu_seqlens, selector)
        else:
            is_first = cache.is_empty
            keys = None if selector is None else tuple(part.unflatten(0, rows) for part in selector[1])
            cache.append(torch.cat((latent, k_rope.squeeze(-2)), dim=-1), keys, cu_seqlens)
            if is_first and rows[-1] > 1:
                o = self._own_keys(q_nope, q_rope, latent, k_rope, cu_seqlens, selector)
            else:
                indices = None if selector is None else self._select_cached(selector, rows, cache, cu_seqlens)
                options: dict[str, Any] = dict(softmax_scale=self.scale, indices=indices)
                o = self._absorbed(q_nope, q_rope, lambda q: cache.attend(q, cu_seqlens, **options))
        return self.o_proj(o.flatten(-2))

    def _own_keys(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        cu_seqlens: Tensor | None,
        selector: tuple | None,
    ) -> Tensor:
        """Attention of tokens to each other."""
        if selector is None or self.index_topk is None or q_nope.shape[-3] <= self.index_topk:
            return self._multi_head(q_nope, q_rope, latent, k_rope, cu_seqlens)
        indices = self._select(selector, q_nope.shape[:-2], cu_seqlens)
        kv = torch.cat((latent, k_rope.squeeze(-2)), dim=-1).view(-1, 1, LATENT + ROTARY)

        def attend(q: Tensor) -> Tensor:
            rows = q.view(-1, *q.shape[-2:])
            return flash_mla_sparse_fwd(rows, kv, indices, self.scale)[0].view(*q.shape[:-1], LATENT)

        return self._absorbed(q_nope, q_rope, attend)

    def _select(self, selector: tuple, rows: torch.Size, cu_seqlens: Tensor | None) -> Tensor:
        """The keys that every token sees, (tokens, 1, index_topk): rows of all keys, -1 for none."""
        q, keys, weights = selector
        token = torch.arange(len(q), device=q.device, dtype=torch.int32)
        if cu_seqlens is None:
            start = token // rows[-1] * rows[-1]
        else:
            sequence = torch.searchsorted(cu_seqlens, token.to(cu_seqlens.dtype), right=True) - 1
            start = cu_seqlens[sequence].int()
        topk: Any = self.index_topk
        listed: Any = attention.index_topk(q, keys, weights, start, token + 1, topk)
        return torch.where(listed >= 0, listed + start[:, None], -1)[:, None]

    def _select_cached(
        self, selector: tuple, rows: tuple[int, ...], cache: LatentLayerCache, cu_seqlens: Tensor | None
    ) -> Tensor:
        """The keys that every token sees, (units, tokens, index_topk), counted from the start of its sequence."""
        q, _, weights = selector
        table, _, seen = cache.units(rows[-1], lengths_int32(cu_seqlens, 'cu_seqlens'))
        batch, tokens = seen.shape
        q, weights = q.unflatten(0, (batch, tokens)), weights.unflatten(0, (batch, tokens))
        capacity = cache.cache.capacity
        seen = torch.where(seen <= capacity, seen, 0)  # a sequence that is too long sees nothing
        topk: Any = self.index_topk
        pages: Any = cache.index_pages
        found = []
        for first in range(0, tokens, INDEX_TOKENS):
            own = slice(first, first + INDEX_TOKENS)
            lengths = seen[:, own].contiguous()
            logits = attention.fp8_paged_mqa_logits(
                q[:, own].contiguous(),
                pages,
                weights[:, own].flatten(0, 1).contiguous(),
                lengths,
                table,
                None,
                capacity,
            )
            listed: Any = attention.topk_indices(logits, topk, None, lengths.flatten())
            found.append(listed.view(batch, -1, topk))
        return torch.cat(found, dim=1)

    def _multi_head(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, cu_seqlens: Tensor | None
    ) -> Tensor:
        """Attention in which every head has keys and values of its own."""
        k_nope, v = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1)).split((self.nope, self.value), dim=-1)
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], self.rope)), dim=-1)
        options: dict[str, Any] = dict(softmax_scale=self.scale, causal=True)
        if cu_seqlens is not None:
            return cast('Tensor', flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, **options))
        return cast('Tensor', flash_attn_func(q, k, v, **options))

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Attention over latent keys: projections of keys and values are applied to queries and to the result."""
        weight = self.kv_b_proj.weight.view(self.num_heads, self.nope + self.value, self.kv_lora_rank)
        to_key, to_value = weight.split((self.nope, self.value), dim=1)
        q = torch.cat((torch.einsum('...hd,hdc->...hc', q_nope, to_key), q_rope), dim=-1)
        return torch.einsum('...hc,hdc->...hd', attend(q), to_value)

    def _check_cache(self, x: Tensor) -> None:
        if needs_gradient(x, *self.parameters()):
            check.fail('cache', 'must come without gradients', 'a call that records them', hint='use torch.no_grad')
        check.equal((self.kv_lora_rank, self.rope), (LATENT, ROTARY), 'kv_lora_rank, qk_rope_head_dim with a cache')

    def _positions(
        self,
        x: Tensor,
        positions: Tensor | None,
        rows: tuple[int, ...],
        cu_seqlens: Tensor | None,
        cache: LatentLayerCache | None,
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

    def _angles(self, positions: Tensor) -> Tensor:
        """Cosines and sines of every token."""
        exponent = torch.arange(0, self.rope, 2, device=positions.device, dtype=torch.float32) / self.rope
        angles = positions.reshape(-1, 1).float() * self.rope_theta**-exponent
        return torch.cat((angles.cos(), angles.sin()), dim=1)
