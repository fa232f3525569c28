"""Our layers, stacks and whole Transformer give the numbers of torch.nn with copied weights, forwards and backwards."""

import pytest
import torch
from torch import nn

from vit_scratch.transformer.decoder import Decoder, DecoderLayer
from vit_scratch.transformer.encoder import Encoder, EncoderLayer
from vit_scratch.transformer.transformer import Transformer

DIM, HEADS, HIDDEN, TARGET, SOURCE = 16, 4, 24, 6, 5
OPTIONS = [
    pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"]),
    pytest.mark.parametrize("activation", ["relu", "gelu"]),
    pytest.mark.parametrize("training", [True, False], ids=["train", "eval"]),
]


def all_options(test):
    for mark in OPTIONS:
        test = mark(test)
    return test


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randomise(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=0.05, std=0.25)
    return module


def copy_attention(theirs, ours):
    theirs.in_proj_weight.copy_(ours.qkv.weight)
    theirs.in_proj_bias.copy_(ours.qkv.bias)
    theirs.out_proj.load_state_dict(ours.out.state_dict())


@torch.no_grad()
def copy_layer(theirs, ours):
    if isinstance(ours, DecoderLayer):
        copy_attention(theirs.self_attn, ours.self_attention)
        copy_attention(theirs.multihead_attn, ours.cross_attention)
        theirs.norm3.load_state_dict(ours.norm3.state_dict())
    else:
        copy_attention(theirs.self_attn, ours.attention)
    theirs.linear1.load_state_dict(ours.feed_forward.linear1.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.linear2.state_dict())
    theirs.norm1.load_state_dict(ours.norm1.state_dict())
    theirs.norm2.load_state_dict(ours.norm2.state_dict())


def copy_stack(theirs, ours, norm_first):
    """nn.Transformer also norms the end of a post-norm stack, which the 2017 paper and we do not."""
    for a, b in zip(theirs.layers, ours.layers, strict=True):
        copy_layer(a, b)
    if norm_first:
        theirs.norm.load_state_dict(ours.norm.state_dict())
    else:
        theirs.norm = None


def torch_options(norm_first, activation):
    return dict(
        dim_feedforward=HIDDEN,
        dropout=0.0,
        activation=activation,
        layer_norm_eps=1e-6,
        batch_first=True,
        norm_first=norm_first,
    )


def our_options(norm_first, activation):
    return dict(hidden_dim=HIDDEN, activation=activation, norm_first=norm_first)


def random_padding(total):
    """(3, total), True at real tokens; every sample has at least one."""
    mask = torch.rand(3, total) > 0.4
    mask[:, 0] = True
    mask[0] = True
    return mask


def padding_at_the_end(batch, total):
    """(B, total), True at real tokens; every sample has at least one, the first nothing else."""
    lengths = torch.randint(1, total + 1, (batch, 1))
    lengths[0] = total
    return torch.arange(total) < lengths


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def random_pairs(queries, keys):
    """(queries, keys), True where attending is allowed; the diagonal and the first key always are."""
    mask = torch.rand(queries, keys) > 0.4
    mask[:, 0] = True
    return mask | torch.eye(queries, keys, dtype=torch.bool)


def compare(ours, theirs, inputs, real=None):
    """Outputs, and the gradients of the inputs, agree at the real tokens."""
    real = torch.ones(inputs[0].shape[:2], dtype=torch.bool) if real is None else real
    results = []
    for model in (ours, theirs):
        leaves = [t.clone().requires_grad_() for t in inputs]
        output = model(*leaves)[real]
        cotangent = torch.linspace(-1, 1, output.numel()).view_as(output)
        output.backward(cotangent)
        results.append([output.detach()] + [t.grad for t in leaves])
    for a, b in zip(*results, strict=True):
        assert (a != 0).any()
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    with torch.no_grad():  # where torch takes its own fast path in eval mode
        torch.testing.assert_close(ours(*inputs)[real], theirs(*inputs)[real], atol=1e-5, rtol=1e-5)


