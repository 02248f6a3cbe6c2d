"""Every error a user may meet has a diagnosis that names the cause and the one thing to do."""

import importlib.metadata
import json
import shutil
import sys
from dataclasses import replace

import pytest
import torch

import tile_kernels
from tile_kernels.cli import doctor
from tile_kernels.cli.doctor import Cache, Facts, Gpu, diagnose
from tile_kernels.core.knobs import knobs

HEALTHY = Facts(
    python=(3, 11),
    torch='2.13.0+cu130',
    torch_cuda='13.0',
    tilelang='0.1.15',
    tilelang_error=None,
    toolkit=(13, 0),
    toolkit_path='/usr/local/cuda/bin/nvcc',
    fp8_error=None,
    driver='580.82',
    driver_cuda=(13, 0),
    gpus=(Gpu('NVIDIA H200', 90, 139.0),),
    cache=Cache('/home/user/.cache/tile_kernels', 12, 3_000_000, True),
    settings={},
    settings_error=None,
    misspelled=(),
    probe_error=None,
)

READ_ONLY = Cache('/opt/kernels', 12, 3_000_000, False)
EMPTY = Cache('/opt/kernels', 0, 0, False)
JIT_OFF = {'TK_DISABLE_JIT': 'True'}
OPEN = Cache('/tmp/k', refused='cache: every user can write to /tmp/k; run: chmod o-w on it')
DAMAGED = Cache('/opt/kernels', 2, 9, True, None, ('/opt/kernels/sm_90a/x.so is empty', 'y.so is empty'))

CASES = {
    'python': ({'python': (3, 9)}, 'error', 'Python 3.9 is too old', 'Python 3.10 or newer'),
    'other project': (
        {'other_distribution': '2.1.0'},
        'error',
        'tile-kernels 2.1.0, another project, is installed over the files of this package',
        'pip uninstall tile-kernels open-tile-kernels, then install open-tile-kernels again',
    ),
    'torch': ({'torch': '2.9.1'}, 'error', 'torch 2.9.1 is too old', 'pip install "torch>=2.10"'),
    'tilelang missing': (
        {'tilelang': None, 'toolkit': None},
        'error',
        'tilelang is not installed',
        'pip install "tilelang',
    ),
    'tilelang broken': (
        {'tilelang_error': 'libz3.so: cannot open', 'toolkit': None},
        'error',
        'does not load (libz3.so: cannot open)',
        'reinstall',
    ),
    'tilelang old': ({'tilelang': '0.1.14'}, 'error', 'tilelang 0.1.14 is outside the tested range', '>=0.1.15,<0.2'),
    'tilelang new': ({'tilelang': '0.2.0'}, 'error', 'tilelang 0.2.0 is outside the tested range', '>=0.1.15,<0.2'),
    'wrong architecture': (
        {'gpus': (Gpu('Tesla V100', 70, 16.0),)},
        'error',
        'Tesla V100 (sm_70) is not supported',
        'compute capability 8.0 (Ampere) or newer',
    ),
    'toolkit missing': ({'toolkit': None}, 'error', 'no CUDA toolkit found (nvcc)', 'install CUDA 12.8 or newer'),
    'toolkit missing but unused': (
        {'toolkit': None, 'settings': JIT_OFF},
        'note',
        'no CUDA toolkit found',
        'install CUDA',
    ),
    'toolkit old': (
        {'toolkit': (12, 4)},
        'error',
        'CUDA toolkit 12.4 (/usr/local/cuda/bin/nvcc) is too old',
        '12.8 or newer',
    ),
    'toolkit old for the GPU': (
        {'toolkit': (12, 8), 'gpus': (Gpu('NVIDIA B300', 103, 270.0),)},
        'error',
        'too old for sm_103',
        'install CUDA 12.9 or newer',
    ),
    'FP8 unknown': (
        {'fp8_error': 'cuda_fp8.h: No such file'},
        'error',
        'does not know the FP8 types (cuda_fp8.h: No such file)',
        'with cuda_fp8.h beside nvcc',
    ),
    'driver old': (
        {'driver': '550.54', 'driver_cuda': (12, 4)},
        'error',
        'driver 550.54 runs CUDA 12.4, the toolkit is 13.0',
        'update the driver, or set CUDA_HOME to a CUDA 12 toolkit',
    ),
    'torch without CUDA': (
        {'gpus': (), 'torch_cuda': None},
        'error',
        'there is an NVIDIA driver (580.82) but torch 2.13.0+cu130 is built without CUDA',
        'install a CUDA build of torch',
    ),
    'GPU out of sight': ({'gpus': ()}, 'error', 'sees no GPU through driver 580.82', 'nvidia-smi'),
    'no GPU': (
        {'gpus': (), 'driver': None, 'driver_cuda': None, 'torch_cuda': None},
        'note',
        'no GPU: on CPU tensors every op computes with plain PyTorch',
        'TK_INTERPRET=1',
    ),
    'shared memory': (
        {'probe_error': 'Failed to set the allowed dynamic shared memory size to 250000'},
        'error',
        'asks for 244 KB of shared memory, and the GPU gives a block 227 KB',
        'report it',
    ),
    'resources': (
        {'probe_error': 'CUDA error: too many resources requested for launch'},
        'error',
        'need more than the 65536 registers of an SM; choose fewer threads',
        'report it',
    ),
    'wrong result': (
        {'probe_error': 'kernel and twin: y: 3 of 4 elements differ'},
        'error',
        '3 of 4 elements differ',
        'report',
    ),
    'cache not writable': ({'cache': EMPTY}, 'warning', '/opt/kernels is not writable', 'TK_CACHE_DIR'),
    'cache read-only': ({'cache': READ_ONLY}, 'note', '/opt/kernels is read-only', 'precompile for your shapes'),
    'cache of everyone': ({'cache': OPEN}, 'error', 'every user can write to /tmp/k', 'chmod o-w'),
    'damaged kernels': ({'cache': DAMAGED}, 'warning', 'x.so is empty (and 1 more)', 'compiled again'),
    'damaged kernels, no compiler': (
        {'cache': DAMAGED, 'settings': JIT_OFF},
        'error',
        'x.so is empty (and 1 more)',
        'tile-kernels precompile --out /opt/kernels',
    ),
    'setting': (
        {'settings_error': "knobs: TK_NUM_SMS must be positive, got 'abc'"},
        'error',
        "TK_NUM_SMS must be positive, got 'abc'",
        'correct or unset it',
    ),
    'misspelled setting': (
        {'misspelled': ('TK_NUMSMS is not a setting of tile_kernels; did you mean TK_NUM_SMS?',)},
        'warning',
        'did you mean TK_NUM_SMS?',
        'rename or unset it',
    ),
    'nothing to run': (
        {'cache': EMPTY, 'settings': JIT_OFF},
        'error',
        'TK_DISABLE_JIT is set and /opt/kernels holds no kernel',
        'tile-kernels precompile --out /opt/kernels',
    ),
}


