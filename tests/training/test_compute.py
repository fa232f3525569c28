"""Checks the count of operations against counts by hand, from widths, depths and numbers of tokens alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vit_scratch.training.compute import PETA, ComputeCounter, shapes, without_data
from vit_scratch.transformer.attention import MultiHeadAttention
from vit_scratch.transformer.decoder import Decoder
from vit_scratch.transformer.encoder import Encoder
from vit_scratch.transformer.transformer import Transformer
from vit_scratch.vision.vit import create_vit


def classify(model, images, labels):
    logits = model(images)
    return F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum"), logits.argmax(1)


def predict(model, inputs, targets):
    logits = model(*inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum"), logits.argmax(-1)


def images(batch, channels=3, height=8, width=8):
    return torch.zeros(batch, channels, height, width), torch.zeros(batch, dtype=torch.long)


def tokens(batch, source, target):
    following = torch.ones(batch, target, dtype=torch.long)
    return (torch.ones(batch, source, dtype=torch.long), following), following


def products(rows, inner, columns):
    """Operations of a matrix product (rows, inner) @ (inner, columns): a multiplication and an addition each."""
    return 2 * rows * inner * columns


def attention_by_hand(queries, keys, dim):
    """Queries, keys and values, the scores of all heads, the sums of values, and the map behind them, of one item."""
    maps = products(queries, dim, dim) + 2 * products(keys, dim, dim) + products(queries, dim, dim)
    return maps + products(queries, dim, keys) + products(queries, keys, dim)


def feed_forward_by_hand(length, dim, hidden):
    return products(length, dim, hidden) + products(length, hidden, dim)


def vit_by_hand(*, channels, height, width, patch, prefix, dim, depth, hidden, classes, pooling, stem=False, kernel=0):
    """Of one image's forward pass; a class token is all that the last layer computes."""
    patches = (height // patch[0]) * (width // patch[1])
    length = prefix + patches
    read = 1 if pooling == "class" else length
    layer = attention_by_hand(length, length, dim) + feed_forward_by_hand(length, dim, hidden)
    last = attention_by_hand(read, length, dim) + feed_forward_by_hand(read, dim, hidden)
    layer, last = (n + products(patches, kernel**2, hidden) for n in (layer, last))  # each channel by itself
    embedding = products(patches, channels * patch[0] * patch[1], dim)
    if stem:  # for patches of 4: a quarter of the width at full size, a half there, all of it at half the size
        embedding = products(height * width, 9 * channels, dim // 4) + products(height * width, 9 * dim // 4, dim // 2)
        embedding += products(height * width // 4, 9 * dim // 2, dim) + products(patches, dim, dim)
    return embedding + (depth - 1) * layer + last + products(1, dim, classes)


BASE = dict(image_size=8, patch_size=4, dim=16, depth=2, heads=2, num_classes=10)
VITS = {
    "class token": ({}, {}),
    "mean": (dict(pooling="mean"), dict(prefix=0)),
    "rotary": (dict(positions="rotary"), {}),
    "rotary, mean": (dict(positions="rotary", pooling="mean", heads=4), dict(prefix=0)),
    "sinusoidal": (dict(positions="sinusoidal"), {}),
    "registers": (dict(registers=3), dict(prefix=4)),
    "registers, mean": (dict(registers=3, pooling="mean"), dict(prefix=3)),
    "patch 2": (dict(patch_size=2), dict(patch=(2, 2))),
    "patch 1": (dict(patch_size=1), dict(patch=(1, 1))),
    "patch 8": (dict(patch_size=8, pooling="mean"), dict(patch=(8, 8), prefix=0)),
    "patches of another shape": (
        dict(image_size=(8, 12), patch_size=(2, 6), in_channels=1),
        dict(channels=1, width=12, patch=(2, 6)),
    ),
    "another hidden width": (dict(hidden_dim=24), dict(hidden=24)),
    "another depth and width": (dict(dim=12, depth=3, heads=1), dict(dim=12, depth=3, hidden=48)),
    "a head for each two": (dict(heads=8), {}),
    "norms and factors": (dict(qk_norm=True, layer_scale=1e-4), {}),
    "no head": (dict(num_classes=0), dict(classes=0)),
    "convolutional stem": (dict(stem="convolution", pooling="mean"), dict(prefix=0, stem=True)),
    "convolutions between": (dict(feed_forward_kernel=3, pooling="mean", registers=2), dict(prefix=2, kernel=3)),
    "dropout": (dict(dropout=0.3, drop_path=0.5), {}),
}


@pytest.mark.parametrize("variant", VITS)
def test_a_vit_counts_as_by_hand(variant):
    arguments, changes = VITS[variant]
    model = create_vit("tiny_patch4_32", **BASE | arguments)
    base = dict(channels=3, height=8, width=8, patch=(4, 4), prefix=1, dim=16, depth=2, hidden=64, classes=10)
    by_hand = base | changes | dict(pooling=arguments.get("pooling", "class"))
    expected = vit_by_hand(**by_hand)
    counter = ComputeCounter(model, classify)
    shape = by_hand["channels"], by_hand["height"], by_hand["width"]
    assert counter(*images(7, *shape)) == 7 * 3 * expected


def test_a_vit_counts_as_on_paper():
    """4 patches of 48 numbers and a class token of width 16, two layers, 10 classes, all numbers written out."""
    counter = ComputeCounter(create_vit("tiny_patch4_32", **BASE), classify)
    embedding = 2 * 4 * 48 * 16  # 6,144
    maps = 2 * 5 * 16 * (48 + 16)  # 10,240
    scores_and_sums = 2 * (2 * 5 * 5 * 16)  # 1,600
    feed_forward = 2 * (2 * 5 * 16 * 64)  # 20,480
    last_maps = 2 * 1 * 16 * (16 + 16) + 2 * 5 * 16 * 32  # 6,144
    last_scores_and_sums = 2 * (2 * 1 * 5 * 16)  # 320
    last_feed_forward = 2 * (2 * 1 * 16 * 64)  # 4,096
    head = 2 * 16 * 10  # 320
    first, last = maps + scores_and_sums + feed_forward, last_maps + last_scores_and_sums + last_feed_forward
    assert embedding + first + last + head == 49_344
    assert counter(*images(1)) == 148_032


def test_a_vit_of_the_papers_size_counts_as_published():
    """ViT-B/16 takes 17.58e9 multiply-adds for an image of 224 pixels, attention included (torchvision's GFLOPS)."""
    with torch.device("meta"):
        model = create_vit("base_patch16_224", num_classes=1000)
    counter = ComputeCounter(model, lambda m, x, _: m.forward_head(m.forward_features(x)))  # all of the last layer
    count = counter(*without_data(images(1, 3, 224, 224)))
    assert count / 3 / 2 == pytest.approx(17.58e9, rel=2e-3)


@pytest.mark.parametrize(
    ("tie", "dim", "heads", "encoder_depth", "decoder_depth", "hidden"),
    [("all", 16, 2, 1, 2, None), ("target", 12, 3, 2, 1, 12), ("none", 8, 4, 1, 1, 20)],
)
def test_an_encoder_decoder_counts_as_by_hand(tie, dim, heads, encoder_depth, decoder_depth, hidden):
    model = Transformer(
        Encoder(dim, encoder_depth, heads, hidden_dim=hidden, dropout=0.1),
        Decoder(dim, decoder_depth, heads, hidden_dim=hidden, dropout=0.1),
        source_vocabulary=11,
        target_vocabulary=11,
        dropout=0.1,
        max_length=10,
        tie=tie,
    )
    hidden = hidden or 4 * dim
    counter = ComputeCounter(model, predict)
    for batch, source, target in ((3, 5, 7), (2, 9, 1), (5, 1, 4)):
        layer = attention_by_hand(source, source, dim) + feed_forward_by_hand(source, dim, hidden)
        if hidden == 4 * dim:
            assert layer == 2 * (source * 12 * dim**2 + 2 * source**2 * dim)
        forward = encoder_depth * layer
        forward += decoder_depth * attention_by_hand(target, target, dim)
        forward += decoder_depth * attention_by_hand(target, source, dim)
        forward += decoder_depth * feed_forward_by_hand(target, dim, hidden)
        forward += products(target, dim, 11)  # the embeddings are looked up, the head is a product
        assert counter(*tokens(batch, source, target)) == 3 * batch * forward


def test_convolutions_count_as_by_hand():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),  # 8 x 10 stays
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=4),  # 4 x 5
        nn.MaxPool2d(2),  # 2 x 2
        nn.Conv2d(12, 6, 1),
        nn.Flatten(),
        nn.Linear(24, 5),
    )
    forward = 8 * 10 * 8 * (3 * 9) + 4 * 5 * 12 * (2 * 9) + 2 * 2 * 6 * 12 + 24 * 5
    counter = ComputeCounter(model, classify)
    for batch in (2, 9):
        assert counter(*images(batch, 3, 8, 10)) == 3 * batch * 2 * forward


