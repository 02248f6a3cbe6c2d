"""The interpreter computes what the GPU computed (tools/gpu_outputs.py): the same bits, or within the op's bounds."""

import json
from pathlib import Path

import pytest

import tile_kernels
from tile_kernels import knobs
from tile_kernels.testing import contract
from tile_kernels.testing.differential import difference, run_case

for family in tile_kernels.FAMILIES:
    getattr(tile_kernels, family)

RECORD = json.loads((Path(__file__).parent / 'gpu_outputs.json').read_text())['cases']
CASES = {str(case): case for case in contract.contract_cases('smoke')}


def test_every_case_ran_on_a_gpu():
    assert set(RECORD) == set(CASES), 'run tools/gpu_outputs.py on a GPU'


@pytest.mark.parametrize('name', sorted(set(RECORD) & set(CASES)))
def test_interpreter_equals_the_gpu(name):
    with knobs(interpret=True):
        found = run_case(CASES[name], 'cpu')
    assert difference(CASES[name], RECORD[name], found) is None
