"""Facts of TileKernels' interface: where names live, which arguments they take, what is refused and how."""

import importlib
import inspect

import pytest
import torch

import tile_kernels
from tile_kernels import ArgumentError, UnsupportedError, config, engram, moe, quant

V1_FORMS = {
    'engram.engram_gate_fwd': 'hidden_states k v weight_fused eps clamp_value save_for_backward',
    'engram.engram_gate_bwd': 'grad_out hidden_states k v weight_fused dot gate_score rstd_x rstd_k clamp_value',
    'quant.swiglu_backward_and_per_token_cast': 'x grad_out weight pos_to_token_topk token_topk_to_pos '
    'num_per_channels round_sf swiglu_clamp_value',
    'torch.swiglu_backward': 'x grad_out weight pos_to_token_topk token_topk_to_pos num_per_channels '
    'swiglu_clamp_value',
    'torch.topk_sum_and_topk_group_idx': 'scores num_group_sum_topk num_topk_groups',
    'mhc.mhc_post_fwd': 'x residual post comb out',
    'mhc.mhc_post_bwd': 'x residual post comb d_o',
    'mhc.post_kernel.mhc_post_fwd': 'x residual post comb out',
    'mhc.post_kernel.mhc_post_bwd': 'x residual post comb d_o fuse_grad_acc',
    'modeling.mhc.ops.mhc_post_bwd': 'x residual post comb d_o fuse_grad_acc',
    'mhc.multilayer_recompute_kernel.mhc_multilayer_recompute': 'initial_residual pre_mix_list layer_output_list '
    'post_mix_list comb_mix_list layer_input_list residual_list',
}


@pytest.mark.parametrize(('path', 'names'), V1_FORMS.items(), ids=V1_FORMS)
def test_functions_show_the_arguments_of_the_first_form(path, names):
    module, _, name = path.rpartition('.')
    function = getattr(importlib.import_module(f'tile_kernels.{module}'), name)
    assert list(inspect.signature(function).parameters)[: len(names.split())] == names.split()


def test_names_are_where_tile_kernels_has_them():
    assert tile_kernels.quant.types.QuantTensor is tile_kernels.QuantTensor
    assert tile_kernels.mhc.post_kernel.mhc_post_fwd is tile_kernels.mhc.mhc_post_fwd
    assert tile_kernels.moe.scoring.ScoringFunc is moe.ScoringFunc
    cuda = torch.cuda.is_available()
    for name in ('get_num_ai_cores', 'get_num_cube_cores', 'get_num_vec_cores'):
        function = getattr(tile_kernels, name)
        assert function is getattr(config, name)
        assert not cuda or function() == config.get_num_sms() * (2 if name == 'get_num_vec_cores' else 1)
    with pytest.raises(UnsupportedError, match='needs an Ascend NPU'):
        tile_kernels.get_max_ub_per_vector_core()


X = torch.zeros(4, 128, dtype=torch.bfloat16)
POS = torch.zeros(4, 2, dtype=torch.int32)
STREAMS = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
KV = torch.zeros(4, 3, 64, dtype=torch.bfloat16)

REFUSED = {
    'moe.topk_gate: num_topk must be an integer, got None': lambda: moe.topk_gate(X.float(), None),
    'moe.topk_gate: num_topk must be an integer, got float 1.5': lambda: moe.topk_gate(X.float(), 1.5),
    'moe.topk_gate: num_topk must be at least 1, got -1': lambda: moe.topk_gate(X.float(), -1),
    'moe.topk_gate: scores must be a tensor, got None': lambda: moe.topk_gate(None, 2),
    "moe.topk_gating: top_k must be an integer, got str 'x'": lambda: moe.topk_gating(X.float(), 'x'),
    'moe.get_fused_mapping: alignment must be a number, got None': lambda: moe.get_fused_mapping(POS, 8, 0, None),
    'moe.get_fused_mapping: num_experts must be an integer, got None': lambda: moe.get_fused_mapping(POS, None, 0, 1),
    'moe.reduce_fused: x must be a tensor, got None': lambda: moe.reduce_fused(None, None, POS),
    r'moe.expand_to_fused_with_sf: x must be a pair \(data, sf\), got None': lambda: moe.expand_to_fused_with_sf(
        None, 128, POS, POS[:, 0]
    ),
    'moe.expand_to_fused: token_topk_to_pos must be int32, got int64': lambda: moe.expand_to_fused(
        X, POS.long(), POS[:, 0].contiguous()
    ),
    'quant.per_token_cast: fmt must be one of e4m3, e5m2, e2m1, e5m6, got None': lambda: quant.per_token_cast(X, None),
    'quant.per_token_cast: x must be a tensor, got None': lambda: quant.per_token_cast(None, 'e4m3', 128),
    'quant.per_token_cast: x_block_size must be two integers, of rows and of channels, got 3': lambda: (
        quant.per_token_cast((X.to(torch.float8_e4m3fn), torch.ones(4, 1)), 'e4m3', 128, 3)
    ),
    r'quant.per_token_cast: out must be a pair \(data, sf\), got int 3': lambda: quant.per_token_cast(
        X, 'e4m3', 128, out=3
    ),
    r'quant.per_block_cast: block_size must be one of \(32, 32\), .*, got \(-1, 128\)': lambda: quant.per_block_cast(
        X, 'e4m3', (-1, 128)
    ),
    "quant.per_channel_cast: fmt must be one of e4m3, e5m2, got 'fp8'": lambda: quant.per_channel_cast(X, 'fp8', 128),
    "quant.cast_back: x.0. must come with x_special_fmt='e5m6' if it is uint8": lambda: quant.cast_back(
        (torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 1)), 'bf16', (1, 64)
    ),
    'norm.norm_forward: eps must be a number, got None': lambda: quant.norm_forward(X, None, None),
    'engram.engram_gate_fwd: k or kv must be a tensor, got None': lambda: engram.engram_gate_fwd(
        STREAMS, None, KV[0], 1e-6, 1e-6
    ),
    'engram.engram_gate_fwd: k or kv must have 2 rows for each token, or 3 with the value': lambda: (
        engram.engram_gate_fwd(STREAMS, KV.repeat(1, 2, 1), KV[0], 1e-6, 1e-6)
    ),
}


