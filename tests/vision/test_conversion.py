"""Weights of timm, torchvision and transformers in ours and back: every architecture, equal logits, the same bits."""

import os
import re

import pytest
import timm
import torch
import torchvision
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import nn
from torchvision.models import VisionTransformer as TorchvisionVisionTransformer

from vit_scratch.vision.conversion import (
    ConversionError,
    from_timm,
    from_torchvision,
    from_transformers,
    largest_difference,
    timm_arguments,
    to_timm,
    to_torchvision,
    to_transformers,
)
from vit_scratch.vision.vit import PREFIX_POSITIONS, create_vit

SMALL = dict(dim=24, depth=2, heads=3, hidden_dim=60, image_size=16, patch_size=4, num_classes=7)


def meta_timm(name):
    """An architecture of timm with one layer, or where that can't be with all, without memory."""
    with torch.device("meta"):
        try:
            return timm.create_model(name, depth=1)
        except AssertionError:
            return timm.create_model(name)


ARCHITECTURES = timm.list_models(["vit_*", "deit_*", "deit3_*"], exclude_filters="vit_scratch_*")
OTHER_KINDS = {
    "distilled": "a distillation token with a head of its own",
    "dinov3|sapiens|lingbot|_rope_|_pe_": "the blocks of EVA",
    "_r[0-9]*_s[0-9]|resnet|mci": "a HybridEmbed in front",
    "18x2": "blocks that are a ParallelThingsBlock",
    "^vit_base_patch16_rpn": "blocks that are a ResPostBlock",
    "siglip_[0-9]|_map_": "an attention pooling",
    "_xp_|^vit_pwee": "blocks that are a ParallelScalingBlock",
    "^vit_dpwee": "blocks that are a DiffParallelScalingBlock",
    "^vit_dlittle|^vit_dwee": "an attention that is a DiffAttention",
    "^vit_giant_patch14_(dinov2|reg[0-9])": "a feed-forward network that is a GluMlp",
    "relpos": "relative positions",
}
"""Which names are of architectures that are refused, and what these have."""


@torch.no_grad()
def randomise(model):
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.uniform_(-0.2, 0.25, generator=generator)
    return model


def same_bits(first, second):
    first, second = first.state_dict(), second.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert tensor.shape == second[name].shape
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


def logits(model, images):
    output = model.eval()(images)
    if isinstance(output, torch.Tensor):
        return output
    return output.logits if hasattr(output, "logits") else output.last_hidden_state[:, 0]


