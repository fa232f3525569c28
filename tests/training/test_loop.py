"""Checks the training loop against a float64 loop by hand, and that a resumed run ends with the same bits."""

import copy
import io
import json
import math
import os
import signal
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vit_scratch.training.checkpoint import SaveError, TrainingStates
from vit_scratch.training.ema import ExponentialMovingAverage
from vit_scratch.training.log import RunLog, read_rows
from vit_scratch.training.loop import NonFiniteError, fit
from vit_scratch.training.optimizer import Muon, adamw, make_optimizers
from vit_scratch.training.schedule import warmup_cosine

SIZES = [5, 3, 4, 2, 1]
WINDOWS = {1: [[0], [1], [2], [3], [4]], 2: [[0, 1], [2, 3], [4]], 5: [[0, 1, 2, 3, 4]], 9: [[0, 1, 2, 3, 4]]}


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)


class HandBatches:
    """Batches of unequal sizes, others in each epoch."""

    def __init__(self, sizes=SIZES):
        self.sizes = sizes
        self.asked = []

    def __len__(self):
        return len(self.sizes)

    def all(self, epoch):
        generator = torch.Generator().manual_seed(epoch)
        for size in self.sizes:
            x = torch.randn(size, 4, generator=generator)
            yield x, (x.sum(1) > 0).long() + (x[:, 0] > 1), size

    def batches(self, epoch, start):
        self.asked.append((epoch, start))
        yield from list(self.all(epoch))[start:]


def cross_entropy(model, inputs, targets):
    logits = model(inputs)
    return F.cross_entropy(logits, targets, reduction="sum"), (logits.argmax(1) == targets).sum()


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def constant(update):
    return 0.1


def run(folder, model, optimizer=None, **options):
    """`fit` with plain SGD, unless told otherwise; returns what it returned and the log."""
    arguments = dict(
        loader=HandBatches(),
        loss=cross_entropy,
        validate=None,
        schedule=constant,
        epochs=2,
        accumulate=1,
        clip_norm=0.0,
        precision=torch.float32,
        device=torch.device("cpu"),
        ema=None,
        operations=lambda inputs, targets: 1000 * len(targets),
        adapt=None,
        states=TrainingStates(folder / "states"),
        state=None,
        save_weights=lambda name, model, row: None,
        checkpoint_every=None,
        log_every=1,
    )
    arguments |= options
    epochs = arguments.pop("epochs")
    arguments.setdefault("updates", epochs * math.ceil(len(arguments["loader"]) / arguments["accumulate"]))
    optimizers = (
        optimizer if isinstance(optimizer, list) else [optimizer or torch.optim.SGD(model.parameters(), lr=123.0)]
    )
    done = arguments["state"]["progress"]["update"] if arguments["state"] else 0
    log = RunLog(folder, epochs=epochs, updates=100, items="items", start=done)
    stopped = fit(model, optimizers=optimizers, log=log, **arguments)
    return stopped, log


def by_hand(epochs, accumulate, rate, clip_norm=0.0):
    """SGD in float64 on whole windows: weights after each update, and mean loss and accuracy of each epoch."""
    weights = {n: p.detach().double().numpy().copy() for n, p in linear().named_parameters()}
    after, metrics, update = [], [], 0
    for epoch in range(epochs):
        batches, loss, correct = list(HandBatches().all(epoch)), 0.0, 0
        for window in WINDOWS[accumulate]:
            update += 1
            x = torch.cat([batches[i][0] for i in window]).double().numpy()
            y = torch.cat([batches[i][1] for i in window]).numpy()
            logits = x @ weights["weight"].T + weights["bias"]
            logits = logits - logits.max(1, keepdims=True)
            probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            loss -= np.log(probabilities[range(len(y)), y]).sum()
            correct += int((logits.argmax(1) == y).sum())
            slope = probabilities - np.eye(3)[y]
            gradients = {"weight": slope.T @ x / len(y), "bias": slope.mean(0)}
            norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
            factor = min(1.0, clip_norm / norm) if clip_norm else 1.0
            weights = {n: w - rate(update) * factor * gradients[n] for n, w in weights.items()}
            after.append(weights)
        metrics.append((loss / sum(SIZES), correct / sum(SIZES)))
    return after, metrics


