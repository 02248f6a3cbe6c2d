"""Short causal convolution in plain PyTorch, sequence by sequence."""

import itertools

import torch
from torch import Tensor


def sequences_of(cu_seqlens: Tensor | None, x: Tensor) -> list[tuple[int, slice]]:
    """Row of the batch and tokens of every sequence."""
    if cu_seqlens is None:
        return [(b, slice(0, x.shape[1])) for b in range(x.shape[0])]
    ends = cu_seqlens.tolist()
    return [(0, slice(first, last)) for first, last in itertools.pairwise(ends)]


def _activate(a: Tensor, activation: str | None) -> Tensor:
    return a if activation is None else torch.nn.functional.silu(a)


def convolve(window: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Tokens of a sequence with the taps - 1 before them, in float32."""
    taps = weight.shape[1]
    tokens = window.shape[0] - taps + 1
    a = torch.zeros(tokens, window.shape[1], device=window.device) if bias is None else bias.float().expand(tokens, -1)
    for j in range(taps):
        a = a + weight[:, j].float() * window[j : j + tokens]
    return _activate(a, activation)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = 'silu',
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """Every sequence behind its state, or behind zeros."""
    past = weight.shape[1] - 1
    y = x[..., :0].sum(-1, keepdim=True).repeat(1, 1, x.shape[2])  # 0, with a gradient
    finals = []
    for n, (b, tokens) in enumerate(sequences_of(cu_seqlens, x)):
        before = x.new_zeros(past, x.shape[2]) if initial_state is None else initial_state[n]
        window = torch.cat([before, x[b, tokens]])
        if window.shape[0] > past:
            y[b, tokens] = convolve(window.float(), weight, bias, activation).to(x.dtype)
        finals.append(window[window.shape[0] - past :])
    if output_final_state and finals:
        return y, torch.stack(finals)
    return y, x.new_empty(0, past, x.shape[2])


def causal_conv1d_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = 'silu',
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of every sequence in float32."""
    taps = weight.shape[1]
    dx = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    dweight = torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
    dbias = torch.zeros(x.shape[2], dtype=torch.float32, device=x.device)
    for n, (b, own) in enumerate(sequences_of(cu_seqlens, x)):
        before = x.new_zeros(taps - 1, x.shape[2]) if initial_state is None else initial_state[n]
        window = torch.cat([before, x[b, own]]).float()
        tokens = window.shape[0] - taps + 1
        if tokens == 0:
            continue
        da = dy[b, own].float()
        if activation is not None:
            a = convolve(window, weight, bias, None)
            s = torch.sigmoid(a)
            da = da * s * (1 + a * (1 - s))
        dwindow = torch.zeros_like(window)
        for j in range(taps):
            dwindow[j : j + tokens] += weight[:, j].float() * da
            dweight[:, j] += (da * window[j : j + tokens]).sum(0)
        dx[b, own] = dwindow[taps - 1 :].to(x.dtype)
        dbias += da.sum(0)
    return dx, dweight.to(weight.dtype), dbias.to(weight.dtype) if bias is not None else weight.new_empty(0)
