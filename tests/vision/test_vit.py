"""The Vision Transformer: its parts by hand, presets by count, positions, gradients and the contract of timm."""

import itertools
import json
import math

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from torch import nn

from vit_scratch.transformer.decoder import Decoder
from vit_scratch.transformer.encoder import Encoder
from vit_scratch.transformer.positions import rotation_2d, sinusoids_2d
from vit_scratch.transformer.transformer import Transformer
from vit_scratch.vision.vit import (
    POOLINGS,
    POSITIONS,
    PREFIX_POSITIONS,
    PRESETS,
    STEMS,
    VisionTransformer,
    create_vit,
    resize_positions,
    vit_arguments,
)

DIM, HEADS, GRID = 16, 2, (2, 3)
OPTIONS = dict(image_size=(8, 12), patch_size=4, num_classes=5)
COMBINATIONS = pytest.mark.parametrize(
    ("pooling", "positions", "registers"), list(itertools.product(POOLINGS, POSITIONS, (0, 2)))
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def build(depth=2, encoder_options=None, **options):
    return VisionTransformer(Encoder(DIM, depth, HEADS, **(encoder_options or {})), **(OPTIONS | options))


def random_images(batch=2):
    return torch.randn(batch, 3, 8, 12)


# The encoder is the one of the sequence Transformer


def build_transformer():
    return Transformer(Encoder(DIM, 2, HEADS), Decoder(DIM, 1, HEADS), source_vocabulary=9, target_vocabulary=9)


def test_the_vision_and_the_sequence_transformer_hold_the_same_encoder_class():
    vision, sequence = create_vit("tiny_patch4_32", depth=1), build_transformer()
    assert type(vision.encoder) is type(sequence.encoder) is Encoder
    assert vision.encoder.forward.__func__ is sequence.encoder.forward.__func__


def test_an_encoder_taken_out_of_a_transformer_sees_images():
    sequence = build_transformer()
    source, target = torch.randint(1, 9, (2, 4)), torch.randint(1, 9, (2, 4))
    translated = sequence(source, target)
    vision = VisionTransformer(sequence.encoder, **OPTIONS)
    assert vision.encoder is sequence.encoder
    images = random_images()
    tokens = torch.cat([vision.class_token.expand(2, 1, DIM), vision.patch_embedding(images)], dim=1) + vision.positions
    expected = vision.head(sequence.encoder(tokens)[:, 0])
    torch.testing.assert_close(vision(images), expected)
    assert torch.equal(sequence(source, target), translated)


def test_an_encoder_trained_on_images_can_go_back_to_sequences():
    vision, sequence = build(), build_transformer()
    vision(random_images()).square().sum().backward()
    torch.optim.SGD(vision.parameters(), lr=0.1).step()
    sequence.encoder.load_state_dict(vision.encoder.state_dict())
    source, target = torch.randint(1, 9, (2, 4)), torch.randint(1, 9, (2, 4))
    memory = vision.encoder(sequence.source_embedding(source))
    torch.testing.assert_close(sequence(source, target), sequence.decode(target, memory))


@COMBINATIONS
def test_building_around_an_encoder_leaves_its_weights_alone(pooling, positions, registers):
    encoder = Encoder(DIM, 2, HEADS, layer_scale=0.1, qk_norm=True)
    for parameter in encoder.parameters():
        nn.init.normal_(parameter)
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    model = VisionTransformer(encoder, **OPTIONS, pooling=pooling, positions=positions, registers=registers)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.encoder.state_dict().items())


# Tokens, positions, pooling


@COMBINATIONS
def test_the_tokens_are_class_registers_and_patches_with_their_positions(pooling, positions, registers):
    model, images = build(pooling=pooling, positions=positions, registers=registers), random_images()
    has_class = pooling == "class"
    assert model.num_prefix_tokens == has_class + registers
    assert model.grid == GRID
    patches = model.patch_embedding(images)
    if positions == "learned":
        assert model.positions.shape == (1, has_class + 6, DIM)
        patches = patches + model.positions[:, has_class:]
    elif positions == "sinusoidal":
        patches = patches + sinusoids_2d(GRID, DIM)
    expected = []
    if has_class:
        expected.append(model.class_token + (model.positions[:, :1] if positions == "learned" else 0))
    if registers:
        expected.append(model.register_tokens)
    expected = torch.cat([*(t.expand(2, -1, -1) for t in expected), patches], dim=1)
    assert expected.shape == (2, model.num_prefix_tokens + 6, DIM)
    torch.testing.assert_close(model.embed(images), expected)


