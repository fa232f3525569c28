"""Probes of features: neighbours by exhaustive search, a linear map on what is linear, and the command."""

import json

import numpy as np
import pytest
import torch

from vit_scratch import cli, create_vit
from vit_scratch.data.sources import load
from vit_scratch.evaluation.probes import collect, linear_probe, nearest_neighbours
from vit_scratch.training.checkpoint import save_weights

RANDOM = np.random.default_rng(0)


def data(images, classes=3, width=6, noise=1.0):
    labels = RANDOM.integers(0, classes, images)
    return (np.eye(classes, width)[labels] * 3 + RANDOM.normal(0, noise, (images, width))).astype(np.float32), labels


@pytest.mark.parametrize("neighbours", [1, 5, 20])
def test_neighbours_are_those_of_an_exhaustive_search_by_cosine(neighbours):
    train, test = data(60, noise=2.0), data(200, noise=2.0)
    correct = 0
    for feature, label in zip(*test, strict=True):
        cosines = train[0] @ feature / np.linalg.norm(train[0], axis=1) / np.linalg.norm(feature)
        nearest = np.argsort(-cosines)[:neighbours]
        votes = np.zeros(3)
        for i in nearest:
            votes[train[1][i]] += 1 / (1 - cosines[i])
        correct += votes.argmax() == label
    assert nearest_neighbours(train, test, neighbours) == correct
    assert 0 < correct < 200


def test_the_length_of_features_does_not_matter_to_neighbours_nor_their_scale_to_the_linear_map():
    train, test = data(60, noise=2.0), data(100, noise=2.0)
    lengths = RANDOM.uniform(0.1, 10, (100, 1)).astype(np.float32)
    assert nearest_neighbours(train, test) == nearest_neighbours(train, (test[0] * lengths, test[1]))
    scales = np.array([1e-3, 1, 1e3, 1, 10, 0.1], dtype=np.float32)
    assert linear_probe(train, test) == linear_probe((train[0] * scales + 5, train[1]), (test[0] * scales + 5, test[1]))


def test_fewer_images_than_neighbours_all_vote():
    train = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], dtype=np.float32), np.array([0, 0, 1])
    assert nearest_neighbours(train, (np.array([[1.0, 0.05], [0.0, 2.0]], dtype=np.float32), np.array([0, 1]))) == 2


def test_a_linear_map_separates_what_is_separable_and_not_a_ring():
    train, test = data(200, noise=0.1), data(100, noise=0.1)
    assert linear_probe(train, test) == 100
    angles = RANDOM.uniform(0, 2 * np.pi, 400)
    labels = np.arange(400) % 2
    ring = np.stack([np.cos(angles), np.sin(angles)], 1) * (1 + 2 * labels[:, None])
    assert linear_probe((ring[:300], labels[:300]), (ring[300:], labels[300:])) < 75


def test_features_of_all_batches_stay_in_order():
    batches = [(torch.arange(3.0)[:, None], torch.tensor([0, 1, 2]), 3), (torch.ones(1, 1) * 7, torch.tensor([4]), 1)]
    features, labels = collect(lambda images: images * 2, batches)
    assert features[:, 0].tolist() == [0, 2, 4, 14]
    assert labels.tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize("pooling", ["class", "mean"])
@pytest.mark.parametrize("split", ["test", "val"])
def test_the_command_probes_the_pooled_features_for_other_classes(tmp_path, capsys, pooling, split):
    torch.manual_seed(0)
    model = create_vit(
        dim=16, depth=1, heads=2, image_size=8, patch_size=4, num_classes=2, in_channels=1, pooling=pooling
    )
    look = {"mode": "L", "image_size": [8, 8], "interpolation": "bicubic", "mean": [0.3], "std": [0.4]}
    model.metadata = {"classes": ["a", "b"], "preprocessing": look}
    model.save_pretrained(tmp_path / "model")
    arguments = ["--probe", "true", "--data.kind", "digits", "--split", split, "--json", str(tmp_path / "p.json")]
    assert cli.main(["evaluate", str(tmp_path / "model"), *arguments]) == 0
    printed = capsys.readouterr().out.splitlines()

    dataset = load("digits", "", image_size=(8, 8))
    if split == "val":
        dataset.hold_out(0.1, 0)
    pairs = {}
    with torch.no_grad():
        for part, source in (("train", dataset.train), ("test", dataset.val if split == "val" else dataset.test)):
            images = torch.from_numpy(source.images)[:, None] / 255
            features = model.eval().forward_head(model.forward_features((images - 0.3) / 0.4), pre_logits=True)
            pairs[part] = features.numpy(), source.labels
    results = json.loads((tmp_path / "p.json").read_text())
    total = len(pairs["test"][1])
    for name, expected in (("knn", nearest_neighbours(**pairs)), ("linear", linear_probe(**pairs))):
        assert abs(results[name]["correct"] - expected) <= 1  # float32 sums in another order
        assert results[name]["accuracy"] == results[name]["correct"] / total
    assert results["linear"]["accuracy"] > 0.5
    assert (results["fitted_to"], results["count"]) == (len(pairs["train"][1]), total)
    correct = results["linear"]["correct"]
    assert printed[-1] == f"{split} accuracy of the linear probe: {100 * correct / total:.2f} % ({correct}/{total})"


def test_what_can_not_be_probed_is_said(tmp_path, capsys):
    assert cli.main(["evaluate", str(tmp_path / "nothing"), "--probe", "true"]) == 2
    assert "nothing does not exist" in capsys.readouterr().err
    save_weights(tmp_path / "text.safetensors", {"a": torch.zeros(1)}, {"task": "sequence"})
    assert cli.main(["evaluate", str(tmp_path / "text.safetensors"), "--probe", "true"]) == 2
    assert "probe=True is for models of images" in capsys.readouterr().err
    model = create_vit(dim=16, depth=1, heads=2, image_size=8, patch_size=4)
    model.save_pretrained(tmp_path / "bare")
    assert cli.main(["evaluate", str(tmp_path / "bare"), "--probe", "true", "--data.kind", "digits"]) == 2
    assert "does not say how images are to be prepared" in capsys.readouterr().err
