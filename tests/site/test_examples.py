"""Every public name has an example, which runs on a CPU and prints what its API page says."""

import linecache

import pytest
import torch

from tile_kernels import UnsupportedError
from tile_kernels.sight.sass import nvdisasm
from tools.docs import api


def _finds_nvdisasm():
    try:
        nvdisasm()
    except UnsupportedError:
        return False
    return True


#: What examples need besides a CPU, and whether it is here.
NEEDS = {
    'sight.mix': ('nvdisasm', _finds_nvdisasm()),
    **dict.fromkeys(('scale.on_one_gpu', 'scale.empty', 'scale.run'), ('no GPU', not torch.cuda.is_available())),
}


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize('name', {program: name for name, program in api.examples().items()}.values())
def test_an_example_prints_what_the_page_says(name, capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '120')  # reports fill the terminal
    needed, here = NEEDS.get(name, ('', True))
    if not here:
        pytest.skip(f'needs {needed}')
    program, output = api.examples()[name]
    linecache.cache[name] = len(program), None, program.splitlines(True), name  # TileLang reads the source of kernels
    exec(compile(program, name, 'exec'), {'__name__': '__main__'})
    assert capsys.readouterr().out == output


def test_every_public_name_has_an_example_and_every_example_a_name():
    assert not [name for name in api.examples() if name not in api.documented()]
    shown = {id(api.documented()[name]) for name in api.examples()}
    assert not [name for name, value in api.documented().items() if id(value) not in shown]


def test_every_program_of_the_files_is_an_example():
    headings = [
        line for path in api.EXAMPLES.glob('*.md') for line in path.read_text().splitlines() if line[:3] == '## '
    ]
    assert len(headings) == len(set(api.examples().values()))


def test_examples_are_short_and_call_what_they_show():
    for name, (program, output) in api.examples().items():
        shown = program.partition('torch.manual_seed(0)')[2].strip().splitlines()
        assert name.partition('.')[2] in program + output and len(shown) <= 10, name
        assert max(map(len, program.splitlines())) <= 120, name
