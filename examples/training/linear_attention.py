"""Train a tiny language model with `modeling.Mamba2` and with its plain PyTorch form, then generate with a state.

    python examples/training/linear_attention.py

Both models start from the same weights and see the same data, so their losses agree. On a CPU the ops run as plain
PyTorch. The last lines generate greedily, once token by token with a state and once from the whole text.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tile_kernels.modeling import Mamba2

VOCABULARY, HIDDEN, LAYERS, LENGTH, STEPS = 8, 32, 1, 12, 60


class PlainMamba2(nn.Module):
    """The weights of a `Mamba2`, run token by token in float32."""

    def __init__(self, layer: Mamba2) -> None:
        """Take over a layer."""
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """From hidden states to hidden states."""
        layer = self.layer
        width = layer.ngroups * layer.d_state
        z, xbc, dt = layer.in_proj(x).float().split([layer.inner, layer.inner + 2 * width, layer.heads], -1)
        weight, bias = layer.conv1d.weight.float(), layer.conv1d.bias.float()
        padded = F.pad(xbc.transpose(1, 2), (weight.shape[-1] - 1, 0))
        xbc = F.silu(F.conv1d(padded, weight, bias, groups=weight.shape[0])).transpose(1, 2)
        values, B, C = xbc.split([layer.inner, width, width], -1)
        values = values.unflatten(-1, (layer.heads, -1))
        dt, A = F.softplus(dt + layer.dt_bias), -layer.A_log.exp()
        state, rows = 0.0, []
        for t in range(x.shape[1]):  # one group
            added = (dt[:, t, :, None] * values[:, t])[..., None] * B[:, t, None, None]
            state = state * (dt[:, t] * A).exp()[..., None, None] + added
            rows.append((state * C[:, t, None, None]).sum(-1) + layer.D[:, None] * values[:, t])
        y = torch.stack(rows, 1).flatten(-2) * F.silu(z)
        return layer.out_proj(layer.norm(y.to(x.dtype)))


class Model(nn.Module):
    """Layers with a residual connection between an embedding and a projection to the vocabulary."""

    def __init__(self, device: torch.device) -> None:
        """A model with random weights."""
        super().__init__()
        factory = dict(dtype=torch.bfloat16, device=device)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, **factory)
        self.layers = nn.ModuleList(Mamba2(HIDDEN, d_state=16, headdim=16, device=device) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN, **factory) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, **factory)

    def forward(self, tokens: Tensor, states: list | None = None) -> Tensor:
        """Logits (batch, tokens, vocabulary); `states` has the states of the layers, None before the first token."""
        x = self.embedding(tokens)
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            if states is None:
                x = x + layer(norm(x))
            else:
                y, states[i] = layer(norm(x), state=states[i], return_state=True)
                x = x + y
        return self.head(x).float()


def draw(num_rows: int, device: torch.device) -> Tensor:
    """Rows that count upwards from a random number by a random step of 1 or 2: the step is known from the past only."""
    first, step = torch.randint(0, VOCABULARY, (num_rows, 1)), torch.randint(1, 3, (num_rows, 1))
    return ((first + step * torch.arange(LENGTH + 1)) % VOCABULARY).to(device)


def train(model: nn.Module, device: torch.device) -> list[float]:
    """The losses of some steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        tokens = draw(8, device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def generate(model: Model, prompt: Tensor, number: int, stateful: bool) -> Tensor:
    """The most likely tokens behind a prompt."""
    states: list | None = [None] * LAYERS if stateful else None
    tokens, new = prompt, prompt
    with torch.no_grad():
        for _ in range(number):
            new = model(new if stateful else tokens, states)[:, -1:].argmax(-1)
            tokens = torch.cat((tokens, new), 1)
    return tokens


def main() -> None:
    """Train both, compare, generate."""
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    torch.manual_seed(0)
    own = Model(device)
    theirs = copy.deepcopy(own)
    theirs.layers = nn.ModuleList(PlainMamba2(layer) for layer in theirs.layers)
    losses, other = train(own, device), train(theirs, device)
    print(f'loss after {STEPS} steps: {losses[-1]:.3f} with tile_kernels, {other[-1]:.3f} with PyTorch')
    assert losses[-1] < 0.5 * losses[0], losses
    assert abs(losses[-1] - other[-1]) < 0.1, (losses[-1], other[-1])
    prompt = draw(4, device)[:, :6]
    with_state, without = (generate(own, prompt, 8, stateful) for stateful in (True, False))
    same = (with_state == without).float().mean().item()
    print(f'generated tokens that agree with and without a state: {same:.0%}')
    assert same > 0.9


if __name__ == '__main__':
    main()
