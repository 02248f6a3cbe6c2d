"""Every module path of TileKernels 1.0 that users import, with the names it exports."""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tile_kernels

ROOT = Path(__file__).parent.parent
COMPAT = ROOT / 'tile_kernels' / 'compat'

#: Module path -> the public functions named after it.
MODULES = {
    'engram.engram_fused_weight_kernel': 'fused_weight',
    'engram.engram_gate_kernel': 'engram_gate_fwd engram_gate_bwd',
    'engram.engram_grad_w_reduce_kernel': 'grad_w_reduce',
    'engram.engram_hash_kernel': 'engram_hash',
    'mhc.expand_kernel': 'expand_to_mhc_fwd expand_to_mhc_bwd',
    'mhc.head_compute_mix_kernel': 'mhc_head_compute_mix_fwd mhc_head_compute_mix_bwd',
    'mhc.multilayer_recompute_kernel': 'mhc_multilayer_recompute',
    'mhc.norm_fn_kernel': 'norm_fn mhc_fn_normw_merge_fwd mhc_fn_normw_merge_bwd '
    'mhc_reduce_partials_and_rmsnorm_fwd mhc_reduce_partials_and_rmsnorm_bwd',
    'mhc.post_kernel': 'mhc_post_fwd mhc_post_bwd',
    'mhc.pre_apply_mix_kernel': 'mhc_pre_apply_mix_fwd mhc_pre_apply_mix_bwd',
    'mhc.pre_big_fuse_kernel': 'mhc_pre_big_fuse_fwd',
    'mhc.pre_split_mixes_kernel': 'mhc_pre_split_mixes_fwd mhc_pre_split_mixes_bwd',
    'mhc.sinkhorn_kernel': 'mhc_sinkhorn_fwd mhc_sinkhorn_bwd',
    'modeling.engram.engram_gate': 'EngramGateFn engram_gate',
    'modeling.mhc.functional': 'expand_from_embedding mhc_pre mhc_head',
    'modeling.mhc.ops.expand': 'expand_to_mhc',
    'modeling.mhc.ops.head_compute_mix': 'mhc_head_compute_mix',
    'modeling.mhc.ops.multilayer_recompute': 'mhc_multilayer_recompute',
    'modeling.mhc.ops.norm_fn': 'mhc_pre_norm_fn',
    'modeling.mhc.ops.post': 'mhc_post mhc_post_fwd mhc_post_bwd',
    'modeling.mhc.ops.pre_apply_mix': 'mhc_pre_apply_mix',
    'modeling.mhc.ops.pre_big_fuse': 'mhc_pre_big_fuse',
    'modeling.mhc.ops.pre_split_mixes': 'mhc_pre_split_mixes',
    'modeling.mhc.ops.sinkhorn': 'sinkhorn_normalize',
    'moe.aux_fi_kernel': 'aux_fi',
    'moe.common': '',
    'moe.expand_to_fused_kernel': 'expand_to_fused expand_to_fused_with_sf',
    'moe.get_fused_mapping_kernel': 'get_fused_mapping',
    'moe.group_count_kernel': 'group_count',
    'moe.inplace_unique_group_indices_kernel': 'inplace_unique_group_indices',
    'moe.mask_indices_by_tp_kernel': 'mask_indices_by_tp',
    'moe.normalize_weight_kernel': 'normalize_weight',
    'moe.reduce_fused_kernel': 'reduce_fused',
    'moe.scoring': 'ScoringFunc',
    'moe.top2_sum_gate_kernel': 'top2_sum_gate',
    'moe.topk_gate_kernel': 'topk_gate',
    'moe.topk_sum_and_topk_group_idx_kernel': 'topk_sum_and_topk_group_idx',
    'quant.cast_back_e5m6_kernel': 'cast_back',
    'quant.cast_back_kernel': 'cast_back per_token_cast_back',
    'quant.common': '',
    'quant.per_block_cast_kernel': 'per_block_cast per_block_cast_with_sf_only per_block_cast_with_precomputed_sf',
    'quant.per_block_cast_lossless_kernel': 'per_block_cast_lossless',
    'quant.per_channel_cast_and_transpose_kernel': 'per_channel_cast_and_transpose',
    'quant.per_channel_cast_fused_kernel': 'per_channel_cast_fused',
    'quant.per_channel_cast_kernel': 'per_channel_cast',
    'quant.per_token_cast_kernel': 'per_token_cast per_token_cast_with_sf_only per_token_cast_with_precomputed_sf',
    'quant.per_token_cast_to_e5m6_kernel': 'per_token_cast',
    'quant.swiglu_backward_and_per_token_cast_kernel': 'swiglu_backward_and_per_token_cast',
    'quant.swiglu_forward_and_per_channel_cast_and_transpose_kernel': (
        'swiglu_forward_and_per_channel_cast_and_transpose'
    ),
    'quant.swiglu_forward_and_per_token_cast_kernel': 'swiglu_forward_and_per_token_cast',
    'quant.types': 'QuantTensor',
    'testing.bench': 'dtype_to_str make_param_id make_param_key',
    'testing.generator': 'generate_e5m6_inputs generate_hidden_sizes generate_moe_params generate_num_sms '
    'generate_num_tokens generate_rand_float generate_topk_idx',
    'testing.numeric': 'assert_equal calc_diff check_bias count_bytes',
    'testing.quant': 'clear_unused_sf',
    'torch.cast': 'cast cast_back',
    'torch.cast_e5m6': 'cast_to_e5m6 cast_back_from_e5m6',
    'torch.engram': 'engram_gate_ref engram_hash_ref make_offsets',
    'torch.expand_to_fused': 'expand_to_fused expand_to_fused_with_sf',
    'torch.mhc': 'expand_to_mhc_ref mhc_head_compute_mix_ref mhc_post_ref mhc_pre_apply_mix_ref mhc_pre_norm_fn_ref '
    'mhc_pre_split_mixes_ref sinkhorn_normalize_ref',
    'torch.moe': 'aux_fi group_count inplace_unique_group_indices mask_indices_by_tp normalize_weight',
    'torch.per_channel_cast_fused': 'per_channel_cast_fused',
    'torch.reduce_fused': 'reduce_fused',
    'torch.swiglu': 'swiglu_forward swiglu_backward',
    'torch.topk': 'stable_topk topk_sum_and_topk_group_idx top2_sum_gate',
    'transpose.batched_transpose_kernel': 'transpose batched_transpose',
    'utils': 'ceil_div align is_power_of_two',
    'config': 'get_device_num_sms set_num_sms get_num_sms get_max_smem_per_sm',
}

