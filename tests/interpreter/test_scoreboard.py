"""`tools/scoreboard.py` on a small checkout: it tells right, unsupported, wrong and missing programs apart."""

import ast
import json
import subprocess
import sys
from pathlib import Path

from tools.scoreboard import Smaller

TOOL = Path(__file__).parents[2] / 'tools' / 'scoreboard.py'
KERNEL = """
import tilelang
import tilelang.language as T
import torch


@tilelang.jit(out_idx=[-1])
def twice(n):
    @T.prim_func
    def main(x: T.Tensor((n,), 'float32'), y: T.Tensor((n,), 'float32')):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                y[i] = BODY

    return main


def test_twice():
    x = torch.randn(32, device='cuda')
    assert torch.equal(twice(32)(x), x * 2)


if __name__ == '__main__':
    test_twice()
"""


def test_the_scoreboard_counts_programs_by_result(tmp_path):
    examples, tests = tmp_path / 'examples', tmp_path / 'testing' / 'python'
    examples.mkdir()
    tests.mkdir(parents=True)
    (examples / 'right.py').write_text(KERNEL.replace('BODY', 'x[i] * 2.0'))
    (examples / 'wrong.py').write_text(KERNEL.replace('BODY', 'x[i] * 3.0'))
    (examples / 'refused.py').write_text(KERNEL.replace('BODY', "T.call_extern('float32', 'nobody_knows', x[i])"))
    (examples / 'missing.py').write_text('import no_such_package\n' + KERNEL)
    (tests / 'test_right.py').write_text(KERNEL.replace('BODY', 'x[i] * 2.0'))
    out = tmp_path / 'out.json'
    command = [sys.executable, str(TOOL), str(tmp_path), '--limit', '60', '--json', str(out)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    outcomes = json.loads(out.read_text())
    assert {Path(one['name']).stem: one['result'] for one in outcomes['examples']} == {
        'right': 'right',
        'wrong': 'wrong',
        'refused': 'unsupported',
        'missing': 'missing',
    }
    assert [one['result'] for one in outcomes['tests']] == ['right']
    assert '| examples | 4 | 1 | 1 | 0 | 1 | 0 | 0 | 1 | 0 | 33.3 % |' in found.stdout
    assert 'external function nobody_knows' in found.stdout


def test_smaller_sizes_leave_kernels_alone():
    program = """
def kernel(n):
    return T.alloc_shared((4096,), n)
def run_all(batch=8, heads=32, length=8192):
    kernel(2048)
def main():
    kernel(2048, length=16384)
if __name__ == '__main__':
    parser.add_argument('--batch', default=128)
    parser.add_argument('--n', default=4096)
    m, block = 8192, 128
    for config in [(4096, 64, 2), (2048, 128, 4)]:
        kernel(*config)
"""
    expected = """
def kernel(n):
    return T.alloc_shared((4096,), n)
def run_all(batch=1, heads=32, length=512):
    kernel(2048)
def main():
    kernel(512, length=512)
if __name__ == '__main__':
    parser.add_argument('--batch', default=1)
    parser.add_argument('--n', default=512)
    m, block = (512, 128)
    for config in [(512, 64, 2), (512, 128, 4)]:
        kernel(*config)
"""
    assert ast.unparse(Smaller().visit(ast.parse(program))) == ast.unparse(ast.parse(expected))