def assert_weights(model, expected):
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [0.0, 0.2])
@pytest.mark.parametrize("accumulate", WINDOWS)
def test_updates_are_those_of_the_whole_window(tmp_path, accumulate, clip_norm):
    model, weights, rate = linear(), [], partial(warmup_cosine, updates=30, warmup=4, peak=0.5, final=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=123.0)
    optimizer.register_step_post_hook(lambda *_: weights.append(copy.deepcopy(model)))
    stopped, log = run(tmp_path, model, optimizer, accumulate=accumulate, epochs=3, schedule=rate, clip_norm=clip_norm)
    expected, metrics = by_hand(3, accumulate, rate, clip_norm)
    assert stopped is None
    assert len(weights) == len(expected) == 3 * len(WINDOWS[accumulate])
    for after, e in zip(weights, expected, strict=True):
        assert_weights(after, e)
    for epoch, (row, (loss, accuracy)) in enumerate(zip(log.rows, metrics, strict=True), 1):
        updates = epoch * len(WINDOWS[accumulate])
        assert (row["epoch"], row["update"], row["lr"]) == (epoch, updates, rate(updates))
        assert row["train_loss"] == pytest.approx(loss, rel=1e-5)
        assert row["train_accuracy"] == accuracy
        assert row["items_per_second"] == pytest.approx(sum(SIZES) / row["seconds"])
    assert read_rows(tmp_path) == log.rows


def test_clipping_has_an_effect_and_a_large_norm_has_none():
    plain, small, large = (by_hand(1, 2, constant, clip)[0][-1]["weight"] for clip in (0.0, 0.2, 100.0))
    np.testing.assert_array_equal(plain, large)
    assert np.abs(plain - small).max() > 1e-3


@pytest.mark.parametrize("log_every", [1, 3, 1000])
def test_the_metrics_do_not_depend_on_how_often_they_are_read(tmp_path, log_every):
    _, log = run(tmp_path, linear(), log_every=log_every, accumulate=2)
    _, metrics = by_hand(2, 2, constant)
    assert [r["train_accuracy"] for r in log.rows] == [accuracy for _, accuracy in metrics]
    assert [r["train_loss"] for r in log.rows] == pytest.approx([loss for loss, _ in metrics], rel=1e-6)


def test_every_group_has_the_schedules_rate_at_every_update(tmp_path):
    model, seen = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)), []
    optimizer = adamw(model, lr=9.0, betas=(0.9, 0.999), weight_decay=0.1)
    optimizer.register_step_pre_hook(lambda o, *_: seen.append([g["lr"] for g in o.param_groups]))
    schedule = partial(warmup_cosine, updates=9, warmup=3, peak=1e-2, final=1e-4)
    run(tmp_path, model, optimizer, schedule=schedule, accumulate=2, epochs=3)
    assert seen == [[schedule(u)] * 2 for u in range(1, 10)]


def test_every_group_of_every_optimizer_has_the_schedules_rate_times_its_ratio(tmp_path):
    model, seen = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)), []
    sgd, schedule = torch.optim.SGD, partial(warmup_cosine, updates=9, warmup=3, peak=1e-2, final=1e-4)
    optimizers = [
        sgd([{"params": model[0].weight, "lr_ratio": 3.0}, {"params": model[0].bias}], lr=9.0),
        adamw(model[1], lr=9.0, betas=(0.9, 0.999), weight_decay=0.1),
        sgd([{"params": model[2].bias, "lr_ratio": 1.0}, {"params": model[2].weight, "lr_ratio": 0.0}], lr=9.0),
    ]
    for o in optimizers:
        o.register_step_pre_hook(lambda o, *_: seen.append([g["lr"] for g in o.param_groups]))
    frozen = model[2].weight.detach().clone()
    before = [p.detach().clone() for p in model.parameters()]
    _, log = run(tmp_path, model, optimizers, schedule=schedule, accumulate=2, epochs=3)
    rates = [schedule(u) for u in range(1, 10)]
    assert seen == sum([[[3.0 * r, r], [r, r], [1.0 * r, 0.0]] for r in rates], [])
    assert torch.equal(model[2].weight, frozen)
    assert sum(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)) == 5
    assert [row["lr"] for row in log.rows] == [rates[2], rates[5], rates[8]]  # the schedule's own


@pytest.mark.parametrize("clip_norm", [0.0, 0.2])
def test_two_optimizers_go_where_one_goes_and_the_norm_is_that_of_all_parameters(tmp_path, clip_norm):
    model, rate = linear(), partial(warmup_cosine, updates=30, warmup=4, peak=0.5, final=0.01)
    optimizers = [torch.optim.SGD([p], lr=123.0) for p in model.parameters()]
    run(tmp_path, model, optimizers, accumulate=2, schedule=rate, clip_norm=clip_norm)
    assert_weights(model, by_hand(2, 2, rate, clip_norm)[0][-1])


