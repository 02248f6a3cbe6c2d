"""The delta rule token by token on a pool of states."""

from tile_kernels.reference.linear_attention.recurrent_delta import recurrent_delta_pool as recurrent_delta_pool