@COMBINATIONS
def test_features_are_the_encoded_tokens_and_logits_read_the_class_token_or_the_mean(pooling, positions, registers):
    model, images = build(pooling=pooling, positions=positions, registers=registers), random_images()
    rotation = None
    if positions == "rotary":
        rotation = rotation_2d(GRID, DIM // HEADS, prefix=model.num_prefix_tokens)
        assert (rotation[0][: model.num_prefix_tokens] == 1).all()
    features = model.forward_features(images)
    torch.testing.assert_close(features, model.encoder(model.embed(images), rotation=rotation))
    pooled = features[:, 0] if pooling == "class" else sum(features[:, registers + n] for n in range(6)) / 6
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), pooled)
    torch.testing.assert_close(model(images), pooled @ model.head.weight.T + model.head.bias)


@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize("size", [(8, 12), (12, 8), (4, 20)])
@pytest.mark.parametrize("stem", STEMS)
def test_a_model_with_convolutions_hands_its_encoder_the_grid_of_the_images(stem, size, registers):
    model = build(
        encoder_options=dict(feed_forward_kernel=3),
        stem=stem,
        pooling="mean",
        positions="sinusoidal",
        registers=registers,
        any_size=True,
    )
    images, grid = torch.randn(2, 3, *size), (size[0] // 4, size[1] // 4)
    assert type(model.patch_embedding) is STEMS[stem]
    expected = model.encoder(model.embed(images), grid=grid)[:, registers:].mean(1) @ model.head.weight.T
    torch.testing.assert_close(model(images), expected + model.head.bias)
    if grid[0] > 1:
        flat = model.encoder(model.embed(images), grid=(1, grid[0] * grid[1]))
        assert not torch.allclose(flat, model.forward_features(images), atol=1e-3)


def test_a_class_token_that_convolutions_would_pass_by_is_refused():
    with pytest.raises(ValueError, match="feed_forward_kernel=3 convolves over patches only.*set pooling='mean'"):
        build(encoder_options=dict(feed_forward_kernel=3))


def test_convolutions_train_every_parameter_and_count_as_hidden_matrices_unless_depthwise():
    model = build(encoder_options=dict(feed_forward_kernel=3), stem="convolution", pooling="mean")
    model(random_images()).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name
    names = {n for n, p in model.named_parameters() if p.dim() in (2, 4) and "depthwise" not in n}
    assert model.hidden_matrices().keys() == names - {"head.weight"}
    assert {"patch_embedding.blocks.0.convolution.weight", "patch_embedding.projection.weight"} < names


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("registers", [1, 4])
def test_registers_change_the_output_only_through_attention(pooling, registers):
    model, images = build(pooling=pooling, registers=registers), random_images()
    before = model(images)
    with torch.no_grad():
        model.register_tokens.normal_()
    assert (model(images) - before).abs().max() > 1e-4
    for layer in model.encoder.layers:
        nn.init.zeros_(layer.attention.out.weight)
    silent = model(images)
    with torch.no_grad():
        model.register_tokens.normal_()
    assert torch.equal(model(images), silent)


@pytest.mark.parametrize("positions", [*POSITIONS, None])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("registers", [0, 2])
def test_permuting_the_patches_matters_with_positions_and_only_with_them(positions, pooling, registers):
    model = build(positions=positions or "learned", pooling=pooling, registers=registers)
    if positions is None:
        nn.init.zeros_(model.positions)
    images = random_images()
    patches = images.view(2, 3, 2, 4, 3, 4).transpose(3, 4).flatten(2, 3)  # (B, C, cells, height, width)
    permuted = patches[:, :, [4, 2, 0, 5, 1, 3]].unflatten(2, GRID).transpose(3, 4).reshape(2, 3, 8, 12)
    assert torch.equal(permuted[:, :, :4, :4], images[:, :, 4:, 4:8])
    difference = (model(images) - model(permuted)).abs().max()
    if positions is None:
        assert difference < 1e-5
    else:
        assert difference > 1e-3


def test_fixed_tables_are_not_in_the_state_dict():
    for positions in ("sinusoidal", "rotary"):
        model = build(positions=positions)
        assert not {"fixed_positions", "rotation_cos", "rotation_sin", "positions"} & set(model.state_dict())
        other = build(positions=positions)
        other.load_state_dict(model.state_dict())
        images = random_images()
        assert torch.equal(model(images), other(images))


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("registers", [0, 2])
def test_both_attention_paths_give_the_same_logits(positions, registers):
    model, images = build(positions=positions, registers=registers), random_images()
    fused = model(images)
    for layer in model.encoder.layers:
        layer.attention.fused = False
    torch.testing.assert_close(model(images), fused, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_another_dtype_answers_in_it_and_nearly_the_same(positions, dtype):
    model, images = build(positions=positions), random_images()
    expected = model(images)
    output = model.to(dtype)(images.to(dtype))
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, atol=0.05 if dtype == torch.bfloat16 else 1e-6, rtol=0.05)


@pytest.mark.parametrize(
    ("pooling", "positions", "registers"), [("class", "learned", 0), ("mean", "rotary", 2), ("class", "sinusoidal", 2)]
)
def test_an_exported_model_takes_any_batch(pooling, positions, registers):
    model = build(pooling=pooling, positions=positions, registers=registers).eval()
    shapes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(model, (random_images(),), dynamic_shapes=shapes).module()
    for size in (1, 2, 7):
        images = random_images(size)
        torch.testing.assert_close(exported(images), model(images), atol=1e-5, rtol=1e-5)


def test_dropout_drops_elements_of_the_tokens_in_training_only():
    model, images = build(dropout=0.5), random_images(64)
    exact = model.eval().embed(images)
    dropped = model.train().embed(images)
    kept = dropped != 0
    assert abs(kept.float().mean().item() - 0.5) < 0.03
    torch.testing.assert_close(dropped[kept], 2 * exact[kept])


# Gradients


@pytest.mark.parametrize("layer_scale", [None, 0.1])
@pytest.mark.parametrize("qk_norm", [False, True])
@COMBINATIONS
def test_every_parameter_gets_a_gradient(pooling, positions, registers, qk_norm, layer_scale):
    model = build(
        encoder_options=dict(layer_scale=layer_scale, qk_norm=qk_norm),
        pooling=pooling,
        positions=positions,
        registers=registers,
    )
    images = random_images().requires_grad_()
    before = images.detach().clone()
    nn.functional.cross_entropy(model(images), torch.tensor([1, 4])).backward()
    assert torch.equal(images, before)
    assert (images.grad.abs().amax(dim=1) > 0).all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # A constant added to all keys shifts all scores of a query alike, and softmax ignores that.
        if not name.endswith("key_norm.bias"):
            assert parameter.grad.abs().max() > 1e-7, name


@COMBINATIONS
def test_gradient_checkpointing_changes_no_gradient(pooling, positions, registers):
    model = build(
        pooling=pooling, positions=positions, registers=registers, encoder_options=dict(drop_path=0.3)
    ).train()
    images, gradients = random_images(6), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        assert model.encoder.gradient_checkpointing == enable
        model.zero_grad()
        torch.manual_seed(1)
        logits = model(images)
        logits.square().sum().backward()
        gradients.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    model.set_grad_checkpointing(False)
    assert not model.encoder.gradient_checkpointing
    model.set_grad_checkpointing()
    assert model.encoder.gradient_checkpointing


# Presets


def expected_count(image_size, patch_size, dim, depth, heads, classes=10):
    patches = (image_size // patch_size) ** 2
    layer = (dim * 3 * dim + 3 * dim) + (dim * dim + dim) + (dim * 4 * dim + 4 * dim) + (4 * dim * dim + dim) + 4 * dim
    embedding = (3 * patch_size**2 * dim + dim) + dim + (1 + patches) * dim
    return embedding + depth * layer + 2 * dim + dim * classes + classes


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_build_on_the_meta_device_with_the_expected_number_of_parameters(preset):
    with torch.device("meta"):
        model = create_vit(preset)
        images = torch.empty(1, 3, PRESETS[preset]["image_size"], PRESETS[preset]["image_size"])
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == expected_count(**PRESETS[preset])
    assert len(model.encoder.layers) == PRESETS[preset]["depth"]
    assert {layer.attention.heads for layer in model.encoder.layers} == {PRESETS[preset]["heads"]}
    assert model(images).shape == (1, 10)


@pytest.mark.parametrize(
    "name", ["tiny_patch16_224", "small_patch16_224", "base_patch16_224", "base_patch32_224", "large_patch16_224"]
)
def test_presets_for_224_pixels_have_as_many_parameters_as_timms(name):
    with torch.device("meta"):
        ours, theirs = create_vit(name), timm.create_model(f"vit_{name}", num_classes=10)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert [layer.attention.heads for layer in ours.encoder.layers] == [b.attn.num_heads for b in theirs.blocks]


@pytest.mark.parametrize(("positions", "pooling"), list(itertools.product(POSITIONS, POOLINGS)))
def test_every_kind_of_positions_runs_on_the_meta_device(positions, pooling):
    with torch.device("meta"):
        model, images = build(positions=positions, pooling=pooling, registers=2), random_images()
    assert model(images).is_meta


@pytest.mark.parametrize(
    "name", ["image_size", "stem", "pooling", "positions", "registers", "num_classes", "in_channels"]
)
def test_create_vit_hands_every_override_to_the_model(name):
    value, seen = {
        "image_size": ((8, 12), lambda m: m.patch_embedding.image_size),
        "stem": ("convolution", lambda m: {cls: name for name, cls in STEMS.items()}[type(m.patch_embedding)]),
        "pooling": ("mean", lambda m: m.pooling),
        "positions": ("rotary", lambda m: "rotary" if m.rotation_cos is not None else None),
        "registers": (3, lambda m: m.register_tokens.shape[1]),
        "num_classes": (4, lambda m: m.head.out_features),
        "in_channels": (1, lambda m: m.patch_embedding.projection.in_features // 16),
    }[name]
    assert seen(create_vit("tiny_patch4_32", depth=1, **{name: value})) == value


def test_create_vit_hands_every_override_to_the_encoder():
    overrides = dict(
        dim=16, depth=3, heads=2, hidden_dim=24, activation="relu", norm_first=False, norm_eps=1e-3, layer_scale=0.2
    )
    model = create_vit("tiny_patch4_32", **overrides, dropout=0.1, drop_path=0.4, qk_norm=True)
    encoder, layer = model.encoder, model.encoder.layers[-1]
    assert (encoder.dim, encoder.depth, encoder.heads, layer.norm_first) == (16, 3, 2, False)
    assert layer.feed_forward.linear1.out_features == 24
    assert isinstance(layer.feed_forward.activation, nn.ReLU)
    assert layer.norm1.eps == layer.attention.query_norm.eps == 1e-3
    assert (layer.branch1.layer_scale.weight == torch.tensor(0.2)).all()
    assert layer.branch1.drop_path.probability == pytest.approx(0.4)
    assert layer.attention.dropout == layer.branch1.dropout.p == layer.feed_forward.dropout.p == model.dropout.p == 0.1


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(dim=16, depth=3, heads=2, hidden_dim=24, activation="relu", norm_first=False, norm_eps=1e-3, dropout=0.1),
        dict(positions="rotary", pooling="mean", stem="convolution", feed_forward_kernel=3, local_attention=4.0),
        dict(registers=2, prefix_positions="all", embedding_norm=True, qkv_bias=False, layer_scale=0.1, qk_norm=True),
        dict(final_norm=False, pooled_norm=True, image_size=(8, 12), any_size=True, drop_path=0.2, num_classes=0),
    ],
)
def test_the_arguments_of_a_model_build_its_like(changes):
    model = create_vit("tiny_patch4_32", **dict(depth=2) | changes)
    assert changes.items() <= model.arguments.items()
    assert json.loads(json.dumps(model.arguments)) is not None
    for global_pool, classes in ((None, 4), ("avg", 3)):
        again = create_vit(**model.arguments)
        assert repr(again) == repr(model)
        again.load_state_dict(model.state_dict())
        images = torch.randn(2, 3, *model.patch_embedding.image_size)
        assert torch.equal(again.eval()(images), model.eval()(images))
        model.reset_classifier(classes, global_pool)
        assert model.arguments["num_classes"] == classes
    built = VisionTransformer(Encoder(dim=8, depth=1, heads=2, hidden_dim=9), pooling="mean")
    assert create_vit(**built.arguments).encoder.layers[0].feed_forward.linear1.out_features == 9


def test_without_a_preset_width_depth_and_heads_are_needed():
    with pytest.raises(ValueError, match="dim and depth must be given, or a preset: tiny_patch4_32, "):
        create_vit(heads=3)


def test_vit_arguments_are_defaults_then_preset_then_overrides():
    arguments = vit_arguments("small_patch16_224", depth=3, num_classes=7)
    assert (arguments["dim"], arguments["depth"], arguments["heads"]) == (384, 3, 6)
    assert (arguments["image_size"], arguments["num_classes"], arguments["norm_eps"]) == (224, 7, 1e-6)
    assert "encoder" not in arguments
    assert PRESETS["small_patch16_224"]["depth"] == 12


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="preset='huge' is unknown; choose from tiny_patch4_32, small_patch4_32"):
        create_vit("huge")
    with pytest.raises(
        ValueError, match="argument='num_heads' is unknown; choose from activation, any_size, class_token, .*heads"
    ):
        create_vit("tiny_patch4_32", num_heads=3)
    with pytest.raises(ValueError, match="argument='encoder' is unknown"):
        create_vit("tiny_patch4_32", encoder=Encoder(DIM, 1, HEADS))
    with pytest.raises(ValueError, match="pooling='max' is unknown; choose from class, mean"):
        build(pooling="max")
    with pytest.raises(ValueError, match="positions='relative' is unknown; choose from learned, sinusoidal, rotary"):
        build(positions="relative")


