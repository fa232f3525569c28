"""The command `vit-scratch COMMAND ...`, whose commands `USAGE` lists; `train.py` and `evaluate.py` call it too.

Exit status: 0 when done; 2 for input that can't work, before any work is done; 1 for what goes wrong later; 128 + the
signal's number when stopped by a signal. With VIT_SCRATCH_TRACEBACK=1 in the environment errors show where they arose.
"""

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

from vit_scratch.config import (
    FOR_IMAGES,
    TASKS,
    ConvertConfig,
    EvaluateConfig,
    ExportConfig,
    Parser,
    PredictConfig,
    ProfileConfig,
    TranslateConfig,
    add_config,
    build,
    config_class,
    parse,
    preview,
)

USAGE = """usage: vit-scratch COMMAND ...

commands:
  train      train a Vision Transformer, or an encoder-decoder on sequences, and report how good it is
  evaluate   evaluate a trained model
  predict    say what is on images, and what the model looks at
  translate  translate sentences with a trained model
  convert    turn a Vision Transformer of timm, torchvision or transformers into one of ours, or one of ours into theirs
  export     write a trained model as a program for ONNX Runtime or PyTorch, which needs nothing of this package
  profile    show what each part of a Vision Transformer costs, and how fast it is on this machine

vit-scratch COMMAND --help lists the fields of a command."""

TRAINED = (
    "Folder of a run (its last weights), a .safetensors file, a folder that save_pretrained wrote, weights of this "
    "package, or such as timm:vit_tiny_patch16_224."
)
"""What the commands say of a trained model that they take."""


def task_module(task: str) -> ModuleType:
    """The module of a task; late, as it takes seconds, which an error in the command line need not wait for."""
    return importlib.import_module(f"vit_scratch.tasks.{task}")


def train(arguments: list[str], prog: str) -> int:
    """The command `train`; returns the exit status."""
    known = preview(arguments)
    begun = Path(known.out or "runs/cifar10")
    if known.resume and not known.config and (begun / "config.yaml").exists():
        arguments = ["--config", str(begun / "config.yaml"), "--out", str(begun), *arguments]
    cls = config_class(arguments)
    parser = Parser(
        prog=prog,
        description="Train a Vision Transformer, without --config on CIFAR-10; or, with the task sequence, an "
        "encoder-decoder. --help lists the fields of the task in --config or --task.",
    )
    add_config(parser, cls)
    parser.add_argument(
        "--out",
        type=str,
        help="Folder of the run; runs/NAME for a configuration file NAME.yaml, runs/KIND for data of that kind.",
    )
    parser.add_argument(
        "--resume", action="store_true", help="Go on with the run in that folder, or start it where there is none."
    )
    values = parse(parser, arguments)
    config = build(cls, values)
    out = Path(values.out or f"runs/{Path(str(values.config[0])).stem if values.config else config.data.kind}")
    stopped = task_module(config.task).train(config, out, resume=values.resume)
    if stopped is not None:
        print(f"stopped by {signal.Signals(stopped).name}, state saved; go on with: {prog} --out {out} --resume")
        return 128 + stopped
    return 0


def evaluate(arguments: list[str], prog: str) -> int:
    """The command `evaluate`; returns the exit status."""
    parser = Parser(prog=prog, description="Evaluate a trained model; needs nothing but its checkpoint.")
    parser.add_argument(
        "checkpoint",
        type=str,
        help=TRAINED,
    )
    parser.add_class_arguments(EvaluateConfig, None)
    values = parse(parser, arguments)
    config = build(EvaluateConfig, values)
    from vit_scratch.tasks.run import check_folder, task_of

    check_folder("json", config.json)
    source = values.checkpoint
    task = task_of(source, list(TASKS))
    for name in FOR_IMAGES if task != "classification" else ():
        if getattr(config, name):
            raise ValueError(f"{name}={getattr(config, name)} is for models of images, and this is one for sequences")
    task_module(task).evaluate(config, source)
    return 0


def predict(arguments: list[str], prog: str) -> int:
    """The command `predict`; returns the exit status: 1 where an image can't be read."""
    parser = Parser(prog=prog, description="Say what is on images, with a trained classifier.")
    parser.add_argument(
        "images", nargs="*", type=str, help="Image files, and folders of them; without, a path a line of the input."
    )
    parser.add_argument("--json", action="store_true", help="Print an object of JSON for each image, a line each.")
    parser.add_class_arguments(PredictConfig, None)
    values = parse(parser, arguments)
    config = build(PredictConfig, values)
    return task_module("predict").predict(config, values.images or input_lines(), as_json=values.json)