@all_options
@pytest.mark.parametrize("masked", [False, True])
def test_an_encoder_layer_equals_torch(norm_first, activation, training, masked):
    ours = randomise(EncoderLayer(DIM, HEADS, **our_options(norm_first, activation))).train(training)
    theirs = nn.TransformerEncoderLayer(DIM, HEADS, **torch_options(norm_first, activation)).train(training)
    copy_layer(theirs, ours)
    mask = random_pairs(TARGET, TARGET) if masked else None
    theirs_mask = ~mask if masked else None
    compare(lambda x: ours(x, mask), lambda x: theirs(x, src_mask=theirs_mask), [torch.randn(3, TARGET, DIM)])


@all_options
@pytest.mark.parametrize("masked", [False, True])
def test_a_decoder_layer_equals_torch(norm_first, activation, training, masked):
    ours = randomise(DecoderLayer(DIM, HEADS, **our_options(norm_first, activation))).train(training)
    theirs = nn.TransformerDecoderLayer(DIM, HEADS, **torch_options(norm_first, activation)).train(training)
    copy_layer(theirs, ours)
    mask, memory_mask, their_masks = None, None, dict(tgt_mask=~causal(TARGET))  # ours is causal by itself
    if masked:
        mask, memory_mask = random_pairs(TARGET, TARGET), random_pairs(TARGET, SOURCE)
        their_masks = dict(tgt_mask=~(mask & causal(TARGET)), memory_mask=~memory_mask)
    compare(
        lambda x, memory: ours(x, memory, mask, memory_mask),
        lambda x, memory: theirs(x, memory, **their_masks),
        [torch.randn(3, TARGET, DIM), torch.randn(3, SOURCE, DIM)],
    )


@all_options
@pytest.mark.parametrize("kind", ["none", "padding", "pairs", "both", "per head"])
def test_an_encoder_equals_torch(norm_first, activation, training, kind):
    ours = randomise(Encoder(DIM, 3, HEADS, **our_options(norm_first, activation))).train(training)
    layer = nn.TransformerEncoderLayer(DIM, HEADS, **torch_options(norm_first, activation))
    theirs = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(DIM, eps=1e-6), enable_nested_tensor=False)
    copy_stack(theirs.train(training), ours, norm_first)

    padding, pairs = random_padding(TARGET), random_pairs(TARGET, TARGET)
    per_head = (torch.rand(3, HEADS, TARGET, TARGET) > 0.4) | torch.eye(TARGET, dtype=torch.bool)
    mask, their_masks, real = {
        "none": (None, {}, None),
        "padding": (padding, dict(src_key_padding_mask=~padding), padding),
        "pairs": (pairs, dict(mask=~pairs), None),
        "both": (padding[:, None] & pairs, dict(mask=~pairs, src_key_padding_mask=~padding), padding),
        "per head": (per_head, dict(mask=~per_head.flatten(0, 1)), None),
    }[kind]
    compare(lambda x: ours(x, mask), lambda x: theirs(x, **their_masks), [torch.randn(3, TARGET, DIM)], real)


@all_options
@pytest.mark.parametrize("padded", [False, True])
def test_a_decoder_equals_torch_with_a_causal_mask(norm_first, activation, training, padded):
    ours = randomise(Decoder(DIM, 3, HEADS, **our_options(norm_first, activation))).train(training)
    layer = nn.TransformerDecoderLayer(DIM, HEADS, **torch_options(norm_first, activation))
    theirs = nn.TransformerDecoder(layer, 3, norm=nn.LayerNorm(DIM, eps=1e-6))
    copy_stack(theirs.train(training), ours, norm_first)

    their_masks = dict(tgt_mask=~causal(TARGET))
    mask = memory_mask = None
    if padded:
        mask, memory_mask = random_padding(TARGET), random_padding(SOURCE)
        their_masks |= dict(tgt_key_padding_mask=~mask, memory_key_padding_mask=~memory_mask)
    inputs = [torch.randn(3, TARGET, DIM), torch.randn(3, SOURCE, DIM)]
    compare(
        lambda x, memory: ours(x, memory, mask, memory_mask),
        lambda x, memory: theirs(x, memory, **their_masks),
        inputs,
        mask,
    )