def test_values_the_parts_refuse_are_refused_by_the_model():
    with pytest.raises(ValueError, match="the height 33 is not a multiple of the patch height 4"):
        build(image_size=33)
    with pytest.raises(ValueError, match="dim=192 is not divisible by heads=5"):
        create_vit("tiny_patch4_32", heads=5)
    with pytest.raises(ValueError, match="num_classes=-1 is negative"):
        build(num_classes=-1)
    with pytest.raises(ValueError, match="head width 6 is not a multiple of 4"):
        VisionTransformer(Encoder(12, 1, 2), **OPTIONS, positions="rotary")
    with pytest.raises(ValueError, match="dim=6 is not a multiple of 4"):
        VisionTransformer(Encoder(6, 1, 2), **OPTIONS, positions="sinusoidal")
    with pytest.raises(ValueError, match=r"images have shape \(2, 1, 8, 12\)"):
        build()(torch.zeros(2, 1, 8, 12))


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="class_token=False needs pooling='mean'"):
        build(class_token=False)
    with pytest.raises(ValueError, match="prefix_positions='some' is unknown; choose from none, class, all"):
        build(prefix_positions="some")
    with pytest.raises(ValueError, match="prefix_positions='all' is for positions='learned'; with 'rotary' only patch"):
        build(prefix_positions="all", positions="rotary")
    with pytest.raises(ValueError, match="pooled_norm=True would normalise twice; .* with final_norm=False"):
        build(pooled_norm=True)
    with pytest.raises(ValueError, match="local_attention needs qkv_bias=True"):
        build(encoder_options=dict(qkv_bias=False), positions="rotary", local_attention=3.0)


