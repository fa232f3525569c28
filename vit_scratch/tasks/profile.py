"""The command profile: what each part of a Vision Transformer costs, and how fast it is on this machine.

Counts are those of torch's own counter, for one image; a multiply-add is two of its floating-point operations.
"""

import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vit_scratch.config import TASKS, ProfileConfig
from vit_scratch.tasks.classifier import read_classifier
from vit_scratch.tasks.run import check_folder, is_checkpoint, task_of, write_json
from vit_scratch.training.device import device_name, pick_device, pick_precision
from vit_scratch.training.provenance import versions
from vit_scratch.transformer.linear import linear
from vit_scratch.vision.vit import PRESETS, VisionTransformer, create_vit

SECONDS = 3.0
"""Steps are repeated until they have taken so long."""
FEWEST_STEPS = 5
"""And at least so often."""
TRAINING = 3
"""Operations of a training step, in forward passes: each product becomes two in the backward pass."""


@dataclass
class Part:
    """A part of a model.

    Attributes:
        name: as in the model; NAME.other for what a module has beside its parts.
        level: how deep it stands in the table; those of a level that follow a part are in it.
        parameters: number of its parameters.
        multiply_adds: of a forward pass for one image, in matrix products and convolutions.
        whole: whether no parts of it stand in the table, so that these add up to the total.
    """

    name: str
    level: int
    parameters: int
    multiply_adds: int
    whole: bool