def test_the_count_is_linear_in_the_batch():
    model = create_vit("tiny_patch4_32", **BASE)
    counter = ComputeCounter(model, classify)
    one = counter(*images(1))
    assert one > 0
    assert [counter(*images(n)) for n in (2, 3, 64, 1000)] == [2 * one, 3 * one, 64 * one, 1000 * one]


def with_attention(model, fused):
    model = copy.deepcopy(model)
    found = [m for m in model.modules() if isinstance(m, MultiHeadAttention)]
    for module in found:
        module.fused = fused
    assert found
    return model


def test_fused_and_readable_attention_count_the_same():
    vit = create_vit("tiny_patch4_32", **BASE)
    transformer = Transformer(Encoder(8, 2, 2), Decoder(8, 2, 2), source_vocabulary=9, target_vocabulary=9)
    for model, loss, batch in ((vit, classify, images(2)), (transformer, predict, tokens(2, 6, 5))):
        counts = {ComputeCounter(with_attention(model, fused), loss)(*batch) for fused in (True, False)}
        assert len(counts) == 1


def test_the_count_is_that_of_the_products_that_are_really_taken():
    """The readable path on the CPU, where the counter sees every product, forwards and backwards."""
    model = with_attention(create_vit("tiny_patch4_32", **BASE), fused=False)
    batch = images(3)
    with FlopCounterMode(display=False) as forward:
        loss = classify(model, *batch)[0]
    count = ComputeCounter(model, classify)(*batch)
    assert count == 3 * forward.get_total_flops()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    of_the_images = 3 * products(4, 48, 16)  # whose gradient nothing asks for
    assert forward.get_total_flops() + backward.get_total_flops() == count - of_the_images


