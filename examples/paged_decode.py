"""Continuous batching over one pool of pages: requests share the pages of a common prefix, come and go.

    python examples/paged_decode.py

A request is prefilled over the prefix that is already in the pool, then decoded one token a step with the others. Every
step is compared with dense attention over the request's own keys. With a GPU, decode steps are one CUDA graph, replayed
with other lengths and other requests. On a CPU the ops run as plain PyTorch; `TK_INTERPRET=1` runs their kernels.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tile_kernels.attention import append, flash_attn_varlen_func, flash_attn_with_kvcache

HEADS, KV_HEADS, DIM, PAGE, SLOTS, PAGES, MOST = 8, 2, 64, 16, 3, 24, 6
PREFIX = 2 * PAGE  # tokens that all requests begin with
DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def draw(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of some tokens, which a model would compute."""
    q = torch.randn(tokens, HEADS, DIM, device=DEVICE).bfloat16()
    k, v = torch.randn(2, tokens, KV_HEADS, DIM, device=DEVICE).bfloat16()
    return q, k, v


class Pool:
    """Pages, a table with a row for every slot of the batch, lengths, and what dense attention would need."""

    def __init__(self) -> None:
        """An empty pool, whose first pages hold the prefix."""
        self.k, self.v = torch.full((2, PAGES, PAGE, KV_HEADS, DIM), torch.nan, device=DEVICE).bfloat16()
        self.table = torch.full((SLOTS, MOST), -1, dtype=torch.int32, device=DEVICE)
        self.lengths = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
        self.free = list(range(PREFIX // PAGE, PAGES))
        self.seen: list[list[Tensor]] = [[] for _ in range(SLOTS)]
        self.q, self.new_k, self.new_v = (x.new_zeros(SLOTS, 1, *x.shape[1:]) for x in draw(1))
        self.o = torch.zeros_like(self.q)
        self.prefix = draw(PREFIX)[1:]
        for cache, x in zip((self.k, self.v), self.prefix, strict=True):
            cache[: PREFIX // PAGE] = x.unflatten(0, (-1, PAGE))

    def admit(self, slot: int, prompt: int) -> None:
        """A request takes a slot: its table begins with the shared pages, and its prompt is prefilled."""
        own = [self.free.pop() for _ in range(MOST - PREFIX // PAGE)]
        row = [*range(PREFIX // PAGE), *own]
        self.table[slot] = torch.tensor(row, dtype=torch.int32)
        self.lengths[slot] = PREFIX
        q, k, v = draw(prompt)
        cuts = torch.tensor([0, prompt], dtype=torch.int32, device=DEVICE)
        table = self.table[slot : slot + 1]
        append(k, v, self.k, self.v, self.lengths[slot : slot + 1], cuts, table)
        self.lengths[slot] += prompt
        self.seen[slot] = [torch.cat((shared, x)) for shared, x in zip(self.prefix, (k, v), strict=True)]
        used = self.lengths[slot : slot + 1]
        o = flash_attn_varlen_func(
            q, self.k, self.v, cuts, None, prompt, None, seqused_k=used, block_table=table, causal=True
        )
        compare(o, q, *self.seen[slot])

    def retire(self, slot: int) -> None:
        """A request ends; its pages may be used again, those of the prefix stay."""
        self.free += self.table[slot, PREFIX // PAGE :].tolist()
        self.table[slot] = -1
        self.lengths[slot] = 0
        self.seen[slot] = []

    def step(self) -> None:
        """Append the new tokens and attend, for all slots: a function of what is on the device."""
        given = dict(cache_seqlens=self.lengths, block_table=self.table, causal=True, out=self.o)
        flash_attn_with_kvcache(self.q, self.k, self.v, self.new_k, self.new_v, **given)
        self.lengths.add_(self.lengths > 0)

    def check(self) -> None:
        """Compare the last step with dense attention; an empty slot gives nothing, since its pages are holes."""
        for slot, seen in enumerate(self.seen):
            if seen:
                new = (self.new_k[slot], self.new_v[slot])
                self.seen[slot] = [torch.cat(pair) for pair in zip(seen, new, strict=True)]
                compare(self.o[slot], self.q[slot], *self.seen[slot])
            else:
                assert not self.o[slot].any()


def compare(o: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Paged attention of the last queries against dense attention over all keys."""
    group, visible = HEADS // KV_HEADS, torch.ones(len(q), len(k), device=DEVICE).tril(len(k) - len(q)).bool()
    heads = [x.float().repeat_interleave(n, 1).transpose(0, 1) for x, n in ((q, 1), (k, group), (v, group))]
    expected = F.scaled_dot_product_attention(*heads, attn_mask=visible).transpose(0, 1)
    torch.testing.assert_close(o.float(), expected, rtol=2e-2, atol=2e-2)


def main() -> None:
    """Requests come and go while the others decode."""
    torch.manual_seed(0)
    pool = Pool()
    step = pool.step
    if DEVICE.type == 'cuda':  # kernels are compiled before the capture; all slots are empty, so nothing is written
        pool.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pool.step()
        step = graph.replay
    events = {0: [(0, 5)], 2: [(1, 20), (2, 1)], 5: [(0, 0)], 7: [(0, 33)]}  # prompts; 0 ends a request
    compared = 0
    for time in range(10):
        for slot, prompt in events.get(time, []):
            if prompt:
                pool.admit(slot, prompt)
            else:
                pool.retire(slot)
        for kept, x in zip((pool.q, pool.new_k, pool.new_v), draw(SLOTS), strict=True):
            kept.copy_(x.unsqueeze(1))
        step()
        pool.check()
        compared += sum(bool(seen) for seen in pool.seen)
    assert not torch.isnan(pool.k[: PREFIX // PAGE]).any()
    kept = 'one CUDA graph' if DEVICE.type == 'cuda' else 'eager steps'
    print(f'paged_decode: {compared} decoded tokens in {kept} equal dense attention, {len(pool.free)} pages are free')


if __name__ == '__main__':
    main()
