"""Images per second of a model as it is, compiled, and exported with torch.export and to ONNX, and what it changes.

    pip install 'vit-scratch[export]'
    python benchmarks/export.py --out export.json

All forms take pixels, normalise them, and take their turns in one process, one at a time, in an order that changes from
round to round, so that whatever else the machine does hits them alike; what is compared are the times within a round.
On the CPU, float32 but for the 8-bit integers; the same number of threads for PyTorch and ONNX Runtime. A preset has
random weights.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from vit_scratch.data.loaders import ImageFormat
from vit_scratch.tasks.classifier import Classifier, read_classifier
from vit_scratch.tasks.export import ANY_BATCH, OnnxProgram, PixelClassifier, program_of, quantize, write_onnx
from vit_scratch.training.device import device_name, pick_device
from vit_scratch.training.provenance import versions
from vit_scratch.vision.vit import PRESETS, create_vit

SECONDS = 0.2
"""How long a turn takes at least, so that a single image is many passes."""


def read(name: str) -> Classifier:
    """A trained model, or that of a preset with random weights."""
    if name not in PRESETS:
        return read_classifier(name)[1]
    torch.manual_seed(0)
    model = create_vit(name).eval()
    return Classifier(model, [], ImageFormat("RGB", model.patch_embedding.image_size, "bicubic"), [0.5] * 3, [0.25] * 3)


def forms(name: str, folder: Path) -> tuple[dict[str, Callable[[torch.Tensor], torch.Tensor]], tuple[int, ...]]:
    """All forms of a model, the first as it is, and the shape of its images."""
    model = PixelClassifier(read(name))
    embedding = model.model.patch_embedding
    shape = (embedding.in_channels, *embedding.image_size)
    program = program_of(model, shape)
    sessions = []
    for file in (folder / "float.onnx", folder / "integers.onnx"):
        write_onnx(program, file, ["images"], ["logits"], ANY_BATCH, {})
        if file.stem == "integers":
            quantize(file)
        sessions.append(OnnxProgram(file))
    named: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "eager": model,
        "torch.compile": torch.compile(model),
        "torch.export": program.module(),
        "ONNX": sessions[0],
        "ONNX, 8-bit integers": sessions[1],
    }
    return named, shape


def measure(named: dict[str, Callable[[torch.Tensor], torch.Tensor]], images: torch.Tensor, rounds: int) -> list[Any]:
    """For each form images per second, its speed over the first's (median, lowest and highest), and its difference."""
    with torch.inference_mode():
        logits = {name: form(images) for name, form in named.items()}  # what is compiled is compiled now
        began = time.perf_counter()
        named["eager"](images)
        passes = max(round(SECONDS / (time.perf_counter() - began)), 1)
        times: dict[str, list[float]] = {name: [] for name in named}
        names = list(named)
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                began = time.perf_counter()
                for _ in range(passes):
                    named[name](images)
                times[name].append((time.perf_counter() - began) / passes)
    rows = []
    for name in names:
        speeds = [eager / its for eager, its in zip(times["eager"], times[name], strict=True)]
        rows.append(
            {
                "form": name,
                "images_per_second": len(images) / statistics.median(times[name]),
                "speed_over_eager": statistics.median(speeds),
                "range": [min(speeds), max(speeds)],
                "largest_difference": (logits[name] - logits["eager"]).abs().max().item(),
            }
        )
    return rows


def main() -> None:
    """Measure all models and batches, print them as a table, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["cifar10-tiny", "tiny_patch4_32"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, help="PyTorch's choice without")
    parser.add_argument("--out", type=Path)
    values = parser.parse_args()
    if values.threads:
        torch.set_num_threads(values.threads)
    device = device_name(pick_device("cpu"))
    print(f"{versions()}\n{device}, {values.rounds} rounds\n", flush=True)
    print(
        "| model | batch | form | images/s | speed over eager | largest difference of the logits |\n" + "|---" * 6 + "|"
    )
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for name in values.models:
            named, shape = forms(name, Path(folder))
            for batch in values.batches:
                images = torch.rand(batch, *shape, generator=torch.Generator().manual_seed(0))
                for row in measure(named, images, values.rounds):
                    cells.append({"model": name, "batch": batch} | row)
                    low, high = row["range"]
                    print(
                        f"| {name} | {batch} | {row['form']} | {row['images_per_second']:.0f} | "
                        f"{row['speed_over_eager']:.2f} ({low:.2f} to {high:.2f}) | {row['largest_difference']:.1e} |",
                        flush=True,
                    )
    if values.out:
        content = {"versions": versions(), "device": device, "rounds": values.rounds, "cells": cells}
        values.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
