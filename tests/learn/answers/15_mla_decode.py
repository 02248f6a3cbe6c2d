"""Split the keys of a sequence over blocks; every block serves all heads, so a row of the cache is read once."""

import math

import tilelang.language as T

LOG2_E = math.log2(math.e)


def mla_decode(heads: int, latent: int, rope: int, splits: int, scale: float):
    batch, seq = T.dynamic('batch'), T.dynamic('seq')
    dim, block_n = latent + rope, 64
    block_h = 16 if heads <= 16 else 64
    to_log2 = scale * LOG2_E

    @T.prim_func
    def split(
        q: T.Tensor((batch, heads, dim), 'bfloat16'),
        cache: T.Tensor((batch, seq, dim), 'bfloat16'),
        lengths: T.Tensor((batch,), 'int32'),
        parts: T.Tensor((batch, splits, heads, latent), 'float32'),
        lse: T.Tensor((batch, splits, heads), 'float32'),
    ):
        with T.Kernel(splits, T.ceildiv(heads, block_h), batch, threads=128) as (s, head_tile, b):
            q_shared = T.alloc_shared((block_h, dim), 'bfloat16')
            kv_shared = T.alloc_shared((block_n, dim), 'bfloat16')
            p_shared = T.alloc_shared((block_h, block_n), 'bfloat16')
            scores = T.alloc_fragment((block_h, block_n), 'float32')
            out = T.alloc_fragment((block_h, latent), 'float32')
            peak = T.alloc_fragment((block_h,), 'float32')
            old_peak = T.alloc_fragment((block_h,), 'float32')
            total = T.alloc_fragment((block_h,), 'float32')
            tile_total = T.alloc_fragment((block_h,), 'float32')
            length = lengths[b]
            tiles = T.ceildiv(T.ceildiv(length, block_n), splits)  # of a split
            start = s * tiles * block_n
            head = head_tile * block_h
            T.copy(q[b, head : head + block_h, 0:dim], q_shared)
            T.fill(peak, -T.infinity('float32'))
            T.clear(total)
            T.clear(out)
            for tile in T.serial(tiles):
                first = start + tile * block_n
                if first < length:
                    T.copy(cache[b, first : first + block_n, 0:dim], kv_shared)
                    T.gemm(q_shared, kv_shared, scores, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(block_h, block_n):
                        scores[i, j] = T.if_then_else(
                            first + j < length, scores[i, j] * to_log2, -T.infinity('float32')
                        )
                    T.copy(peak, old_peak)
                    T.reduce_max(scores, peak, dim=1, clear=False)
                    for i in T.Parallel(block_h):
                        old_peak[i] = T.exp2(old_peak[i] - peak[i])
                    for i, j in T.Parallel(block_h, block_n):
                        scores[i, j] = T.exp2(scores[i, j] - peak[i])
                    T.reduce_sum(scores, tile_total, dim=1)
                    for i in T.Parallel(block_h):
                        total[i] = total[i] * old_peak[i] + tile_total[i]
                    for i, j in T.Parallel(block_h, latent):
                        out[i, j] *= old_peak[i]
                    T.copy(scores, p_shared)
                    T.gemm(p_shared, kv_shared[:, 0:latent], out)
            for i, j in T.Parallel(block_h, latent):
                if head + i < heads:
                    parts[b, s, head + i, j] = out[i, j] / T.max(total[i], 1e-30)
            for i in T.Parallel(block_h):
                if head + i < heads:
                    lse[b, s, head + i] = peak[i] + T.log2(total[i])

    @T.prim_func
    def merge(
        parts: T.Tensor((batch, splits, heads, latent), 'float32'),
        lse: T.Tensor((batch, splits, heads), 'float32'),
        o: T.Tensor((batch, heads, latent), 'bfloat16'),
    ):
        with T.Kernel(heads, batch, threads=128) as (head, b):
            out = T.alloc_fragment((latent,), 'float32')
            peak = T.alloc_var('float32', init=-1e30)
            total = T.alloc_var('float32', init=0.0)
            weight = T.alloc_var('float32')
            T.clear(out)
            for s in T.serial(splits):
                peak = T.max(peak, lse[b, s, head])
            for s in T.serial(splits):
                weight = T.exp2(lse[b, s, head] - peak)
                total += weight
                for j in T.Parallel(latent):
                    out[j] += weight * parts[b, s, head, j]
            for j in T.Parallel(latent):
                o[b, head, j] = T.cast(out[j] / T.max(total, 1e-30), 'bfloat16')

    return split, merge
