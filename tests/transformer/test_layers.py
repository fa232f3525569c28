"""Layers, stacks and the whole Transformer against blocks written out by hand; padding, causality, cache, weights."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vit_scratch.transformer import feed_forward
from vit_scratch.transformer.attention import KeyValueCache, MultiHeadAttention
from vit_scratch.transformer.decoder import Decoder, DecoderCache, DecoderLayer
from vit_scratch.transformer.encoder import Encoder, EncoderLayer
from vit_scratch.transformer.feed_forward import FeedForward, PatchConvolution
from vit_scratch.transformer.positions import rotation_2d, sinusoids
from vit_scratch.transformer.residual import Dropout, DropPath, LayerScale, drop_elements, residual_branch
from vit_scratch.transformer.transformer import TokenEmbedding, Transformer

DIM, HEADS, LENGTH, SOURCE = 16, 4, 6, 5
NORM_ORDERS = pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
FORMULAS = {
    "relu": lambda u: max(u, 0),
    "gelu": lambda u: u * 0.5 * (1 + math.erf(u / math.sqrt(2))),
    "gelu_tanh": lambda u: u * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))),
    "quick_gelu": lambda u: u / (1 + math.exp(-1.702 * u)),
}
ACTIVATIONS = pytest.mark.parametrize("activation", ["relu", "gelu"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randomise(module):
    """Give every parameter, also biases and norms, a value that would show if it were left out."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3)
    return module


def hand_norm(norm, x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def hand_attention(module, x, memory, mask):
    """Heads one after the other; mask (B, N, S) or None."""
    weight, bias = module.qkv.weight.chunk(3), module.qkv.bias.chunk(3)
    query, key, value = (t @ w.T + b for t, w, b in zip((x, memory, memory), weight, bias, strict=True))
    width = module.dim // module.heads
    outputs = []
    for h in range(module.heads):
        part = slice(h * width, (h + 1) * width)
        scores = query[..., part] @ key[..., part].transpose(1, 2) / math.sqrt(width)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        outputs.append(scores.softmax(-1) @ value[..., part])
    return torch.cat(outputs, -1) @ module.out.weight.T + module.out.bias


def hand_feed_forward(module, x):
    hidden = x @ module.linear1.weight.T + module.linear1.bias
    if isinstance(module.activation, nn.ReLU):
        hidden = hidden.clamp(min=0)
    else:
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    return hidden @ module.linear2.weight.T + module.linear2.bias


def hand_encoder_layer(layer, x, mask=None, scale1=1.0, scale2=1.0):
    if layer.norm_first:
        y = hand_norm(layer.norm1, x)
        x = x + scale1 * hand_attention(layer.attention, y, y, mask)
        return x + scale2 * hand_feed_forward(layer.feed_forward, hand_norm(layer.norm2, x))
    x = hand_norm(layer.norm1, x + scale1 * hand_attention(layer.attention, x, x, mask))
    return hand_norm(layer.norm2, x + scale2 * hand_feed_forward(layer.feed_forward, x))


def hand_decoder_layer(layer, x, memory, mask, memory_mask):
    if layer.norm_first:
        y = hand_norm(layer.norm1, x)
        x = x + hand_attention(layer.self_attention, y, y, mask)
        x = x + hand_attention(layer.cross_attention, hand_norm(layer.norm2, x), memory, memory_mask)
        return x + hand_feed_forward(layer.feed_forward, hand_norm(layer.norm3, x))
    x = hand_norm(layer.norm1, x + hand_attention(layer.self_attention, x, x, mask))
    x = hand_norm(layer.norm2, x + hand_attention(layer.cross_attention, x, memory, memory_mask))
    return hand_norm(layer.norm3, x + hand_feed_forward(layer.feed_forward, x))


def triangle(length):
    """(N, N), True where token n may see token s: s <= n."""
    return torch.tensor([[s <= n for s in range(length)] for n in range(length)])


def padding(*lengths, total):
    """(B, total), True at the first `lengths[b]` tokens."""
    return torch.arange(total) < torch.tensor(lengths)[:, None]


def gradients(module, loss, *inputs):
    module.zero_grad()
    loss.backward()
    return [t.grad.clone() for t in [*inputs, *module.parameters()]]


# Residual branches


@pytest.mark.parametrize("shape", [(2000, 3), (2000, 2, 3), (2000, 1, 2, 2)])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.8])
def test_drop_path_drops_whole_samples_and_scales_the_others(probability, shape):
    x = torch.rand(shape) + 1
    factor = (DropPath(probability).train()(x) / x).flatten(1)
    assert torch.allclose(factor, factor[:, :1].expand_as(factor))
    dropped = factor[:, 0] == 0
    torch.testing.assert_close(factor[~dropped, 0], torch.full((int((~dropped).sum()),), 1 / (1 - probability)))
    assert abs(dropped.float().mean().item() - probability) < 0.05
    assert abs(factor.mean().item() - 1) < 0.15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_drop_path_keeps_the_dtype(dtype):
    output = DropPath(0.5).train()(torch.ones(64, 2, 3, dtype=dtype))
    assert output.dtype == dtype
    assert set(output.flatten().tolist()) == {0.0, 2.0}


def test_drop_path_is_the_identity_in_eval_and_at_probability_zero():
    x = torch.randn(50, 2, 3)
    assert torch.equal(DropPath(0.9).eval()(x), x)
    assert torch.equal(DropPath(0.0).train()(x), x)


@pytest.mark.parametrize("probability", [-0.1, 1.0, 1.5, float("nan")])
def test_drop_path_refuses_what_is_no_probability_below_one(probability):
    with pytest.raises(ValueError, match=f"drop_path={probability} is not a probability"):
        DropPath(probability)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("probability", [-0.5, 1.0, 1.5])
def test_an_encoder_of_any_depth_refuses_a_drop_path_that_is_no_probability(probability, depth):
    with pytest.raises(ValueError, match="drop_path="):
        Encoder(DIM, depth, HEADS, drop_path=probability)


def test_layer_scale_multiplies_each_channel_by_its_own_factor():
    scale, x = LayerScale(3, 0.25), torch.randn(2, 4, 3)
    assert torch.equal(scale(x), 0.25 * x)
    with torch.no_grad():
        scale.weight.copy_(torch.tensor([1.0, -2.0, 0.5]))
    expected = torch.stack([x[..., 0], -2 * x[..., 1], 0.5 * x[..., 2]], dim=-1)
    assert torch.equal(scale(x), expected)
    scale(x).sum().backward()
    torch.testing.assert_close(scale.weight.grad, x.sum(dim=(0, 1)))


def test_layer_scale_takes_a_whole_number():
    x = torch.randn(2, 4, 3)
    assert torch.equal(LayerScale(3, 2)(x), 2 * x)


