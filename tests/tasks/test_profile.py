"""The command profile: counts by hand, parts that add up, memory to the byte, and messages for what can't be."""

import json
import re

import pytest
import torch

from vit_scratch import cli, create_vit
from vit_scratch.config import SequenceConfig, to_dict
from vit_scratch.data.loaders import ImageFormat
from vit_scratch.tasks import profile as module
from vit_scratch.tasks.convert import Classifier, write_ours
from vit_scratch.tasks.profile import count_operations, matrix_product_peak, model_parts, peak_of_tensors
from vit_scratch.training.checkpoint import save_weights

SMALL = dict(dim=24, depth=3, heads=3, image_size=16, patch_size=4, num_classes=5)


def run(*arguments):
    try:
        return cli.main(["profile", *[str(a) for a in arguments]])
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.parametrize(("pooling", "last"), [("class", 1), ("mean", 16)])
def test_a_plain_vision_transformer_has_the_parameters_and_multiply_adds_of_the_formula(pooling, last):
    dim, hidden, patches, pixels, classes = 24, 96, 16, 3 * 4 * 4, 5
    tokens = patches + (pooling == "class")
    attention = 3 * dim * dim + 3 * dim + dim * dim + dim
    feed_forward = 2 * dim * hidden + hidden + dim
    layer = attention + feed_forward + 2 * 2 * dim
    outside = (tokens + (pooling == "class")) * dim + 2 * dim  # positions, class token, final norm
    parameters = pixels * dim + dim + 3 * layer + outside + dim * classes + classes

    def multiply_adds(queries):
        """Of attention and feed-forward network, with keys and values of all tokens."""
        maps = 2 * queries * dim * dim + 2 * tokens * dim * dim
        return maps + 2 * queries * tokens * dim, 2 * queries * dim * hidden

    parts = {p.name: p for p in model_parts(create_vit(**SMALL, pooling=pooling))}
    assert parts["patch_embedding"].multiply_adds == patches * pixels * dim
    for i, queries in ((0, tokens), (1, tokens), (2, last)):
        name = f"encoder.layers.{i}"
        assert (parts[f"{name}.attention"].multiply_adds, parts[f"{name}.feed_forward"].multiply_adds) == multiply_adds(
            queries
        )
        assert parts[f"{name}.attention"].parameters == attention
        assert parts[f"{name}.feed_forward"].parameters == feed_forward
        assert parts[f"{name}.other"].parameters == 4 * dim
        assert parts[name].parameters == layer
    assert (parts["head"].parameters, parts["head"].multiply_adds) == (dim * classes + classes, dim * classes)
    assert parts["other"].parameters == outside
    assert sum(p.parameters for p in parts.values() if p.whole) == parameters
    total = patches * pixels * dim + 2 * sum(multiply_adds(tokens)) + sum(multiply_adds(last)) + dim * classes
    assert sum(p.multiply_adds for p in parts.values() if p.whole) == total


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(pooling="mean", positions="rotary", stem="convolution", feed_forward_kernel=3, any_size=True, dim=36),
        dict(registers=2, layer_scale=0.1, qk_norm=True, positions="sinusoidal", image_size=[8, 20]),
        dict(in_channels=1, norm_first=False, num_classes=0, pooled_norm=True),
    ],
)
def test_parts_add_up_to_the_whole_model(changes):
    model = create_vit(**SMALL | changes)
    parts = model_parts(model)
    assert sum(p.parameters for p in parts if p.whole) == sum(p.numel() for p in model.parameters())
    assert sum(p.parameters for p in parts if p.level == 0) == sum(p.numel() for p in model.parameters())
    operations = count_operations(model)
    assert 2 * sum(p.multiply_adds for p in parts if p.whole) == operations[""]
    assert 2 * sum(p.multiply_adds for p in parts if p.level == 0) == operations[""]
    assert [p.name for p in parts if p.level == 1 and not p.name.endswith(".other")] == [
        f"encoder.layers.{i}.{part}" for i in range(3) for part in ("attention", "feed_forward")
    ]
    assert all(p.parameters >= 0 and p.multiply_adds >= 0 for p in parts)
    assert next(model.parameters()).device.type == "cpu"  # the model that was counted is another one


@pytest.fixture
def _quick(monkeypatch):
    monkeypatch.setattr(module, "matrix_product_peak", lambda *_: 1e9)
    monkeypatch.setattr(module, "SECONDS", 0.0)
    monkeypatch.setattr(module, "FEWEST_STEPS", 2)


