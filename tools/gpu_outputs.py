"""Write what the GPU computes for every smoke case to tests/interpreter/gpu_outputs.json, for the interpreter to equal.

python tools/gpu_outputs.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

import tile_kernels
from tile_kernels.testing import contract
from tile_kernels.testing.differential import run_case

DEFAULT = Path(__file__).parent.parent / 'tests' / 'interpreter' / 'gpu_outputs.json'


def main() -> int:
    """Run every smoke case on the GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, default=DEFAULT)
    out = parser.parse_args().out
    for family in tile_kernels.FAMILIES:
        getattr(tile_kernels, family)
    entries = {str(case): run_case(case, 'cuda') for case in contract.contract_cases('smoke')}
    record = {'device': torch.cuda.get_device_name(), 'torch': torch.__version__, 'cases': entries}
    out.write_text(json.dumps(record, indent=0, sort_keys=True) + '\n')
    print(f'{len(entries)} cases written to {out}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
