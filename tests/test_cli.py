"""The commands from end to end: train, kill, resume, evaluate, and one clear message for whatever is wrong."""

import csv
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from vit_scratch import cli, create_vit
from vit_scratch.config import ImageTrainConfig
from vit_scratch.data import sources
from vit_scratch.tasks import classification
from vit_scratch.tasks.run import plan_updates
from vit_scratch.training import checkpoint
from vit_scratch.transformer import linear

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("without_curves")
SMALL = [
    *("--data.kind", "digits", "--model.patch_size", "4", "--model.dim", "16", "--model.depth", "2"),
    *("--model.heads", "2", "--model.dropout", "0.1", "--augment.shift", "1", "--augment.flip", "false"),
    *("--train.epochs", "3", "--train.warmup_epochs", "1", "--train.batch_size", "128", "--device", "cpu"),
]


def run(*arguments: str) -> int:
    """The exit status of a command, run in this process."""
    try:
        return cli.main([str(a) for a in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def start(*arguments: str) -> subprocess.Popen:
    """A command in a process of its own, with as many threads as this one, as sums depend on their number."""
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(
        [sys.executable, ROOT / "train.py", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_for_state(out: Path, update: int, process: subprocess.Popen) -> None:
    """Wait until the training state of that update, or a later one, is there."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if any(int(p.stem[7:]) >= update for p in out.glob("states/update_*.pt")):
            return
        assert process.poll() is None, process.stdout.read().decode()  # type: ignore[union-attr]
        time.sleep(0.01)
    raise AssertionError(f"no state of update {update} within 120 s")


def rows(out: Path) -> list[dict]:
    """The metrics of a run without those that depend on time."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "items_per_second")} for row in lines]


def same_weights(a: Path, b: Path) -> bool:
    first, second = load_file(a), load_file(b)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, not to be changed."""
    out = tmp_path_factory.mktemp("trained") / "run"
    assert run("train", *SMALL, "--train.ema_decay", "0.9", "--out", out) == 0
    return out


def at_batch(monkeypatch: pytest.MonkeyPatch, batch: int, number: int) -> None:
    """Send this process a signal in the forward pass of that batch."""
    real, calls = classification.smoothed_cross_entropy, []

    def loss(smoothing: float, model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple:
        if images.device.type != "meta":  # where operations are counted
            calls.append(images)
            if len(calls) == batch:
                os.kill(os.getpid(), number)
        return real(smoothing, model, images, labels)

    monkeypatch.setattr(classification, "smoothed_cross_entropy", loss)


@pytest.mark.parametrize("source", ["memory", "files"])
def test_a_run_that_was_killed_stopped_and_resumed_ends_like_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    options = [
        *(*SMALL, "--train.ema_decay", "0.9", "--augment.mixup", "0.4", "--augment.policy", "randaugment"),
        *("--train.accumulate", "2", "--train.batch_size", "16", "--train.epochs", "3", "--data.hold_out", "0.9"),
        *("--train.checkpoint_every", "3", "--data.in_memory", str(source == "memory")),
    ]
    if source == "files":
        options += ["--data.workers", "2", "--train.precision", "bf16"]
    if source == "memory":  # batch norms have a state of their own
        options += ["--model.stem", "convolution", "--model.pooling", "mean", "--model.feed_forward_kernel", "3"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run("train", *options, "--out", whole) == 0

    begin: tuple = ("train", "--out", broken, "--resume")
    if source == "files":
        killed = start(*options, "--out", str(broken))
        wait_for_state(broken, 6, killed)
        killed.kill()
        killed.wait()
        assert not (broken / "summary.json").exists()
    else:
        begin = ("train", *options, "--out", broken)

    with monkeypatch.context() as patch:
        at_batch(patch, 9, signal.SIGTERM)
        assert run(*begin) == 128 + signal.SIGTERM
    assert f"--out {broken} --resume" in capsys.readouterr().out
    assert not (broken / "summary.json").exists()

    assert run("train", "--out", broken, "--resume") == 0
    for name in ("last", "best", "ema"):
        assert same_weights(whole / f"{name}.safetensors", broken / f"{name}.safetensors"), name
    assert rows(whole) == rows(broken)
    assert [r["epoch"] for r in rows(broken)] == [1, 2, 3]


def test_the_deterministic_switch_gives_the_same_bits(tmp_path: Path) -> None:
    options = [*SMALL, "--train.epochs", "1", "--train.warmup_epochs", "0", "--model.dropout", "0.1"]
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for name in ("first", "second"):
            assert run("train", *options, "--train.deterministic", "true", "--out", tmp_path / name) == 0
    finally:
        torch.use_deterministic_algorithms(before)
    assert same_weights(tmp_path / "first" / "last.safetensors", tmp_path / "second" / "last.safetensors")
    assert rows(tmp_path / "first") == rows(tmp_path / "second")


def test_evaluate_prints_what_the_end_of_training_printed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((trained / "summary.json").read_text())["test"]
    assert run("evaluate", trained, "--json", trained / "out.json") == 0
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == f"test accuracy {100 * summary['correct'] / 360:.2f} % ({summary['correct']}/360)"
    result = json.loads((trained / "out.json").read_text())
    assert {k: result[k] for k in ("correct", "count", "loss")} == {k: summary[k] for k in ("correct", "count", "loss")}
    assert sum(map(sum, result["confusion"])) == result["count"] == 360
    with open(trained / "evaluation" / "confusion_matrix.csv") as file:
        table = list(csv.reader(file))
    assert [[int(n) for n in row[1:]] for row in table[1:]] == result["confusion"]
    assert sum(result["confusion"][i][i] for i in range(10)) == result["correct"]


@pytest.mark.parametrize("batch_size", ["1", "7", "512"])
def test_counts_do_not_depend_on_the_batch_size(trained: Path, tmp_path: Path, batch_size: str) -> None:
    arguments = ("--batch_size", batch_size, "--json", tmp_path / "r.json", "--out", tmp_path)
    assert run("evaluate", trained, *arguments) == 0
    summary = json.loads((trained / "summary.json").read_text())["test"]
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["correct"], result["count"]) == (summary["correct"], 360)


def test_evaluate_on_held_out_images_repeats_the_last_epoch_s_figure(trained: Path, tmp_path: Path) -> None:
    arguments = ("--split", "val", "--json", tmp_path / "r.json", "--out", tmp_path)
    assert run("evaluate", trained / "last.safetensors", *arguments) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["count"] == 144
    assert result["accuracy"] == rows(trained)[-1]["val_accuracy"]
    assert run("evaluate", trained / "ema.safetensors", *arguments) == 0
    assert json.loads((tmp_path / "r.json").read_text())["accuracy"] == rows(trained)[-1]["ema_val_accuracy"]


def test_a_run_leaves_everything_that_the_readme_names(trained: Path) -> None:
    names = {str(p.relative_to(trained)) for p in trained.rglob("*") if p.is_file()}
    assert names >= {
        *("config.yaml", "metrics.jsonl", "metrics.csv", "curves.png", "summary.json"),
        *("last.safetensors", "best.safetensors", "ema.safetensors"),
        *("evaluation/results.json", "evaluation/confusion_matrix.csv", "evaluation/confusion_matrix.png"),
        *("evaluation/per_class.csv", "evaluation_ema/results.json"),
    }
    assert not [n for n in names if n.endswith(".part")]
    assert len({(trained / n).stat().st_mode for n in names}) == 1  # who may read one may read all


def test_a_finished_run_is_not_overwritten(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (trained / "last.safetensors").read_bytes()
    assert run("train", *SMALL, "--out", trained) == 2
    assert "--resume" in capsys.readouterr().err
    assert run("train", "--out", trained, "--resume", "--train.lr", "0.5", "--seed", "3") == 2
    message = capsys.readouterr().err
    assert "train.lr: 0.001 then, 0.5 now" in message
    assert "seed: 0 then, 3 now" in message
    assert run("train", "--out", trained, "--resume") == 0
    assert (trained / "last.safetensors").read_bytes() == before


def test_the_resolved_configuration_is_printed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", *SMALL, "--train.lr", "2e-3", "--out", tmp_path / "run") == 0
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert saved in capsys.readouterr().out
    for line in ("  lr: 0.002", "  dim: 16", "  mode: L", "  pooling: class", "  qk_norm: false"):
        assert line in saved.splitlines()


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    options = [*SMALL, "--train.lr", "1e38", "--train.clip_norm", "0", "--train.checkpoint_every", "1"]
    assert run("train", *options, "--train.log_every", "1", "--out", out) == 1
    message = capsys.readouterr().err
    for part in ("not finite at update", "loss", "learning rate"):
        assert part in message
    state = torch.load(checkpoint.TrainingStates(out / "states").paths()[0])["state"]
    assert all(torch.isfinite(w).all() for w in state["model"].values())


def test_a_full_disk_stops_with_status_1_and_leaves_the_state_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    saves = []

    def save(state: dict, file: BinaryIO) -> None:
        saves.append(file)
        if len(saves) == 3:
            file.write(b"half a fi")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(state, file)

    real = torch.save
    monkeypatch.setattr(torch, "save", save)
    assert run("train", *SMALL, "--train.checkpoint_every", "2", "--out", out) == 1
    message = capsys.readouterr().err
    assert "No space left on device" in message
    assert "update_00000006.pt" in message
    assert [p.name for p in checkpoint.TrainingStates(out / "states").paths()] == [
        "update_00000004.pt",
        "update_00000002.pt",
    ]
    assert not list(out.rglob("*.part"))
    monkeypatch.undo()
    assert run("train", "--out", out, "--resume") == 0


def test_a_run_does_not_go_on_with_other_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_images(tmp_path / "data", {"train": {"red": 20, "green": 20}})
    arguments = ("train", *FOLDERS, "--data.root", data, "--out", tmp_path / "run")
    assert run(*arguments) == 0
    (data / "train" / "red" / "0.png").unlink()
    assert run(*arguments, "--resume") == 2
    assert "other data" in capsys.readouterr().err


def test_a_damaged_newest_state_is_named_and_the_one_before_it_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run("train", *SMALL, "--train.checkpoint_every", "5", "--out", out) == 0
    weights = load_file(out / "last.safetensors")
    newest, before = checkpoint.TrainingStates(out / "states").paths()
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    capsys.readouterr()
    assert run("train", "--out", out, "--resume") == 0
    assert str(newest) in capsys.readouterr().out
    again = load_file(out / "last.safetensors")
    assert all(torch.equal(weights[k], again[k]) for k in weights)
    assert before.exists()


def test_a_model_trained_compiled_loads_uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_module(module: torch.nn.Module) -> None:
        compiled.append(module)
        module._compiled_call_impl = torch.compile(module._call_impl, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_module)
    monkeypatch.setattr(linear, "ONEDNN", False)  # which compiled code does not take, and whose sums differ in a bit
    options = [*SMALL, "--train.epochs", "2", "--model.depth", "1"]
    options += ["--model.dropout", "0"]  # as compiled code draws other random numbers
    assert run("train", *options, "--out", tmp_path / "plain") == 0
    assert run("train", *options, "--train.compile", "true", "--out", tmp_path / "compiled") == 0
    assert len(compiled) == 1
    assert same_weights(tmp_path / "plain" / "last.safetensors", tmp_path / "compiled" / "last.safetensors")


def corrupt(path: Path, trained: Path) -> None:
    path.write_bytes((trained / "last.safetensors").read_bytes()[:-100])


def foreign(path: Path, trained: Path) -> None:
    save_file({"blocks.0.attn.proj.bias": torch.zeros(3)}, path)


def of_another_model(path: Path, trained: Path) -> None:
    _, description = checkpoint.load_weights(trained / "last.safetensors")
    weights = create_vit("tiny_patch4_32", dim=16, depth=3, heads=2, image_size=8, in_channels=1).state_dict()
    checkpoint.save_weights(path, weights, description)


def of_another_task(path: Path, trained: Path) -> None:
    checkpoint.save_weights(path, {"a": torch.zeros(1)}, {"task": "translation"})


def no_file(path: Path, trained: Path) -> None:
    pass


def folder(path: Path, trained: Path) -> None:
    path.mkdir()


def pickle(path: Path, trained: Path) -> None:
    torch.save({"a": torch.zeros(1)}, path)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (corrupt, ["damaged"]),
        (foreign, ["1 tensors", "blocks.0.attn.proj.bias"]),
        (of_another_model, ["of 32 weights, 12 unexpected (encoder.layers.2.attention"]),
        (of_another_task, ["translation"]),
        (no_file, ["does not exist"]),
        (folder, ["no last.safetensors"]),
        (pickle, ["no safetensors file"]),
    ],
)
def test_checkpoints_that_cannot_be_used_are_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], make, expected: list[str]
) -> None:
    path = tmp_path / "model.safetensors"
    make(path, trained)
    assert run("evaluate", path) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    for part in [*expected, str(path)]:
        assert part in message


def make_images(root: Path, parts: dict[str, dict[str, int]]) -> Path:
    """An image folder of 8 x 8 images whose classes differ in colour: {part: {class: number of images}}."""
    random = np.random.default_rng(0)
    for part, classes in parts.items():
        for name, count in classes.items():
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 80, (8, 8, 3), dtype=np.uint8)
                pixels[..., sorted(classes).index(name) % 3] += 120
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


FOLDERS = [
    *("--data.kind", "imagefolder", "--data.image_size", "8", "--model.patch_size", "4", "--model.dim", "16"),
    *("--model.depth", "1", "--model.heads", "2", "--augment.shift", "0", "--train.epochs", "12", "--train.lr", "1e-2"),
    *("--train.warmup_epochs", "1", "--train.batch_size", "8", "--device", "cpu"),
]


@pytest.mark.parametrize("in_memory", ["true", "false"])
def test_the_user_s_own_images_train_and_evaluate(tmp_path: Path, in_memory: str) -> None:
    data = make_images(tmp_path / "data", {"train": {"red": 20, "green": 20}, "test": {"red": 5, "green": 6}})
    out = tmp_path / "run"
    assert run("train", *FOLDERS, "--data.root", data, "--data.in_memory", in_memory, "--out", out) == 0
    result = json.loads((out / "summary.json").read_text())["test"]
    assert (result["correct"], result["count"]) == (11, 11)
    assert [(c["class"], c["count"]) for c in result["classes"]] == [("green", 6), ("red", 5)]
    moved = data.rename(tmp_path / "elsewhere")
    assert run("evaluate", out) == 2
    assert run("evaluate", out, "--data.root", moved, "--json", tmp_path / "r.json") == 0
    assert json.loads((tmp_path / "r.json").read_text())["correct"] == 11


def test_hidden_folders_are_no_classes(tmp_path: Path) -> None:
    data = make_images(tmp_path / "data", {"train": {"red": 10, "green": 10}, "test": {"red": 2, "green": 2}})
    (data / "train" / ".ipynb_checkpoints").mkdir()
    (data / "test" / ".cache").mkdir()
    assert sources.load("imagefolder", str(data)).classes == ["green", "red"]


def test_class_folders_that_do_not_match_are_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_images(tmp_path / "data", {"train": {"a": 10, "b": 10, "c": 10}, "test": {"a": 2, "c": 3}})
    arguments = ("train", *FOLDERS, "--data.root", data, "--out", tmp_path / "run")
    assert run(*arguments) == 2
    assert "'b'" in capsys.readouterr().err
    (data / "test" / "d").mkdir()
    assert run(*arguments) == 2
    assert "'d'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    (data / "test" / "d").rmdir()
    assert run(*arguments, "--data.allow_missing_classes", "true") == 0
    classes = json.loads((tmp_path / "run" / "summary.json").read_text())["test"]["classes"]
    assert [(c["class"], c["count"], c["accuracy"] is None) for c in classes] == [
        ("a", 2, False),
        ("b", 0, True),
        ("c", 3, False),
    ]


@pytest.mark.parametrize("in_memory", ["true", "false"])
def test_a_truncated_image_is_named_and_can_be_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], in_memory: str
) -> None:
    data = make_images(tmp_path / "data", {"train": {"red": 20, "green": 20}, "test": {"red": 5, "green": 5}})
    broken = data / "train" / "red" / "7.png"
    broken.write_bytes(broken.read_bytes()[:60])
    arguments = (
        *("train", *FOLDERS, "--data.root", data, "--data.in_memory", in_memory, "--data.hold_out", "0"),
        *("--data.workers", "1", "--train.epochs", "2", "--out", tmp_path / in_memory),
    )
    assert run(*arguments) == (2 if in_memory == "true" else 1)
    message = capsys.readouterr().err
    assert str(broken) in message
    assert "--data.skip_broken true" in message
    assert "Traceback" not in message
    assert run(*arguments[:-1], tmp_path / "skipping", "--data.skip_broken", "true") == 0
    text = capsys.readouterr().out
    assert "39 training images" in text
    assert str(broken) in text


def test_a_model_s_classes_must_be_those_of_the_data(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    data = make_images(tmp_path / "data", {"train": {"a": 3, "b": 3}, "test": {"a": 2, "b": 3}})
    assert run("evaluate", trained, "--data.kind", "imagefolder", "--data.root", data) == 2
    assert "no classes of the model" in capsys.readouterr().err


def test_places_that_cannot_be_written_to_are_refused_before_any_work(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run("train", *SMALL, "--out", tmp_path / "file") == 2
    assert "is a file" in capsys.readouterr().err
    assert run("evaluate", trained, "--json", tmp_path / "nowhere" / "r.json") == 2
    assert "nowhere" in capsys.readouterr().err


def test_without_a_command_or_with_an_unknown_one_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    assert run("trian") == 2
    assert "no command 'trian'" in capsys.readouterr().err


def test_nothing_is_written_before_the_input_is_known_to_be_good(tmp_path: Path) -> None:
    for wrong in (
        ["--model.heads", "3"],
        ["--model.patch_size", "3"],
        ["--data.hold_out", "0.999"],
        ["--device", "tpu"],
    ):
        assert run("train", *SMALL, *wrong, "--out", tmp_path / "run") == 2
        assert not (tmp_path / "run").exists()


FIRST = 2 * 5 * 16 * 64 + 4 * 5 * 5 * 16 + 4 * 5 * 16 * 64
LAST = 2 * 1 * 16 * 32 + 2 * 5 * 16 * 32 + 4 * 1 * 5 * 16 + 4 * 1 * 16 * 64
FORWARD = 2 * 4 * 16 * 16 + FIRST + LAST + 2 * 16 * 10
"""Operations of a digit's forward pass in `SMALL`: 4 patches of 16 pixels, 5 tokens of width 16, two layers, of whose
last one only the class token is computed, and a head."""
IMAGE = 3 * FORWARD / 1e15
"""PFLOP of training on a digit once."""
TRAINING, BATCHES = 1293, 11  # images, and batches of 128 of them


@pytest.mark.parametrize(
    ("epochs", "updates", "images"),
    [
        (2.4, 26, 2 * TRAINING + 4 * 128),  # 26.4 updates
        (1.95, 21, TRAINING + 10 * 128),  # the last batch, of 13 images, would be one more
        (2.0, 22, 2 * TRAINING),
    ],
)
def test_a_budget_ends_the_run_with_the_update_that_is_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], epochs: float, updates: int, images: int
) -> None:
    budget, out = epochs * TRAINING * IMAGE, tmp_path / "run"
    assert run("train", *SMALL, "--train.budget_pflop", repr(budget), "--train.epochs", "1", "--out", out) == 0
    text = capsys.readouterr().out
    whole = -(-updates // BATCHES)
    assert f"; {whole} epochs, {updates} updates; cpu" in text
    summary = json.loads((out / "summary.json").read_text())
    assert summary["pflop"] == pytest.approx(images * IMAGE, rel=1e-12)
    assert abs(summary["pflop"] - budget) <= 128 * IMAGE
    ends = [TRAINING * epoch * IMAGE for epoch in range(1, whole)] + [images * IMAGE]
    assert [r["pflop"] for r in rows(out)] == pytest.approx(ends, rel=1e-12)
    assert [r["epoch"] for r in rows(out)] == list(range(1, whole + 1))
    assert [r["update"] for r in rows(out)] == [*range(BATCHES, updates, BATCHES), updates]
    assert [r["lr"] for r in rows(out)] == pytest.approx([1e-3, *[r["lr"] for r in rows(out)[1:-1]], 1e-5])
    assert summary["last"]["pflop"] == summary["pflop"]
    with open(out / "metrics.csv") as file:
        assert [float(r["pflop"]) for r in csv.DictReader(file)] == pytest.approx(ends, rel=1e-12)


@pytest.mark.parametrize(
    ("budget", "warmup", "updates"),
    [
        (None, 5.0, 70),
        (None, 6.94, 70),
        (20.0, 5.0, 100),  # ten updates take 2 PFLOP
        (19.95, 5.0, 100),
        (19.85, 0.0, 99),
        (0.31, 0.1, 2),
        (1e-9, 0.0, 1),  # a budget of less than an update is one update
        (1.0, 0.44, 5),  # 4 updates of warm-up
        (1.0, 0.46, "train.warmup_epochs=0.46 leaves nothing of train.budget_pflop=1.0, which is 0.5 epochs; lower it"),
        (1e-9, 0.1, "train.warmup_epochs=0.1 leaves nothing of train.budget_pflop=1e-09, which is 0.1 epochs"),
        (None, 6.96, "train.warmup_epochs=6.96 leaves nothing of train.epochs=7"),
    ],
)
def test_updates_are_those_of_the_epochs_or_of_the_budget(
    budget: float | None, warmup: float, updates: int | str
) -> None:
    config = ImageTrainConfig(epochs=7, budget_pflop=budget, warmup_epochs=warmup)
    if isinstance(updates, str):
        with pytest.raises(ValueError, match=re.escape(updates)):
            plan_updates(config, 10, 2.0)
    else:
        assert plan_updates(config, 10, 2.0) == updates


def test_every_run_reports_its_compute(trained: Path) -> None:
    assert [r["pflop"] for r in rows(trained)] == pytest.approx([n * TRAINING * IMAGE for n in (1, 2, 3)], rel=1e-12)
    assert json.loads((trained / "summary.json").read_text())["pflop"] == rows(trained)[-1]["pflop"]


@pytest.mark.parametrize("value", ["0", "-1e-6", "inf", ".inf", "nan", ".nan"])
def test_a_budget_that_is_none_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    assert run("train", *SMALL, f"--train.budget_pflop={value}", "--out", tmp_path / "run") == 2
    message = capsys.readouterr().err
    assert "train.budget_pflop" in message
    assert "Traceback" not in message
    if value not in ("inf", "nan"):  # which are words to the parser, and no numbers
        assert "is out of range; it must be above 0, or null" in message
        assert len(message.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("epochs", "warmup"), [(0.9, "1"), (1.0, "1"), (1e-9, "0.1")])
def test_a_budget_that_the_warm_up_uses_up_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], epochs: float, warmup: str
) -> None:
    budget = repr(epochs * TRAINING * IMAGE)
    options = ["--train.budget_pflop", budget, "--train.warmup_epochs", warmup]
    assert run("train", *SMALL, *options, "--out", tmp_path / "run") == 2
    message = capsys.readouterr().err
    for part in (f"train.warmup_epochs={float(warmup)} leaves nothing", f"train.budget_pflop={budget}", "epochs"):
        assert part in message
    assert "Traceback" not in message
    assert not (tmp_path / "run").exists()


def test_muon_trains_and_goes_on_to_the_same_bits(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    budget = repr(1.4 * TRAINING * IMAGE)  # 15 updates, of which the last 4 are in a second epoch
    options = [*SMALL, "--train.warmup_epochs", "0.5", "--train.budget_pflop", budget, "--augment.mixup", "0.4"]
    options += ["--train.optimizer", "muon", "--train.muon_lr", "0.02", "--train.schedule", "linear"]
    assert run("train", *options, "--out", whole) == 0
    with monkeypatch.context() as patch:
        at_batch(patch, 7, signal.SIGTERM)
        assert run("train", *options, "--out", broken) == 128 + signal.SIGTERM
    assert [p.name for p in checkpoint.TrainingStates(broken / "states").paths()] == ["update_00000007.pt"]
    assert run("train", "--out", broken, "--resume") == 0
    for name in ("last", "best"):
        assert same_weights(whole / f"{name}.safetensors", broken / f"{name}.safetensors"), name
    assert rows(whole) == rows(broken)
    assert [r["update"] for r in rows(broken)] == [11, 15]
    assert [r["lr"] for r in rows(broken)] == pytest.approx([1e-5 + (1e-3 - 1e-5) * 4 / 9, 1e-5])  # 6 of 15 warm up
    assert [r["pflop"] for r in rows(broken)] == pytest.approx([TRAINING * IMAGE, (TRAINING + 512) * IMAGE], rel=1e-12)

    state = torch.load(checkpoint.TrainingStates(whole / "states").paths()[0])["state"]
    of_adamw, of_muon = state["optimizers"]
    assert [{name for entry in o["state"].values() for name in entry} for o in (of_adamw, of_muon)] == [
        {"step", "exp_avg", "exp_avg_sq"},
        {"average"},
    ]
    shapes = sorted(tuple(entry["average"].shape) for entry in of_muon["state"].values())
    assert shapes == sorted(2 * [(48, 16), (16, 16), (64, 16), (16, 64)] + [(16, 16)])  # that of the patches, too
    assert [g["lr_ratio"] for g in of_muon["param_groups"]] == [20.0, 20.0]  # 0.02 / 0.001
    assert [g["lr"] for g in of_muon["param_groups"]] == pytest.approx([20e-5, 20e-5])  # after the last update
    capsys.readouterr()
    assert run("train", "--out", trained, "--resume", "--train.optimizer", "muon") == 2
    assert "train.optimizer: adamw then, muon now" in capsys.readouterr().err


@pytest.mark.parametrize("rates", [["--train.lr=0"], ["--train.lr=0", "--train.min_lr=0"]])
def test_muon_without_a_rate_for_the_rest_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rates: list[str]
) -> None:
    assert run("train", *SMALL, "--train.optimizer=muon", *rates, "--out", tmp_path / "run") == 2
    message = capsys.readouterr().err
    assert "train.lr=0 leaves nothing to train of what Muon is not for; raise it" in message
    assert not (tmp_path / "run").exists()


def test_a_training_state_of_an_older_version_is_refused_and_left(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    newest, before = checkpoint.TrainingStates(out / "states").paths()
    for path in (newest, before):
        content = torch.load(path)
        state = content["state"]
        state["optimizer"] = state.pop("optimizers")[0]  # as format 1 had it
        del state["progress"]["operations"]
        torch.save(content | {"format": 1}, path)
    contents = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert run("train", "--out", out, "--resume") == 2
    message = capsys.readouterr().err
    for path in (newest, before):
        assert f"{path} can't be read: its format is 1, and this version reads 3" in message
    assert "start anew with another --out" in message
    assert "Traceback" not in message
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == contents


STAGES = "[[4, 0.5], [[4, 8], 0.25]]"


def test_smaller_images_first_cost_less_and_a_run_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def operations(patches: int) -> int:
        tokens = patches + 1
        first = tokens * 12 * 16 * 16 + 2 * tokens * tokens * 16
        last = (2 * tokens + 10) * 16 * 16 + 2 * tokens * 16  # of which the class token is all that is read
        return 6 * (patches * 16 * 16 + first + last + 16 * 10)

    options = [*SMALL, "--augment.smaller_first", STAGES, "--train.epochs", "2"]
    out = tmp_path / "whole"
    assert run("train", *options, "--out", out) == 0
    # 1,293 images in 11 batches an epoch: 22 updates, 11 of them with 1 patch, 6 with 2 (to 16.5 of 22), 5 with 4.
    images = 1293 * operations(1), (6 * 128) * operations(2), (1293 - 6 * 128) * operations(4)
    assert json.loads((out / "summary.json").read_text())["pflop"] == pytest.approx(sum(images) / 1e15, rel=1e-12)
    assert run("evaluate", out, "--json", tmp_path / "result.json") == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["correct"] == json.loads((out / "summary.json").read_text())["test"]["correct"]

    with monkeypatch.context() as patch:
        at_batch(patch, 13, signal.SIGTERM)
        assert run("train", *options, "--out", tmp_path / "killed") == 128 + signal.SIGTERM
    assert run("train", "--out", tmp_path / "killed", "--resume") == 0
    assert same_weights(out / "last.safetensors", tmp_path / "killed" / "last.safetensors")
    assert rows(out) == rows(tmp_path / "killed")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("[[6, 0.5]]", "6 is no size of at most (8, 8) that patches of (4, 4) divide"),
        ("[[12, 0.5]]", "12 is no size of at most (8, 8)"),
        ("[[4, 0.0]]", "0.0 is no share of the updates"),
        ("[[4, 1.0]]", "1.0 is no share of the updates"),
        ("[[4, 0.6], [4, 0.6]]", "the shares exceed 1"),
        ("[[0, 0.5]]", "augment.smaller_first=0 is not a size"),
    ],
)
def test_stages_that_can_not_be_are_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture, stages: str, message: str
) -> None:
    assert run("train", *SMALL, "--augment.smaller_first", stages, "--out", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_sharded_model_needs_several_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = ROOT / "configs" / "digits.yaml", tmp_path / "run"
    assert run("train", "--config", config, "--train.sharded", "true", "--out", out) == 2
    message = "train.sharded=true divides a model among several processes; start them with torchrun"
    assert message in capsys.readouterr().err
    assert not out.exists()
