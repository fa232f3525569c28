"""Checks attention on request, rollout by its formula and by hand, and what a classifier reads of the patches."""

import numpy as np
import pytest
import torch

from vit_scratch import create_vit
from vit_scratch.evaluation.attention import attention_maps, rollout, seen_patches
from vit_scratch.tasks.classifier import attention_of

SMALL = dict(dim=32, depth=3, heads=4, image_size=(8, 12), patch_size=4, num_classes=5)


def model_of(**changes):
    torch.manual_seed(0)
    model = create_vit(**SMALL | changes).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def random_weights(layers=3, batch=2, heads=4, tokens=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, tokens, tokens, generator=generator).softmax(-1).double() for _ in range(layers)]


def test_rollout_of_identity_attention_is_the_identity():
    identity = torch.eye(7).expand(2, 3, 7, 7)
    assert rollout([identity] * 5).equal(torch.eye(7).expand(2, 7, 7))


def test_rollout_is_the_product_of_the_layers_with_their_residuals():
    weights = random_weights()
    found = rollout(weights)
    for b in range(2):
        expected = np.eye(6)
        for layer in weights:
            expected = (0.5 * layer[b].mean(0).numpy() + 0.5 * np.eye(6)) @ expected
        np.testing.assert_allclose(found[b].numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(found.sum(-1).numpy(), 1.0, atol=1e-12)


def test_rollout_follows_a_token_through_the_layers():
    """Token 2 goes to token 1 in the first layer, and token 1 to token 0 in the second."""
    first, second = torch.eye(3).repeat(2, 1, 1)
    first[1], second[0] = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 0.0])
    seen = rollout([first[None, None], second[None, None]])[0, 0]
    assert seen.tolist() == [0.5, 0.25, 0.25]
    assert rollout([second[None, None], first[None, None]])[0, 0].tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("weights", [[], [torch.ones(2, 3, 4)], [torch.ones(1, 1, 4, 5)]])
def test_rollout_refuses_what_is_no_self_attention(weights):
    with pytest.raises(ValueError, match="one for each layer"):
        rollout(weights)


def test_seen_patches_by_hand():
    weights = torch.tensor([[0.5, 0.1, 0.4, 0.0], [0.0, 0.2, 0.2, 0.6], [0.2, 0.0, 0.5, 0.3], [0.0, 0.0, 0.0, 1.0]])
    torch.testing.assert_close(seen_patches(weights, 1, "class"), torch.tensor([0.2, 0.8, 0.0]))
    torch.testing.assert_close(seen_patches(weights, 2, "class"), torch.tensor([1.0, 0.0]))
    mean = torch.tensor([0.25, 0.65])  # of the last two rows, without the first two columns
    torch.testing.assert_close(seen_patches(weights, 2, "mean"), mean / mean.sum())
    assert seen_patches(torch.eye(3), 1, "class").tolist() == [0.0, 0.0]  # nothing but itself


@pytest.mark.parametrize(
    "changes", [{}, {"registers": 2}, {"pooling": "mean", "class_token": False}, {"qk_norm": True}]
)
def test_attention_is_collected_without_changing_the_output(changes):
    model = model_of(**changes)
    images = torch.randn(3, 3, 8, 12)
    before = model(images)
    maps = attention_maps(model, images)
    assert list(maps) == [f"encoder.layers.{i}.attention" for i in range(3)]
    tokens = 6 + model.num_prefix_tokens
    for weights in maps.values():
        assert weights.shape == (3, 4, tokens, tokens)
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4, tokens))
    assert model(images).equal(before)
    x = model.encoder.layers[0].norm1(model.embed(images))
    torch.testing.assert_close(
        maps["encoder.layers.0.attention"], model.encoder.layers[0].attention(x, return_weights=True)[1]
    )


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_attention_of_a_classifier_is_on_its_grid(pooling):
    model, images = model_of(pooling=pooling, registers=1), torch.randn(2, 3, 8, 12)
    flow, heads = attention_of(model, images)
    assert flow.shape == (2, 2, 3)
    assert heads.shape == (2, 4, 2, 3)
    np.testing.assert_allclose(flow.sum((1, 2)), 1.0, rtol=1e-5)
    np.testing.assert_allclose(heads.sum((2, 3)), 1.0, rtol=1e-5)
    last = attention_maps(model, images)["encoder.layers.2.attention"]
    row = last[1, 3, 0, model.num_prefix_tokens :]
    if pooling == "mean":
        row = last[1, 3, model.num_prefix_tokens :, model.num_prefix_tokens :].mean(0)
    np.testing.assert_allclose(heads[1, 3].flatten(), (row / row.sum()).detach().numpy(), rtol=1e-5)
