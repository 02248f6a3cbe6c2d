"""The programs of this family run and reach what they claim."""

import runpy
from pathlib import Path

import pytest
import torch

from tile_kernels import knobs

EXAMPLES = Path(__file__).parents[2] / 'examples'


@pytest.mark.parametrize('interpret', [False, True])
def test_paged_decode_equals_dense_attention(interpret, capsys):
    with knobs(interpret=interpret):
        runpy.run_path(str(EXAMPLES / 'paged_decode.py'), run_name='__main__')
    assert '24 decoded tokens' in capsys.readouterr().out


def test_a_transformer_trains_as_with_torch(capsys):
    state = torch.random.get_rng_state()
    runpy.run_path(str(EXAMPLES / 'attention.py'), run_name='__main__')
    torch.random.set_rng_state(state)
    assert 'with tile_kernels' in capsys.readouterr().out
