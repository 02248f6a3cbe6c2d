"""Quantize the linear layers of a model to 4 bits, save it, load it, and compare its outputs.

The program runs on a CPU, where the products run in PyTorch, and on a GPU.
"""

import io

import torch
from torch import nn

from tile_kernels.modeling import QuantLinear, quantize_model


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in, rows out."""
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def build(width: int = 128) -> nn.Sequential:
    """A small model."""
    return nn.Sequential(*[Block(width) for _ in range(2)]).bfloat16().eval()


def main() -> None:
    """Quantize, save, load, compare."""
    torch.manual_seed(0)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    model, x = build().to(device), torch.randn(4, 128, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        before = model(x)
        report = quantize_model(model, 'u4_1x128')
        after = model(x)
    error = ((after - before).float().norm() / before.float().norm()).item()
    print(f'quantize_model: {len(report.layers)} layers, {report.bytes_saved} bytes saved, output error {error:.3f}')

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = build()
    for block in again:
        for name, layer in list(block.named_children()):
            setattr(block, name, QuantLinear(layer.in_features, layer.out_features, fmt='u4_1x128'))
    again.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        assert torch.equal(again.to(device)(x), after)


if __name__ == '__main__':
    main()
