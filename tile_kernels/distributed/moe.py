"""Expert parallelism: every rank holds some experts, and tokens are sent to them and back.

    route_tokens    sort the rows of all slots by expert, send each rank its part, sort what arrives by expert
    gather_output   the inverse, then the weighted sum of every token

Rank r holds the experts [r * num_local, (r + 1) * num_local). Sorted by expert, the rows for a rank are contiguous, so
one all-to-all sends them. The all-to-all needs the number of rows for each rank, which only the device knows. So the
host waits once per layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tile_kernels.core import check
from tile_kernels.core.errors import ArgumentError, TileKernelsError
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.distributed.symmetric import SymmetricRows, shared_rows
from tile_kernels.moe.expand_to_fused import expand_to_fused
from tile_kernels.moe.reduce_fused import reduce_fused
from tile_kernels.moe.token_to_expert_map import RoutingMap, token_to_expert_map
from tile_kernels.quant.dequantize import dequantize
from tile_kernels.quant.per_token_cast import per_token_cast

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

#: Format of rows that are sent as fp8.
PAYLOAD = QuantFormat.parse('e4m3_1x128_f32')


class RoutedTokens(NamedTuple):
    """Rows received for the experts of this rank.

    Attributes:
        hidden: (num_rows, hidden) rows in the order of the local experts.
        expert_end: (num_local_experts,) int32, where the rows of each expert end; what `gemm.grouped_gemm` takes.
        expert_indices: (num_rows,) int32, the local expert of each row.
    """

    hidden: Tensor
    expert_end: Tensor
    expert_indices: Tensor


class _Trip(NamedTuple):
    """State for `gather_output`: the map of own tokens, the sizes of both directions, the map of received rows."""

    home: RoutingMap
    send_sizes: list[int]
    receive_sizes: list[int]
    arrivals: RoutingMap


def _explained(fn: Callable) -> Callable:
    """Add the rank and likely causes to the error of a failed exchange; torch only names a socket or a timeout."""

    @functools.wraps(fn)
    def _call(self: MoEDistributed, *args: Any, **kwargs: Any) -> Any:
        try:
            return fn(self, *args, **kwargs)
        except ArgumentError:
            raise
        except (RuntimeError, dist.DistBackendError) as error:
            raise TileKernelsError(
                f'MoEDistributed: the exchange failed on rank {self.rank} of {self.world_size}; another '
                f'rank has died, has left the layer or did not arrive in time ({str(error).splitlines()[0]})'
            ) from error

    return _call


class _Exchange:
    """One asynchronous all-to-all of rows, with a `begin` and a `finish`. Its backward is the inverse all-to-all.

    Work between `begin` and `finish` overlaps the communication. In the backward pass, the backward of that work does.
    """

    def __init__(
        self, send: list[int], receive: list[int], group: Any, fp8: bool = False, shared: SymmetricRows | None = None
    ) -> None:
        self.send, self.receive, self.group, self.fp8, self.shared = send, receive, group, fp8, shared
        self.dtype = torch.bfloat16  # of the rows; set by `begin`
        self._flying: list[tuple[Tensor, Tensor, Any]] = []  # sent rows, received rows, handle

    def begin(self, rows: Tensor) -> Tensor:
        """Send the rows; returns an empty tensor that `finish` takes."""
        return _Begin.apply(rows, self)

    def finish(self, token: Tensor) -> Tensor:
        """Wait for the rows and return them."""
        return _Finish.apply(token, self)

    def start(self, rows: Tensor, back: bool = False) -> None:
        """Start the all-to-all of one tensor of rows."""
        send, receive = (self.receive, self.send) if back else (self.send, self.receive)
        if self.shared is not None and rows.is_cuda:
            self._flying.append((rows, self.shared.exchange(rows, send, receive), None))
            return
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        rows = rows.contiguous()
        self._flying.append((rows, out, dist.all_to_all_single(out, rows, receive, send, self.group, async_op=True)))

    def arrived(self) -> list[Tensor]:
        """Wait for all communication in flight; returns the received tensors."""
        flying, self._flying = self._flying, []
        for _, _, work in flying:
            if work is not None:
                work.wait()
        return [out for _, out, _ in flying]


class _Begin(torch.autograd.Function):
    """The first half of an exchange. The halves pass rows outside autograd, because their shapes differ."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange, exchange.dtype = exchange, rows.dtype
        if exchange.fp8:
            codes, sf = per_token_cast.call(rows, PAYLOAD)
            exchange.start(codes.view(torch.uint8))
            exchange.start(sf)
        else:
            exchange.start(rows)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, dtoken: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.arrived()[0], None


