"""Write the GPU's results of every smoke case to tests/interpreter/gpu_outputs.json, for the interpreter tests.

python tools/gpu_outputs.py --write-inputs FILE [--missing]  # on the test machine: random numbers depend on torch
python tools/gpu_outputs.py --inputs FILE [--out FILE]       # on the GPU machine

Cases without inputs keep their entries in the record; with `--missing`, inputs are written only for new cases.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from tile_kernels.testing import contract
from tile_kernels.testing.differential import Entry, arguments_of, run_case

DEFAULT = Path(__file__).parent.parent / 'tests' / 'interpreter' / 'gpu_outputs.json'


def text_of(origin: dict[str, str], entries: dict[str, Entry]) -> str:
    """The record as JSON, one line for each case."""
    cases = ',\n'.join(f'{json.dumps(name)}: {json.dumps(entry)}' for name, entry in sorted(entries.items()))
    return f'{json.dumps(origin)[:-1]}, "cases": {{\n{cases}\n}}}}\n'


def main() -> int:
    """Write the inputs, or run every smoke case on the GPU with them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--write-inputs', type=Path)
    parser.add_argument('--missing', action='store_true', help='inputs of cases that are not in the record')
    parser.add_argument('--inputs', type=Path)
    parser.add_argument('--out', type=Path, default=DEFAULT)
    args = parser.parse_args()
    cases = {str(case): case for case in contract.contract_cases('smoke', variants=True)}
    recorded = json.loads(args.out.read_text())['cases'] if args.out.exists() else {}
    if args.write_inputs:
        wanted = cases.keys() - recorded.keys() if args.missing else cases.keys()
        torch.save({name: arguments_of(cases[name]) for name in sorted(wanted)}, args.write_inputs)
        print(f'inputs of {len(wanted)} cases written to {args.write_inputs}')
        return 0
    inputs = torch.load(args.inputs, weights_only=False) if args.inputs else dict.fromkeys(cases)
    ran = {name: run_case(cases[name], 'cuda', given) for name, given in inputs.items()}
    entries = {name: entry for name, entry in recorded.items() if name in cases} | ran
    args.out.write_text(text_of({'device': torch.cuda.get_device_name(), 'torch': torch.__version__}, entries))
    print(f'{len(ran)} cases run, {len(entries)} written to {args.out}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
