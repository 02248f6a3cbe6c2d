"""`NSA`: a whole layer of native sparse attention with rotary embedding and grouped heads.

    q_proj, k_proj, v_proj -> rotary embedding -> parallel_nsa with gates sigmoid(g_proj) -> o_proj

Every head of a token has three gates, in this order: attention to means of blocks, to selected blocks, to the window.
Rotary angles are those of Llama: pairs (i, dim / 2 + i), angle position * theta^(-2i / dim).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tile_kernels.attention import parallel_nsa
from tile_kernels.attention.nsa_attend import MAX_GROUP, SIZES
from tile_kernels.core import check
from tile_kernels.transform import rotary_embedding


class NSA(nn.Module):
    """Native sparse attention from hidden states to hidden states, causal; parameters have the names of fla's layer.

    The layer is differentiable and may be compiled.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int = 128,
        *,
        block_size: int = 64,
        block_counts: int = 16,
        window: int = 512,
        rope_theta: float = 1e4,
        dtype: torch.dtype | str = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        """A layer with random weights.

        Args:
            hidden_size: extent of hidden states.
            num_heads: query heads, up to 64 for each kv head.
            num_kv_heads: heads of keys and values.
            head_dim: extent of a head, a multiple of 8 up to 256.
            block_size: keys of a block: 16, 32, 64 or 128.
            block_counts: blocks that a token selects.
            window: keys that a token sees in the window, itself included; 0 leaves the window out.
            rope_theta: base of the rotary angles.
            dtype: of the parameters.
            device: where they live.
        """
        super().__init__()
        sizes = (('hidden_size', hidden_size), ('num_heads', num_heads), ('num_kv_heads', num_kv_heads))
        for name, value in (*sizes, ('head_dim', head_dim), ('block_counts', block_counts)):
            check.integer(value, name, least=1)
        check.integer(window, 'window', least=0)
        check.multiple(num_heads, num_kv_heads, 'num_heads')
        check.at_most(num_heads // num_kv_heads, MAX_GROUP, 'query heads of a kv head')
        check.multiple(head_dim, 8, 'head_dim')
        check.at_most(head_dim, 256, 'head_dim')
        check.one_of(block_size, SIZES, 'block_size')
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.block_size, self.block_counts, self.window = block_size, block_counts, window
        self.rope_theta = rope_theta
        dtype = check.to_dtype(dtype, 'dtype')
        factory: dict[str, Any] = dict(bias=False, dtype=dtype, device=device)
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, **factory)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, **factory)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, **factory)
        self.g_proj = nn.Linear(hidden_size, num_heads * 3, **factory)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, **factory)

    def forward(self, x: Tensor, *, positions: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: (batch, tokens, hidden_size), or (tokens, hidden_size) with `cu_seqlens`.
            positions: positions of the tokens for the rotary embedding, the shape of x without its last extent; counted
                from the start of the sequence unless given.
            cu_seqlens: (sequences + 1,) int32 or int64: 0, and where every packed sequence ends.

        Returns:
            The same shape as x.
        """
        dims = 'batch tokens hidden_size' if cu_seqlens is None else 'tokens hidden_size'
        rows = check.shape(x, 'x', dims, hidden_size=self.q_proj.in_features)[:-1]
        if positions is None:
            positions = torch.arange(rows[-1], device=x.device)
            if cu_seqlens is not None:
                sequence = torch.searchsorted(cu_seqlens, positions.to(cu_seqlens.dtype), right=True) - 1
                positions = positions - cu_seqlens[sequence]
            positions = positions.expand(rows)
        elif tuple(check.tensor(positions, 'positions').shape) != tuple(rows):
            check.fail('positions', 'must have the shape of x without its last extent', check.describe(positions))
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        gates = self.g_proj(x).unflatten(-1, (self.num_heads, 3)).sigmoid()
        q, k = self._rotate(q, k, positions)
        if cu_seqlens is not None:
            q, k, v, gates = (t[None] for t in (q, k, v, gates))
        g_cmp, g_slc, g_swa = gates.unbind(-1)
        o = parallel_nsa(
            q,
            k,
            v,
            g_cmp,
            g_slc,
            g_swa,
            block_counts=self.block_counts,
            block_size=self.block_size,
            window_size=self.window,
            cu_seqlens=cu_seqlens,
        )
        return self.o_proj((o if cu_seqlens is None else o[0]).flatten(-2))

    def _rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated: every token has its own row of angles."""
        exponent = torch.arange(0, self.head_dim, 2, device=q.device, dtype=torch.float32) / self.head_dim
        angles = positions.reshape(-1, 1).float() * self.rope_theta**-exponent
        table = torch.cat((angles.cos(), angles.sin()), dim=1)
        q2, k2 = rotary_embedding(q.flatten(0, -3), table, k.flatten(0, -3))
        return q2.view_as(q), k2.view_as(k)
