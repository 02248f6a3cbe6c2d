"""Functions and modules over the ops: gradients with and without `fuse_grad_acc`, main_grad, no_grad, out=."""

import re

import pytest
import torch
from torch import nn

from tile_kernels.core.errors import ArgumentError
from tile_kernels.mhc import mhc_pre_apply_mix_fwd
from tile_kernels.modeling import MHCPipeline
from tile_kernels.modeling.mhc import expand_from_embedding, mhc_head, mhc_post_pre, mhc_pre, ops
from tile_kernels.reference.mhc import expand_to_mhc_ref, mhc_post_ref, mhc_pre_norm_fn_ref, sinkhorn_normalize_ref
from tile_kernels.testing.numeric import assert_equal

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def inputs(n=4, hidden=64, lead=(2, 3)):
    width, k = n * (2 + n), n * hidden
    residual = torch.randn(*lead, n, hidden, device=DEVICE, dtype=BF16)
    fn = torch.randn(width, k, device=DEVICE) * k**-0.5
    weight = torch.rand(k, device=DEVICE) + 0.5
    return residual, fn, torch.full((3,), 0.7, device=DEVICE), torch.randn(width, device=DEVICE) * 0.1, weight


def test_no_grad_gives_the_bits_of_grad_and_honours_the_norm_weight():
    residual, fn, scale, base, weight = inputs()
    fn.requires_grad_()
    layer_input, (post_mix, comb_mix) = mhc_pre(residual, fn, scale, base, norm_weight=weight)
    with torch.no_grad():
        fused, (fused_post, fused_comb) = mhc_pre(residual, fn, scale, base, norm_weight=weight)
        plain, _ = mhc_pre(residual, fn, scale, base)
    assert_equal(fused, layer_input.detach())
    assert_equal(fused_post, post_mix.detach())
    assert_equal(fused_comb, comb_mix.detach())
    assert not torch.equal(fused, plain)


def step(residual, fn, scale, base, weight, fuse):
    mixes = ops.mhc_pre_norm_fn(residual, fn, weight, 1e-6)
    pre, post_mix, z = ops.mhc_pre_split_mixes(mixes, scale, base, 4, 2.0, 1e-6)
    layer_input = ops.mhc_pre_apply_mix(residual, pre)
    comb = ops.sinkhorn_normalize(z)
    return ops.mhc_post(torch.tanh(layer_input), residual, post_mix, comb, fuse_grad_acc=fuse)


def test_handed_over_gradients_sum_to_those_of_autograd():
    parts = inputs()
    gradients = []
    for fuse in (False, True):
        leaf = parts[0].clone().requires_grad_()
        residual = leaf * 1  # not a leaf, as between layers
        step(residual, *parts[1:], fuse).float().square().sum().backward()
        gradients.append(leaf.grad.float())
        assert not hasattr(residual.untyped_storage(), 'grad_from_mhc_post')
    torch.testing.assert_close(gradients[1], gradients[0], rtol=3e-2, atol=0.1)  # sums of bfloat16, rounded apart


def test_a_gradient_left_on_the_storage_is_added_to_in_place():
    residual, fn, _, _, _ = inputs()
    residual.requires_grad_()
    out = ops.mhc_pre_norm_fn(residual, fn, None, 1e-6)
    left = torch.zeros_like(residual)
    residual.untyped_storage().grad_from_mhc_post = left
    out.sum().backward()
    assert residual.grad is None and left.float().abs().sum() > 0
    assert not hasattr(residual.untyped_storage(), 'grad_from_mhc_post')
    again = residual.detach().clone().requires_grad_()
    ops.mhc_pre_norm_fn(again, fn, None, 1e-6, fuse_grad_acc=False).sum().backward()
    assert_equal(left, again.grad)


