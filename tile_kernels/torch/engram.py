"""What the Engram ops mean, in plain PyTorch."""

import torch
from torch import Tensor

from tile_kernels.engram._gate import num_partials_for
from tile_kernels.engram._sinkhorn import sinkhorn_partials

# The gate -------------------------------------------------------------------------------------


def gate(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gate the value of each token into its residual streams; see `tile_kernels.engram.engram_gate_fwd`."""
    xf, kf, vf = x.float(), k.float(), v.float()
    dot = (xf * weight_fused * kf).sum(-1)
    rstd_x = torch.rsqrt(xf.square().mean(-1) + eps)
    rstd_k = torch.rsqrt(kf.square().mean(-1) + eps)
    z = dot * rstd_x * rstd_k * x.shape[-1] ** -0.5
    root = z.abs().clamp_min(clamp_value).sqrt()
    score = torch.sigmoid(torch.where(z < 0, -root, root))
    taken = score.unsqueeze(-1) * vf.unsqueeze(1)
    if image_token_mask is not None:
        text = ~image_token_mask.unsqueeze(1)
        dot, score, rstd_x, rstd_k = (t.where(text, 0.0) for t in (dot, score, rstd_x, rstd_k))
        taken = taken.where(text.unsqueeze(-1), -0.0)  # adding -0 changes nothing
    y = xf + taken if residual else taken + 0.0
    return y.to(x.dtype), dot, score, rstd_x, rstd_k


def gate_inference(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> Tensor:
    """The first result of `gate`."""
    return gate(x, k, v, weight_fused, eps, clamp_value, image_token_mask, residual)[0]


def gate_(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> None:
    """`gate_inference` in place."""
    x.copy_(gate_inference(x, k, v, weight_fused, eps, clamp_value, image_token_mask, residual))


def gate_bwd_partial(
    dy: Tensor,
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `gate` from what it saved, that of the weights as sums over every num_partials-th token."""
    num_tokens, num_streams, hidden = x.shape
    dyf, xf, kf, vf = dy.float(), x.float(), k.float(), v.float()
    s = rstd_x * rstd_k * hidden**-0.5
    dgate = (dyf * vf.unsqueeze(1)).sum(-1)
    slope = dgate * gate_score * (1 - gate_score) * 0.5 * (s / dot.abs()).sqrt()
    slope = slope.where(dot.abs() * s >= clamp_value, 0.0)
    dx = slope.unsqueeze(-1) * (kf * weight_fused - xf * (dot * rstd_x**2 / hidden).unsqueeze(-1))
    dk = slope.unsqueeze(-1) * (xf * weight_fused - kf * (dot * rstd_k**2 / hidden).unsqueeze(-1))
    dv = (gate_score.unsqueeze(-1) * dyf).sum(1)
    dweight = slope.unsqueeze(-1) * xf * kf
    if image_token_mask is not None:
        text = ~image_token_mask[:, None, None]
        dx, dk, dweight, dv = (
            dx.where(text, 0.0),
            dk.where(text, 0.0),
            dweight.where(text, 0.0),
            dv.where(text[:, 0], 0.0),
        )
    dx = dx + dyf if residual else dx
    num_partials = num_partials_for(num_tokens, num_streams, hidden)
    partial = dweight.new_zeros(num_partials, num_streams, hidden)
    partial.index_add_(0, torch.arange(num_tokens, device=x.device) % num_partials, dweight)
    return dx.to(x.dtype), dk.to(x.dtype), dv.to(x.dtype), partial


def packed_gate_bwd_partial(
    dy: Tensor,
    x: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gate_bwd_partial` with keys and values in one tensor."""
    k, v = kv[:, :-1], kv[:, -1]
    saved = (dot, gate_score, rstd_x, rstd_k)
    dx, dk, dv, partial = gate_bwd_partial(dy, x, k, v, weight_fused, *saved, clamp_value, image_token_mask, residual)
    return dx, torch.cat([dk, dv.unsqueeze(1)], dim=1), partial


def gate_bwd(
    dy: Tensor,
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `gate`."""
    saved = (dot, gate_score, rstd_x, rstd_k)
    dx, dk, dv, partial = gate_bwd_partial(dy, x, k, v, weight_fused, *saved, clamp_value, image_token_mask, residual)
    return dx, dk, dv, partial.sum(0)


def grad_w_reduce(
    grad_w_partial: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    grad_weight_hidden: Tensor,
    grad_weight_embed: Tensor,
) -> None:
    """Add the gradients of both norm weights to the given buffers."""
    total = grad_w_partial.sum(0)
    grad_weight_hidden.copy_(grad_weight_hidden + total * weight_embed.float())
    grad_weight_embed.copy_(grad_weight_embed + total * weight_hidden.float())


def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    """The product of both norm weights in float32."""
    return weight_hidden.float() * weight_embed.float()


# Hash -----------------------------------------------------------------------------------------


def engram_hash(
    ngram_token_ids: Tensor,
    multipliers: Tensor,
    vocab_sizes: Tensor,
    offsets: Tensor,
    image_token_mask: Tensor | None = None,
) -> Tensor:
    """Rows of the embedding tables for the n-grams that end at each token."""
    products = ngram_token_ids.long().unsqueeze(0) * multipliers.unsqueeze(1)  # (layers, tokens, ngram), wrapping
    mix = products[:, :, 0]
    columns = []
    for i in range(1, ngram_token_ids.shape[1]):
        mix = mix ^ products[:, :, i]
        columns.append(mix.unsqueeze(-1) % vocab_sizes[:, i - 1].long().unsqueeze(1))
    found = torch.cat(columns, dim=-1) + offsets.long().unsqueeze(1)
    if image_token_mask is not None:
        found = found.masked_fill(image_token_mask[None, :, None], -1)
    return found.int()


# The optimiser --------------------------------------------------------------------------------


def _fma(a: Tensor | float, b: Tensor | float, c: Tensor) -> Tensor:
    """Multiply and add, rounded once: float64 holds the product of two float32 numbers exactly."""
    return (torch.as_tensor(a, device=c.device).double() * torch.as_tensor(b, device=c.device).double() + c).float()


def engram_sinkhorn_momentum_update(
    grad: Tensor, momentum_buffer: Tensor, beta1: float, nesterov: bool = True
) -> Tensor:
    """Move the momentum towards the gradient, in place; the update in float32."""
    g, m = grad.float(), momentum_buffer.float()
    keep, take = torch.tensor(beta1, device=g.device), torch.tensor(1 - beta1, device=g.device)
    m = _fma(m, keep, take * g)
    momentum_buffer.copy_(m)
    return _fma(g, take, keep * m) if nesterov else m


def engram_sinkhorn_step(matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalise the rows of the scaled matrix; sums over every num_partials-th row of the squares of what results."""
    num_rows, num_columns = matrix.shape
    x = row_scale.unsqueeze(1) * matrix.float() * col_scale
    norm = x.square().sum(1).sqrt()
    inverse = 1.0 / (norm + eps)
    num_partials = sinkhorn_partials(num_rows)
    partial = x.new_zeros(num_partials, num_columns)
    squares = (x * inverse.unsqueeze(1)).square()
    partial.index_add_(0, torch.arange(num_rows, device=x.device) % num_partials, squares)
    row_scale.copy_(row_scale * inverse)
    return norm, partial


def engram_sinkhorn_step_reduce(col_sumsq_partial: Tensor, col_sumsq: Tensor) -> None:
    """Add up the partial sums of a step."""
    col_sumsq.copy_(col_sumsq_partial.sum(0))


def sinkhorn_finalize(matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float) -> Tensor:
    """The scaled matrix, each row brought to length alpha."""
    x = row_scale.unsqueeze(1) * matrix.float() * col_scale
    return (x * (alpha / (x.square().sum(1, keepdim=True).sqrt() + eps))).to(matrix.dtype)


def sinkhorn_finalize_(
    out: Tensor, matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float
) -> None:
    """`sinkhorn_finalize` into memory of the caller."""
    x = row_scale.unsqueeze(1) * matrix.float() * col_scale
    out.copy_(x * (alpha / (x.square().sum(1, keepdim=True).sqrt() + eps)))


# The convolution ------------------------------------------------------------------------------


def _taps(x: Tensor, taps: int, dilation: int) -> list[Tensor]:
    """What each tap meets: x moved back in time, zeros before the start."""
    padded = torch.nn.functional.pad(x.float(), (0, 0, (taps - 1) * dilation, 0))
    return [padded[:, j * dilation : j * dilation + x.shape[1]] for j in range(taps)]


def short_conv(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """Causal convolution of each channel with its own taps, then SiLU."""
    met = _taps(x, weight.shape[1], dilation)
    a = sum(weight[:, j] * met[j] for j in range(weight.shape[1]))
    return torch.nn.functional.silu(a).to(x.dtype)


def short_conv_bwd(dy: Tensor, x: Tensor, weight: Tensor, dilation: int = 1) -> tuple[Tensor, Tensor]:
    """Gradients of `short_conv`."""
    num_tokens, taps = x.shape[1], weight.shape[1]
    met = _taps(x, taps, dilation)
    a = sum(weight[:, j] * met[j] for j in range(taps))
    s = torch.sigmoid(a)
    da = dy.float() * s * (1 + a * (1 - s))
    later = torch.nn.functional.pad(da, (0, 0, 0, (taps - 1) * dilation))
    back = [(taps - 1 - j) * dilation for j in range(taps)]
    dx = sum(weight[:, j] * later[:, back[j] : back[j] + num_tokens] for j in range(taps))
    return dx.to(x.dtype), torch.stack([(da * met[j]).sum((0, 1)) for j in range(taps)], dim=1)
