"""Twins of attention and of its gradient."""

import itertools
import math

import torch
from torch import Tensor

from tile_kernels.reference.attention._common import attend_sequence, gradient_sequence


def _sequences(cu_seqlens: Tensor | None, used: Tensor | None, shape: torch.Size) -> list[tuple[int, int, int]]:
    """Batch index, start and number of tokens of every sequence."""
    if cu_seqlens is None:
        bounds = [(batch, 0, shape[1]) for batch in range(shape[0])]
    else:
        cuts = cu_seqlens.tolist()
        bounds = [(0, start, end - start) for start, end in itertools.pairwise(cuts)]
    if used is not None:
        bounds = [
            (b, start, max(min(n, length), 0)) for (b, start, length), n in zip(bounds, used.tolist(), strict=True)
        ]
    return bounds


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    scale: float = 1.0,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of every sequence in float64; rows that see no key are 0."""
    q4, k4, v4 = (x.unsqueeze(0) if cu_seqlens_q is not None else x for x in (q, k, v))
    nothing = q4[..., :0].double().sum(-1)  # 0, with a gradient
    o = nothing.unsqueeze(-1).repeat(1, 1, 1, v4.shape[3])
    lse = q4.new_full((q4.shape[0], q4.shape[2], q4.shape[1]), -math.inf, dtype=torch.float64) + nothing.sum()
    queries = _sequences(cu_seqlens_q, seqused_q, q4.shape)
    keys = _sequences(cu_seqlens_k, seqused_k, k4.shape)
    for (batch, start, number), (k_batch, k_start, k_number) in zip(queries, keys, strict=True):
        k_rows = slice(k_start, k_start + k_number)
        own = attend_sequence(
            q4[batch, start : start + number],
            k4[k_batch, k_rows],
            v4[k_batch, k_rows],
            sink,
            scale,
            left,
            right,
            softcap,
        )
        o[batch, start : start + number] = own[0]
        lse[batch, :, start : start + number] = own[1]
    if cu_seqlens_q is not None:
        o, lse = o[0], lse[0]
    return o.to(q.dtype), lse.float()


def attend_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    scale: float = 1.0,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of every sequence in float64; dsink has shape (0,) without a sink."""
    packed = cu_seqlens_q is not None
    do4, q4, k4, v4 = (x.unsqueeze(0) if packed else x for x in (do, q, k, v))
    dlse4 = dlse.unsqueeze(0) if packed and dlse is not None else dlse
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q4, k4, v4))
    dsink = torch.zeros(q4.shape[2], dtype=torch.float64, device=q.device)
    queries = _sequences(cu_seqlens_q, seqused_q, q4.shape)
    keys = _sequences(cu_seqlens_k, seqused_k, k4.shape)
    for (batch, start, number), (k_batch, k_start, k_number) in zip(queries, keys, strict=True):
        rows, k_rows = (batch, slice(start, start + number)), (k_batch, slice(k_start, k_start + k_number))
        own_dlse = None if dlse4 is None else dlse4[batch, :, start : start + number]
        own = gradient_sequence(
            do4[rows], own_dlse, q4[rows], k4[k_rows], v4[k_rows], sink, scale, left, right, softcap
        )
        dq[rows], dk[k_rows], dv[k_rows] = own[:3]
        dsink += own[3]
    gradients = [(g[0] if packed else g).to(q.dtype) for g in (dq, dk, dv)]
    last = q.new_empty(0, dtype=torch.float32) if sink is None else dsink.to(sink.dtype)
    return gradients[0], gradients[1], gradients[2], last