def test_main_grad_takes_the_gradient_of_a_parameter():
    residual, fn, _, _, weight = inputs()
    fn, weight = nn.Parameter(fn), nn.Parameter(weight)
    ops.mhc_pre_norm_fn(residual, fn, weight, 1e-6).square().sum().backward()
    expected = fn.grad.clone(), weight.grad.clone()
    for parameter in (fn, weight):
        parameter.grad, parameter.main_grad = None, torch.ones_like(parameter)
    ops.mhc_pre_norm_fn(residual, fn, weight, 1e-6).square().sum().backward()
    assert fn.grad is None and weight.grad is None
    torch.testing.assert_close(fn.main_grad, expected[0] + 1)
    torch.testing.assert_close(weight.main_grad, expected[1] + 1)


def test_out_is_written_and_part_of_the_graph():
    residual, *_ = inputs()
    mix = torch.rand(2, 3, 4, 1, device=DEVICE, requires_grad=True)
    out = torch.empty(2, 3, 64, device=DEVICE, dtype=BF16)
    assert ops.mhc_pre_apply_mix(residual, mix, out=out) is out
    out.float().sum().backward()
    torch.testing.assert_close(mix.grad, residual.float().sum(-1, keepdim=True), rtol=1e-3, atol=1e-3)
    hidden = torch.randn(5, 64, device=DEVICE, dtype=BF16, requires_grad=True)
    streams = torch.empty(5, 2, 64, device=DEVICE, dtype=BF16)
    ops.expand_to_mhc(hidden, 2, out=streams).float().sum().backward()
    assert (hidden.grad == 2).all()


def test_projection_agrees_with_the_reference():
    """Within the bounds of TileKernels' tests, which a reference of full precision does not keep."""
    residual, fn, _, _, weight = inputs(hidden=128)
    leaves = [t.detach().clone().requires_grad_() for t in (residual, fn, weight)]
    copies = [t.detach().clone().requires_grad_() for t in leaves]
    actual, expected = ops.mhc_pre_norm_fn(*leaves, 1e-6), mhc_pre_norm_fn_ref(*copies, 1e-6)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    upstream = torch.randn_like(actual)
    actual.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(leaves[0].grad, copies[0].grad)
    torch.testing.assert_close(leaves[1].grad, copies[1].grad, rtol=1e-3, atol=3e-2)
    torch.testing.assert_close(leaves[2].grad, copies[2].grad, rtol=1e-3, atol=3e-2)


def test_post_and_pre_at_once_give_what_they_give_apart():
    residual, fn, scale, base, weight = inputs()
    x = torch.randn(2, 3, 64, device=DEVICE, dtype=BF16)
    _, mixes = mhc_pre(residual, fn, scale, base)
    following, layer_input, coefficients = mhc_post_pre(x, residual, *mixes, fn, scale, base, norm_weight=weight)
    expected = ops.mhc_post(x, residual, *mixes)
    assert_equal(following, expected)
    apart, coefficients_apart = mhc_pre(expected, fn, scale, base, norm_weight=weight)
    for actual, value in zip((layer_input, *coefficients), (apart, *coefficients_apart), strict=True):
        assert_equal(actual, value)


