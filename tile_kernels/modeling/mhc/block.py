"""Parallel paths with learned mixes: a module of `sinkhorn_normalize` and `mhc_mix_apply`.

mix           = sinkhorn(logits)                                 (num_paths, num_paths), doubly stochastic
streams[p, h] = x[h] sum_c mix[p, c] gain[c, h]
out[h]        = sum_p softmax(merge)[p] blocks[p](streams[p])[h]
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tile_kernels.core import check
from tile_kernels.mhc import mhc_mix_apply, sinkhorn_normalize
from tile_kernels.mhc._checks import STREAMS, check_streams
from tile_kernels.modeling._parameters import float32_of


def _check_sizes(hidden_dim: int, num_paths: int) -> None:
    check.one_of(num_paths, STREAMS, 'num_paths')
    check.integer(hidden_dim, 'hidden_dim', 1)
    check_streams(num_paths, hidden_dim)


class SinkhornNormalizer(nn.Module):
    """`sinkhorn_normalize` as a module: square matrices become doubly stochastic.

    Args:
        num_iters: number of scalings of columns.
        eps: added to every sum.
    """

    def __init__(self, num_iters: int = 20, eps: float = 1e-6) -> None:
        super().__init__()
        check.integer(num_iters, 'num_iters', 1)
        check.at_least(eps, 0, 'eps')
        self.num_iters, self.eps = num_iters, eps

    def forward(self, conn_weights: Tensor) -> Tensor:
        """Logits (..., num_rows, num_columns) of any float dtype to float32 weights of the same shape."""
        return sinkhorn_normalize(
            check.tensor(conn_weights, 'conn_weights').float().contiguous(), self.num_iters, self.eps
        )


class MixSplit(nn.Module):
    """Mixed streams of hidden states: scaled copies of x, mixed by a matrix.

    Copy c is x times the learned `gain[c]`. A mix of such copies is x times the mixed gains, so no copy is stored.
    New gains are close to 1.

    Args:
        hidden_dim: channels of x, a multiple of 64.
        num_paths: number of streams: 2, 4 or 8.
    """

    def __init__(self, hidden_dim: int, num_paths: int) -> None:
        super().__init__()
        _check_sizes(hidden_dim, num_paths)
        self.hidden_dim, self.num_paths = hidden_dim, num_paths
        self.gain = nn.Parameter(1 + 0.02 * torch.randn(num_paths, hidden_dim))

    def forward(self, x: Tensor, mix: Tensor) -> Tensor:
        """Streams (..., num_paths, hidden_dim) of x (..., hidden_dim) bfloat16; mix is (num_paths, num_paths) float32.

        The factors of a stream are summed in float32; a product is rounded once.
        """
        if check.tensor(x, 'x').shape[-1:] != (self.hidden_dim,):
            check.fail('x', f'must be (..., {self.hidden_dim})', check.describe(x))
        check.dtype(x, 'x', torch.bfloat16)
        known = {'num_paths': self.num_paths, 'num_copies': self.num_paths}
        check.shape(mix, 'mix', 'num_paths num_copies', dtype=torch.float32, **known)
        with torch.autocast(x.device.type, enabled=False):  # dtypes are explicit here
            factors = mix @ float32_of(self.gain)
        return (x.unsqueeze(-2) * factors).to(x.dtype)


class MixApply(nn.Module):
    """The weighted sum of streams by `mhc_mix_apply`; the weights are a softmax of `logits` and equal at first.

    Args:
        hidden_dim: channels of a stream, a multiple of 64.
        num_paths: number of streams: 2, 4 or 8.
    """

    def __init__(self, hidden_dim: int, num_paths: int) -> None:
        super().__init__()
        _check_sizes(hidden_dim, num_paths)
        self.hidden_dim, self.num_paths = hidden_dim, num_paths
        self.logits = nn.Parameter(torch.zeros(num_paths))

    def forward(self, streams: Tensor) -> Tensor:
        """Hidden states (..., hidden_dim) of streams (..., num_paths, hidden_dim), bfloat16."""
        if check.tensor(streams, 'streams').shape[-2:] != (self.num_paths, self.hidden_dim):
            check.fail('streams', f'must be (..., {self.num_paths}, {self.hidden_dim})', check.describe(streams))
        weights = float32_of(self.logits).softmax(0).unsqueeze(-1)
        return mhc_mix_apply(streams.contiguous(), weights.expand(*streams.shape[:-1], 1).contiguous())


class MHCBlock(nn.Module):
    """Parallel paths between a doubly stochastic split and a weighted merge.

    >>> block = MHCBlock(hidden_dim=64, num_paths=4)
    >>> block(torch.randn(2, 5, 64, dtype=torch.bfloat16)).shape
    torch.Size([2, 5, 64])

    A new module hardly mixes, and without blocks it returns x nearly unchanged. Mixes are computed in float32, also if
    `.to()` has cast the parameters; streams are bfloat16.

    Args:
        hidden_dim: channels of x, a multiple of 64.
        num_paths: number of paths: 2, 4 or 8.
        blocks: one module for each path, which maps (..., hidden_dim) to the same shape; None for identities.
    """

    def __init__(self, hidden_dim: int, num_paths: int, blocks: Iterable[nn.Module] | None = None) -> None:
        super().__init__()
        self.split, self.merge = MixSplit(hidden_dim, num_paths), MixApply(hidden_dim, num_paths)
        self.normalizer = SinkhornNormalizer()
        self.logits = nn.Parameter(4 * torch.eye(num_paths))
        paths = [nn.Identity() for _ in range(num_paths)] if blocks is None else list(blocks)
        if len(paths) != num_paths or not all(isinstance(path, nn.Module) for path in paths):
            check.fail('blocks', f'must be {num_paths} modules, one for each path', repr(blocks))
        self.blocks = nn.ModuleList(paths)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (..., hidden_dim), bfloat16, to the same shape; differentiable."""
        streams = self.split(x, self.normalizer(self.logits))
        outputs = [check.tensor(path(streams[..., p, :]), 'what a block returns') for p, path in enumerate(self.blocks)]
        for output in outputs:
            if output.shape != x.shape or output.dtype is not x.dtype:
                check.fail('what a block returns', f'must be {check.describe(x)}', check.describe(output))
        return self.merge(torch.stack(outputs, dim=-2))
