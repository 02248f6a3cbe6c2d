import logging
import sys
import threading

import pytest
import torch

from tile_kernels import ArgumentError, knobs
from tile_kernels.core.knobs import Knobs, misspelled, overrides


def test_overrides_end_with_the_block():
    before = knobs.num_sms
    with pytest.raises(RuntimeError), knobs(num_sms=7):
        assert knobs.num_sms == 7
        raise RuntimeError
    assert knobs.num_sms == before


def test_unknown_settings_are_named():
    with pytest.raises(ArgumentError, match="no setting named 'colour'"):
        knobs(colour=1)


@pytest.mark.parametrize(
    ('name', 'value', 'rule'),
    [
        ('checks', 'foo', 'one of none, memory, races, all'),
        ('num_sms', -1, 'a positive integer'),
        ('num_sms', 2.5, 'a positive integer'),
        ('token_alignment', None, 'a positive integer'),
        ('interpret', 2, 'True or False'),
        ('cache_dir', 3, 'a path'),
    ],
)
def test_values_are_checked(name, value, rule):
    sentence = f'knobs: {name} must be {rule}, got {value!r}'
    with pytest.raises(ArgumentError, match=sentence):
        knobs(**{name: value})
    before = getattr(knobs, name)
    with pytest.raises(ArgumentError, match=sentence):
        setattr(knobs, name, value)
    assert getattr(knobs, name) == before


def test_a_block_may_take_no_limit_and_a_path_as_text(tmp_path):
    with knobs(num_sms=3, cache_dir=str(tmp_path)), knobs(num_sms=None):
        assert knobs.num_sms is None and knobs.cache_dir == tmp_path