def mean_loss(batches, weights):
    """Sum of the loss over batches, each with weights of its own, and how many are right; in float64."""
    loss, correct = 0.0, 0
    for (x, y, _), w in zip(batches, weights, strict=True):
        logits = x.double().numpy() @ w["weight"].T + w["bias"]
        loss += (np.log(np.exp(logits).sum(1)) - logits[range(len(y)), y.numpy()]).sum()
        correct += int((logits.argmax(1) == y.numpy()).sum())
    return loss, correct


@pytest.mark.parametrize(
    ("accumulate", "updates", "in_last"), [(1, 7, 2), (1, 5, 5), (1, 1, 1), (2, 4, 1), (2, 5, 2), (1, 9, 4)]
)
def test_the_last_epoch_ends_with_the_last_update(tmp_path, accumulate, updates, in_last):
    model, saved, validated = linear(), [], []
    rate, batches = partial(warmup_cosine, updates=20, warmup=4, peak=0.5, final=0.01), HandBatches()
    epochs = math.ceil(updates / len(WINDOWS[accumulate]))

    def validate(network):
        validated.append(network.weight.detach().clone())
        return {"loss": 1.0, "accuracy": float(len(validated))}

    options = dict(accumulate=accumulate, schedule=rate, updates=updates, loader=batches, validate=validate)
    stopped, log = run(
        tmp_path,
        model,
        epochs=epochs,
        save_weights=lambda name, network, row: saved.append((name, row["epoch"], row["update"])),
        **options,
    )
    after, metrics = by_hand(epochs, accumulate, rate)
    assert stopped is None
    assert_weights(model, after[updates - 1])
    assert batches.asked == [(epoch, 0) for epoch in range(epochs)]
    assert len(validated) == epochs

    windows = WINDOWS[accumulate][:in_last]
    last = list(HandBatches().all(epochs - 1))
    weights = [{n: p.detach().double().numpy() for n, p in linear().named_parameters()}, *after]
    used = weights[updates - in_last : updates]
    loss, correct = mean_loss(
        [last[i] for window in windows for i in window],
        [w for w, window in zip(used, windows, strict=True) for _ in window],
    )
    count = sum(SIZES[i] for window in windows for i in window)
    row = log.rows[-1]
    assert (row["epoch"], row["update"], row["lr"]) == (epochs, updates, rate(updates))
    assert row["train_loss"] == pytest.approx(loss / count, rel=1e-5)
    assert row["train_accuracy"] == correct / count
    assert row["items_per_second"] == pytest.approx(count / row["seconds"])
    assert [r["train_loss"] for r in log.rows[:-1]] == pytest.approx([m[0] for m in metrics[: epochs - 1]], rel=1e-5)
    assert [r["epoch"] for r in log.rows] == list(range(1, epochs + 1))
    assert read_rows(tmp_path) == log.rows
    assert saved[-2:] == [("last", epochs, updates), ("best", epochs, updates)]

    state, _ = TrainingStates(tmp_path / "states").load()
    progress = state["progress"]
    assert (progress["update"], progress["epoch"], progress["batch"], progress["count"]) == (updates, epochs, 0, 0)
    other, loader = linear(), HandBatches()
    stopped, again = run(tmp_path, other, epochs=epochs, **options | dict(state=state, loader=loader))
    assert (stopped, loader.asked, len(validated)) == (None, [], epochs)  # nothing more to do
    assert_same(other.state_dict(), model.state_dict())
    assert again.rows == log.rows


