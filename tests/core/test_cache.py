"""The directory of compiled kernels: damage, locks, leftovers, permissions, versions."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tile_kernels import ArgumentError, CompileError, compile_count, knobs
from tile_kernels.cli.main import main
from tile_kernels.core import cache, nvcc

STATIC = (32, 4)
CONFIG = {'num_threads': 128}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def built(sample, tmp_path_factory):
    """A cache directory with one library."""
    folder = tmp_path_factory.mktemp('built')
    with knobs(cache_dir=folder):
        sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a')
    return folder


@pytest.fixture
def folder(built, tmp_path):
    """A copy of that directory."""
    return Path(shutil.copytree(built, tmp_path / 'cache'))


def library_of(folder):
    (path,) = folder.glob('sm_90a/*.so')
    return path


def fake_compiler(monkeypatch, content=b'compiled'):
    monkeypatch.setattr(nvcc, 'compile_library', lambda func, configs, arch, path: path.write_bytes(content))


DAMAGE = {
    'empty': (lambda path: path.write_bytes(b''), 'is empty'),
    'truncated': (lambda path: os.truncate(path, 100), 'has 100 bytes instead of'),
    'foreign': (lambda path: path.write_bytes(bytes(path.stat().st_size)), 'another checksum'),
    'without manifest': (lambda path: path.with_suffix('.json').unlink(), 'no readable manifest'),
    'broken manifest': (lambda path: path.with_suffix('.json').write_text('{"size"'), 'no readable manifest'),
}


@pytest.mark.parametrize(('harm', 'words'), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_library_is_refused_or_compiled_again(sample, folder, harm, words, caplog, monkeypatch):
    path = library_of(folder)
    harm(path)
    with knobs(cache_dir=folder, disable_jit=True), pytest.raises(CompileError, match=words) as raised:
        sample.spread_kernel.load(STATIC, CONFIG, 'sm_90a')
    assert str(path) in str(raised.value) and 'tile-kernels precompile' in str(raised.value)
    assert '\n' not in str(raised.value)
    fake_compiler(monkeypatch)
    with knobs(cache_dir=folder):
        assert sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a') == path
    assert words in caplog.text and path.read_bytes() == b'compiled' and cache.damage(path) is None


@pytest.mark.parametrize(('name', 'value'), [('tvm_ffi', '0.0.1'), ('host', 'riscv64')])
def test_a_library_for_another_runtime_is_not_loaded(folder, name, value, sample, monkeypatch):
    path = library_of(folder)
    manifest = path.with_suffix('.json')
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), name: value}))
    assert cache.damage(path) == f'was built for {name} {value}, this is {cache.runtime()[name]}'
    with knobs(cache_dir=folder, disable_jit=True):
        before = sample.spread_kernel._digest(STATIC, CONFIG, 'sm_90a')
        monkeypatch.setattr(cache, 'runtime', lambda: {**{'tvm_ffi': '1', 'host': 'x'}, name: value})
        assert sample.spread_kernel._digest(STATIC, CONFIG, 'sm_90a') != before


def test_the_manifest_says_what_the_library_is(folder):
    path = library_of(folder)
    about = cache.read_manifest(path)
    assert about['kernel'] == 'spread_kernel' and about['static'] == ['32', '4'] and about['config'] == CONFIG
    assert about['nvcc'] == '.'.join(map(str, nvcc.nvcc_version())) and f'-cu{about["nvcc"]}.so' in path.name
    assert about['size'] == path.stat().st_size and about['tilelang'] == nvcc.tilelang_version()


@pytest.mark.parametrize(
    ('release', 'disable_jit', 'found'),
    [(None, False, True), (None, True, True), ((12, 8), True, True), ((12, 8), False, False)],
)
def test_another_nvcc_serves_where_none_is_known_or_nothing_may_be_compiled(
    sample, folder, monkeypatch, release, disable_jit, found
):
    monkeypatch.setattr(cache, 'toolkit', lambda: release)
    with knobs(cache_dir=folder):
        entry = sample.spread_kernel._entry(STATIC, CONFIG, 'sm_90a')
    path, problem = entry.find(may_compile=not disable_jit)
    assert (path == library_of(folder)) == found and problem is None


def test_a_machine_without_nvcc_loads_what_is_there(built):
    code = (
        'import sys; from tile_kernels.core import nvcc; from tests.core.sample import spread_kernel as k\n'
        'def refuse(): raise AssertionError\n'
        'nvcc.nvcc = nvcc.nvcc_version = refuse\n'
        "k.load((32, 4), {'num_threads': 128}, 'sm_90a'); sys.exit('tilelang' in sys.modules)"
    )
    env = {**os.environ, 'TK_CACHE_DIR': str(built), 'PATH': '/nowhere', 'PYTHONPATH': str(ROOT)}
    assert subprocess.run([sys.executable, '-c', code], env=env, timeout=120, check=False).returncode == 0


def test_the_toolkit_is_known_from_its_own_files(tmp_path, monkeypatch):
    monkeypatch.setenv('CUDA_HOME', str(tmp_path))
    cache.toolkit.cache_clear()
    try:
        assert cache.toolkit() is None
        cache.toolkit.cache_clear()
        (tmp_path / 'version.json').write_text('{"cuda_nvcc": {"version": "12.9.41"}}')
        assert cache.toolkit() == (12, 9)
    finally:
        cache.toolkit.cache_clear()


def test_many_processes_compile_a_kernel_once(sample, tmp_path, monkeypatch):
    def compile_library(func, configs, arch, path):
        time.sleep(0.5)
        path.write_bytes(b'compiled')

    monkeypatch.setattr(nvcc, 'compile_library', compile_library)
    sample.spread_kernel.tir(*STATIC, **CONFIG)
    fork = multiprocessing.get_context('fork')  # without importing torch eight times
    counts, begin = fork.Queue(), fork.Barrier(8)

    def work():
        before = compile_count()
        begin.wait(60)
        path = sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a')
        counts.put((compile_count() - before, path.read_bytes()))

    with knobs(cache_dir=tmp_path / 'cache'):
        workers = [fork.Process(target=work, daemon=True) for _ in range(8)]
        for worker in workers:
            worker.start()
        results = sorted(counts.get(timeout=60) for _ in workers)
        for worker in workers:
            worker.join(60)
    assert results == [(0, b'compiled')] * 7 + [(1, b'compiled')]
    assert len(list((tmp_path / 'cache').glob('sm_90a/*.so'))) == 1


def temporary_folders(folder):
    return list(folder.glob('tile_kernels-*'))


def test_a_failed_compilation_leaves_nothing(sample, tmp_path, monkeypatch):
    def fail(func, configs, arch, path):
        path.write_bytes(b'half')
        raise RuntimeError('nvcc fell over')

    (tmp_path / 'tmp').mkdir()
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path / 'tmp'))
    monkeypatch.setattr(nvcc, 'compile_library', fail)
    with knobs(cache_dir=tmp_path / 'cache'), pytest.raises(CompileError, match='nvcc fell over'):
        sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a')
    assert temporary_folders(tmp_path / 'tmp') == []
    assert [path for path in (tmp_path / 'cache').rglob('*') if path.suffix in ('.tmp', '.so', '.json')] == []


@pytest.mark.parametrize('failing', ['write', 'replace'])
def test_a_full_disk_leaves_nothing_and_the_kernel_runs(sample, tmp_path, monkeypatch, caplog, failing):
    def full(*args, **kwargs):
        raise OSError(28, 'No space left on device')

    fake_compiler(monkeypatch)
    before = compile_count()
    if failing == 'write':
        monkeypatch.setattr(cache.os, 'fdopen', lambda handle, mode: os.close(handle) or full())
    else:
        monkeypatch.setattr(cache.os, 'replace', full)
    with knobs(cache_dir=tmp_path / 'cache'):
        path = sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a')
        assert path.read_bytes() == b'compiled' and 'No space left' in caplog.text
        assert sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a') == path  # and is not compiled twice
    assert compile_count() == before + 1
    assert list((tmp_path / 'cache').rglob('*.tmp')) == [] and list((tmp_path / 'cache').rglob('*.so')) == []


def test_the_folder_of_an_unwritable_cache_goes_with_the_process(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tile_kernels.core import cache, nvcc
from tests.core.sample import spread_kernel as kernel
nvcc.compile_library = lambda func, configs, arch, path: path.write_bytes(b'compiled')
nvcc.nvcc_version = lambda: (13, 0)
kernel.tir = lambda *static, **config: None
print(kernel.library((32, 4), {{'num_threads': 128}}, 'sm_90a'))
"""
    (tmp_path / 'file').write_text('no directory')
    (tmp_path / 'tmp').mkdir()
    env = {**os.environ, 'TK_CACHE_DIR': str(tmp_path / 'file'), 'TMPDIR': str(tmp_path / 'tmp')}
    done = subprocess.run(
        [sys.executable, '-c', code], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.startswith(str(tmp_path / 'tmp' / 'tile_kernels-'))
    assert temporary_folders(tmp_path / 'tmp') == []


def test_a_directory_others_can_write_to_is_refused(sample, folder):
    folder.chmod(0o777)
    with knobs(cache_dir=folder), pytest.raises(ArgumentError, match=r'every user can write to .*chmod o-w'):
        sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a')
    folder.chmod(0o755)
    (folder / 'sm_90a').chmod(0o757)
    with knobs(cache_dir=folder), pytest.raises(ArgumentError, match='every user can write to'):
        sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a')


def test_a_directory_of_another_user_is_refused(sample, folder, monkeypatch):
    owner = folder.stat().st_uid
    monkeypatch.setattr(cache.os, 'geteuid', lambda: owner + 1)
    if owner == 0:  # that of the system is trusted
        cache.check_folder(folder)
        os.chown(folder, 12345, -1)
    with knobs(cache_dir=folder), pytest.raises(ArgumentError, match=r'belongs to user \d+.*TK_CACHE_DIR'):
        sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a')


def test_directories_are_private_whatever_the_umask(sample, tmp_path, monkeypatch):
    fake_compiler(monkeypatch)
    before = os.umask(0)
    try:
        with knobs(cache_dir=tmp_path / 'a' / 'cache'):
            sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a')
            sample.spread_kernel.library(STATIC, CONFIG, 'sm_90a')
    finally:
        os.umask(before)


@pytest.mark.parametrize('chosen', [True, False])
def test_a_home_that_cannot_be_written_is_no_failure(tmp_path, chosen):
    """`/proc` refuses even root. TileLang writes to its own directory while it is imported."""
    code = (
        'import os; from tests.core.sample import spread_kernel as k;'
        "k.tir(32, 4, num_threads=128); print(os.environ['TILELANG_CACHE_DIR'])"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(('TK_', 'TILELANG_', 'XDG_'))}
    env |= {'HOME': '/proc/nowhere', 'PYTHONPATH': str(ROOT), 'TMPDIR': str(tmp_path)}
    if chosen:
        env['TK_CACHE_DIR'] = str(tmp_path / 'cache')
    done = subprocess.run(
        [sys.executable, '-c', code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = tmp_path / 'cache' / 'tilelang' if chosen else tmp_path / 'tile_kernels-'
    assert done.stdout.startswith(str(expected))
    assert temporary_folders(tmp_path) == []


# Command ------------------------------------------------------------------------------------


def test_list_shows_what_is_there(folder, capsys):
    shutil.copy(library_of(folder), folder / 'sm_90a' / 'other-cu13.0.so')
    assert main(['cache', 'list', '--dir', str(folder)]) == 0
    out = capsys.readouterr().out
    assert 'spread_kernel' in out and '32, 4; num_threads=128' in out and 'has no readable manifest' in out
    assert '2 kernels, ' in out


def test_clear_removes_everything(folder, capsys):
    (folder / 'sm_90a' / '.x.tmp').write_text('')
    (folder / 'notes.txt').write_text('mine')
    assert main(['cache', 'clear', '--dir', str(folder)]) == 0
    assert '1 kernels removed' in capsys.readouterr().out
    assert [path.name for path in folder.rglob('*')] == ['notes.txt']


def test_prune_removes_what_nothing_loads(folder, capsys):
    own = library_of(folder)
    manifest = cache.read_manifest(own)

    def put(name, content=b'library', **changes):
        path = folder / 'sm_90a' / f'{name}-cu13.0.so'
        path.write_bytes(b'library')
        cache.store(path, path, {**manifest, **changes})
        path.write_bytes(content)
        return path

    put('damaged', content=b'lib')
    put('older', tilelang='0.0.1')
    put('gone', module='tile_kernels.quant.gone', kernel='gone_kernel')
    put('edited', module='tile_kernels.moe.normalize_weight', kernel='normalize_weight_kernel', code='other')
    unfinished, recent = folder / 'sm_90a' / '.old.tmp', folder / 'sm_90a' / '.new.tmp'
    for path in (unfinished, recent):
        path.write_text('')
    os.utime(unfinished, (time.time() - 7200,) * 2)
    assert main(['cache', 'prune', '--dir', str(folder)]) == 0
    assert '4 kernels removed' in capsys.readouterr().out
    assert list(folder.glob('sm_90a/*.so')) == [own] and not unfinished.exists() and recent.exists()


def test_prune_keeps_what_this_code_loads(folder, capsys):
    import tile_kernels.moe  # noqa: F401
    from tile_kernels.core.code_digest import code
    from tile_kernels.core.jit import kernels

    kernel = kernels['normalize_weight_kernel']
    about = kernel._about((8,), {'num_threads': 128}, 'sm_90a', (13, 0))
    assert about['code'] == code().digest(kernel.builder)
    path = folder / 'sm_90a' / 'kept-cu13.0.so'
    path.write_bytes(b'library')
    cache.store(path, path, about)
    assert main(['cache', 'prune', '--dir', str(folder)]) == 0
    assert path.exists() and '0 kernels removed' in capsys.readouterr().out