def test_a_residual_branch_holds_only_what_does_something_in_the_stated_order():
    assert len(residual_branch(DIM, 0.0, 0.0, None)) == 0
    kinds = [type(part) for part in residual_branch(DIM, 0.1, 0.2, 0.3)]
    assert kinds == [Dropout, LayerScale, DropPath]
    assert [type(part) for part in residual_branch(DIM, 0.0, 0.0, 0.0)] == [LayerScale]
    x = torch.randn(2, 3, DIM)
    assert torch.equal(residual_branch(DIM, 0.0, 0.0, None)(x), x)


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5, 0.97])
@pytest.mark.parametrize("shape", [(40_001,), (3, 101, 133)])
def test_dropout_drops_each_element_by_itself_and_scales_the_others(probability, shape):
    x = torch.randn(shape) + 3
    y = drop_elements(x, probability)
    kept = y != 0
    torch.testing.assert_close(y[kept], (x / (1 - probability))[kept], atol=1e-3 / (1 - probability), rtol=1e-3)
    n, share = x.numel(), kept.float().mean().item()
    assert abs(share - (1 - probability)) < 5 * math.sqrt(probability * (1 - probability) / n)
    # Four elements share a draw of 64 bits; none of them says anything about the next ones.
    deviation = kept.float().flatten() - (1 - probability)
    for distance in (1, 2, 3, 4, 5, 8):
        correlation = (deviation[distance:] * deviation[:-distance]).mean().item() / (probability * (1 - probability))
        assert abs(correlation) < 5 / math.sqrt(n), distance
    for lane in range(4):
        assert abs(kept.flatten()[lane::4].float().mean().item() - (1 - probability)) < 0.03


def test_dropout_passes_gradients_where_it_passes_values():
    x = torch.randn(50, 7, requires_grad=True)
    y = drop_elements(x, 0.4)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, y.detach() / x.detach())


def test_dropout_draws_anew_and_repeats_with_the_seed():
    x = torch.ones(1000)
    torch.manual_seed(3)
    first, second = drop_elements(x, 0.5), drop_elements(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(first, drop_elements(x, 0.5))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("probability", [0.0, 1e-6, 0.99999, 1 - 1e-9])
def test_dropout_stays_finite_at_the_ends_of_its_range(probability):
    x = torch.randn(3, 5)
    y = drop_elements(x, probability)
    assert y.isfinite().all()
    if probability < 1e-5:
        assert torch.equal(y, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (1,), (2, 3, 5)])
def test_dropout_keeps_shape_and_dtype(shape, dtype):
    y = Dropout(0.5).train()(torch.ones(shape, dtype=dtype))
    assert (y.shape, y.dtype) == (shape, dtype)
    assert set(y.flatten().tolist()) <= {0.0, 2.0}


@pytest.mark.parametrize("probability", [-0.1, 1.0, 1.5, float("nan")])
def test_a_dropout_that_is_no_probability_is_refused(probability):
    with pytest.raises(ValueError, match=f"dropout={probability} is not a probability"):
        Dropout(probability)


@NORM_ORDERS
def test_dropping_both_branches_leaves_the_residual_stream(norm_first):
    layer = randomise(EncoderLayer(DIM, HEADS, norm_first=norm_first, drop_path=0.5)).train()
    x = torch.randn(400, 2, DIM)
    expected = x if norm_first else hand_norm(layer.norm2, hand_norm(layer.norm1, x))
    unchanged = (layer(x) - expected).abs().amax(dim=(1, 2)) < 1e-4
    assert abs(unchanged.float().mean().item() - 0.25) < 0.08


# Feed-forward


@pytest.mark.parametrize("activation", FORMULAS)
def test_feed_forward_equals_its_formula(activation):
    assert FORMULAS.keys() == feed_forward.ACTIVATIONS.keys()
    module, x = randomise(FeedForward(3, 5, activation=activation)), torch.randn(2, 4, 3)
    output, (w1, b1, w2, b2) = module(x), [p.tolist() for p in module.parameters()]
    for b, n, d in itertools.product(range(2), range(4), range(3)):
        total = b2[d]
        for hidden in range(5):
            u = b1[hidden] + sum(w1[hidden][k] * x[b, n, k].item() for k in range(3))
            total += w2[d][hidden] * FORMULAS[activation](u)
        assert output[b, n, d].item() == pytest.approx(total, abs=1e-5)


