"""Checks what the benchmarks report, on trainings of a few updates; their figures are measured by hand."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import recipes

    return recipes


def run(recipes, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["recipes.py", *arguments])
    recipes.main()


def test_a_peer_is_trained_for_the_budget_once_and_stands_in_the_table(recipes, tmp_path, monkeypatch, capsys):
    # 64 wide, 4 deep, 64 patches of 48 numbers and a class token, all of which timm computes in its last layer, too.
    forward = 2 * (64 * 48 * 64 + 4 * (65 * 12 * 64**2 + 2 * 65 * 65 * 64) + 64 * 10)
    budget = 10 * 128 * 3 * forward / 1e15
    options = ["--budget", repr(budget), "--recipes", "timm_64x4", "--lr", "0.002", "--seeds", "5"]
    options += ["--data.kind", "fake", "--out", str(tmp_path)]
    run(recipes, monkeypatch, *options)
    first = capsys.readouterr().out
    result = json.loads((tmp_path / f"timm_64x4_lr0.002_{budget:g}_5.json").read_text())
    assert (result["recipe"], result["seed"], result["budget"]) == ("timm_64x4_lr0.002", 5, budget)
    # 900 fake images in batches of 128, the last of 4, so that ten mean batches are eleven with one of those
    assert result["pflop"] == pytest.approx(budget, rel=0.1)
    assert result["pflop"] == pytest.approx((900 + 3 * 128) * 3 * forward / 1e15, rel=1e-12)
    assert result["curve"][-1] == [result["pflop"], result["val_accuracy"]]
    assert [c for c, _ in result["curve"]] == sorted(c for c, _ in result["curve"])
    assert result["val_accuracy"] * 100 == int(result["val_accuracy"] * 100)  # of 100 held-out images
    row = f"| {100 * result['val_accuracy']:.2f} | {100 * result['test_accuracy']:.2f} | {result['pflop']:.4f} |"
    assert row in first
    assert "--- timm_64x4_lr0.002" in first

    run(recipes, monkeypatch, *options)
    again = capsys.readouterr().out
    assert "---" not in again.replace("|---", "")
    assert row in again


@pytest.mark.parametrize("length", [1, 3, 4, 8, 15])
def test_parts_of_epochs_give_all_batches_in_order_and_know_how_many_of_them_a_training_takes(recipes, length):
    class Loader(list):
        def batches(self, epoch, start):
            return iter([(epoch, batch) for batch in self[start:]])

    parts = recipes.Slices(Loader(range(8)), length)
    found = [(part, batch) for part in range(3 * 8) for batch in parts.batches(part, 0)]
    assert [batch for _, batch in found][: 3 * 8] == [(epoch, batch) for epoch in range(3) for batch in range(8)]
    for updates in range(1, 3 * 8 + 1):
        assert parts.needed(updates) == found[updates - 1][0] + 1


def test_an_unknown_recipe_is_refused_with_the_known_ones(recipes, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_:
        run(recipes, monkeypatch, "--budget", "0.03", "--recipes", "resnet", "--out", str(tmp_path))
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "no recipe 'resnet'" in error
    assert all(name in error for name in ("cifar10_0.03pf", "cifar10_0.03pf_conv", "timm_64x4", "omihub777"))


def test_the_table_gives_means_spreads_and_the_compute_to_the_best_peers_accuracy(recipes, tmp_path):
    def result(recipe, seed, curve):
        about = dict(recipe=recipe, budget=1.0, seed=seed, parameters=1000, images=500, seconds=60.0, pflop=1.0)
        about |= dict(val_accuracy=curve[-1][1], test_accuracy=curve[-1][1] + 0.01, curve=curve)
        (tmp_path / f"{recipe}_{seed}.json").write_text(json.dumps(about))

    result("timm_64x4", 0, [[0.5, 0.40], [1.0, 0.50]])
    result("timm_64x4", 1, [[0.5, 0.41], [1.0, 0.54]])
    result("omihub777", 0, [[0.5, 0.30], [1.0, 0.35]])
    result("cifar10_1pf", 0, [[0.25, 0.52], [0.5, 0.6], [1.0, 0.8]])
    result("cifar10_1pf", 1, [[0.25, 0.515], [0.5, 0.7], [1.0, 0.8]])
    lines = [line for line in recipes.table(tmp_path).splitlines() if line.startswith("| ")]
    assert "PFLOP to 52.0 % held out" in lines[0]
    assert lines[1] == "| cifar10_1pf | 1,000 | 500 | 80.00 ± 0.00 | 81.00 ± 0.00 | 1.0000 | 0.5000 | 60 | 0, 1 |"
    assert lines[2] == "| timm_64x4 | 1,000 | 500 | 52.00 ± 2.83 | 53.00 ± 2.83 | 1.0000 | 1.0000 | 60 | 0, 1 |"
    assert lines[3] == "| omihub777 | 1,000 | 500 | 35.00 | 36.00 | 1.0000 | not reached | 60 | 0 |"


@pytest.fixture
def mutations(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import mutations

    return mutations


def test_changed_files_are_refused_or_taken_as_they_are(mutations):
    for name, outcomes, faults in mutations.run(50, 1):
        assert not faults, f"{name}: {faults[0]}"
        assert sum(outcomes.values()) == 50
        assert outcomes["refused"] > 15


def test_a_configuration_that_is_read_as_another_is_a_fault(mutations, tmp_path, monkeypatch):
    build = mutations.cli.build

    def wrong(cls, values):
        config = build(cls, values)
        config.seed += 1
        return config

    monkeypatch.setattr(mutations.cli, "build", wrong)
    outcomes, faults = mutations.configurations(20, 0, tmp_path)
    assert outcomes["accepted, as the file says"] == 0
    assert outcomes["fault"] == len(faults) > 0
    assert "seed is 1, of which the file says nothing" in faults[0]


def test_weights_that_are_read_as_others_are_a_fault(mutations, tmp_path, monkeypatch):
    monkeypatch.setattr("vit_scratch.training.checkpoint.checksum", lambda text, tensors: "")
    outcomes, faults = mutations.weights(200, 0, tmp_path)
    assert outcomes["fault"] == len(faults) > 20
    assert "accepted with another content" in faults
