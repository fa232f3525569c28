"""Images per second of our Vision Transformer beside timm's, torchvision's and vit-pytorch's of the same configuration.

    pip install vit-pytorch
    python benchmarks/throughput.py --out throughput.json

Every contestant lives in a process of its own, so that each has the memory allocator as its users have it (ours as
train.py sets it), and a peak of memory of its own. They take their steps in turns, one at a time, in an order that
changes from round to round, so that whatever else the machine does hits them alike; what is compared are the times
within a round. A training step is forward pass, cross-entropy, backward pass and fused AdamW; float32 on a CPU,
bfloat16 autocast on a GPU.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

SIZES: dict[int, dict[str, int]] = {
    32: dict(patch=4, dim=192, depth=9, heads=3),
    224: dict(patch=16, dim=384, depth=6, heads=6),
}
"""Models by image size; hidden width 4 * dim, class token, learned positions, 10 classes."""
CONTESTANTS = ("ours", "timm", "timm, our allocator", "torchvision", "vit-pytorch")


def build(name: str, size: int) -> Any:
    """A contestant's model for images of that size."""
    c = SIZES[size]
    if name == "ours":
        from vit_scratch import Encoder, VisionTransformer

        encoder = Encoder(c["dim"], c["depth"], c["heads"])
        return VisionTransformer(encoder, image_size=size, patch_size=c["patch"], num_classes=10)
    if name.startswith("timm"):
        import timm

        return timm.models.VisionTransformer(
            img_size=size,
            patch_size=c["patch"],
            embed_dim=c["dim"],
            depth=c["depth"],
            num_heads=c["heads"],
            num_classes=10,
        )
    if name == "torchvision":
        import torchvision

        return torchvision.models.VisionTransformer(
            image_size=size,
            patch_size=c["patch"],
            num_layers=c["depth"],
            num_heads=c["heads"],
            hidden_dim=c["dim"],
            mlp_dim=4 * c["dim"],
            num_classes=10,
        )
    import vit_pytorch

    return vit_pytorch.ViT(
        image_size=size,
        patch_size=c["patch"],
        dim=c["dim"],
        depth=c["depth"],
        heads=c["heads"],
        dim_head=c["dim"] // c["heads"],
        mlp_dim=4 * c["dim"],
        num_classes=10,
    )


