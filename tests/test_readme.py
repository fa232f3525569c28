"""The README's examples run, and print what it says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from examples import Example, blocks, examples, run

from vit_scratch import cli

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()

NAMES = ["attention", "vision", "backbone", "detector", "encoder_decoder", "generation", "conversion", "timm"]


@pytest.mark.parametrize("example", examples(TEXT), ids=NAMES)
def test_import_examples_print_what_their_comments_say(example: Example) -> None:
    assert run(example, "README.md", {}) == example.stated
    assert example.stated


def test_train_and_evaluate_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [line for block in blocks(TEXT, "bash") for line in block.splitlines()]
    train = next(c for c in commands if c.startswith("python train.py --config configs/digits.yaml"))
    evaluate = next(c for c in commands if c.startswith("python evaluate.py"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    assert cli.main(["train", *shlex.split(train)[2:], "--train.epochs", "2", "--train.warmup_epochs", "1"]) == 0
    assert cli.main(["evaluate", *shlex.split(evaluate)[2:]]) == 0
    assert (tmp_path / "result.json").exists()


def test_every_train_example_names_a_configuration_that_is_there_and_is_valid() -> None:
    from vit_scratch.config import ClassificationConfig, Parser, add_config, build, parse, read_config

    def add(parser: Parser) -> Parser:
        add_config(parser, ClassificationConfig)
        return parser

    commands = [shlex.split(line) for block in blocks(TEXT, "bash") for line in block.splitlines()]
    trains = [c for c in commands if c[:2] == ["python", "train.py"]]
    assert len(trains) >= 3
    for command in trains:
        if "--config" in command:
            overrides = command[4 : command.index("--out")]
            read_config(ROOT / command[command.index("--config") + 1], overrides)
        else:
            overrides = command[2 : command.index("--out")]
            build(ClassificationConfig, parse(add(Parser()), overrides))


def test_the_error_example_is_what_the_command_prints() -> None:
    command, message = re.search(r"^\$ (python train.py .*)\n(.*)$", TEXT, re.MULTILINE).groups()  # type: ignore[union-attr]
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (2, message)


def test_the_architecture_section_names_every_file_of_the_package() -> None:
    section = TEXT.split("## How it is built")[1]
    for path in (ROOT / "vit_scratch").rglob("*.py"):
        if path.stem not in ("__init__", "initialisation", "interrupt", "device", "provenance"):
            assert re.search(rf"\b{path.stem}\b", section), path
