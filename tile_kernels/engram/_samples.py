"""Inputs of the Engram cases."""

import torch

from tile_kernels.core.cases import grid
from tile_kernels.engram._checks import BF16, DTYPES, split_packed


def random_gate(num_tokens: int, hidden: int, num_streams: int = 4, layout: str = 'dense', images: float = 0.0) -> dict:
    """Inputs of a gate.

    k and v are `dense`, `packed` in one tensor, `odd` (rows that allow no wide access), or `far` (large strides).
    """
    x = torch.randn(num_tokens, num_streams, hidden, dtype=BF16)
    k = torch.randn(num_tokens, num_streams, hidden, dtype=BF16)
    v = torch.randn(num_tokens, hidden, dtype=BF16)
    if layout == 'packed':
        k, v = split_packed(torch.cat([k, v[:, None]], dim=1), x)
    if layout == 'odd':
        k, v = (torch.nn.functional.pad(t, (1, 1))[..., 1:-1] for t in (k, v))
    if layout == 'far':
        k = torch.empty_strided(k.shape, (2**23 + 8, hidden, 1), dtype=BF16).copy_(k)
    return dict(
        x=x,
        k=k,
        v=v,
        weight_fused=torch.randn(num_streams, hidden),
        image_token_mask=torch.rand(num_tokens) < images if images else None,
    )


def random_matrix(num_rows: int, num_columns: int, dtype: torch.dtype = torch.float32) -> dict:
    """A matrix with positive scales."""
    return dict(
        matrix=torch.randn(num_rows, num_columns, dtype=dtype),
        row_scale=torch.rand(num_rows) + 0.5,
        col_scale=torch.rand(num_columns) + 0.5,
    )


def gate_arguments(eps: float = 1e-20, clamp_value: float = 1e-6, residual: bool = True, **case) -> dict:
    """Arguments of the gate."""
    return random_gate(**case) | dict(eps=eps, clamp_value=clamp_value, residual=residual)


GATE_SMOKE = (
    grid(num_tokens=[0, 1], hidden=[256])
    + grid(num_tokens=[3], hidden=[64], num_streams=[1])
    + grid(num_tokens=[3], hidden=[576, 2560], num_streams=[3])  # idle threads, with one warp and with several
    + grid(num_tokens=[5], hidden=[512], num_streams=[8], layout=['packed', 'odd'], images=[0.4])
    + grid(num_tokens=[300], hidden=[64], clamp_value=[0.01])  # many rows; the root is not steep
    + grid(num_tokens=[4], hidden=[128], eps=[1e-6], clamp_value=[0.5], images=[0.5], residual=[False])
)


GATE_FULL = grid(num_tokens=[1, 777, 4001], hidden=[576, 2048, 2560, 4096, 7168, 8192], num_streams=[4]) + grid(
    num_tokens=[333], hidden=[64, 1280, 16384, 32768], num_streams=[1, 5, 8], layout=['packed', 'odd'], images=[0.1]
)


GATE_FAR = grid(num_tokens=[257], hidden=[512], num_streams=[3], layout=['far'])  # offsets beyond 2^31


GATE_BENCH = (
    grid(num_tokens=[64, 4096, 16384], hidden=[4096])
    + grid(num_tokens=[4001], hidden=[2048, 2560, 3072, 5120, 6144, 7168, 8192])
    + grid(num_tokens=[64], hidden=[7168])
)


GATE_BOUNDS = dict(rtol=2e-5, atol=1e-4)  # float32 sums of up to 8192 products of size 1, in another order


def gate_bwd_arguments(clamp_value: float = 1e-6, residual: bool = True, **case) -> dict:
    """Arguments of the gradient of the gate."""
    made = random_gate(**case)
    x = made['x']
    return made | dict(
        dy=torch.randn_like(x),
        dot=torch.randn(x.shape[:2]) * 20,
        gate_score=torch.rand(x.shape[:2]),
        rstd_x=torch.rand(x.shape[:2]) + 0.5,
        rstd_k=torch.rand(x.shape[:2]) + 0.5,
        clamp_value=clamp_value,
        residual=residual,
    )


GATE_BWD_SMOKE = (
    grid(num_tokens=[0, 1], hidden=[256])
    + grid(num_tokens=[3], hidden=[64], num_streams=[1])
    + grid(num_tokens=[3], hidden=[576, 2560], num_streams=[3])  # idle threads, one warp and several
    + grid(num_tokens=[5], hidden=[512], num_streams=[8], layout=['packed', 'odd'], images=[0.4])
    + grid(num_tokens=[4], hidden=[128], clamp_value=[0.5], images=[0.5], residual=[False])
    + grid(num_tokens=[3], hidden=[18432], num_streams=[1])  # the weights exceed shared memory
)


GATE_BWD_FULL = grid(num_tokens=[1, 777, 4001], hidden=[576, 2048, 2560, 4096, 7168, 8192], num_streams=[4]) + grid(
    num_tokens=[333], hidden=[64, 1280, 16384, 32768], num_streams=[1, 5, 8], layout=['packed', 'odd'], images=[0.1]
)


GATE_BWD_FAR = grid(num_tokens=[257], hidden=[512], num_streams=[3], layout=['far'])  # offsets beyond 2^31


GATE_BWD_BENCH = (
    grid(num_tokens=[64, 4096, 16384], hidden=[4096])
    + grid(num_tokens=[4001], hidden=[2048, 2560, 3072, 5120, 6144, 7168, 8192])
    + grid(num_tokens=[64], hidden=[7168])
)


GATE_BWD_BOUNDS = dict(rtol=1e-4, atol=1e-4)  # sums of thousands of float32 products, in another order


SINKHORN_SMOKE = grid(num_rows=[0, 1, 37], num_columns=[256]) + grid(
    num_rows=[3], num_columns=[8, 1280, 3080], dtype=DTYPES
)


SINKHORN_FULL = grid(num_rows=[1, 100003], num_columns=[64, 512, 1280, 4096], dtype=DTYPES)


SINKHORN_BENCH = grid(num_rows=[100003], num_columns=[512, 1024, 1280]) + grid(num_rows=[64], num_columns=[512])


SINKHORN_BOUNDS = dict(rtol=1e-5, atol=1e-5)