def test_mixed_labels_count_like_whole_ones():
    model = create_vit("tiny_patch4_32", **BASE)
    counter = ComputeCounter(model, classify)
    x, y = images(4)
    mixed = torch.full((4, 10), 0.1)
    assert counter(x, mixed) == counter(x, y) == 4 * 148_032


def test_dropout_and_dropped_branches_do_not_change_the_count():
    options = [{}, dict(dropout=0.5), dict(drop_path=0.9), dict(dropout=0.1, drop_path=0.2)]
    models = [create_vit("tiny_patch4_32", **BASE | o) for o in options]
    assert [ComputeCounter(m, classify)(*images(2)) for m in models] == [2 * 148_032] * 4


def test_the_mean_is_that_of_as_many_batches_as_there_are_of_each_kind():
    counter = ComputeCounter(create_vit("tiny_patch4_32", **BASE), classify)
    assert counter.mean((*images(n), number) for n, number in ((4, 3), (3, 1), (1, 1))) == pytest.approx(
        16 / 5 * 148_032, rel=1e-12
    )
    assert counter.mean([(*images(7), 10)]) == 7 * 148_032
    transformer = Transformer(Encoder(8, 1, 2), Decoder(8, 1, 2), source_vocabulary=9, target_vocabulary=9)
    counter = ComputeCounter(transformer, predict)
    batches = [tokens(2, 3, 4), tokens(1, 5, 5), tokens(2, 3, 4)]
    mean = (2 * counter(*batches[0]) + counter(*batches[1])) / 3
    assert counter.mean((*batch, 1) for batch in batches) == pytest.approx(mean, rel=1e-12)
    assert PETA == 10.0**15


