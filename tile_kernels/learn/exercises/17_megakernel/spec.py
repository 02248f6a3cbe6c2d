"""Exercise 17: norm, gate, experts and weighted sum in one launch."""

import torch

from tile_kernels.learn import lean
from tile_kernels.learn.track import Case, Exercise, Target


def _inputs(case, generator):
    tokens, hidden, inter, experts = (case[name] for name in ('tokens', 'hidden', 'inter', 'experts'))

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    return {
        'x': normal(tokens, hidden),
        'gamma': torch.rand(hidden, generator=generator) + 0.5,
        'router': normal(experts, hidden, scale=hidden**-0.5),
        'up': normal(experts * 2 * inter, hidden, scale=hidden**-0.5),
        'down': normal(experts * hidden, inter, scale=inter**-0.5),
    }


def _outputs(case):
    return {'y': ((case['tokens'], case['hidden']), torch.bfloat16)}


def _workspaces(case):
    return {
        'logits': ((case['tokens'], case['experts']), torch.float32),
        'act': ((case['experts'], case['tokens'], case['inter']), torch.bfloat16),
    }


def _reference(case, x, gamma, router, up, down):
    wide = x.double()
    z = (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gamma.double()).bfloat16().double()
    best = (z @ router.double().T).topk(case['k'])
    up = up.double().unflatten(0, (case['experts'], 2, case['inter']))
    down = down.double().unflatten(0, (case['experts'], case['hidden']))
    y = torch.zeros_like(wide)
    for t, (weights, chosen) in enumerate(zip(best.values.softmax(-1), best.indices.tolist(), strict=True)):
        for weight, e in zip(weights, chosen, strict=True):
            gate, value = up[e] @ z[t]
            y[t] += weight * (down[e] @ (torch.nn.functional.silu(gate) * value).bfloat16().double())
    return {'y': y}


def _bound(case, name, expected):
    """`act` and y have the 8 bits of bfloat16."""
    return 2**-7 * (expected.abs().mean() + expected.abs())


def _several(case, x, gamma, router, up, down):
    """The same by one kernel after another, as a layer without fusion calls them."""
    from tile_kernels.gemm import grouped_gemm, grouped_gemm_swiglu

    z = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], gamma, 1e-6).bfloat16()
    best = (z @ router.T).float().topk(case['k'])
    experts, order = best.indices.flatten().sort()
    token, number = order // case['k'], torch.arange(case['experts'], device=x.device)
    ends = torch.searchsorted(experts, number, right=True).int()
    act = grouped_gemm_swiglu(z[token], up.unflatten(0, (case['experts'], -1)), ends)
    rows = grouped_gemm(act, down.unflatten(0, (case['experts'], -1)), ends)
    weights = best.values.softmax(-1).flatten()[order]
    return torch.zeros_like(x, dtype=torch.float32).index_add_(0, token, rows * weights[:, None]).bfloat16()


def _case(label, tokens, hidden, inter, experts, k, blocks):
    static = {'tokens': tokens, 'hidden': hidden, 'inter': inter, 'experts': experts, 'k': k, 'blocks': blocks}
    return Case(label, static, {})


EXERCISE = Exercise(
    number=17,
    name='megakernel',
    title='a whole mixture-of-experts block in one launch',
    level='expert',
    entry='moe_block',
    launches=(('x', 'gamma', 'router', 'up', 'down', 'y', 'logits', 'act'),),
    inputs=_inputs,
    outputs=_outputs,
    workspaces=_workspaces,
    reference=_reference,
    bound=_bound,
    cases=(
        _case('one token', 1, 128, 64, 8, 2, 2),
        _case('tails everywhere', 2, 160, 40, 33, 1, 3),
        _case('8 tokens', 8, 64, 32, 4, 2, 2),
        _case('one block', 2, 512, 16, 4, 1, 1),
    ),
    lean=(lean.launches(1), lean.once('router'), lean.once('up'), lean.once('down'), lean.wide(16, 'up', 'down')),
    lean_case=_case('2 tokens, 4 experts of 2048 x 1024', 2, 2048, 1024, 4, 2, 16),
    target=Target('ratio', 1.0, _case('one token', 1, 2048, 1024, 64, 6, 132), baseline=_several),
    ours='gemm.grouped_gemm_swiglu',
    bug='blocks that do not wait for each other',
    docs='interpreter.md#datarace',
)
