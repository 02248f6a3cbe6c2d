"""step: lean
words: bytes of shared memory

The row waits in shared memory.
"""

import tilelang.language as T

LOWEST = -(2**31)


def order_key(x):
    """An int32 that rises with `x`: both zeros are equal, and NaN is below every number."""
    bits = T.reinterpret(x, 'int32')
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return T.Select(T.isnan(x), LOWEST + 1, T.Select(x == T.float32(0), 0, key))


def topk_gate(num_experts: int, k: int):
    num_tokens = T.dynamic('num_tokens')
    slots = -(-num_experts // 32)

    @T.prim_func
    def kernel(
        logits: T.Tensor((num_tokens, num_experts), 'float32'),
        experts: T.Tensor((num_tokens, k), 'int32'),
        values: T.Tensor((num_tokens, k), 'float32'),
    ):
        with T.Kernel(T.ceildiv(num_tokens, 4), threads=128) as block:
            lane = T.get_thread_binding() % 32
            token = block * 4 + T.get_thread_binding() // 32
            row = T.alloc_shared((4, num_experts), 'float32')
            keys = T.alloc_local((slots,), 'int32')
            logit = T.alloc_var('float32')
            best = T.alloc_var('int32')
            expert = T.alloc_var('int32')
            chosen = T.alloc_var('int32', init=0)
            if token < num_tokens:
                for s in T.unroll(slots):
                    keys[s] = LOWEST
                    if s * 32 + lane < num_experts:
                        row[T.get_thread_binding() // 32, s * 32 + lane] = logits[token, s * 32 + lane]
                        logit = row[T.get_thread_binding() // 32, s * 32 + lane]
                        keys[s] = order_key(logit)
                for choice in T.serial(k):
                    best = keys[0]
                    for s in T.unroll(1, slots):
                        best = T.max(best, keys[s])
                    best = T.warp_reduce_max(best)
                    expert = num_experts
                    for s in T.unroll(slots):
                        if keys[s] == best:
                            expert = T.min(expert, s * 32 + lane)
                    expert = T.warp_reduce_min(expert)
                    for s in T.unroll(slots):
                        if s * 32 + lane == expert:
                            keys[s] = LOWEST
                    if lane == choice:
                        chosen = expert
                if lane < k:
                    experts[token, lane] = chosen
                    values[token, lane] = logits[token, chosen]

    return kernel
