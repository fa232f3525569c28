"""The training loop, whole and flat: what happens in an update, at the end of an epoch, and when a run goes on."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import islice
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from vit_scratch.training import distributed
from vit_scratch.training.checkpoint import TrainingStates
from vit_scratch.training.compute import PETA
from vit_scratch.training.ema import ExponentialMovingAverage
from vit_scratch.training.interrupt import Interrupt
from vit_scratch.training.log import Row, RunLog

Loss = Callable[[nn.Module, Any, Any], tuple[Tensor, Tensor]]
"""(model, inputs, targets) -> sum of the loss over the batch's items, and how many of them are predicted right. Of a
batch that is divided among several processes it gets this one's part, which may be empty."""

Validate = Callable[[nn.Module], dict[str, float]]
"""model -> its metrics on held-out data, the higher the better but for the loss."""

Adapt = Callable[[Any, float], Any]
"""(inputs, share of the updates that is done) -> the inputs that the model gets, such as images of another size."""

SaveWeights = Callable[[str, nn.Module, Row], None]
"""(name, model, metrics of the epoch): write the model's weights as a file of that name."""


class Batches(Protocol):
    """Where training batches come from."""

    def __len__(self) -> int:
        """Batches in an epoch."""

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Any, Any, int]]:
        """Inputs, targets and number of items of each batch of an epoch, from batch number `start` on.

        Where several processes train together, inputs and targets are this one's part; the number is that of all.
        """

    def shapes(self) -> Iterator[tuple[Any, Any, int]]:
        """What batches an epoch consists of: inputs and targets without data, on the meta device, and how many."""


RECENT = 100
"""So many updates are written down where a training can't go on."""


class NonFiniteError(RuntimeError):
    """The loss or the gradient is no longer a finite number."""


@dataclass
class Progress:
    """Where a run stands."""

    update: int = 0  # updates done
    epoch: int = 0  # epochs done
    batch: int = 0  # batches of this epoch done
    loss: float = 0.0  # sums over this epoch
    correct: int = 0
    count: int = 0
    skipped: int = 0  # updates of this epoch that were left out, as they overflowed
    seconds: float = 0.0  # spent on this epoch's updates
    best: float = -math.inf  # held-out metric of the best weights
    operations: int = 0  # floating-point operations of all updates


