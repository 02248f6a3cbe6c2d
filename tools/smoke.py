"""Run every op once on each smoke case on the GPU and compare with its twin; small enough for compute-sanitizer.

compute-sanitizer --tool memcheck python tools/smoke.py [OP ...]
"""

from __future__ import annotations

import sys

import torch

import tile_kernels
from tile_kernels.core.op import ops
from tile_kernels.testing import contract


def main() -> int:
    """Check the kernels of the named ops, or of all."""
    for family in tile_kernels.FAMILIES:
        getattr(tile_kernels, family)
    wanted = sys.argv[1:] or list(ops)
    cases = [case for case in contract.contract_cases('smoke') if case.op.name in wanted]
    for case in cases:
        contract.check_kernel(case.op, case.case, 'cuda')
    torch.cuda.synchronize()
    print(f'{len(cases)} smoke cases of {len(wanted)} ops agree with their twins')
    return 0


if __name__ == '__main__':
    sys.exit(main())
