"""What all tasks share: the folder of a run and its files, the call of the training loop, checkpoints."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vit_scratch.config import EvaluateConfig, TrainConfig, differences, read_config, to_dict, to_yaml
from vit_scratch.evaluation.plots import plot_curves
from vit_scratch.training import distributed
from vit_scratch.training.checkpoint import (
    TrainingStates,
    load_weights,
    read_description,
    replacing,
    save_weights,
)
from vit_scratch.training.compute import PETA, ComputeCounter
from vit_scratch.training.device import device_name
from vit_scratch.training.ema import ExponentialMovingAverage
from vit_scratch.training.log import Row, RunLog
from vit_scratch.training.loop import Adapt, Batches, Loss, Validate, fit
from vit_scratch.training.optimizer import make_optimizers
from vit_scratch.training.provenance import versions
from vit_scratch.training.schedule import SCHEDULES
from vit_scratch.vision.hub import PACKAGED
from vit_scratch.vision.matching import weight_differences


def open_run(config: Any, out: Path, resume: bool) -> TrainingStates:
    """The training states of a run's folder.

    Raises:
        ValueError: it is no folder, or holds a run that is not to be resumed, or one of another configuration.
    """
    refuse_file("--out", out)
    states, saved = TrainingStates(out / "states"), out / "config.yaml"
    if states.paths() and not saved.exists():
        raise ValueError(f"{states.folder} holds training states without {saved}; choose another --out")
    if saved.exists() and not resume:
        raise ValueError(f"--out={out} already holds a run; go on with it with --resume, or choose another --out")
    if saved.exists():
        changed = differences(read_config(saved), config)
        if changed:
            listed = "".join(f"\n  {k}: {a} then, {b} now" for k, (a, b) in changed.items())
            raise ValueError(
                f"{out} was started with another configuration, and a run goes on as it began:{listed}\n"
                "Leave these fields as they were, or start anew with another --out"
            )
    return states


def train_model(
    config: Any,
    out: Path,
    model: nn.Module,
    loader: Batches,
    loss: Loss,
    validate: Validate | None,
    *,
    states: TrainingStates,
    resume: bool,
    device: torch.device,
    precision: torch.dtype,
    items: str,
    about: list[str],
    description: dict[str, Any],
    adapt: Adapt | None = None,
    train_name: str = "train",
    select: str = "accuracy",
    layer_decay: float = 1.0,
    sharded: bool = False,
) -> tuple[int | None, dict[str, Any]]:
    """Train a model and write everything that a run's folder holds but the final evaluation.

    Args:
        config: of the task; its `train` says how.
        out: folder of the run.
        model: on its device, with its first weights.
        loader, loss, validate, device, precision, adapt, train_name, select: as `fit`.
        states: as `open_run` returned them, with their identity.
        resume: go on from the newest state.
        items: what is counted in items per second.
        about: lines on data and model to print.
        description: what goes into every weights file, beside configuration, versions and metrics.
        layer_decay: as `make_optimizers`.
        sharded: divide the model, which is still on the CPU, among all processes.

    Returns:
        None or the number of the signal that stopped the training, and what is known for the summary.

    Raises:
        ValueError: states that can't be gone on from.
        OSError, NonFiniteError: what can go wrong later, as `fit`.
    """
    state, faults = states.load() if resume else (None, [])
    distributed.wait()  # until all have looked into the folder; from now on the first process writes
    distributed.seed_apart(config.seed)
    train = config.train
    updates_per_epoch = math.ceil(len(loader) / train.accumulate)
    operations = ComputeCounter(model, loss)
    pflop_per_epoch = operations.mean(loader.shapes(), adapt) * len(loader) / PETA
    updates = plan_updates(train, updates_per_epoch, pflop_per_epoch)
    epochs = math.ceil(updates / updates_per_epoch)
    if sharded:
        model = distributed.shard(model, device)
    ema = ExponentialMovingAverage(model, train.ema_decay) if train.ema_decay else None
    optimizers = make_optimizers(
        model,
        muon_lr=train.muon_lr if train.optimizer == "muon" else None,
        lr=train.lr,
        betas=train.betas,
        weight_decay=train.weight_decay,
        layer_decay=layer_decay,
    )
    done = state["progress"]["update"] if state else 0
    writes = distributed.is_first()
    log = RunLog(
        out,
        epochs=epochs,
        updates=updates,
        items=items,
        start=done,
        tensorboard=train.tensorboard,
        quiet=not writes,
    )
    if writes:
        with replacing(out / "config.yaml") as path:
            path.write_text(to_yaml(config))
    log.say(to_yaml(config))
    parameters = sum(p.numel() for p in model.parameters())
    for line in [*[f"note: {fault}" for fault in faults], *about]:
        log.say(line)
    log.say(
        f"{parameters:,} parameters; {epochs} epochs, {updates} updates{f', {done} done' if done else ''}; "
        f"{device_name(device)}, {str(precision).removeprefix('torch.')}{in_processes()}"
    )
    used = versions()  # now: what is installed or committed while this runs has no part in it
    described = description | {"config": to_dict(config), "versions": used}

    def save(name: str, network: nn.Module, row: Row) -> None:
        weights = distributed.weights_of(network)
        if writes:
            save_weights(out / f"{name}.safetensors", weights, described | {"metrics": row})

    if train.compile:
        model.compile()
    try:
        stopped = fit(
            model,
            loader,
            loss,
            validate,
            optimizers,
            partial(
                SCHEDULES[train.schedule],
                updates=updates,
                warmup=round(train.warmup_epochs * updates_per_epoch),
                peak=train.lr,
                final=train.min_lr,
            ),
            updates=updates,
            accumulate=train.accumulate,
            clip_norm=train.clip_norm,
            precision=precision,
            device=device,
            ema=ema,
            operations=operations,
            adapt=adapt,
            log=log,
            states=states,
            state=state,
            save_weights=save,
            checkpoint_every=train.checkpoint_every,
            log_every=train.log_every,
            train_name=train_name,
            select=select,
        )
    finally:
        log.close()
    summary = {
        "command": sys.argv,
        "seed": config.seed,
        "parameters": parameters,
        "device": device_name(device) + in_processes(),
        "versions": used,
        "training_seconds": sum(r["seconds"] for r in log.rows),
        "pflop": log.rows[-1]["pflop"] if log.rows else 0.0,
        "last": log.rows[-1] if log.rows else None,
    }
    distributed.wait()  # until everything is written
    if stopped is None and writes:
        plot_curves(log.rows, out / "curves.png")
        print(f"curves: {out / 'curves.png'}")
    return stopped, summary


def in_processes() -> str:
    """How many processes train together, where there are several."""
    processes = distributed.process()[1]
    return f", {processes} processes" if processes > 1 else ""


def plan_updates(train: TrainConfig, updates_per_epoch: int, pflop_per_epoch: float) -> int:
    """How many updates the training has: as many as its epochs, or as its compute budget allows.

    Raises:
        ValueError: the warm-up leaves none of them.
    """
    if train.budget_pflop is None:
        updates, limit = train.epochs * updates_per_epoch, f"train.epochs={train.epochs}"
    else:
        updates = max(round(train.budget_pflop / pflop_per_epoch * updates_per_epoch), 1)
        limit = f"train.budget_pflop={train.budget_pflop}, which is {updates / updates_per_epoch:.3g} epochs"
    if round(train.warmup_epochs * updates_per_epoch) >= updates:
        raise ValueError(f"train.warmup_epochs={train.warmup_epochs} leaves nothing of {limit}; lower it")
    return updates


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write plain values into a file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def weights_file(checkpoint: Path) -> Path:
    """The weights file that a checkpoint is: itself, or the last weights in the folder of a run.

    Raises:
        ValueError: a folder without them.
    """
    path = checkpoint / "last.safetensors" if checkpoint.is_dir() else checkpoint
    if checkpoint.is_dir() and not path.exists():
        raise ValueError(f"{checkpoint} holds no last.safetensors; give the folder of a run, or a .safetensors file")
    return path


def is_checkpoint(source: str) -> bool:
    """Whether a source is one of our checkpoints, and no folder that some library saved and no name of weights."""
    path = Path(source)
    if path.is_dir():
        return not (path / "config.json").is_file()
    return path.exists() or not (source in PACKAGED or ":" in source)


def task_of(source: str, tasks: list[str]) -> str:
    """What a trained model is for; those that are no checkpoints of ours are for images.

    Raises:
        ValueError: a checkpoint that is not there, or for none of these tasks.
    """
    if not is_checkpoint(source):
        return "classification"
    path = weights_file(Path(source))
    task = read_description(path).get("task")
    if task not in tasks:
        raise ValueError(f"{path} holds a model for the task {task!r}; known are {', '.join(tasks)}")
    return task


def refuse_file(name: str, path: str | Path | None) -> None:
    """Raise ValueError where a folder that an option asks for is a file."""
    if path and Path(path).exists() and not Path(path).is_dir():
        raise ValueError(f"{name}={path} is a file; choose a folder")


def check_folder(option: str, path: str | None) -> None:
    """Raise ValueError where a file that an option asks for has no folder to go into."""
    if path and not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--{option}={path}: there is no folder {Path(path).absolute().parent}; make it first")


def refuse_overrides(config: EvaluateConfig, names: set[str], what: str) -> None:
    """Raise ValueError where one of these fields is given, as it does not apply to a model for `what`."""
    given = {f"{s}.{k}": v for s in ("data", "decode") for k, v in asdict(getattr(config, s)).items() if v is not None}
    for name in sorted(names & given.keys()):
        raise ValueError(f"{name}={given[name]} does not apply: the checkpoint is a model for {what}")


def load_model(
    path: Path, task: str, build: Callable[[dict[str, Any]], Any], needs: set[str]
) -> tuple[Any, dict[str, Any]]:
    """The model in a weights file, in eval mode on the CPU, and the file's description.

    Args:
        path: the file.
        task: what the model must be for.
        build: makes the model from the description.
        needs: what the description must hold.

    Raises:
        ValueError: a file that is not there, damaged, not ours, of another task, or whose weights are another model's.
    """
    weights, description = load_weights(path)
    if description.get("task") != task:
        raise ValueError(f"{path} holds a model for the task {description.get('task')!r}, not for {task!r}")
    missing_parts = needs - description.keys()
    if missing_parts:
        raise ValueError(
            f"{path} does not say everything about its model; missing are {', '.join(sorted(missing_parts))}"
        )
    try:
        model = build(description)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} describes a model that can't be built: {error}") from error
    if fault := weight_differences(weights, model.state_dict()):
        raise ValueError(f"{path} holds the weights of another model than it describes: {fault}")
    model.load_state_dict(weights)
    return model.eval(), description
