"""One step of the short causal convolution in plain PyTorch."""

import torch
from torch import Tensor

from tile_kernels.reference.linear_attention.causal_conv1d import convolve


def causal_conv1d_update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state_indices: Tensor | None = None,
    activation: str | None = 'silu',
) -> Tensor:
    """One token of every row; the states move on in place."""
    y = torch.zeros_like(x)
    indices = range(x.shape[0]) if state_indices is None else state_indices.tolist()
    for row, index in enumerate(indices):
        if 0 <= index < state.shape[0]:
            window = torch.cat([state[index], x[row : row + 1]])
            y[row] = convolve(window.float(), weight, bias, activation)[0].to(x.dtype)
            state[index] = window[1:]
    return y
