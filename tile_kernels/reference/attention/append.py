"""Twin of appending to a cache."""

from torch import Tensor


def append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> None:
    """Write every token where it belongs, one after the other."""
    for i, before in enumerate(cache_seqlens.tolist()):
        first, end = (0, k.shape[1]) if cu_seqlens is None else cu_seqlens[i : i + 2].tolist()
        before = max(before, 0)
        size = k_cache.shape[1]
        if before + end - first > (size if block_table is None else size * block_table.shape[1]):
            continue
        for token in range(first, end):
            key = before + token - first
            page, slot = i if cache_batch_idx is None else int(cache_batch_idx[i]), key
            if block_table is not None:
                page, slot = int(block_table[i, key // size]), key % size
            if 0 <= page < k_cache.shape[0]:
                for x, cache, descale in ((k, k_cache, k_descale), (v, v_cache, v_descale)):
                    row = x[i, token] if cu_seqlens is None else x[token]
                    if descale is not None:
                        row = (row.float() / descale[i, :, None]).clamp(-448.0, 448.0)
                    cache[page, slot] = row.to(cache.dtype)
