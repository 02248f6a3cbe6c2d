"""A zoo of wrong kernels and their right look-alikes, one file per finding."""

from . import (
    assertion_failed,
    async_read_before_wait,
    barrier_divergence,
    data_race,
    deadlock,
    innocent,
    layout_dependent,
    limits,
    misaligned_access,
    out_of_bounds,
    reducer_misuse,
    uninitialized_read,
    unwritten_output,
)
from .specimen import INNOCENTS, SPECIMENS

__all__ = [
    'INNOCENTS',
    'SPECIMENS',
    'assertion_failed',
    'async_read_before_wait',
    'barrier_divergence',
    'data_race',
    'deadlock',
    'innocent',
    'layout_dependent',
    'limits',
    'misaligned_access',
    'out_of_bounds',
    'reducer_misuse',
    'uninitialized_read',
    'unwritten_output',
]
