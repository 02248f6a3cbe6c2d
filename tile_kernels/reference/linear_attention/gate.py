"""Gates of the delta rule in float32."""

import torch
from torch import Tensor


def gate(g: Tensor, a_log: Tensor, dt_bias: Tensor | None = None, lower_bound: float = 0.0) -> Tensor:
    """Logarithms of decays."""
    rate = a_log.exp()[:, None] if g.dim() == 4 else a_log.exp()
    x = g.float() + (0.0 if dt_bias is None else dt_bias.view(g.shape[2:]))
    return lower_bound * torch.sigmoid(rate * x) if lower_bound < 0 else -rate * torch.nn.functional.softplus(x)


def gate_bwd(
    dy: Tensor, g: Tensor, a_log: Tensor, dt_bias: Tensor | None = None, lower_bound: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients; sums over all tokens in float32."""
    rate = a_log.exp()[:, None] if g.dim() == 4 else a_log.exp()
    x = g.float() + (0.0 if dt_bias is None else dt_bias.view(g.shape[2:]))
    if lower_bound < 0:
        s = torch.sigmoid(rate * x)
        dg = dy * lower_bound * rate * s * (1 - s)
        da = dg * x
    else:
        dg = -dy * rate * torch.sigmoid(x)
        da = -dy * rate * torch.nn.functional.softplus(x)
    da_log = da.sum((0, 1)).flatten(1).sum(1) if g.dim() == 4 else da.sum((0, 1))
    ddt_bias = dg.sum((0, 1)).flatten() if dt_bias is not None else a_log.new_empty(0)
    return dg.to(g.dtype), da_log, ddt_bias
