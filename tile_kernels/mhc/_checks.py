"""Host code that several ops use: checks of tensors with any leading shape, and how kernels see them."""

import math

import torch
from torch import Tensor

from tile_kernels.core import check

BF16, F32 = torch.bfloat16, torch.float32

#: Numbers of streams that kernels are built for.
STREAMS = (2, 4, 8)

#: Hidden sizes are multiples of this.
HIDDEN_MULTIPLE = 64


def num_mixes(num_streams: int, head: bool = False) -> int:
    """Coefficients of a token."""
    return num_streams if head else num_streams * (2 + num_streams)


# Checks -------------------------------------------------------------------------------------


def lead_of(
    x: Tensor, name: str, spec: str, dtype: torch.dtype, lead: tuple[int, ...] | None = None, **known: int
) -> tuple[int, ...]:
    """Check a contiguous tensor (*lead, *spec) and return its leading shape; keywords give extents of spec."""
    check.dtype(x, name, dtype)
    names, shape = spec.split(), tuple(x.shape)
    rank = len(shape) - len(names)
    rule = f'must be (..., {", ".join(names)})'
    if rank < 0:
        check.fail(name, rule, check.describe(x))
    for dim, extent in zip(names, shape[rank:], strict=True):
        if known.get(dim, extent) != extent:
            check.fail(name, f'{rule} with {dim} = {known[dim]}', check.describe(x))
    if lead is not None and shape[:rank] != lead:
        check.fail(name, f'{rule} with the leading shape {lead}', check.describe(x))
    check.contiguous(x, name)
    return shape[:rank]


def check_streams(num_streams: int, hidden: int) -> None:
    """Check the number of streams and hidden."""
    check.one_of(num_streams, STREAMS, 'the number of streams')
    check.at_least(hidden, HIDDEN_MULTIPLE, 'hidden')
    check.multiple(hidden, HIDDEN_MULTIPLE, 'hidden')


def check_scale_and_base(scale: Tensor, base: Tensor, num_streams: int, head: bool = False) -> None:
    """Check the parameters that turn a projection into coefficients."""
    check.shape(scale, 'scale', 'num_scales', dtype=F32, num_scales=1 if head else 3)
    check.shape(base, 'base', 'num_mixes', dtype=F32, num_mixes=num_mixes(num_streams, head))
    check.contiguous(scale, 'scale')
    check.contiguous(base, 'base')


# Arguments of kernels -----------------------------------------------------------------------


def flat(x: Tensor, lead: tuple[int, ...], *inner: int) -> Tensor:
    """`x` with one dimension instead of the leading ones, and `inner` for the others."""
    shape = (math.prod(lead), *inner)
    return x if tuple(x.shape) == shape else x.view(shape)  # a view costs a replayed call a microsecond


def vector_width(*tensors: Tensor | None) -> int:
    """Elements of the widest access that is aligned in all tensors (of one dtype), up to 16 bytes."""
    given = [x for x in tensors if x is not None]
    return check.vector_bytes(*given) // given[0].element_size()


def mix_width(num_streams: int, *mixes: Tensor) -> int:
    """Elements of an access to the float32 coefficients of a token, in rows of `num_streams` or of one."""
    return math.gcd(num_streams, vector_width(*(mix.squeeze(-1) for mix in mixes)))


# Arguments of low-level functions -------------------------------------------------------------


def reshaped(x: Tensor, name: str, *shape: int) -> Tensor:
    """A float32 tensor with another shape of as many elements."""
    check.dtype(x, name, F32)
    check.contiguous(x, name)
    if x.numel() != math.prod(shape):
        check.fail(name, f'must have the elements of {shape}', check.describe(x))
    return x.view(shape)


def check_first_extent(x: Tensor, name: str, extent: int) -> None:
    """The first dimension of `x` must have this extent."""
    if check.tensor(x, name).shape[:1] != (extent,):
        check.fail(name, f'must have {extent} entries in its first dimension', check.describe(x))
