"""Twin of the weights of listed keys."""

import torch
from torch import Tensor


def sparse_mla_weights(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    topk_length: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """The formula in float64, entry by entry."""
    listed = indices[:, 0].long()
    none = (listed < 0) | (listed >= len(kv))
    if topk_length is not None:
        none |= torch.arange(listed.shape[1], device=q.device) >= topk_length[:, None]
    if q.numel() == 0 or len(kv) == 0:
        return torch.zeros(listed.shape, device=q.device)
    keys = kv[listed.masked_fill(none, 0), 0].double()
    below = lse.double() if sink is None else torch.logaddexp(lse.double(), sink.double().expand_as(lse))
    weights = (torch.einsum('ihc,inc->ihn', q.double(), keys) * scale - below.unsqueeze(-1)).exp()
    return weights.sum(1).masked_fill(none, 0.0).float()
