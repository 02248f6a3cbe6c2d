"""`tools/model_layers.py` on small layers: every way to run a layer agrees, and what differs is not timed."""

import json

import pytest
import torch

pytest.importorskip('transformers')

from tile_kernels.core.knobs import knobs
from tile_kernels.core.workers import Failed
from tools import model_layers
from tools.docs.pages import layer_tables


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_of_a_layer_is_compared_and_saved(tmp_path, capsys):
    out = tmp_path / 'layers.jsonl'
    full = knobs.full_test
    names = list(model_layers.MODELS) if full else ['deepseek-v3', 'gemma-2-9b']
    shapes = list(model_layers.SHAPES) if full else ['decode 64']
    assert model_layers.main(['--models', *names, '--shapes', *shapes, '--json', str(out)]) == 0
    found = {(r['model'], r['shape'], r['how']): r for r in records(out)}
    assert found.keys() == {(m, s, h) for m in names for s in shapes for h in model_layers.HOWS}
    assert not [key for key, r in found.items() if 'failed' in r or 'us' in r]
    assert all(r['error'] == 0 for (_, _, how), r in found.items() if how == 'eager')
    assert all(0 < r['error'] < 0.02 for (_, _, how), r in found.items() if 'patched' in how)
    assert '1 experts, 1 router, 1 mlp' in capsys.readouterr().out


def test_a_row_that_differs_is_reported_and_not_timed(tmp_path, monkeypatch):
    differs = model_layers._difference
    monkeypatch.setattr(model_layers, '_difference', lambda a, b: differs(a, b) + 0.1)
    out = tmp_path / 'layers.jsonl'
    model_layers.main(['--models', 'llama-3-8b', '--shapes', 'decode 1', '--json', str(out)])
    assert all(r['failed'].endswith('from the layer before patch, more than 0.02') for r in records(out))
    assert len(records(out)) == 4 and not [r for r in records(out) if 'error' in r]


def test_the_kernels_of_a_layer_are_known_without_running_it():
    found = model_layers.kernels_of('mixtral-8x7b', True, 'cpu', 'sm_90a')
    names = {variant.kernel.name for variant in found}
    assert {'topk_gating_kernel', 'grouped_gemm_dw_kernel', 'norm_backward_kernel', 'rotary_kernel'} <= names
    assert {variant.arch for variant in found} == {'sm_90a'}
    x = torch.zeros(1, 9, 64, dtype=torch.bfloat16)
    with pytest.raises(Failed, match=r'more than 0\.02'):
        layer = model_layers.layer_of('mixtral-8x7b', True, 'cpu')
        layer._expected['prefill'] = (x.flatten(0, 1),)
        model_layers.compare('mixtral-8x7b', True, 'cpu', 'prefill', 'eager')
    model_layers.layer_of.cache_clear()


def test_the_tables_show_times_and_failures():
    shared = {'batch': 1, 'tokens': 4096, 'past': 0, 'commit': 'a' * 9, 'date': '2026-01-01', 'device': 'NVIDIA H200'}
    shared |= {'timer': 'events', 'model': 'm', 'shape': 'prefill'}
    rows = [shared | {'how': 'eager', 'us': 812.4, 'host_us': 95.2}, shared | {'how': 'patched', 'failed': 'why'}]
    text = layer_tables(rows)
    assert '| m | 812 / 95.2 | failed |' in text and '- m, prefill, patched: why' in text
    assert layer_tables([]) == 'Not measured yet.\n'