@pytest.mark.parametrize("checkpoint_every", [None, 1])
def test_a_signal_at_the_last_update_leaves_the_end_of_the_epoch_to_the_resumed_run(tmp_path, checkpoint_every):
    rate = partial(warmup_cosine, updates=7, warmup=2, peak=0.5, final=0.01)
    whole, validated, saved, calls = linear(), [], [], []

    def validate(network):
        validated.append(network.weight.detach().clone())
        return {"loss": 1.0, "accuracy": 0.5}

    def interrupted(network, inputs, targets):
        calls.append(1)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return cross_entropy(network, inputs, targets)

    options = dict(schedule=rate, updates=7, validate=validate, checkpoint_every=checkpoint_every)
    _, log = run(tmp_path / "whole", whole, **options)
    validated.clear()
    stopped, partial_log = run(tmp_path / "run", linear(), loss=interrupted, **options)
    assert stopped == signal.SIGTERM
    assert (len(partial_log.rows), len(validated)) == (1, 1)
    state, _ = TrainingStates(tmp_path / "run" / "states").load()
    assert [state["progress"][n] for n in ("update", "epoch", "batch")] == [7, 1, 2]

    resumed, asked = linear(), []
    stopped, resumed_log = run(
        tmp_path / "run",
        resumed,
        state=state,
        loss=tracing(asked),
        save_weights=lambda name, network, row: saved.append((name, row["epoch"], network.weight.detach().clone())),
        **options,
    )
    assert stopped is None
    assert asked == []  # no update is done again
    assert_same(resumed.state_dict(), whole.state_dict())
    names = ["epoch", "update", "lr", "train_loss", "train_accuracy", "pflop", "val_accuracy"]
    assert [[r[n] for n in names] for r in resumed_log.rows] == [[r[n] for n in names] for r in log.rows]
    assert [r["update"] for r in read_rows(tmp_path / "run")] == [5, 7]
    assert [(name, epoch) for name, epoch, _ in saved] == [("last", 2)]
    assert torch.equal(saved[0][2], whole.weight)
    assert [torch.equal(w, whole.weight) for w in validated] == [False, True]
    state, _ = TrainingStates(tmp_path / "run" / "states").load()
    assert [state["progress"][n] for n in ("update", "epoch", "batch")] == [7, 2, 0]


def odd_operations(inputs, targets):
    """Differs from batch to batch, in more digits than a float holds of a sum of many."""
    return 10**17 + 7 * len(targets) ** 3 + int(1000 * inputs.abs().sum())


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 12), (2, 7), (1, 5)])
def test_pflop_is_the_sum_of_all_batches_operations_so_far(tmp_path, accumulate, updates):
    windows, count, expected, total = WINDOWS[accumulate], 0, [], 0
    for epoch in range(math.ceil(updates / len(windows))):
        batches = list(HandBatches().all(epoch))
        for window in windows:
            if count < updates:
                total += sum(odd_operations(*batches[i][:2]) for i in window)
                count += 1
        expected.append(total / 1e15)
    options = dict(accumulate=accumulate, updates=updates, operations=odd_operations, checkpoint_every=1)
    states = Keeping(tmp_path / "states")
    _, log = run(tmp_path, linear(), states=states, **options)
    assert [row["pflop"] for row in log.rows] == expected
    assert states.load()[0]["progress"]["operations"] == total
    for number, (_, content, metrics) in enumerate(states.kept):
        folder = tmp_path / f"from {number}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(metrics)
        _, log = run(folder, linear(), state=torch.load(io.BytesIO(content)), **options)
        assert [row["pflop"] for row in log.rows] == expected
        assert [row["pflop"] for row in read_rows(folder)] == expected


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 10), (2, 5)])
def test_inputs_are_adapted_to_the_share_of_the_updates_that_is_done(tmp_path, accumulate, updates):
    shares, seen, counted = [], [], []

    def adapt(inputs, done):
        shares.append(done)
        return inputs * (1 + done)

    def operations(inputs, targets):
        counted.append(inputs)
        return len(targets)

    options = dict(accumulate=accumulate, updates=updates, adapt=adapt, operations=operations, loss=tracing(seen))
    states, model = Keeping(tmp_path / "states"), linear()
    run(tmp_path, model, states=states, checkpoint_every=1, **options)
    batches = [x for epoch in range(2) for x, _, _ in HandBatches().all(epoch)]
    numbers = [update for update in range(updates) for _ in (WINDOWS[accumulate] * 2)[update]]
    assert shares == [update / updates for update in numbers]
    expected = [x * (1 + share) for x, share in zip(batches, shares, strict=False)]
    assert seen == [x.flatten().tolist() for x in expected]
    assert all(map(torch.equal, counted, expected))
    whole = shares.copy()
    shares.clear()
    other = linear()
    run(tmp_path / "again", other, state=torch.load(io.BytesIO(states.kept[2][1])), **options)
    assert shares == [share for share, update in zip(whole, numbers, strict=True) if update >= 3]
    assert_same(other.state_dict(), model.state_dict())


def test_frozen_parameters_stay_and_do_not_count_for_the_norm(tmp_path):
    model = linear()
    model.bias.requires_grad_(False)
    before = model.bias.clone()
    run(tmp_path, model, torch.optim.SGD([model.weight], lr=1.0), clip_norm=1.0)
    assert torch.equal(model.bias, before)


