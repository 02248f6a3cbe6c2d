"""What is special about the generator: known words, the same stream however it is cut, a normal distribution."""

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tile_kernels import ArgumentError, knobs, rand
from tile_kernels.rand.normal import normal_
from tile_kernels.reference.rand.normal import _log, _philox
from tile_kernels.testing.numeric import assert_equal


def drawn(count, seed=1, offset=0, interpret=False, dtype=torch.float32):
    out = torch.empty(count, dtype=dtype)
    with knobs(interpret=interpret):
        normal_(out, seed, offset)
    return out


def test_words_are_those_of_philox():
    """The vectors its authors published, as far as the two counter words in use can express them."""
    words = _philox(torch.tensor([0]), 0)
    assert [int(w) for w in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_a_stream_may_be_cut_anywhere():
    whole = drawn(4096, interpret=True)
    assert_equal(drawn(1024, offset=512, interpret=True), whole[2048:3072])
    assert_equal(drawn(1001, interpret=True), whole[:1001])


def test_kernel_and_cpu_agree_on_many_numbers():
    assert_equal(drawn(1 << 15, seed=-3, offset=1 << 40, interpret=True), drawn(1 << 15, seed=-3, offset=1 << 40))


def test_narrow_dtypes_round_the_same_numbers():
    for dtype in (torch.bfloat16, torch.float16):
        assert_equal(drawn(1000, dtype=dtype), drawn(1000).to(dtype))


def test_logarithm_is_good_to_the_last_bits():
    word = torch.cat(
        (torch.arange(1, 1 << 12), torch.randint(1, 1 << 32, (1 << 16,)), (1 << 32) - torch.arange(1, 4096))
    )
    exact = torch.log(word.float().double() * 2.0**-32)
    torch.testing.assert_close(_log(word).double(), exact, rtol=4e-7, atol=1e-9)


def test_moments_and_tails_are_normal():
    x = drawn(1 << 18).double()
    n = x.numel()
    moments = [x.pow(k).mean().item() for k in range(1, 5)]
    for k, (moment, expected) in enumerate(zip(moments, (0, 1, 0, 3), strict=True), 1):
        spread = math.sqrt((math.prod(range(1, 2 * k, 2)) - expected**2) / n)  # E[x^2k] = (2k - 1)!!
        assert abs(moment - expected) < 5 * spread, k
    for sigma in (0.5, 1.0, 2.0, 3.0):
        p = math.erfc(sigma / math.sqrt(2))
        assert abs((x.abs() > sigma).double().mean().item() - p) < 5 * math.sqrt(p * (1 - p) / n)
    assert abs((x[::2] * x[1::2]).mean().item()) < 5 / math.sqrt(n / 2)
    assert abs((x[:-1] * x[1:]).mean().item()) < 5 / math.sqrt(n)


def test_calls_continue_a_stream_and_a_seed_restarts_it():
    rand.set_seed(5)
    first, second = rand.randn(3, 5, device='cpu'), rand.randn((4,), dtype=torch.bfloat16, device='cpu')
    rand.set_seed(5)
    assert_equal(rand.randn((3, 5), device='cpu'), first)
    assert_equal(rand.randn_like(second), second)
    assert_equal(second, drawn(4, seed=5, offset=4).bfloat16())
    assert torch.initial_seed() == 5


def test_a_compiled_call_continues_the_stream():
    compiled = torch.compile(lambda x: x + rand.randn_like(x), fullgraph=True, backend='aot_eager', dynamic=True)
    results = []
    for add in (compiled, lambda x: x + rand.randn_like(x)):
        rand.set_seed(5)
        results.append([add(torch.ones(count, 3)) for count in (5, 5, 7)])
    assert not torch.equal(*results[0][:2])
    for actual, expected in zip(*results, strict=True):
        assert_equal(actual, expected)


@pytest.mark.parametrize(
    ('call', 'sentence'),
    [
        (lambda: rand.randn(2.5), 'rand.randn: size must be an integer, got float 2.5'),
        (lambda: rand.randn((2, -1)), 'rand.randn: size must be at least 0, got -1'),
        (
            lambda: rand.randn(3, dtype=torch.float64, device='cpu'),
            'rand.randn: dtype must be one of torch.bfloat16, torch.float16, torch.float32, got torch.float64',
        ),
        (
            lambda: rand.randn_like(torch.ones(2, dtype=torch.int32)),
            'rand.randn_like: t must be bfloat16 or float16 or float32, got int32[2] on cpu',
        ),
        (lambda: rand.set_seed(1.5), 'rand.set_seed: seed must be an integer, got float 1.5'),
        (lambda: rand.set_seed(None), 'rand.set_seed: seed must be an integer, got None'),
        (lambda: rand.set_seed(1 << 64), 'rand.set_seed: seed must have at most 64 bits, got 18446744073709551616'),
    ],
)
def test_wrong_arguments_are_named(call, sentence):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value) == sentence


def test_a_seed_of_64_bits_works_on_fake_tensors():
    rand.set_seed((1 << 64) - 5)
    with FakeTensorMode():
        assert rand.randn(4).shape == (4,)
    rand.set_seed((1 << 64) - 5)
    assert torch.equal(rand.randn(4, device='cpu'), drawn(4, seed=-5))
