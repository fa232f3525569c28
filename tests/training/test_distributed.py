"""Checks that several processes do together what one does: the same updates, batch norms, counts, and states."""

import io
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from vit_scratch.cli import main
from vit_scratch.data.augmentation import BatchTransform
from vit_scratch.data.loaders import HeldImages, MemoryLoader
from vit_scratch.evaluation.classification import evaluate_classifier
from vit_scratch.tasks import classification  # noqa: F401 - so that processes are forked with it
from vit_scratch.training import distributed
from vit_scratch.training.checkpoint import TrainingStates
from vit_scratch.training.ema import ExponentialMovingAverage
from vit_scratch.training.log import RunLog, read_rows
from vit_scratch.training.loop import fit
from vit_scratch.training.optimizer import make_optimizers

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# Processes are forked from one that has imported what they need, which takes seconds, once.
multiprocessing.set_forkserver_preload([n for n in sys.modules if n.startswith(("torch.", "vit_scratch"))])


def enter(number, processes, folder, work, arguments):
    """What each process does: join the others, work, and leave its result in a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=number,
        world_size=processes,
        timeout=timedelta(seconds=60),
    )
    torch.save(work(*arguments), folder / f"result{number}")
    distributed.leave()


def together(processes, folder, work, *arguments):
    """The results of a function in so many processes."""
    folder.mkdir(parents=True, exist_ok=True)
    start = torch.multiprocessing.start_processes
    start(enter, (processes, folder, work, arguments), nprocs=processes, start_method="forkserver")
    return [torch.load(folder / f"result{number}", weights_only=False) for number in range(processes)]


# Sums and batch norms


def sums():
    number, _ = distributed.process()
    kept = torch.tensor([1.0, number])
    with distributed.first_here_first():
        pass
    before = torch.get_rng_state()
    distributed.seed_apart(3)
    return {
        "total": distributed.total(kept),
        "kept": kept,
        "highest": distributed.highest(10 - number),
        "gathered": distributed.gather({"number": number}),
        "first": distributed.is_first(),
        "same": torch.equal(before, torch.get_rng_state()),
        "draw": torch.rand(()).item(),
    }


def test_sums_and_values_of_all_processes(tmp_path):
    results = together(3, tmp_path, sums)
    for number, result in enumerate(results):
        assert result["total"].tolist() == [3.0, 3.0]
        assert result["kept"].tolist() == [1.0, number]
        assert result["highest"] == 10
        assert result["gathered"] == [{"number": 0}, {"number": 1}, {"number": 2}]
        assert result["first"] == result["same"] == (number == 0)
    assert len({result["draw"] for result in results}) == 3


def test_one_process_works_without_the_others():
    assert distributed.process() == (0, 1)
    value = torch.tensor([2.0])
    assert distributed.total(value) is value
    assert distributed.highest(3) == 3
    assert distributed.gather("a") == ["a"]
    model = nn.BatchNorm2d(2)
    assert distributed.replicate(model, CPU) is model
    assert type(model) is nn.BatchNorm2d


def norms(sizes):
    """Outputs, gradients and statistics of a batch norm whose batch is divided into parts of these sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3)).double()
    nn.init.uniform_(model[0].weight)
    network = distributed.replicate(model, CPU)
    x, weights = (torch.randn(sum(sizes), 3, 2, 4, dtype=torch.float64) * 3 + 1 for _ in range(2))
    number, processes = distributed.process()
    part = x.split(sizes)[number].requires_grad_() if processes > 1 else x.requires_grad_()
    own = weights.split(sizes)[number] if processes > 1 else weights
    y = network(part)
    (y * own).sum().mul(processes).backward()
    module = model[0]
    return {
        "y": y.detach(),
        "x": part.grad / processes,
        "weight": module.weight.grad,
        "bias": module.bias.grad,
        "mean": module.running_mean,
        "var": module.running_var,
        "count": module.num_batches_tracked,
        "eval": model.eval()(part.detach()).detach(),
    }


def all_norms():
    return [norms(sizes) for sizes in SIZES]


SIZES = [[4, 3], [1, 6], [0, 5]]