def test_blocks_that_overlap_in_two_threads_see_and_leave_their_own():
    before, seen = knobs.token_alignment, {}
    both, one_left = threading.Barrier(2), threading.Event()

    def work(value, first):
        with knobs(token_alignment=value):
            both.wait(10)
            if not first:
                one_left.wait(10)
            seen[value] = knobs.token_alignment
        seen[-value] = knobs.token_alignment
        one_left.set()

    threads = [threading.Thread(target=work, args=args) for args in ((64, True), (32, False))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {64: 64, 32: 32, -64: before, -32: before} and knobs.token_alignment == before


def test_assignments_hold_for_all_threads_and_blocks_hide_them():
    before, seen = knobs.token_alignment, []
    try:
        with knobs(token_alignment=64):
            knobs.token_alignment = 16
            thread = threading.Thread(target=lambda: seen.append(knobs.token_alignment))
            thread.start()
            thread.join()
            assert knobs.token_alignment == 64
        assert seen == [16] and knobs.token_alignment == 16
    finally:
        knobs.token_alignment = before


def test_threads_of_a_backward_pass_have_the_settings_of_its_caller():
    seen = {}

    class Nested(torch.autograd.Function):
        """Its gradient calls `backward`, which autograd does in another thread from a depth of 60 on."""

        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.setdefault(threading.get_ident(), set()).add(knobs.num_sms)
            if ctx.depth:
                run(ctx.depth - 1)
            return grad, None

    def run(depth):
        with torch.enable_grad():
            Nested.apply(torch.ones(1, requires_grad=True), depth).sum().backward()

    with knobs(num_sms=7):
        run(70)
    assert len(seen) == 2 and all(values == {7} for values in seen.values())
    seen.clear()
    run(70)
    assert len(seen) == 2 and all(values == {None} for values in seen.values())


def test_equal_blocks_are_one_to_what_is_remembered_of_calls():
    with knobs(num_sms=3), knobs(token_alignment=64):
        nested = overrides()
    with knobs(token_alignment=64, num_sms=3):
        assert overrides() == nested != ()
    assert overrides() == ()


def test_compiled_code_sees_blocks():
    step = torch.compile(lambda x: x * knobs.token_alignment, fullgraph=True, backend='eager')
    one = torch.ones(())
    assert step(one) == 128
    with knobs(token_alignment=64):
        assert step(one) == 64
    assert step(one) == 128


def test_environment_is_parsed_and_checked(monkeypatch):
    try:
        monkeypatch.setenv('TK_NUM_SMS', '12')
        monkeypatch.setenv('TK_INTERPRET', '0')
        knobs.reset()
        assert knobs.num_sms == 12 and knobs.interpret is False
        monkeypatch.setenv('TK_NUM_SMS', 'many')
        knobs.reset()
        with pytest.raises(ArgumentError, match="knobs: TK_NUM_SMS must be a positive integer, got 'many'"):
            _ = knobs.num_sms
        monkeypatch.setenv('TK_NUM_SMS', '0')
        monkeypatch.setenv('TK_CHECKS', 'foo')
        knobs.reset()
        with pytest.raises(ArgumentError, match="TK_NUM_SMS must be a positive integer, got '0'"):
            _ = knobs.num_sms
        with pytest.raises(ArgumentError, match="TK_CHECKS must be one of none, memory, races, all, got 'foo'"):
            _ = knobs.checks
        with knobs(num_sms=3):
            assert knobs.num_sms == 3 and knobs.interpret is False
    finally:
        monkeypatch.undo()
        knobs.reset()


def test_a_misspelled_setting_names_the_right_one():
    with pytest.raises(ArgumentError, match="no setting named 'numsms'; did you mean num_sms"):
        knobs.numsms = 5
    with pytest.raises(ArgumentError, match='did you mean token_alignment'):
        knobs(token_aligment=64)


@pytest.mark.parametrize(('name', 'meant'), [('TK_INTERPRETER', 'TK_INTERPRET'), ('TK_NUMSMS', 'TK_NUM_SMS')])
def test_a_misspelled_environment_variable_is_reported(monkeypatch, name, meant):
    monkeypatch.setenv(name, '1')
    monkeypatch.setenv('TK_LIBRARY', 'the path of another program')
    assert misspelled() == [f'{name} is not a setting of tile_kernels; did you mean {meant}?']


def test_all_wrong_settings_are_reported(monkeypatch):
    monkeypatch.setenv('TK_INTERPRET', 'maybe')
    monkeypatch.setenv('TK_NUM_SMS', 'many')
    fresh = Knobs()
    with pytest.raises(ArgumentError, match="TK_INTERPRET must be True or False, got 'maybe'; TK_NUM_SMS must be"):
        _ = fresh.num_sms


def test_the_log_level_is_a_setting():
    logger = logging.getLogger('tile_kernels')
    before = logger.level
    try:
        knobs.log = 'ERROR'
        assert logger.level == logging.ERROR
    finally:
        knobs.log = None
        logger.setLevel(before)


def test_a_block_inside_compiled_code_compiles_again():
    def step(x):
        with knobs(token_alignment=64):
            return x * knobs.token_alignment

    compiled = torch.compile(step, fullgraph=True, backend='eager')
    again = torch.compile(lambda x: step(x) + 1, fullgraph=True, backend='eager')
    for size in (2, 3):
        assert torch.equal(compiled(torch.ones(size)), torch.full((size,), 64.0))
        assert torch.equal(again(torch.ones(size)), torch.full((size,), 65.0))
    with knobs(token_alignment=32):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 64.0))


def test_blocks_keep_the_reference_that_pytorch_may_drop(monkeypatch):
    """Up to PyTorch 2.11, replacing a stashed object releases a reference that stashing never took."""
    stashed = []
    monkeypatch.setattr(
        torch._C, '_stash_obj_in_tls', lambda key, value: stashed.append((value, sys.getrefcount(value)))
    )
    monkeypatch.setattr(torch._C, '_is_key_in_tls', lambda key: False)
    with knobs(num_sms=7):
        pass
    (first, before), (second, after) = stashed
    assert first is second
    assert after >= before + 2, 'one for the list of this test, one left behind'