@pytest.mark.usefixtures("_quick")
def test_the_command_prints_a_table_and_writes_what_it_measured(tmp_path, capsys):
    torch.manual_seed(0)
    model = create_vit(**SMALL).eval()
    form = ImageFormat("RGB", (16, 16), "bilinear")
    path = tmp_path / "net.safetensors"
    write_ours(Classifier(model, ["a", "b", "c", "d", "e"], form, [0.5] * 3, [0.25] * 3), path)
    options = ["--batch_size", 4, "--device", "cpu", "--json", tmp_path / "p.json"]
    assert run(path, *options) == 0
    printed = capsys.readouterr().out
    values = json.loads((tmp_path / "p.json").read_text())
    parameters = sum(p.numel() for p in model.parameters())
    assert f"{path}: images of 16 x 16, 5 classes\n" in printed
    rows = dict(re.findall(r"^ *(\S+) +([\d,]+) +[\d,]+ +[\d.]+ %$", printed, re.MULTILINE))
    assert list(rows) == [
        "patch_embedding",
        "encoder.layers.0",
        "attention",
        "feed_forward",
        "other",
        "encoder.layers.1",
        "encoder.layers.2",
        "head",
        "total",
    ]
    assert rows["total"] == f"{parameters:,}"
    assert values["parameters"] == parameters == sum(p["parameters"] for p in values["parts"] if p["whole"])
    assert values["multiply_adds"] == sum(p["multiply_adds"] for p in values["parts"] if p["whole"])
    assert values["weights_bytes"] == 4 * parameters
    for name, passes in (("inference", 1), ("training", 3)):
        step = values[name]
        speed = step["images_per_second"]
        assert step["share_of_peak"] == pytest.approx(speed * 2 * passes * values["multiply_adds"] / 1e9)
        assert f"{name}, batches of 4: {speed:.1f} images/s, {100 * step['share_of_peak']:.0f} % of that; " in printed
        assert f"memory up to {step['peak_memory'] / 2**20:.1f} MiB" in printed
    widest = 4 * 17 * 96 * 4  # bytes of what the first linear map of a feed-forward network returns
    assert values["inference"]["peak_memory"] > 4 * parameters + widest
    # Weights and both moments of AdamW throughout, and for the backward pass hidden units before and after activation.
    assert values["training"]["peak_memory"] > 3 * 4 * parameters + 2 * 2 * widest


@pytest.mark.usefixtures("_quick")
def test_a_preset_is_profiled_with_first_weights(capsys):
    assert run("tiny_patch4_32", "--batch_size", "1", "--device", "cpu") == 0
    printed = capsys.readouterr().out
    assert "tiny_patch4_32: images of 32 x 32, 10 classes" in printed
    assert re.search(r"^total +4,028,170 +248,788,224 +100.0 %$", printed, re.MULTILINE)
    assert "weights 15.37 MiB; matrix products reach 1 GFLOP/s here (cpu, 1 threads, float32)" in printed


def test_the_peak_of_memory_counts_what_is_alive_at_the_same_time():
    kept = []

    def work():
        first = torch.empty(1000, 250)
        second = torch.empty(3000, 250)
        del second
        kept.append(torch.empty(2000, 250))
        del first

    assert peak_of_tensors(work, torch.device("cpu")) == 4_000_000
    assert peak_of_tensors(lambda: kept.clear(), torch.device("cpu")) == 0


def test_the_peak_of_matrix_products_is_that_of_the_fastest(monkeypatch):
    times = iter([4.0, 2.0] + [4.0] * 100)
    monkeypatch.setattr(module, "seconds", lambda *_: next(times))
    assert matrix_product_peak(torch.device("cpu"), torch.float32) == 2 * 2048**3 / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny_patch4_33"], "tiny_patch4_33 is no file, folder or name of weights, and no preset; tiny_patch4_32, "),
        (["sequence.safetensors"], "profile is for Vision Transformers, and sequence.safetensors holds a model for"),
        (["."], ". holds no last.safetensors"),
        (["tiny_patch4_32", "--batch_size", "0"], "batch_size=0 is out of range"),
        (["tiny_patch4_32", "--json", "no/p.json"], "--json=no/p.json: there is no folder"),
        (["tiny_patch4_32", "--device", "abacus"], "device='abacus' can't be used here"),
        (["tiny_patch4_32", "--batchsize", "3"], "did you mean batch_size?"),
        ([], "source"),
    ],
)
def test_what_can_not_be_profiled_ends_with_one_sentence(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    description = {"task": "sequence", "model": {}, "tokenizer": None, "config": to_dict(SequenceConfig())}
    save_weights(tmp_path / "sequence.safetensors", {"weight": torch.zeros(1)}, description)
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