def test_a_negative_number_of_registers_is_refused():
    with pytest.raises(ValueError, match="registers=-1"):
        build(registers=-1)


# Features


@pytest.mark.parametrize("size", [(8, 12), (12, 8), (4, 20)])
@COMBINATIONS
def test_features_are_maps_of_the_patches_and_the_class_token(pooling, positions, registers, size):
    model = build(depth=3, pooling=pooling, positions=positions, registers=registers, any_size=True)
    images, grid = torch.randn(2, 3, *size), (size[0] // 4, size[1] // 4)
    whole = model.forward_features(images)
    (last, token), (first, _), (again, _) = model.features(images, layers=[-1, 0, 2])
    assert torch.equal(last, again)
    assert last.shape == (2, DIM, *grid)
    for row, column in itertools.product(range(grid[0]), range(grid[1])):
        n = model.num_prefix_tokens + row * grid[1] + column
        torch.testing.assert_close(last[:, :, row, column], whole[:, n])
    if pooling == "class":
        torch.testing.assert_close(token, whole[:, 0])
    else:
        assert token is None
    raw = model.features(images, layers=[0], norm=False)[0][0]
    torch.testing.assert_close(model.encoder.norm(raw.movedim(1, -1)).movedim(-1, 1), first)
    assert not torch.allclose(raw, first, atol=1e-2)
    with torch.no_grad():
        model.encoder.layers[1].attention.out.weight.add_(1)
    assert torch.equal(model.features(images, layers=[0], norm=False)[0][0], raw)


def test_features_of_layers_that_are_not_there_are_refused():
    for wrong in ([], [2], [-3], [0, 5]):
        with pytest.raises(ValueError, match=r"this model has 2 layers, from 0 to 1 or -1 to -2"):
            build().features(random_images(), layers=wrong)
    with pytest.raises(ValueError, match="this model takes"):
        build().features(torch.randn(2, 3, 4, 4))


def test_a_model_with_convolutions_has_features_too():
    model = build(encoder_options=dict(feed_forward_kernel=3), stem="convolution", pooling="mean", registers=1).eval()
    images = random_images()
    feature_map = model.features(images)[0][0]
    torch.testing.assert_close(model.head(feature_map.mean((2, 3))), model(images))


# The contract of timm's models


@COMBINATIONS
def test_forward_is_the_head_of_the_features(pooling, positions, registers):
    model, images = build(pooling=pooling, positions=positions, registers=registers), random_images()
    features = model.forward_features(images)
    logits = model(images)  # the last layer computes a class token only
    torch.testing.assert_close(logits, model.forward_head(features), rtol=1e-6, atol=1e-6)
    assert torch.equal(model.forward_head(features), model.head(model.forward_head(features, pre_logits=True)))


@COMBINATIONS
def test_hidden_matrices_are_those_of_patches_and_encoder(pooling, positions, registers):
    model = build(pooling=pooling, positions=positions, registers=registers)
    found = model.hidden_matrices()
    matrices = {n for n, p in model.named_parameters() if p.dim() == 2}
    assert found.keys() == matrices - {"head.weight"}
    assert "patch_embedding.projection.weight" in found
    stacked = {n for n, count in found.items() if count == 3}
    assert stacked == {n for n in found if n.endswith("qkv.weight")}
    assert set(found.values()) == {1, 3}


@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_last_layer_computes_only_the_tokens_that_the_head_reads(pooling, registers):
    model, seen = build(pooling=pooling, registers=registers), []
    for layer in model.encoder.layers:
        layer.feed_forward.register_forward_hook(lambda m, args, output: seen.append(output.shape[1]))
    tokens = model.num_prefix_tokens + model.grid[0] * model.grid[1]
    model(random_images())
    assert seen == [tokens] * (model.encoder.depth - 1) + [1 if pooling == "class" else tokens]
    seen.clear()
    model.forward_features(random_images())
    assert seen == [tokens] * model.encoder.depth


@pytest.mark.parametrize("pooling", POOLINGS)
def test_without_classes_the_output_is_the_pooled_features(pooling):
    model, images = build(pooling=pooling, num_classes=0, registers=1), random_images()
    features = model.forward_features(images)
    assert isinstance(model.get_classifier(), nn.Identity)
    assert not [name for name, _ in model.named_parameters() if name.startswith("head")]
    pooled = features[:, 0] if pooling == "class" else features[:, 1:].mean(1)
    torch.testing.assert_close(model(images), pooled, rtol=1e-6, atol=1e-6)


def test_get_classifier_is_the_head_that_makes_the_logits():
    model = build()
    assert model.get_classifier() is model.head
    assert (model.head.in_features, model.head.out_features) == (DIM, 5)
    assert model.num_features == DIM
    nn.init.zeros_(model.get_classifier().weight)
    nn.init.constant_(model.get_classifier().bias, 2.5)
    assert (model(random_images()) == 2.5).all()


def test_reset_classifier_makes_a_new_head_and_keeps_the_rest():
    model, images = build(), random_images()
    pooled = model.forward_head(model.forward_features(images), pre_logits=True)
    old = model.head
    for classes in (9, 0, 5):
        model.reset_classifier(classes)
        assert model.num_classes == classes
        assert torch.equal(model.forward_head(model.forward_features(images), pre_logits=True), pooled)
        expected = pooled if classes == 0 else model.head(pooled)
        torch.testing.assert_close(model(images), expected, rtol=1e-6, atol=1e-6)
        assert model(images).shape == (2, classes or DIM)
    assert not torch.equal(model.head.weight, old.weight)
    assert (model.head.bias == 0).all()


def test_reset_classifier_keeps_the_dtype_of_the_model():
    model = build().double()
    model.reset_classifier(3)
    assert model(random_images().double()).dtype == torch.float64


def test_reset_classifier_can_change_the_pooling_there_and_back():
    model, images = build(registers=2), random_images()
    features = model.forward_features(images)
    model.reset_classifier(4, global_pool="avg")
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), features[:, 3:].mean(dim=1))
    model.reset_classifier(4)
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), features[:, 3:].mean(dim=1))
    model.reset_classifier(4, global_pool="token")
    assert torch.equal(model.forward_head(features, pre_logits=True), features[:, 0])


