"""Twin of gated linear attention: the recurrence, token by token."""

from torch import Tensor

from tile_kernels.reference.linear_attention.chunk_simple_gla import gradient, run


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    output_final_state: bool = False,
    state_v_first: bool = False,
    segment: int = 0,
) -> tuple[Tensor, Tensor]:
    """The recurrence in float32; segments have no effect."""
    return run(q, k, v, g, None, initial_state, cu_seqlens, scale, output_final_state, state_v_first)


def chunk_gla_bwd(
    do: Tensor,
    dfinal_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    output_final_state: bool = False,
    state_v_first: bool = False,
    segment: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the recurrence in float32; the last is (0,) without an initial state."""
    others = (g, None, initial_state, cu_seqlens, scale, output_final_state, state_v_first)
    dq, dk, dv, dg, _, dstate = gradient(do, dfinal_state, q, k, v, *others)
    return dq, dk, dv, dg, dstate