def fit(
    model: nn.Module,
    loader: Batches,
    loss: Loss,
    validate: Validate | None,
    optimizers: list[torch.optim.Optimizer],
    schedule: Callable[[int], float],
    *,
    updates: int,
    accumulate: int,
    clip_norm: float,
    precision: torch.dtype,
    device: torch.device,
    ema: ExponentialMovingAverage | None,
    operations: Callable[[Any, Any], int],
    adapt: Adapt | None,
    log: RunLog,
    states: TrainingStates,
    state: dict[str, Any] | None,
    save_weights: SaveWeights,
    checkpoint_every: int | None,
    log_every: int,
    train_name: str = "train",
    select: str = "accuracy",
) -> int | None:
    """Train a model.

    Args:
        model, loader, loss, validate: as their types say; validate is None where nothing is held out.
        optimizers: each for parameters of its own; a group's learning rate is the schedule's times its `lr_ratio`, if
            it has one.
        schedule: learning rate of an update, counted from 1.
        updates: how many there are; the last epoch ends with the last of them.
        accumulate: batches per update; the gradient is the mean over all their items, also in a last, smaller window.
        clip_norm: largest norm of the gradient, 0 for any.
        precision: type of the forward pass; fp16 comes with loss scaling, and updates that overflow are skipped and
            counted, in the metrics of the epoch.
        device: of model and batches.
        ema: running average of the weights, evaluated and saved beside them.
        operations: counts the floating-point operations of training on a batch of inputs and targets.
        adapt: what happens to the inputs of each batch, which changes in the course of the training; None for nothing.
        log, states, save_weights: where things are written.
        state: what `states` last saved, to go on from there; None to start.
        checkpoint_every: updates between two saved states, on top of one at the end of each epoch; None for none.
        log_every: updates between two readings of the loss from the device.
        train_name: what the metrics on training batches begin with, for where these are no ordinary ones.
        select: the held-out metric that the best weights are chosen by.

    Returns:
        None when training is complete, or the number of the signal that stopped it, after its state was saved.

    Raises:
        NonFiniteError: a loss or a gradient that is not finite; nothing is saved from then on.
        SaveError: a file that could not be written.
    """
    scaler = torch.amp.GradScaler(device.type, enabled=precision is torch.float16)
    progress = Progress() if state is None else restore(state, model, optimizers, scaler, ema, device, states)
    # Loss and correct in this process, gradient norm, count in all and operations in this one, of recent updates.
    pending: list[tuple[Tensor, Tensor, Tensor, int, int]] = []
    recent: deque[Row] = deque(maxlen=RECENT)
    parameters = [p for p in model.parameters() if p.requires_grad]
    network = distributed.replicate(model, device)
    processes = distributed.process()[1]

    def dump(fault: str) -> NoReturn:
        """Write what is known about a training that can't go on, and stop it."""
        broken = [n for n, p in model.named_parameters() if not distributed.own_part(p).isfinite().all()]
        # JSON knows no NaN.
        rows = [{k: v if math.isfinite(v) else str(v) for k, v in row.items()} for row in recent]
        path = log.write("nonfinite.json", {"fault": fault, "parameters": broken, "updates": rows})
        raise NonFiniteError(
            f"{fault}. {path} has the last updates and the parameters that are not finite now. The last good state is "
            "kept; lower train.lr, lengthen train.warmup_epochs or set train.clip_norm, and start anew"
        )

    def settle() -> None:
        """Read the recent updates' losses from the device, in one go: each reading makes the device wait."""
        if not pending:
            return
        columns = [torch.stack(column) for column in zip(*(p[:3] for p in pending), strict=True)]
        losses, corrects, norms = (column.tolist() for column in (*map(distributed.total, columns[:2]), columns[2]))
        counts = [p[3] for p in pending]
        for back, (value, norm, count) in enumerate(zip(losses, norms, counts, strict=True)):
            if scaler.is_enabled() and not math.isfinite(norm):
                progress.skipped += 1
                continue
            update = progress.update - len(pending) + back + 1
            recent.append({"update": update, "loss": value / count, "gradient_norm": norm, "lr": schedule(update)})
            if not (math.isfinite(value) and math.isfinite(norm)):
                what = "gradient" if math.isfinite(value) else "loss"
                dump(
                    f"the {what} is not finite at update {update}, epoch {progress.epoch + 1}: loss "
                    f"{value / count:.4g}, gradient norm {norm:.4g}, learning rate {schedule(update):.4g}"
                )
            progress.loss += value  # one by one: the sum must not depend on where a run was interrupted
            progress.correct += int(corrects[back])
            progress.count += count
        progress.operations += int(distributed.total(torch.tensor(sum(p[4] for p in pending))))
        pending.clear()

    def save() -> None:
        settle()
        if distributed.is_sharded(model):
            from vit_scratch.training import shards  # late: torch's part of it takes a second

            shards.save(states.shards(progress.update), model, optimizers)
        state = capture(progress, model, optimizers, scaler, ema, device)
        if distributed.is_first():
            states.save(progress.update, state)
        distributed.wait()  # a file that is being replaced is read by nobody

    with Interrupt() as interrupt:
        while progress.update < updates or progress.batch:  # the last epoch may lack nothing but its end
            model.train()
            batches = loader.batches(progress.epoch, progress.batch)
            rate = schedule(progress.update or 1)
            began, before = time.perf_counter(), progress.seconds
            while progress.update < updates and (window := list(islice(batches, accumulate))):
                rate = schedule(progress.update + 1)
                for group in (g for optimizer in optimizers for g in optimizer.param_groups):
                    group["lr"] = rate * group.get("lr_ratio", 1.0)
                items = sum(count for _, _, count in window)
                parts, computed = [], 0
                for number, (inputs, targets, _) in enumerate(window, 1):
                    if adapt is not None:
                        inputs = adapt(inputs, progress.update / updates)
                    with distributed.add_gradients(network, number == len(window)):
                        with torch.autocast(device.type, precision, enabled=precision is not torch.float32):
                            value, correct = loss(network, inputs, targets)
                        # Over several processes gradients are averaged; this makes it their sum over all items.
                        scaler.scale(value / (items / processes)).backward()
                    computed += operations(inputs, targets)
                    parts.append((value.detach(), correct))
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                norm = distributed.put_together(nn.utils.clip_grad_norm_(parameters, clip_norm or math.inf))
                # Under fp16 an update that overflows is left out as a whole, not by those optimizers that it concerns.
                if not scaler.is_enabled() or math.isfinite(norm):
                    for optimizer in optimizers:
                        scaler.step(optimizer)
                    if ema is not None:
                        ema.update(model)
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=True)
                scaler.update()
                value, correct = (reduce(torch.add, column) for column in zip(*parts, strict=True))
                pending.append((value, correct, norm.detach(), items, computed))
                progress.update += 1
                progress.batch += len(window)
                if scaler.is_enabled() and scaler.get_scale() < 1:
                    settle()
                    dump(f"the gradient is not finite at update {progress.update} however small the loss is scaled")
                progress.seconds = before + time.perf_counter() - began

                if progress.update % log_every == 0:
                    settle()
                    log.progress(progress.update, progress.epoch + 1, rate, train_metrics(progress, train_name))
                if checkpoint_every and progress.update % checkpoint_every == 0:
                    save()
                if stop := distributed.highest(interrupt.signal or 0):
                    save()
                    return stop

            settle()
            row: Row = {"epoch": progress.epoch + 1, "update": progress.update, "lr": rate}
            row |= train_metrics(progress, train_name) | {"pflop": progress.operations / PETA}
            if scaler.is_enabled():
                row[f"{train_name}_skipped_updates"] = progress.skipped
            better = False
            if validate is not None:
                metrics = validate(model)
                row |= {f"val_{k}": v for k, v in metrics.items()}
                better = metrics[select] > progress.best
                progress.best = max(progress.best, metrics[select])
            if validate is not None and ema is not None:
                row |= {f"ema_val_{k}": v for k, v in validate(ema.model).items()}
            log.add(row)
            save_weights("last", model, row)
            if better:
                save_weights("best", model, row)
            if ema is not None:
                save_weights("ema", ema.model, row)
            progress = Progress(
                update=progress.update, epoch=progress.epoch + 1, best=progress.best, operations=progress.operations
            )
            save()
    return None


