"""Every wrong kernel of the zoo is caught with its name and line; its right look-alike is not."""

import inspect
from collections import Counter

import pytest
import torch

from tile_kernels import interpreter

from .zoo import INNOCENTS, SPECIMENS

# The cheapest checks that find each.
FINDINGS = {
    'AssertionFailed': 'none',
    'Deadlock': 'none',
    'LayoutDependent': 'none',
    'BarrierDivergence': 'memory',
    'MisalignedAccess': 'memory',
    'OutOfBounds': 'memory',
    'ReducerMisuse': 'memory',
    'ResourceLimit': 'memory',
    'TypeMismatch': 'memory',
    'UninitializedRead': 'memory',
    'AsyncReadBeforeWait': 'memory',
    'DataRace': 'all',
    'UnwrittenOutput': 'all',
}
every_specimen = pytest.mark.parametrize('specimen', SPECIMENS, ids=lambda specimen: specimen.name)


@pytest.fixture(autouse=True)
def fixed_numbers():
    torch.manual_seed(0)


def run(launch, checks='all'):
    """Run a kernel under some checks."""
    interpreter.interpret(launch.kernel, *launch.tensors, checks=checks, pass_configs=dict(launch.pass_configs))


@every_specimen
def test_wrong_kernel_is_caught_with_its_name_and_line(specimen):
    with pytest.raises(getattr(interpreter, specimen.finding)) as caught:
        run(specimen.build(True))
    finding = caught.value
    assert type(finding).__name__ == specimen.finding
    assert 'kernel' in str(finding)
    if specimen.buffer:
        assert finding.buffer == specimen.buffer
        assert specimen.buffer in str(finding)
    if specimen.bug_lines:
        assert finding.filename == inspect.getfile(specimen.build)
        assert finding.line in specimen.bug_lines, str(finding)
        assert f':{finding.line}' in str(finding)


@every_specimen
def test_wrong_kernel_is_caught_by_the_cheapest_checks_that_should(specimen):
    with pytest.raises(getattr(interpreter, specimen.finding)):
        run(specimen.build(True), FINDINGS[specimen.finding])


@every_specimen
def test_collect_ends_and_has_the_finding(specimen):
    launch = specimen.build(True)
    switches = dict(launch.pass_configs)
    report = interpreter.interpret(launch.kernel, *launch.tensors, checks='collect', pass_configs=switches)
    assert specimen.finding in [type(error).__name__ for error in report.errors]


@every_specimen
def test_right_look_alike_has_no_finding(specimen):
    run(specimen.build(False))


@pytest.mark.parametrize('build', INNOCENTS, ids=lambda build: build.__name__)
def test_innocent_kernel_has_no_finding(build):
    run(build())


@pytest.mark.parametrize('finding', FINDINGS)
def test_every_finding_has_three_specimens(finding):
    assert Counter(specimen.finding for specimen in SPECIMENS)[finding] >= 3


def test_only_findings_about_the_whole_kernel_have_no_line():
    found = {specimen.finding for specimen in SPECIMENS if not specimen.bug_lines}
    assert found == {'UnwrittenOutput', 'ResourceLimit', 'TypeMismatch'}
