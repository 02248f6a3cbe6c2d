"""Twin of `moe.gate_logits` in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def gate_logits(hidden_states: Tensor, gate_weight: Tensor) -> Tensor:
    """Scores of all experts for every token, in float32."""
    return hidden_states.float() @ gate_weight.float().T


def gate_logits_bwd(dlogits: Tensor, hidden_states: Tensor, gate_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `gate_logits`."""
    dhidden, dgate_weight = dlogits @ gate_weight.float(), dlogits.T @ hidden_states.float()
    return dhidden.to(hidden_states.dtype), dgate_weight.to(gate_weight.dtype)