@pytest.mark.parametrize(('sentence', 'call'), REFUSED.items(), ids=REFUSED)
def test_what_no_kernel_can_use_is_refused_in_one_sentence(sentence, call):
    with pytest.raises(ArgumentError, match=sentence) as caught:
        call()
    assert '\n' not in str(caught.value)


def test_layers_have_the_sizes_of_the_specification_unless_told():
    from tile_kernels.distributed import MoEDistributed
    from tile_kernels.modeling import EngramGateLayer, MHCPipeline

    for layer, sizes in {
        EngramGateLayer: dict(hidden_size=2048, num_experts=256),
        MHCPipeline: dict(num_connections=8, hidden_size=2048),
        MoEDistributed: dict(num_experts=256, topk=8, strategy='alltoall', group=None),
    }.items():
        parameters = inspect.signature(layer).parameters
        assert {name: parameters[name].default for name in sizes} == sizes


def test_numbers_of_numpy_are_numbers():
    np = pytest.importorskip('numpy')
    assert moe.topk_gate(X.float(), np.int64(2)).shape == (4, 2)
    assert torch.equal(quant.norm_forward(X, None, np.float32(1e-6))[0], X)


def test_layers_name_themselves():
    from tile_kernels.modeling import EngramGateLayer, MHCPipeline, MoELayer

    layer, pipeline = MoELayer(4, 2, 64), MHCPipeline(4, 64)
    for sentence, call in {
        'MoELayer: num_experts must be at least 1, got -4': lambda: MoELayer(-4, 2, 64),
        'MoELayer: topk must be at most 4, got 9': lambda: MoELayer(4, 9, 64),
        "MoELayer: scoring must be one of sigmoid, .*, got 'x'": lambda: MoELayer(4, 2, 64, scoring='x'),
        'MoELayer: x must be a tensor, got None': lambda: layer(None),
        'MoELayer: gate_weight must be .* with num_experts = 4': lambda: layer(X[:, :64], torch.zeros(5, 64)),
        'MHCPipeline: num_connections must be one of 2, 4, 8, got 3': lambda: MHCPipeline(3, 64),
        'MHCPipeline: residual must be .* with mhc_mult = 4': lambda: pipeline(STREAMS, lambda x: x),
        'MHCPipeline.head: residual must be .* with mhc_mult = 4': lambda: pipeline.head(STREAMS),
        r'EngramGateLayer: hidden must be \(..., 64\), got float32\[\]': lambda: EngramGateLayer(64, 8)(
            torch.tensor(1.0)
        ),
    }.items():
        with pytest.raises(ArgumentError, match=f'^{sentence}'):
            call()


def test_settings_are_checked():
    with pytest.raises(ArgumentError, match=r'^config.set_amax_clamp_for_quant: clamp_min_value must be at least'):
        config.set_amax_clamp_for_quant('e4m3', False, -1.0)
    with pytest.raises(ArgumentError, match=r'clamp_min_value must be at least 5\.26'):
        config.set_amax_clamp_for_quant('e4m3', False, 1e-37)  # the scale factor of zeros would be no normal number
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match=r'^config.get_device_num_sms: needs a GPU, found none$'):
            config.get_num_sms()