def test_reset_classifier_refuses_what_the_model_cannot_do_and_stays_as_it_was():
    model, images = build(pooling="mean"), random_images()
    before = model(images)
    with pytest.raises(ValueError, match="global_pool='token' needs a class token"):
        model.reset_classifier(3, global_pool="token")
    with pytest.raises(ValueError, match="global_pool='max' is unknown; choose from token, avg"):
        model.reset_classifier(3, global_pool="max")
    with pytest.raises(ValueError, match="num_classes=-2 is negative"):
        model.reset_classifier(-2)
    assert model.num_classes == 5
    assert torch.equal(model(images), before)


def test_no_weight_decay_names_the_parameters_of_tokens_and_positions():
    parameters = dict(build(registers=2).named_parameters())
    assert build().no_weight_decay() == {"class_token", "register_tokens", "positions"}
    assert build(registers=2).no_weight_decay() <= set(parameters)
    others = {name for name, p in parameters.items() if p.dim() > 2}
    assert others == {"class_token", "register_tokens", "positions"}


# First weights


def test_first_weights_follow_the_documented_table():
    encoder = Encoder(64, 1, 4)
    model = VisionTransformer(encoder, image_size=32, patch_size=4, num_classes=200, registers=40)
    projection = model.patch_embedding.projection
    assert projection.weight.std().item() == pytest.approx((3 * 4**2) ** -0.5, rel=0.05)
    assert abs(projection.weight.mean().item()) < 0.01
    assert projection.weight.abs().max() > 3 * 48**-0.5
    assert model.register_tokens.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.class_token.std().item() == pytest.approx(0.02, rel=0.3)
    assert model.positions.std().item() == pytest.approx(0.5, rel=0.05)
    assert abs(model.positions.mean().item()) < 0.03
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for bias in (projection.bias, model.head.bias):
        assert (bias == 0).all()
    model.reset_classifier(300)
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_the_first_weights_of_a_convolutional_stem_follow_the_documented_table():
    stem = VisionTransformer(Encoder(256, 1, 4), image_size=32, patch_size=4, stem="convolution").patch_embedding
    kernels = [m.weight for m in stem.modules() if isinstance(m, nn.Conv2d)]
    assert [tuple(k.shape) for k in kernels] == [(64, 3, 3, 3), (128, 64, 3, 3), (256, 128, 3, 3)]
    for kernel in kernels:
        assert kernel.std().item() == pytest.approx((9 * kernel.shape[1]) ** -0.5, rel=0.05)
    assert stem.projection.weight.std().item() == pytest.approx(256**-0.5, rel=0.05)


