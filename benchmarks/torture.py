"""Kills a training at random moments, resumes it, and compares its weights with those of an undisturbed run.

python benchmarks/torture.py --kills 3 -- --config configs/digits.yaml --train.epochs 10

What follows the two dashes goes to train.py. Ends with status 1 where weights or metrics differ.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

TRAIN = [sys.executable, str(Path(__file__).parents[1] / "train.py")]
TIMES = ("seconds", "items_per_second")


def train(arguments: list[str], out: Path, kill_after: float | None = None) -> bool:
    """Run or resume a training; with `kill_after` SIGKILL it so many seconds from now. True where it finished."""
    process = subprocess.Popen([*TRAIN, *arguments, "--out", str(out), "--resume"], stdout=subprocess.DEVNULL)
    try:
        if process.wait(timeout=kill_after):
            raise SystemExit(f"train.py ended with status {process.returncode}")
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def metrics(out: Path) -> list[dict]:
    """The rows of metrics.jsonl without what depends on time."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def main() -> int:
    """Run both trainings and print what came of them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="how often to kill the training")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("train", nargs="+", help="arguments of train.py, after --")
    options = parser.parse_args()
    moments = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, broken = Path(folder) / "whole", Path(folder) / "broken"
        began = time.monotonic()
        train(options.train, whole)
        duration = time.monotonic() - began
        print(f"undisturbed run: {duration:.0f} s", flush=True)
        for kill in range(options.kills):
            # Of the time that a run needs, so many equal parts, each with a kill somewhere in its second half.
            after = duration / (options.kills + 1) * moments.uniform(0.5, 1.0) + (8 if kill else 0)
            finished = train(options.train, broken, after)
            states = sorted(p.stem for p in broken.glob("states/update_*.pt"))
            print(f"kill {kill + 1} after {after:.1f} s: {'too late' if finished else states[-1:]}", flush=True)
        train(options.train, broken)
        files = ("last.safetensors", "best.safetensors", "ema.safetensors")
        pairs = [(load_file(whole / f), load_file(broken / f)) for f in files if (whole / f).exists()]
        weights = all(torch.equal(a[k], b[k]) for a, b in pairs for k in a)
        rows = metrics(whole) == metrics(broken)
        print(f"weights bit-identical: {weights} ({len(pairs)} files); metrics identical: {rows}")
    return 0 if weights and rows else 1


if __name__ == "__main__":
    sys.exit(main())