@torch.no_grad()
def check_round_trip(theirs, there, back):
    ours = there(theirs)
    returned = back(ours)
    same_bits(theirs, returned)
    images = torch.randn(2, ours.patch_embedding.in_channels, *ours.patch_embedding.image_size)
    expected = logits(theirs, images)
    assert expected.std() > 1e-3
    torch.testing.assert_close(logits(ours, images), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(logits(returned, images), expected, atol=1e-6, rtol=1e-6)
    # Arguments, their defaults left out, build the same model, too.
    with torch.device("meta"):
        again = create_vit(**ours.arguments)
    again.load_state_dict(ours.state_dict(), assign=True)
    assert torch.equal(logits(again, images), logits(ours, images))
    memory = {t.data_ptr() for m in (theirs, returned) for t in m.parameters()}
    assert not memory & {t.data_ptr() for t in ours.parameters()}
    return ours


# timm


def sizes_of(name):
    """One narrow layer, or with VIT_SCRATCH_FULL_SIZE=1 all as they are, up to 0.7 billion parameters."""
    if not os.environ.get("VIT_SCRATCH_FULL_SIZE"):
        return {"depth": 1, "embed_dim": 96, "num_heads": 4}
    with torch.device("meta"):
        whole = timm.create_model(name)
    share = 0.7e9 / sum(p.numel() for p in whole.parameters())
    return {"depth": int(len(whole.blocks) * min(share, 1))}


def without_size(name):
    return re.sub("_[0-9]+$", "", name)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_of_timm_goes_there_and_back_or_is_refused_for_what_it_has(name):
    for pattern, kind in OTHER_KINDS.items():
        if re.search(pattern, name):
            with pytest.raises(ConversionError, match=f"can't be converted: it has {kind}$"):
                timm_arguments(meta_timm(name))
            return
    patch = int(re.search("patch([0-9]+)", name)[1])
    size = {"img_size": (2 * patch, 3 * patch)}
    first = next(other for other in ARCHITECTURES if without_size(other) == without_size(name))
    if first != name:  # most differ from it in the size of the images only, and so not at all here
        with torch.device("meta"):
            both = [timm_arguments(timm.create_model(n, depth=1, **size)) for n in (first, name)]
        if both[0] == both[1]:
            return
    with torch.device("meta"):
        theirs = timm.create_model(name, **size, **sizes_of(name))
    theirs = randomise(theirs.to_empty(device="cpu"))
    check_round_trip(theirs, from_timm, to_timm)


def test_architectures_of_all_kinds_are_there():
    least = {
        "the blocks of EVA": 40,
        "an attention pooling": 15,
        "a HybridEmbed in front": 10,
        "relative positions": 10,
    }
    least |= {"a distillation token with a head of its own": 4, "blocks that are a ParallelThingsBlock": 2}
    for pattern, kind in OTHER_KINDS.items():
        assert sum(bool(re.search(pattern, name)) for name in ARCHITECTURES) >= least.get(kind, 1), kind
    plain = {name for name in ARCHITECTURES if not any(re.search(pattern, name) for pattern in OTHER_KINDS)}
    assert {"vit_base_patch16_224", "deit_tiny_patch16_224", "deit3_small_patch16_224"} <= plain
    assert {"vit_base_patch16_clip_224", "vit_small_patch14_dinov2", "vit_large_patch14_reg4_dinov2"} <= plain
    assert "vit_base_patch16_gap_224" in plain


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("no_embed_class", [False, True])
@pytest.mark.parametrize("reg_tokens", [0, 3])
@pytest.mark.parametrize("final", [dict(fc_norm=True), dict(fc_norm=False), dict(final_norm=False)])
@pytest.mark.parametrize("inner", [dict(), dict(pre_norm=True, qkv_bias=False), dict(init_values=0.1, qk_norm=True)])
def test_what_timm_can_combine_goes_there_and_back(class_token, no_embed_class, reg_tokens, final, inner):
    for pooling in ("token", "avg") if class_token else ("avg",):
        theirs = TimmVisionTransformer(
            img_size=(8, 12),
            patch_size=4,
            in_chans=2,
            embed_dim=24,
            depth=2,
            num_heads=3,
            mlp_ratio=2.4,
            num_classes=0 if final == dict(fc_norm=True) else 5,
            class_token=class_token,
            no_embed_class=no_embed_class,
            reg_tokens=reg_tokens,
            global_pool=pooling,
            **final,
            **inner,
        )
        check_round_trip(randomise(theirs), from_timm, to_timm)


@pytest.mark.parametrize("activation", ["gelu_tanh", "quick_gelu", "relu"])
def test_activations_and_epsilons_go_to_timm_and_back(activation):
    ours = randomise(create_vit(**SMALL, activation=activation, norm_eps=0.3))
    theirs = to_timm(ours)
    assert largest_difference(from_timm(theirs), theirs) < 1e-12
    assert largest_difference(from_timm(theirs), create_vit(**SMALL)) > 1e-2
    same_bits(from_timm(theirs), ours)


@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize("prefix_positions", PREFIX_POSITIONS)
@pytest.mark.parametrize("options", [dict(), dict(pooling="mean"), dict(pooling="mean", class_token=True)])
def test_ours_go_to_timm_whatever_has_a_position(registers, prefix_positions, options):
    ours = randomise(create_vit(**SMALL, **options, registers=registers, prefix_positions=prefix_positions))
    theirs, images = to_timm(ours), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(logits(theirs, images), logits(ours, images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(positions="rotary"), "rotary positions"),
        (dict(positions="sinusoidal"), "sinusoidal positions"),
        (dict(stem="convolution"), "a convolutional stem"),
        (dict(feed_forward_kernel=3, pooling="mean"), "convolutions in its feed-forward networks"),
        (dict(norm_first=False), "layers with their norms behind the sums"),
        (dict(positions="rotary", norm_first=False), "rotary positions, layers with their norms behind the sums"),
    ],
)
@pytest.mark.parametrize("convert", [to_timm, to_torchvision, to_transformers])
def test_what_only_ours_has_is_refused(options, reason, convert):
    with pytest.raises(ConversionError, match=f"this model can't be converted: it has {reason}$"):
        convert(create_vit(**(SMALL | options)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(norm_layer="rmsnorm"), "norms that are no layer norms"),
        (dict(act_layer="silu"), "an activation SiLU"),
        (dict(global_pool="avgmax"), "a pooling 'avgmax'"),
        (dict(global_pool="map"), "an attention pooling"),
        (dict(pos_embed="none"), "no positions"),
        (dict(proj_bias=False), "linear maps without a bias"),
        (dict(dynamic_img_pad=True), "padding of images"),
        (dict(scale_attn_norm=True), "a norm inside attention or feed-forward network"),
        (dict(pool_include_prefix=True, global_pool="avg"), "an average of the prefix tokens, too"),
        (dict(embed_norm_layer="layernorm"), "a norm inside attention or feed-forward network"),
    ],
)
def test_what_only_timm_has_is_refused_by_name(change, reason):
    options = dict(img_size=16, patch_size=4, embed_dim=24, depth=1, num_heads=3, num_classes=5)
    with pytest.raises(ConversionError, match=f"timm's VisionTransformer can't be converted: it has .*{reason}"):
        from_timm(TimmVisionTransformer(**options, **change))


