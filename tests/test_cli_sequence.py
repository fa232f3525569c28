"""The commands from end to end on sequences: train, stop, resume, evaluate, translate, and one message for a fault."""

import io
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

pytest.importorskip("tokenizers", reason="text needs the extra: pip install -e '.[text]'")
pytest.importorskip("sacrebleu", reason="text needs the extra: pip install -e '.[text]'")

import sacrebleu

import vit_scratch.data
from vit_scratch import cli
from vit_scratch.tasks import sequence
from vit_scratch.training import checkpoint

pytestmark = pytest.mark.usefixtures("without_curves")
SMALL = [
    *("--task", "sequence", "--device", "cpu", "--model.dim", "32", "--model.encoder_depth", "1"),
    *("--model.decoder_depth", "1", "--model.heads", "4", "--model.dropout", "0", "--train.label_smoothing", "0"),
]
REVERSE = [
    *(*SMALL, "--data.symbols", "10", "--data.longest", "4", "--data.count", "1500", "--data.max_length", "8"),
    *("--train.batch_tokens", "256", "--train.lr", "5e-3", "--train.epochs", "8", "--decode.beams", "1"),
]
TINY = [
    *("--task", "sequence", "--device", "cpu", "--model.dim", "8", "--model.encoder_depth", "1", "--model.heads", "2"),
    *("--model.decoder_depth", "1", "--data.max_length", "40", "--train.batch_tokens", "160", "--train.epochs", "2"),
]
ANIMALS = {"dog": "hund", "cat": "katz", "bird": "vogl", "horse": "pferd", "fish": "fisch", "mouse": "maus"}
COLOURS = {"red": "rot", "blue": "blau", "green": "grün", "black": "swarz", "white": "weis", "old": "alt"}


