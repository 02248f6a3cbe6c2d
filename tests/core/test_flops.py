"""`FlopCounterMode` and `torch.profiler` see ops by name."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from tile_kernels.attention import flash_attn_func, flash_attn_varlen_func
from tile_kernels.core.call import naming
from tile_kernels.core.registry import load_ops
from tile_kernels.gemm import gemm, grouped_gemm
from tile_kernels.modeling import MoELayer
from tile_kernels.norm import norm_forward
from tile_kernels.quant import per_token_cast

BF16 = torch.bfloat16


def counted(call, **options):
    with FlopCounterMode(display=False, **options) as counter:
        call()
    return {str(op): flops for op, flops in counter.get_flop_counts().get('Global', {}).items()}


def test_products_count_forward_and_backward():
    a, b = torch.randn(5, 64, dtype=BF16, requires_grad=True), torch.randn(24, 64, dtype=BF16, requires_grad=True)
    found = counted(lambda: gemm(a, b).sum().backward())
    assert found == {'tile_kernels.gemm_gemm': 2 * 5 * 24 * 64, 'tile_kernels.gemm_gemm_bwd': 4 * 5 * 24 * 64}
    weights, ends = torch.randn(3, 24, 64, dtype=BF16), torch.tensor([1, 1, 4], dtype=torch.int32)
    assert counted(lambda: grouped_gemm(a.detach(), weights, ends)) == {
        'tile_kernels.gemm_grouped_gemm': 2 * 4 * 24 * 64  # the fifth row has no group
    }


def test_attention_counts_as_in_pytorch_and_a_mask_counts_less():
    q, k, v = (torch.randn(2, 64, 4, 32, dtype=BF16, requires_grad=True) for _ in range(3))
    shape = (2, 4, 64, 32)
    ours = counted(lambda: flash_attn_func(q, k, v).sum().backward())
    assert ours == {
        'tile_kernels.attention_attend': sdpa_flop_count(shape, shape, shape),
        'tile_kernels.attention_attend_bwd': sdpa_backward_flop_count(shape, shape, shape, shape),
    }
    (causal,) = counted(lambda: flash_attn_func(q, k, v, causal=True)).values()
    assert causal == ours['tile_kernels.attention_attend'] * 65 // 128
    ends = torch.tensor([0, 40, 128], dtype=torch.int32)
    rows = [x.detach().flatten(0, 1) for x in (q, k, v)]
    (packed,) = counted(lambda: flash_attn_varlen_func(*rows, ends, ends, 88, 88)).values()
    assert packed == 4 * (40**2 + 88**2) * 4 * 32


def test_fake_tensors_count_like_real_ones():
    def layer_flops():
        torch.manual_seed(0)
        layer = MoELayer(4, 2, 64, intermediate_dim=32)
        x = torch.randn(6, 64, dtype=BF16)
        return counted(lambda: layer(x))

    with FakeTensorMode():
        fake = layer_flops()
    assert fake == layer_flops()
    assert sum(fake.values()) == 2 * 6 * 64 * 4 + 2 * 12 * 64 * 32 * 3  # gate, then three matrices for 12 rows


def test_every_op_that_declares_a_count_is_counted():
    ops = [op for op in load_ops().values() if op.case_set is not None and op.case_set.flops is not None]
    families = {op.family for op in ops}
    assert {'gemm', 'attention', 'linear_attention', 'moe'} <= families
    for op in ops:
        calls = (op.case_set.arguments(op.name, case) for case in op.case_set.smoke)
        given = next(given for given in calls if op.case_set.flops(**given))
        expected = op.case_set.flops(**given)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            op.call(**given)
        assert counter.get_total_flops() == expected, op.name


def slices(call):
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    return {event.key: event.count for event in found.key_averages() if '.' in event.key}


def test_torch_profiler_names_calls_and_gradients_once():
    x = torch.randn(4, 128, dtype=BF16, requires_grad=True)
    found = slices(lambda: norm_forward(x, None, 1e-6)[0].sum().backward())
    assert found == {'norm.norm_forward': 1, 'norm.norm_backward': 1}
    assert slices(lambda: [per_token_cast(x.detach(), 'e4m3_1x128_f32') for _ in range(3)]) == {
        'quant.per_token_cast': 3
    }
    assert not naming.elsewhere


def test_torch_profiler_names_operators_of_compiled_code():
    compiled = torch.compile(lambda x: norm_forward(x, None, 1e-6)[0] + 1, fullgraph=True, backend='aot_eager')
    x = torch.randn(4, 128, dtype=BF16)
    compiled(x)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        compiled(x)
    assert [event.count for event in found.key_averages() if event.key == 'tile_kernels::norm_norm_forward'] == [1]


@pytest.mark.parametrize('failing', [False, True])
def test_a_call_after_an_error_has_its_name(failing):
    def call():
        if failing:
            with pytest.raises(Exception, match='num_tokens'):
                per_token_cast(torch.zeros(3), 'e4m3_1x128_f32')
        per_token_cast(torch.zeros(4, 128), 'e4m3_1x128_f32')

    assert slices(call)['quant.per_token_cast'] == 1 + failing
