"""Checks what a run writes and prints: the same numbers in both files, one row an epoch, plain lines in a pipe."""

import csv
import json
import math
import sys

import pytest

from vit_scratch.training.log import RunLog, read_rows


def row(epoch, update=None, **others):
    return {
        "epoch": epoch,
        "update": 10 * epoch if update is None else update,
        "lr": 1e-3 / epoch,
        "train_loss": 1 / 3 / epoch,
        "train_accuracy": 0.1 * epoch,
        "items_per_second": 1234.5,
        "seconds": 2.25,
    } | others


def log_of(folder, **options):
    return RunLog(folder, **{"epochs": 5, "updates": 50, "items": "images"} | options)


def jsonl(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def table(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_both_files_hold_the_same_exact_numbers_after_every_epoch(tmp_path):
    log, rows = log_of(tmp_path / "run"), []
    for epoch in (1, 2, 3):
        rows.append(row(epoch, val_loss=0.1 + 0.2, val_accuracy=7 / 9))
        log.add(rows[-1])
        assert jsonl(tmp_path / "run") == rows
        assert [{k: float(v) for k, v in r.items()} for r in table(tmp_path / "run")] == rows
        assert list(table(tmp_path / "run")[0]) == list(rows[0])
    assert read_rows(tmp_path / "run") == rows
    log.close()


def test_a_column_that_comes_later_is_empty_before(tmp_path):
    log = log_of(tmp_path)
    log.add(row(1))
    log.add(row(2, val_loss=0.5, val_accuracy=0.25))
    assert [r["val_loss"] for r in table(tmp_path)] == ["", "0.5"]
    assert ["val_loss" in r for r in jsonl(tmp_path)] == [False, True]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_does_not_know_is_null(tmp_path, value):
    log_of(tmp_path).add(row(1, val_loss=value, val_accuracy=0.5))
    text = (tmp_path / "metrics.jsonl").read_text()
    (parsed,) = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert parsed["val_loss"] is None
    assert parsed["val_accuracy"] == 0.5


def test_a_run_with_null_in_its_rows_goes_on(tmp_path):
    log_of(tmp_path).add(row(1, val_loss=math.inf, val_accuracy=0.5))
    log = log_of(tmp_path, start=10)
    log.add(row(2, val_loss=0.25, val_accuracy=0.75))
    assert [r["val_loss"] for r in jsonl(tmp_path)] == [None, 0.25]
    assert [r["val_accuracy"] for r in table(tmp_path)] == ["0.5", "0.75"]


def test_a_resumed_run_drops_the_rows_after_its_state(tmp_path):
    log = log_of(tmp_path)
    for epoch in (1, 2, 3):
        log.add(row(epoch))
    log = log_of(tmp_path, start=20)
    assert log.rows == [row(1), row(2)]
    log.add(row(3, train_loss=9.0))
    assert jsonl(tmp_path) == [row(1), row(2), row(3, train_loss=9.0)]
    assert [float(r["epoch"]) for r in table(tmp_path)] == [1, 2, 3]
    assert log_of(tmp_path, start=15).rows == [row(1)]
    assert log_of(tmp_path).rows == []


def test_a_folder_without_metrics_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "nowhere") == []
    assert log_of(tmp_path / "nowhere", start=7).rows == []


def test_without_a_terminal_plain_lines_are_printed(tmp_path, capsys):
    log = log_of(tmp_path)
    assert log.bar.disable
    log.add(row(2, val_loss=0.5, val_accuracy=0.875, ema_val_loss=0.25, ema_val_accuracy=1.0))
    log.say("note: one line")
    log.close()
    out, err = capsys.readouterr()
    assert out == (
        "epoch 2/5  train loss 0.1667 accuracy 20.00 %  val loss 0.5000 accuracy 87.50 %  "
        "ema val loss 0.2500 accuracy 100.00 %  1234 images/s\nnote: one line\n"
    )
    assert err == ""


def test_further_metrics_are_printed_with_the_name_they_belong_to(tmp_path, capsys):
    log = log_of(tmp_path)
    val = {"val_loss": 0.5, "val_accuracy": 0.875, "val_bleu": 27.41234, "val_exact_match": 0.5}
    log.add(row(2, **val, ema_val_loss=0.25, ema_val_accuracy=1.0, ema_val_bleu=0.0, ema_val_exact_match=1.0))
    assert capsys.readouterr().out == (
        "epoch 2/5  train loss 0.1667 accuracy 20.00 %  val loss 0.5000 accuracy 87.50 % bleu 27.41 exact match 0.5  "
        "ema val loss 0.2500 accuracy 100.00 % bleu 0 exact match 1  1234 images/s\n"
    )
    assert jsonl(tmp_path)[0]["val_bleu"] == 27.41234
    assert table(tmp_path)[0]["ema_val_exact_match"] == "1.0"


def test_without_a_terminal_progress_is_a_line_every_15_seconds(tmp_path, capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("vit_scratch.training.log.time.monotonic", lambda: now[0])
    log = log_of(tmp_path)
    for update in range(1, 8):
        now[0] += 6
        log.progress(update, 1, 5e-4, {"train_loss": 1.5, "train_accuracy": 0.5, "items_per_second": 99.6})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["update 3/50", "update 6/50"]
    assert lines[0] == "update 3/50  epoch 1/5  loss 1.500  acc 50.0%  lr 5.00e-04  images/s 100"


def test_on_a_terminal_a_bar_shows_where_the_run_stands(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log = log_of(tmp_path, start=20)
    assert not log.bar.disable
    log.progress(27, 3, 5e-4, {"train_loss": 1.5, "train_accuracy": 0.5, "items_per_second": 99.6})
    assert log.bar.n == 27
    log.close()
    assert "27/50" in capsys.readouterr().err


def test_tensorboard_files_hold_the_numbers(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = log_of(tmp_path, tensorboard=True)
    log.add(row(1))
    log.add(row(2))
    log.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train_loss")] == [
        (10, pytest.approx(1 / 3)),
        (20, pytest.approx(1 / 6)),
    ]


def test_tensorboard_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"train.tensorboard=true .*vit-scratch\[tensorboard\]"):
        log_of(tmp_path, tensorboard=True)