def translate(arguments: list[str], prog: str) -> int:
    """The command `translate`; returns the exit status."""
    parser = Parser(prog=prog, description="Translate sentences with a trained model, a line each.")
    parser.add_argument("--checkpoint", type=str, required=True, help="Folder of a run, or a .safetensors file.")
    parser.add_argument("sentences", nargs="*", type=str, help="What to translate; without, the lines of the input.")
    parser.add_class_arguments(TranslateConfig, None)
    values = parse(parser, arguments)
    config = build(TranslateConfig, values)
    from vit_scratch.tasks.run import weights_file

    path = weights_file(Path(values.checkpoint))
    typed = not values.sentences and sys.stdin.isatty()  # someone waits for each line
    task_module("sequence").translate(config, path, values.sentences or input_lines(), 1 if typed else 64)
    return 0


def convert(arguments: list[str], prog: str) -> int:
    """The command `convert`; returns the exit status."""
    parser = Parser(
        prog=prog, description="Convert a Vision Transformer's weights from one library's form to another's."
    )
    parser.add_argument(
        "source",
        type=str,
        help="Folder of a run, file of weights, folder that save_pretrained, timm or transformers saved, weights of "
        "this package, or such as timm:vit_tiny_patch16_224, which are downloaded.",
    )
    parser.add_argument(
        "destination",
        type=str,
        help="What to write: a folder for timm and transformers, a .safetensors file for torchvision, and one or the "
        "other for vit_scratch.",
    )
    parser.add_class_arguments(ConvertConfig, None)
    values = parse(parser, arguments)
    config = build(ConvertConfig, values)
    task_module("convert").convert(config, values.source, Path(values.destination))
    return 0


def export(arguments: list[str], prog: str) -> int:
    """The command `export`; returns the exit status."""
    parser = Parser(prog=prog, description="Write a trained model as a program that runs without this package.")
    parser.add_argument(
        "source",
        type=str,
        help=TRAINED,
    )
    parser.add_argument(
        "destination",
        type=str,
        help="What to write: an .onnx file for ONNX Runtime, a .pt2 file for torch.export, or for a sequence model a "
        "folder with two .onnx files.",
    )
    parser.add_class_arguments(ExportConfig, None)
    values = parse(parser, arguments)
    config = build(ExportConfig, values)
    task_module("export").export(config, values.source, Path(values.destination))
    return 0


def profile(arguments: list[str], prog: str) -> int:
    """The command `profile`; returns the exit status."""
    parser = Parser(
        prog=prog, description="Show what each part of a Vision Transformer costs, and how fast it is here."
    )
    parser.add_argument(
        "source",
        type=str,
        help="A preset such as tiny_patch4_32, or a trained model: folder of a run, .safetensors file, folder that "
        "save_pretrained wrote, weights of this package, or such as timm:vit_tiny_patch16_224.",
    )
    parser.add_class_arguments(ProfileConfig, None)
    values = parse(parser, arguments)
    config = build(ProfileConfig, values)
    task_module("profile").profile(config, values.source)
    return 0


def input_lines() -> Iterator[str]:
    """The lines of the standard input. Raises ValueError at the first that is not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} of the input is not UTF-8 ({error.reason}); convert it first") from error


COMMANDS = {
    "train": train,
    "evaluate": evaluate,
    "predict": predict,
    "translate": translate,
    "convert": convert,
    "export": export,
    "profile": profile,
}


def main(arguments: list[str] | None = None, prog: str | None = None) -> int:
    """Run a command and turn what goes wrong into one message and an exit status.

    Args:
        arguments: the command's name and its arguments; those of the process where None.
        prog: how the command was called, for messages.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] not in COMMANDS:
        wanted = not arguments or arguments[0] in ("-h", "--help")
        if not wanted:
            print(f"vit-scratch: error: no command {arguments[0]!r}", file=sys.stderr)
        print(USAGE, file=None if wanted else sys.stderr)
        return 0 if wanted else 2
    prog = prog or f"vit-scratch {arguments[0]}"
    number = int(os.environ.get("RANK", 0))  # of several processes that torchrun has started the first one speaks
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere if number else sys.stdout):
        if os.environ.get("VIT_SCRATCH_TRACEBACK"):
            return COMMANDS[arguments[0]](arguments[1:], prog)
        try:
            return COMMANDS[arguments[0]](arguments[1:], prog)
        except ValueError as error:
            status, message = 2, str(error)
        except (OSError, RuntimeError) as error:
            status, message = 1, str(error)
        except KeyboardInterrupt:
            status, message = 130, "interrupted"
    # What can't work is the same for all processes of a machine.
    if status != 2 or int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"{prog}: error: {f'process {number}: ' if number else ''}{message}", file=sys.stderr)
    return status