class Contestant:
    """A model in this process, and its steps."""

    def __init__(self, name: str, device: str, threads: int | None):
        import torch

        from vit_scratch.training.device import keep_freed_memory

        if threads:
            torch.set_num_threads(threads)
        self.name, self.device = name, torch.device(device)
        if name in ("ours", "timm, our allocator"):
            keep_freed_memory(self.device)

    def prepare(self, size: int, batch: int, mode: str, compiled: bool) -> None:
        """Build the model and its input, and take two steps that don't count."""
        import torch

        torch.manual_seed(0)
        self.mode = mode
        self.model = build(self.name, size).to(self.device).train(mode == "training")
        if compiled:
            self.model.compile()
        self.images = torch.randn(batch, 3, size, size, device=self.device)
        self.labels = torch.randint(0, 10, (batch,), device=self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for _ in range(2):
            self.step()

    def step(self) -> float:
        """Take a step; returns its seconds."""
        import torch
        import torch.nn.functional as F

        began = time.perf_counter()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            if self.mode == "inference":
                with torch.inference_mode():
                    self.model(self.images)
            else:
                loss = F.cross_entropy(self.model(self.images), self.labels)
        if self.mode == "training":
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def profile(self) -> list[tuple[str, float]]:
        """The operators that take most of a step, and their shares of its time, what they call not included."""
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(4):
                self.step()
        side = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        times = {event.key: getattr(event, side) for event in profiler.key_averages()}
        total = sum(times.values())
        return [(name, times[name] / total) for name in sorted(times, key=lambda n: -times[n])[:12]]

    def memory(self) -> float:
        """Most memory that this process has had so far, in MiB; on a GPU that of the device since the last call."""
        import resource

        import torch

        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**20
            torch.cuda.reset_peak_memory_stats()
            return peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def peak(self) -> float:
        """The most operations per second that matrix products reach here."""
        import torch

        from vit_scratch.tasks.profile import matrix_product_peak

        return matrix_product_peak(self.device, torch.bfloat16 if self.device.type == "cuda" else torch.float32)


def serve(connection: Connection, name: str, device: str, threads: int | None) -> None:
    """Answer (method, arguments) with what the contestant's method returns, or with its exception."""
    contestant = Contestant(name, device, threads)
    while (message := connection.recv()) is not None:
        try:
            connection.send(getattr(contestant, message[0])(*message[1]))
        except Exception as error:  # out of memory, a package that is not there: a gap in the table
            connection.send(error)


class Processes:
    """A process per contestant, each doing nothing until it is asked."""

    def __init__(self, names: list[str], device: str, threads: int | None):
        context = multiprocessing.get_context("spawn")
        self.ends: dict[str, Connection] = {}
        self.processes = []
        for name in names:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, name, device, threads), daemon=True)
            process.start()
            self.ends[name] = here
            self.processes.append(process)

    def ask(self, name: str, method: str, *arguments: Any) -> Any:
        """What a contestant's method returns. Raises what it raises."""
        self.ends[name].send((method, arguments))
        answer = self.ends[name].recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End all processes."""
        for end, process in zip(self.ends.values(), self.processes, strict=True):
            end.send(None)
            process.join()


def operations(name: str, size: int, mode: str) -> int:
    """Floating-point operations of a step per image.

    Counted on our model. It computes nothing of its last layer but the class token, the others all tokens.
    """
    import torch
    import torch.nn.functional as F

    from vit_scratch.training.compute import ComputeCounter

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = model(x) if name == "ours" else model.forward_head(model.forward_features(x))
        return F.cross_entropy(logits, y)

    counter = ComputeCounter(build("ours", size), loss)
    training = counter(torch.empty(1, 3, size, size, device="meta"), torch.empty(1, dtype=torch.long, device="meta"))
    return training if mode == "training" else training // 3


def measure(
    names: list[str],
    size: int,
    batch: int,
    mode: str,
    *,
    compiled: bool,
    rounds: int,
    profile: bool,
    device: str,
    threads: int | None,
) -> dict[str, Any]:
    """One cell of the table: all contestants in turns.

    Returns:
        For each contestant images per second (median), its time over ours (median, lowest and highest of a round),
        memory in MiB, and if asked for its profile, or what went wrong.
    """
    processes = Processes(names, device, threads)
    results: dict[str, Any] = {}
    for name in names:
        try:
            processes.ask(name, "prepare", size, batch, mode, compiled)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    running = [name for name in names if name not in results]
    times: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(rounds):
        for name in running[turn % len(running) :] + running[: turn % len(running)]:
            times[name].append(processes.ask(name, "step"))
    for name in running:
        ratios = [theirs / ours for theirs, ours in zip(times[name], times["ours"], strict=True)]
        results[name] = {
            "images_per_second": batch / statistics.median(times[name]),
            "time_over_ours": statistics.median(ratios),
            "range": [min(ratios), max(ratios)],
            "memory_mib": processes.ask(name, "memory"),
        }
        if profile:
            results[name]["profile"] = processes.ask(name, "profile")
    processes.close()
    return {"size": size, "batch": batch, "mode": mode, "compiled": compiled, "rounds": rounds, "results": results}


def table(cells: list[dict[str, Any]]) -> str:
    """All cells in Markdown: images per second, share of peak and memory of ours, and its speed over each other one."""
    others = [name for name in cells[0]["results"] if name != "ours"]
    lines = [
        "| pixels, step, batch | images/s | share of peak | MiB | " + " | ".join(f"over {n}" for n in others) + " |",
        "|---" * (4 + len(others)) + "|",
    ]
    for cell in cells:
        ours = cell["results"]["ours"]
        ratios = []
        for name in others:
            r = cell["results"][name]
            ratios.append(
                "-" if "error" in r else f"{r['time_over_ours']:.2f} ({r['range'][0]:.2f} to {r['range'][1]:.2f})"
            )
        kind = f"{cell['size']}, {cell['mode']}{', compiled' if cell['compiled'] else ''}, {cell['batch']}"
        lines.append(
            f"| {kind} | {ours['images_per_second']:.0f} | {100 * ours['share_of_peak']:.0f} % "
            f"| {ours['memory_mib']:.0f} | {' | '.join(ratios)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure all cells, print them as they come, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 224], choices=list(SIZES))
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    parser.add_argument("--modes", nargs="+", default=["training", "inference"], choices=["training", "inference"])
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=CONTESTANTS)
    parser.add_argument("--profile", action="store_true", help="also list the operators that take most of a step")
    parser.add_argument("--compiled", action="store_true", help="compile all models with torch.compile")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--most-pixels", type=int, default=128 * 224 * 224, help="leave larger batches out")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, help="of the CPU; PyTorch's choice without")
    parser.add_argument("--out", type=Path)
    values = parser.parse_args()

    import torch

    from vit_scratch.training.device import device_name
    from vit_scratch.training.provenance import versions

    names = ["ours", *[n for n in values.contestants if n != "ours"]]
    processes = Processes(["ours"], values.device, values.threads)
    peak = processes.ask("ours", "peak")
    processes.close()
    device = device_name(torch.device(values.device))
    print(f"{versions()}\n{device}, matrix products reach {peak / 1e9:.0f} GFLOP/s\n", flush=True)
    cells = []
    for size in values.sizes:
        for mode in values.modes:
            for batch in values.batches:
                if batch * size * size > values.most_pixels:
                    continue
                cell = measure(
                    names,
                    size,
                    batch,
                    mode,
                    compiled=values.compiled,
                    rounds=values.rounds,
                    profile=values.profile,
                    device=values.device,
                    threads=values.threads,
                )
                cells.append(cell)
                kind = "compiled" if values.compiled else "eager"
                print(f"{size} pixels, batch {batch}, {mode}, {kind}")
                for name, r in cell["results"].items():
                    if "error" in r:
                        print(f"  {name:<20} {r['error']}")
                        continue
                    share = r["images_per_second"] * operations(name, size, mode) / peak
                    r["share_of_peak"] = share
                    print(
                        f"  {name:<20} {r['images_per_second']:7.1f} images/s   ours is {r['time_over_ours']:.2f} x "
                        f"({r['range'][0]:.2f} to {r['range'][1]:.2f})   {100 * share:3.0f} % of peak   "
                        f"{r['memory_mib']:6.0f} MiB"
                    )
                    for operator, part in r.get("profile", []):
                        print(f"    {100 * part:5.1f} %  {operator}")
                print(flush=True)
    print(table(cells))
    if values.out:
        content = {"versions": versions(), "device": device, "peak": peak, "cells": cells}
        values.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