def gradients_of(run, leaves):
    """What `run` gives, and the gradients of the leaves under a loss that needs all of it."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    following, layer_input, (post_mix, comb_mix) = run(*leaves)
    loss = following.float().square().sum() + layer_input.float().square().sum()
    (loss + post_mix.square().sum() + comb_mix.square().sum()).backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize('n', [2, 4, 8])
def test_gradients_of_post_and_pre_at_once_are_those_of_them_apart(n):
    residual, fn, scale, base, weight = inputs(n)
    x = torch.randn(2, 3, 64, device=DEVICE, dtype=BF16)
    mixes = torch.rand(2, 3, n, 1, device=DEVICE), torch.rand(2, 3, n, n, device=DEVICE).softmax(-1)

    def at_once(x, residual, post_mix, comb_mix, fn, scale, base, weight):
        options = dict(norm_weight=weight, mhc_mult=n, sinkhorn_repeat=3)
        return mhc_post_pre(x, residual, post_mix, comb_mix, fn, scale, base, **options)

    def apart(x, residual, post_mix, comb_mix, fn, scale, base, weight):
        following = ops.mhc_post(x, residual, post_mix, comb_mix)
        return following, *mhc_pre(following, fn, scale, base, norm_weight=weight, mhc_mult=n, sinkhorn_repeat=3)

    leaves = (x, residual, *mixes, fn, scale, base, weight)
    for actual, expected in zip(gradients_of(at_once, leaves), gradients_of(apart, leaves), strict=True):
        bound = float(expected.float().abs().max()) * 2e-2  # gradients of bfloat16, rounded in another order
        torch.testing.assert_close(actual.float(), expected.float(), rtol=3e-2, atol=bound)


def test_main_grad_takes_the_gradients_of_post_and_pre():
    residual, fn, scale, base, weight = inputs()
    x = torch.randn(2, 3, 64, device=DEVICE, dtype=BF16)
    _, mixes = mhc_pre(residual, fn, scale, base)
    fn, weight = nn.Parameter(fn), nn.Parameter(weight)
    for run in (
        lambda: mhc_post_pre(x, residual, *mixes, fn, scale, base, norm_weight=weight)[1],
        lambda: mhc_pre(residual, fn, scale, base, norm_weight=weight)[0],
    ):
        fn.main_grad = weight.main_grad = None
        run().float().square().sum().backward()
        expected = fn.grad.clone(), weight.grad.clone()
        for parameter in (fn, weight):
            parameter.grad, parameter.main_grad = None, torch.ones_like(parameter)
        run().float().square().sum().backward()
        assert fn.grad is None and weight.grad is None
        torch.testing.assert_close(fn.main_grad, expected[0] + 1)
        torch.testing.assert_close(weight.main_grad, expected[1] + 1)


def test_pre_adds_to_a_gradient_that_post_has_left():
    residual, fn, scale, base, _ = inputs()
    gradients = []
    for fuse in (False, True):
        leaf = residual.clone().requires_grad_()
        streams = leaf * 1  # not a leaf, as between layers
        layer_input, mixes = mhc_pre(streams, fn, scale, base)
        ops.mhc_post(torch.tanh(layer_input), streams, *mixes, fuse_grad_acc=fuse).float().square().sum().backward()
        gradients.append(leaf.grad.float())
        assert not hasattr(streams.untyped_storage(), 'grad_from_mhc_post')
    torch.testing.assert_close(gradients[1], gradients[0], rtol=3e-2, atol=0.1)


def test_the_head_closes_any_number_of_streams():
    for n in (2, 4, 8):
        residual = expand_from_embedding(torch.randn(3, 64, device=DEVICE, dtype=BF16), n)
        fn = torch.randn(n, n * 64, device=DEVICE, requires_grad=True)
        out = mhc_head(residual, fn, torch.ones(1, device=DEVICE), torch.zeros(n, device=DEVICE), mhc_mult=n)
        out.float().sum().backward()
        assert out.shape == (3, 64) and fn.grad.abs().sum() > 0


@pytest.mark.parametrize(
    'call, sentence',
    [
        (lambda x, y: ops.mhc_post(x, y, y[..., :1].float(), y[..., :4]), 'comb_res_mix must be float32'),
        (
            lambda x, y: ops.mhc_pre_apply_mix(y, y[..., :1].float(), x[:2]),
            'modeling.mhc_pre_apply_mix: out must be (3, 64) bfloat16 on',
        ),
        (lambda x, y: ops.expand_to_mhc(x.T, 4), 'hidden must be contiguous'),
        (lambda x, y: ops.expand_to_mhc(x, 2, out=y), 'out must be (..., mhc_mult, hidden) with mhc_mult = 2'),
        (lambda x, y: MHCPipeline(4, 64)(y, print), 'what layer returns must be a tensor, got None'),
        (lambda x, y: MHCPipeline(4, 128).expand(x), 'x must be (..., 128), got bfloat16[3, 64]'),
        (lambda x, y: ops.mhc_post(x, y, y[..., :1].float(), []), 'comb_res_mix must be a tensor, got list'),
        (lambda x, y: mhc_pre_apply_mix_fwd(y, y[..., 0], x), 'mix must be float32'),
        (
            lambda x, y: mhc_post_pre(x, y, torch.ones(3, 4, 1), torch.ones(3, 4, 4), x[0], x, x),
            'fn must be (num_mixes, num_streams*hidden)',
        ),
        (
            lambda x, y: mhc_pre(y, torch.ones(256, 24), torch.ones(3), torch.ones(24)),
            'fn must be (num_mixes, num_streams*hidden) with num_streams*hidden = 256, got float32[256, 24]',
        ),
        (
            lambda x, y: ops.mhc_head_compute_mix(torch.ones(3, 4), torch.ones(2), torch.ones(4), 0.0),
            'mhc_scale must be',
        ),
        (
            lambda x, y: mhc_head(y, torch.ones(24, 256), torch.ones(1), torch.ones(4)),
            'fn must be (mhc_mult, elements)',
        ),
    ],
)
def test_errors_call_arguments_as_the_function_does(call, sentence):
    with pytest.raises(ArgumentError, match=re.escape(sentence)):
        call(torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(3, 4, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ('arguments', 'sentence'),
    [
        (dict(num_connections=4.0), 'num_connections must be one of 2, 4, 8, got 4.0'),
        (dict(hidden_size=64.0), 'hidden_size must be an integer, got float 64.0'),
        (dict(hidden_size=0), 'hidden_size must be at least 1, got 0'),
        (dict(sinkhorn_repeat=0), 'sinkhorn_repeat must be at least 1, got 0'),
        (dict(post_mult_value=None), 'post_mult_value must be a number, got None'),
        (dict(eps='a'), "eps must be a number, got str 'a'"),
    ],
)
def test_bad_arguments_of_the_module_are_told(arguments, sentence):
    with pytest.raises(ArgumentError, match=f'^MHCPipeline: {sentence}$'):
        MHCPipeline(**dict(num_connections=4, hidden_size=64) | arguments)


def test_a_wrong_number_of_streams_is_named():
    residual, fn, scale, base, _ = inputs()
    with pytest.raises(ArgumentError, match=r'modeling\.mhc_pre: residual must be .* with mhc_mult = 8, got bfloat16'):
        mhc_pre(residual, fn, scale, base, mhc_mult=8)


@pytest.mark.parametrize('dtype', [BF16, torch.float16, torch.float64])
def test_a_cast_module_computes_in_float32_and_its_parameters_get_gradients(dtype):
    residual, *_ = inputs()
    cast = MHCPipeline(4, 64).to(DEVICE, dtype)
    plain = MHCPipeline(4, 64).to(DEVICE)
    plain.load_state_dict(cast.state_dict())
    results = [module.head(module(residual, nn.Identity())) for module in (cast, plain)]
    assert_equal(*results)
    compiled = torch.compile(lambda x: cast.head(cast(x, nn.Identity())), fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(compiled(residual), results[0])
    for result in results:
        result.float().square().sum().backward()
    for name, parameter in cast.named_parameters():
        assert_equal(parameter.grad, plain.get_parameter(name).grad.to(dtype))


def test_main_grad_takes_the_gradient_of_a_cast_parameter():
    residual, *_ = inputs()
    module = MHCPipeline(4, 64).to(DEVICE, BF16)
    taking = (module.fn, module.norm_weight, module.head_fn)
    module.head(module(residual, nn.Identity())).float().square().sum().backward()
    expected = [parameter.grad.clone() for parameter in taking]
    for parameter in taking:
        parameter.grad, parameter.main_grad = None, torch.zeros_like(parameter, dtype=torch.float32)
    module.head(module(residual, nn.Identity())).float().square().sum().backward()
    for parameter, gradient in zip(taking, expected, strict=True):
        assert parameter.grad is None
        assert_equal(parameter.main_grad.to(BF16), gradient)


# Training -----------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention or an MLP, as a transformer alternates them."""

    def __init__(self, hidden, attends):
        super().__init__()
        self.attends = attends
        self.up = nn.Linear(hidden, 3 * hidden, bias=False, dtype=BF16)
        self.down = nn.Linear(hidden, hidden, bias=False, dtype=BF16)

    def forward(self, x):
        q, k, v = self.up(nn.functional.rms_norm(x, x.shape[-1:])).chunk(3, -1)
        if self.attends:
            mixed = nn.functional.scaled_dot_product_attention(*(t.unsqueeze(1) for t in (q, k, v)), is_causal=True)
            return self.down(mixed.squeeze(1))
        return self.down(nn.functional.silu(q) * k + v)


