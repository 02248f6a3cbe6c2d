"""Twins of the product with packed weights and of its gradient; they find every code by its bit position."""

import torch
from torch import Tensor

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Bits of half a word with mantissa, exponents and sign of an e2m1 code, for each of four pairs.
E2M1 = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 10, 11, 14))


def widen_codes(codes: Tensor, fmt: str, n: int, k: int) -> Tensor:
    """The numbers of the codes (n, k) in float32."""
    element = fmt.partition('_')[0]
    row, channel = torch.arange(n, device=codes.device)[:, None], torch.arange(k, device=codes.device)[None, :]
    depth = 64 if element in ('u4', 'e2m1') else 32
    inner = channel % depth
    lane = row % 8 * 4 + inner % 8 // 2
    pair, parity, step = row % 16 // 8 + inner % 16 // 8 * 2, channel % 2, inner // 16
    word = step if depth == 64 else step * 2 + pair // 2
    words = codes[row // 16, channel // depth, lane, word].long() & 0xFFFFFFFF
    if element == 'u4':
        return (words >> 4 * pair + 16 * parity & 15).float()
    if element == 'e2m1':
        half = words >> 16 * parity & 0xFFFF
        bits = torch.tensor(E2M1, device=codes.device)[pair]
        level = sum((half >> bits[..., place] & 1) << place for place in range(3))
        value = torch.tensor(LEVELS, device=codes.device)[level]
        return torch.where((half >> bits[..., 3] & 1) == 1, -value, value)
    byte = (words >> 8 * (pair % 2) + 16 * parity & 255).to(torch.uint8)
    return byte.view(torch.int8 if element == 's8' else torch.float8_e4m3fn).float()


def dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor | None, whole: Tensor | None, fmt: str, n: int, k: int
) -> Tensor:
    """The matrix (n, k) in float32."""
    element, block, *factor = fmt.split('_')
    values = widen_codes(codes, fmt, n, k)
    row, channel = torch.arange(n, device=codes.device)[:, None], torch.arange(k, device=codes.device)[None, :]
    rows, _, size = block.partition('x')
    group = channel // int(size) if size != 'k' else channel * 0
    if rows == '128':
        return values * scale[row // 128, group]
    per = scale.shape[3] // 2
    place = row // 16, group // per, row % 8, group % per * 2 + row % 16 // 8
    factors = scale[place]
    if factor == ['ue8m0']:
        factors = torch.ldexp(torch.ones_like(values), factors.int() - 127)
    elif factor == ['e4m3']:
        factors = factors.view(torch.float8_e4m3fn).float() * (1.0 if whole is None else whole)
    if element == 'u4':
        values = values - (8.0 if zero is None else zero[place].float())
    return values * factors.float()


def gemm_dequant(
    a: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    whole: Tensor | None,
    bias: Tensor | None,
    fmt: str,
    n: int,
) -> Tensor:
    """A @ W.T + bias, summed in float32."""
    d = a.float() @ dequantize(codes, scale, zero, whole, fmt, n, a.shape[1]).T
    return (d if bias is None else d + bias.float()).to(a.dtype)


def gemm_dequant_bwd(
    dd: Tensor, a: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, whole: Tensor | None, fmt: str, n: int
) -> Tensor:
    """Dd @ W."""
    return (dd.float() @ dequantize(codes, scale, zero, whole, fmt, n, a.shape[1])).to(a.dtype)