def test_a_healthy_machine_gets_no_diagnosis():
    assert diagnose(HEALTHY) == []


@pytest.mark.parametrize(('change', 'level', 'cause', 'action'), CASES.values(), ids=CASES)
def test_each_fault_gets_exactly_its_diagnosis(change, level, cause, action):
    (found,) = diagnose(replace(HEALTHY, **change))
    assert found.level == level
    assert cause in found.cause
    assert action in found.action


def test_an_image_with_its_kernels_baked_in_is_healthy():
    assert diagnose(replace(HEALTHY, cache=READ_ONLY, settings=JIT_OFF)) == []


def test_every_diagnosis_has_a_case():
    raised = {check for change, *_ in CASES.values() for check in doctor.DIAGNOSES if check(replace(HEALTHY, **change))}
    assert raised == set(doctor.DIAGNOSES)


def test_the_command_prints_facts_and_diagnoses(cli, monkeypatch):
    monkeypatch.setattr(doctor, 'gather', lambda: replace(HEALTHY, toolkit=(12, 4), settings={'TK_NUM_SMS': '8'}))
    status, out, _ = cli('doctor')
    assert status == 1
    assert 'NVIDIA H200, sm_90, 139 GiB' in out and '12 kernels, 3.0 MB, writable' in out and 'TK_NUM_SMS=8' in out
    assert 'error: CUDA toolkit 12.4' in out and '1 thing(s) to fix.' in out


def test_this_machine_can_be_looked_at(toy, tmp_path):
    (tmp_path / 'sm_90a').mkdir()
    (tmp_path / 'sm_90a' / 'kernel.so').write_bytes(bytes(1234))
    with knobs(cache_dir=tmp_path, num_sms=8):
        facts = doctor.gather()
    assert facts.python == sys.version_info[:2]
    assert facts.torch == torch.__version__
    assert facts.tilelang == importlib.metadata.version('tilelang') and facts.tilelang_error is None
    damaged = f'{tmp_path}/sm_90a/kernel.so has no readable manifest'
    assert facts.cache == Cache(str(tmp_path), 1, 1234, True, None, (damaged,))
    assert facts.settings == {'TK_CACHE_DIR': str(tmp_path), 'TK_NUM_SMS': '8'}
    assert facts.gpus == () and facts.probe_error is None
    assert (facts.toolkit is None) == (shutil.which('nvcc') is None)


def test_a_setting_that_means_nothing_is_a_fact(toy, monkeypatch):
    monkeypatch.setenv('TK_NUM_SMS', 'abc')
    assert 'TK_NUM_SMS' in doctor.gather().settings_error


def test_a_probe_that_fails_is_a_fact_not_a_crash():
    def fail():
        raise KeyError('x')

    assert doctor._error_of(fail) == "'x'"
    assert doctor._error_of(lambda: None) is None


def test_the_probe_runs_a_case_that_launches_something(toy, monkeypatch):
    ran = []
    monkeypatch.setattr(
        'tile_kernels.testing.contract.check_kernel', lambda op, case, device: ran.append((op, case, device))
    )
    doctor._probe()
    assert ran == [(toy, toy.case_set.smoke[1], 'cuda')]


def test_json_has_facts_versions_and_diagnoses(cli, monkeypatch):
    monkeypatch.setattr(doctor, 'gather', lambda: replace(HEALTHY, toolkit=None))
    status, out, _ = cli('doctor', '--json')
    found = json.loads(out)
    assert status == 1 and found['torch'] == HEALTHY.torch and found['version'] == tile_kernels.__version__
    assert found['cpu']['cores'] and found['packages']['tilelang'] and found['cache']['folder']
    assert [diagnosis['level'] for diagnosis in found['diagnoses']] == ['error']
