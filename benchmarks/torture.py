"""Kills a training at random moments, resumes it, and compares its weights with those of an undisturbed run.

python benchmarks/torture.py --kills 3 -- --config configs/digits.yaml --train.epochs 10

What follows the two dashes goes to train.py. Every other kill waits from its moment on until a file is being written.
Ends with status 1 where weights, metrics or learning rates differ.
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


def train(
    arguments: list[str], out: Path, kill_after: float | None = None, *, writing: bool = False
) -> tuple[bool, float]:
    """Run or resume a training; with `kill_after` SIGKILL it so many seconds after it has saved its first state.

    Starting up takes seconds in which there is nothing to lose, and is not counted. With `writing` the kill waits until
    there is a file that is not complete yet.

    Returns:
        Whether the training finished, and the seconds from its first state on.
    """
    before = states(out)
    process = subprocess.Popen([*TRAIN, *arguments, "--out", str(out), "--resume"], stdout=subprocess.DEVNULL)
    while states(out) == before and process.poll() is None:
        time.sleep(0.02)
    began = time.monotonic()
    try:
        if process.wait(timeout=kill_after):
            raise SystemExit(f"train.py ended with status {process.returncode}")
    except subprocess.TimeoutExpired:
        while writing and process.poll() is None and not half_written(out):
            pass  # such a file is there for a few milliseconds
        process.kill()
        process.wait()
        return False, time.monotonic() - began
    return True, time.monotonic() - began


def half_written(out: Path) -> list[str]:
    """Names of files in a run's folder that are being written, or whose writing was cut off."""
    return [p.name for p in (*out.glob(".*.part"), *out.glob("states/.*.part"))]


def states(out: Path) -> list[str]:
    """Names of the training states of a run."""
    return sorted(p.stem for p in out.glob("states/update_*.pt"))


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
        _, duration = train(options.train, whole)
        print(f"undisturbed run: {duration:.0f} s from its first state on", flush=True)
        landed = cut_off = 0
        for kill in range(options.kills):
            after = duration / (options.kills + 1) * moments.uniform(0.1, 1.0)
            finished, _ = train(options.train, broken, after, writing=kill % 2 == 1)
            landed += not finished
            cut_off += bool(half_written(broken))
            where = "too late, the training had finished" if finished else f"newest state {states(broken)[-1]}"
            where += "".join(f", {name} half written" for name in half_written(broken))
            print(f"kill {kill + 1}, {after:.1f} s after the first state: {where}", flush=True)
        train(options.train, broken)
        files = [f for f in ("last.safetensors", "best.safetensors", "ema.safetensors") if (whole / f).exists()]
        pairs = [(load_file(whole / f), load_file(broken / f)) for f in files]
        weights = all(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in pairs)
        rows = metrics(whole) == metrics(broken)
        print(
            f"{landed} of {options.kills} kills landed, {cut_off} of them while a file was being written; weights "
            f"bit-identical: {weights} ({', '.join(files)}); metrics and learning rates identical: {rows}"
        )
    return 0 if weights and rows and landed == options.kills else 1


if __name__ == "__main__":
    sys.exit(main())
