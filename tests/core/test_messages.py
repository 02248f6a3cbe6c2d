"""What a user reads while kernels compile: one line for the first kernel of a process, and progress in a log."""

import logging

from tile_kernels import knobs
from tile_kernels.core import jit, nvcc, progress


def test_the_first_compilation_of_a_process_is_a_warning_and_later_ones_are_not(sample, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(jit, '_told', False)
    monkeypatch.setattr(nvcc, 'compile_library', lambda func, configs, arch, path: path.write_bytes(b'compiled'))
    monkeypatch.setattr(nvcc, 'load_function', lambda path: path)
    caplog.set_level(logging.INFO, 'tile_kernels')
    with knobs(cache_dir=tmp_path):
        for threads in (64, 128, 64):
            sample.spread_kernel.load((32, 4), {'num_threads': threads}, 'sm_90a')
    found = [(r.levelname, r.getMessage()) for r in caplog.records if r.getMessage().startswith('compiled ')]
    assert [level for level, _ in found] == ['WARNING', 'INFO']
    first, second = (text for _, text in found)
    assert first.startswith('compiled spread_kernel(32, 4; num_threads=64) for sm_90a in ')
    assert first.endswith('tile-kernels precompile avoids this') and 'avoids' not in second


def test_progress_in_a_log_is_a_line_every_ten_seconds_with_the_time_left(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(progress.time, 'monotonic', lambda: now)
    lines = progress.Lines()
    task = lines.add_task('compiling', total=8)
    for _ in range(8):
        now += 4.0
        lines.advance(task)
    assert capsys.readouterr().err.splitlines() == [
        'compiling 3 of 8, 12 s, about 20 s left',
        'compiling 6 of 8, 24 s, about 8 s left',
        'compiling 8 of 8, 32 s',
    ]
