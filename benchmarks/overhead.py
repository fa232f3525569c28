"""How much of a training's time is spent outside the model and its optimizer: on data, augmentation, logging, saving.

    python benchmarks/overhead.py --config configs/cifar10_0.03pf.yaml --data.kind imagefolder \\
        --data.root data/cifar10-jpeg --train.budget_pflop 0.002 --train.warmup_epochs 0

takes the options of train.py, trains in a folder that it throws away, and prints the share of each part. Inside are the
forward passes (also those on held-out images) with the loss, the backward passes, the clipping of the gradient and what
the optimizers do; all else from the first update to the last saved file is outside. Reading the images and the
evaluation on the test set come before and after that. CPU only: on a GPU the work is done after the calls return.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from vit_scratch import cli
from vit_scratch.tasks import classification, run
from vit_scratch.training.provenance import versions
from vit_scratch.vision.vit import VisionTransformer


class Stopwatch:
    """Seconds spent in some functions; what they call is theirs.

    Args:
        during: count only while this other one runs.
    """

    def __init__(self, during: "Stopwatch | None" = None):
        self.seconds: dict[str, float] = {}
        self.inside: str | None = None
        self.during = during

    @contextmanager
    def running(self, part: str) -> Iterator[None]:
        """Count this time as that of a part, unless it is part of another one already."""
        if self.inside is not None or (self.during is not None and self.during.inside is None):
            yield
            return
        self.inside, began = part, time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began
            self.inside = None

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time is counted."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self.running(part):
                return function(*args, **kwargs)

        return wrapper


def main() -> None:
    """Train, and print where the time went."""
    options = sys.argv[1:]
    if not options or "--help" in options:
        print(__doc__)
        return
    total = Stopwatch()
    inside = Stopwatch(during=total)
    functions: list[tuple[Any, str, Stopwatch, str]] = [
        (run, "fit", total, "total"),
        (VisionTransformer, "forward", inside, "forward"),
        (classification, "smoothed_cross_entropy", inside, "forward"),
        (torch.Tensor, "backward", inside, "backward"),
        (nn.utils, "clip_grad_norm_", inside, "optimizer"),
        (torch.amp.GradScaler, "step", inside, "optimizer"),
        (torch.optim.Optimizer, "zero_grad", inside, "optimizer"),
    ]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for owner, name, watch, part in functions:
            stack.enter_context(patch.object(owner, name, watch.timed(part, getattr(owner, name))))
        status = cli.main(["train", *options, "--device", "cpu", "--out", str(Path(folder) / "run")])
    if status:
        sys.exit(status)
    seconds = total.seconds["total"]
    outside = seconds - sum(inside.seconds.values())
    print(f"{versions()}\n{' '.join(options)}\n{torch.get_num_threads()} threads, {seconds:.1f} s of training")
    for part, value in [*inside.seconds.items(), ("outside", outside)]:
        print(f"  {part:<10} {100 * value / seconds:6.2f} %")


if __name__ == "__main__":
    main()