def profile(config: ProfileConfig, source: str) -> None:
    """Print what the parts of a model cost, and its speed and memory on this machine.

    Args:
        config: what to measure on, and where figures are to be written.
        source: a preset, or as `read_classifier`.

    Raises:
        ValueError: a source that can't be read or is for sequences, or a device that is not there.
    """
    check_folder("json", config.json)
    device = pick_device(config.device)
    model = read_model(source)
    parts = model_parts(model)
    total = Part("total", 0, sum(p.numel() for p in model.parameters()), count_operations(model)[""] // 2, True)
    height, width = model.patch_embedding.image_size
    print(f"{source}: images of {height} x {width}, {model.num_classes} classes\n\n{table([*parts, total])}\n")
    precision = pick_precision("auto", device)
    peak = matrix_product_peak(device, precision)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    where = f"{device_name(device)}, {str(precision).removeprefix('torch.')}"
    print(f"weights {weights / 2**20:.2f} MiB; matrix products reach {peak / 1e9:.0f} GFLOP/s here ({where})")
    steps = measure(model, config.batch_size, device, precision)
    for name, operations in (("inference", 2 * total.multiply_adds), ("training", 2 * TRAINING * total.multiply_adds)):
        step = steps[name]
        step["share_of_peak"] = step["images_per_second"] * operations / peak
        print(
            f"{name}, batches of {config.batch_size}: {step['images_per_second']:.1f} images/s, "
            f"{100 * step['share_of_peak']:.0f} % of that; memory up to {step['peak_memory'] / 2**20:.1f} MiB"
        )
    if config.json:
        values = {
            "source": source,
            "image_size": [height, width],
            "parts": [asdict(part) for part in parts],
            "parameters": total.parameters,
            "multiply_adds": total.multiply_adds,
            "weights_bytes": weights,
            "batch_size": config.batch_size,
            "matrix_product_peak": peak,
            **steps,
            "device": where,
            "versions": versions(),
        }
        write_json(Path(config.json), values)


def read_model(source: str) -> VisionTransformer:
    """The model of a preset, with first weights, or a trained one. Raises ValueError for none, or one for sequences."""
    if source in PRESETS:
        return create_vit(source).eval()
    if is_checkpoint(source) and not Path(source).exists():
        raise ValueError(f"{source} is no file, folder or name of weights, and no preset; {', '.join(PRESETS)} are")
    if task_of(source, list(TASKS)) != "classification":
        raise ValueError(f"profile is for Vision Transformers, and {source} holds a model for sequences")
    return read_classifier(source)[1].model


def count_operations(model: VisionTransformer) -> dict[str, int]:
    """Operations of each module in a forward pass for one image, by name; "" is the whole model."""
    # The meta device has no data and no fused attention, in which the counter would not see the products.
    network = copy.deepcopy(model).to("meta").eval()
    embedding = model.patch_embedding
    images = torch.empty(1, embedding.in_channels, *embedding.image_size, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(images)
    root, counts = type(network).__name__, counter.get_flop_counts()
    found = {name.removeprefix(root).lstrip("."): sum(c.values()) for name, c in counts.items() if name != "Global"}
    return {"": counter.get_total_flops()} | {name: count for name, count in found.items() if name}


def model_parts(model: VisionTransformer) -> list[Part]:
    """The parts of a model in the order of their work; what is `whole` adds up to all of it."""
    operations = count_operations(model)

    def part(name: str, level: int) -> Part:
        parameters = sum(p.numel() for p in model.get_submodule(name).parameters())
        return Part(name, level, parameters, operations.get(name, 0) // 2, True)

    def expand(container: Part, parts: list[Part]) -> list[Part]:
        """A part, the parts in it, and what remains of it."""
        container.whole = False
        inside = [p for p in parts if p.level == container.level + 1]
        parameters = container.parameters - sum(p.parameters for p in inside)
        multiply_adds = container.multiply_adds - sum(p.multiply_adds for p in inside)
        other = Part(f"{container.name}.other".lstrip("."), container.level + 1, parameters, multiply_adds, True)
        return [container, *parts, *([other] if parameters or multiply_adds else [])]

    layers = []
    for i in range(model.encoder.depth):
        name = f"encoder.layers.{i}"
        layers += expand(part(name, 0), [part(f"{name}.{inner}", 1) for inner in ("attention", "feed_forward")])
    whole = Part("", -1, sum(p.numel() for p in model.parameters()), operations[""] // 2, True)
    return expand(whole, [part("patch_embedding", 0), *layers, part("head", 0)])[1:]


def table(parts: list[Part]) -> str:
    """Parts in lines: name, parameters, multiply-adds, and share of those of the last, which is the whole."""
    width = max(len(p.name) + 2 * p.level for p in parts)
    lines = [f"{'':<{width}}  {'parameters':>13}  {'multiply-adds':>15}  {'share':>7}"]
    for p in parts:
        name = "  " * p.level + (p.name.rpartition(".")[2] if p.level else p.name)
        share = 100 * p.multiply_adds / max(parts[-1].multiply_adds, 1)
        lines.append(f"{name:<{width}}  {p.parameters:>13,}  {p.multiply_adds:>15,}  {share:>5.1f} %")
    return "\n".join(lines)


def measure(
    model: VisionTransformer, batch_size: int, device: torch.device, precision: torch.dtype
) -> dict[str, dict[str, float]]:
    """Images per second, in the median of some steps, and most bytes of tensors, for inference and training.

    A training step is forward pass, cross-entropy, backward pass and fused AdamW. Weights, images and the optimizer's
    state count as memory, too.
    """
    network = copy.deepcopy(model).to(device)
    embedding = model.patch_embedding
    images = torch.rand(batch_size, embedding.in_channels, *embedding.image_size, device=device)
    labels = torch.zeros(batch_size, dtype=torch.long, device=device)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)

    def infer() -> None:
        with torch.inference_mode(), torch.autocast(device.type, precision, enabled=precision != torch.float32):
            network(images)

    def train() -> None:
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            logits = network(images)
            loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    results = {}
    for name, step in (("inference", infer), ("training", train)):
        network.train(name == "training")
        step()  # the first one prepares kernels and the state of the optimizer
        kept = [*network.parameters(), *network.buffers(), images, labels]
        kept += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        before = sum(t.numel() * t.element_size() for t in kept)
        memory = before + peak_of_tensors(step, device)
        times: list[float] = []
        while len(times) < FEWEST_STEPS or sum(times) < SECONDS:
            times.append(seconds(step, device))
        results[name] = {"images_per_second": batch_size / statistics.median(times), "peak_memory": memory}
    return results


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """How long some work takes."""
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def peak_of_tensors(work: Callable[[], Any], device: torch.device) -> int:
    """Most bytes that tensors took during some work, beside those that were there before it.

    On a CPU the memory of the process would say little, as its allocator keeps what is freed; the profiler sees each
    tensor come and go.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would print that it starts, and that there is no GPU
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def matrix_product_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The most operations per second that matrix products reach on a device, over a few large ones."""
    best = 0.0
    for rows, width in ((2048, 2048), (4096, 1024), (8192, 512)) if device.type == "cpu" else ((8192, 8192),):
        a, b = (torch.randn(n, width, device=device, dtype=dtype) for n in (rows, width))
        for product in (lambda a=a, b=b: a @ b.t(), lambda a=a, b=b: linear(a, b)):
            for _ in range(8):
                best = max(best, 2 * rows * width * width / seconds(product, device))
    return best
