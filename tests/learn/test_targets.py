"""Targets come from measured answers, can be beaten, and are called provisional until then."""

import json
from pathlib import Path

import pytest

from tile_kernels import UnsupportedError
from tile_kernels.cli.bench import read_records
from tile_kernels.learn import checks, speed
from tile_kernels.learn.track import exercises
from tile_kernels.testing.bench import BenchResult
from tools import learn_targets

DATE = '2026-01-02T00:00:00Z'
RECORD = {'exercise': '07', 'unit': 'TFLOP/s', 'reached': 500.0, 'device': 'NVIDIA H200', 'commit': 'a', 'date': DATE}


@pytest.mark.parametrize(('reached', 'more', 'value'), [(500.0, True, 475.0), (3.0, False, 3.16), (0.987, True, 0.937)])
def test_a_target_is_at_most_95_percent_of_the_speed_of_our_answer(reached, more, value):
    assert speed.share_of(reached, more) == value
    assert value <= 0.95 * reached if more else value >= reached / 0.95


def test_targets_are_the_last_records_that_did_not_fail(tmp_path, monkeypatch):
    later = RECORD | {'reached': 400.0, 'date': '2026-02-02T00:00:00Z'}
    failed = {'exercise': '07', 'failed': 'why', 'date': '2026-03-02T00:00:00Z'}
    found = learn_targets.targets_of([later, failed, RECORD])
    assert found == {'07': {'reached': 400.0, 'unit': 'TFLOP/s', 'device': 'NVIDIA H200', 'commit': 'a'}}
    monkeypatch.setattr(speed, 'TARGETS', tmp_path / 'targets.json')
    assert speed.target_of(exercises()[7]) == (450, False)
    speed.TARGETS.write_text(json.dumps(found))
    assert speed.target_of(exercises()[7]) == (380.0, True)
    assert speed.target_of(exercises()[8]) == (650, False)


@pytest.mark.parametrize(('known', 'said'), [({}, 'provisional target 450'), ({'07': RECORD}, ' target 475')])
def test_the_words_about_a_time_say_whether_its_target_was_measured(known, said, tmp_path, monkeypatch):
    monkeypatch.setattr(speed, 'TARGETS', tmp_path / 'targets.json')
    speed.TARGETS.write_text(json.dumps(known))
    flops = exercises()[7].target.flops
    monkeypatch.setattr(speed, 'benchmark_kernel', lambda *_, **__: BenchResult((flops / 460e12 * 1e3,) * 2, 1))
    monkeypatch.setattr(speed, 'made_by_check', lambda *_: {'y': 1})
    exercise = exercises()[7]
    tensors = dict.fromkeys(exercise.outputs(exercise.cases[0]), checks.torch.zeros(1))
    number, words = speed.timed(exercise, tensors, lambda: None)
    assert number == pytest.approx(460) and said in words
    assert ('not reached' in words) == bool(known)


def test_the_committed_targets_are_those_of_the_committed_records():
    assert speed.TARGETS.exists() == learn_targets.RESULTS.exists()
    if speed.TARGETS.exists():
        assert json.loads(speed.TARGETS.read_text()) == learn_targets.targets_of(read_records(learn_targets.RESULTS))


def test_our_answers_come_from_the_packed_file():
    answer = learn_targets.answer_of(exercises()[1])
    assert answer.kernels(exercises()[1].cases[0], {}).functions
    assert Path(answer.file).name == '01_copy.py'


def test_without_a_gpu_there_is_one_sentence():
    if not speed.torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match='learn: speed needs a GPU, found none'):
            learn_targets.main([])
