"""Recompute: the inputs of many layers and the residual streams between them, from what the layers put out.

    layer_input[l] = apply_mix(residual, pre[l])
    residual       = post(layer_output[l], residual, post[l], comb[l]), also written to residuals[l]

Between layers the streams stay in registers, rounded as if they had been written and read: the same bits as the two ops
one after another, with one read of the first residual instead of two for each layer. A launch takes up to `MAX_LAYERS`
layers, whose tensors are separate parameters; so nothing is copied to the device first, and the call can be captured.
Memory bound: the floor is reading the first residual and every layer_output, and writing the rest.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro, resident_blocks
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Out, op
from tile_kernels.mhc._rows import (
    ROW_PASS_CONFIGS,
    ROW_THREADS,
    STREAMS,
    WARP,
    apply_to_vector,
    check_streams,
    flat,
    lead_of,
    load_streams,
    load_vector,
    part_threads_for,
    post_to_vector,
    store_streams,
    store_vector,
    vector_width,
)

BF16, F32 = torch.bfloat16, torch.float32

#: Layers of one launch.
MAX_LAYERS = 6

#: Outputs of layers a thread has asked for ahead: registers for more would cost threads.
AHEAD = 4

#: What a layer has, in the order of the parameters.
SLOTS = ('pre', 'layer_input', 'layer_output', 'post', 'comb', 'residual')

#: The arguments of the public function that fill them.
LISTS = {name: f'{name}_mix_list' if name in ('pre', 'post', 'comb') else f'{name}_list' for name in SLOTS}

# Config -------------------------------------------------------------------------------------


def choose(hidden: int, num_streams: int, width: int, num_inputs: int, num_posts: int, num_tokens: int) -> dict:
    """One vector for each thread: addresses of so many tensors would fill the registers of a second.

    As many threads on an SM as have registers for what they hold between layers.
    """
    return dict(num_threads=part_threads_for(hidden // width), resident_threads=576 if num_streams <= 4 else 256)


# Kernel -------------------------------------------------------------------------------------


@macro
def take_coefficients(token, layer, mix, first, mix_shared):
    """The first threads of a block write the coefficients of a layer to `mix_shared[layer, first:]`."""
    tx = T.get_thread_binding()
    count = mix.shape[1]
    for step in T.unroll(T.ceildiv(count, WARP)):
        if tx < WARP and step * WARP + tx < count:
            mix_shared[layer, first + step * WARP + tx] = mix[token, step * WARP + tx]


@macro
def recall(mix_shared, layer, first, mix_local):
    """Coefficients of a layer from shared memory."""
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
    """`num_inputs` layers get their input, the first `num_posts` of them end in a residual."""
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


# Ops ----------------------------------------------------------------------------------------


def _with_slots(fn: Callable) -> Callable:
    """Give a function of (first, **slots) its signature: `first`, and the slots of every layer, which may be None."""
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    hints: dict[str, Any] = {'first': Tensor}
    for layer in range(MAX_LAYERS):
        for name in SLOTS:
            hints[f'{name}{layer}'] = (Out if name in ('layer_input', 'residual') else Tensor) | None
    parameters = [
        inspect.Parameter(name, kind, default=empty if name == 'first' else None, annotation=hint)
        for name, hint in hints.items()
    ]
    fn.__annotations__ = hints | {'return': None}
    fn.__signature__ = inspect.Signature(parameters)
    return fn


def _columns(slots: dict[str, Tensor | None]) -> dict[str, list[Tensor]]:
    """The tensors of every kind of slot, layer after layer."""
    return {
        name: [x for layer in range(MAX_LAYERS) if (x := slots.get(f'{name}{layer}')) is not None] for name in SLOTS
    }


@_with_slots
def _twin(first: Tensor, **slots: Tensor | None) -> None:
    from tile_kernels.reference.mhc import mhc_multilayer_recompute as twin

    of = _columns(slots)
    twin(first, of['pre'], of['layer_output'], of['post'], of['comb'], of['layer_input'], of['residual'])


@op(twin=_twin)
@_with_slots
def recompute_(first: Tensor, **slots: Tensor | None) -> None:
    """Recompute up to six layers into memory of the caller; see `mhc_multilayer_recompute`.

    Layer l has `pre<l>`, `layer_input<l>` (written), and, except perhaps the last, `layer_output<l>`, `post<l>`,
    `comb<l>` and `residual<l>` (written).
    """
    of = _columns(slots)
    lead, num_streams, hidden = _check(first, of)
    inner = dict(
        pre=(num_streams,),
        layer_input=(1, hidden),
        layer_output=(1, hidden),
        post=(num_streams,),
        comb=(num_streams * num_streams,),
        residual=(num_streams, hidden),
    )
    views = {name: [flat(x, lead, *inner[name]) for x in tensors] for name, tensors in of.items()}
    rows = [first, *of['layer_input'], *of['layer_output'], *of['residual']]
    static = (hidden, num_streams, vector_width(*rows), len(of['pre']), len(of['post']))
    args = [views[name][layer] if layer < len(views[name]) else None for layer in range(MAX_LAYERS) for name in SLOTS]
    launch(recompute_kernel, static, flat(first, lead, num_streams, hidden), *args)


def _check(first: Tensor, of: dict[str, list[Tensor]]) -> tuple[tuple, int, int]:
    """Check all tensors; returns the leading shape, the number of streams and hidden."""
    num_layers, num_posts = len(of['pre']), len(of['layer_output'])
    check.at_least(num_layers, 1, f'the length of {LISTS["pre"]}')
    check.equal(len(of['layer_input']), num_layers, f'the length of {LISTS["layer_input"]}')
    check.one_of(num_posts, (num_layers - 1, num_layers), f'the length of {LISTS["layer_output"]}')
    for name in ('post', 'comb', 'residual'):
        check.equal(len(of[name]), num_posts, f'the length of {LISTS[name]}')
    lead = lead_of(first, 'initial_residual', 'num_streams hidden', BF16)
    num_streams, hidden = first.shape[-2:]
    check_streams(num_streams, hidden)
    specs = dict(
        pre=('num_streams one', F32),
        layer_input=('hidden', BF16),
        layer_output=('hidden', BF16),
        post=('num_streams one', F32),
        comb=('num_streams outputs', F32),
        residual=('num_streams hidden', BF16),
    )
    known = dict(num_streams=num_streams, one=1, outputs=num_streams, hidden=hidden)
    for name, (spec, dtype) in specs.items():
        for layer, x in enumerate(of[name]):
            lead_of(x, f'{LISTS[name]}[{layer}]', spec, dtype, lead, **known)
            check.same_device(initial_residual=first, **{f'{LISTS[name]}[{layer}]': x})
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
    lists = (pre_mix_list, layer_input_list, layer_output_list, post_mix_list, comb_mix_list, residual_list)
    for name, tensors in zip(SLOTS, lists, strict=True):
        if not isinstance(tensors, Sequence):
            check.fail(LISTS[name], 'must be a sequence of tensors', check.describe(tensors))
    of = dict(zip(SLOTS, (list(tensors) for tensors in lists), strict=True))
    _check(initial_residual, of)
    first = initial_residual
    for start in range(0, len(pre_mix_list), MAX_LAYERS):
        chunk = {name: tensors[start : start + MAX_LAYERS] for name, tensors in of.items()}
        slots = {f'{name}{layer}': x for name in SLOTS for layer, x in enumerate(chunk[name])}
        recompute_(first, **slots)
        first = chunk['residual'][-1] if chunk['residual'] else first


# Cases --------------------------------------------------------------------------------------


def _make(lead: tuple, hidden: int, num_streams: int, num_layers: int, num_posts: int) -> dict:
    made = dict(first=torch.randn(*lead, num_streams, hidden, dtype=BF16))
    for layer in range(num_layers):
        made[f'pre{layer}'] = torch.rand(*lead, num_streams, 1) / num_streams
        made[f'layer_input{layer}'] = torch.empty(*lead, hidden, dtype=BF16)
        if layer < num_posts:
            made[f'layer_output{layer}'] = torch.randn(*lead, hidden, dtype=BF16)
            made[f'post{layer}'] = torch.rand(*lead, num_streams, 1)
            made[f'comb{layer}'] = torch.randn(*lead, num_streams, num_streams).softmax(-1)
            made[f'residual{layer}'] = torch.empty(*lead, num_streams, hidden, dtype=BF16)
    return made


recompute_.cases(
    make=_make,
    match=dict(rtol=1e-2, atol=2e-2),  # a stream that rounds to the other neighbour feeds all later layers
    smoke=grid(lead=[(0,), (2, 3)], hidden=[128], num_streams=[4], num_layers=[2], num_posts=[1, 2])
    + grid(lead=[(3,)], hidden=[576], num_streams=STREAMS, num_layers=[1], num_posts=[0, 1])
    + grid(lead=[(3,)], hidden=[64], num_streams=[4], num_layers=[6], num_posts=[5, 6]),
    full=grid(lead=[(2001,)], hidden=[2560, 7168], num_streams=[4], num_layers=[4, 5], num_posts=[4]),
    bench=grid(lead=[(8192,)], hidden=[7168], num_streams=[4], num_layers=[6], num_posts=[6])
    + grid(lead=[(64,), (4096,)], hidden=[4096], num_streams=[4], num_layers=[4], num_posts=[3]),
)