def test_patches_of_unit_variance_become_tokens_of_unit_variance():
    embedding = VisionTransformer(Encoder(256, 1, 4), image_size=32, patch_size=8).patch_embedding
    assert embedding(torch.randn(16, 3, 32, 32)).std().item() == pytest.approx(1, rel=0.05)


OTHER = dict(image_size=(8, 12), patch_size=(2, 3), dim=16, depth=2, heads=2, num_classes=3)
LAYOUTS = [
    dict(positions=positions, pooling=pooling, registers=registers)
    for positions in POSITIONS
    for pooling in POOLINGS
    for registers in (0, 2)
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_taking_any_size_changes_nothing_at_the_native_one(layout):
    model = create_vit("tiny_patch4_32", **OTHER, **layout)
    other = create_vit("tiny_patch4_32", **OTHER, **layout, any_size=True)
    other.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 8, 12)
    assert torch.equal(model(images), other(images))
    with pytest.raises(ValueError, match=r"this model takes .* = \(B, 3, 8, 12\); .*any_size=True"):
        model(torch.randn(2, 3, 4, 12))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(4, 6), (2, 12), (16, 30)])
def test_images_of_another_size_get_the_native_coordinates(size, layout):
    model = create_vit("tiny_patch4_32", **OTHER, **layout, any_size=True).eval()
    grid = (size[0] // 2, size[1] // 3)
    rows = (torch.arange(grid[0]).double() + 0.5) * 4 / grid[0] - 0.5
    columns = (torch.arange(grid[1]).double() + 0.5) * 4 / grid[1] - 0.5
    cells = [(r, c) for r in rows.tolist() for c in columns.tolist()]
    prefix = model.num_prefix_tokens
    images = torch.randn(2, 3, *size)

    patches = torch.nn.functional.unfold(images, (2, 3), stride=(2, 3)).mT
    x = model.patch_embedding.projection(patches)
    rotation = None
    if layout["positions"] == "sinusoidal":
        frequency = 10_000.0 ** (-torch.arange(0, 8, 2).double() / 8)
        halves = [
            [torch.stack([(v * frequency).sin(), (v * frequency).cos()], -1).flatten() for v in rc] for rc in cells
        ]
        x = x + torch.stack([torch.cat(pair) for pair in halves]).float()
    if layout["positions"] == "rotary":
        frequency = 100.0 ** (-torch.arange(0, 8, 4).double() / 8)
        angles = torch.stack([torch.cat([r * frequency, c * frequency]) for r, c in cells])
        angles = torch.cat([torch.zeros(prefix, 4), angles]).repeat(1, 2)
        rotation = angles.cos().float(), angles.sin().float()
    if model.class_token is not None:
        x = torch.cat([model.class_token.expand(2, -1, -1), x], 1)
    if layout["positions"] == "learned":
        has_class = model.class_token is not None
        image = model.positions[:, has_class:].view(1, 4, 4, 16).permute(0, 3, 1, 2)
        # timm resizes likewise; a size that is a multiple or a half needs no other reference than the definition.
        image = torch.nn.functional.interpolate(image, grid, mode="bicubic", antialias=True)
        x = x + torch.cat([model.positions[:, :has_class], image.flatten(2).mT], 1)
    if model.register_tokens is not None:
        at = int(model.class_token is not None)
        x = torch.cat([x[:, :at], model.register_tokens.expand(2, -1, -1), x[:, at:]], 1)
    expected = model.forward_head(model.encoder(x, rotation=rotation))
    torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("native", [(8, 8), (14, 14), (5, 12)])
def test_learned_positions_are_resized_to_every_grid_as_timm_does(native, prefix):
    positions = torch.randn(1, prefix + native[0] * native[1], 2)
    for grid in itertools.product(range(1, 41), repeat=2):
        resized = resize_positions(positions, native, grid)
        assert resized.shape == (1, prefix + grid[0] * grid[1], 2)
        assert torch.equal(resized[:, :prefix], positions[:, :prefix])
        if grid == native:
            assert torch.equal(resized, positions)
        else:
            expected = resample_abs_pos_embed(positions, list(grid), list(native), num_prefix_tokens=prefix)
            torch.testing.assert_close(resized, expected)


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_the_native_size_of_every_grid_is_left_alone_bit_by_bit(prefix):
    for grid in itertools.product(range(1, 41), repeat=2):
        positions = torch.randn(1, prefix + grid[0] * grid[1], 1)
        assert torch.equal(resize_positions(positions, grid, grid), positions)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_positions_of_other_dtypes_are_resized_in_theirs(dtype):
    positions = torch.randn(1, 1 + 16, 3, dtype=dtype)
    resized = resize_positions(positions, (4, 4), (6, 5))
    assert resized.dtype == dtype
    expected = resize_positions(positions.double(), (4, 4), (6, 5))
    torch.testing.assert_close(resized.double(), expected, atol=torch.finfo(dtype).eps * 4, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("prefix_positions", PREFIX_POSITIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_set_to_another_size_is_one_built_for_it(layout, prefix_positions):
    if layout["positions"] == "learned":
        layout = layout | dict(prefix_positions=prefix_positions)
    model = create_vit("tiny_patch4_32", **OTHER, **layout)
    model.requires_grad_(False)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.set_input_size((6, 15))
    built = create_vit("tiny_patch4_32", **OTHER | dict(image_size=(6, 15)), **layout)
    if layout["positions"] == "learned":
        weights["positions"] = resize_positions(weights["positions"], (4, 4), (3, 5))
        assert not model.positions.requires_grad
    built.load_state_dict(weights)
    assert (model.grid, model.arguments) == ((3, 5), built.arguments | dict(class_token=model.class_token is not None))
    images = torch.randn(2, 3, 6, 15)
    assert torch.equal(model(images), built(images))
    with pytest.raises(ValueError, match="the width 7 is not a multiple of the patch width 3"):
        model.set_input_size((6, 7))
    assert torch.equal(model(images), built(images))
    before = model.state_dict()
    model.set_input_size(img_size=(6, 15))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_size_first_seen_without_gradients_can_be_trained_on_later():
    model = create_vit("tiny_patch4_32", **OTHER, positions="rotary", any_size=True)
    images = torch.randn(2, 3, 6, 9)
    with torch.inference_mode():
        expected = model(images)
    output = model(images)
    output.sum().backward()
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("size", [(7, 12), (8, 13), (0, 12)])
def test_sizes_that_patches_do_not_divide_are_refused_at_run_time(size):
    model = create_vit("tiny_patch4_32", **OTHER, any_size=True)
    with pytest.raises(ValueError, match=r"images have shape .*is not a multiple of the patch"):
        model(torch.randn(2, 3, *size))


PATCHES = {"patch": {}, "convolution": {"patch_size": 2}}
"""What each stem wants other than the models above."""


@pytest.mark.parametrize("stem", ["patch", "convolution"])
def test_images_of_another_type_are_refused_with_the_remedy(stem):
    model = create_vit("tiny_patch4_32", **OTHER | PATCHES[stem], stem=stem).eval()
    images = torch.randn(2, 3, *OTHER["image_size"])
    for dtype in (torch.uint8, torch.int64, torch.bool):
        with pytest.raises(ValueError, match=rf"images are {dtype}; this model takes floating-point numbers"):
            model(images.to(dtype))
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match=rf"images are {dtype} and the model torch.float32; convert one"):
            model(images.to(dtype))
    expected = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            torch.testing.assert_close(model(images.to(dtype)).float(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("stem", ["patch", "convolution"])
@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_any_batch_and_any_memory_layout_give_the_same_rows(stem, pooling):
    model = create_vit("tiny_patch4_32", **OTHER | PATCHES[stem], stem=stem, pooling=pooling).eval()
    images = torch.randn(3, 3, *OTHER["image_size"])
    expected = model(images)
    layouts = [images.to(memory_format=torch.channels_last), images.mT.contiguous().mT, images.flip(0).flip(0)]
    strided = torch.randn(6, 3, *OTHER["image_size"])
    strided[::2] = images
    for layout in (*layouts, strided[::2], images.expand(3, -1, -1, -1)):
        torch.testing.assert_close(model(layout), expected, rtol=1e-5, atol=1e-6)
    for i in range(3):
        torch.testing.assert_close(model(images[i : i + 1]), expected[i : i + 1], rtol=1e-5, atol=1e-6)
    empty = images[:0].clone().requires_grad_()
    result = model(empty)
    assert result.shape == (0, *expected.shape[1:])
    result.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_image_that_is_not_finite_spoils_no_other_one(value):
    model = create_vit("tiny_patch4_32", **OTHER).eval()
    images = torch.randn(3, 3, *OTHER["image_size"])
    expected = model(images)
    images[1, 0, 0, 0] = value
    result = model(images)
    assert not result[1].isfinite().any()
    torch.testing.assert_close(result[[0, 2]], expected[[0, 2]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("any_size", [False, True])
@pytest.mark.parametrize("shape", [(3, 8, 12), (8, 12), (1, 2, 3, 8, 12), (2, 4, 8, 12)])
def test_what_is_no_batch_of_images_is_refused_by_the_whole_model(shape, any_size):
    model = create_vit("tiny_patch4_32", **OTHER, positions="rotary", any_size=any_size)
    with pytest.raises(ValueError, match="images have shape"):
        model(torch.randn(shape))
