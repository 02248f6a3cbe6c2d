"""Train a tiny transformer with `modeling.Attention` and with PyTorch's attention, then generate with a cache.

    python examples/attention.py

Both models start from the same weights and see the same data, so their losses agree. On a CPU the ops run as plain
PyTorch. The last lines generate greedily, once with a cache of keys and values and once without.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tile_kernels.attention import KVCache
from tile_kernels.modeling import Attention

VOCABULARY, HIDDEN, HEADS, KV_HEADS, LAYERS, LENGTH, STEPS = 8, 64, 4, 2, 2, 18, 120


class TorchAttention(nn.Module):
    """The weights of an `Attention`, run by `torch.nn.functional.scaled_dot_product_attention`."""

    def __init__(self, layer: Attention) -> None:
        """Take over a layer."""
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention from hidden states to hidden states."""
        layer = self.layer
        q = layer.q_proj(x).unflatten(-1, (layer.num_heads, -1))
        k = layer.k_proj(x).unflatten(-1, (layer.num_kv_heads, -1))
        v = layer.v_proj(x).unflatten(-1, (layer.num_kv_heads, -1))
        positions = torch.arange(x.shape[1], device=x.device)
        half = layer.head_dim // 2
        angle = positions[:, None] * layer.rope_theta ** (-torch.arange(half, device=x.device) / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]

        def rotate(y: Tensor) -> Tensor:
            a, b = y.float().chunk(2, -1)
            return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(y.dtype)

        heads = [y.transpose(1, 2) for y in (rotate(q), rotate(k), v)]
        o = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return layer.o_proj(o.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    """Attention layers with a residual connection between an embedding and a projection to the vocabulary."""

    def __init__(self, device: torch.device) -> None:
        """A model with random weights."""
        super().__init__()
        factory = dict(dtype=torch.bfloat16, device=device)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, **factory)
        self.layers = nn.ModuleList(Attention(HIDDEN, HEADS, KV_HEADS, device=device) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN, **factory) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, **factory)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits (batch, tokens, vocabulary)."""
        x = self.embedding(tokens)
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = x + (layer(norm(x)) if cache is None else layer(norm(x), cache=cache.layer(i)))
        return self.head(x).float()


def draw(num_rows: int, device: torch.device) -> Tensor:
    """Rows that repeat a random word of six letters, which only attention can know."""
    word = torch.randint(0, VOCABULARY, (num_rows, 6))
    return word.repeat(1, LENGTH // 6 + 1)[:, : LENGTH + 1].to(device)


def train(model: nn.Module, device: torch.device) -> list[float]:
    """The losses of some steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    losses = []
    for _ in range(STEPS):
        tokens = draw(8, device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def generate(model: Model, prompt: Tensor, number: int, cached: bool) -> Tensor:
    """The most likely tokens behind a prompt."""
    device = prompt.device
    cache = None
    if cached:
        cache = KVCache(LAYERS, len(prompt), 64, KV_HEADS, HIDDEN // HEADS, page=16, device=device)
    tokens, new = prompt, prompt
    with torch.no_grad():
        for _ in range(number):
            new = model(new if cached else tokens, cache)[:, -1:].argmax(-1)
            tokens = torch.cat((tokens, new), 1)
    return tokens


def main() -> None:
    """Train both, compare, generate."""
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    torch.manual_seed(0)
    own = Model(device)
    theirs = copy.deepcopy(own)
    theirs.layers = nn.ModuleList(TorchAttention(layer) for layer in theirs.layers)
    losses, other = train(own, device), train(theirs, device)
    print(f'loss after {STEPS} steps: {losses[-1]:.3f} with tile_kernels, {other[-1]:.3f} with PyTorch')
    assert losses[-1] < 0.7 * losses[0], losses
    assert abs(losses[-1] - other[-1]) < 0.1, (losses[-1], other[-1])
    prompt = draw(2, device)[:, :12]
    with_cache, without = (generate(own, prompt, 8, cached) for cached in (True, False))
    same = (with_cache == without).float().mean().item()
    print(f'generated tokens that agree with and without a cache: {same:.0%}')
    assert same > 0.9


if __name__ == '__main__':
    main()