def test_what_was_not_seen_shows_in_the_logits():
    theirs = TimmVisionTransformer(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=5)
    randomise(theirs).blocks[1].attn.scale *= 30
    theirs.blocks[1].attn.fused_attn = False
    with pytest.raises(ConversionError, match="the logits of both models differ by .* computes something that was not"):
        from_timm(theirs)


def test_a_second_head_is_refused_with_counts_and_names():
    theirs = TimmVisionTransformer(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=5)
    theirs.second = nn.Linear(24, 5)
    with pytest.raises(ConversionError, match=r"of 34 weights, 2 unexpected \(second.weight, second.bias\)"):
        from_timm(theirs)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_and_modes_are_kept_and_the_source_is_left_alone(dtype, training):
    theirs = TimmVisionTransformer(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, drop_path_rate=0.1)
    theirs = randomise(theirs).to(dtype).train(training)
    theirs.blocks[0].eval()
    before = {name: (t.data_ptr(), t.clone()) for name, t in theirs.state_dict().items()}
    modes = [m.training for m in theirs.modules()]
    returned = to_timm(from_timm(theirs))
    same_bits(theirs, returned)
    assert returned.training is training
    assert modes == [m.training for m in theirs.modules()]
    assert all(t.data_ptr() == before[n][0] and torch.equal(t, before[n][1]) for n, t in theirs.state_dict().items())


# torchvision


@pytest.mark.parametrize("name", [n for n in torchvision.models.list_models() if n.startswith("vit_")])
def test_every_architecture_of_torchvision_goes_there_and_back(name):
    with torch.device("meta"):
        large = torchvision.models.get_model(name)
        theirs = TorchvisionVisionTransformer(
            2 * large.patch_size,
            large.patch_size,
            1,
            large.encoder.layers[0].num_heads,
            large.hidden_dim,
            large.mlp_dim,
        )
    check_round_trip(randomise(theirs.to_empty(device="cpu")), from_torchvision, to_torchvision)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(in_channels=1), "1 channels"),
        (dict(num_classes=0), "no head"),
        (dict(image_size=(16, 20)), "images of 16 x 20 in patches of 4 x 4"),
        (dict(qkv_bias=False), "queries, keys and values without a bias"),
        (dict(activation="relu"), "an activation 'relu'"),
        (dict(pooling="mean"), "a mean of the patches"),
        (dict(registers=1), "registers"),
        (dict(prefix_positions="none"), "a class token without a position"),
        (dict(embedding_norm=True), "a norm before its encoder"),
        (dict(final_norm=False, pooled_norm=True), "no norm behind its encoder"),
        (dict(layer_scale=0.1), "LayerScale"),
        (dict(qk_norm=True), "norms of queries and keys"),
    ],
)
def test_what_torchvision_has_not_is_refused(options, reason):
    with pytest.raises(ConversionError, match=f"for torchvision's class, this model can't be .* it has {reason}$"):
        to_torchvision(create_vit(**(SMALL | options)))


def test_a_head_of_two_layers_is_refused_and_none_is_taken():
    theirs = randomise(TorchvisionVisionTransformer(16, 4, 1, 3, 24, 60, num_classes=5, representation_size=9))
    with pytest.raises(ConversionError, match="a hidden layer in its head"):
        from_torchvision(theirs)
    theirs.heads = nn.Identity()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(from_torchvision(theirs).eval()(images), theirs.eval()(images))


# transformers


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh", "quick_gelu", "relu"])
@pytest.mark.parametrize("options", [dict(), dict(qkv_bias=False, image_size=[8, 12], num_channels=2, patch_size=2)])
@pytest.mark.parametrize("head", [False, True])
def test_models_of_transformers_go_there_and_back(act, options, head):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=60,
        hidden_act=act,
        num_labels=5,
        **dict(image_size=16, patch_size=4) | options,
    )
    if head:
        theirs = transformers.ViTForImageClassification(config)
    else:
        theirs = transformers.ViTModel(config, add_pooling_layer=False)
    ours = check_round_trip(randomise(theirs), from_transformers, to_transformers)
    assert ours.encoder.norm.eps == 1e-12
    returned = to_transformers(ours).config.to_dict()
    for name, value in theirs.config.to_dict().items():
        if name not in ("architectures", "id2label", "label2id", "encoder_stride", "pooler_output_size", "dtype"):
            assert returned[name] == value or list(returned[name]) == list(value), name


def test_poolers_and_other_models_of_transformers_are_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, image_size=16)
    with pytest.raises(ConversionError, match=r"it has a pooler \(add_pooling_layer=False leaves it out\)"):
        from_transformers(transformers.ViTModel(config))
    with pytest.raises(ConversionError, match="a class of its own"):
        from_transformers(transformers.ViTForMaskedImageModeling(config))
    with pytest.raises(ConversionError, match="a class of its own"):
        from_torchvision(torchvision.models.resnet18())
    with pytest.raises(ConversionError, match="a class of its own"):
        from_timm(nn.Linear(2, 2))
