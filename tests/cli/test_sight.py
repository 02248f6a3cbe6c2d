"""`explain`, `show` and `calibrate` with what `sight` finds out, for ops and for kernels of a file."""

import json
from pathlib import Path

import pytest
import torch

NAME = 'tests.double'
MATMUL = f'{Path(__file__).parents[1] / "sight" / "matmul.py"}:matmul'
PROBLEM = ('M=512', 'N=512', 'K=512')


def test_explain_predicts(toy, cli):
    status, out, _ = cli('explain', NAME, 'num_tokens=1000')
    assert status == 0 and 'predicted: double_kernel on H200: ' in out and 'bound by launch' in out
    assert 'predicted' not in cli('explain', NAME, 'num_tokens=1000', '--no-predict')[1]
    assert 'no predicted time' in cli('explain', NAME, 'num_tokens=1000', '--device', 'a100')[1]


def test_explain_as_json(toy, cli):
    _, out, _ = cli('explain', NAME, 'num_tokens=1000', '--json')
    found = json.loads(out)
    assert found['launches'][0]['kernel'] == 'double_kernel' and found['prediction']['us'] > 5
    assert found['record'] is None and found['problem'] == ''


def test_explain_shows_the_latest_record(cli):
    from tile_kernels.sight.validate import latest

    record = next(r for r in latest() if r['op'] == 'quant.per_token_cast')
    _, out, _ = cli('explain', record['op'], '--case', record['case'], '--no-predict')
    assert f'measured: {record["us"]:.4g} us' in out and record['commit'] in out


def test_explain_a_kernel_of_a_file(cli):
    status, out, _ = cli('explain', MATMUL, *PROBLEM)
    assert status == 0 and out.startswith('relu on H200: ')
    assert json.loads(cli('explain', MATMUL, *PROBLEM, '--json')[1])['flops'] == {'float16': 2 * 512**3}
    status, _, err = cli('explain', MATMUL.replace(':matmul', ':other'))
    assert status == 1 and 'must define other' in err and err.count('\n') == 1
    assert 'does not exist' in cli('explain', 'nowhere.py:kernel')[2]


def test_explain_an_error_as_json(cli, tmp_path):
    text = tmp_path / 'error.txt'
    text.write_text('CUDA error: misaligned address')
    found = json.loads(cli('explain', '--error', str(text), '--json')[1])
    assert found['action'] and '16 bytes' in found['cause']


@pytest.mark.parametrize(
    ('part', 'words'),
    [
        ('layouts', 'A_shared'),
        ('passes', 'tl.LayoutInference'),
        ('pass=LayoutInference', '+'),
        ('annotated', 'totals of the grid'),
        ('lint', 'idle-tail'),
        ('tilelang', '@T.prim_func'),
    ],
)
def test_show_parts_of_a_kernel_of_a_file(cli, part, words):
    status, out, _ = cli('show', MATMUL, *PROBLEM, '--what', part)
    assert status == 0 and f'=== {part}: ' in out and words in out


def test_show_parts_of_an_op_as_json(toy, cli):
    _, out, _ = cli('show', NAME, 'num_tokens=64', '--what', 'cuda', '--what', 'lint', '--json')
    first, second = json.loads(out).values()
    assert '__global__' in first['cuda'] and isinstance(second['lint'], list)


def test_show_names_its_parts(toy, cli, capsys):
    with pytest.raises(SystemExit):
        cli('show', NAME, '--what', 'sass')
    assert 'must be one of tilelang, cuda' in capsys.readouterr().err
    assert '--arch must be a known GPU' in cli('show', NAME, '--what', 'lint', '--arch', 'sm_103')[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason='measures the GPU')
def test_calibrate_without_a_gpu_is_one_sentence(cli):
    status, _, err = cli('calibrate')
    assert status == 1 and 'there is no GPU to measure' in err and err.count('\n') == 1