def test_the_mean_follows_what_becomes_of_the_inputs_in_the_course_of_a_training():
    calls = []

    def loss(model, inputs, targets):
        calls.append(inputs.shape)
        return classify(model, inputs, targets)

    def adapt(inputs, done):
        assert 0 < done < 1
        return inputs[..., :2, :2] if done < 0.25 else inputs[..., :5] if done < 0.35 else inputs

    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    counter = ComputeCounter(model, loss)
    pixels = 0.25 * 4 + 0.1 * 40 + 0.65 * 64
    mean = counter.mean([(*images(2), 5), (*images(8), 1)], adapt)
    assert mean == pytest.approx(3 * 2 * 3 * 4 * pixels * 18 / 6, rel=1e-12)
    assert sorted(calls) == sorted((n, 3, *size) for n in (2, 8) for size in ((2, 2), (8, 5), (8, 8)))  # once each


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_alone(training):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 10))
    model[0].bias.requires_grad_(False)
    model.train(training)
    model[3].train(not training)
    gradient = torch.ones_like(model[4].weight)
    model[4].weight.grad = gradient
    values = {n: v.clone() for n, v in model.state_dict().items()}
    addresses = {n: p.data_ptr() for n, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    counter = ComputeCounter(model, classify)
    assert counter(*images(2)) == 2 * 3 * 2 * (36 * 4 * 27 + 1440)
    assert all(p.device.type == "cpu" for p in [*model.parameters(), *model.buffers()])
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == addresses
    assert all(torch.equal(v, values[n]) for n, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert model[4].weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert model[0].weight.grad is None
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True, True, True]


def test_counting_draws_no_random_numbers_and_leaves_the_batch_alone():
    model = create_vit("tiny_patch4_32", **BASE | dict(dropout=0.4, drop_path=0.4))
    transformer = Transformer(
        Encoder(8, 1, 2, dropout=0.2), Decoder(8, 1, 2, dropout=0.2), source_vocabulary=9, target_vocabulary=9
    )
    before = torch.get_rng_state()
    x, y = images(2)
    (source, target), following = tokens(2, 3, 4)
    ComputeCounter(model, classify)(x, y)
    ComputeCounter(transformer, predict)((source, target), following)
    assert torch.equal(torch.get_rng_state(), before)
    assert {t.device.type for t in (x, y, source, target, following)} == {"cpu"}


def test_a_batch_of_known_shapes_runs_no_forward_pass():
    seen = []

    def loss(model, inputs, targets):
        seen.append((shapes(inputs), shapes(targets), model.training, torch.is_grad_enabled()))
        assert {t.device.type for t in (inputs, targets, *model.parameters())} == {"meta"}
        return classify(model, inputs, targets)

    model = create_vit("tiny_patch4_32", **BASE).eval()
    counter = ComputeCounter(model, loss)
    assert seen == []
    first = counter(*images(2))
    assert counter(torch.randn(2, 3, 8, 8), torch.tensor([3, 4])) == first
    assert counter(*without_data(images(2))) == first
    assert seen == [((2, 3, 8, 8), (2,), True, False)]
    assert counter(*images(3)) == first // 2 * 3
    assert counter(images(2)[0], torch.full((2, 10), 0.1)) == first
    assert len(seen) == 3
    assert counter.mean([(*images(2), 2), (*images(3), 1)]) == pytest.approx(first / 2 * 7 / 3)
    assert len(seen) == 3


def test_batches_of_the_same_size_but_other_lengths_are_told_apart():
    calls = []

    def loss(model, inputs, targets):
        calls.append(1)
        return predict(model, inputs, targets)

    transformer = Transformer(Encoder(8, 1, 2), Decoder(8, 2, 2), source_vocabulary=9, target_vocabulary=9)
    counter = ComputeCounter(transformer, loss)
    batches = [(2, 3, 4), (2, 4, 3), (4, 3, 2), (2, 3, 4), (2, 4, 3)]
    counts = [counter(*tokens(*batch)) for batch in batches]
    assert len(set(counts)) == 3
    assert counts[:2] == counts[3:]
    assert len(calls) == 3


def test_without_data_keeps_shapes_types_and_structure():
    a, b = torch.zeros(2, 3), torch.zeros(4, dtype=torch.long)
    (first, (second,)), third = without_data(((a, (b,)), a))
    assert [(t.shape, t.dtype, t.device.type) for t in (first, second, third)] == [
        ((2, 3), torch.float32, "meta"),
        ((4,), torch.int64, "meta"),
        ((2, 3), torch.float32, "meta"),
    ]
    assert shapes(((a, (b,)), a)) == (((2, 3), ((4,),)), (2, 3))