#: Functions that TileKernels 1.0 and 2.1 declare differently: the path of 1.0 has its own.
OF_THE_FIRST_RELEASE = {'mhc.post_kernel.mhc_post_bwd'}


def run(code: str, folder: Path = ROOT) -> str:
    """What a fresh process prints that starts in a folder."""
    environment = os.environ | {'PYTHONPATH': str(ROOT)} if folder == ROOT else os.environ
    command = [sys.executable, '-c', code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(('path', 'names'), MODULES.items(), ids=MODULES)
def test_a_module_exports_the_names_of_its_package(path, names):
    module = importlib.import_module(f'tile_kernels.{path}')
    assert inspect.ismodule(module)
    package = importlib.import_module(f'tile_kernels.{path.rpartition(".")[0]}'.rstrip('.'))
    for name in names.split():
        value = getattr(module, name)
        if path.count('.') == 1 and hasattr(package, name) and f'{path}.{name}' not in OF_THE_FIRST_RELEASE:
            assert value is getattr(package, name)


def test_every_file_here_is_listed_explained_and_one_line_long():
    files = {path for path in COMPAT.rglob('*.py') if path.name != '__init__.py'}
    ours = {f'torch.{name}' for name in ('gemm', 'quant', 'rand', 'transform', 'transpose')}  # never in TileKernels
    names = {'.'.join(path.relative_to(COMPAT).with_suffix('').parts) for path in files}
    assert names - ours == names & MODULES.keys()
    for path in files:
        module = importlib.import_module('tile_kernels.' + '.'.join(path.relative_to(COMPAT).with_suffix('').parts))
        assert module.__doc__
        statements = [line for line in path.read_text().splitlines()[1:] if line and line[0] not in ' )']
        assert len(statements) == 1, path


def test_fresh_processes_import_every_path_and_packages_keep_their_functions():
    paths = [path for path in MODULES if path not in ('testing.bench', 'testing.generator')]
    out = run(
        f'import importlib, inspect\nfor path in {paths!r}: importlib.import_module("tile_kernels." + path)\n'
        'import tile_kernels\nfrom tile_kernels.modeling import engram\n'
        'shadowed = [getattr(tile_kernels.torch, name) for name in '
        '("cast", "expand_to_fused", "per_channel_cast_fused", "reduce_fused")]\n'
        'print(*map(inspect.isfunction, [*shadowed, engram.engram_gate]))'
    )
    assert out.split() == ['True'] * 5


def test_modules_are_attributes_without_an_import():
    out = run(
        'import sys, tile_kernels as t\n'
        'print("tile_kernels.quant.types" in sys.modules, t.quant.types.QuantTensor is t.QuantTensor, '
        't.moe.topk_gate_kernel.topk_gate is t.moe.topk_gate, t.moe.MoELayer.__name__, '
        'hasattr(t.quant, "no_such_kernel"), hasattr(t.moe, "no_such_kernel"))'
    )
    assert out.split() == ['False', 'True', 'True', 'MoELayer', 'False', 'False']


def test_python_starts_inside_the_package_folder():
    code = 'import torch; print(torch.zeros(1).tolist(), torch.__file__)'
    out = run(code, Path(tile_kernels.__file__).parent)
    assert out.startswith('[0.0]') and 'tile_kernels' not in Path(out.split()[1]).parts
