import pytest
import torch

from tile_kernels.core import registry
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.formats import QuantFormat


def test_a_family_stands_for_all_of_its_ops(toy):
    assert registry.find_ops(['tests']) == [toy]
    assert registry.find_ops([]) == [toy]


def test_an_unknown_op_gets_a_suggestion(toy):
    with pytest.raises(ArgumentError, match=r"got 'tests.duoble'; did you mean tests.double\?"):
        registry.find_op('tests.duoble')


def test_a_family_is_not_one_op(toy):
    with pytest.raises(ArgumentError, match='got the family tests; tile-kernels list tests names its ops'):
        registry.find_op('tests')


def test_a_case_that_cannot_be_made_is_a_sentence(toy):
    case = registry.typical_case(toy, {'num_tokens': '-5'})
    with pytest.raises(ArgumentError) as caught:
        registry.launches_of(toy, case)
    assert str(caught.value) == (
        'tests.double: no arguments can be made for num_tokens=-5-hidden=128-bfloat16: '
        'in the cases of the op num_tokens is 64, 4096, 0, 5'
    )


@pytest.mark.parametrize(
    ('given', 'possible'),
    [
        ({'layout': 'foo'}, 'layout is padded, odd, sparse, columns, dense'),
        ({'shape': '2'}, 'shape is 64x4096x4096, 32x2048x7168, '),
    ],
)
def test_values_no_case_has_are_told_with_those_there_are(given, possible):
    op = registry.find_op('transpose.batched_transpose')
    with pytest.raises(ArgumentError, match=f'in the cases of the op {possible}'):
        registry.launches_of(op, registry.typical_case(op, given))


def test_a_case_is_the_first_benchmark_with_changes(toy):
    case = registry.typical_case(toy, {'num_tokens': '7', 'dtype': 'f32'})
    assert case == {'num_tokens': 7, 'hidden': 128, 'dtype': torch.float32}


def test_a_case_by_id(toy):
    assert registry.case_by_id(toy, 'num_tokens=5-hidden=64-float32')['num_tokens'] == 5
    with pytest.raises(ArgumentError, match='near it are num_tokens=5-hidden=64-float32'):
        registry.case_by_id(toy, 'num_tokens=5-hidden=64-float23')


@pytest.mark.parametrize(
    ('text', 'like', 'value'),
    [
        ('64', 1, 64),
        ('0.5', 1.0, 0.5),
        ('None', 3, None),
        ('true', False, True),
        ('softmax', 'sigmoid', 'softmax'),
        ('bf16', torch.float32, torch.bfloat16),
        ('128x64', (1, 1), (128, 64)),
        ('(128, 64)', (1, 1), (128, 64)),
        ('[128,]', (1, 1), (128,)),
        ('128,64', (1, 1), (128, 64)),
        ('e4m3_1x32_f32', QuantFormat.parse('e4m3_1x128_f32'), QuantFormat.parse('e4m3_1x32_f32')),
    ],
)
def test_spelled_values_become_what_the_case_holds(text, like, value):
    assert registry._value('name', text, like) == value


@pytest.mark.parametrize(
    ('text', 'like'), [('many', 1), ('maybe', True), ('float31', torch.float32), ('3x', (1, 1)), ('10.5', 64)]
)
def test_a_misspelled_value_is_named(text, like):
    with pytest.raises(ArgumentError, match=f"name must be like .*, got '{text}'"):
        registry._value('name', text, like)


def test_words_need_an_equals_sign():
    with pytest.raises(ArgumentError, match="key=value, got 'num_tokens'"):
        registry.words_to_case(['num_tokens'])
