"""Linear attention in plain PyTorch: sequential recurrences in float32."""

from tile_kernels.reference.linear_attention.causal_conv1d import causal_conv1d, causal_conv1d_bwd
from tile_kernels.reference.linear_attention.causal_conv1d_update import causal_conv1d_update
from tile_kernels.reference.linear_attention.chunk_gla import chunk_gla, chunk_gla_bwd
from tile_kernels.reference.linear_attention.chunk_simple_gla import chunk_simple_gla, chunk_simple_gla_bwd
from tile_kernels.reference.linear_attention.delta_rule import delta_rule, delta_rule_bwd
from tile_kernels.reference.linear_attention.delta_states import delta_states
from tile_kernels.reference.linear_attention.fused_recurrent_gla import fused_recurrent_gla
from tile_kernels.reference.linear_attention.gate import gate, gate_bwd
from tile_kernels.reference.linear_attention.gated_norm import gated_norm, gated_norm_bwd
from tile_kernels.reference.linear_attention.l2norm import l2norm, l2norm_bwd
from tile_kernels.reference.linear_attention.recurrent_delta import recurrent_delta
from tile_kernels.reference.linear_attention.recurrent_delta_pool import recurrent_delta_pool

__all__ = [
    'causal_conv1d',
    'causal_conv1d_bwd',
    'causal_conv1d_update',
    'chunk_gla',
    'chunk_gla_bwd',
    'chunk_simple_gla',
    'chunk_simple_gla_bwd',
    'delta_rule',
    'delta_rule_bwd',
    'delta_states',
    'fused_recurrent_gla',
    'gate',
    'gate_bwd',
    'gated_norm',
    'gated_norm_bwd',
    'l2norm',
    'l2norm_bwd',
    'recurrent_delta',
    'recurrent_delta_pool',
]


def __dir__() -> list[str]:
    return __all__
