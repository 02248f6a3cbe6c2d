"""Cases and inputs of several ops."""

import torch

from tile_kernels.core.cases import grid
from tile_kernels.mhc._checks import BF16, STREAMS, num_mixes

#: Cases of ops that go over the rows of streams once.
STREAM_SMOKE = (
    grid(lead=[(0,), (), (2, 3)], hidden=[128], num_streams=[4])  # no token, no leading dimension
    + grid(lead=[(5,)], hidden=[64, 576], num_streams=STREAMS)  # idle threads, tail of a row
    + grid(lead=[(2,)], hidden=[4160], num_streams=[2])  # several blocks for a token
)
STREAM_FULL = grid(lead=[(4001,), (3, 1001)], hidden=[1280, 2560, 7168], num_streams=STREAMS) + grid(
    lead=[(90001,)],
    hidden=[7168],
    num_streams=[4],  # more than 2^31 elements
)
STREAM_BENCH = (
    grid(lead=[(64,), (4096,), (16384,)], hidden=[4096], num_streams=[4])
    + grid(lead=[(8192,)], hidden=[2048, 7168], num_streams=[4])
    + grid(lead=[(4001,)], hidden=[2560], num_streams=[4])
)


def pre_inputs(lead: tuple, hidden: int, num_streams: int) -> dict:
    """Arguments of `pre` and `big_fuse`."""
    width, k = num_mixes(num_streams), num_streams * hidden
    return dict(
        residual=torch.randn(*lead, num_streams, hidden, dtype=BF16),
        fn=torch.randn(width, k) * k**-0.5,
        scale=torch.rand(3) + 0.5,
        base=torch.randn(width) * 0.1,
        post_mult=2.0,
    )
