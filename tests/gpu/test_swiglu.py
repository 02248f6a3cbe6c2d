"""SwiGLU divides without the hardware's checks: on a GPU every gate must still have the bits of an IEEE division."""

import pytest
import torch

from tile_kernels.activation.swiglu_backward import swiglu_backward
from tile_kernels.activation.swiglu_forward import swiglu_forward
from tile_kernels.reference import quant as twin
from tile_kernels.testing import assert_equal

if not torch.cuda.is_available():
    pytest.skip('needs a CUDA device', allow_module_level=True)


@pytest.mark.parametrize('largest', [80.0, float('inf')])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_every_gate_of_16_bits_is_divided_exactly(dtype, largest):
    bits = torch.arange(1 << 16, dtype=torch.int32, device='cuda').to(torch.int16)
    gate = bits.view(dtype).view(64, 1024)
    gate = torch.where(gate.abs() <= largest, gate, 0)  # up to 80 every lane takes the short way; a NaN has no bits
    x = torch.cat((gate, torch.ones_like(gate)), dim=1)
    y, expected = swiglu_forward.call(x, dtype=torch.float32), twin.swiglu_forward(x, dtype=torch.float32)
    assert torch.equal(y.isnan(), expected.isnan())
    assert_equal(y.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))


@pytest.mark.parametrize('chunk', range(4))
def test_float32_gates_are_divided_exactly(chunk):
    torch.manual_seed(chunk)
    gate = (torch.rand(1 << 12, 1 << 12, device='cuda') - 0.5) * 160
    x = torch.cat((gate, torch.ones_like(gate)), dim=1)
    assert_equal(swiglu_forward.call(x, dtype=torch.float32), twin.swiglu_forward(x, dtype=torch.float32))
    dy = torch.ones_like(gate)
    for result, expected in zip(swiglu_backward.call(dy, x), twin.swiglu_backward(dy, x), strict=True):
        assert_equal(result, expected)
