"""What a run tells: a progress bar or plain lines, metrics.jsonl and metrics.csv, and TensorBoard on request."""

import csv
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vit_scratch.training.checkpoint import replacing

Row = dict[str, Any]
"""Metrics of an epoch by name; None stands for a value that was not finite."""


class RunLog:
    """The log of a run.

    Args:
        folder: where the metrics files go.
        epochs, updates: how many the run has.
        items: what is counted in items per second, such as "images".
        start: updates done already; rows of later ones, from before an interruption, are dropped.
        tensorboard: also write TensorBoard files into `folder`/tensorboard.
        quiet: write and show nothing, where another process does.

    Attributes:
        rows: one row of metrics for each epoch so far.

    Raises:
        ValueError: TensorBoard is asked for and not installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        epochs: int,
        updates: int,
        items: str,
        start: int = 0,
        tensorboard: bool = False,
        quiet: bool = False,
    ):
        self.folder, self.epochs, self.updates, self.items, self.quiet = folder, epochs, updates, items, quiet
        self.rows: list[Row] = [r for r in read_rows(folder) if r["update"] <= start]
        self.writer: Any = None
        if tensorboard and not quiet:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError(
                    "train.tensorboard=true needs a package that is missing; pip install 'vit-scratch[tensorboard]'"
                ) from error
            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
        hidden = quiet or not sys.stderr.isatty()
        self.bar = tqdm(total=updates, initial=start, unit="update", dynamic_ncols=True, disable=hidden)
        self.spoke = time.monotonic()

    def progress(self, update: int, epoch: int, lr: float, metrics: Row) -> None:
        """Show where the run stands: in the bar, or without a terminal as a line at most every 15 seconds."""
        values = {
            "epoch": f"{epoch}/{self.epochs}",
            "loss": "/".join(f"{v:.3f}" for k, v in metrics.items() if k.endswith("_loss")),
            "acc": "/".join(f"{100 * v:.1f}%" for k, v in metrics.items() if k.endswith("_accuracy")),
            "lr": f"{lr:.2e}",
            f"{self.items}/s": f"{metrics['items_per_second']:.0f}",
        }
        self.bar.set_postfix(values, refresh=False)
        self.bar.update(update - self.bar.n)
        if self.bar.disable and time.monotonic() - self.spoke > 15:
            self.say(f"update {update}/{self.updates}  " + "  ".join(f"{k} {v}" for k, v in values.items()))

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        if self.quiet:
            return
        if self.bar.disable:
            print(text, flush=True)
        else:
            self.bar.write(text)
        self.spoke = time.monotonic()

    def add(self, row: Row) -> None:
        """Print the metrics of an epoch and add them to the files."""
        # A run that died after this epoch's row was written, and before its state was, writes it again.
        self.rows = [*(r for r in self.rows if r["update"] < row["update"]), row]
        if self.quiet:
            return
        with replacing(self.folder / "metrics.jsonl") as path:
            # JSON knows no NaN.
            clean = [{k: v if v is not None and math.isfinite(v) else None for k, v in r.items()} for r in self.rows]
            path.write_text("".join(json.dumps(r) + "\n" for r in clean))
        with replacing(self.folder / "metrics.csv") as path, open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(k for r in self.rows for k in r)))
            writer.writeheader()
            writer.writerows(self.rows)
        if self.writer is not None:
            for key, value in row.items():
                self.writer.add_scalar(key, value, row["update"])
            self.writer.flush()

        parts = [f"epoch {row['epoch']}/{self.epochs}"]
        for name in (key.removesuffix("_loss") for key in row if key.endswith("_loss")):
            accuracy = 100 * row[f"{name}_accuracy"]
            parts.append(f"{name.replace('_', ' ')} loss {row[f'{name}_loss']:.4f} accuracy {accuracy:.2f} %")
            others = [k for k in row if k.startswith(f"{name}_") and not k.endswith(("_loss", "_accuracy"))]
            parts[-1] += "".join(f" {k.removeprefix(name + '_').replace('_', ' ')} {row[k]:.4g}" for k in others)
        self.say("  ".join([*parts, f"{row['items_per_second']:.0f} {self.items}/s"]))

    def write(self, name: str, values: dict[str, Any]) -> Path:
        """Write plain values into a file of the run's folder, and return its path."""
        if not self.quiet:
            with replacing(self.folder / name) as path:
                path.write_text(json.dumps(values, indent=1) + "\n")
        return self.folder / name

    def close(self) -> None:
        """End the bar and the TensorBoard file."""
        self.bar.close()
        if self.writer is not None:
            self.writer.close()


def read_rows(folder: Path) -> list[Row]:
    """The rows in a run's metrics.jsonl, none where there is no such file."""
    path = folder / "metrics.jsonl"
    try:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); move it away to go on without its rows") from error
