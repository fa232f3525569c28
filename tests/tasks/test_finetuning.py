"""Training that begins with other weights: what is taken over, frozen, decayed from layer to layer, or refused."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from timm.optim import create_optimizer_v2

from vit_scratch import cli, create_vit
from vit_scratch.tasks.classification import load_classifier
from vit_scratch.training.compute import ComputeCounter
from vit_scratch.training.optimizer import make_optimizers

pytestmark = pytest.mark.usefixtures("without_curves")
BASE = [
    *("--data.kind", "digits", "--augment.flip", "false", "--augment.shift", "1", "--train.batch_size", "256"),
    *("--train.epochs", "2", "--train.warmup_epochs", "1", "--train.lr", "3e-3", "--device", "cpu"),
]
MODEL = dict(dim=16, depth=2, heads=2, image_size=8, patch_size=4, num_classes=10, in_channels=1)
LOOK = {"mode": "L", "image_size": [8, 8], "interpolation": "bicubic", "mean": [0.3], "std": [0.4]}
DIGITS = [str(i) for i in range(10)]


def run(*arguments):
    try:
        return cli.main([str(a) for a in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def saved(folder, classes=DIGITS, **changes):
    """A folder with a model of random weights."""
    torch.manual_seed(3)
    model = create_vit(**MODEL | dict(num_classes=len(classes)) | changes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.metadata = {"classes": classes, "preprocessing": LOOK}
    model.save_pretrained(folder)
    return model


def weights_of(run_folder):
    return load_file(run_folder / "last.safetensors")


def test_the_training_begins_with_the_weights_and_the_normalisation(tmp_path, capsys):
    model = saved(tmp_path / "init", layer_scale=0.3, registers=2, prefix_positions="all")
    arguments = [
        *BASE,
        "--init",
        tmp_path / "init",
        "--train.lr",
        "0",
        "--train.min_lr",
        "0",
        "--model.drop_path",
        "0.1",
    ]
    assert run("train", *arguments, "--out", tmp_path / "run") == 0
    weights = weights_of(tmp_path / "run")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert (
        f"begins with {tmp_path / 'init'}: {len(weights)} of {len(weights)} weights; its head, too"
        in capsys.readouterr().out
    )
    trained, description = load_classifier(tmp_path / "run" / "last.safetensors")
    assert description["preprocessing"] == LOOK
    assert trained.arguments["registers"] == 2
    assert trained.encoder.layers[1].branch1.drop_path.probability == 0.1
    assert run("evaluate", tmp_path / "run") == 0


@pytest.mark.parametrize("classes", [["a", "b", "c"], [f"class {i}" for i in range(10)]])
def test_other_classes_get_a_new_head_and_the_rest_is_taken_over_exactly(tmp_path, capsys, classes):
    model = saved(tmp_path / "init", classes)
    arguments = [*BASE, "--init", tmp_path / "init", "--train.lr", "0", "--train.min_lr", "0"]
    assert run("train", *arguments, "--out", tmp_path / "run") == 0
    weights = weights_of(tmp_path / "run")
    for name, tensor in model.state_dict().items():
        if name.startswith("head."):
            assert weights[name].shape[0] == 10
            assert not torch.equal(tensor, weights[name])
        else:
            assert torch.equal(tensor, weights[name])
    assert f"a new head, as the 10 classes are not its {len(classes)}" in capsys.readouterr().out


def test_another_image_size_resizes_the_positions(tmp_path):
    model = saved(tmp_path / "init")
    arguments = [
        *BASE,
        "--init",
        tmp_path / "init",
        "--train.lr",
        "0",
        "--train.min_lr",
        "0",
        "--data.image_size",
        "12",
    ]
    assert run("train", *arguments, "--out", tmp_path / "run") == 0
    model.set_input_size(12)
    assert torch.equal(weights_of(tmp_path / "run")["positions"], model.positions)
    assert load_classifier(tmp_path / "run" / "last.safetensors")[1]["preprocessing"]["image_size"] == [12, 12]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stem", ["patch", "convolution"])
def test_a_frozen_model_learns_by_its_head_alone(tmp_path, optimizer, stem):
    model = saved(tmp_path / "init", ["a", "b"], stem=stem, pooling="mean")
    arguments = [*BASE, "--init", tmp_path / "init", "--freeze", "true", "--model.dropout", "0.3"]
    assert run("train", *arguments, "--train.optimizer", optimizer, "--out", tmp_path / "run") == 0
    weights = weights_of(tmp_path / "run")
    for name, tensor in model.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(tensor, weights[name]), name
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[1]["train_loss"] < rows[0]["train_loss"]


def test_a_frozen_models_features_do_not_depend_on_the_mode():
    model = create_vit(**MODEL | dict(in_channels=3), stem="convolution", dropout=0.5, drop_path=0.5, pooling="mean")
    images = torch.randn(4, 3, 8, 8)
    model.freeze()
    statistics = {n: t.clone() for n, t in model.named_buffers()}
    first = model.train()(images)
    assert torch.equal(first, model.eval()(images))
    assert all(torch.equal(t, statistics[n]) for n, t in model.named_buffers())
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}
    first.sum().backward()
    assert model.head.training is False
    assert model.train().head.training is True


def test_the_compute_of_a_frozen_model_is_a_forward_pass_and_the_heads_gradients():
    model = create_vit(**MODEL)
    images, labels = torch.zeros(6, 1, 8, 8), torch.zeros(6, dtype=torch.long)

    def loss(network, x, y):
        return torch.nn.functional.cross_entropy(network(x), y), None

    whole = ComputeCounter(model, loss)(images, labels)
    model.freeze()
    head = 2 * 6 * 16 * 10
    for function in (loss, lambda *batch: loss(*batch)[0]):
        assert ComputeCounter(model, function)(images, labels) == whole / 3 + head


# Learning rates that decay from layer to layer


@pytest.mark.parametrize("changes", [dict(), dict(registers=1, embedding_norm=True, layer_scale=0.1, qk_norm=True)])
def test_the_factors_of_the_layers_are_those_of_timms_factory(changes):
    model = create_vit(**MODEL | dict(depth=3), **changes)
    options = dict(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.05)
    ours = {}
    for optimizer in make_optimizers(model, muon_lr=None, layer_decay=0.6, **options):
        for group in optimizer.param_groups:
            ours |= dict.fromkeys(group["params"], (group["lr_ratio"], group["weight_decay"]))
    theirs = {}
    for group in create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.6).param_groups:
        theirs |= dict.fromkeys(group["params"], (group["lr_scale"], group["weight_decay"]))
    assert ours.keys() == theirs.keys() == set(model.parameters())
    for name, parameter in model.named_parameters():
        assert ours[parameter] == pytest.approx(theirs[parameter]), name


def test_with_muon_each_parameter_stays_where_it_was_with_its_factor_beside_its_ratio():
    model = create_vit(**MODEL)
    options = dict(muon_lr=0.02, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.05)
    for plain, divided in zip(
        make_optimizers(model, **options), make_optimizers(model, **options, layer_decay=0.5), strict=True
    ):
        before = {p: g for g in plain.param_groups for p in g["params"]}
        after = {p: g for g in divided.param_groups for p in g["params"]}
        assert before.keys() == after.keys()
        assert sum(len(g["params"]) for g in divided.param_groups) == len(before)
        for name, parameter in model.named_parameters():
            if parameter in before:
                layer = re.match(r"encoder\.layers\.(\d)", name)
                exponent = (
                    2 - int(layer[1]) if layer else 1 if name.startswith("encoder") else 0 if "head" in name else 3
                )
                ratio = before[parameter].get("lr_ratio", 1.0)
                assert after[parameter]["lr_ratio"] == pytest.approx(ratio * 0.5**exponent), name
                same = after[parameter].keys() - {"params", "lr_ratio"}
                assert all(after[parameter][key] == before[parameter][key] for key in same)


def test_the_loop_trains_early_layers_more_slowly(tmp_path):
    model = saved(tmp_path / "init", ["a"])
    arguments = [*BASE, "--init", tmp_path / "init", "--train.layer_decay", "0.01"]
    assert run("train", *arguments, "--out", tmp_path / "run") == 0
    weights = weights_of(tmp_path / "run")
    name = "encoder.layers.{}.feed_forward.linear1.weight"
    moved = [(weights[name.format(i)] - model.state_dict()[name.format(i)]).abs().mean().item() for i in range(2)]
    assert 0 < moved[0] < 0.1 * moved[1]


# Going on, and what is refused


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path):
    saved(tmp_path / "init", ["a", "b"])
    arguments = [*BASE, "--init", tmp_path / "init", "--train.layer_decay", "0.7", "--freeze", "false"]
    assert run("train", *arguments, "--out", tmp_path / "whole") == 0
    assert run("train", *arguments, "--out", tmp_path / "half") == 0
    newest = sorted((tmp_path / "half" / "states").glob("*.pt"))[-1]
    newest.unlink()
    assert run("train", "--out", tmp_path / "half", "--resume") == 0
    first, second = weights_of(tmp_path / "whole"), weights_of(tmp_path / "half")
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--init", "nothing"], "init=nothing: nothing does not exist"),
        (
            ["--init", "init", "--model.dim", "32", "--model.registers", "1"],
            "leave out model.dim=32 (it has 16), model.reg",
        ),
        (["--init", "init", "--data.mode", "RGB"], "data.mode=RGB has 3 channels, and init=init takes 1"),
        (["--init", "init", "--data.image_size", "10"], "the height 10 is not a multiple of the patch height 4"),
        (["--freeze", "true"], "freeze=true trains the head only, on features that nobody trained; give --init, too"),
        (["--init", "init", "--train.layer_decay", "0"], "train.layer_decay=0.0 is out of range"),
        (["--init", "init", "--train.layer_decay", "1.5"], "train.layer_decay=1.5 is out of range"),
        (["--init", "foreign.safetensors"], "say with --architecture of what model they are"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, capsys, monkeypatch, arguments, message):
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "init")
    save_file({"weight": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    assert run("train", *BASE, *arguments, "--out", "run") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
