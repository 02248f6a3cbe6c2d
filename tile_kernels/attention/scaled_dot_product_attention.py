"""Attention with the arguments of `torch.nn.functional.scaled_dot_product_attention`."""

from torch import Tensor

from tile_kernels.attention.attend import attend
from tile_kernels.core import check
from tile_kernels.core.autograd import autocast


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with heads before tokens, as torch has it; differentiable in query, key and value.

    Args:
        query: (batch, heads, tokens, dim) bfloat16 or float16; strides as in `flash_attn_func`.
        key: (batch, heads, keys, dim).
        value: (batch, heads, keys, value_dim).
        attn_mask: must be None.
        dropout_p: must be 0.
        is_causal: query i sees the keys up to i; unlike in `flash_attn_func` the first query stands at the first key.
        scale: factor of the scores, 1 / sqrt(dim) unless given.
        enable_gqa: key and value may have fewer heads, a divisor of those of query.

    Returns:
        (batch, heads, tokens, value_dim).
    """
    if attn_mask is not None:
        check.fail('attn_mask', 'must be None, since only is_causal is offered', check.describe(attn_mask))
    if dropout_p != 0.0:
        check.fail('dropout_p', 'must be 0.0, since dropout is not offered', check.describe(dropout_p))
    _, heads, queries, dim = check.shape(query, 'query', 'batch heads tokens dim')
    _, kv_heads, keys, _ = check.shape(key, 'key', 'batch heads tokens dim')
    check.shape(value, 'value', 'batch heads tokens dim')
    if not enable_gqa and heads != kv_heads:
        check.fail('key', f'must have {heads} heads unless enable_gqa is set', check.describe(key))
    if scale is None:
        scale = max(dim, 1) ** -0.5
    else:
        check.number(scale, 'scale')
    right = -1
    if is_causal:
        right = max(queries - keys, 0)
        key, value = key[:, :, :queries], value[:, :, :queries]
    query, key, value = autocast(query, key, value)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attend(q, k, v, scale=scale, right=right)[0].transpose(1, 2)