def run(*arguments: object) -> int:
    """The exit status of a command, run in this process."""
    try:
        return cli.main([str(a) for a in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def rows(out: Path) -> list[dict]:
    """The metrics of a run without those that depend on time."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "items_per_second")} for row in lines]


def same_weights(a: Path, b: Path) -> bool:
    first, second = load_file(a), load_file(b)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def sentence_pairs() -> list[tuple[str, str]]:
    """English, and a language with another order of words and its own letters."""
    pairs = [(f"a {c} {a}.", f"{ANIMALS[a]} {COLOURS[c]}ig da.") for a in ANIMALS for c in COLOURS]
    pairs += [(f"{a} and {b}.", f"{ANIMALS[a]} und {ANIMALS[b]}.") for a in ANIMALS for b in ANIMALS]
    random.Random(0).shuffle(pairs)
    return pairs


def write(root: Path, name: str, pairs: list[tuple[str, str]]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for side, language in enumerate(("en", "de")):
        (root / f"{name}.{language}").write_text("".join(f"{p[side]}\n" for p in pairs), encoding="utf-8")


def write_corpus(root: Path) -> Path:
    """72 pairs: 52 to learn from, 8 held out, 12 to test on, and some of them in another test file."""
    pairs = sentence_pairs()
    for name, part in (
        ("train", pairs[:52]),
        ("val", pairs[52:60]),
        ("test", pairs[60:]),
        ("more/other", pairs[55:63]),
    ):
        write((root / name).parent, Path(name).name, part)
    return root


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text files, not to be changed."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "data")


@pytest.fixture(scope="module", autouse=True)
def _few_made_up_sequences() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence, "TOY_PAIRS", 200)
        yield


@pytest.fixture(scope="module")
def reverse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on made-up sequences, not to be changed."""
    out = tmp_path_factory.mktemp("reverse") / "run"
    assert run("train", *REVERSE, "--train.ema_decay", "0.9", "--out", out) == 0
    return out


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A finished run on text, not to be changed."""
    out = tmp_path_factory.mktemp("text") / "run"
    options = ["--data.kind", "text", "--data.root", corpus, "--data.vocabulary", "340", "--data.max_length", "32"]
    options += ["--train.epochs", "24", "--train.batch_tokens", "128", "--train.lr", "1e-2", "--train.ema_decay", "0.5"]
    assert run("train", *SMALL, *options, "--out", out) == 0
    return out


def parts_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))["parts"]


def test_reversing_is_learned_and_evaluate_repeats_the_figures_of_the_end_of_training(
    reverse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = json.loads((reverse / "summary.json").read_text())
    expected = summary["test"]["parts"]["test"]
    assert expected["exact_match"] > 0.6
    assert expected["count"] == 200
    assert expected["exact_match"] == expected["correct"] / 200
    assert parts_of(reverse / "evaluation" / "results.json")["test"] == expected
    for batch_size in (1, 7, 256):
        arguments = ("--json", tmp_path / "r.json", "--out", tmp_path / "out", "--batch_size", batch_size)
        assert run("evaluate", reverse, *arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == f"test exact match {100 * expected['exact_match']:.2f} % ({expected['correct']}/200)"
        assert lines[0] == (
            f"test: loss {expected['loss']:.4f}, perplexity {expected['perplexity']:.3f}, token accuracy "
            f"{100 * expected['token_accuracy']:.2f} % ({round(expected['token_accuracy'] * expected['tokens'])}"
            f"/{expected['tokens']})"
        )
        assert parts_of(tmp_path / "r.json")["test"] == expected
        written = (tmp_path / "out" / "test.txt").read_text()
        assert written == (reverse / "evaluation" / "test.txt").read_text()


def test_what_is_written_is_what_was_counted(reverse: Path) -> None:
    from vit_scratch.data.toy import toy_pairs

    parts = toy_pairs("reverse", [1500, 200, 200], symbols=10, longest=4, seed=0)
    lines = (reverse / "evaluation" / "test.txt").read_text().splitlines()
    right = [line == " ".join(map(str, s[::-1])) for line, s in zip(lines, parts[2][0], strict=True)]
    assert sum(right) == parts_of(reverse / "evaluation" / "results.json")["test"]["correct"]
    assert (reverse / "evaluation_ema" / "test.txt").read_text() != ""


def test_evaluate_on_held_out_sequences_repeats_the_last_epoch(reverse: Path, tmp_path: Path) -> None:
    for name, prefix in (("last", "val"), ("ema", "ema_val")):
        arguments = ("--split", "val", "--json", tmp_path / "r.json", "--out", tmp_path)
        assert run("evaluate", reverse / f"{name}.safetensors", *arguments) == 0
        (result,) = parts_of(tmp_path / "r.json").values()
        last = rows(reverse)[-1]
        for metric, key in (("exact_match", "exact_match"), ("accuracy", "token_accuracy")):
            assert last[f"{prefix}_{metric}"] == result[key]
        assert last[f"{prefix}_loss"] == pytest.approx(result["loss"], rel=1e-6)


def test_the_best_weights_are_those_with_most_exact_matches(reverse: Path) -> None:
    values = [row["val_exact_match"] for row in rows(reverse)]
    _, description = checkpoint.load_weights(reverse / "best.safetensors")
    assert description["metrics"]["epoch"] == 1 + values.index(max(values))
    assert description["task"] == "sequence"


def test_a_run_leaves_everything_that_the_readme_names(reverse: Path, text: Path) -> None:
    common = {
        *("config.yaml", "metrics.jsonl", "metrics.csv", "curves.png", "summary.json"),
        *("last.safetensors", "best.safetensors", "ema.safetensors"),
        *("evaluation/results.json", "evaluation_ema/results.json"),
    }
    for out, name in ((reverse, "test.txt"), (text, "test.de")):
        names = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
        assert names >= common | {f"evaluation/{name}", f"evaluation_ema/{name}"}
        assert not [n for n in names if n.endswith(".part")]


def test_an_averaged_checkpoint_holds_tied_weights_once_and_evaluates(reverse: Path, tmp_path: Path) -> None:
    written = load_file(reverse / "ema.safetensors")
    assert len([n for n in written if n.endswith("embedding.weight") or n == "head.weight"]) == 1
    model, _, _ = sequence.load_transformer(reverse / "ema.safetensors")
    assert model.head.weight.data_ptr() == model.source_embedding.embedding.weight.data_ptr()
    assert run("evaluate", reverse / "ema.safetensors", "--json", tmp_path / "r.json", "--out", tmp_path) == 0
    summary = json.loads((reverse / "summary.json").read_text())
    assert parts_of(tmp_path / "r.json") == summary["test_ema"]["parts"] != summary["test"]["parts"]


def test_translations_are_written_and_scored_by_sacrebleu(text: Path, corpus: Path, tmp_path: Path) -> None:
    summary = json.loads((text / "summary.json").read_text())
    result = summary["test"]["parts"]["test"]
    translations = (text / "evaluation" / "test.de").read_text(encoding="utf-8").split("\n")[:-1]
    references = (corpus / "test.de").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(translations) == len(references) == result["count"] == 12
    assert result["bleu"] == pytest.approx(sacrebleu.corpus_bleu(translations, [references]).score, abs=1e-9)
    assert result["chrf"] == pytest.approx(sacrebleu.corpus_chrf(translations, [references]).score, abs=1e-9)
    assert result["bleu"] > 20
    assert "case:mixed" in result["bleu_signature"]
    assert "tok:13a" in result["bleu_signature"]
    assert summary["test"]["decode"] == {"beams": 5, "length_penalty": 1.0}
    assert run("evaluate", text, "--json", tmp_path / "r.json", "--out", tmp_path / "out", "--batch_size", "1") == 0
    assert parts_of(tmp_path / "r.json") == summary["test"]["parts"]
    assert (tmp_path / "out" / "test.de").read_bytes() == (text / "evaluation" / "test.de").read_bytes()


def test_held_out_text_is_evaluated_as_in_training_with_one_beam(text: Path, tmp_path: Path) -> None:
    arguments = ("--split", "val", "--decode.beams", "1", "--json", tmp_path / "r.json", "--out", tmp_path)
    assert run("evaluate", text, *arguments) == 0
    result = parts_of(tmp_path / "r.json")["val"]
    last = rows(text)[-1]
    assert (result["bleu"], result["token_accuracy"]) == (last["val_bleu"], last["val_accuracy"])
    assert result["loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert (tmp_path / "val.de").exists()
    values = [row["val_bleu"] for row in rows(text)]
    best = checkpoint.read_description(text / "best.safetensors")["metrics"]
    assert best["epoch"] == 1 + values.index(max(values))


def test_the_beam_of_evaluation_can_be_changed(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    original = sequence.generate

    def generate(model: Any, sources: Any, decode: Any, *others: Any) -> Any:
        seen.append(decode)
        return original(model, sources, decode, *others)

    monkeypatch.setattr(sequence, "generate", generate)
    for beams, printed in ((1, "(greedy)"), (3, "(beam search 3, length penalty 0.5)")):
        arguments = ("--decode.beams", beams, "--decode.length_penalty", "0.5", "--json", tmp_path / "r.json")
        assert run("evaluate", text, *arguments, "--out", tmp_path) == 0
        assert printed in capsys.readouterr().out
        assert json.loads((tmp_path / "r.json").read_text())["decode"] == {"beams": beams, "length_penalty": 0.5}
    assert [(d.beams, d.length_penalty) for d in seen] == [(1, 0.5), (3, 0.5)]
    assert run("evaluate", text, "--decode.beams", "0") == 2
    assert "decode.beams=0" in capsys.readouterr().err


def test_text_that_has_moved_and_other_test_files_are_evaluated(
    text: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = shutil.copytree(corpus, tmp_path / "elsewhere")
    arguments = ("--data.root", moved, "--json", tmp_path / "r.json")
    assert run("evaluate", text, *arguments, "--out", tmp_path / "out") == 0
    assert f"note: data.root is {moved}, other than in training" in capsys.readouterr().out
    assert parts_of(tmp_path / "r.json") == parts_of(text / "evaluation" / "results.json")

    (moved / "test.de").unlink()
    assert run("evaluate", text, *arguments, "--out", tmp_path / "out") == 2
    assert f"data.target='de': {moved}/test.de does not exist; of test there is: en" in capsys.readouterr().err

    assert run("evaluate", text, *arguments, "--data.test", "[more/other, val]", "--out", tmp_path / "two") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" BLEU")[0] for line in lines[-2:]] == ["more/other", "val"]
    assert {name: part["count"] for name, part in parts_of(tmp_path / "r.json").items()} == {"more/other": 8, "val": 8}
    assert {p.name for p in (tmp_path / "two").iterdir()} == {"results.json", "more_other.de", "val.de"}
    assert run("evaluate", text, *arguments, "--data.test", "[]", "--out", tmp_path / "none") == 2
    assert "--data.test" in capsys.readouterr().err


BROKEN = [
    *(*TINY, "--data.kind", "text", "--data.vocabulary", "280", "--model.dropout", "0.2", "--train.ema_decay", "0.9"),
    *("--train.accumulate", "2", "--train.batch_tokens", "60", "--train.epochs", "3", "--train.checkpoint_every", "2"),
]


class Killed(BaseException):
    """What no code of ours catches."""


def at_call(number: int, action: Callable[[], None]) -> Callable[..., Any]:
    """The task's loss, which at a call with data (compute is counted without) does something else first."""
    original, calls = sequence.smoothed_cross_entropy, []

    def loss(*arguments: Any) -> Any:
        calls.extend([1] * (arguments[-1].device.type != "meta"))
        if len(calls) == number:
            action()
        return original(*arguments)

    return loss


def test_a_run_that_was_killed_stopped_and_resumed_ends_like_one_that_was_not(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = [*BROKEN, "--data.root", corpus]
    assert run("train", *options, "--out", whole) == 0
    batches = int(capsys.readouterr().out.split(" target tokens in ")[1].split()[0])
    assert batches >= 9

    def kill() -> None:
        raise Killed

    monkeypatch.setattr(sequence, "smoothed_cross_entropy", at_call(batches - 1, kill))
    with pytest.raises(Killed):
        run("train", *options, "--out", broken)
    monkeypatch.undo()
    state = checkpoint.TrainingStates(broken / "states").paths()[0]
    assert 0 < int(state.stem[7:]) < batches / 2  # in the middle of the first epoch
    assert not (broken / "summary.json").exists()

    stop = at_call(batches + 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(sequence, "smoothed_cross_entropy", stop)
    torch.manual_seed(99)
    assert run("train", "--out", broken, "--resume") == 128 + signal.SIGTERM
    assert f"--out {broken} --resume" in capsys.readouterr().out
    monkeypatch.undo()
    assert 1 <= len(rows(broken)) < 3

    torch.manual_seed(98)
    assert run("train", "--out", broken, "--resume", "--train.batch_tokens", "60") == 0  # a field of this task
    for name in ("last", "best", "ema"):
        assert same_weights(whole / f"{name}.safetensors", broken / f"{name}.safetensors"), name
    assert rows(whole) == rows(broken)
    assert [r["epoch"] for r in rows(broken)] == [1, 2, 3]
    assert parts_of(whole / "evaluation" / "results.json") == parts_of(broken / "evaluation" / "results.json")


def test_a_run_does_not_go_on_with_other_text_or_as_another_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = write_corpus(tmp_path / "data"), tmp_path / "run"
    options = [*TINY, "--data.kind", "text", "--data.root", root, "--data.vocabulary", "280", "--out", out]
    assert run("train", *options) == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert run("train", *options) == 2
    assert "--resume" in capsys.readouterr().err
    assert run("train", *options, "--resume", "--data.vocabulary", "281", "--decode.beams", "2") == 2
    message = capsys.readouterr().err
    assert "data.vocabulary: 280 then, 281 now" in message
    assert "decode.beams: 5 then, 2 now" in message
    (tmp_path / "image.yaml").write_text("data:\n  kind: digits\n")
    assert run("train", "--config", tmp_path / "image.yaml", "--out", out, "--resume") == 2
    assert "task: sequence then, classification now" in capsys.readouterr().err
    moved = root.rename(tmp_path / "elsewhere")
    assert run("train", *options, "--resume", "--data.root", moved) == 0  # the same files in another place

    capsys.readouterr()
    write(moved, "train", [("a dog.", "hund."), *sentence_pairs()[1:52]])
    assert run("train", *options, "--resume", "--data.root", moved) == 2
    assert "is of a run on other data" in capsys.readouterr().err
    names = {p for p in out.rglob("*") if p.is_file()}
    assert names == before.keys()
    assert all(p.read_bytes() == before[p] for p in names if p.suffix in (".safetensors", ".pt", ".png"))


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Put bytes on the standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_translate_writes_a_line_for_each_argument_or_line(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    english = ["a red dog.", "dog and cat.", "a blue fish."]
    assert run("translate", "--checkpoint", text, *english) == 0
    translated = capsys.readouterr().out.splitlines()
    assert len(translated) == 3
    assert len(set(translated)) == 3
    assert translated[0].endswith(".")
    for content in ("\n".join(english), "\n".join(english) + "\n", "\ufeff" + "\r\n".join(english) + "\r\n"):
        feed(monkeypatch, content.encode())
        assert run("translate", "--checkpoint", text / "last.safetensors") == 0
        assert capsys.readouterr().out.splitlines() == translated
    feed(monkeypatch, b"a red dog.\n\n  \na blue\rfish.\xe2\x80\xa8\ndog and cat.\n")
    assert run("translate", "--checkpoint", text) == 0
    lines = capsys.readouterr().out.split("\n")
    assert (len(lines), lines[0], lines[1], lines[2], lines[4]) == (6, translated[0], "", "", translated[1])
    feed(monkeypatch, b"")
    assert run("translate", "--checkpoint", text) == 0
    assert capsys.readouterr().out == ""


def test_more_lines_than_are_translated_together_keep_their_places(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    english = [*(s for s, _ in sentence_pairs()[:20]), ""]
    assert run("translate", "--checkpoint", text, "--decode.beams", "1", *english) == 0
    translated = capsys.readouterr().out.split("\n")[:-1]
    assert len(set(translated)) > 10
    feed(monkeypatch, "".join(f"{s}\n" for s in english * 7).encode())  # 147 lines
    assert run("translate", "--checkpoint", text, "--decode.beams", "1") == 0
    assert capsys.readouterr().out.split("\n")[:-1] == translated * 7


def test_translate_writes_what_evaluate_writes(
    text: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, (corpus / "test.en").read_bytes())
    assert run("translate", "--checkpoint", text) == 0
    assert capsys.readouterr().out == (text / "evaluation" / "test.de").read_text(encoding="utf-8")


@pytest.mark.parametrize("sentence", ["null", "1e3", "a: b", "[x, y]", "{a: b}", "true", "</s>", "$x_1$", "日本 🐈"])
def test_any_argument_is_a_sentence(text: Path, capsys: pytest.CaptureFixture[str], sentence: str) -> None:
    assert run("translate", "--checkpoint", text, "--decode.beams", "1", sentence, sentence) == 0
    first, second = capsys.readouterr().out.split("\n")[:-1]
    assert first == second


def test_a_sentence_that_is_too_long_is_cut_and_noted(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("translate", "--checkpoint", text, "a red dog.", "dog and cat " * 40, "--decode.beams", "1") == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert err.startswith("note: sentence 2 has ")
    assert err.endswith(" tokens and is cut after 31\n")
    assert int(err.split(" has ")[1].split()[0]) > 100


def test_input_that_is_not_utf_8_is_named_by_its_line(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"a red dog.\ndog and cat.\ncaf\xe9\na fish.\n")
    assert run("translate", "--checkpoint", text, "--decode.beams", "1") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "line 3 of the input is not UTF-8" in err
    assert run("translate", "--checkpoint", text, "a \udce9") == 2  # how Python holds such an argument
    assert "sentence 1 is not UTF-8" in capsys.readouterr().err


def test_the_attention_of_the_first_sentence_is_drawn(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen, original = tmp_path / "attention.png", [], sequence.plot_attention

    def plot(weights: Any, source: list[str], target: list[str], where: Path) -> None:
        seen.append((weights, source, target))
        original(weights, source, target, where)

    monkeypatch.setattr(sequence, "plot_attention", plot)
    assert run("translate", "--checkpoint", text, "", "a red dog.", "dog and cat.", "--attention", path) == 0
    out, err = capsys.readouterr()
    assert f"attention: {path}" in err
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert len(np.unique(np.asarray(image.convert("L")))) > 20
    ((weights, source, target),) = seen
    assert source == ["a", "red", "dog", ".", "end"]
    written = out.splitlines()[1]
    assert target == [*written.replace(".", " .").split(), "end"]
    assert weights.shape == (len(target), len(source))
    assert weights.sum(axis=1) == pytest.approx([1] * len(target), abs=1e-5)
    assert weights.min() >= 0
    assert [p.name for p in tmp_path.iterdir()] == ["attention.png"]
    assert run("translate", "--checkpoint", text, "a", "--attention", tmp_path / "nowhere" / "a.png") == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on images, not to be changed."""
    out = tmp_path_factory.mktemp("images") / "run"
    options = ["--data.kind", "digits", "--model.patch_size", "4", "--model.dim", "8", "--model.depth", "1"]
    options += ["--model.heads", "2", "--train.epochs", "1", "--train.warmup_epochs", "0", "--device", "cpu"]
    assert run("train", *options, "--out", out) == 0
    return out


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a failed command, which must be one line."""
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert message.count("\n") == 1, message
    return message


def test_models_of_another_kind_are_refused(
    images: Path, reverse: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    for arguments, expected in (
        (("translate", "--checkpoint", images, "a"), "a model for the task 'classification', not for 'sequence'"),
        (("translate", "--checkpoint", reverse, "1 2"), "made-up sequences (data.kind=reverse), not for text"),
        (("translate", "--checkpoint", tmp_path / "none", "a"), "none does not exist"),
        (("translate", "--checkpoint", tmp_path, "a"), "holds no last.safetensors"),
        (
            ("evaluate", images, "--decode.beams", "3"),
            "decode.beams=3 does not apply: the checkpoint is a model for images",
        ),
        (("evaluate", images, "--data.test", "[a]"), "data.test=['a'] does not apply"),
        (
            ("evaluate", text, "--data.kind", "digits"),
            "data.kind=digits does not apply: the checkpoint is a model for seq",
        ),
        (("evaluate", text, "--data.workers", "1"), "data.workers=1 does not apply"),
        (
            ("evaluate", reverse, "--data.root", "x"),
            "data.root=x does not apply: the checkpoint is a model for made-up",
        ),
        (("evaluate", reverse, "--data.test", "[x]"), "data.test=['x'] does not apply"),
    ):
        assert run(*arguments) == 2, arguments
        assert expected in one_line(capsys)


def edited(name: str, content: bytes | None) -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        if content is None:
            (root / name).unlink()
        else:
            (root / name).write_bytes(content)

    return edit


def unchanged(root: Path) -> None:
    pass


def lines(count: int, **others: str) -> bytes:
    """So many lines, some of them others: `line_3="..."`."""
    return "".join(others.get(f"line_{i}", "hund") + "\n" for i in range(1, count + 1)).encode()


@pytest.mark.parametrize(
    ("edit", "options", "expected"),
    [
        (edited("train.de", lines(51)), [], ["train.en has 52 lines and", "train.de has 51"]),
        (edited("val.de", lines(9)), [], ["val.en has 8 lines and", "val.de has 9"]),
        (edited("test.de", lines(11)), [], ["test.en has 12 lines and", "test.de has 11"]),
        (edited("train.de", lines(52, line_7=" ")), [], ["train.de, line 7, is empty", "data.skip_empty=true"]),
        (edited("train.en", lines(51) + b"caf\xe9\n"), [], ["train.en, line 52, is not UTF-8 (byte 0xe9)", "iconv"]),
        (edited("val.en", None), [], ["data.source='en'", "val.en does not exist; of val there is: de"]),
        (unchanged, ["--data.target", "fr"], ["data.target='fr'", "of train there is: de, en"]),
        (unchanged, ["--data.source", "de"], ["data.source='de' and data.target='de' are the same"]),
        (unchanged, ["--data.root", "nowhere"], ["data.root='nowhere': there is no such folder"]),
        (unchanged, ["--data.test", "[other]"], ["other.en does not exist; there is nothing called other.*"]),
        (unchanged, ["--data.vocabulary", "258"], ["data.vocabulary=258 is too small; it must be at least 259"]),
        (unchanged, ["--data.max_length", "3"], ["no train pair has at most data.max_length=3 tokens; raise it"]),
        (unchanged, ["--train.batch_tokens", "39"], ["train.batch_tokens=39 has no room", "data.max_length=40"]),
        (unchanged, ["--model.heads", "3"], ["dim=8 is not divisible by heads=3; valid head counts: 1, 2, 4, 8"]),
        (unchanged, ["--model.dim", "-8"], ["model.dim=-8"]),
        (unchanged, ["--model.encoder_depth", "0"], ["depth=0"]),
        (unchanged, ["--decode.beams", "0"], ["decode.beams=0"]),
        (unchanged, ["--device", "tpu"], ["tpu"]),
        (unchanged, ["--task", "translation"], ["task='translation' is unknown; choose from classification, sequence"]),
        (unchanged, ["--train.batch_size", "8"], ["unrecognized arguments: --train.batch_size 8"]),
        (unchanged, ["--data.targt", "de"], ["--data.targt de", "did you mean data.target?"]),
    ],
)
def test_wrong_input_is_named_in_one_line_and_nothing_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    edit: Callable[[Path], None],
    options: list[str],
    expected: list[str],
) -> None:
    root = write_corpus(tmp_path / "data")
    edit(root)
    arguments = ("train", *TINY, "--data.kind", "text", "--data.root", root, "--data.vocabulary", "280", *options)
    assert run(*arguments, "--out", tmp_path / "run") == 2
    message = one_line(capsys)
    for part in expected:
        assert part in message
    assert not (tmp_path / "run").exists()


def test_made_up_sequences_that_are_too_many_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data.symbols", "3", "--data.longest", "6", "--data.count", "100", "--out", tmp_path / "run"]
    assert run("train", *TINY, *options) == 2
    assert "500 different sequences of at most longest=6 out of symbols=3 are too many" in one_line(capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["task: translation", "task: [sequence]", "task: null", "task:\nseed: 1"])
def test_an_unknown_task_in_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    (tmp_path / "c.yaml").write_text(content)
    assert run("train", "--config", tmp_path / "c.yaml", "--out", tmp_path / "run") == 2
    assert "task" in one_line(capsys)
    assert not (tmp_path / "run").exists()


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Let imports of a package fail, also where it was imported before."""
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    if package == "tokenizers":
        monkeypatch.delitem(sys.modules, "vit_scratch.data.text", raising=False)
        monkeypatch.delattr(vit_scratch.data, "text", raising=False)


@pytest.mark.parametrize("package", ["tokenizers", "sacrebleu"])
def test_a_missing_package_is_named_with_a_remedy_before_any_work(
    text: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    package: str,
) -> None:
    hide(monkeypatch, package)
    capsys.readouterr()
    commands: list[tuple] = [
        ("train", *TINY, "--data.kind", "text", "--data.root", corpus, "--out", tmp_path / "run"),
        ("evaluate", text, "--out", tmp_path / "out"),
    ]
    commands += [("translate", "--checkpoint", text, "a")] if package == "tokenizers" else []
    for command in commands:
        assert run(*command) == 2
        assert "needs a package that is missing; pip install 'vit-scratch[text]'" in one_line(capsys)
    assert list(tmp_path.iterdir()) == []
    reverse = ["--data.count", "100", "--data.symbols", "20", "--train.epochs", "1", "--train.warmup_epochs", "0"]
    assert run("train", *TINY, *reverse, "--out", tmp_path / "run") == 0  # needs neither


def test_sentences_that_are_too_long_are_counted_in_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_corpus(tmp_path / "data")
    long = ("dog and cat " * 30, "hund und katz.")
    write(root, "train", [*sentence_pairs()[:51], long])
    write(root, "val", [long, *sentence_pairs()[52:59]])
    options = ["--data.kind", "text", "--data.root", root, "--data.vocabulary", "320", "--out", tmp_path / "run"]
    assert run("train", *TINY, *options) == 0
    out = capsys.readouterr().out
    assert "note: left out 1 train pairs with more than data.max_length=40 tokens; the first is line 52" in out
    assert "note: cut 1 val pairs with more than data.max_length=40 tokens; the first is line 1" in out
    assert "text: 51 train, 8 val, 12 test pairs" in out
    assert run("evaluate", tmp_path / "run", "--split", "val") == 0
    assert "note: cut 1 val pairs" in capsys.readouterr().out
    assert parts_of(tmp_path / "run" / "evaluation_val" / "results.json")["val"]["count"] == 8
    assert run("evaluate", tmp_path / "run", "--decode.beams", "2", "--data.test", "[val]") == 0
    assert parts_of(tmp_path / "run" / "evaluation_val_beams-2" / "results.json")["val"]["count"] == 8


def test_pairs_with_an_empty_line_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, out = write_corpus(tmp_path / "data"), tmp_path / "run"
    write(root, "test", [("", "x"), *sentence_pairs()[60:70], ("a", "")])
    options = [*TINY, "--data.kind", "text", "--data.root", root, "--data.vocabulary", "320", "--out", out]
    assert run("train", *options) == 2
    assert "test.en, line 1, is empty, and so are 1 more" in one_line(capsys)
    assert run("train", *options, "--data.skip_empty", "true") == 0
    printed = capsys.readouterr().out
    assert "note: left out 2 test pairs with an empty line" in printed
    assert "10 test pairs" in printed
    assert len((out / "evaluation" / "test.de").read_text(encoding="utf-8").split("\n")) == 11


def test_the_configuration_is_printed_saved_and_stored_with_the_weights(text: Path) -> None:
    saved = (text / "config.yaml").read_text()
    for line in (
        "task: sequence",
        "  kind: text",
        "  vocabulary: 340",
        "  beams: 5",
        "  tie: all",
        "  batch_tokens: 128",
    ):
        assert line in saved.splitlines()
    description = checkpoint.read_description(text / "last.safetensors")
    assert description["config"]["data"]["vocabulary"] == description["model"]["vocabulary"] == 340
    assert json.loads(description["tokenizer"])["model"]["type"] == "BPE"
