"""Twin of latent attention over listed keys."""

import math

import torch
from torch import Tensor

from tile_kernels.reference.attention._common import attend_sequence


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of every token in float64, whose keys are gathered first."""
    tokens, heads, _ = q.shape
    o = q.new_zeros(tokens, heads, 512, dtype=torch.float64)
    top, lse = q.new_full((2, tokens, heads), -math.inf, dtype=torch.float64)
    for t in range(tokens):
        own = indices[t, 0] if topk_length is None else indices[t, 0, : max(int(topk_length[t]), 0)]
        own = own[(own >= 0) & (own < len(kv))].long()
        k = kv[own].double()
        o[t], logs = attend_sequence(q[t, None], k, k[..., :512], sink, scale, -1, -1, 0.0)
        lse[t] = logs[:, 0]
        if len(own):
            top[t] = (q[t].double() @ k[:, 0].T * scale).amax(-1)
    return o.to(q.dtype), top.float(), lse.masked_fill(lse == -math.inf, math.inf).float()
