"""Checks what the heads of an encoder attend to at first against the closed form in float64."""

import numpy as np
import pytest
import torch

from vit_scratch.transformer.encoder import Encoder
from vit_scratch.transformer.positions import rotation_2d
from vit_scratch.vision.local_attention import NEIGHBOURS, attend_nearby
from vit_scratch.vision.vit import create_vit

GRID = (5, 7)


def expected_weights(head_dim, strength, offset):
    """A head's attention weights (N, N): softmax of strength^2 / sqrt(K) * sum cos(f (distance - offset))."""
    frequency = 100.0 ** (-np.arange(0, head_dim, 4) / head_dim)
    cells = np.array([(row, column) for row in range(GRID[0]) for column in range(GRID[1])])
    distance = cells[None] - cells[:, None]  # from the query (first axis) to the key
    scores = np.cos((distance - np.array(offset))[..., None] * frequency).sum((-2, -1)) * strength**2 / head_dim**0.5
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize(("dim", "heads", "strength"), [(16, 2, 4.0), (48, 3, 5.0), (64, 4, 2.0)])
def test_heads_attend_as_the_closed_form_says_in_the_order_of_the_neighbours(dim, heads, strength):
    encoder = Encoder(dim, 5, heads)
    attend_nearby(encoder, strength, 5)
    x, rotation = torch.zeros(1, GRID[0] * GRID[1], dim), rotation_2d(GRID, dim // heads)
    for number, layer in enumerate(encoder.layers):
        _, weights = layer.attention(x, rotation=rotation, return_weights=True)
        for head in range(heads):
            offset = NEIGHBOURS[(number * heads + head) % 9]
            expected = expected_weights(dim // heads, strength, offset)
            np.testing.assert_allclose(weights[0, head].detach().numpy(), expected, atol=1e-5)
            inside = [r * GRID[1] + c for r in range(1, GRID[0] - 1) for c in range(1, GRID[1] - 1)]
            target = [i + offset[0] * GRID[1] + offset[1] for i in inside]
            assert weights[0, head, inside].argmax(1).tolist() == target


def test_the_neighbours_are_the_patch_itself_and_the_eight_around_it():
    assert sorted(NEIGHBOURS) == [(r, c) for r in (-1, 0, 1) for c in (-1, 0, 1)]


def test_nothing_but_the_biases_of_queries_and_keys_changes():
    torch.manual_seed(0)
    encoder = Encoder(16, 3, 2)
    before = {n: p.detach().clone() for n, p in encoder.named_parameters()}
    attend_nearby(encoder, 5.0, 2)
    for name, parameter in encoder.named_parameters():
        same = parameter == before[name]
        if name.endswith("qkv.bias") and not name.startswith("layers.2."):
            assert same[32:].all()
            assert not same[:16].all()
            assert not same[16:32].all()
        else:
            assert same.all()


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_a_vision_transformer_has_it_on_request(pooling):
    options = dict(image_size=8, patch_size=2, dim=16, depth=5, heads=2, pooling=pooling, positions="rotary")
    expected = Encoder(16, 5, 2)
    attend_nearby(expected, 3.0, 2)
    model = create_vit("tiny_patch4_32", **options, local_attention=3.0)
    for layer, reference in zip(model.encoder.layers, expected.layers, strict=True):
        assert torch.equal(layer.attention.qkv.bias, reference.attention.qkv.bias)
    plain = create_vit("tiny_patch4_32", **options)
    assert all((layer.attention.qkv.bias == 0).all() for layer in plain.encoder.layers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(positions="learned"), "local_attention=5.0 works through rotary positions"),
        (dict(positions="rotary", qk_norm=True), "local_attention needs qk_norm=False"),
    ],
)
def test_models_that_it_can_not_work_in_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        create_vit("tiny_patch4_32", dim=16, depth=1, heads=1, local_attention=5.0, **options)
