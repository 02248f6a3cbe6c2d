"""The page `docs/troubleshooting.md`: every message in it is one that the library says."""

import logging
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cli.test_doctor import CASES, HEALTHY
from tile_kernels import moe, quant
from tile_kernels.cli.doctor import diagnose
from tile_kernels.core import cache, distribution
from tile_kernels.core.diagnoses import ROWS
from tile_kernels.core.errors import TileKernelsError
from tile_kernels.core.knobs import KNOBS
from tile_kernels.distributed import MoEDistributed
from tile_kernels.norm import norm_forward

PAGE = (Path(__file__).parents[1] / 'docs' / 'troubleshooting.md').read_text()
SOURCES = Path(__file__).parents[1] / 'tile_kernels'


def messages(heading):
    """The messages in the table of a section."""
    section = PAGE.partition(f'## {heading}\n')[2].partition('\n## ')[0]
    found = re.findall(r'^\| `([^`]+)` \|', section, re.MULTILINE)
    assert found
    return found


def said(call, *, error=TileKernelsError):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


DIAGNOSES = [text for change, *_ in CASES.values() for text in (diagnose(replace(HEALTHY, **change))[0].cause,)]


@pytest.mark.parametrize('message', messages('Installation') + messages('Settings'))
def test_the_doctor_says_it(message):
    assert any(message in cause for cause in DIAGNOSES)


def test_every_error_of_the_doctor_about_an_installation_is_on_the_page():
    first = messages('Installation')
    for name in (
        'other project',
        'torch',
        'tilelang missing',
        'tilelang old',
        'torch without CUDA',
        'GPU out of sight',
    ):
        (found,) = diagnose(replace(HEALTHY, **CASES[name][0]))
        assert any(message in found.cause for message in first), found.cause


@pytest.mark.parametrize('message', messages('The first call') + messages('The cache'))
def test_the_library_says_it(message):
    """In a diagnosis of the doctor, or in the source of a message that other tests provoke."""
    texts = [path.read_text() for path in (SOURCES / 'core').glob('*.py')]
    joined = [re.sub(r"'\s*\n\s*f?'", '', text) for text in texts]
    pattern = re.escape(message).replace('tvm_ffi', r'\{name\}')
    assert any(message in cause for cause in DIAGNOSES) or any(re.search(pattern, text) for text in joined)


def rows(**options):
    return torch.randn(4, 128, **options)


CALLS = {
    'must not require a gradient': lambda: norm_forward(rows(requires_grad=True), None, 1e-6, out=torch.empty(4, 128)),
    'must be on the device of': lambda: moe.topk_gating(rows(), 2, bias=torch.zeros(128, device='meta')),
    'must be contiguous': lambda: moe.group_count(torch.zeros(3, 4, dtype=torch.int64).T, 8),
    'did you mean': lambda: quant.per_token_cast(rows(), 'e4m3_1x128_f33'),
    'has no second derivative': lambda: second_derivative(),
    'cannot be batched by torch.vmap': lambda: torch.vmap(lambda x: quant.cast(x, torch.bfloat16))(
        rows(requires_grad=True)
    ),
    'needs a process group': lambda: MoEDistributed(4, 2),
}


def second_derivative():
    x = rows(requires_grad=True)
    y = norm_forward(x, None, 1e-6)[0].square().sum()
    torch.autograd.grad(torch.autograd.grad(y, x, create_graph=True)[0].sum(), x)


@pytest.mark.parametrize('message', messages('Calls'))
def test_the_call_says_it(message):
    if message == 'the exchange failed on rank':  # tests/distributed provokes it
        assert message in (SOURCES / 'distributed' / 'moe.py').read_text()
    else:
        assert message in said(CALLS[message])


@pytest.mark.parametrize('message', messages('Errors of TileLang, nvcc and CUDA'))
def test_the_table_of_errors_knows_it(message):
    assert any(re.search(row.pattern, message) for row in ROWS) or any(message in cause for cause in DIAGNOSES)


def test_what_the_page_advises_exists(tmp_path, caplog):
    assert distribution.ADVICE.startswith('run: pip uninstall tile-kernels open-tile-kernels')
    assert set(re.findall(r'`(TK_\w+)', PAGE)) <= {knob.env for knob in KNOBS.values()}
    (tmp_path / 'open').mkdir(mode=0o777)
    os.chmod(tmp_path / 'open', 0o777)
    assert 'every user can write to' in said(lambda: cache.check_folder(tmp_path / 'open'))
    with caplog.at_level(logging.WARNING), torch.no_grad():
        norm_forward(rows(), None, 1e-6)
    assert not caplog.records  # a call on a CPU compiles nothing and says nothing