def test_bf16_is_the_type_of_the_forward_pass_and_not_of_the_weights(tmp_path):
    model, seen = linear(), set()

    def loss(network, inputs, targets):
        logits = network(inputs)
        seen.add(logits.dtype)
        return F.cross_entropy(logits.float(), targets, reduction="sum"), (logits.argmax(1) == targets).sum()

    run(tmp_path, model, loss=loss, precision=torch.bfloat16)
    assert seen == {torch.bfloat16}
    assert model.weight.dtype == torch.float32
    expected = by_hand(2, 1, constant)[0][-1]["weight"]
    np.testing.assert_allclose(model.weight.detach().numpy(), expected, atol=0.02)


def test_the_best_weights_are_those_of_the_first_best_epoch(tmp_path):
    model, scores, saved = linear(), [0.2, 0.5, 0.4, 0.5, 0.1], []
    modes, after = [], []

    def validate(network):
        modes.append(network.training)
        network.eval()
        after.append(network.weight.detach().clone())
        return {"loss": 2.0, "accuracy": scores[len(after) - 1]}

    def save_weights(name, network, row):
        saved.append((name, row["epoch"], network.weight.detach().clone(), row["val_accuracy"]))

    _, log = run(tmp_path, model, validate=validate, save_weights=save_weights, epochs=5)
    best = [s for s in saved if s[0] == "best"]
    assert [(epoch, score) for _, epoch, _, score in best] == [(1, 0.2), (2, 0.5)]
    assert torch.equal(best[-1][2], after[1])
    last = [s for s in saved if s[0] == "last"]
    assert [epoch for _, epoch, _, _ in last] == [1, 2, 3, 4, 5]
    assert all(torch.equal(s[2], weights) for s, weights in zip(last, after, strict=True))
    assert [r["val_accuracy"] for r in log.rows] == scores
    assert [r["val_loss"] for r in log.rows] == [2.0] * 5
    assert modes == [True] * 5
    assert TrainingStates(tmp_path / "states").load()[0]["progress"]["best"] == 0.5


@pytest.mark.parametrize(("select", "expected"), [("bleu", [1, 3]), ("accuracy", [1, 2]), ("exact_match", [1, 2, 4])])
def test_the_metric_that_is_asked_for_decides_which_weights_are_best(tmp_path, select, expected):
    scores = {"accuracy": [0.5, 0.9, 0.8, 0.1], "bleu": [20.0, 10.0, 30.0, 30.0], "exact_match": [0.0, 0.5, 0.25, 0.75]}
    calls, saved = [], []

    def validate(network):
        calls.append(1)
        return {"loss": 1.0} | {name: values[len(calls) - 1] for name, values in scores.items()}

    def save_weights(name, network, row):
        if name == "best":
            saved.append((row["epoch"], network.weight.detach().clone(), row[f"val_{select}"]))

    model = linear()
    _, log = run(tmp_path, model, validate=validate, save_weights=save_weights, epochs=4, select=select)
    assert [epoch for epoch, _, _ in saved] == expected
    assert saved[-1][2] == max(scores[select])
    assert torch.equal(saved[-1][1], model.weight) == (expected[-1] == 4)
    assert [r["val_bleu"] for r in log.rows] == scores["bleu"]
    assert TrainingStates(tmp_path / "states").load()[0]["progress"]["best"] == max(scores[select])


def test_a_resumed_run_remembers_the_best_value_of_its_metric(tmp_path):
    values = iter([30.0, 20.0, 25.0, 31.0])
    saved = []

    def validate(network):
        return {"loss": 1.0, "accuracy": 0.5, "bleu": next(values)}

    def save_weights(name, network, row):
        saved.extend([row["epoch"]] if name == "best" else [])

    options = dict(validate=validate, save_weights=save_weights, select="bleu")
    run(tmp_path, linear(), epochs=2, **options)
    state, _ = TrainingStates(tmp_path / "states").load()
    run(tmp_path, linear(), epochs=4, state=state, **options)
    assert saved == [1, 4]


def test_without_held_out_data_nothing_is_best(tmp_path):
    saved = []
    run(tmp_path, linear(), save_weights=lambda name, *_: saved.append(name))
    assert saved == ["last", "last"]