def train_metrics(progress: Progress, name: str) -> Row:
    """Mean loss, accuracy and speed over this epoch so far."""
    count = max(progress.count, 1)
    return {
        f"{name}_loss": progress.loss / count,
        f"{name}_accuracy": progress.correct / count,
        "items_per_second": progress.count / max(progress.seconds, 1e-9),
        "seconds": progress.seconds,
    }


def capture(
    progress: Progress,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    ema: ExponentialMovingAverage | None,
    device: torch.device,
) -> dict[str, Any]:
    """Everything that `restore` needs to go on as if nothing had happened: tensors and plain Python values.

    Weights and optimizer state of a sharded model are not among it.
    """
    sharded = distributed.is_sharded(model)
    return {
        "progress": asdict(progress),
        "model": None if sharded else model.state_dict(),
        "optimizers": None if sharded else [optimizer.state_dict() for optimizer in optimizers],
        "scaler": scaler.state_dict(),
        "ema": None if ema is None else ema.state_dict(),
        "random": distributed.gather(
            {
                "cpu": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
                "mps": torch.mps.get_rng_state() if device.type == "mps" else None,
            }
        ),
    }


def restore(
    state: dict[str, Any],
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    ema: ExponentialMovingAverage | None,
    device: torch.device,
    states: TrainingStates,
) -> Progress:
    """Put back what `capture` returned, and what `states` has in shards."""
    if distributed.is_sharded(model):
        from vit_scratch.training import shards

        shards.load(states.shards(state["progress"]["update"]), model, optimizers)
    else:
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    if scaler.is_enabled() and state["scaler"]:  # empty where the run began on a device without one
        scaler.load_state_dict(state["scaler"])
    if ema is not None:
        ema.load_state_dict(state["ema"])
    number = distributed.process()[0]
    if number < len(state["random"]):  # a process that was not there before keeps its first state
        random = state["random"][number]
        torch.set_rng_state(random["cpu"])
        if device.type == "cuda" and random["cuda"] is not None:
            torch.cuda.set_rng_state(random["cuda"], device)
        if device.type == "mps" and random["mps"] is not None:
            torch.mps.set_rng_state(random["mps"])
    return Progress(**state["progress"])
