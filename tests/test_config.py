"""Configurations: right types from YAML and the command line, and nothing wrong accepted in silence."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from vit_scratch.config import (
    FREE_TO_CHANGE,
    ClassificationConfig,
    EvaluateConfig,
    ExportConfig,
    ProfileConfig,
    SequenceConfig,
    TranslateConfig,
    build_from_dict,
    config_class,
    differences,
    read_config,
    to_dict,
    to_yaml,
)

ROOT = Path(__file__).parents[1]


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def leaves(config: object, where: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for f in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, f.name)
        found |= leaves(value, f"{where}{f.name}.") if dataclasses.is_dataclass(value) else {where + f.name: value}
    return found


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", "+1e-4"])
def test_scientific_notation_is_a_number(tmp_path: Path, text: str) -> None:
    assert read_config(write(tmp_path, f"train:\n  lr: {text}\n")).train.lr == 1e-4
    assert read_config(write(tmp_path, "seed: 0"), ["--train.lr", text]).train.lr == 1e-4


@pytest.mark.parametrize("text", ["false", "False", "no"])
def test_false_is_off(tmp_path: Path, text: str) -> None:
    assert read_config(write(tmp_path, f"augment:\n  flip: {text}\n")).augment.flip is False
    assert read_config(write(tmp_path, "augment:\n  flip: true\n"), ["--augment.flip", text]).augment.flip is False


def test_command_line_overrides_file_overrides_default(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 3\ntrain:\n  epochs: 7\n  batch_size: 9\n")
    config = read_config(path, ["--train.epochs", "8"])
    assert (config.seed, config.train.epochs, config.train.batch_size, config.train.lr) == (3, 8, 9, 1e-3)


def test_sizes_may_be_numbers_or_pairs(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, "data:\n  image_size: [24, 48]\nmodel:\n  patch_size: 4\n"))
    assert (config.data.image_size, config.model.patch_size) == ((24, 48), 4)
    assert read_config(write(tmp_path, "seed: 0"), ["--data.image_size", "[24, 48]"]).data.image_size == (24, 48)


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("train:\n  lrr: 1", [], "train.lr?"),
        ("lr: 1", [], "train.lr?"),
        ("trian:\n  lr: 1", [], "'trian.lr'"),
        ("train:\n  data:\n    kind: fake", [], "'train' does not accept"),
        ("seed: 0", ["--train.lrr", "1"], "train.lr?"),
        ("seed: 0", ["--lr=1"], "train.lr?"),
        ("seed: 0", ["--train.split_seed", "1"], "data.split_seed?"),
        ("seed: 0", ["--train.epoch", "9"], "train.epochs?"),
        ("train:\n  lr: abc", [], "train.lr"),
        ("train:\n  lr: true", [], "train.lr"),
        ("train:\n  epochs: 1.5", [], "train.epochs"),
        ("train:\n  compile: 3", [], "train.compile"),
        ("data:\n  kind: mnist", [], "digits"),
        ("train:\n  optimizer: sgd", [], "train.optimizer"),
        ("train:\n  budget_pflop: much", [], "train.budget_pflop"),
        ("data:\n  root: [a, b]", [], "data.root"),
        ("train:\n  betas: [0.9]", [], "train.betas"),
        ("train: [a", [], "parsing"),
        ("hello", [], "no fields"),
        ("", [], "no fields"),
        ("train:", [], "no fields"),
        (b"\xff\xfe", [], "utf-8"),
        ("seed: 0", ["--train.epochs"], "train.epochs"),
    ],
)
def test_wrong_input_exits_with_status_2_and_names_the_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes, overrides: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        read_config(write(tmp_path, text), overrides)
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert expected in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train:\n  lr: null", "train.lr has no value"),
        ("train:\n  lr:", "train.lr has no value"),
        ("train: 3", "train=3 is not a section"),
        ("seed: -1", "seed=-1"),
        ("train:\n  epochs: 0", "train.epochs=0"),
        ("train:\n  batch_size: 0", "train.batch_size=0"),
        ("train:\n  lr: -1.0", "train.lr=-1.0"),
        ("train:\n  lr: .inf", "train.lr=inf"),
        ("train:\n  min_lr: 1.0", "train.min_lr=1.0"),
        ("train:\n  warmup_epochs: 100", "train.warmup_epochs=100"),
        ("train:\n  budget_pflop: 0.0", "train.budget_pflop=0.0 is out of range; it must be above 0, or null"),
        ("train:\n  budget_pflop: -1e-3", "train.budget_pflop=-0.001"),
        ("train:\n  budget_pflop: .inf", "train.budget_pflop=inf"),
        ("train:\n  budget_pflop: .nan", "train.budget_pflop=nan"),
        ("train:\n  muon_lr: -0.1", "train.muon_lr=-0.1"),
        ("train:\n  muon_lr: .nan", "train.muon_lr=nan"),
        ("train:\n  optimizer: muon\n  lr: 0.0\n  min_lr: 0.0", "train.lr=0 leaves nothing to train"),
        ("train:\n  ema_decay: 1.0", "train.ema_decay=1.0"),
        ("train:\n  label_smoothing: 1.0", "train.label_smoothing=1.0"),
        ("train:\n  betas: [0.9, 1.0]", "train.betas[1]=1.0"),
        (
            "train:\n  sharded: true\n  optimizer: muon",
            "train.optimizer=muon can't be combined with train.sharded",
        ),
        ("train:\n  sharded: true\n  ema_decay: 0.9", "train.ema_decay=0.9 can't be combined with train.sharded=true"),
        ("train:\n  sharded: true\n  compile: true", "train.compile=True can't be combined with train.sharded=true"),
        ("train:\n  sharded: true\n  precision: fp16", "train.precision=fp16 can't be combined with train.sharded"),
        ("data:\n  hold_out: 1.0", "data.hold_out=1.0"),
        ("data:\n  workers: -1", "data.workers=-1"),
        ("augment:\n  erase: 1.5", "augment.erase=1.5"),
        ("augment:\n  magnitude: 31", "augment.magnitude=31"),
        ("augment:\n  min_crop_area: 0.0", "augment.min_crop_area=0.0"),
        ("model:\n  dropout: 1.0", "model.dropout=1.0"),
        ("augment:\n  policy: randaugment\ndata:\n  mode: RGBA", "augment.policy=randaugment"),
        ("model:\n  dim: -4", "model.dim=-4"),
        ("task: null", "task has no value; remove the line to use the default (classification)"),
        ("task: translation", "task='translation' is unknown; choose from classification, sequence"),
        ("task: [sequence]", "task=['sequence'] is unknown"),
    ],
)
def test_values_out_of_range_are_refused_by_name(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        read_config(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: -1", "seed=-1"),
        ("model:\n  dim: -4", "model.dim=-4"),
        ("model:\n  dropout: 1.0", "model.dropout=1.0"),
        ("data:\n  symbols: 0", "data.symbols=0"),
        ("data:\n  longest: 0", "data.longest=0"),
        ("data:\n  longest: 127", "data.longest=127 symbols with start and end exceed data.max_length=128 tokens"),
        ("data:\n  count: 0", "data.count=0"),
        ("data:\n  max_length: 1", "data.max_length=1"),
        ("data:\n  kind: text\n  source: de", "data.source='de' and data.target='de' are the same"),
        ("data:\n  test:", "data.test has no value"),
        ("decode:\n  beams: 0", "decode.beams=0"),
        ("decode:\n  length_penalty: -0.5", "decode.length_penalty=-0.5"),
        ("train:\n  batch_tokens: 127", "train.batch_tokens=127 has no room for a sequence of data.max_length=128"),
        ("train:\n  label_smoothing: 1.0", "train.label_smoothing=1.0"),
        ("train:\n  epochs: 0", "train.epochs=0"),
        ("train:\n  warmup_epochs: 100", "train.warmup_epochs=100"),
        ("decode: 3", "decode=3 is not a section"),
    ],
)
def test_values_of_sequences_out_of_range_are_refused_by_name(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        read_config(write(tmp_path, f"task: sequence\n{text}"))


@pytest.mark.parametrize("task", ["classification", "sequence"])
def test_budgets_and_optimizers_are_fields_of_both_tasks(tmp_path: Path, task: str) -> None:
    defaults = read_config(write(tmp_path, f"task: {task}")).train
    assert (defaults.budget_pflop, defaults.optimizer, defaults.muon_lr) == (None, "adamw", 0.01)
    config = read_config(
        write(tmp_path, f"task: {task}\ntrain:\n  budget_pflop: 1e-7\n  optimizer: muon\n  muon_lr: 0\n")
    )
    assert (config.train.budget_pflop, config.train.optimizer, config.train.muon_lr) == (1e-7, "muon", 0.0)
    assert read_config(write(tmp_path, to_yaml(config))) == config
    assert build_from_dict(type(config), to_dict(config)) == config
    assert read_config(write(tmp_path, f"task: {task}"), ["--train.budget_pflop", "3"]).train.budget_pflop == 3.0
    before = dataclasses.replace(config, train=dataclasses.replace(config.train, budget_pflop=None, optimizer="adamw"))
    assert differences(before, config) == {"train.budget_pflop": (None, 1e-7), "train.optimizer": ("adamw", "muon")}
    for text in ("budget_pflop: -1.0", "budget_pflop: .nan", "muon_lr: -1.0"):
        with pytest.raises(ValueError, match=f"train.{text.split(':')[0]}="):
            read_config(write(tmp_path, f"task: {task}\ntrain:\n  {text}"))


def test_with_a_budget_the_number_of_epochs_does_not_limit_the_warm_up(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, "train:\n  budget_pflop: 1.0\n  epochs: 3\n  warmup_epochs: 7\n"))
    assert (config.train.epochs, config.train.warmup_epochs) == (3, 7.0)


@pytest.mark.parametrize(
    "text", ["optimizer: adamw\n  lr: 0\n  min_lr: 0", "optimizer: muon\n  lr: 1e-12\n  min_lr: 0"]
)
def test_a_learning_rate_of_nothing_is_for_adamw_alone(tmp_path: Path, text: str) -> None:
    assert read_config(write(tmp_path, f"train:\n  {text}")).train.lr in (0, 1e-12)


def test_limits_of_sequences_are_allowed(tmp_path: Path) -> None:
    text = "task: sequence\ndata:\n  longest: 126\n  source: de\ntrain:\n  batch_tokens: 128\n"
    config = read_config(write(tmp_path, text))
    assert (config.data.longest, config.train.batch_tokens, config.data.test) == (126, 128, ["test"])
    assert read_config(write(tmp_path, text), ["--data.test", "[a, b]"]).data.test == ["a", "b"]


def test_the_task_chooses_the_configuration_command_line_before_the_last_file_that_has_one(tmp_path: Path) -> None:
    sequence, image = tmp_path / "sequence.yaml", tmp_path / "image.yaml"
    sequence.write_text("task: sequence\nseed: 1\n")
    image.write_text("seed: 2\n")
    for arguments, cls in (
        ([], ClassificationConfig),
        (["--config", str(image)], ClassificationConfig),
        (["--config", str(sequence)], SequenceConfig),
        ([f"--config={sequence}"], SequenceConfig),
        (["--config", str(sequence), "--config", str(image)], SequenceConfig),
        (["--task", "sequence", "--config", str(image)], SequenceConfig),
        (["--task=classification", "--config", str(sequence)], ClassificationConfig),
        (["--task", "sequence", "--help", "--model.dim", "3"], SequenceConfig),
    ):
        assert config_class(arguments) is cls, arguments
    assert type(read_config(sequence)) is SequenceConfig
    assert type(read_config(image, ["--task", "sequence"])) is SequenceConfig
    with pytest.raises(ValueError, match="task='translation' is unknown; choose from classification, sequence"):
        config_class(["--task", "translation", "--config", str(sequence)])


def test_fields_of_another_task_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, name in (
        ("task: sequence\nmodel:\n  patch_size: 4", "patch_size"),
        ("task: sequence\naugment:\n  flip: true", "augment"),
        ("decode:\n  beams: 3", "decode"),
        ("train:\n  batch_tokens: 100", "batch_tokens"),
    ):
        with pytest.raises(SystemExit) as stop:
            read_config(write(tmp_path, text))
        assert stop.value.code == 2
        assert name in capsys.readouterr().err


def test_configurations_of_two_tasks_differ_in_their_task(tmp_path: Path) -> None:
    image, sequence = (read_config(write(tmp_path, f"task: {task}")) for task in ("classification", "sequence"))
    assert differences(image, sequence) == {"task": ("classification", "sequence")}
    assert differences(sequence, image) == {"task": ("sequence", "classification")}
    assert differences(sequence, sequence) == {}


def test_a_sequence_configuration_survives_yaml_and_dictionaries(tmp_path: Path) -> None:
    text = "task: sequence\ndata:\n  kind: text\n  test: [a, b]\ntrain:\n  betas: [0.5, 0.6]\ndecode:\n  beams: 2\n"
    config = read_config(write(tmp_path, text))
    assert read_config(write(tmp_path, to_yaml(config))) == config
    assert build_from_dict(SequenceConfig, to_dict(config)) == config
    assert to_dict(config)["data"]["test"] == ["a", "b"]


@pytest.mark.parametrize("cls", [ClassificationConfig, SequenceConfig])
@pytest.mark.parametrize("stored", [None, 3, "text", [1], {"train": None}, {"train": 3}, {"nothing": 1}])
def test_a_stored_configuration_that_is_none_is_refused(cls: type, stored: object) -> None:
    with pytest.raises(ValueError, match=r"can't be used|not a section"):
        build_from_dict(cls, stored)  # type: ignore[type-var, arg-type]


def test_nan_is_no_number(tmp_path: Path) -> None:
    with pytest.raises((ValueError, SystemExit)):
        read_config(write(tmp_path, "train:\n  lr: .nan"))


def test_a_configuration_survives_yaml_and_dictionaries(tmp_path: Path) -> None:
    config = read_config(
        write(
            tmp_path,
            "seed: 5\ndata:\n  image_size: [8, 16]\ntrain:\n  lr: 1e-5\n  min_lr: 1e-7\n  checkpoint_every: 4\n",
        )
    )
    assert read_config(write(tmp_path, to_yaml(config))) == config
    assert build_from_dict(ClassificationConfig, to_dict(config)) == config
    assert yaml.safe_load(to_yaml(config))["train"]["lr"] == 1e-5  # a number to plain YAML readers too


def test_a_stored_configuration_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValueError, match="lrr"):
        build_from_dict(ClassificationConfig, {"train": {"lrr": 1.0}})


def test_differences_names_changed_fields_and_forgives_those_without_effect(tmp_path: Path) -> None:
    before = read_config(write(tmp_path, "seed: 0"))
    now = read_config(write(tmp_path, "seed: 1\ndevice: cpu\ntrain:\n  lr: 0.5\n  log_every: 3\n"))
    assert differences(before, now) == {"seed": (0, 1), "train.lr": (1e-3, 0.5)}
    assert set(leaves(before)) >= FREE_TO_CHANGE


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configurations_are_valid_and_say_how_they_were_measured(path: Path) -> None:
    read_config(path)
    header = path.read_text().split("\nmodel:")[0]
    assert "python train.py --config configs/" + path.name in header
    assert "seed" in header
    assert "torch" in header


HELP = {
    ClassificationConfig: ["train"],
    SequenceConfig: ["train", "--task", "sequence"],
    EvaluateConfig: ["evaluate"],
    TranslateConfig: ["translate"],
    ExportConfig: ["export"],
    ProfileConfig: ["profile"],
}


@pytest.mark.parametrize("cls", HELP)
def test_every_field_is_documented_in_help(cls: type, capsys: pytest.CaptureFixture[str]) -> None:
    from vit_scratch import cli

    with pytest.raises(SystemExit) as stop:
        cli.main([*HELP[cls], "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for name in leaves(cls()):
        part = text.split(f"  --{name} ", 1)[1].split("\n  --", 1)[0]
        words = part.split("(type:")[0].split()
        assert len(words) >= 4, f"{name} has no explanation: {part}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n  lr: 0.1\ndata: {kind: digits}\ntrain:\n  epochs: 7\n", "gives train twice, in lines 1 and 4"),
        ("train:\n  lr: 0.1\n\n  lr: 0.1\n", "gives train.lr twice, in lines 2 and 4; put them together"),
        ("seed: 1\nseed: 2\n", "gives seed twice, in lines 1 and 2"),
        ("seed: &a [1]\ntrain:\n  lr: *a\n", r"config.yaml, line 3: \*a stands for another part; write that part out"),
        ("seed: &a [*a]\n", r"line 1: \*a stands for another part"),
        ("seed: " + "[" * 100_000, "line 1: more than 20 lists or sections stand in each other"),
    ],
)
def test_fields_that_are_given_twice_and_traps_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(write(tmp_path, text))
