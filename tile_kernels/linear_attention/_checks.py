"""What the operands of linear attention must be, and the translation of foreign signatures."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
STATES = (torch.float32, torch.bfloat16)
CHUNK_SIZES = (16, 32, 64)
MAX_DIM = 256


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


def check_dim(extent: int, name: str) -> None:
    """A head dimension."""
    if extent < 16 or extent > MAX_DIM or extent % 16:
        check.fail(name, f'must be a multiple of 16 up to {MAX_DIM}', str(extent))


def check_heads(heads: int, value_heads: int) -> None:
    """Every head of q and k serves equally many value heads."""
    if heads == 0 or value_heads % heads:
        check.fail('heads of v', f'must be a multiple of the heads of q ({heads})', str(value_heads))


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int, int, int]:
    """Check q, k and v; returns batch, tokens, heads, value_heads, dim, value_dim."""
    batch, tokens, heads, dim = check.shape(q, 'q', 'batch tokens heads dim', dtype=HALVES)
    same = dict(batch=batch, tokens=tokens)
    check.shape(k, 'k', 'batch tokens heads dim', dtype=q.dtype, heads=heads, dim=dim, **same)
    *_, value_heads, value_dim = check.shape(v, 'v', 'batch tokens heads dim', dtype=q.dtype, **same)
    check_dim(dim, 'the last extent of q')
    check_dim(value_dim, 'the last extent of v')
    check_heads(heads, value_heads)
    check_vectors(q=q, k=k, v=v)
    check.same_device(q=q, k=k, v=v)
    return batch, tokens, heads, value_heads, dim, value_dim


def check_gate(g: Tensor | None, name: str, spec: str, like: Tensor, **known: int) -> None:
    """A gate or a factor of every token, of any floating dtype; `spec` names its dimensions."""
    if g is not None:
        check.shape(g, name, spec, dtype=FLOATS, **known)
        check.same_device(q=like, **{name: g})


def check_cu_seqlens(cu_seqlens: Tensor | None, like: Tensor) -> int:
    """Where packed sequences start, as kernels take it; returns the number of sequences."""
    if cu_seqlens is None:
        return like.shape[0]
    check.packed(cu_seqlens, 'cu_seqlens', 'sequences+1', torch.int32)
    check.at_least(cu_seqlens.shape[0], 1, 'the extent of cu_seqlens')
    if like.shape[0] != 1:
        check.fail('batch', 'must be 1 with cu_seqlens', str(like.shape[0]))
    check.same_device(q=like, cu_seqlens=cu_seqlens)
    return cu_seqlens.shape[0] - 1


def check_state(
    state: Tensor | None,
    number: int,
    heads: int,
    dim: int,
    value_dim: int,
    v_first: bool,
    name: str = 'initial_state',
    first: str = 'sequences',
) -> None:
    """States (sequences, heads, dim, value_dim), with `v_first` the last two swapped; float32 or bfloat16."""
    rows, columns = ('value_dim', 'dim') if v_first else ('dim', 'value_dim')
    known = {first: number, 'heads': heads, 'dim': dim, 'value_dim': value_dim}
    check.packed(state, name, f'{first} heads {rows} {columns}', STATES, **known)


def check_snapshots(states: Tensor | None, o_shape: torch.Size, dim: int, v_first: bool, like: Tensor) -> None:
    """Room for the state after every token of a result of this shape, in the layout of other states."""
    rows, columns = ('value_dim', 'dim') if v_first else ('dim', 'value_dim')
    known = dict(zip(('batch', 'tokens', 'heads', 'value_dim'), o_shape, strict=True), dim=dim)
    check.packed(states, 'intermediate_states', f'batch tokens heads {rows} {columns}', STATES, **known)
    check.same_device(q=like, intermediate_states=states)


# Fronts -------------------------------------------------------------------------------------


def lengths_int32(x: Tensor | None, name: str) -> Tensor | None:
    """Lengths and offsets as kernels take them."""
    if x is None:
        return None
    check.dtype(x, name, (torch.int32, torch.int64))
    return x.to(torch.int32).contiguous()


def dense(state: Tensor | None, name: str = 'initial_state') -> Tensor | None:
    """States as kernels take them: contiguous. They are small beside what is computed from them."""
    return None if state is None else check.tensor(state, name).contiguous()


def single(g: Any, name: str) -> Any:
    """A gate, or None, as kernels take it: they compute in float32, so float64 has no more to offer."""
    return g.float() if g is not None and check.tensor(g, name).dtype is torch.float64 else g


def scale_of(scale: float | None, dim: int) -> float:
    """The factor of o, dim ** -0.5 unless given."""
    if scale is None:
        return max(dim, 1) ** -0.5
    check.number(scale, 'scale')
    return scale


def chunk_of(chunk_size: int | None, dim: int) -> int:
    """Tokens of a chunk: 64 unless given; always 32 for wide heads, whose sums need the registers."""
    if chunk_size is not None:
        check.one_of(chunk_size, CHUNK_SIZES, 'chunk_size')
    return 32 if dim > 128 else chunk_size or 64


def refuse_gradient(**tensors: Tensor | None) -> None:
    """A recurrent form has no gradient: an input that needs one is an error."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            check.fail(name, 'must not require a gradient', 'one that does', hint='call the chunk form')


#: Parameters of other libraries that have no meaning here, and the values that ask for nothing; None: any value.
_NEUTRAL: dict[str, tuple | None] = {
    'cu_seqlens_cpu': None,
    'chunk_indices': None,
    'head_first': (False,),
    'cp_context': (None,),
    'disable_recompute': (False,),
    'return_intermediate_states': (False,),
    'use_exp2': (False, None),
    'reverse': (False,),
    'gk': (None,),
    'gv': (None,),
    'chunk_size': (None, *CHUNK_SIZES),
}


def refuse(foreign: dict[str, Any]) -> None:
    """What is left of a foreign signature must be neutral."""
    for name, value in foreign.items():
        if name not in _NEUTRAL:
            check.fail(name, 'must be an argument of the function', 'one that is unknown')
        allowed = _NEUTRAL[name]
        if allowed is not None and (isinstance(value, Tensor) or value not in allowed):
            words = ' or '.join(str(a) for a in allowed)
            check.fail(name, f'must be {words}, since it has no meaning here', check.describe(value))
