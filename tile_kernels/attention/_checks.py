"""What the operands of attention must be, and the translation of foreign signatures."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check

HALVES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
MAX_DIM = 256
#: Columns of queries and keys beyond `MAX_DIM` that the forward kernels by mma take, with up to 256 columns of values.
WIDE_DIM = 512
#: A side of the band without bound, and the largest one that counts; tokens of a sequence are fewer.
UNBOUNDED = 1 << 30


def check_vectors(**tensors: Tensor) -> None:
    """Rows must be read 16 bytes at a time: last dimension dense, base and other strides multiples of 16 bytes."""
    for name, x in tensors.items():
        check.unit_stride(x, name)
        if x.numel() and check.vector_bytes(x) < 16:
            check.fail(
                name,
                'must have a base and strides that are multiples of 16 bytes',
                check.describe(x),
                hint=f'pass {name}.contiguous()',
            )


def check_extents(
    x: Tensor, name: str, spec: str, dtype: torch.dtype | tuple[torch.dtype, ...], **known: int
) -> tuple[int, ...]:
    """As `check.shape`; numbers in `spec` are extents that must be."""
    extents = check.shape(x, name, spec, None, **known)
    for dim, extent in zip(spec.split(), extents, strict=True):
        if dim.isdigit() and extent != int(dim):
            check.fail(name, f'must be ({", ".join(spec.split())})', check.describe(x))
    check.dtype(x, name, dtype)
    return extents


def check_tensors(**tensors: Tensor | None) -> None:
    """They must be tensors or None; for fronts that look at them before an op checks them."""
    for name, x in tensors.items():
        if x is not None or name != 'sink':
            check.tensor(x, name)


def check_dim(extent: int, name: str, wide: bool = False) -> None:
    """A head dimension; `wide` ones are legal where a caller says so."""
    if wide and extent == WIDE_DIM:
        return
    if extent < 8 or extent > MAX_DIM or extent % 8:
        check.fail(name, f'must be a multiple of 8 up to {MAX_DIM}', str(extent))


def value_parts(q: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Values as kernels take them: in halves for queries of 512 columns."""
    if q.shape[-1] != WIDE_DIM:
        return (v,)
    check.equal(v.shape[-1], WIDE_DIM, f'the last extent of v with queries of {WIDE_DIM} columns')
    return v.chunk(2, dim=-1)


def check_heads(q_heads: int, kv_heads: int, name: str = 'k') -> None:
    """Every kv head serves equally many query heads."""
    if kv_heads == 0 or q_heads % kv_heads:
        check.fail('heads of q', f'must be a multiple of the heads of {name} ({kv_heads})', str(q_heads))


def check_sink(sink: Tensor | None, q_heads: int, dtype: torch.dtype) -> None:
    """One number for each query head, float32 or of the dtype of the operands."""
    check.packed(sink, 'sink', 'heads', dict.fromkeys((torch.float32, dtype)), heads=q_heads)


def check_table(block_table: Tensor | None, number: int) -> None:
    """The pages of every sequence; rows may be slices of longer ones."""
    if block_table is not None:
        names = 'sequences most_pages'
        check.shape(block_table, 'block_table', names, dtype=torch.int32, sequences=number)
        check.unit_stride(block_table, 'block_table')


def check_band(left: int, right: int) -> None:
    """Sides of the band: -1 is unbounded."""
    for name, side in (('left', left), ('right', right)):
        if side < -1:
            check.fail(name, 'must be -1 or more', str(side))


def bound(side: int) -> int:
    """A side of the band as kernels take it."""
    return UNBOUNDED if side < 0 else min(side, UNBOUNDED)


def lengths_int32(x: Tensor | None, name: str) -> Tensor | None:
    """Lengths and offsets as kernels take them."""
    if x is None:
        return None
    check.dtype(x, name, (torch.int32, torch.int64))
    return x.to(torch.int32)


def table_int32(x: Tensor | None, name: str) -> Tensor | None:
    """A table of pages or a list of keys as kernels of latent attention take it; slices of longer rows are copied."""
    found = lengths_int32(x, name)
    return None if found is None else found.contiguous()


def dense(x: Tensor, name: str) -> Tensor:
    """The tensor without gaps, for kernels that view it as rows; only its last dimension must be dense."""
    check.unit_stride(check.tensor(x, name), name)
    return x.contiguous()


# Foreign signatures -------------------------------------------------------------------------

#: Parameters of other libraries that have no meaning here, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple] = {
    'dropout_p': (0.0,),
    'alibi_slopes': (None,),
    'qv': (None,),
    'q_descale': (None,),
    'attention_chunk': (0, None),
    'cp_context': (None,),
    'pack_gqa': (None,),
    'scheduler_metadata': (None,),
    'rotary_cos': (None,),
    'rotary_sin': (None,),
    'rotary_seqlens': (None,),
    'rotary_interleaved': (True, False, None),
    'score_mod': (None,),
    'mask_mod': (None,),
    'aux_tensors': (None,),
    'cu_seqlens_k_new': (None,),
    'block_table': (None,),
    'page_table': (None,),
    'k_descale': (None,),
    'v_descale': (None,),
    'cu_seqlens_q': (None,),
    'max_seqlen_q': (None,),
    'leftpad_k': (None,),
    'min_seqlen_k': (None,),
    'zero_tensors': (False,),
    'block_sparse_tensors': (None,),
    'full_block_cnt': (None,),
    'full_block_idx': (None,),
    'mask_block_cnt': (None,),
    'mask_block_idx': (None,),
    'block_size': (None,),
}

SINKS = ('learnable_sink', 's_aux', 'attn_sink')


def take(foreign: dict[str, Any], value: Any, neutral: Any, *aliases: str) -> Any:
    """The value of a parameter that may be given under other names; they are removed from `foreign`."""
    for alias in aliases:
        if alias in foreign:
            other = foreign.pop(alias)
            if other is not None:
                if value is not neutral:
                    check.fail(alias, 'must not come with another name of the same argument', 'both')
                value = other
    return value


def take_margin(foreign: dict[str, Any]) -> int:
    """The SMs that attention leaves free; removed from `foreign`."""
    margin = foreign.pop('sm_margin', 0)
    check.integer(margin, 'sm_margin', least=0)
    return margin


def refuse(foreign: dict[str, Any]) -> None:
    """What is left of a foreign signature must be neutral."""
    for name, value in foreign.items():
        if name not in _NEUTRAL:
            check.fail(name, 'must be an argument of the function', 'one that is unknown')
        allowed = _NEUTRAL[name]
        if isinstance(value, Tensor) or value not in allowed:
            words = ' or '.join(str(a) for a in allowed)
            check.fail(name, f'must be {words}, since it has no meaning here', check.describe(value))


def window_of(causal: bool, window_size: Any) -> tuple[int, int]:
    """The band of `causal` and `window_size`; None is unbounded, too."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        check.fail('window_size', 'must be a pair (left, right)', check.describe(window_size))
    sides = []
    for side in window_size:
        if side is None:
            side = -1
        check.integer(side, 'window_size')
        if side < -1:
            check.fail('window_size', 'must hold numbers of keys, or -1 for no bound', str(tuple(window_size)))
        sides.append(side)
    return sides[0], 0 if causal else sides[1]
