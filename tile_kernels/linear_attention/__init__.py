"""Linear attention: recurrences of a state per head, in chunks for training and one token at a time for decoding.

Smoke cases agree on an H200; `docs/notes/first-gpu-run.md` has times and gaps.
"""

from tile_kernels.linear_attention.causal_conv1d import causal_conv1d, causal_conv1d_bwd
from tile_kernels.linear_attention.causal_conv1d_update import causal_conv1d_update
from tile_kernels.linear_attention.chunk_gla import chunk_gla, chunk_gla_bwd
from tile_kernels.linear_attention.chunk_linear_attn import chunk_linear_attn
from tile_kernels.linear_attention.chunk_retention import chunk_retention
from tile_kernels.linear_attention.chunk_simple_gla import chunk_simple_gla, chunk_simple_gla_bwd
from tile_kernels.linear_attention.delta_rule import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn,
    delta_rule,
    delta_rule_bwd,
)
from tile_kernels.linear_attention.delta_states import delta_states
from tile_kernels.linear_attention.fused_recurrent import fused_recurrent_gated_delta_rule
from tile_kernels.linear_attention.fused_recurrent_gla import fused_recurrent_gla
from tile_kernels.linear_attention.fused_recurrent_simple_gla import fused_recurrent_simple_gla
from tile_kernels.linear_attention.gate import gate, gate_bwd
from tile_kernels.linear_attention.gated_norm import gated_norm, gated_norm_bwd
from tile_kernels.linear_attention.kda import chunk_kda, fused_recurrent_kda
from tile_kernels.linear_attention.l2norm import l2norm, l2norm_bwd
from tile_kernels.linear_attention.mamba_chunk_scan_combined import mamba_chunk_scan_combined
from tile_kernels.linear_attention.recurrent_delta import recurrent_delta
from tile_kernels.linear_attention.recurrent_delta_pool import recurrent_delta_pool
from tile_kernels.linear_attention.selective_state_update import selective_state_update

__all__ = [
    'causal_conv1d',
    'causal_conv1d_bwd',
    'causal_conv1d_update',
    'chunk_delta_rule',
    'chunk_gated_delta_rule',
    'chunk_gdn',
    'chunk_gla',
    'chunk_gla_bwd',
    'chunk_kda',
    'chunk_linear_attn',
    'chunk_retention',
    'chunk_simple_gla',
    'chunk_simple_gla_bwd',
    'delta_rule',
    'delta_rule_bwd',
    'delta_states',
    'fused_recurrent_gated_delta_rule',
    'fused_recurrent_gla',
    'fused_recurrent_kda',
    'fused_recurrent_simple_gla',
    'gate',
    'gate_bwd',
    'gated_norm',
    'gated_norm_bwd',
    'l2norm',
    'l2norm_bwd',
    'mamba_chunk_scan_combined',
    'recurrent_delta',
    'recurrent_delta_pool',
    'selective_state_update',
]


def __dir__() -> list[str]:
    return __all__
