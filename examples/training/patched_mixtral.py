"""Train a small Hugging Face Mixtral on our kernels, then serve it: prefill, and decode in a CUDA graph.

    python examples/training/patched_mixtral.py [--steps 60]

The model is an ordinary `transformers` class with random weights; `patch(model)` is the only line about our kernels.
On a CPU the ops run as plain PyTorch, and decoding runs eagerly. With a GPU, one decode step is captured in a CUDA
graph and replayed.
"""

import argparse
import time

import torch
import transformers
from torch import Tensor

from tile_kernels.integrations.transformers import patch

TEXT = b'the quick brown fox jumps over the lazy dog, and the dog sleeps. '
LENGTH = 48


def build(device: torch.device) -> transformers.MixtralForCausalLM:
    """A Mixtral of 0.2 million parameters over bytes."""
    config = transformers.MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config).to(device, torch.bfloat16)


def batch(device: torch.device) -> Tensor:
    """Eight rows of the text, each from another byte."""
    rows = [list((TEXT * 3)[start : start + LENGTH]) for start in range(0, 64, 8)]
    return torch.tensor(rows, device=device)


def train(model: transformers.PreTrainedModel, steps: int) -> list[float]:
    """Losses of an ordinary training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        ids = batch(model.device)
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def serve(model: transformers.PreTrainedModel, prompt: bytes, new_tokens: int) -> tuple[bytes, float]:
    """Greedy decoding with a static cache; returns the text and the seconds of a decode step."""
    device = model.device
    cache = transformers.StaticCache(config=model.config, max_cache_len=len(prompt) + new_tokens)
    ids = torch.tensor([list(prompt)], device=device)
    token = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    token, run = token.clone(), None

    def step() -> None:
        """Reads and writes tensors at fixed addresses, so that a graph can repeat it."""
        token.copy_(model(token, past_key_values=cache).logits[:, -1:].argmax(-1))

    text = [int(token)]
    if device.type == 'cuda':
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()  # compiles and loads every kernel; it is the second token
        torch.cuda.current_stream().wait_stream(stream)
        text.append(int(token))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    start = time.perf_counter()
    steps = new_tokens - len(text)
    for _ in range(steps):
        (run or step)()
        text.append(int(token))
    return bytes(text), (time.perf_counter() - start) / max(1, steps)


def main() -> None:
    """Train and serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=60)
    args = parser.parse_args()
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    model = build(device)
    print(patch(model))
    losses = train(model, args.steps)
    print(f'loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {args.steps} steps')
    text, seconds = serve(model.eval(), TEXT[:16], 24)
    print(f'{TEXT[:16].decode()!r} continues with {text.decode(errors="replace")!r}, {seconds * 1e3:.1f} ms a token')


if __name__ == '__main__':
    main()
