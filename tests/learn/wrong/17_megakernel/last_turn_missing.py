"""step: right
words: tails everywhere

The rows of the last turn have no warp.
"""

import tilelang.language as T

WARPS = 8


@T.macro
def dot(matrix, row, tokens_shared, num_tokens: int, length: int, lane, sums):
    """`sums[t]` = the product of a row of a matrix with token t, in every lane of the warp; the row is read once."""
    weights = T.alloc_local((8,), 'bfloat16')
    for t in T.unroll(num_tokens):
        sums[t] = 0.0
    for step in T.serial(T.ceildiv(length, 256)):
        first = step * 256 + lane * 8
        if first < length:
            for j in T.vectorized(8):
                weights[j] = matrix[row, first + j]
            for t in T.unroll(num_tokens):
                for j in T.unroll(8):
                    sums[t] += T.cast(weights[j], 'float32') * T.cast(tokens_shared[t, first + j], 'float32')
    for t in T.unroll(num_tokens):
        sums[t] = T.warp_reduce_sum(sums[t])


def moe_block(tokens: int, hidden: int, inter: int, experts: int, k: int, blocks: int):
    slots = -(-experts // 32)
    warps = blocks * WARPS

    @T.prim_func
    def kernel(
        x: T.Tensor((tokens, hidden), 'bfloat16'),
        gamma: T.Tensor((hidden,), 'float32'),
        router: T.Tensor((experts, hidden), 'bfloat16'),
        up: T.Tensor((experts * 2 * inter, hidden), 'bfloat16'),
        down: T.Tensor((experts * hidden, inter), 'bfloat16'),
        y: T.Tensor((tokens, hidden), 'bfloat16'),
        logits: T.Tensor((tokens, experts), 'float32'),
        act: T.Tensor((experts, tokens, inter), 'bfloat16'),
    ):
        with T.Kernel(blocks, threads=32 * WARPS) as block:
            thread = T.get_thread_binding()
            lane, warp = thread % 32, thread // 32
            first = block * WARPS + warp  # this warp among all warps of the grid
            x_shared = T.alloc_shared((tokens, hidden), 'bfloat16')
            act_shared = T.alloc_shared((tokens, inter), 'bfloat16')
            share = T.alloc_shared((tokens, experts), 'float32')
            sums = T.alloc_local((tokens,), 'float32')
            gates = T.alloc_local((tokens,), 'float32')
            left = T.alloc_local((slots,), 'float32')
            value = T.alloc_var('float32')
            total = T.alloc_var('float32')
            best = T.alloc_var('float32')
            expert = T.alloc_var('int32')
            used = T.alloc_var('float32')
            kept = T.alloc_var('float32', init=-T.infinity('float32'))
            kept_expert = T.alloc_var('int32', init=0)

            # Phase 1: every block normalizes all tokens, for they are few; the rows of the router are shared out.
            if warp < tokens:
                total = 0.0
                for step in T.serial(T.ceildiv(hidden, 32)):
                    value = T.cast(x[warp, step * 32 + lane], 'float32')
                    total += value * value
                total = T.rsqrt(T.warp_reduce_sum(total) / hidden + 1e-6)
                for step in T.serial(T.ceildiv(hidden, 32)):
                    value = T.cast(x[warp, step * 32 + lane], 'float32')
                    x_shared[warp, step * 32 + lane] = T.cast(value * total * gamma[step * 32 + lane], 'bfloat16')
            T.sync_threads()
            for turn in T.serial(T.ceildiv(experts, warps)):
                if turn * warps + first < experts:
                    dot(router, turn * warps + first, x_shared, tokens, hidden, lane, sums)
                    if lane == 0:
                        for t in T.unroll(tokens):
                            logits[t, turn * warps + first] = sums[t]
            T.sync_grid()

            # Phase 2: every block chooses again, from the same logits; the rows of `up` are shared out.
            if warp < tokens:
                for s in T.unroll(slots):
                    left[s] = -T.infinity('float32')
                    if s * 32 + lane < experts:
                        left[s] = logits[warp, s * 32 + lane]
                        share[warp, s * 32 + lane] = 0.0
                for choice in T.serial(k):
                    best = left[0]
                    for s in T.unroll(1, slots):
                        best = T.max(best, left[s])
                    best = T.warp_reduce_max(best)
                    expert = experts
                    for s in T.unroll(slots):
                        if left[s] == best:
                            expert = T.min(expert, s * 32 + lane)
                    expert = T.warp_reduce_min(expert)
                    for s in T.unroll(slots):
                        if s * 32 + lane == expert:
                            left[s] = -T.infinity('float32')
                    if lane == choice:
                        kept = best
                        kept_expert = expert
                kept = T.exp(kept - T.warp_reduce_max(kept))
                kept = kept / T.warp_reduce_sum(kept)
                T.sync_warp()
                if lane < k:
                    share[warp, kept_expert] = kept
            T.sync_threads()
            for e in T.serial(experts):
                used = 0.0
                for t in T.unroll(tokens):
                    used += share[t, e]
                if used > 0.0:
                    for turn in T.serial(inter // warps):
                        if turn * warps + first < inter:
                            dot(up, e * 2 * inter + turn * warps + first, x_shared, tokens, hidden, lane, gates)
                            dot(up, (e * 2 + 1) * inter + turn * warps + first, x_shared, tokens, hidden, lane, sums)
                            if lane == 0:
                                for t in T.unroll(tokens):
                                    act[e, t, turn * warps + first] = T.cast(
                                        gates[t] / (1.0 + T.exp(-gates[t])) * sums[t], 'bfloat16'
                                    )
            T.sync_grid()

            # Phase 3: a warp owns a channel of y, so it adds the experts of a token in their order.
            for turn in T.serial(T.ceildiv(hidden, warps)):
                for t in T.unroll(tokens):
                    gates[t] = 0.0
                for e in T.serial(experts):
                    used = 0.0
                    for t in T.unroll(tokens):
                        used += share[t, e]
                    if used > 0.0:
                        T.sync_threads()
                        for t, i in T.Parallel(tokens, inter):
                            act_shared[t, i] = act[e, t, i]
                        T.sync_threads()
                        if turn * warps + first < hidden:
                            dot(down, e * hidden + turn * warps + first, act_shared, tokens, inter, lane, sums)
                            for t in T.unroll(tokens):
                                gates[t] += share[t, e] * sums[t]
                if turn * warps + first < hidden:
                    if lane == 0:
                        for t in T.unroll(tokens):
                            y[t, turn * warps + first] = T.cast(gates[t], 'bfloat16')

    return kernel