def test_the_average_is_updated_evaluated_and_saved(tmp_path):
    model, after, saved, evaluated = linear(), [], [], []
    ema = ExponentialMovingAverage(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_post_hook(lambda *_: after.append(model.weight.detach().double().clone()))

    def validate(network):
        evaluated.append(network)
        return {"loss": 1.0, "accuracy": 0.25 if network is model else 0.75}

    def save_weights(name, network, row):
        saved.append((name, network.weight.detach().clone()))

    _, log = run(tmp_path, model, optimizer, ema=ema, validate=validate, save_weights=save_weights)
    average = linear().weight.detach().double()
    for update, weight in enumerate(after, 1):
        decay = min(0.5, (1 + update) / (10 + update))
        average = decay * average + (1 - decay) * weight
    torch.testing.assert_close(ema.model.weight.double(), average, rtol=1e-5, atol=1e-6)
    assert [name for name, _ in saved] == ["last", "best", "ema", "last", "ema"]
    assert torch.equal(saved[-1][1], ema.model.weight)
    assert torch.equal(saved[-2][1], model.weight)
    assert [n is ema.model for n in evaluated] == [False, True, False, True]
    assert [(r["val_accuracy"], r["ema_val_accuracy"]) for r in log.rows] == [(0.25, 0.75)] * 2


def breaking(update, kind):
    """A loss that breaks at an update, counted from 1, with one batch an update."""
    calls = []

    def loss(model, inputs, targets):
        value, correct = cross_entropy(model, inputs, targets)
        calls.append(1)
        if len(calls) == update:
            if kind == "gradient":  # 0 forwards, infinity backwards
                value = value + (model.weight.sum() * 0).abs().sqrt()
            else:
                value = value * {"nan": math.nan, "inf": math.inf}[kind]
        return value, correct

    return loss


@pytest.mark.parametrize("kind", ["nan", "inf", "gradient"])
@pytest.mark.parametrize(("log_every", "checkpoint_every"), [(1, 1), (1000, 1), (1000, None), (4, 2)])
def test_what_is_not_finite_stops_the_run_by_update_and_keeps_the_last_state(
    tmp_path, kind, log_every, checkpoint_every
):
    model, saved = linear(), []
    schedule = partial(warmup_cosine, updates=10, warmup=2, peak=0.25, final=0.01)
    with pytest.raises(NonFiniteError) as caught:
        run(
            tmp_path,
            model,
            loss=breaking(8, kind),
            schedule=schedule,
            log_every=log_every,
            checkpoint_every=checkpoint_every,
            save_weights=lambda name, network, row: saved.append((name, row["epoch"])),
        )
    message = str(caught.value)
    assert f"the {'gradient' if kind == 'gradient' else 'loss'} is not finite at update 8, epoch 2" in message
    assert f"learning rate {schedule(8):.4g}" in message
    assert ("loss inf" in message) == (kind == "inf")
    assert ("loss nan" in message) == (kind == "nan")
    assert "train.lr" in message
    state, faults = TrainingStates(tmp_path / "states").load()
    assert state["progress"]["update"] == {1: 7, 2: 6, None: 5}[checkpoint_every]
    assert faults == []
    assert all(v.isfinite().all() for v in state["model"].values())
    assert math.isfinite(state["progress"]["loss"])
    assert saved == [("last", 1)]
    assert len(read_rows(tmp_path)) == 1
    dump = json.loads((tmp_path / "nonfinite.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert dump["fault"] in message
    assert "nonfinite.json" in message
    assert dump["parameters"] == ["weight", "bias"] if kind != "gradient" else ["weight"]
    assert [u["update"] for u in dump["updates"]] == list(range(1, 9))
    assert all(math.isfinite(u["loss"]) and math.isfinite(u["gradient_norm"]) for u in dump["updates"][:-1])
    assert {"nan", "inf"} & set(map(str, dump["updates"][-1].values()))


def test_under_fp16_an_update_that_overflows_is_left_out_for_all_optimizers_and_counted(tmp_path):
    model, before = linear(), []

    def loss(network, inputs, targets):
        before.append({name: p.detach().clone() for name, p in network.named_parameters()})
        value, correct = cross_entropy(network, inputs.float(), targets)
        return (value + network.weight.sum() * math.inf if len(before) == 8 else value), correct  # not the bias

    ema = ExponentialMovingAverage(model, 0.5)
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in model.parameters()]
    _, log = run(tmp_path, model, optimizers, loss=loss, precision=torch.float16, ema=ema, epochs=3)
    after = [*before[1:], {name: p.detach() for name, p in model.named_parameters()}]
    kept = [i for i in range(15) if all(torch.equal(before[i][n], after[i][n]) for n in ("weight", "bias"))]
    assert 7 in kept
    assert all(
        not torch.equal(before[i][n], after[i][n]) for n in ("weight", "bias") for i in range(15) if i not in kept
    )
    counted = [row["train_skipped_updates"] for row in log.rows]
    assert counted == [sum(5 * epoch <= i < 5 * epoch + 5 for i in kept) for epoch in range(3)]
    assert ema.updates == 15 - len(kept)
    assert all(math.isfinite(row["train_loss"]) for row in log.rows)
    assert len(kept) < 5


def test_under_fp16_a_gradient_that_never_becomes_finite_stops_the_run(tmp_path):
    def loss(network, inputs, targets):
        value, correct = cross_entropy(network, inputs.float(), targets)
        return value * math.inf, correct

    model = linear()
    with pytest.raises(NonFiniteError, match="not finite at update 17 however small the loss is scaled"):
        run(tmp_path, model, loss=loss, precision=torch.float16, epochs=20)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), linear().parameters(), strict=True))


