"""Hyper-connections as a module."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tile_kernels.core import check
from tile_kernels.mhc._checks import STREAMS, check_streams
from tile_kernels.modeling._parameters import float32_of
from tile_kernels.modeling.mhc.functional import expand_from_embedding, mhc_head, mhc_pre
from tile_kernels.modeling.mhc.ops.post import mhc_post


class MHCPipeline(nn.Module):
    """Hyper-connections around one layer, and the two ends of a model.

    >>> pipeline = MHCPipeline(num_connections=4, hidden_size=64)
    >>> residual = pipeline.expand(torch.randn(2, 5, 64, dtype=torch.bfloat16))
    >>> residual = pipeline(residual, nn.Identity())
    >>> pipeline.head(residual).shape
    torch.Size([2, 5, 64])

    A new module hardly mixes streams: a layer reads their mean and adds its output to each of them.
    Mixes are computed in float32, also if `.to()` has cast the parameters; streams are bfloat16.

    Args:
        num_connections: number of residual streams n: 2, 4 or 8.
        hidden_size: channels of a stream, a multiple of 64.
        sinkhorn_repeat: number of scalings of the combination; see `sinkhorn_normalize`.
        post_mult_value: the largest weight of a layer's output in a stream.
        eps: added to the mean square, to the sums of the combination and to the weights of the streams.
    """

    def __init__(
        self,
        num_connections: int = 8,
        hidden_size: int = 2048,
        *,
        sinkhorn_repeat: int = 20,
        post_mult_value: float = 2.0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        check.one_of(num_connections, STREAMS, 'num_connections')
        check.integer(hidden_size, 'hidden_size', 1)
        check_streams(num_connections, hidden_size)
        check.integer(sinkhorn_repeat, 'sinkhorn_repeat', 1)
        check.number(post_mult_value, 'post_mult_value')
        check.at_least(eps, 0, 'eps')
        n, k = num_connections, num_connections * hidden_size
        self.num_connections, self.hidden_size = n, hidden_size
        self.sinkhorn_repeat, self.post_mult_value, self.eps = sinkhorn_repeat, post_mult_value, eps
        self.fn = nn.Parameter(torch.randn(n * (2 + n), k) * k**-0.5)
        self.scale = nn.Parameter(torch.full((3,), 0.01))
        mean, close = torch.full((n,), 1 / n).logit(), 8 * torch.eye(n).flatten()
        self.base = nn.Parameter(torch.cat([mean, torch.zeros(n), close]))
        self.norm_weight = nn.Parameter(torch.ones(k))
        self.head_fn = nn.Parameter(torch.randn(n, k) * k**-0.5)
        self.head_scale = nn.Parameter(torch.full((1,), 0.01))
        self.head_base = nn.Parameter(mean.clone())

    def expand(self, x: Tensor) -> Tensor:
        """Residual streams (..., n, hidden) from hidden states (..., hidden), bfloat16."""
        if check.tensor(x, 'x').shape[-1:] != (self.hidden_size,):
            check.fail('x', f'must be (..., {self.hidden_size})', check.describe(x))
        return expand_from_embedding(x.contiguous(), self.num_connections)

    def forward(self, residual: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """The residual streams after `layer`, which maps (..., hidden) to (..., hidden)."""
        layer_input, (post_mix, comb_mix) = mhc_pre(
            residual,
            float32_of(self.fn),
            self.scale.float(),
            self.base.float(),
            norm_weight=float32_of(self.norm_weight),
            norm_eps=self.eps,
            mhc_mult=self.num_connections,
            post_mult_value=self.post_mult_value,
            pre_eps=self.eps,
            sinkhorn_eps=self.eps,
            sinkhorn_repeat=self.sinkhorn_repeat,
        )
        layer_output = check.tensor(layer(layer_input), 'what layer returns')
        return mhc_post(layer_output.contiguous(), residual, post_mix, comb_mix)

    def head(self, residual: Tensor) -> Tensor:
        """Hidden states (..., hidden) from residual streams."""
        return mhc_head(
            residual,
            float32_of(self.head_fn),
            self.head_scale.float(),
            self.head_base.float(),
            norm_eps=self.eps,
            mhc_mult=self.num_connections,
            pre_eps=self.eps,
        )
