"""Prefill and decode with latent attention, dense and with selected keys.

    python examples/mla_decode.py

A layer of `modeling.MLA` reads a prompt and then one token at a time, with an fp8 latent cache. Every step must agree
with the layer run over all tokens at once. On a GPU the decode step is captured in a CUDA graph and replayed. The last
lines say how many of the keys that exact float32 scores would select were selected by the fp8 indexer.
"""

import torch
from torch import Tensor

from tile_kernels.attention import LatentCache
from tile_kernels.modeling import MLA
from tile_kernels.transform import rotary_embedding

DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
LARGE = DEVICE.type == 'cuda'
HIDDEN, HEADS, BATCH = (2048, 16, 4) if LARGE else (64, 4, 2)
PROMPT, STEPS, TOPK = (4096, 32, 512) if LARGE else (40, 6, 16)
SIZES = {} if LARGE else dict(q_lora_rank=48, qk_nope_head_dim=32, v_head_dim=32, index_heads=8, index_dim=64)


def decode(layer: MLA, cache: LatentCache, tokens: Tensor) -> Tensor:
    """The layer on one token after another, (batch, steps, hidden); on a GPU by replays of one graph."""
    part = cache.layer(0)
    if not LARGE:
        return torch.cat([layer(token, cache=part) for token in tokens.split(1, dim=1)], dim=1)
    before = part.lengths.clone()
    token = tokens[:, :1].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(token, cache=part)  # compiles the kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(token, cache=part)
    part.lengths.copy_(before)  # forget the step above
    results = []
    for step in range(tokens.shape[1]):
        token.copy_(tokens[:, step : step + 1])
        graph.replay()
        results.append(y.clone())
    return torch.cat(results, dim=1)


def exact_selection(layer: MLA, x: Tensor, topk: int) -> Tensor:
    """The keys of every token by scores in float32, as a mask (tokens, tokens) of one sequence."""
    indexer, length = layer.indexer.float(), x.shape[1]
    wide = x.float()
    compressed = layer.q_a_layernorm(layer.q_a_proj(x)).float()
    angles = layer._angles(torch.arange(length, device=x.device))
    q = indexer.wq_b(compressed).view(length, indexer.heads, indexer.dim)
    k = indexer.k_norm(indexer.wk(wide)).view(length, 1, indexer.dim)
    q, k = rotary_embedding(q, angles, k)
    weights = indexer.weights_proj(wide)[0]
    scores = torch.einsum('ihd,jd,ih->ihj', q, k[:, 0], torch.ones_like(weights)).relu()
    scores = torch.einsum('ihj,ih->ij', scores, weights)
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float('-inf'))
    best = scores.topk(topk, dim=1)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best.indices, best.values > float('-inf'))
    layer.indexer.to(layer.o_proj.weight.dtype)
    return chosen


def recall(layer: MLA, x: Tensor) -> float:
    """The part of the exact selection that the fp8 indexer selects, over the tokens that must choose."""
    topk, length = layer.index_topk, x.shape[1]
    compressed = layer.q_a_layernorm(layer.q_a_proj(x))
    angles = layer._angles(torch.arange(length, device=x.device))
    listed = layer._select(layer.indexer(x, compressed, angles), x.shape[:2], None)[:, 0].long()
    chosen = torch.zeros(length, length + 1, dtype=torch.bool, device=x.device)
    chosen.scatter_(1, torch.where(listed >= 0, listed, length), True)
    exact = exact_selection(layer, x, topk)[topk:]
    return float((chosen[topk:, :length] & exact).sum() / exact.sum())


@torch.no_grad()
def main() -> None:
    """Compare decode with prefill, dense and sparse."""
    torch.manual_seed(0)
    sparse = MLA(HIDDEN, HEADS, index_topk=TOPK, device=DEVICE, **SIZES)
    dense = MLA(HIDDEN, HEADS, device=DEVICE, **SIZES)  # ignores the sizes of the indexer
    dense.load_state_dict(sparse.state_dict(), strict=False)
    x = torch.randn(BATCH, PROMPT + STEPS, HIDDEN, device=DEVICE).to(torch.bfloat16)
    for name, layer in (('dense', dense), ('sparse', sparse)):
        index_dim = None if layer.index_topk is None else layer.indexer.dim
        cache = LatentCache(1, BATCH, PROMPT + STEPS + 1, dtype='e4m3', index_dim=index_dim, device=DEVICE)
        whole = layer(x)
        first = layer(x[:, :PROMPT], cache=cache.layer(0))
        rest = decode(layer, cache, x[:, PROMPT:])
        error = (torch.cat((first, rest), dim=1) - whole).abs().max() / whole.abs().max()
        form = 'in a CUDA graph' if LARGE else 'on the CPU'
        print(f'{name}: prefill {PROMPT}, decode {STEPS} steps {form}, largest difference {float(error):.3f}')
        if error > 0.1:
            raise SystemExit('decode does not agree with prefill')
    print(f'sparse: {recall(sparse, x[:1]):.1%} of the exact top {TOPK} of {PROMPT + STEPS} keys selected in fp8')


if __name__ == '__main__':
    main()
