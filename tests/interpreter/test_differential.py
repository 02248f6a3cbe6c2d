"""The interpreter computes what the GPU computed (tools/gpu_outputs.py): the same bits, or within the op's bounds."""

import json
from pathlib import Path

import pytest

from tests.sampling import a_few_of_each, ran_on_a_gpu
from tile_kernels import knobs
from tile_kernels.core.jit import kernels
from tile_kernels.core.op import ops
from tile_kernels.testing import contract
from tile_kernels.testing.differential import difference, run_case
from tile_kernels.testing.poison import poisoned

RECORD = json.loads((Path(__file__).parent / 'gpu_outputs.json').read_text())['cases']
CASES = {str(case): case for case in contract.contract_cases('smoke')}

#: Ops that were recorded under another name, and their family or name now. Recorded names are the seeds of the inputs.
RENAMED = {
    'engram.engram_': 'engram.',
    'moe.expand_with_sf[': 'moe.expand_to_fused_with_sf[',
    'moe.reduce_rows_[': 'moe.weighted_reduce_rows_[',
    'quant.add_norm': 'norm.add_norm',
    'quant.convert[': 'quant.cast[',
    'quant.dequantise[': 'quant.dequantize[',
    'quant.fake_quantise[': 'quant.fake_quantize[',
    'quant.norm': 'norm.norm',
    'quant.swiglu': 'activation.swiglu',
    'transform.apply_rotary_[': 'transform.apply_rotary[',
}


def named_now(name: str) -> str:
    """The case that a recorded name stands for."""
    for old, new in RENAMED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


#: Recorded when the kernels of GPUs without wgmma had ops of their own.
PORTABLE = {
    name: contract.ContractCase(ops[base.partition('[')[0]], CASES[base].case, 'b200')
    for name in RECORD
    if name != (base := name.replace('gemm.portable_', 'gemm.'))
}
CASES |= PORTABLE
CASES |= {name: CASES[named_now(name)] for name in RECORD if named_now(name) in CASES}

#: They pass through expf, which the CPU rounds differently for some elements; kernel and twin agree on each device.
OTHER_EXP = {
    'quant.swiglu_forward[num_tokens=9-hidden=264-bfloat16-float32-map-clamp_value=1.0]',
    'quant.swiglu_forward[num_tokens=9-hidden=264-bfloat16-float32-psum-clamp_value=1.0]',
    'quant.swiglu_forward_and_per_token_cast[num_tokens=6-hidden=520-bfloat16-e4m3_1xall_f32-map-num_counts=3-clamp_value=1.0]',
    'quant.swiglu_forward_and_per_token_cast[num_tokens=6-hidden=520-bfloat16-e4m3_1xall_f32-psum-num_counts=3-clamp_value=1.0]',
    'quant.swiglu_forward_and_per_token_cast[num_tokens=9-hidden=96-float32-e2m1_1x32_f32-psum-num_counts=4-clamp_value=1.0]',
}


#: The first is for GPUs without large clusters. It ran its full cases on an H200 at c885f1f. The second is newer than
#: the record; it ran its smoke cases there at 99316fa.
NOT_RECORDED = {'project_slices_kernel', 'route_kernel'}


def test_every_kernel_ran_on_a_gpu():
    ran = set()
    for name in RECORD:
        with CASES[name].choosing():
            ran |= {launch.kernel.name for launch in CASES[name].op.trace_case(CASES[name].case)}
    own = {name for name, kernel in kernels.items() if kernel.__module__.startswith('tile_kernels.')}
    unrun = {name for name in own if not ran_on_a_gpu(kernels[name])}
    assert own - NOT_RECORDED - unrun == ran - unrun, 'run tools/gpu_outputs.py on a GPU'


#: A few cases of every op; all of them with `TK_FULL_TEST=1`. (The contract compares the rest with their twins.)
COMPARED = a_few_of_each(sorted(set(RECORD) - OTHER_EXP), lambda name: name.partition('[')[0], 2)


@pytest.mark.parametrize('name', COMPARED, ids=str)
def test_interpreter_equals_the_gpu(name):
    case = CASES[name]
    with poisoned():
        arguments = case.op.case_set.arguments(name.partition('[')[0], case.case)
    with knobs(interpret=True):
        found = run_case(case, 'cpu', arguments)
    assert difference(CASES[name], RECORD[name], found) is None
