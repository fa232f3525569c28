"""The command `vit-scratch train | evaluate`, which `train.py` and `evaluate.py` call too.

Exit status: 0 when done; 2 for input that can't work, before any work is done; 1 for what goes wrong later; 128 + the
signal's number when stopped by a signal. With VIT_SCRATCH_TRACEBACK=1 in the environment errors show where they arose.
"""

import os
import signal
import sys
from pathlib import Path

from vit_scratch.config import Config, EvaluateConfig, Parser, add_config, build, parse

USAGE = """usage: vit-scratch COMMAND ...

commands:
  train     train a Vision Transformer and report its accuracy
  evaluate  evaluate a trained model

vit-scratch COMMAND --help lists the fields of a command."""


def train(arguments: list[str], prog: str) -> int:
    """The command `train`; returns the exit status."""
    parser = Parser(prog=prog, description="Train a Vision Transformer; without --config on CIFAR-10.")
    add_config(parser, Config)
    parser.add_argument("--out", type=str, help="Folder of the run; runs/NAME for a configuration file NAME.yaml.")
    parser.add_argument(
        "--resume", action="store_true", help="Go on with the run in that folder, or start it where there is none."
    )
    values = parse(parser, arguments)
    name = Path(str(values.config[0])).stem if values.config else "cifar10"
    out = Path(values.out or f"runs/{name}")
    saved = out / "config.yaml"
    if values.resume and saved.exists() and not values.config:
        values = parse(parser, ["--config", str(saved), *arguments])
    config = build(Config, values)
    from vit_scratch.tasks import classification  # late: it takes seconds, which an error above need not wait for

    stopped = classification.train(config, out, resume=values.resume)
    if stopped is not None:
        print(f"stopped by {signal.Signals(stopped).name}, state saved; go on with: {prog} --out {out} --resume")
        return 128 + stopped
    return 0


def evaluate(arguments: list[str], prog: str) -> int:
    """The command `evaluate`; returns the exit status."""
    parser = Parser(prog=prog, description="Evaluate a trained model; needs nothing but its checkpoint.")
    parser.add_argument("checkpoint", type=str, help="Folder of a run (its last weights), or a .safetensors file.")
    parser.add_class_arguments(EvaluateConfig, None)
    values = parse(parser, arguments)
    config = build(EvaluateConfig, values)
    from vit_scratch.tasks import classification

    classification.evaluate(config, Path(values.checkpoint))
    return 0


COMMANDS = {"train": train, "evaluate": evaluate}


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
    print(f"{prog}: error: {message}", file=sys.stderr)
    return status
