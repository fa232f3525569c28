"""Everything there is to measure on a GPU, in one command of at most ten minutes, from data that are carried along.

    python benchmarks/gpu.py --data.kind imagefolder --data.root data/cifar10-jpeg --out runs/gpu

Three parts, one after the other: the tests that compare the device with the CPU, and those of the Transformer and the
ViT; the throughput beside the other packages, eager and compiled, with the share of the device's peak; and the training
of a configuration. The results stand in OUT/report.json and OUT/report.txt, each part's own files beside them. Without
a GPU everything runs in a tiny mode on the CPU, which shows that it works and measures nothing.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from vit_scratch.training.device import device_name
from vit_scratch.training.provenance import versions

ROOT = Path(__file__).resolve().parent.parent


def run(name: str, command: list[str], seconds: float, out: Path) -> dict[str, Any]:
    """Run a part and keep what it prints in OUT/NAME.txt; it is stopped after so many seconds.

    Returns:
        Its command, exit status (None where it was stopped), seconds, and the last lines that it printed.
    """
    began, path = time.perf_counter(), out / f"{name}.txt"
    print(f"--- {name}: {' '.join(command)}", flush=True)
    with open(path, "w") as file:
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=max(seconds, 1))
            status: int | None = done.returncode
        except subprocess.TimeoutExpired:
            status = None
    lines = path.read_text(errors="replace").rstrip().splitlines()
    print("\n".join(lines[-3:]), flush=True)
    return {
        "command": command,
        "status": status,
        "seconds": round(time.perf_counter() - began, 1),
        "end": lines[-40:],
    }


def main() -> None:
    """Run the parts and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.kind", dest="kind", default="cifar10")
    parser.add_argument("--data.root", dest="root", default="data")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "cifar10_17pf.yaml")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all parts together")
    parser.add_argument("--out", type=Path, required=True)
    values = parser.parse_args()
    gpu = torch.cuda.is_available()
    values.out.mkdir(parents=True, exist_ok=True)
    out, end = values.out.resolve(), time.perf_counter() + 60 * values.minutes
    python = sys.executable

    device = "cuda" if gpu else "cpu"
    tests = ["tests/parity/test_gpu.py", *(["tests/transformer", "tests/vision"] if gpu else [])]
    throughput = [python, "benchmarks/throughput.py", "--device", device]
    if gpu:
        throughput += ["--batches", "128", "512", "--rounds", "5", "--most-pixels", str(512 * 224 * 224)]
    else:
        throughput += ["--sizes", "32", "--batches", "2", "--rounds", "1", "--contestants", "ours", "timm"]
    train = [python, "train.py", "--config", str(values.config.resolve()), "--device", device]
    train += ["--data.kind", values.kind, "--data.root", values.root, "--out", str(out / "run")]
    if gpu:
        train += ["--train.compile", "true"]
    else:
        train += ["--train.budget_pflop", "1e-4", "--train.warmup_epochs", "0"]
        train += ["--model.dim", "32", "--model.depth", "2", "--model.heads", "4"]
    parts = {
        "tests": ([python, "-m", "pytest", "-q", *tests], 0.25),
        "throughput_eager": ([*throughput, "--out", str(out / "throughput_eager.json")], 0.35),
        "throughput_compiled": ([*throughput, "--compiled", "--out", str(out / "throughput_compiled.json")], 0.5),
        "training": (train, 1.0),
    }
    report: dict[str, Any] = {
        "device": device_name(torch.device(device)),
        "tiny": not gpu,
        "versions": versions(),
        "parts": {},
    }
    for name, (command, share) in parts.items():
        # A part gets its share of the time that is left, so that one that hangs leaves the others theirs.
        report["parts"][name] = run(name, command, share * (end - time.perf_counter()), out)
        (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    lines = [f"{report['device']}{', tiny mode: nothing is measured' if not gpu else ''}", str(report["versions"]), ""]
    for name, part in report["parts"].items():
        outcome = "stopped" if part["status"] is None else f"exit status {part['status']}"
        lines += [f"{name}: {outcome}, {part['seconds']} s", *(f"  {line}" for line in part["end"]), ""]
    (out / "report.txt").write_text("\n".join(lines))
    print(f"report: {out / 'report.txt'}")
    sys.exit(any(part["status"] != 0 for part in report["parts"].values()))


if __name__ == "__main__":
    main()
