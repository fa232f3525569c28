"""Our VisionTransformer gives the logits and image gradients of timm's, with the same weights."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import nn

from vit_scratch.transformer.encoder import Encoder
from vit_scratch.vision.vit import VisionTransformer

DIM, DEPTH, HEADS, CLASSES, HIDDEN = 24, 3, 3, 7, 60


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def build(image_size, patch_size, pooling, registers, channels, layer_scale, qk_norm):
    encoder = Encoder(DIM, DEPTH, HEADS, hidden_dim=HIDDEN, layer_scale=layer_scale, qk_norm=qk_norm)
    model = VisionTransformer(
        encoder,
        image_size=image_size,
        patch_size=patch_size,
        in_channels=channels,
        num_classes=CLASSES,
        pooling=pooling,
        registers=registers,
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.05, std=0.25)
    return model.double().eval()


def build_timm(ours, no_embed_class, **options):
    embedding = ours.patch_embedding
    theirs = TimmVisionTransformer(
        img_size=embedding.image_size,
        patch_size=embedding.patch_size,
        in_chans=embedding.in_channels,
        num_classes=CLASSES,
        embed_dim=DIM,
        depth=DEPTH,
        num_heads=HEADS,
        mlp_ratio=HIDDEN / DIM,
        class_token=ours.class_token is not None,
        global_pool={"class": "token", "mean": "avg"}[ours.pooling],
        fc_norm=False,
        reg_tokens=0 if ours.register_tokens is None else ours.register_tokens.shape[1],
        no_embed_class=no_embed_class,
        **options,
    )
    theirs.double().load_state_dict(timm_weights(ours, no_embed_class))
    return theirs.eval()


def timm_weights(ours, no_embed_class):
    embedding, has_class = ours.patch_embedding, ours.class_token is not None
    positions = ours.positions.detach().clone()
    if no_embed_class:
        # timm's class token has no position here: what ours adds to it goes into the token.
        class_position, positions = positions[:, :has_class], positions[:, has_class:]
    else:
        # timm's registers have a position here, ours never.
        registers = 0 if ours.register_tokens is None else ours.register_tokens.shape[1]
        class_position = torch.zeros(1, has_class, DIM)
        nothing = torch.zeros(1, registers, DIM)
        positions = torch.cat([positions[:, :has_class], nothing, positions[:, has_class:]], dim=1)
    kernel = embedding.projection.weight.view(DIM, embedding.in_channels, *embedding.patch_size)
    weights = {"pos_embed": positions, "patch_embed.proj.weight": kernel}
    weights["patch_embed.proj.bias"] = embedding.projection.bias
    if has_class:
        weights["cls_token"] = ours.class_token + class_position
    if ours.register_tokens is not None:
        weights["reg_token"] = ours.register_tokens
    for i, layer in enumerate(ours.encoder.layers):
        parts = {
            "norm1": layer.norm1,
            "norm2": layer.norm2,
            "attn.qkv": layer.attention.qkv,
            "attn.q_norm": layer.attention.query_norm,
            "attn.k_norm": layer.attention.key_norm,
            "attn.proj": layer.attention.out,
            "mlp.fc1": layer.feed_forward.linear1,
            "mlp.fc2": layer.feed_forward.linear2,
        }
        for name, module in parts.items():
            weights |= {f"blocks.{i}.{name}.{key}": value for key, value in module.state_dict().items()}
        for name, branch in (("ls1", layer.branch1), ("ls2", layer.branch2)):
            weights |= {f"blocks.{i}.{name}.gamma": parameter for parameter in branch.parameters()}
    for name, module in (("norm", ours.encoder.norm), ("head", ours.head)):
        weights |= {f"{name}.{key}": value for key, value in module.state_dict().items()}
    return {name: tensor.detach() for name, tensor in weights.items()}


def compare(ours, theirs):
    embedding = ours.patch_embedding
    images = torch.randn(3, embedding.in_channels, *embedding.image_size, dtype=torch.float64)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        results = []
        for model in (ours.to(dtype), theirs.to(dtype)):
            leaf = images.to(dtype, copy=True).requires_grad_()
            logits = model(leaf)
            logits.backward(torch.linspace(-1, 1, 3 * CLASSES, dtype=dtype).view(3, CLASSES))
            features = model.forward_features(leaf.detach())
            results.append([logits.detach(), leaf.grad, features, model.forward_head(features, pre_logits=True)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
            assert a.std() > 1e-6
    assert ours.num_prefix_tokens == theirs.num_prefix_tokens
    assert ours.num_features == theirs.num_features


SIZES = pytest.mark.parametrize(
    ("image_size", "patch_size", "channels"), [(16, 4, 3), ((24, 48), (4, 8), 3), ((12, 8), 4, 1), (16, 4, 5)]
)


@SIZES
@pytest.mark.parametrize("no_embed_class", [False, True])
@pytest.mark.parametrize("registers", [0, 1, 4])
def test_class_token_models_with_and_without_registers_equal_timm(
    image_size, patch_size, channels, no_embed_class, registers
):
    ours = build(image_size, patch_size, "class", registers, channels, None, False)
    compare(ours, build_timm(ours, no_embed_class))


@SIZES
@pytest.mark.parametrize("registers", [0, 4])
def test_mean_pooled_models_equal_timm_with_its_norm_before_the_pooling(image_size, patch_size, channels, registers):
    ours = build(image_size, patch_size, "mean", registers, channels, None, False)
    compare(ours, build_timm(ours, no_embed_class=True))


@pytest.mark.parametrize("pooling", ["class", "mean"])
@pytest.mark.parametrize(("layer_scale", "qk_norm"), [(0.1, False), (None, True), (0.1, True)])
def test_layer_scale_and_normalised_queries_equal_timm(pooling, layer_scale, qk_norm):
    ours = build(16, 4, pooling, 2, 3, layer_scale, qk_norm)
    theirs = build_timm(ours, no_embed_class=True, init_values=layer_scale, qk_norm=qk_norm)
    assert isinstance(theirs.blocks[0].attn.q_norm, nn.LayerNorm) == qk_norm
    compare(ours, theirs)


def test_a_class_token_model_switched_to_average_pooling_equals_timm_switched_likewise():
    ours = build(16, 4, "class", 2, 3, None, False)
    theirs = build_timm(ours, no_embed_class=True)
    for model in (ours, theirs):
        model.reset_classifier(CLASSES, global_pool="avg")
    theirs.head.load_state_dict(ours.head.state_dict())
    compare(ours, theirs)


def test_gradient_checkpointing_and_train_mode_still_equal_timm():
    ours = build(16, 4, "class", 2, 3, 0.1, True)
    theirs = build_timm(ours, no_embed_class=True, init_values=0.1, qk_norm=True)
    for model in (ours, theirs):
        model.train().set_grad_checkpointing()
    compare(ours, theirs)


def test_the_methods_of_the_contract_answer_as_timm_does():
    ours = build(16, 4, "class", 1, 3, None, False)
    theirs = build_timm(ours, no_embed_class=True)
    assert all(isinstance(model.get_classifier(), nn.Linear) for model in (ours, theirs))
    for model in (ours, theirs):
        model.reset_classifier(0)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert type(ours.get_classifier()) is type(theirs.get_classifier()) is nn.Identity
    torch.testing.assert_close(ours(images), theirs(images), atol=1e-10, rtol=1e-10)
