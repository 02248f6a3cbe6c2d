"""Twins of the dense product in half precision and of its gradients."""

from torch import Tensor


def gemm(a: Tensor, b: Tensor) -> Tensor:
    """D = A @ B.T, summed in float32."""
    return (a.float() @ b.float().T).to(a.dtype)


def gemm_bwd(dd: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `gemm`."""
    return (dd.float() @ b.float()).to(a.dtype), (dd.float().T @ a.float()).to(b.dtype)