def hand_convolution(module, x, grid):
    """Patch by patch; tokens in front of the grid stay as they are, and outside of it there are zeros."""
    (rows, columns), kernel = grid, module.depthwise.weight[:, 0]  # (F, side, side)
    half, output = kernel.shape[-1] // 2, x.clone()
    prefix = x.shape[1] - rows * columns
    for r, c in itertools.product(range(rows), range(columns)):
        total = module.depthwise.bias.expand(len(x), -1)
        for down, right in itertools.product(range(-half, half + 1), repeat=2):
            if 0 <= r + down < rows and 0 <= c + right < columns:
                neighbour = x[:, prefix + (r + down) * columns + c + right]
                total = total + kernel[:, half + down, half + right] * neighbour
        output[:, prefix + r * columns + c] = total
    return output


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (4, 1), (5, 6)])
@pytest.mark.parametrize("side", [1, 3, 5])
def test_a_patch_convolution_equals_its_formula_in_values_and_gradients(side, grid, prefix):
    module = randomise(PatchConvolution(4, side)).double()
    x = torch.randn(2, prefix + grid[0] * grid[1], 4, dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    results = []
    for output in (module(x, grid), hand_convolution(module, x, grid)):
        loss = (output * output.detach().cos()).sum()
        results.append([output, *torch.autograd.grad(loss, [x, *module.parameters()])])
    for ours, by_hand in zip(*results, strict=True):
        torch.testing.assert_close(ours, by_hand)
    assert torch.equal(x, before)


@NORM_ORDERS
@pytest.mark.parametrize("prefix", [0, 2])
def test_an_encoder_with_convolutions_equals_its_formula(norm_first, prefix):
    encoder, grid = randomise(Encoder(DIM, 2, HEADS, norm_first=norm_first, feed_forward_kernel=3)), (2, 3)
    x = torch.randn(2, prefix + 6, DIM)
    output, expected = encoder(x, grid=grid), x
    for layer in encoder.layers:
        ff = layer.feed_forward
        convolved = nn.Sequential(
            ff.linear1, Convolved(ff.convolution, grid), nn.GELU(), ff.linear2
        )  # the layer's own maps, so that a wrong order would show
        if norm_first:
            n = hand_norm(layer.norm1, expected)
            expected = expected + hand_attention(layer.attention, n, n, None)
            expected = expected + convolved(hand_norm(layer.norm2, expected))
        else:
            expected = hand_norm(layer.norm1, expected + hand_attention(layer.attention, expected, expected, None))
            expected = hand_norm(layer.norm2, expected + convolved(expected))
    torch.testing.assert_close(output, encoder.norm(expected), atol=1e-4, rtol=1e-4)


class Convolved(nn.Module):
    """`hand_convolution` as a module."""

    def __init__(self, module, grid):
        super().__init__()
        self.module, self.grid = module, grid

    def forward(self, x):
        return hand_convolution(self.module, x, self.grid)


def test_convolutions_are_the_identity_at_first_but_for_noise():
    encoder = Encoder(64, 2, 4, feed_forward_kernel=3)
    plain = Encoder(64, 2, 4)
    plain.load_state_dict({n: t for n, t in encoder.state_dict().items() if ".depthwise." not in n})
    for layer in encoder.layers:
        noise = layer.feed_forward.convolution.depthwise.weight - F.pad(torch.ones(1, 1), (1, 1, 1, 1))
        assert noise.std().item() == pytest.approx(0.02, rel=0.1)
        assert abs(noise.mean().item()) < 0.002
        assert noise.abs().max() < 0.12
        assert (layer.feed_forward.convolution.depthwise.bias == 0).all()
        with torch.no_grad():
            layer.feed_forward.convolution.depthwise.weight -= noise
    x = torch.randn(2, 1 + 3 * 4, 64)
    torch.testing.assert_close(encoder(x, grid=(3, 4)), plain(x))


@pytest.mark.parametrize("side", [0, -3, 2, 4])
def test_a_kernel_without_a_middle_is_refused(side):
    for name, build in (
        ("feed_forward_kernel", lambda: Encoder(DIM, 1, HEADS, feed_forward_kernel=side)),
        ("kernel_size", lambda: FeedForward(DIM, kernel_size=side)),
    ):
        with pytest.raises(
            ValueError, match=f"^{name}={side} is not the side of a kernel with a middle; it must be odd"
        ):
            build()


@pytest.mark.parametrize("grid", [None, (2, 4), (7, 1)])
def test_convolutions_without_their_grid_are_refused(grid):
    encoder = Encoder(DIM, 1, HEADS, feed_forward_kernel=3)
    with pytest.raises(
        ValueError, match=r"grid=.* does not describe the patches among 6 tokens, .*feed_forward_kernel=3"
    ):
        encoder(torch.randn(2, LENGTH, DIM), grid=grid)


def test_convolutions_need_all_tokens_in_the_last_layer():
    encoder = Encoder(DIM, 2, HEADS, feed_forward_kernel=3)
    with pytest.raises(ValueError, match="num_outputs=1 leaves out patches over which feed_forward_kernel=3 convolves"):
        encoder(torch.randn(2, LENGTH, DIM), grid=(2, 3), num_outputs=1)


def test_feed_forward_drops_hidden_units_in_training_only():
    module, x = FeedForward(DIM, 32, dropout=0.5), torch.randn(2, 4, DIM)
    hidden = module.activation(module.linear1(x))
    assert torch.equal(module.eval()(x), module.linear2(hidden))
    torch.manual_seed(1)
    output = module.train()(x)
    torch.manual_seed(1)
    assert torch.equal(output, module.linear2(drop_elements(hidden, 0.5)))
    assert not torch.allclose(output, module.linear2(hidden), atol=1e-3)


@pytest.mark.parametrize("build", [FeedForward, EncoderLayer, DecoderLayer])
def test_an_unknown_activation_is_refused_with_the_known_ones(build):
    with pytest.raises(
        ValueError, match="activation='swish' is unknown; choose from gelu, gelu_tanh, quick_gelu, relu"
    ):
        build(DIM, HEADS, activation="swish")


@pytest.mark.parametrize("build", [EncoderLayer, DecoderLayer])
@pytest.mark.parametrize("hidden_dim", [0, -3])
def test_a_hidden_width_below_one_is_refused(build, hidden_dim):
    with pytest.raises(ValueError, match=f"hidden_dim={hidden_dim}"):
        build(DIM, HEADS, hidden_dim=hidden_dim)


# Layers and stacks by hand


@NORM_ORDERS
@ACTIVATIONS
@pytest.mark.parametrize("masked", [False, True])
def test_an_encoder_layer_equals_the_block_written_out(norm_first, activation, masked):
    layer = randomise(EncoderLayer(DIM, HEADS, hidden_dim=24, activation=activation, norm_first=norm_first)).double()
    x = torch.randn(2, LENGTH, DIM).double()
    mask = (torch.rand(2, LENGTH, LENGTH) > 0.5) | torch.eye(LENGTH, dtype=torch.bool) if masked else None
    torch.testing.assert_close(layer(x, mask), hand_encoder_layer(layer, x, mask), atol=1e-11, rtol=1e-9)


@NORM_ORDERS
def test_layer_scale_multiplies_each_branch_of_an_encoder_layer(norm_first):
    layer = randomise(EncoderLayer(DIM, HEADS, norm_first=norm_first, layer_scale=0.1)).double()
    x, scales = torch.randn(2, LENGTH, DIM).double(), [b.layer_scale.weight for b in (layer.branch1, layer.branch2)]
    torch.testing.assert_close(layer(x), hand_encoder_layer(layer, x, None, *scales), atol=1e-11, rtol=1e-9)


@NORM_ORDERS
@ACTIVATIONS
@pytest.mark.parametrize("masked", [False, True])
def test_a_decoder_layer_equals_the_block_written_out(norm_first, activation, masked):
    layer = randomise(DecoderLayer(DIM, HEADS, hidden_dim=24, activation=activation, norm_first=norm_first)).double()
    x, memory = torch.randn(2, LENGTH, DIM).double(), torch.randn(2, SOURCE, DIM).double()
    mask, memory_mask, both = None, None, triangle(LENGTH)  # the layer is causal by itself
    if masked:
        mask = (torch.rand(2, LENGTH, LENGTH) > 0.5) | torch.eye(LENGTH, dtype=torch.bool)
        both = both & mask
        memory_mask = torch.rand(2, LENGTH, SOURCE) > 0.5
        memory_mask[..., 0] = True
    expected = hand_decoder_layer(layer, x, memory, both, memory_mask)
    torch.testing.assert_close(layer(x, memory, mask, memory_mask), expected, atol=1e-11, rtol=1e-9)


@NORM_ORDERS
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("final_norm", [None, True, False])
def test_an_encoder_is_its_layers_and_a_final_norm_in_pre_norm_mode_unless_told(norm_first, depth, final_norm):
    encoder = randomise(Encoder(DIM, depth, HEADS, norm_first=norm_first, final_norm=final_norm)).double()
    x, mask = torch.randn(2, LENGTH, DIM).double(), padding(LENGTH, 4, total=LENGTH)
    expected = x
    for layer in encoder.layers:
        expected = hand_encoder_layer(layer, expected, mask[:, None])
    if norm_first if final_norm is None else final_norm:
        expected = hand_norm(encoder.norm, expected)
    else:
        assert not list(encoder.norm.parameters())
    torch.testing.assert_close(encoder(x, mask), expected, atol=1e-10, rtol=1e-8)


@NORM_ORDERS
@pytest.mark.parametrize("checkpointing", [False, True])
def test_intermediates_are_the_outputs_of_the_layers_asked_for_and_no_more(norm_first, checkpointing):
    encoder = randomise(Encoder(DIM, 4, HEADS, norm_first=norm_first)).double()
    encoder.gradient_checkpointing = checkpointing
    calls = [0] * 4
    for i, layer in enumerate(encoder.layers):
        layer.register_forward_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
    x, mask = torch.randn(2, LENGTH, DIM).double(), padding(LENGTH, 4, total=LENGTH)
    expected = [x]
    for layer in encoder.layers:
        expected.append(hand_encoder_layer(layer, expected[-1], mask[:, None]))
    for wanted in ([0], [2, 0], (1, 1), {0, 1, 2, 3}):
        calls[:] = [0] * 4
        found = encoder.intermediates(x, wanted, mask)
        assert found.keys() == set(wanted)
        assert calls == [int(i <= max(wanted)) for i in range(4)]
        for i, tokens in found.items():
            torch.testing.assert_close(tokens, expected[i + 1], atol=1e-10, rtol=1e-8)
    torch.testing.assert_close(encoder.norm(encoder.intermediates(x, [3], mask)[3]), encoder(x, mask))
    for wrong in ([], [4], [-1], [0, 7]):
        with pytest.raises(ValueError, match="are not layers of an encoder with 4, 0 to 3"):
            encoder.intermediates(x, wrong)


@NORM_ORDERS
@pytest.mark.parametrize("depth", [1, 3])
def test_a_decoder_is_its_causal_layers_and_a_final_norm_in_pre_norm_mode_only(norm_first, depth):
    decoder = randomise(Decoder(DIM, depth, HEADS, norm_first=norm_first)).double()
    x, memory = torch.randn(2, LENGTH, DIM).double(), torch.randn(2, SOURCE, DIM).double()
    memory_mask = padding(SOURCE, 2, total=SOURCE)
    expected = x
    for layer in decoder.layers:
        expected = hand_decoder_layer(layer, expected, memory, triangle(LENGTH), memory_mask[:, None])
    if norm_first:
        expected = hand_norm(decoder.norm, expected)
    else:
        assert not list(decoder.norm.parameters())
    torch.testing.assert_close(decoder(x, memory, memory_mask=memory_mask), expected, atol=1e-10, rtol=1e-8)


def test_an_encoder_hands_its_rotation_to_every_layer():
    encoder = Encoder(DIM, 3, HEADS)
    x, rotation = torch.randn(2, LENGTH, DIM), rotation_2d((2, 3), DIM // HEADS)
    expected = x
    for layer in encoder.layers:
        expected = layer(expected, rotation=rotation)
    torch.testing.assert_close(encoder(x, rotation=rotation), encoder.norm(expected))


OF_SOME = {
    "plain": {},
    "masked": {},
    "rotated": {},
    "layer scale and normalised queries": dict(layer_scale=0.5, qk_norm=True),
    "checkpointed": {},
    "readable": {},
}


@NORM_ORDERS
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("case", OF_SOME)
def test_the_first_outputs_are_those_of_a_whole_pass_in_values_and_gradients(norm_first, depth, case):
    encoder = randomise(Encoder(DIM, depth, HEADS, norm_first=norm_first, **OF_SOME[case])).double()
    encoder.gradient_checkpointing = case == "checkpointed"
    for layer in encoder.layers:
        layer.attention.fused = case != "readable"
    mask = torch.rand(2, HEADS, LENGTH, LENGTH) > 0.4 if case == "masked" else None
    rotation = tuple(t.double() for t in rotation_2d((2, 3), DIM // HEADS)) if case == "rotated" else None
    for number in range(1, LENGTH + 1):
        x = torch.randn(2, LENGTH, DIM, dtype=torch.float64)
        results = []
        for options in (dict(num_outputs=number), {}):
            leaf = x.clone().requires_grad_()
            output = encoder(leaf, mask=mask, rotation=rotation, **options)[:, :number]
            (output * output.detach().cos()).sum().backward()
            results.append([output.detach(), leaf.grad, *[p.grad for p in encoder.parameters()]])
            encoder.zero_grad()
        assert results[0][0].shape == (2, number, DIM)
        for some, whole in zip(*results, strict=True):
            torch.testing.assert_close(some, whole, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shape", ["NS", "BS", "BNS", "B1S", "1NS", "BHNS", "BH1S", "B1NS", "11NS", "111S"])
def test_a_mask_of_any_shape_keeps_its_meaning_for_the_first_outputs(shape):
    sizes = {"B": 3, "H": HEADS, "N": LENGTH, "S": LENGTH, "1": 1}
    mask, x = torch.rand([sizes[letter] for letter in shape]) > 0.4, torch.randn(3, LENGTH, DIM)
    encoder, attention = randomise(Encoder(DIM, 2, HEADS)), randomise(MultiHeadAttention(DIM, HEADS))
    for number in (1, 2, LENGTH):
        some = encoder(x, mask=mask, num_outputs=number)
        torch.testing.assert_close(some, encoder(x, mask=mask)[:, :number], rtol=1e-5, atol=1e-5)
        some, weights = attention(x, mask=mask, num_queries=number, return_weights=True)
        whole, all_weights = attention(x, mask=mask, return_weights=True)
        torch.testing.assert_close(some, whole[:, :number], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weights, all_weights[:, :, :number], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("number", [0, -1, LENGTH + 1])
def test_a_number_of_outputs_that_there_are_not_is_refused(number):
    x = torch.randn(2, LENGTH, DIM)
    with pytest.raises(ValueError, match=rf"num_outputs={number} is out of range; x has {LENGTH} tokens"):
        Encoder(DIM, 2, HEADS)(x, num_outputs=number)
    with pytest.raises(ValueError, match=rf"num_queries={number} is out of range; x has {LENGTH} tokens"):
        MultiHeadAttention(DIM, HEADS)(x, num_queries=number)


@pytest.mark.parametrize(
    "options", [dict(causal=True), dict(cache=KeyValueCache()), dict(memory=torch.ones(2, 3, DIM))]
)
def test_the_first_queries_alone_know_no_order_and_no_memory(options):
    with pytest.raises(ValueError, match="num_queries can't be used with a memory, a cache or causal"):
        MultiHeadAttention(DIM, HEADS)(torch.randn(2, LENGTH, DIM), num_queries=1, **options)


@pytest.mark.parametrize("build", [Encoder, Decoder])
def test_a_stack_without_layers_is_refused(build):
    with pytest.raises(ValueError, match="depth=0 is not a number of layers"):
        build(DIM, 0, HEADS)


@pytest.mark.parametrize("shape", [(2, LENGTH, DIM + 1), (LENGTH, DIM), (1, 2, LENGTH, DIM)])
def test_tokens_of_another_width_are_refused(shape):
    good, bad = torch.randn(2, LENGTH, DIM), torch.randn(shape)
    for call in (lambda: Encoder(DIM, 1, HEADS)(bad), lambda: Decoder(DIM, 1, HEADS)(bad, good)):
        with pytest.raises(ValueError, match=r"x has shape .* must be \(B, N, D\) with D = 16"):
            call()
    with pytest.raises(ValueError, match=r"must be \(B, N, D\) with D = 16"):
        Decoder(DIM, 1, HEADS)(good, bad)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_drop_path_rises_linearly_from_zero_to_its_value_in_the_last_layer(depth):
    encoder = Encoder(DIM, depth, HEADS, drop_path=0.4)
    for i, layer in enumerate(encoder.layers):
        for branch in (layer.branch1, layer.branch2):
            probability = branch.drop_path.probability if "drop_path" in dict(branch.named_children()) else 0.0
            assert probability == pytest.approx(0.4 * i / (depth - 1) if depth > 1 else 0.0)


@pytest.mark.parametrize("build", [Encoder, Decoder])
def test_layers_differ_at_initialisation(build):
    layers = build(DIM, 3, HEADS).layers
    for a, b in itertools.combinations(layers, 2):
        for (name, first), second in zip(a.named_parameters(), b.parameters(), strict=True):
            if name.endswith("weight") and "norm" not in name:
                assert (first - second).abs().mean() > 0.01


# Training behaviour


@NORM_ORDERS
@pytest.mark.parametrize("options", [{}, {"layer_scale": 0.1, "qk_norm": True}])
def test_without_dropout_training_and_eval_give_the_same_bits(norm_first, options):
    encoder = Encoder(DIM, 2, HEADS, norm_first=norm_first, **options)
    decoder = Decoder(DIM, 2, HEADS, norm_first=norm_first)
    x = torch.randn(2, LENGTH, DIM)
    assert torch.equal(encoder.train()(x), encoder.eval()(x))
    assert torch.equal(decoder.train()(x, x), decoder.eval()(x, x))


@pytest.mark.parametrize("options", [{"dropout": 0.2}, {"drop_path": 0.5}])
def test_dropout_and_drop_path_act_in_training_only(options):
    encoder, x = Encoder(DIM, 3, HEADS, **options), torch.randn(8, LENGTH, DIM)
    plain = Encoder(DIM, 3, HEADS)
    plain.load_state_dict(encoder.state_dict())
    assert torch.equal(encoder.eval()(x), plain(x))
    first, second = encoder.train()(x), encoder(x)
    assert (first - plain(x)).abs().max() > 1e-2
    assert (first - second).abs().max() > 1e-2


@NORM_ORDERS
@pytest.mark.parametrize("options", [{}, {"layer_scale": 0.1, "qk_norm": True}])
def test_every_parameter_of_an_encoder_gets_a_gradient(norm_first, options):
    encoder = Encoder(DIM, 2, HEADS, norm_first=norm_first, **options)
    output = encoder(torch.randn(2, LENGTH, DIM))
    (output * torch.randn_like(output)).sum().backward()
    check_gradients(encoder)


@NORM_ORDERS
def test_every_parameter_of_a_decoder_gets_a_gradient(norm_first):
    decoder = Decoder(DIM, 2, HEADS, norm_first=norm_first)
    output = decoder(torch.randn(2, LENGTH, DIM), torch.randn(2, SOURCE, DIM))
    (output * torch.randn_like(output)).sum().backward()
    check_gradients(decoder)


def check_gradients(model):
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # A constant added to all keys shifts all scores of a query alike, and softmax ignores that.
        if not name.endswith("key_norm.bias"):
            assert parameter.grad.abs().max() > 1e-6, name


@pytest.mark.parametrize(
    "options", [{}, {"dropout": 0.2, "drop_path": 0.4}, {"norm_first": False}, {"feed_forward_kernel": 3}]
)
@pytest.mark.parametrize("masked", [False, True])
def test_gradient_checkpointing_changes_neither_output_nor_gradients(options, masked):
    encoder = Encoder(DIM, 3, HEADS, **options).train()
    mask, rotation = padding(LENGTH, 3, total=LENGTH) if masked else None, rotation_2d((2, 3), DIM // HEADS)
    results = []
    for enable in (False, True):
        encoder.gradient_checkpointing = enable
        torch.manual_seed(1)
        x = torch.randn(2, LENGTH, DIM, requires_grad=True)
        output = encoder(x, mask, rotation, grid=(2, 3))
        results.append([output.detach(), *gradients(encoder, (output * output.detach().cos()).sum(), x)])
    for plain, checkpointed in zip(*results, strict=True):
        torch.testing.assert_close(plain, checkpointed, atol=1e-6, rtol=1e-5)


def test_gradient_checkpointing_recomputes_each_layer_only_where_gradients_flow():
    encoder, calls = Encoder(DIM, 2, HEADS), []
    encoder.gradient_checkpointing = True
    for layer in encoder.layers:
        layer.attention.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(2, LENGTH, DIM, requires_grad=True)
    encoder(x).sum().backward()
    assert len(calls) == 4
    with torch.no_grad():
        encoder(x)
    assert len(calls) == 6


@NORM_ORDERS
def test_inputs_and_masks_are_unchanged_and_leaves_get_gradients(norm_first):
    encoder, decoder = Encoder(DIM, 2, HEADS, norm_first=norm_first), Decoder(DIM, 2, HEADS, norm_first=norm_first)
    x, memory = (torch.randn(2, n, DIM, requires_grad=True) for n in (LENGTH, SOURCE))
    mask, memory_mask = padding(LENGTH, 4, total=LENGTH), padding(SOURCE, 2, total=SOURCE)
    given = (x, memory, mask, memory_mask)
    copies = [t.detach().clone() for t in given]
    output = decoder(encoder(x, mask), memory, mask, memory_mask)
    (output * torch.randn_like(output)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
    assert all((t.grad != 0).any() for t in (x, memory))


# Padding and causality


@NORM_ORDERS
@pytest.mark.parametrize("spelling", [lambda m: m, lambda m: m[:, None], lambda m: m[:, None, None]])
def test_padded_tokens_change_nothing_at_real_positions_of_an_encoder(norm_first, spelling):
    encoder = Encoder(DIM, 2, HEADS, norm_first=norm_first)
    x, mask = torch.randn(3, LENGTH, DIM), padding(LENGTH, 4, 1, total=LENGTH)
    other = torch.where(mask[..., None], x, 100 * torch.randn_like(x))
    first, second = encoder(x, spelling(mask)), encoder(other, spelling(mask))
    assert torch.equal(first[mask], second[mask])
    assert not torch.allclose(first[~mask], second[~mask])
    for b, length in enumerate((LENGTH, 4, 1)):
        alone = encoder(x[b : b + 1, :length])
        torch.testing.assert_close(first[b : b + 1, :length], alone, atol=1e-5, rtol=1e-5)


def test_padding_in_a_batch_as_large_as_the_sequence_needs_the_three_dimensional_spelling():
    encoder, x, mask = Encoder(DIM, 2, HEADS), torch.randn(4, 4, DIM), padding(4, 3, 2, 1, total=4)
    with pytest.raises(ValueError, match=r"could be \(N, S\) or \(B, S\)"):
        encoder(x, mask)
    other = torch.where(mask[..., None], x, torch.randn_like(x))
    assert torch.equal(encoder(x, mask[:, None])[mask], encoder(other, mask[:, None])[mask])


def test_padded_tokens_get_no_gradient_from_real_positions():
    encoder, mask = Encoder(DIM, 2, HEADS), padding(LENGTH, 4, 1, total=LENGTH)
    x = torch.randn(3, LENGTH, DIM, requires_grad=True)
    output = encoder(x, mask)[mask]
    (output * torch.randn_like(output)).sum().backward()
    assert (x.grad[~mask] == 0).all()
    assert (x.grad[mask] != 0).any(dim=-1).all()


def test_a_sample_of_nothing_but_padding_stays_finite_and_leaves_the_others_alone():
    encoder, mask = Encoder(DIM, 2, HEADS), padding(LENGTH, 0, total=LENGTH)
    x = torch.randn(2, LENGTH, DIM, requires_grad=True)
    output = encoder(x, mask)
    assert torch.equal(output[0], encoder(x, torch.ones_like(mask))[0])
    output.square().sum().backward()
    assert output.isfinite().all()
    assert all(t.grad.isfinite().all() for t in (x, *encoder.parameters()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@NORM_ORDERS
def test_masked_stacks_are_finite_and_near_float32_in_half_precision(norm_first, dtype):
    encoder, decoder = Encoder(DIM, 2, HEADS, norm_first=norm_first), Decoder(DIM, 2, HEADS, norm_first=norm_first)
    x, mask = torch.randn(2, LENGTH, DIM), padding(LENGTH, 0, total=LENGTH)
    expected = decoder(encoder(x, mask), x, mask, mask)
    half = x.to(dtype)
    encoder, decoder = encoder.to(dtype), decoder.to(dtype)
    output = decoder(encoder(half, mask), half, mask, mask)
    output.sum().backward()
    torch.testing.assert_close(output.float(), expected, atol=0.1, rtol=0.1)
    assert all(p.grad.isfinite().all() for m in (encoder, decoder) for p in m.parameters())


USER_MASKS = {
    "none": lambda: None,
    "everything": lambda: torch.ones(1, LENGTH, LENGTH, dtype=torch.bool),
    "pairs": lambda: torch.rand(LENGTH, LENGTH) > 0.3,
    "padding": lambda: padding(LENGTH, 4, total=LENGTH),
    "per sample": lambda: torch.rand(2, LENGTH, LENGTH) > 0.3,
    "per head": lambda: torch.rand(2, HEADS, LENGTH, LENGTH) > 0.3,
}


@NORM_ORDERS
@pytest.mark.parametrize("kind", USER_MASKS)
@pytest.mark.parametrize("changed", range(LENGTH))
def test_a_decoder_never_sees_the_future(norm_first, kind, changed):
    decoder, mask = Decoder(DIM, 2, HEADS, norm_first=norm_first), USER_MASKS[kind]()
    x, memory = torch.randn(2, LENGTH, DIM), torch.randn(2, SOURCE, DIM)
    other = x.clone()
    other[:, changed:] = 10 * torch.randn_like(x[:, changed:])
    first, second = decoder(x, memory, mask), decoder(other, memory, mask)
    assert torch.equal(first[:, :changed], second[:, :changed])
    assert not torch.allclose(first[:, changed], second[:, changed], atol=1e-3)


def test_a_decoder_is_causal_in_a_batch_as_large_as_the_sequence():
    decoder, x, memory = Decoder(DIM, 2, HEADS), torch.randn(4, 4, DIM), torch.randn(4, 4, DIM)
    for n in range(1, 5):
        torch.testing.assert_close(decoder(x, memory)[:, :n], decoder(x[:, :n], memory), atol=1e-6, rtol=1e-5)


def test_a_decoder_applies_the_users_mask_on_top_of_the_causal_one():
    decoder = Decoder(DIM, 1, HEADS).double()
    x, memory = torch.randn(2, LENGTH, DIM).double(), torch.randn(2, SOURCE, DIM).double()
    mask = (torch.rand(2, LENGTH, LENGTH) > 0.5) | torch.eye(LENGTH, dtype=torch.bool)
    expected = hand_decoder_layer(decoder.layers[0], x, memory, mask & triangle(LENGTH), None)
    torch.testing.assert_close(decoder(x, memory, mask), hand_norm(decoder.norm, expected), atol=1e-10, rtol=1e-8)


@NORM_ORDERS
@pytest.mark.parametrize("spelling", [lambda m: m, lambda m: m[:, None]])
def test_padding_in_the_memory_changes_nothing(norm_first, spelling):
    decoder, mask = Decoder(DIM, 2, HEADS, norm_first=norm_first), padding(SOURCE, 3, 1, total=SOURCE)
    x, memory = torch.randn(3, LENGTH, DIM), torch.randn(3, SOURCE, DIM)
    other = torch.where(mask[..., None], memory, 100 * torch.randn_like(memory))
    output = decoder(x, memory, memory_mask=spelling(mask))
    assert torch.equal(output, decoder(x, other, memory_mask=spelling(mask)))
    assert not torch.allclose(output, decoder(x, memory), atol=1e-3)
    torch.testing.assert_close(output[1:2], decoder(x[1:2], memory[1:2, :3]), atol=1e-5, rtol=1e-5)


# The whole Transformer

VOCABULARIES = dict(source_vocabulary=11, target_vocabulary=13)


def build_transformer(norm_first=True, depth=2, **options):
    encoder, decoder = Encoder(DIM, depth, HEADS, norm_first=norm_first), Decoder(DIM, 2, HEADS, norm_first=norm_first)
    return Transformer(encoder, decoder, **(VOCABULARIES | {"max_length": 20} | options))


def random_tokens(batch=2):
    return torch.randint(1, 11, (batch, SOURCE)), torch.randint(1, 13, (batch, LENGTH))


def test_a_token_embedding_is_the_scaled_vector_plus_its_position():
    embedding, tokens = TokenEmbedding(9, 6, max_length=7), torch.tensor([[3, 0, 8], [1, 1, 2]])
    table, output = sinusoids(torch.arange(7), 6), embedding(tokens)
    for b, n in itertools.product(range(2), range(3)):
        expected = math.sqrt(6) * embedding.embedding.weight[tokens[b, n]] + table[n]
        torch.testing.assert_close(output[b, n], expected)


def test_a_token_embedding_drops_elements_of_the_sum_in_training_only():
    embedding, tokens = TokenEmbedding(9, 64, dropout=0.5), torch.arange(9)[None]
    exact = embedding.eval()(tokens)
    dropped = embedding.train()(tokens)
    assert abs((dropped == 0).float().mean().item() - 0.5) < 0.1
    torch.testing.assert_close(dropped[dropped != 0], 2 * exact[dropped != 0])


@NORM_ORDERS
def test_a_transformer_returns_the_heads_linear_map_of_its_decoder(norm_first):
    model, (source, target) = build_transformer(norm_first), random_tokens()
    source[1, 3:] = target[1, 4:] = 0
    nn.init.normal_(model.head.bias)
    memory = model.encoder(model.source_embedding(source), (source != 0)[:, None])
    decoded = model.target_embedding(target)
    for layer in model.decoder.layers:
        decoded = hand_decoder_layer(layer, decoded, memory, triangle(LENGTH), (source != 0)[:, None])
    if norm_first:
        decoded = hand_norm(model.decoder.norm, decoded)
    logits, expected = model(source, target), decoded @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    causal = triangle(LENGTH) & (target != 0)[:, None]  # padding at the end needs no mask of its own
    decoded = model.decoder(model.target_embedding(target), memory, causal, (source != 0)[:, None])
    torch.testing.assert_close(logits[target != 0], model.head(decoded)[target != 0], atol=1e-5, rtol=1e-5)
    assert (logits.exp().sum(-1) - 1).abs().min() > 0.1
    assert (logits < 0).any()
    with torch.no_grad():
        model.head.weight.mul_(3)
        model.head.bias.mul_(3)
    torch.testing.assert_close(model(source, target), 3 * logits, atol=1e-5, rtol=1e-5)


def test_encode_and_decode_are_the_two_halves_of_forward():
    model, (source, target) = build_transformer(), random_tokens()
    source[1, 2:] = 0
    memory, mask = model.encode(source)
    assert torch.equal(mask, (source != 0)[:, None])
    assert torch.equal(model.decode(target, memory, mask), model(source, target))
    assert not torch.allclose(model.decode(target, memory), model(source, target), atol=1e-4)


@NORM_ORDERS
@pytest.mark.parametrize("changed", range(LENGTH))
def test_logits_do_not_depend_on_later_target_tokens(norm_first, changed):
    model, (source, target) = build_transformer(norm_first), random_tokens()
    other = target.clone()
    other[:, changed:] = (other[:, changed:] % 12) + 1
    first, second = model(source, target), model(source, other)
    assert torch.equal(first[:, :changed], second[:, :changed])
    assert not torch.allclose(first[:, changed], second[:, changed], atol=1e-3)


@pytest.mark.parametrize("batch", [2, SOURCE, LENGTH])
def test_logits_depend_on_every_source_token(batch):
    model, (source, target) = build_transformer(), random_tokens(batch)
    for s in range(SOURCE):
        other = source.clone()
        other[:, s] = other[:, s] % 10 + 1
        assert ((model(source, target) - model(other, target)).abs().amax(dim=-1) > 1e-5).all()


@NORM_ORDERS
@pytest.mark.parametrize("pad_id", [0, 7])
def test_padding_of_source_and_target_changes_no_logit_at_real_positions(norm_first, pad_id):
    model = build_transformer(norm_first, pad_id=pad_id)
    source, target = random_tokens()
    source[source == pad_id], target[target == pad_id] = 1, 1
    expected = model(source, target)
    padded_source, padded_target = (F.pad(t, (0, 3), value=pad_id) for t in (source, target))
    torch.testing.assert_close(model(padded_source, target), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(source, padded_target)[:, :LENGTH], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(padded_source, padded_target)[:, :LENGTH], expected, atol=1e-5, rtol=1e-5)

    before = model(padded_source, padded_target)[:, :LENGTH]
    with torch.no_grad():
        for embedding in (model.source_embedding, model.target_embedding):
            embedding.embedding.weight[pad_id] += 10
    assert torch.equal(model(padded_source, padded_target)[:, :LENGTH], before)


def test_a_source_and_a_target_of_nothing_but_padding_stay_finite():
    model, (source, target) = build_transformer(), random_tokens()
    expected = model(source, target)[0]
    source[1], target[1] = 0, 0
    logits = model(source, target)
    logits.square().sum().backward()
    torch.testing.assert_close(logits[0], expected, atol=1e-6, rtol=1e-5)
    assert logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("tie", ["none", "target"])
def test_every_parameter_of_a_transformer_gets_a_gradient(tie):
    model, (source, target) = build_transformer(tie=tie), random_tokens()
    F.cross_entropy(model(source, target).flatten(0, 1), target.flatten()).backward()
    check_gradients(model)


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_exported_transformer_takes_any_batch(norm_first):
    model = build_transformer(norm_first).eval()
    batch = torch.export.Dim("batch")
    exported = torch.export.export(model, random_tokens(), dynamic_shapes=({0: batch}, {0: batch})).module()
    for size in (1, 2, 7):
        source, target = random_tokens(size)
        source[0, 3:] = 0
        torch.testing.assert_close(exported(source, target), model(source, target), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pad_id", [-1, 11, 12, 13])
def test_a_pad_id_outside_either_vocabulary_is_refused(pad_id):
    with pytest.raises(ValueError, match=rf"pad_id={pad_id} is not an id of both vocabularies \(11 and 13 ids\)"):
        build_transformer(pad_id=pad_id)
    assert build_transformer(pad_id=10).pad_id == 10


def test_an_encoder_and_a_decoder_of_different_widths_are_refused():
    with pytest.raises(ValueError, match=r"encoder\.dim=8 and decoder\.dim=16 differ"):
        Transformer(Encoder(8, 1, 2), Decoder(16, 1, 2), **VOCABULARIES)


def test_a_sequence_longer_than_max_length_is_refused():
    model = build_transformer(max_length=SOURCE)
    source, target = random_tokens()
    with pytest.raises(ValueError, match="a sequence of 6 tokens exceeds the 5 positions"):
        model(source, target)


# Step by step

SAME = dict(source_vocabulary=13, target_vocabulary=13)  # which tie="all" needs
TIED = pytest.mark.parametrize("tie", ["none", "target", "all"])


def sources_and_targets():
    """Sources of 5, 3, 1 and 0 tokens, padded, and targets."""
    source, target = random_tokens(4)
    source[~padding(5, 3, 1, 0, total=SOURCE)] = 0
    return source, target


def choose_path(model, fused):
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.fused = fused


@TIED
@NORM_ORDERS
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_logits_step_by_step_equal_those_of_a_full_pass_over_every_prefix(norm_first, tie, fused):
    model, (source, target) = build_transformer(norm_first, tie=tie, **SAME), sources_and_targets()
    nn.init.normal_(model.head.bias)
    choose_path(model, fused)
    state = model.start(source)
    for n in range(LENGTH):
        assert state.cache.length == n
        logits, expected = model.step(target[:, n], state), model(source, target[:, : n + 1])
        torch.testing.assert_close(logits, expected[:, n], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(expected, model(source, target)[:, : n + 1], atol=1e-5, rtol=1e-5)
        assert (logits[:, None] - model(source, target)[:, n + 1 :]).abs().amax(-1).gt(1e-3).all()


@TIED
@NORM_ORDERS
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_steps_go_on_after_rows_were_permuted_repeated_and_dropped(norm_first, tie, fused):
    model, (source, target) = build_transformer(norm_first, tie=tie, **SAME), sources_and_targets()
    choose_path(model, fused)
    state = model.start(source)
    selections = {0: [3, 1, 0, 2], 2: [2, 0, 0, 3, 1], 3: [4, 0, 1], 5: [2, 2, 0]}
    for n in range(LENGTH):
        if n in selections:
            rows = torch.tensor(selections[n])
            source, target = source[rows], target[rows]
            target[:, n:] = torch.randint(1, 13, (len(rows), LENGTH - n))  # rows that were one part here
            state.select(rows)
        expected = model(source, target[:, : n + 1])[:, n]
        torch.testing.assert_close(model.step(target[:, n], state), expected, atol=1e-5, rtol=1e-5)


@NORM_ORDERS
@torch.no_grad()
def test_steps_in_bfloat16_are_near_those_of_a_full_pass_in_float32(norm_first):
    model, (source, target) = build_transformer(norm_first), sources_and_targets()
    expected = model(source, target)
    model = model.bfloat16()
    state = model.start(source)
    for n in range(LENGTH):
        logits = model.step(target[:, n], state)
        assert logits.dtype == torch.bfloat16
        torch.testing.assert_close(logits.float(), expected[:, n], atol=0.1, rtol=0.05)


@torch.no_grad()
def test_steps_of_an_empty_source_are_those_of_one_of_padding_and_of_a_full_pass():
    model, (_, target) = build_transformer(), random_tokens(3)
    empty, padded = torch.zeros(3, 0, dtype=torch.long), torch.zeros(3, 4, dtype=torch.long)
    state = model.start(empty)
    for n in range(LENGTH):
        logits = model.step(target[:, n], state)
        torch.testing.assert_close(logits, model(padded, target)[:, n], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits, model(empty, target)[:, n], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_step_beyond_the_last_position_is_refused():
    model, (source, target) = build_transformer(max_length=SOURCE), random_tokens()
    state = model.start(source)
    for n in range(SOURCE):
        model.step(target[:, n], state)
    with pytest.raises(ValueError, match="a sequence of 6 tokens exceeds the 5 positions"):
        model.step(target[:, SOURCE], state)


@NORM_ORDERS
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chunks", [[1] * LENGTH, [6], [1, 2, 3], [3, 3], [2, 1, 3], [4, 2]])
@pytest.mark.parametrize("kind", ["none", "NS", "BS", "BNS", "BHNS"])
@torch.no_grad()
def test_chunks_of_tokens_through_a_decoder_with_a_cache_equal_the_full_pass(norm_first, fused, chunks, kind):
    batch = 7  # unlike all lengths, so that masks of two dimensions are unambiguous
    decoder = Decoder(DIM, 2, HEADS, norm_first=norm_first)
    choose_path(decoder, fused)
    x, memory = torch.randn(batch, LENGTH, DIM), torch.randn(batch, SOURCE, DIM)
    memory_mask = padding(5, 3, 1, 0, 2, 5, 4, total=SOURCE)
    sizes = {"B": batch, "H": HEADS, "N": LENGTH, "S": LENGTH}
    mask = None if kind == "none" else torch.rand([sizes[letter] for letter in kind]) > 0.3
    expected, cache, end = decoder(x, memory, mask, memory_mask), DecoderCache(2), 0
    for length in chunks:
        start, end = end, end + length
        part = mask
        if mask is not None:
            part = mask[..., :end] if kind == "BS" else mask[..., start:end, :end]
        output = decoder(x[:, start:end], memory, part, memory_mask, cache)
        torch.testing.assert_close(output, expected[:, start:end], atol=1e-5, rtol=1e-5)
    assert cache.length == LENGTH


@torch.no_grad()
def test_a_decoder_with_a_cache_reads_the_memory_in_the_first_step_only():
    decoder, cache = Decoder(DIM, 2, HEADS), DecoderCache(2)
    x, memory = torch.randn(2, LENGTH, DIM), torch.randn(2, SOURCE, DIM)
    expected = decoder(x, memory)
    torch.testing.assert_close(decoder(x[:, :2], memory, cache=cache), expected[:, :2], atol=1e-6, rtol=1e-5)
    output = decoder(x[:, 2:], torch.full_like(memory, math.nan), cache=cache)
    torch.testing.assert_close(output, expected[:, 2:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 2), (7, 2), (7, 2, 2), (7, HEADS, 2, 2)])
def test_a_mask_that_leaves_out_the_cached_tokens_is_refused(shape):
    decoder, cache, x = Decoder(DIM, 1, HEADS), DecoderCache(1), torch.randn(7, 5, DIM)
    decoder(x[:, :3], x, cache=cache)
    with pytest.raises(ValueError, match=r"mask has shape .* \(N, S\) = \(2, 5\), \(B, S\) = \(7, 5\)"):
        decoder(x[:, 3:], x, torch.ones(shape, dtype=torch.bool), cache=cache)


# Tied weights


def matrices(model):
    return [model.target_embedding.embedding, model.head, model.source_embedding.embedding]


@pytest.mark.parametrize(("tie", "shared"), [("none", 1), ("target", 2), ("all", 3)])
@pytest.mark.parametrize("change", ["nothing", "double", "deepcopy", "load"])
def test_tied_matrices_are_one_parameter_whatever_is_done_with_the_model(tie, shared, change):
    model, (source, target) = build_transformer(tie=tie, **SAME), random_tokens()
    untied = sum(p.numel() for p in build_transformer(**SAME).parameters())
    assert sum(p.numel() for p in model.parameters()) == untied - (shared - 1) * 13 * DIM
    expected = model(source, target)
    if change == "double":
        model = model.double()
    elif change == "deepcopy":
        model = copy.deepcopy(model)
    elif change == "load":
        torch.manual_seed(1)
        other = build_transformer(tie=tie, **SAME)
        assert not torch.allclose(other(source, target), expected, atol=1e-2)
        other.load_state_dict(model.state_dict())
        model = other
    same = [module.weight is matrices(model)[0].weight for module in matrices(model)]
    assert same == [i < shared for i in range(3)]
    torch.testing.assert_close(model(source, target).float(), expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        model.target_embedding.embedding.weight[3, 5] = 77
    assert [module.weight[3, 5] == 77 for module in matrices(model)] == same


@NORM_ORDERS
@pytest.mark.parametrize(("tie", "shared"), [("target", 2), ("all", 3)])
def test_the_gradient_of_a_tied_matrix_is_the_sum_over_its_uses(norm_first, tie, shared):
    model, (source, target) = build_transformer(norm_first, tie=tie, **SAME), sources_and_targets()
    untied = build_transformer(norm_first, **SAME)
    untied.load_state_dict(model.state_dict())
    logits = model(source, target)
    torch.testing.assert_close(untied(source, target), logits, atol=1e-6, rtol=1e-5)
    for each in (model, untied):
        F.cross_entropy(each(source, target).flatten(0, 1), target.flatten()).backward()
    parts = [module.weight.grad for module in matrices(untied)]
    assert all(part.abs().max() > 1e-3 for part in parts)
    torch.testing.assert_close(matrices(model)[0].weight.grad, sum(parts[:shared]), atol=1e-6, rtol=1e-5)
    if shared == 2:
        torch.testing.assert_close(matrices(model)[2].weight.grad, parts[2], atol=1e-6, rtol=1e-5)


def test_an_unknown_tie_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="tie='both' is unknown; choose from none, target, all"):
        build_transformer(tie="both")


def test_tying_all_needs_one_vocabulary():
    with pytest.raises(ValueError, match="tie='all' needs one vocabulary for both sides, not 11 and 13 ids"):
        build_transformer(tie="all")
    assert build_transformer(tie="target").head.weight.shape == (13, DIM)


# First weights


@pytest.mark.parametrize("build", [Encoder, Decoder])
@NORM_ORDERS
def test_first_weights_of_a_stack_follow_the_documented_table(build, norm_first):
    dim, hidden = 64, 160
    options = {"layer_scale": 0.3, "qk_norm": True} if build is Encoder else {}
    stack = build(dim, 2, 4, hidden_dim=hidden, norm_first=norm_first, **options)
    seen = set()
    for name, module in stack.named_modules():
        if isinstance(module, nn.Linear):
            parts = module.weight.split(dim) if name.endswith("qkv") else [module.weight]
            seen.add(tuple(p.shape for p in parts))
            for part in parts:
                bound = math.sqrt(6 / (part.shape[0] + part.shape[1]))
                assert 0.97 * bound < part.max() <= bound
                assert -bound <= part.min() < -0.97 * bound
                assert part.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.04)
                assert abs(part.mean().item()) < 0.05 * bound
            assert (module.bias == 0).all()
        elif isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
        elif isinstance(module, LayerScale):
            assert (module.weight == torch.tensor(0.3)).all()
    assert seen == {((dim, dim),) * 3, ((dim, dim),), ((hidden, dim),), ((dim, hidden),)}


def test_first_weights_of_a_transformer_follow_the_documented_table_and_keep_its_parts():
    encoder, decoder = Encoder(64, 1, 4), Decoder(64, 1, 4)
    before = [p.clone() for part in (encoder, decoder) for p in part.parameters()]
    model = Transformer(encoder, decoder, source_vocabulary=300, target_vocabulary=200)
    after = [p for part in (model.encoder, model.decoder) for p in part.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for embedding in (model.source_embedding.embedding, model.target_embedding.embedding):
        assert embedding.weight.std().item() == pytest.approx(64**-0.5, rel=0.03)
        assert abs(embedding.weight.mean().item()) < 0.01
    bound = math.sqrt(6 / (64 + 200))
    assert 0.98 * bound < model.head.weight.abs().max() <= bound
    assert model.head.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert (model.head.bias == 0).all()


@pytest.mark.parametrize("tie", ["target", "all"])
def test_a_tied_head_starts_as_the_embedding_and_the_rest_as_without_a_tie(tie):
    encoder, decoder = Encoder(64, 1, 4), Decoder(64, 1, 4)
    before = [p.clone() for part in (encoder, decoder) for p in part.parameters()]
    model = Transformer(encoder, decoder, source_vocabulary=300, target_vocabulary=300, tie=tie)
    after = [p for part in (model.encoder, model.decoder) for p in part.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for module in matrices(model):  # Xavier would give the head 0.074
        assert module.weight.std().item() == pytest.approx(64**-0.5, rel=0.03)
        assert abs(module.weight.mean().item()) < 0.01
        assert module.weight.abs().max() > 3 * 64**-0.5  # normal, not uniform
    assert (model.head.bias == 0).all()