def plain_mixes(residual, fn, weight, eps):
    x = residual.flatten(-2).float()
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps) @ fn.T


def plain_step(connection, residual, layer):
    """The same hyper-connection in plain PyTorch, by autograd."""
    n = connection.num_connections
    mixes = plain_mixes(residual, connection.fn, connection.norm_weight, connection.eps)
    parts = mixes.split([n, n, n * n], -1)
    base = connection.base.split([n, n, n * n])
    pre, post, z = (m * s + b for m, s, b in zip(parts, connection.scale, base, strict=True))
    comb = sinkhorn_normalize_ref(z.unflatten(-1, (n, n)), connection.sinkhorn_repeat, connection.eps)
    x = ((pre.sigmoid() + connection.eps).unsqueeze(-1) * residual.float()).sum(-2).to(BF16)
    post = (post.sigmoid() * connection.post_mult_value).unsqueeze(-1)
    return mhc_post_ref(layer(x), residual, post, comb)


def plain_head(connection, residual):
    mix = plain_mixes(residual, connection.head_fn, None, connection.eps)
    mix = (mix * connection.head_scale + connection.head_base).sigmoid() + connection.eps
    return (mix.unsqueeze(-1) * residual.float()).sum(-2).to(BF16)


class Transformer(nn.Module):
    """`num_layers` layers between hyper-connections, ours or in plain PyTorch."""

    def __init__(self, num_layers=12, hidden=64, vocab=17, n=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden, dtype=BF16)
        self.connections = nn.ModuleList(MHCPipeline(n, hidden, sinkhorn_repeat=3) for _ in range(num_layers))
        self.layers = nn.ModuleList(Block(hidden, i % 2 == 0) for i in range(num_layers))
        self.out = nn.Linear(hidden, vocab, bias=False, dtype=BF16)

    def forward(self, tokens, plain=False):
        x = self.embed(tokens)
        n = self.connections[0].num_connections
        residual = expand_to_mhc_ref(x, n) if plain else self.connections[0].expand(x)
        for connection, layer in zip(self.connections, self.layers, strict=True):
            residual = plain_step(connection, residual, layer) if plain else connection(residual, layer)
        x = plain_head(self.connections[-1], residual) if plain else self.connections[-1].head(residual)
        return self.out(x).float()