def draw(limit):
    """A whole number from 1 to `limit`."""
    return int(torch.randint(1, limit + 1, ()))


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("masked", [False, True], ids=["padding", "padding and masks"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("ignore:.*nested.tensor")
def test_a_whole_transformer_equals_torch(norm_first, training, masked, seed):
    """Sizes, lengths, padding and masks are drawn; logits and gradients agree at the real tokens."""
    torch.manual_seed(seed)
    batch, length, heads = draw(5), draw(9), 2 ** (draw(3) - 1)
    source_length = length if seed % 2 else draw(9)
    depths, activation, pad_id = (draw(3), draw(3)), ["relu", "gelu"][draw(2) - 1], [0, 7][draw(2) - 1]
    options = our_options(norm_first, activation)
    ours = Transformer(
        Encoder(DIM, depths[0], heads, **options),
        Decoder(DIM, depths[1], heads, **options),
        source_vocabulary=11,
        target_vocabulary=13,
        pad_id=pad_id,
        max_length=20,
    )
    randomise(ours).train(training)
    theirs = nn.Transformer(DIM, heads, *depths, **torch_options(norm_first, activation)).train(training)
    copy_stack(theirs.encoder, ours.encoder, norm_first)
    copy_stack(theirs.decoder, ours.decoder, norm_first)

    source, target = torch.randint(0, 11, (batch, source_length)), torch.randint(0, 13, (batch, length))
    real_source, real = padding_at_the_end(batch, source_length), padding_at_the_end(batch, length)
    source[source == pad_id], target[target == pad_id] = 1, 1
    source[~real_source], target[~real] = pad_id, pad_id
    mask, memory_mask = random_pairs(length, length), random_pairs(length, source_length)
    source_mask = random_pairs(source_length, source_length)
    their_masks = dict(tgt_mask=~causal(length))
    if masked:
        their_masks = dict(src_mask=~source_mask, tgt_mask=~(mask & causal(length)), memory_mask=~memory_mask)

    def run_ours():
        if not masked:
            return ours(source, target)
        memory = ours.encoder(ours.source_embedding(source), real_source[:, None] & source_mask)
        decoded = ours.decoder(ours.target_embedding(target), memory, mask[None], real_source[:, None] & memory_mask)
        return ours.head(decoded)

    def run_theirs():
        decoded = theirs(
            ours.source_embedding(source),
            ours.target_embedding(target),
            src_key_padding_mask=~real_source,
            tgt_key_padding_mask=~real,
            memory_key_padding_mask=~real_source,
            **their_masks,
        )
        return ours.head(decoded)

    shared = [ours.source_embedding.embedding.weight, ours.target_embedding.embedding.weight, ours.head.weight]
    results = []
    for run, stacks in ((run_ours, (ours.encoder, ours.decoder)), (run_theirs, (theirs.encoder, theirs.decoder))):
        norms = [layer.norm1.weight for stack in stacks for layer in stack.layers]
        logits = run()[real]
        cotangent = torch.linspace(-1, 1, logits.numel()).view_as(logits)
        results.append([logits.detach(), *torch.autograd.grad(logits, shared + norms, cotangent)])
    for a, b in zip(*results, strict=True):
        assert (a != 0).any()
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    with torch.no_grad():  # where torch takes its own fast path in eval mode
        torch.testing.assert_close(run_ours()[real], run_theirs()[real], atol=1e-5, rtol=1e-5)
