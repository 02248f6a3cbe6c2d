"""What the ops of `tile_kernels.gemm` mean, in plain PyTorch."""

import torch
from torch import Tensor


def grouped_gemm(a: Tensor, b: Tensor, group_end: Tensor) -> Tensor:
    """The product of every row with the matrix of its group."""
    parts, start = [], 0
    for matrix, end in zip(b, group_end.tolist(), strict=True):
        parts.append(a[start:end].float() @ matrix.float().T)
        start = end
    behind = a.new_zeros(a.shape[0] - start, b.shape[1], dtype=torch.float32)
    return torch.cat([*parts, behind]).to(a.dtype)


def grouped_gemm_bwd(dd: Tensor, a: Tensor, b: Tensor, group_end: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `grouped_gemm`."""
    da, db, start = torch.zeros_like(a), torch.zeros_like(b), 0
    for group, end in enumerate(group_end.tolist()):
        da[start:end] = (dd[start:end].float() @ b[group].float()).to(a.dtype)
        db[group] = (dd[start:end].float().T @ a[start:end].float()).to(b.dtype)
        start = end
    return da, db


def grouped_gemm_swiglu(a: Tensor, b: Tensor, group_end: Tensor) -> Tensor:
    """SwiGLU of the product of every row with the matrix of its group."""
    gate, up = grouped_gemm(a.float(), b.float(), group_end).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(a.dtype)


def _widen(codes: Tensor, sf: Tensor, rows: int) -> Tensor:
    """Codes times their factors, which stand for blocks of `rows` x 128."""
    sf = sf.repeat_interleave(rows, dim=-2)[..., : codes.shape[-2], :]
    return codes.float() * sf.repeat_interleave(128, dim=-1)[..., : codes.shape[-1]]


def grouped_gemm_fp8(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, group_end: Tensor) -> Tensor:
    """The product of every row with the matrix of its group, of e4m3 operands with scale factors."""
    return grouped_gemm(_widen(a, a_sf, 1), _widen(b, b_sf, 128), group_end).bfloat16()


def grouped_gemm_fp8_swiglu_cast(
    a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, group_end: Tensor
) -> tuple[Tensor, Tensor]:
    """`grouped_gemm_fp8` with SwiGLU behind it, quantised in groups of 128 channels."""
    y = grouped_gemm_swiglu(_widen(a, a_sf, 1), _widen(b, b_sf, 128), group_end).unflatten(1, (-1, 128))
    y_sf = y.abs().amax(-1).clamp(min=1e-4) / 448.0
    codes = (y / y_sf.unsqueeze(-1)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.flatten(1), y_sf


def gemm(a: Tensor, b: Tensor) -> Tensor:
    """D = A @ B.T, summed in float32."""
    return (a.float() @ b.float().T).to(a.dtype)


def gemm_bwd(dd: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `gemm`."""
    return (dd.float() @ b.float()).to(a.dtype), (dd.float().T @ a.float()).to(b.dtype)


def gemm_fp8(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor) -> Tensor:
    """D = A @ B.T of e4m3 operands with scale factors."""
    return gemm(_widen(a, a_sf, 1), _widen(b, b_sf, 128)).bfloat16()
