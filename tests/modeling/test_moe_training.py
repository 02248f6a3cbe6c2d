"""Train the layer: the losses of plain PyTorch, compiled gradients, its page, the example in one and two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.modeling.test_moe_layer import DEVICE, assert_near, gradients, make, plain
from tile_kernels.core.launch import tracing
from tile_kernels.modeling import MoELayer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / 'examples' / 'training' / 'train_moe_lm.py'


def losses(run, layer, num_steps=8):
    """The losses of a layer that learns a fixed map of its tokens."""
    torch.manual_seed(3)
    x = torch.randn(48, 64, device=DEVICE)
    target = x.roll(1, -1) * x.sign()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    found = []
    for _ in range(num_steps):
        loss = (run(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_trains_to_the_losses_of_plain_pytorch():
    layer, reference = (make(dtype=torch.float32, num_shared_experts=1)[0] for _ in range(2))
    rounded = lambda x: plain(reference, x, reference.gate.weight.bfloat16())  # the layer scores in bfloat16
    found, expected = losses(layer, layer), losses(rounded, reference)
    assert found[-1] < 0.6 * found[0]
    assert found == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(
    'options', [{}, {'num_shared_experts': 1, 'balance_rate': 0.1}, {'compute': 'fp8'}], ids=['bf16', 'shared', 'fp8']
)
def test_compiles_with_gradients_and_without_graph_breaks(options):
    torch.manual_seed(0)
    layer = MoELayer(4, 2, 128, device=DEVICE, **options)
    x = torch.randn(20, 128, device=DEVICE, dtype=torch.bfloat16)
    y, dx, dw = gradients(layer, layer, x)
    counted = layer.tokens_per_expert.clone()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend='aot_eager')
    y_compiled, dx_compiled, dw_compiled = gradients(compiled, layer, x)
    assert torch.equal(y_compiled, y)
    assert_near(dx_compiled, dx)
    assert dw_compiled.keys() == dw.keys()
    for name in dw:
        assert_near(dw_compiled[name], dw[name])
    assert torch.equal(layer.tokens_per_expert, 2 * counted)


@pytest.mark.parametrize('compute', ['bf16', 'fp8'])
def test_a_forward_is_seven_launches(compute):
    layer = MoELayer(4, 2, 128, compute=compute, device=DEVICE).eval()
    if compute == 'fp8':
        layer.experts.prepare_fp8()
    with torch.no_grad(), tracing() as launches:
        layer(torch.zeros(20, 128, device=DEVICE, dtype=torch.bfloat16))
    assert len(launches) == 7


def test_the_page_prints_what_it_says(capsys):
    page = (ROOT / 'docs' / 'moe-layer.md').read_text()
    exec('\n'.join(re.findall(r'```python\n(.*?)```', page, re.DOTALL)), {})
    assert capsys.readouterr().out == ''.join(re.findall(r'```text\n(.*?)```', page, re.DOTALL))


def run_example(*command):
    """The losses it prints, and its last line."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    # Two processes of one machine need no other network than its own.
    environment = os.environ | {'PYTHONPATH': path, 'GLOO_SOCKET_IFNAME': 'lo'}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r'step +\d+  loss ([\d.]+)', done.stdout)], done.stdout


def test_the_example_learns():
    found, output = run_example(EXAMPLE, '--steps', '20')
    assert len(found) == 2 and found[0] > 5 and found[1] < 3
    assert re.search(
        r'20 steps on 1 x \w+ in .*\nfinal loss .*, byte counts alone 2\.\d+, entropy of the text 0\.', output
    )


def test_the_example_learns_in_two_processes():
    launcher = ('-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2')
    found, output = run_example(*launcher, EXAMPLE, '--steps', '20')
    assert len(found) == 2 and found[0] > 5 and found[1] < 3
    assert '20 steps on 2 x ' in output
