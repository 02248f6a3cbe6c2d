"""The Sinkhorn steps together: after a few of them rows and columns of the update have equal lengths."""

import pytest
import torch

from tile_kernels import ArgumentError, knobs
from tile_kernels.engram import (
    engram_sinkhorn_finalize,
    engram_sinkhorn_momentum_update,
    engram_sinkhorn_step,
    engram_sinkhorn_step_reduce,
)


@pytest.mark.parametrize('interpret', [False, True], ids=['twin', 'kernel'])
def test_steps_balance_rows_and_columns(interpret):
    torch.manual_seed(0)
    grad, momentum = torch.randn(48, 64) * torch.rand(48, 1) * torch.rand(64), torch.zeros(48, 64)
    row_scale, col_scale, col_sumsq = torch.ones(48), torch.ones(64), torch.empty(64)
    with knobs(interpret=interpret):
        update = engram_sinkhorn_momentum_update(grad, momentum, 0.9)
        for _ in range(12):
            _, partial = engram_sinkhorn_step(update, row_scale, col_scale, 1e-12)
            engram_sinkhorn_step_reduce(partial, col_sumsq)
            col_scale *= (48 / 64 / col_sumsq).sqrt()
        out = engram_sinkhorn_finalize(update, row_scale, col_scale, 1e-12, 2.0)
        into = torch.empty(48, 64, dtype=torch.bfloat16)
        assert engram_sinkhorn_finalize(update, row_scale, col_scale, 1e-12, 2.0, out=into) is into
    torch.testing.assert_close(momentum, 0.1 * grad)
    torch.testing.assert_close(out.norm(dim=1), torch.full((48,), 2.0))
    torch.testing.assert_close(out.norm(dim=0), torch.full((64,), 2.0 * (48 / 64) ** 0.5), rtol=1e-3, atol=0)
    torch.testing.assert_close(into.float(), out, rtol=1e-2, atol=1e-3)


def test_bad_input_is_named():
    matrix, rows, columns = torch.ones(3, 12), torch.ones(3), torch.ones(12)
    with pytest.raises(ArgumentError, match='num_columns must be a multiple of 8, got 12'):
        engram_sinkhorn_step(matrix, rows, columns, 0.0)
    with pytest.raises(ArgumentError, match='momentum_buffer must have the shape of grad'):
        engram_sinkhorn_momentum_update(matrix, rows, 0.9)
