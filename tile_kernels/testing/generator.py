"""Shapes and inputs for test suites; `TK_FULL_TEST=1` adds empty, tiny and odd ones.

Tensors are on the GPU if there is one, and depend on the seed of torch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tile_kernels.core.gpus import cuda_gpu
from tile_kernels.core.knobs import knobs

Item = TypeVar('Item')

#: The assumed number of SMs without a GPU: the interpreter runs persistent kernels with this many blocks.
NUM_SMS_WITHOUT_GPU = 24


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def default_device(device: torch.device | str | None = None) -> torch.device:
    """The given device, else the GPU if there is one."""
    return torch.device(device or ('cuda' if torch.cuda.is_available() else 'cpu'))


def get_test_level() -> int:
    """2 with `TK_FULL_TEST=1`, else 1."""
    return 2 if knobs.full_test else 1


def is_precompile() -> bool:
    """Whether tests only compile kernels; always False, because `tile-kernels precompile` is a separate command."""
    return False


def generate_num_tokens(alignment: int = 1, is_benchmark: bool = False) -> list[int]:
    """Token counts: two odd ones rounded up to `alignment`; full tests also use 0."""
    empty = [0] if knobs.full_test and not is_benchmark else []
    return empty + [_align(num_tokens, alignment) for num_tokens in (4001, 8001)]


def generate_num_tokens_at_level(level: int, alignment: int = 1) -> list[int]:
    """Token counts by level: 512 and an odd one; from level 2 on also 0 and 1."""
    few = [0, 1] if level >= 2 else []
    return [_align(num_tokens, alignment) for num_tokens in (*few, 512, 8001)]


def generate_hidden_sizes(align: int = 64) -> list[int]:
    """Hidden sizes of real models that are multiples of `align`."""
    return [hidden for hidden in (576, 2048, 2560, 3072, 4096, 6144, 7168) if hidden % align == 0]


def generate_num_sms() -> list[int]:
    """SM counts for persistent kernels: some left free, all, and in full tests a single one."""
    count = cuda_gpu(torch.cuda.current_device()).sms if torch.cuda.is_available() else NUM_SMS_WITHOUT_GPU
    return ([1] if knobs.full_test else []) + [count - 20, count]


def generate_num_sms_at_level(level: int) -> list[int]:
    """SM counts by level: all; from level 1 on also an odd number less; from level 2 on also one."""
    count = cuda_gpu(torch.cuda.current_device()).sms if torch.cuda.is_available() else NUM_SMS_WITHOUT_GPU
    return [1, count - 19, count][2 - min(level, 2) :]


def generate_moe_params(is_benchmark: bool = False) -> Iterator[dict[str, int]]:
    """Expert-parallel settings: tokens sent by each rank, choices per token, experts per rank, ranks."""
    full = knobs.full_test and not is_benchmark
    if full:
        yield dict(num_send_tokens=0, num_topk=2, num_experts=9, num_ep_ranks=8)
    topks = (1, 2, 6, 7, 8, 9) if full else (2, 6, 8, 9)
    experts = (72, 256, 288, 384) if full else (72, 256)
    ranks = (1, 8, 64, 72, 256) if full else (8, 64)
    for num_topk, num_experts, num_ep_ranks in itertools.product(topks, experts, ranks):
        if num_experts % num_ep_ranks == 0:
            yield dict(
                num_send_tokens=4001,
                num_topk=num_topk,
                num_experts=num_experts // num_ep_ranks,
                num_ep_ranks=num_ep_ranks,
            )


def generate_topk_idx(params: Mapping[str, int], *, device: torch.device | str | None = None) -> Tensor:
    """Choices of the tokens that reach rank 0: int64 (num_tokens, num_topk), -1 for an expert on another rank."""
    num_tokens = params['num_send_tokens'] * params['num_ep_ranks']
    num_experts = params['num_experts'] * params['num_ep_ranks']
    scores = torch.rand(num_tokens, num_experts, dtype=torch.bfloat16, device=default_device(device))
    topk_idx = scores.topk(params['num_topk'], dim=1, sorted=False).indices
    topk_idx = topk_idx.masked_fill(topk_idx >= params['num_experts'], -1)
    return topk_idx[(topk_idx >= 0).any(dim=1)]


def generate_e5m6_inputs(
    num_tokens: int, hidden: int, dtype: torch.dtype, *, device: torch.device | str | None = None
) -> Iterator[tuple[Tensor, bool]]:
    """Inputs of e5m6 casts, each with a flag `special`: random values, then values around the smallest normal.

    The last column of the special inputs is the largest e5m6 value, so that their scale is exactly 1.
    """
    yield torch.randn(num_tokens, hidden, dtype=dtype, device=default_device(device)), False
    for value in (2.0**-20, 2.0**-14 * 63 / 64, 2.0**-14):
        x = torch.full((num_tokens, hidden), value, dtype=dtype, device=default_device(device))
        x[:, -1] = 65024
        yield x, True


def generate_rand_float(shape: Sequence[int], *, device: torch.device | str | None = None) -> Tensor:
    """Normal values times one random power of two from 2^-110 to 2^126, below an eighth of the largest float32."""
    exponent = int(torch.randint(-110, 127, ()))
    limit = torch.finfo(torch.float32).max / 8
    return torch.randn(*shape, device=default_device(device)).mul_(2.0**exponent).clamp_(-limit, limit)


def generate_samples(items: Sequence[Item], count: int, seed: int = 0) -> list[Item]:
    """A fixed random selection of at most `count` items, in their original order."""
    chosen = random.Random(seed).sample(range(len(items)), min(count, len(items)))
    return [items[i] for i in sorted(chosen)]


def generate_cast_config(*, use_e4m3_sf: bool = False) -> Iterator[dict[str, bool]]:
    """Every valid combination of the scale factor flags: layout, rounding, packing, e4m3 storage."""
    for col_major, round_sf, packed, e4m3_sf in itertools.product((False, True), repeat=4):
        if (packed and not round_sf) or (e4m3_sf and (round_sf or packed or not use_e4m3_sf)):
            continue
        config: dict[str, Any] = dict(
            use_tma_aligned_col_major_sf=col_major, round_sf=round_sf, use_packed_ue8m0=packed
        )
        yield config | (dict(use_e4m3_sf=e4m3_sf) if use_e4m3_sf else {})


def generate_psum_layout(
    num_experts: int, max_tokens_per_expert: int, alignment: int = 128, *, device: torch.device | str | None = None
) -> tuple[Tensor, int]:
    """Rows sorted by expert; the rows of each expert start at a multiple of `alignment`.

    Returns:
        `psum`, int32 (num_experts,), and the number of rows. Expert e owns the rows from `align(psum[e - 1])` up to
        `psum[e]`.
    """
    end, ends = 0, []
    for count in torch.randint(0, max_tokens_per_expert + 1, (num_experts,)).tolist():
        end = _align(end, alignment) + count
        ends.append(end)
    return torch.tensor(ends, dtype=torch.int32, device=default_device(device)), _align(end, alignment)