class Network(nn.Module):
    """Has what a resumed run must restore: dropout, buffers, parameters that decay and that don't."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 8), nn.LayerNorm(8)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layers(x))

    def hidden_matrices(self):
        return {"layers.0.weight": 2, "layers.4.weight": 1}


SCHEDULE = partial(warmup_cosine, updates=9, warmup=2, peak=0.05, final=1e-3)


class Keeping(TrainingStates):
    """Also keeps every state that is saved, and the metrics file as it was then."""

    def __init__(self, folder):
        super().__init__(folder)
        self.kept = []

    def save(self, update, state):
        super().save(update, state)
        content = io.BytesIO()
        torch.save(state, content)
        metrics = self.folder.parent / "metrics.jsonl"
        self.kept.append((update, content.getvalue(), metrics.read_text() if metrics.exists() else ""))


def accuracy_on_fixed_data(network):
    was_training = network.training
    network.eval()
    x, y, _ = next(HandBatches([50]).all(99))
    with torch.no_grad():
        logits = network(x)
    network.train(was_training)
    return {"loss": F.cross_entropy(logits, y).item(), "accuracy": (logits.argmax(1) == y).double().mean().item()}


def full_run(folder, seed, **options):
    """A run with all that has a state; returns it in full after the end."""
    model = Network(seed)
    ema = ExponentialMovingAverage(model, 0.9)
    optimizers = make_optimizers(model, muon_lr=3.0, lr=1.0, betas=(0.9, 0.99), weight_decay=0.1)
    assert [type(o) for o in optimizers] == [torch.optim.AdamW, Muon]
    saved = {}

    def save_weights(name, network, row):
        saved[name] = (copy.deepcopy(network.state_dict()), {k: v for k, v in row.items() if k in UNTIMED})

    arguments = dict(
        loader=HandBatches([5, 3, 4, 2, 2]),
        schedule=SCHEDULE,
        epochs=3,
        accumulate=2,
        clip_norm=1.0,
        ema=ema,
        validate=accuracy_on_fixed_data,
        save_weights=save_weights,
    )
    stopped, log = run(folder, model, optimizers, **arguments | options)
    rows = [{k: r[k] for k in UNTIMED} for r in log.rows]
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "ema": ema.state_dict(),
        "generator": torch.get_rng_state(),
    }
    return stopped, state, rows, saved


UNTIMED = [
    *("epoch", "update", "lr", "train_loss", "train_accuracy", "pflop"),
    *("val_loss", "val_accuracy", "ema_val_accuracy"),
]


def assert_same(a, b, where="state"):
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


def tracing(seen):
    """A loss that notes its batches."""

    def loss(model, inputs, targets):
        seen.append(inputs.flatten().tolist())
        return cross_entropy(model, inputs, targets)

    return loss


def test_the_run_with_all_that_has_a_state_has_two_optimizers_that_both_do_something(whole):
    _, state, rows, _ = whole
    kept = [{name for entry in o["state"].values() for name in entry} for o in state["optimizers"]]
    assert kept == [{"step", "exp_avg", "exp_avg_sq"}, {"average"}]
    assert [[g["lr"] for g in o["param_groups"]] for o in state["optimizers"]] == [[1e-3] * 2, [3e-3] * 2]
    assert [g["stacked"] for g in state["optimizers"][1]["param_groups"]] == [1, 2]
    first = Network(0).state_dict()
    assert all(not torch.equal(first[n], w) for n, w in state["model"].items())
    assert [r["pflop"] for r in rows] == [16 * 1000 * n / 1e15 for n in (1, 2, 3)]


def test_a_resumed_run_ends_with_the_same_bits_from_every_state(tmp_path):
    states, batches = Keeping(tmp_path / "whole" / "states"), []
    _, expected, rows, saved = full_run(tmp_path / "whole", 0, states=states, checkpoint_every=1, loss=tracing(batches))
    assert [update for update, _, _ in states.kept] == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9]
    assert (len(batches), len(rows)) == (15, 3)
    for number, (update, content, metrics) in enumerate(states.kept):
        folder = tmp_path / f"from {number}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(metrics)
        state, remaining = torch.load(io.BytesIO(content)), []
        epochs, done = state["progress"]["epoch"], state["progress"]["batch"]
        assert state["progress"]["update"] == update
        _, resumed, resumed_rows, resumed_saved = full_run(folder, 1, state=state, loss=tracing(remaining))
        assert remaining == batches[5 * epochs + done :]
        assert_same(resumed, expected)
        assert resumed_rows == rows
        assert_same(resumed_saved, {n: s for n, s in saved.items() if s[1]["epoch"] > epochs})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The end of a run without interruption."""
    return full_run(tmp_path_factory.mktemp("whole"), 0)