class _Finish(torch.autograd.Function):
    """The second half of an exchange."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        ctx.save_for_backward(token)
        if not exchange.fp8:
            return exchange.arrived()[0]
        codes, sf = exchange.arrived()
        return dequantize(QuantTensor(codes.view(PAYLOAD.data.torch), sf, PAYLOAD), exchange.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start(dy, back=True)
        return torch.zeros_like(ctx.saved_tensors[0]), None


class PendingTokens:
    """Tokens of an exchange in flight; `wait` returns what `route_tokens` returns. Work before it overlaps."""

    def __init__(self, router: MoEDistributed, exchange: _Exchange, token: Tensor, home: RoutingMap, arriving: Tensor):
        self._router, self._exchange, self._token, self._home, self._arriving = router, exchange, token, home, arriving

    def wait(self) -> RoutedTokens:
        """Wait for the rows of the experts of this rank."""
        return self._router._receive(self._exchange, self._token, self._home, self._arriving)


class MoEDistributed:
    """Send tokens to the ranks that hold their experts, and gather the results.

    Args:
        num_experts: number of experts of all ranks; a multiple of the world size.
        topk: experts of a token.
        strategy: 'alltoall', or 'symmetric': ranks on GPUs of one node write rows into each other's memory. Results are
            the same. Where the ranks cannot share memory, it warns once and uses 'alltoall'.
        group: process group or device mesh of one dimension, by default all ranks; the timeout of the group applies.
        max_tokens: for 'symmetric', most tokens of a rank. Each rank keeps buffers for max_tokens * topk rows; to
            receive more is an error on all ranks.
        fp8_payload: quantize rows before they are sent (e4m3, one scale factor per 128 channels): half the bytes.
    """

    def __init__(
        self,
        num_experts: int = 256,
        topk: int = 8,
        strategy: str = 'alltoall',
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        max_tokens: int | None = None,
        fp8_payload: bool = False,
    ) -> None:
        check.one_of(strategy, ('alltoall', 'symmetric'), 'strategy')
        check.together(symmetric=strategy == 'symmetric' or None, max_tokens=max_tokens)
        if not dist.is_initialized():
            raise ArgumentError(
                'MoEDistributed: needs a process group, got none; call torch.distributed.init_process_group'
            )
        check.at_least(num_experts, 1, 'num_experts')
        check.at_least(topk, 1, 'topk')
        check.at_most(topk, num_experts, 'topk')
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                hint = f'pass mesh[{(group.mesh_dim_names or ("name",))[-1]!r}]'
                check.fail('group', 'must be a mesh of one dimension', f'{group.ndim} dimensions', hint)
            group = group.get_group()
        self.group = group if group is not None else dist.group.WORLD
        if not isinstance(self.group, dist.ProcessGroup):
            check.fail('group', 'must be a process group this rank belongs to', check.describe(group))
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if num_experts % self.world_size:
            raise ArgumentError(
                f'MoEDistributed: num_experts must be a multiple of the {self.world_size} ranks, got {num_experts}'
            )
        self.num_experts, self.topk, self.fp8_payload = num_experts, topk, fp8_payload
        self.num_local_experts = num_experts // self.world_size
        self._trip: _Trip | None = None
        self._shared: SymmetricRows | None = None
        if max_tokens is not None:
            check.integer(max_tokens, 'max_tokens', 1)
            self._shared = shared_rows(self.group, max_tokens * topk)

    def route_tokens(self, hidden: Tensor, topk_indices: Tensor, topk_scores: Tensor | None = None) -> RoutedTokens:
        """Send the row of every slot to the rank of its expert; differentiable in `hidden`. All ranks call it together.

        Args:
            hidden: (num_tokens, hidden) bfloat16, float16 or float32; a rank may have no token.
            topk_indices: (num_tokens, topk) int64 or int32 experts among all; -1: slot not routed.
            topk_scores: not used here; `gather_output` takes the weights.
        """
        return self.send_tokens(hidden, topk_indices).wait()

    @_explained
    def send_tokens(self, hidden: Tensor, topk_indices: Tensor) -> PendingTokens:
        """`route_tokens` without waiting for the rows; `wait` of the result does that."""
        # check everything before the first exchange: a rank that raises later would leave the others waiting
        num_tokens, _ = check.shape(hidden, 'hidden', 'num_tokens hidden', dtype=FLOATS)
        known = dict(num_tokens=num_tokens, topk=self.topk)
        check.shape(topk_indices, 'topk_indices', 'num_tokens topk', dtype=(torch.int64, torch.int32), **known)
        check.same_device(hidden=hidden, topk_indices=topk_indices)
        home = token_to_expert_map(topk_indices, self.num_experts)
        counts = home.num_tokens_per_expert.view(self.world_size, self.num_local_experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts.contiguous(), group=self.group)
        send_sizes, receive_sizes = counts.sum(1).tolist(), arriving.sum(1).tolist()
        exchange = _Exchange(send_sizes, receive_sizes, self.group, self.fp8_payload, self._shared)
        placed = home.pos_to_expert[: sum(send_sizes)]
        token = exchange.begin(expand_to_fused(hidden.contiguous(), home.token_topk_to_pos, placed))
        return PendingTokens(self, exchange, token, home, arriving)

    @_explained
    def _receive(self, exchange: _Exchange, token: Tensor, home: RoutingMap, arriving: Tensor) -> RoutedTokens:
        """Wait for the rows and sort them by expert."""
        rows = exchange.finish(token)
        experts = torch.arange(self.num_local_experts, device=rows.device).repeat(self.world_size)
        experts = experts.repeat_interleave(arriving.flatten().long(), output_size=rows.shape[0])
        arrivals = token_to_expert_map(experts.unsqueeze(1), self.num_local_experts)
        self._trip = _Trip(home, exchange.send, exchange.receive, arrivals)
        rows = expand_to_fused(rows, arrivals.token_topk_to_pos, arrivals.pos_to_expert)
        return RoutedTokens(rows, arrivals.expert_end, arrivals.pos_to_expert)

    @_explained
    def gather_output(self, expert_output: Tensor, topk_scores: Tensor | None = None) -> Tensor:
        """Send results back and sum them per token; differentiable in both arguments. All ranks call it together.

        Args:
            expert_output: (num_rows, out_hidden) of the experts, in the order `route_tokens` returned its rows in.
            topk_scores: (num_tokens, topk) float32 weights of the sum, None for a plain one.

        Returns:
            (num_tokens, out_hidden); 0 for tokens without an expert.
        """
        if self._trip is None:
            raise ArgumentError('MoEDistributed: gather_output must follow route_tokens')
        trip = self._trip
        num_rows, (num_tokens, topk) = sum(trip.receive_sizes), trip.home.token_topk_to_pos.shape
        check.shape(expert_output, 'expert_output', 'num_rows out_hidden', dtype=FLOATS, num_rows=num_rows)
        check.packed(topk_scores, 'topk_scores', 'num_tokens topk', torch.float32, num_tokens=num_tokens, topk=topk)
        check.same_device(expert_output=expert_output, topk_scores=topk_scores)
        self._trip = None
        rows = reduce_fused(expert_output.contiguous(), None, trip.arrivals.token_topk_to_pos)
        exchange = _Exchange(trip.receive_sizes, trip.send_sizes, self.group, shared=self._shared)
        rows = exchange.finish(exchange.begin(rows))
        return reduce_fused(rows, topk_scores, trip.home.token_topk_to_pos)
