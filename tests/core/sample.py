"""Three small ops that exercise every feature of `@op`: a differentiable one, a quantising one, an in-place one."""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, Out, empty, op


def choose(hidden: int, mult: int, size: int) -> dict:
    return {'num_threads': 128 if size > 1 else 64}


@kernel(choose=choose, space={'num_threads': (64, 128)})
def spread_kernel(hidden: int, mult: int, *, num_threads: int):
    num_tokens, stride = T.dynamic('num_tokens'), T.dynamic('stride')

    @T.prim_func
    def spread(
        x: T.StridedTensor[(num_tokens, hidden), (stride, 1), T.float32],
        y: T.Tensor[(num_tokens, mult, hidden), T.float32],
        factor: T.float32,
    ):
        with T.Kernel(num_tokens, threads=num_threads) as row:
            for c, j in T.Parallel(mult, hidden):
                y[row, c, j] = x[row, j] * factor

    return spread


def gather_twin(dy: Tensor, mult: int = 4, factor: float = 1.0) -> Tensor:
    return dy.sum(1) * factor


def spread_twin(x: Tensor, mult: int = 4, factor: float = 1.0) -> Tensor:
    return (x * factor).unsqueeze(1).repeat(1, mult, 1)


def unit_cast_twin(x: Tensor, fmt: QuantFormat) -> QuantTensor:
    y = fmt.empty(*x.shape, x.device)
    y.data.copy_(x.to(fmt.data.torch))
    y.sf.fill_(1)
    return y


def negate_twin(x: Tensor, mask: Tensor | None = None) -> None:
    x.copy_(torch.where(mask, -x, x) if mask is not None else -x)


@op(outputs='dx', twin=gather_twin)
def gather(dy: Tensor, mult: int = 4, factor: float = 1.0) -> Tensor:
    """Sum the copies."""
    num_tokens, _, hidden = check.shape(dy, 'dy', 'num_tokens mult hidden', dtype=torch.float32, mult=mult)
    return dy.new_empty(num_tokens, hidden)


@op(outputs='y', backward=gather, twin=spread_twin)
def spread(x: Tensor, mult: int = 4, factor: float = 1.0) -> Tensor:
    """Copy each row `mult` times."""
    num_tokens, hidden = check.shape(x, 'x', 'num_tokens hidden', dtype=torch.float32)
    check.unit_stride(x, 'x')
    y = x.new_empty(num_tokens, mult, hidden)
    launch(spread_kernel, (hidden, mult), x, y, factor)
    return y


@op(outputs='y y_sf', twin=unit_cast_twin)
def unit_cast(x: Tensor, fmt: QuantFormat) -> QuantTensor:
    """Cast without scaling."""
    num_tokens, hidden = check.shape(x, 'x', 'num_tokens hidden', dtype=(torch.float32, torch.bfloat16))
    return fmt.empty(num_tokens, hidden, x.device)


@op(twin=negate_twin)
def negate_(x: Mut, mask: Tensor | None = None) -> None:
    """Flip signs in place."""
    check.contiguous(x, 'x')


spread.cases(
    make=lambda num_tokens, mult: {'x': torch.randn(num_tokens, 32), 'mult': mult},
    smoke=grid(num_tokens=[0, 1, 5], mult=[2]),
    bench=grid(num_tokens=[4096], mult=[4]),
)


@op(outputs='y', twin=lambda x, shift=0.0: x + shift, backward='identity')
def through(x: Tensor, shift: float = 0.0) -> Tensor:
    """Add a number; its gradient is declared to be that of the result."""
    check.contiguous(x, 'x')
    return torch.empty_like(x)


def total_twin(xs: list[Tensor], q: QuantTensor | None = None, dims: tuple[int, ...] = (0,)) -> Tensor:
    parts = list(xs) if q is None else [*xs, q.data.float() * q.sf]
    return torch.stack([x.sum(dims) for x in parts]).sum(0)


@op(outputs='y', twin=total_twin)
def total(xs: list[Tensor], q: QuantTensor | None = None, dims: tuple[int, ...] = (0,)) -> Tensor:
    """Sum tensors over some dimensions."""
    for i, x in enumerate(xs):
        check.shape(x, f'xs[{i}]', 'num_tokens hidden', dtype=torch.float32)
    return xs[0].new_empty([n for i, n in enumerate(xs[0].shape) if i not in dims])


def zero_twin(xs: list[Tensor]) -> None:
    for x in xs:
        x.zero_()


@op(twin=zero_twin)
def zero_(xs: list[Out]) -> None:
    """Set tensors to zero."""
    for i, x in enumerate(xs):
        check.contiguous(x, f'xs[{i}]')


def scaled_twin(x: Tensor, factor: float = 2.0) -> tuple[Tensor, Tensor]:
    return x * factor, x.sum(-1)


@op(outputs='y total', twin=scaled_twin, out=True)
def scaled(x: Tensor, factor: float = 2.0) -> tuple[Tensor, Tensor]:
    """Multiply, and sum the rows of what was given."""
    num_tokens, _ = check.shape(x, 'x', 'num_tokens hidden', dtype=torch.float32)
    y = empty('y', x.shape, x.dtype, x.device)
    total = empty('total', (num_tokens,), x.dtype, x.device)
    return y, total


scaled.cases(
    make=lambda num_tokens: {'x': torch.randn(num_tokens, 32)},
    smoke=grid(num_tokens=[0, 1, 5]),
    bench=grid(num_tokens=[4096]),
)


@op(outputs='y', twin=lambda x, factor: x * factor)
def _doubled(x: Tensor, factor: float) -> Tensor:
    """Multiply."""
    check.contiguous(x, 'x')
    return torch.empty_like(x)


@_doubled.public
def doubled(x: Tensor, times: int = 1) -> Tensor:
    """Double `times` times.

    Args:
        x: any tensor.
        times: how often.
    """
    return doubled.call(x, float(2**times))


@op(outputs='y', twin=lambda x: x.add_(1).clone(), out=True)
def bump(x: Mut) -> Tensor:
    """Add one in place, and copy the result."""
    check.contiguous(x, 'x')
    return empty('y', x.shape, x.dtype, x.device)