@pytest.mark.parametrize(
    ("number", "at"), [(signal.SIGTERM, 1), (signal.SIGTERM, 5), (signal.SIGTERM, 15), (signal.SIGINT, 8)]
)
def test_a_signal_saves_the_state_after_the_update_and_the_run_goes_on_to_the_same_end(tmp_path, whole, number, at):
    _, expected, rows, _ = whole
    calls = []

    def loss(model, inputs, targets):
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), number)
        return cross_entropy(model, inputs, targets)

    before = signal.getsignal(number)
    stopped, _, _, _ = full_run(tmp_path / "run", 0, loss=loss)
    assert stopped == number
    assert signal.getsignal(number) is before
    state, _ = TrainingStates(tmp_path / "run" / "states").load()
    assert state["progress"]["update"] == {1: 1, 5: 3, 15: 9, 8: 5}[at]
    stopped, resumed, resumed_rows, _ = full_run(tmp_path / "run", 1, state=state)
    assert stopped is None
    assert_same(resumed, expected)
    assert resumed_rows == rows


def test_a_run_that_is_complete_does_nothing_more(tmp_path):
    _, expected, rows, _ = full_run(tmp_path, 0)
    state, _ = TrainingStates(tmp_path / "states").load()
    loader = HandBatches()
    stopped, again, rows_again, saved = full_run(tmp_path, 1, state=state, loader=loader)
    assert (stopped, saved, loader.asked) == (None, {}, [])
    assert_same(again, expected)
    assert rows_again == rows


@pytest.mark.parametrize("checkpoint_every", [None, 3])
def test_an_epoch_whose_weights_could_not_be_written_is_logged_once(tmp_path, whole, checkpoint_every):
    _, expected, rows, _ = whole

    def full_disk(name, network, row):
        if row["epoch"] == 2:
            raise SaveError("no space left")

    with pytest.raises(SaveError):
        full_run(tmp_path / "run", 0, save_weights=full_disk, checkpoint_every=checkpoint_every)
    state, _ = TrainingStates(tmp_path / "run" / "states").load()
    _, resumed, resumed_rows, _ = full_run(tmp_path / "run", 1, state=state)
    assert_same(resumed, expected)
    assert resumed_rows == rows
    assert [r["epoch"] for r in read_rows(tmp_path / "run")] == [1, 2, 3]


def test_states_are_written_as_often_as_asked_and_after_each_epoch(tmp_path):
    states = Keeping(tmp_path / "states")
    run(tmp_path, linear(), states=states, checkpoint_every=2, epochs=2)
    assert [update for update, _, _ in states.kept] == [2, 4, 5, 6, 8, 10, 10]
    assert [p.name for p in states.paths()] == ["update_00000010.pt", "update_00000008.pt"]
    progress = [torch.load(io.BytesIO(content))["progress"] for _, content, _ in states.kept]
    assert [(p["epoch"], p["batch"]) for p in progress] == [(0, 2), (0, 4), (1, 0), (1, 1), (1, 3), (1, 5), (2, 0)]
    assert [p["count"] for p in progress] == [8, 14, 0, 5, 12, 15, 0]


def test_a_state_holds_only_tensors_and_plain_values(tmp_path):
    full_run(tmp_path, 0)

    def check(value):
        if isinstance(value, dict):
            for key, entry in value.items():
                check(key)
                check(entry)
        elif isinstance(value, list | tuple):
            for entry in value:
                check(entry)
        else:
            assert value is None or type(value) in (torch.Tensor, str, int, float, bool), type(value)

    for path in TrainingStates(tmp_path / "states").paths():
        check(torch.load(path))
