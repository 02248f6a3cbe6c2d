import pytest

from tile_kernels import ArgumentError, knobs


def test_overrides_end_with_the_block():
    before = knobs.num_sms
    with pytest.raises(RuntimeError), knobs(num_sms=7):
        assert knobs.num_sms == 7
        raise RuntimeError
    assert knobs.num_sms == before


def test_unknown_settings_are_named():
    with pytest.raises(ArgumentError, match="no setting named 'colour'"), knobs(colour=1):
        pass


def test_environment_is_parsed_and_checked(monkeypatch):
    try:
        monkeypatch.setenv('TK_NUM_SMS', '12')
        monkeypatch.setenv('TK_INTERPRET', '0')
        knobs.reset()
        assert knobs.num_sms == 12 and knobs.interpret is False
        monkeypatch.setenv('TK_NUM_SMS', 'many')
        with pytest.raises(ArgumentError, match="TK_NUM_SMS must be positive, got 'many'"):
            knobs.reset()
    finally:
        monkeypatch.undo()
        knobs.reset()