def test_a_batch_norm_is_that_of_the_whole_batch(tmp_path):
    for expected, *parts in zip(all_norms(), *together(2, tmp_path, all_norms), strict=True):
        for name in ("y", "x", "eval"):
            torch.testing.assert_close(torch.cat([part[name] for part in parts]), expected[name], rtol=0, atol=1e-10)
        for part in parts:
            for name in ("weight", "bias", "mean", "var", "count"):
                torch.testing.assert_close(part[name], expected[name], rtol=0, atol=1e-10)


# Updates


class Images:
    """Batches of unequal sizes, divided among the processes; the last has fewer images than there are of these."""

    sizes = (6, 3, 5, 1)

    def __len__(self):
        return len(self.sizes)

    def batches(self, epoch, start):
        generator = torch.Generator().manual_seed(epoch)
        number, processes = distributed.process()
        for size in self.sizes:
            x = torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64)
            own = slice(size * number // processes, size * (number + 1) // processes)
            if start <= 0:
                yield x[own], (x.mean((1, 2, 3)) > 0).long()[own], size
            start -= 1


def network():
    from vit_scratch.vision.vit import create_vit

    torch.manual_seed(0)
    options = dict(image_size=8, patch_size=4, dim=8, depth=2, heads=2, num_classes=2)
    return create_vit("tiny_patch4_32", **options, stem="convolution", pooling="mean", feed_forward_kernel=3).double()


def cross_entropy(model, images, labels):
    logits = model(images)
    return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()


def accuracy(model):
    return {"accuracy": sum(p.double().sum().item() for p in model.parameters())}


def training(folder, muon_lr=None, epochs=2, state=None, sharded=False):
    """Train for some epochs; returns the weights, the averaged ones and the rows of the log."""
    model = network()
    if sharded and distributed.process()[1] > 1:
        distributed.shard(model, CPU)
    ema = None if sharded else ExponentialMovingAverage(model, 0.5)
    states = TrainingStates(folder / "states")
    state = states.load()[0] if state else None
    done = state["progress"]["update"] if state else 0
    log = RunLog(folder, epochs=2, updates=4, items="images", start=done, quiet=not distributed.is_first())
    optimizers = make_optimizers(model, muon_lr=muon_lr, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    stopped = fit(
        model,
        Images(),
        cross_entropy,
        None if sharded else accuracy,
        optimizers,
        lambda update: 1e-2 if update > 1 else 1e-3,
        updates=2 * epochs,
        accumulate=2,
        clip_norm=0.5,
        precision=torch.float32,
        device=CPU,
        ema=ema,
        operations=lambda inputs, targets: 1000 * len(targets),
        adapt=None,
        log=log,
        states=states,
        state=state,
        save_weights=lambda name, model, row: None,
        checkpoint_every=1,
        log_every=1,
    )
    assert stopped is None
    rows = [{k: v for k, v in row.items() if k not in ("seconds", "items_per_second")} for row in log.rows]
    averaged = {} if ema is None else ema.model.state_dict()
    return {"weights": distributed.weights_of(model), "ema": averaged, "rows": rows}


def assert_close(result, expected, tolerance):
    for part in ("weights", "ema"):
        for name, tensor in expected[part].items():
            torch.testing.assert_close(result[part][name], tensor, rtol=0, atol=tolerance, msg=name)
    assert len(result["rows"]) == len(expected["rows"])
    for row, other in zip(result["rows"], expected["rows"], strict=True):
        assert row == pytest.approx(other, abs=tolerance)
        assert [row["pflop"], row["train_accuracy"]] == [other["pflop"], other["train_accuracy"]]


@pytest.mark.parametrize(("processes", "muon_lr"), [(2, None), (3, 0.02)])
def test_updates_and_metrics_are_those_of_one_process(tmp_path, processes, muon_lr):
    expected = training(tmp_path / "one", muon_lr)
    results = together(processes, tmp_path / "several", training, tmp_path / "several", muon_lr)
    for result in results:
        assert_close(result, expected, 1e-9)
    first, last = results[0], results[-1]
    assert all(torch.equal(first["weights"][n], t) for n, t in last["weights"].items())
    assert [row["update"] for row in read_rows(tmp_path / "several")] == [2, 4]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, before, after):
    expected = training(tmp_path / "whole")
    part = tmp_path / "part"
    for processes, epochs, state in ((before, 1, False), (after, 2, True)):
        if processes == 1:
            result = training(part, None, epochs, state)
        else:
            result = together(processes, part, training, part, None, epochs, state)[0]
            (part / "meeting").unlink(missing_ok=True)
    assert_close(result, expected, 1e-9)


def test_a_sharded_model_trains_as_a_whole_one_and_goes_on_with_another_number_of_processes(tmp_path):
    expected = training(tmp_path / "whole", sharded=True)
    part = tmp_path / "part"
    together(3, part, training, part, None, 1, False, True)
    (part / "meeting").unlink(missing_ok=True)
    files = sorted(part.glob("states/update_00000002/*.safetensors"))
    held = [sum(t.numel() for t in load_file(file).values()) for file in files]
    weights = sum(p.numel() for p in network().parameters())
    assert len(files) == 3
    assert len({path.stat().st_mode for path in [*files, *part.glob("states/*.pt")]}) == 1
    assert 3 * weights <= sum(held) <= 3.2 * weights  # weights, two moments, and statistics of batch norms
    assert max(held) < 0.5 * sum(held)
    results = together(2, part, training, part, None, 2, True, True)
    assert_close(results[0], expected, 1e-9)
    assert results[1]["weights"] == {}
    assert sorted(p.name for p in (part / "states").iterdir()) == [
        *("update_00000003", "update_00000003.pt", "update_00000004", "update_00000004.pt")
    ]
    (part / "meeting").unlink(missing_ok=True)
    for file in part.glob("states/update_00000004/*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"update_00000004 can't be read.*Remove .*update_00000004.pt to go on from"):
        together(2, part, training, part, None, 3, True, True)


# Counts

IMAGES = 10_003


def counts():
    """What a model of random weights gets right of random images, for three batch sizes, and the sum of the loss."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (IMAGES, 1, 2, 2), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 7, (IMAGES,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 7))
    results = []
    for batch in (1, 7, 512):
        transform, share = BatchTransform([0.5], [0.25]), distributed.process()
        loader = MemoryLoader(HeldImages(pixels, labels), batch, transform, device=CPU, share=share)
        result = evaluate_classifier(model, loader.batches(), 7, IMAGES, distributed.gather)
        results.append((result.correct, result.correct_top5, result.confusion.tolist(), result.loss_sum))
    return results


def test_the_counts_of_an_evaluation_are_the_same_for_any_processes_and_batches(tmp_path):
    everything = [counts(), *together(2, tmp_path / "two", counts), *together(3, tmp_path / "three", counts)]
    (correct, top5, confusion, loss), *others = sum(everything, [])
    assert sum(map(sum, confusion)) == IMAGES
    assert correct == sum(row[i] for i, row in enumerate(confusion))
    for other in others:
        assert other[:3] == (correct, top5, confusion)
        assert other[3] == pytest.approx(loss, rel=1e-9)


# From the command line


def enter_command(number, folder, environment, arguments):
    """What each process does: run the command as one that torchrun started, and leave in files what came of it."""
    torch.set_num_threads(1)
    os.environ |= environment | {"RANK": str(number), "LOCAL_RANK": str(number)}
    printed, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(errors):
        try:
            status = main([str(a) for a in arguments])
        except SystemExit as stop:
            status = stop.code
    torch.save((status, printed.getvalue(), errors.getvalue()), folder / f"result{number}")
    distributed.leave()


def run(processes, folder, *arguments, meanwhile=lambda processes: None):
    """A command in so many processes, as torchrun starts them: exit statuses, and what they print, and as errors."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    start, common = torch.multiprocessing.start_processes, (folder, environment, arguments)
    context = start(enter_command, common, nprocs=processes, join=False, start_method="forkserver")
    meanwhile(context.processes)
    while not context.join():
        pass
    results = [torch.load(folder / f"result{number}") for number in range(processes)]
    statuses, printed, errors = zip(*results, strict=True)
    return set(statuses), "".join(printed), "".join(errors)


TRAIN = [
    *("train", "--config", ROOT / "configs" / "digits.yaml", "--model.dim", 16, "--model.depth", 1),
    *("--model.heads", 2, "--train.epochs", 2, "--train.warmup_epochs", 1, "--train.batch_size", 200),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two processes, and what they printed."""
    folder = tmp_path_factory.mktemp("distributed")
    statuses, printed, errors = run(2, folder / "two", *TRAIN, "--out", folder / "run")
    assert statuses == {0}, errors
    return folder / "run", printed


def test_two_processes_write_and_print_what_one_does(trained, tmp_path, capsys):
    out, printed = trained
    assert main(["train", *map(str, TRAIN[1:]), "--out", str(tmp_path / "run")]) == 0
    alone = capsys.readouterr().out
    assert printed.splitlines()[-1] == alone.splitlines()[-1]
    assert printed.count("test accuracy") == 1
    assert ", 2 processes" in printed
    assert {p.relative_to(out) for p in out.rglob("*")} == {
        p.relative_to(tmp_path / "run") for p in (tmp_path / "run").rglob("*")
    }
    expected = load_file(tmp_path / "run" / "last.safetensors")
    for name, tensor in load_file(out / "last.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-4)


def test_three_processes_evaluate_as_one(trained, tmp_path, capsys):
    out, printed = trained
    arguments = ["evaluate", out, "--json", tmp_path / "three.json", "--out", tmp_path / "evaluation"]
    statuses, said, errors = run(3, tmp_path / "three", *arguments)
    assert statuses == {0}, errors
    assert said.splitlines()[-1] == printed.splitlines()[-1]
    assert main(["evaluate", str(out), "--json", str(tmp_path / "one.json"), "--out", str(tmp_path / "one")]) == 0
    one, three = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "three"))
    assert one.pop("loss") == pytest.approx(three.pop("loss"), rel=1e-6)
    assert one == three


def test_input_that_cannot_work_is_said_once_and_ends_all(tmp_path):
    statuses, _, errors = run(2, tmp_path / "two", *TRAIN, "--model.heads", 5, "--out", tmp_path / "run")
    assert statuses == {2}
    assert errors.count("error: ") == 1
    assert not (tmp_path / "run").exists()


def torchrun(processes, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def wait_for_state(out, alive):
    while not list(out.glob("states/update_*.pt")):
        assert alive()
        time.sleep(0.05)


def test_a_signal_to_one_process_stops_all_and_the_run_goes_on(tmp_path):
    out, arguments = tmp_path / "run", [*TRAIN, "--train.checkpoint_every", 2]

    def stop(processes):
        wait_for_state(out, processes[0].is_alive)
        processes[1].terminate()

    statuses, printed, _ = run(2, tmp_path / "two", *arguments, "--train.epochs", 500, "--out", out, meanwhile=stop)
    assert statuses == {128 + signal.SIGTERM}
    assert printed.count("stopped by SIGTERM, state saved; go on with: vit-scratch train --out ") == 1
    newest = max(int(path.stem[7:]) for path in out.glob("states/update_*.pt"))
    state = TrainingStates(out / "states")
    state.identity = torch.load(state.paths()[0], weights_only=True)["identity"]
    assert state.load()[0]["progress"]["update"] == newest


def test_a_process_that_is_killed_ends_the_others_and_the_run_goes_on(tmp_path):
    out = tmp_path / "run"
    process = torchrun(2, ROOT / "train.py", *TRAIN[1:], "--train.epochs", 500, "--out", out)
    wait_for_state(out, lambda: process.poll() is None)
    children = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    os.kill(children[1], signal.SIGKILL)
    began = time.monotonic()
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert time.monotonic() - began < 60
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    state = TrainingStates(out / "states")
    state.identity = torch.load(state.paths()[0], weights_only=True)["identity"]
    assert state.load()[0]["progress"]["update"] > 0
