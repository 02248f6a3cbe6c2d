"""Every public name has an example, which runs on a CPU and prints what its API page says."""

import pytest
import torch

from tools.docs import api


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize('name', api.examples())
def test_an_example_prints_what_the_page_says(name, capsys):
    program, output = api.examples()[name]
    exec(compile(program, name, 'exec'), {'__name__': '__main__'})
    assert capsys.readouterr().out == output


def test_every_public_name_has_an_example_and_every_example_a_name():
    assert not [name for name in api.examples() if name not in api.public_names()]
    shown = {id(api.public_names()[name]) for name in api.examples()}
    assert not [name for name, value in api.public_names().items() if id(value) not in shown]


def test_every_program_of_the_files_is_an_example():
    headings = [
        line for path in api.EXAMPLES.glob('*.md') for line in path.read_text().splitlines() if line[:3] == '## '
    ]
    assert len(headings) == len(api.examples())


def test_examples_are_short_and_call_what_they_show():
    for name, (program, output) in api.examples().items():
        shown = program.partition('torch.manual_seed(0)')[2].strip().splitlines()
        assert name.partition('.')[2] in program + output and len(shown) <= 10, name
        assert max(map(len, program.splitlines())) <= 120, name