def train(model, plain, steps=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = (torch.arange(4 * 17, device=DEVICE).view(4, 17) * 3 + torch.arange(4, device=DEVICE)[:, None]) % 17
    losses = []
    for _ in range(steps):
        logits = model(tokens[:, :-1], plain)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_transformer_trains_to_the_loss_of_plain_pytorch():
    ours = Transformer().to(DEVICE)
    theirs = Transformer().to(DEVICE)
    theirs.load_state_dict(ours.state_dict())
    losses, expected = train(ours, plain=False), train(theirs, plain=True)
    assert losses[0] == pytest.approx(expected[0], rel=1e-3)
    assert losses[-1] < 0.6 * losses[0]
    assert losses == pytest.approx(expected, rel=0.1)


def test_layers_joined_by_post_and_pre_give_the_model():
    model = Transformer(num_layers=3).to(DEVICE)
    tokens = torch.arange(12, device=DEVICE).view(2, 6) % 17
    residual = model.connections[0].expand(model.embed(tokens))
    x = coefficients = None
    for connection, layer in zip(model.connections, model.layers, strict=True):
        own = (connection.fn, connection.scale, connection.base)
        options = dict(norm_weight=connection.norm_weight, post_mult_value=2.0, sinkhorn_repeat=3)
        if x is None:
            layer_input, coefficients = mhc_pre(residual, *own, **options)
        else:
            residual, layer_input, coefficients = mhc_post_pre(x, residual, *coefficients, *own, **options)
        x = layer(layer_input).contiguous()
    residual = ops.mhc_post(x, residual, *coefficients)
    logits = model.out(model.connections[-1].head(residual)).float()
    assert_equal(logits, model(tokens))
    logits.square().mean().backward()
    assert all(p.grad is not None for connection in model.connections for p in (connection.fn, connection.norm_weight))


def test_post_and_pre_compile_into_one_graph():
    residual, fn, scale, base, weight = inputs()
    x = torch.randn(2, 3, 64, device=DEVICE, dtype=BF16)
    _, mixes = mhc_pre(residual, fn, scale, base)
    fn.requires_grad_()

    def run(x, residual):
        following, layer_input, _ = mhc_post_pre(x, residual, *mixes, fn, scale, base, norm_weight=weight)
        return following.float().square().sum() + layer_input.float().square().sum()

    expected = torch.autograd.grad(run(x, residual), fn)[0]
    actual = torch.autograd.grad(torch.compile(run, fullgraph=True, backend='aot_eager')(x, residual), fn)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_a_model_compiles_into_one_graph():
    connection, layer = MHCPipeline(2, 64, sinkhorn_repeat=3).to(DEVICE), nn.Linear(64, 64, dtype=BF16, device=DEVICE)
    x = torch.randn(5, 64, device=DEVICE, dtype=BF16)

    def run(x):
        return connection.head(connection(connection.expand(x), layer))

    expected = run(x)
    expected.float().sum().backward()
    gradient = connection.fn.grad.clone()
    connection.zero_grad()
    actual = torch.compile(run, fullgraph=True, backend='aot_eager')(x)
    actual.float().sum().backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(connection.fn.grad, gradient, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('graded', [False, True])
def test_each_eps_has_its_own_place(graded):
    residual, fn, scale, base, _ = inputs()
    fn.requires_grad_(graded)
    other = dict(norm_eps=0.3, pre_eps=0.1, sinkhorn_eps=0.02, sinkhorn_repeat=3, post_mult_value=2.0)
    mixes = ops.mhc_pre_norm_fn(residual, fn, None, 0.3)
    pre, post_mix, z = ops.mhc_pre_split_mixes(mixes, scale, base, 4, 2.0, 0.1)
    comb, layer_input = ops.sinkhorn_normalize(z, 3, 0.02), ops.mhc_pre_apply_mix(residual, pre)
    found, (found_post, found_comb) = mhc_pre(residual, fn, scale, base, **other)
    _, again, (post_again, comb_again) = mhc_post_pre(
        torch.zeros_like(layer_input),
        residual,
        post_mix,
        torch.eye(4, device=DEVICE).expand_as(comb).contiguous(),
        fn,
        scale,
        base,
        **other,
    )
    for actual, expected in (
        (found, layer_input),
        (found_post, post_mix),
        (found_comb, comb),
        (again, layer_input),
        (post_again, post_mix),
        (comb_again, comb),
    ):
        torch.testing.assert_close(actual, expected.view(actual.shape), rtol=1e-2, atol=1e-3)


def test_without_fuse_grad_acc_a_gradient_that_was_left_is_not_touched():
    residual, fn, _, _, _ = inputs()
    residual.requires_grad_()
    out = ops.mhc_pre_norm_fn(residual, fn, None, 1e-6, fuse_grad_acc=False)
    left = residual.untyped_storage().grad_from_mhc_post = torch.zeros_like(residual)
    out.sum().backward()
    assert residual.grad is not None and not left.any()
