"""A process that compiles kernels for `precompile` into the directory given as its argument.

It reads pickled addresses of kernels. For each it writes the reason of the failure, or None.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from tile_kernels.core.knobs import knobs
from tile_kernels.core.nvcc import quiet
from tile_kernels.core.precompile import Variant, attempt


def main() -> None:
    """Compile each kernel read from the input until the input ends."""
    answers = os.fdopen(os.dup(1), 'wb')
    os.dup2(2, 1)  # compiler output must not mix with the answers
    with quiet(), knobs(cache_dir=Path(sys.argv[1]), disable_jit=False):
        while True:
            try:
                address = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            pickle.dump(attempt(Variant.at(*address)), answers)
            answers.flush()
