"""A process that compiles kernels for `precompile`, into the directory its argument names.

Pickled addresses of kernels come in; for each goes out the reason of its failure, or None.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from tile_kernels.core.knobs import knobs
from tile_kernels.core.precompile import Variant, attempt, quiet


def main() -> None:
    """Compile each kernel that comes in until the input ends."""
    answers = os.fdopen(os.dup(1), 'wb')
    os.dup2(2, 1)  # what a compiler prints is no answer
    with quiet(), knobs(cache_dir=Path(sys.argv[1]), disable_jit=False):
        while True:
            try:
                address = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            pickle.dump(attempt(Variant.at(*address)), answers)
            answers.flush()
