"""Train a small language model whose feed-forward layers are mixtures of four experts.

    python examples/training/train_moe_lm.py                         one process, on a GPU if there is one
    torchrun --nproc-per-node 2 examples/training/train_moe_lm.py    the experts spread over two processes

The text comes from a small grammar, byte by byte, so its own entropy is known: no model can get below it, and one that
only counts bytes stays far above. On a CPU the ops of `tile_kernels` run as plain PyTorch; nothing else differs. The
first run on a GPU compiles 21 kernels, later ones find them in the cache.
"""

import argparse
import math
import os
import random
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tile_kernels.modeling import MoELayer

ADJECTIVES = ('old', 'red', 'tiny', 'quick', 'silent', 'hungry', 'clever', 'sleepy')
NOUNS = ('fox', 'owl', 'bear', 'crow', 'rabbit', 'badger', 'wolf', 'heron')
VERBS = ('sees', 'hears', 'follows', 'greets', 'meets', 'fears', 'helps', 'likes')
NUM_EXPERTS, TOPK, HIDDEN, NUM_HEADS, NUM_BLOCKS, LENGTH = 4, 2, 64, 4, 2, 64
LEARNING_RATE = 8e-3


def sentence(rng: random.Random) -> str:
    """One sentence; its second half repeats the animals of the first, which only attention can know."""
    one, other = rng.choice(NOUNS), rng.choice(NOUNS)
    adjective, verb = rng.choice(ADJECTIVES), rng.choice(VERBS)
    return f'the {adjective} {one} {verb} the {other}, the {other} hides from the {one}. '


def draw(rng: random.Random, num_rows: int, device: torch.device) -> Tensor:
    """(num_rows, LENGTH + 1) bytes of text; a row starts anywhere in a sentence."""
    rows = []
    for _ in range(num_rows):
        text = ''.join(sentence(rng) for _ in range(3)).encode()
        start = rng.randrange(len(text) - LENGTH)
        rows.append(list(text[start : start + LENGTH + 1]))
    return torch.tensor(rows, device=device)


def entropies() -> tuple[float, float]:
    """Nats per byte of a model that only counts bytes, and of the grammar itself."""
    rng, num_sentences = random.Random(0), 2000
    text = ''.join(sentence(rng) for _ in range(num_sentences))
    unigram = -sum(n / len(text) * math.log(n / len(text)) for n in Counter(text).values())
    choices = math.log(len(ADJECTIVES)) + math.log(len(VERBS)) + 2 * math.log(len(NOUNS))
    return unigram, choices * num_sentences / len(text)


class Block(nn.Module):
    """Causal self-attention, then a mixture of experts, each added to what it reads."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        # Parameters in float32 for the optimiser; the layer multiplies them in bfloat16.
        self.moe = MoELayer(NUM_EXPERTS, TOPK, HIDDEN, balance_rate=1e-3, group=group, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, HIDDEN) in and out."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.moe(self.norm_2(x))


class LanguageModel(nn.Module):
    """Logits of the next byte."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block(group) for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) bytes to (batch, length, 256) logits."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def shared_parameters(self) -> list[Tensor]:
        """All that every rank holds: everything but the experts."""
        return [p for name, p in self.named_parameters() if '.experts.' not in name]


def train(num_steps: int, batch_size: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Train and return the mean loss of the last steps."""
    rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    torch.manual_seed(rank)  # ranks hold different experts, so they draw different ones
    rng = random.Random(rank)
    model = LanguageModel(group).to(device)
    if group:
        for parameter in model.shared_parameters():
            dist.broadcast(parameter.data, 0, group)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=num_steps)
    losses = []
    for step in range(num_steps):
        text = draw(rng, batch_size // world_size, device)
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        # The loss of all ranks is the mean of theirs. An expert has seen the tokens of all ranks, so its gradient is
        # complete; of the others every rank has its share.
        (loss / world_size).backward()
        loss = loss.detach()
        if group:
            for parameter in model.shared_parameters():
                dist.all_reduce(parameter.grad, group=group)
            dist.all_reduce(loss.div_(world_size), group=group)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        for block in model.blocks:
            block.moe.update_bias()
        losses.append(loss)
        if rank == 0 and (step % 50 == 0 or step == num_steps - 1):
            print(f'step {step:4d}  loss {loss.item():.3f}', flush=True)
    return torch.stack(losses[-10:]).mean().item()


def main() -> None:
    """Join the other processes if `torchrun` started this one, train, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=300)
    parser.add_argument('--batch-size', type=int, default=16, help='rows of a step, of all processes together')
    args = parser.parse_args()
    rank, world_size = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    device = torch.device('cuda', int(os.environ.get('LOCAL_RANK', 0))) if on_gpu else torch.device('cpu')
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # tensors this small keep one core busy; more would wait for each other
    if world_size > 1:
        dist.init_process_group('nccl' if on_gpu else 'gloo')
    start = time.perf_counter()
    loss = train(args.steps, args.batch_size, device, dist.group.WORLD if world_size > 1 else None)
    if rank == 0:
        unigram, grammar = entropies()
        print(f'{args.steps} steps on {world_size} x {device.type} in {time.perf_counter() - start:.1f} s')
        print(
            f'final loss {loss:.3f}, byte counts alone {unigram:.3f}, entropy of the text {grammar:.3f} nats per byte'
        )
    if world_size > 1:
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # a thread of gloo that still holds a tensor may abort the process while Python ends


if __name__ == '__main__':
    main()
