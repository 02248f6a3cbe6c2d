"""Recompute: the inputs of many layers and the residual streams between them, from the outputs of the layers.

    layer_input[l] = apply_mix(residual, pre[l])
    residual       = post(layer_output[l], residual, post[l], comb[l]), also written to residuals[l]

Between layers the streams stay in registers, rounded as in memory: the bits are those of the two ops in turn. The first
residual is read once, not twice for each layer. A launch takes up to `MAX_LAYERS` layers. Their tensors are separate
kernel parameters, so nothing is copied to the device first and CUDA graphs can capture the call. Memory bound: the
minimum is one read of the first residual and of every layer_output, and one write of the rest.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro, resident_blocks
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Out, op
from tile_kernels.mhc._checks import BF16, F32, STREAMS, check_streams, flat, lead_of, vector_width
from tile_kernels.mhc._macros import (
    ROW_PASS_CONFIGS,
    ROW_THREADS,
    WARP,
    apply_to_vector,
    load_streams,
    load_vector,
    part_threads_for,
    post_to_vector,
    store_streams,
    store_vector,
)

#: Layers of one launch.
MAX_LAYERS = 6

#: Outputs of layers that a thread loads ahead. More would take registers, so fewer threads would run.
AHEAD = 4

# Config ------------------------------------------------------------------------------------


def choose(hidden: int, num_streams: int, width: int, num_inputs: int, num_posts: int, num_tokens: int) -> dict:
    """One vector for each thread: the addresses of so many tensors take its registers.

    `resident_threads` threads of an SM have enough registers for the streams between layers.
    """
    return dict(num_threads=part_threads_for(hidden // width), resident_threads=576 if num_streams <= 4 else 256)


# Kernel ------------------------------------------------------------------------------------


@macro
def take_coefficients(token, layer, mix, first, mix_shared):
    """The first warp of a block copies the coefficients of a layer to `mix_shared[layer, first:]`."""
    tx = T.get_thread_binding()
    count = mix.shape[1]
    for step in T.unroll(T.ceildiv(count, WARP)):
        if tx < WARP and step * WARP + tx < count:
            mix_shared[layer, first + step * WARP + tx] = mix[token, step * WARP + tx]


@macro
def recall(mix_shared, layer, first, mix_local):
    """Load coefficients of a layer from shared memory."""
    for v in T.unroll(mix_local.shape[0] // 2):
        for e in T.vectorized(2):
            mix_local[2 * v + e] = mix_shared[layer, first + 2 * v + e]


@kernel(
    choose=choose,
    space=dict(num_threads=ROW_THREADS, resident_threads=(256, 512, 576, 640)),
    pass_configs=ROW_PASS_CONFIGS,
)
def recompute_kernel(
    hidden: int,
    num_streams: int,
    width: int,
    num_inputs: int,
    num_posts: int,
    *,
    num_threads: int,
    resident_threads: int,
):
    """Inputs of `num_inputs` layers, and residuals after the first `num_posts` of them."""
    num_vectors = hidden // width
    parts = -(-num_vectors // num_threads)
    num_pairs = num_streams * num_streams
    num_tokens = T.dynamic('num_tokens')

    def streams():
        return T.Tensor((num_tokens, num_streams, hidden), T.bfloat16)

    def row():
        return T.Tensor((num_tokens, 1, hidden), T.bfloat16)

    def mix():
        return T.Tensor((num_tokens, num_streams), T.float32)

    def pairs():
        return T.Tensor((num_tokens, num_pairs), T.float32)

    @T.prim_func
    def recompute(
        first: streams(),
        pre0: mix(),
        layer_input0: row(),
        layer_output0: row(),
        post0: mix(),
        comb0: pairs(),
        residual0: streams(),
        pre1: mix(),
        layer_input1: row(),
        layer_output1: row(),
        post1: mix(),
        comb1: pairs(),
        residual1: streams(),
        pre2: mix(),
        layer_input2: row(),
        layer_output2: row(),
        post2: mix(),
        comb2: pairs(),
        residual2: streams(),
        pre3: mix(),
        layer_input3: row(),
        layer_output3: row(),
        post3: mix(),
        comb3: pairs(),
        residual3: streams(),
        pre4: mix(),
        layer_input4: row(),
        layer_output4: row(),
        post4: mix(),
        comb4: pairs(),
        residual4: streams(),
        pre5: mix(),
        layer_input5: row(),
        layer_output5: row(),
        post5: mix(),
        comb5: pairs(),
        residual5: streams(),
    ):
        with T.Kernel(num_tokens * parts, threads=num_threads) as pid:
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, num_threads))
            x_local = T.alloc_local((num_streams, width), T.bfloat16)
            y_local = T.alloc_local((num_streams, width), T.bfloat16)
            output_local = T.alloc_local((AHEAD, width), T.bfloat16)
            mix_local = T.alloc_local((num_streams,), T.float32)
            comb_local = T.alloc_local((num_pairs,), T.float32)
            mix_shared = T.alloc_shared((num_inputs, 2 * num_streams + num_pairs), T.float32)
            tx = T.get_thread_binding()
            token, index = pid // parts, pid % parts * num_threads + tx
            pres = (pre0, pre1, pre2, pre3, pre4, pre5)
            inputs = (layer_input0, layer_input1, layer_input2, layer_input3, layer_input4, layer_input5)
            outputs = (layer_output0, layer_output1, layer_output2, layer_output3, layer_output4, layer_output5)
            posts = (post0, post1, post2, post3, post4, post5)
            combs = (comb0, comb1, comb2, comb3, comb4, comb5)
            residuals = (residual0, residual1, residual2, residual3, residual4, residual5)

            for l in (0, 1, 2, 3, 4, 5):
                if l < num_inputs:
                    take_coefficients(token, l, pres[l], 0, mix_shared)
                if l < num_posts:
                    take_coefficients(token, l, posts[l], num_streams, mix_shared)
                    take_coefficients(token, l, combs[l], 2 * num_streams, mix_shared)
            if index < num_vectors:
                load_streams(first, token, index, x_local, 0)
                for l in (0, 1, 2, 3):
                    if l < num_posts:
                        load_vector(outputs[l], token, 0, index, output_local, l % AHEAD)
            T.sync_threads()
            if index < num_vectors:
                for l in (0, 1, 2, 3, 4, 5):
                    if l < num_inputs:
                        recall(mix_shared, l, 0, mix_local)
                        apply_to_vector(x_local, 0, mix_local, y_local)
                        store_vector(y_local, 0, inputs[l], token, 0, index)
                    if l < num_posts:
                        recall(mix_shared, l, num_streams, mix_local)
                        recall(mix_shared, l, 2 * num_streams, comb_local)
                        post_to_vector(output_local, l % AHEAD, x_local, 0, mix_local, comb_local, y_local)
                        if l + AHEAD < num_posts:
                            load_vector(outputs[l + AHEAD], token, 0, index, output_local, l % AHEAD)
                        store_streams(y_local, residuals[l], token, index)
                        for c in T.unroll(num_streams):
                            for e in T.vectorized(width):
                                x_local[c, e] = y_local[c, e]

    return recompute


# Ops ---------------------------------------------------------------------------------------


@op()
def recompute_(
    initial_residual: Tensor,
    pre_mix_list: list[Tensor],
    layer_output_list: list[Tensor],
    post_mix_list: list[Tensor],
    comb_mix_list: list[Tensor],
    layer_input_list: list[Out],
    residual_list: list[Out],
) -> None:
    """Recompute the inputs of L layers and the residual streams after them, into memory of the caller.

    Args:
        initial_residual: (..., n, hidden) bfloat16, contiguous.
        pre_mix_list: L tensors (..., n, 1) float32.
        layer_output_list: L or L - 1 tensors (..., hidden) bfloat16.
        post_mix_list: as many tensors (..., n, 1) float32.
        comb_mix_list: as many tensors (..., n, n) float32.
        layer_input_list: L tensors (..., hidden) bfloat16; overwritten.
        residual_list: as many tensors (..., n, hidden) bfloat16 as outputs; overwritten.
    """
    lists = (pre_mix_list, layer_input_list, layer_output_list, post_mix_list, comb_mix_list, residual_list)
    lead, num_streams, hidden = _check(initial_residual, *lists)
    row = (1, hidden)
    inner = ((num_streams,), row, row, (num_streams,), (num_streams**2,), (num_streams, hidden))
    first = initial_residual
    for start in range(0, len(pre_mix_list), MAX_LAYERS):
        pre, inputs, outputs, post, comb, residuals = (tensors[start : start + MAX_LAYERS] for tensors in lists)
        views = [
            flat(tensors[layer], lead, *shape) if layer < len(tensors) else None
            for layer in range(MAX_LAYERS)
            for tensors, shape in zip((pre, inputs, outputs, post, comb, residuals), inner, strict=True)
        ]
        static = (hidden, num_streams, vector_width(first, *inputs, *outputs, *residuals), len(pre), len(post))
        launch(recompute_kernel, static, flat(first, lead, num_streams, hidden), *views)
        first = residuals[-1] if residuals else first


def _check(
    initial_residual: Tensor,
    pre: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    post: Sequence[Tensor],
    comb: Sequence[Tensor],
    residuals: Sequence[Tensor],
) -> tuple[tuple[int, ...], int, int]:
    """Check all tensors; returns the leading shape, the number of streams and hidden."""
    check.at_least(len(pre), 1, 'the length of pre_mix_list')
    check.equal(len(inputs), len(pre), 'the length of layer_input_list')
    check.one_of(len(outputs), (len(pre) - 1, len(pre)), 'the length of layer_output_list')
    for name, tensors in dict(post_mix_list=post, comb_mix_list=comb, residual_list=residuals).items():
        check.equal(len(tensors), len(outputs), f'the length of {name}')
    lead = lead_of(initial_residual, 'initial_residual', 'num_streams hidden', BF16)
    num_streams, hidden = initial_residual.shape[-2:]
    check_streams(num_streams, hidden)
    known = dict(num_streams=num_streams, one=1, outputs=num_streams, hidden=hidden)
    for name, tensors, spec, dtype in (
        ('pre_mix_list', pre, 'num_streams one', F32),
        ('layer_input_list', inputs, 'hidden', BF16),
        ('layer_output_list', outputs, 'hidden', BF16),
        ('post_mix_list', post, 'num_streams one', F32),
        ('comb_mix_list', comb, 'num_streams outputs', F32),
        ('residual_list', residuals, 'num_streams hidden', BF16),
    ):
        for layer, x in enumerate(tensors):
            lead_of(x, f'{name}[{layer}]', spec, dtype, lead, **known)
            check.same_device(initial_residual=initial_residual, **{f'{name}[{layer}]': x})
    return lead, num_streams, hidden


def mhc_multilayer_recompute(
    initial_residual: Tensor,
    pre_mix_list: Sequence[Tensor],
    layer_output_list: Sequence[Tensor],
    post_mix_list: Sequence[Tensor],
    comb_mix_list: Sequence[Tensor],
    layer_input_list: Sequence[Tensor],
    residual_list: Sequence[Tensor],
) -> None:
    """Recompute the inputs of many layers and the residual streams after them, in place.

    Args:
        initial_residual: (..., n, hidden) bfloat16, contiguous.
        pre_mix_list: for each of L layers (..., n, 1) float32.
        layer_output_list: (..., hidden) bfloat16 for each of the layers, or all but the last.
        post_mix_list: (..., n, 1) float32, as many.
        comb_mix_list: (..., n, n) float32, as many.
        layer_input_list: L tensors (..., hidden) bfloat16; overwritten.
        residual_list: (..., n, hidden) bfloat16, as many as outputs; overwritten with the residual after each layer.
    """
    lists = dict(
        pre_mix_list=pre_mix_list,
        layer_output_list=layer_output_list,
        post_mix_list=post_mix_list,
        comb_mix_list=comb_mix_list,
        layer_input_list=layer_input_list,
        residual_list=residual_list,
    )
    for name, tensors in lists.items():
        if not isinstance(tensors, Sequence):
            check.fail(name, 'must be a sequence of tensors', check.describe(tensors))
        for layer, x in enumerate(tensors):
            check.tensor(x, f'{name}[{layer}]')
    recompute_(initial_residual, *(list(tensors) for tensors in lists.values()))


# Cases -------------------------------------------------------------------------------------


def _make(lead: tuple, hidden: int, num_streams: int, num_layers: int, num_posts: int) -> dict:
    pre, inputs, outputs, post, comb, residuals = ([] for _ in range(6))
    initial_residual = torch.randn(*lead, num_streams, hidden, dtype=BF16)
    for layer in range(num_layers):
        pre.append(torch.rand(*lead, num_streams, 1) / num_streams)
        inputs.append(torch.empty(*lead, hidden, dtype=BF16))
        if layer < num_posts:
            outputs.append(torch.randn(*lead, hidden, dtype=BF16))
            post.append(torch.rand(*lead, num_streams, 1))
            comb.append(torch.randn(*lead, num_streams, num_streams).softmax(-1))
            residuals.append(torch.empty(*lead, num_streams, hidden, dtype=BF16))
    return dict(
        initial_residual=initial_residual,
        pre_mix_list=pre,
        layer_output_list=outputs,
        post_mix_list=post,
        comb_mix_list=comb,
        layer_input_list=inputs,
        residual_list=residuals,
    )


recompute_.cases(
    make=_make,
    match=dict(rtol=1e-2, atol=2e-2),  # one stream element rounded differently changes all later layers
    smoke=grid(lead=[(0,), (2, 3)], hidden=[128], num_streams=[4], num_layers=[2], num_posts=[1, 2])
    + grid(lead=[(3,)], hidden=[576], num_streams=STREAMS, num_layers=[1], num_posts=[0, 1])
    + grid(lead=[(3,)], hidden=[64], num_streams=[4], num_layers=[6], num_posts=[5, 6])
    + grid(lead=[(3,)], hidden=[64], num_streams=[2], num_layers=[8], num_posts=[7]),  # two launches
    full=grid(lead=[(2001,)], hidden=[2560, 7168], num_streams=[4], num_layers=[4, 5], num_posts=[4]),
    bench=grid(lead=[(8192,)], hidden=[7168], num_streams=[4], num_layers=[6], num_posts=[6])
    + grid(lead=[(64,), (4096,)], hidden=[4096], num_streams=[4], num_layers=[4], num_posts=[3]),
)
