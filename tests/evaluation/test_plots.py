"""Checks that pictures are written, open, show something, and show what differs."""

import math
import warnings

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from vit_scratch.evaluation.plots import plot_attention, plot_confusion, plot_curves


def pixels(path):
    """The picture's pixels, of which it must have many that are not white."""
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        values = np.asarray(image.convert("RGB"))
    assert 0.005 < (values != 255).any(2).mean() < 0.99
    return values


def has_colour(values, colour):
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return bool((np.abs(values.astype(int) - wanted).max(2) < 12).any())


TRAIN, HELD_OUT, AVERAGED = "#0072B2", "#D55E00", "#009E73"
WHOLE_CLASS = "#08306b"  # the darkest of Matplotlib's Blues


def rows_of(count, *prefixes):
    rows = []
    for epoch in range(1, count + 1):
        row = {"epoch": epoch, "update": 10 * epoch, "lr": 1e-3 / epoch}
        for number, prefix in enumerate(prefixes, 1):
            row |= {f"{prefix}loss": number / epoch, f"{prefix}accuracy": 0.1 * number + 0.001 * epoch}
        rows.append(row)
    return rows


@pytest.mark.parametrize("count", [1, 29, 30, 200])
def test_curves_of_any_length_are_drawn(tmp_path, count):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_curves(rows_of(count, "train_", "val_", "ema_val_"), tmp_path / "curves.png")
    values = pixels(tmp_path / "curves.png")
    assert has_colour(values, TRAIN)
    assert has_colour(values, HELD_OUT)
    assert has_colour(values, AVERAGED)


def test_only_what_was_measured_is_drawn(tmp_path):
    plot_curves(rows_of(3, "train_"), tmp_path / "curves.png")
    values = pixels(tmp_path / "curves.png")
    assert has_colour(values, TRAIN)
    assert not has_colour(values, HELD_OUT)
    assert not has_colour(values, AVERAGED)


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_missing_values_leave_gaps(tmp_path, missing):
    rows = rows_of(5, "train_", "val_")
    rows[1]["val_loss"] = missing
    del rows[3]["val_accuracy"], rows[3]["val_loss"]
    plot_curves(rows, tmp_path / "gaps.png")
    plot_curves(rows_of(5, "train_", "val_"), tmp_path / "whole.png")
    gaps, whole = pixels(tmp_path / "gaps.png"), pixels(tmp_path / "whole.png")
    assert has_colour(gaps, HELD_OUT)
    assert not np.array_equal(gaps, whole)


def test_a_series_without_any_value_is_no_error(tmp_path):
    rows = rows_of(3, "train_", "val_")
    for row in rows:
        row["val_loss"] = None
    plot_curves(rows, tmp_path / "curves.png")
    assert has_colour(pixels(tmp_path / "curves.png"), TRAIN)


def test_other_numbers_make_another_picture(tmp_path):
    rows = rows_of(4, "train_")
    plot_curves(rows, tmp_path / "a.png")
    rows[2]["train_loss"] *= 3
    plot_curves(rows, tmp_path / "b.png")
    assert not np.array_equal(pixels(tmp_path / "a.png"), pixels(tmp_path / "b.png"))


def test_what_else_was_measured_on_held_out_data_has_a_panel_of_its_own(tmp_path):
    rows = rows_of(4, "train_", "val_", "ema_val_")
    plot_curves(rows, tmp_path / "two.png")
    for epoch, row in enumerate(rows):
        row |= {"val_bleu": 10.0 * epoch, "ema_val_bleu": 30.0 - 2 * epoch}
    plot_curves(rows, tmp_path / "three.png")
    for row in rows:
        row |= {"val_exact_match": 0.5}
    plot_curves(rows, tmp_path / "four.png")
    two, three, four = (pixels(tmp_path / f"{name}.png") for name in ("two", "three", "four"))
    assert [v.shape[1] / 480 for v in (two, three, four)] == [3, 4, 5]  # a panel each, and that of the learning rate

    def panel(values, number):
        width = values.shape[1] / round(values.shape[1] / 480)
        return values[:, int((number + 0.1) * width) : int((number + 0.9) * width)]

    for number, colours in ((0, {TRAIN, HELD_OUT, AVERAGED}), (2, {HELD_OUT, AVERAGED}), (3, set())):
        found = {c for c in (TRAIN, HELD_OUT, AVERAGED) if has_colour(panel(three, number), c)}
        assert found == colours, number
    assert not has_colour(panel(four, 3), AVERAGED)
    assert has_colour(panel(four, 3), HELD_OUT)


def test_curves_show_the_values_shares_in_percent_and_scores_as_they_are(tmp_path, monkeypatch):
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    rows = rows_of(3, "train_", "val_")
    for row, score in zip(rows, (10.0, None, 30.5), strict=True):
        row |= {"val_bleu": score}
    plot_curves(rows, tmp_path / "a.png")
    panels = {axes.get_title(): {line.get_label(): line.get_ydata() for line in axes.lines} for axes in figures[0].axes}
    assert list(panels) == ["loss", "accuracy (%)", "bleu", "learning rate, last of the epoch"]
    assert panels["loss"].keys() == panels["accuracy (%)"].keys() == {"train", "val"}
    np.testing.assert_allclose(panels["loss"]["val"], [2, 1, 2 / 3])
    np.testing.assert_allclose(panels["accuracy (%)"]["val"], [20.1, 20.2, 20.3])
    np.testing.assert_array_equal(panels["bleu"]["val"], [10, np.nan, 30.5])
    assert panels["bleu"].keys() == {"val"}


def dark_cells(values, count):
    """Where the darkest colour lies, as (row, column) shares of the picture without its colour bar."""
    cells = values[:, : int(0.8 * values.shape[1])].astype(int)
    wanted = [int(WHOLE_CLASS[i : i + 2], 16) for i in (1, 3, 5)]
    places = np.argwhere(np.abs(cells - wanted).max(2) < 3)
    assert len(places) > count
    return places


def test_attention_is_dark_where_the_weight_is(tmp_path):
    source, target = ["a", "red", "dog", "end"], ["ein", "Hund", "end"]
    centres = {}
    for row, column in ((0, 0), (0, 3), (2, 0), (2, 3)):
        weights = np.full((3, 4), 0.1)
        weights[row, column] = 0.7
        plot_attention(weights, source, target, tmp_path / "a.png")
        centres[row, column] = dark_cells(pixels(tmp_path / "a.png"), 500).mean(axis=0)
    assert centres[0, 0][0] == pytest.approx(centres[0, 3][0], abs=2)
    assert centres[0, 0][1] == pytest.approx(centres[2, 0][1], abs=2)
    assert centres[2, 0][0] > centres[0, 0][0] + 60  # rows go down, and are the words that were written
    assert centres[0, 3][1] > centres[0, 0][1] + 120  # columns go right, and are the words that were read


ODD = ["5$", "$5 or $6", "$x_$", "a_b^c", "\\alpha", "{", "%", "100 %", "", "Donaudampfschifffahrtsgesellschaft"]
"""Names and words that are no mathematics, though Matplotlib would take some of them for it."""


def test_words_with_signs_of_mathematics_are_no_error(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_attention(np.full((len(ODD), len(ODD)), 0.1), ODD, ODD, tmp_path / "a.png")
    pixels(tmp_path / "a.png")


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 60), (60, 1), (40, 40)])
def test_sentences_of_any_length_are_drawn(tmp_path, rows, columns):
    weights = np.full((rows, columns), 1 / columns)
    plot_attention(weights, ["word"] * columns, ["Wort"] * rows, tmp_path / ".a.png.part")  # whatever it is called
    pixels(tmp_path / ".a.png.part")


@pytest.mark.parametrize("count", [2, 10, 100])
def test_a_confusion_matrix_is_drawn_dark_where_images_are(tmp_path, count):
    names = [f"class number {i} with a long name" if i % 3 else str(i) for i in range(count)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_confusion(np.diag(np.arange(1, count + 1)), names, "test accuracy 100.00 %", tmp_path / "right.png")
    assert has_colour(pixels(tmp_path / "right.png"), WHOLE_CLASS)


def test_a_confusion_matrix_of_guesses_has_no_dark_cell(tmp_path):
    plot_confusion(np.ones((4, 4), int), list("abcd"), "test accuracy 25.00 %", tmp_path / "even.png")
    colour_bar = 0.8
    values = pixels(tmp_path / "even.png")
    assert not has_colour(values[:, : int(colour_bar * values.shape[1])], WHOLE_CLASS)


def test_names_with_signs_of_mathematics_are_no_error(tmp_path):
    plot_confusion(np.eye(len(ODD), dtype=int), ODD, " ".join(ODD), tmp_path / "a.png")
    pixels(tmp_path / "a.png")


def test_a_class_without_images_is_no_error(tmp_path):
    confusion = np.array([[3, 1, 0], [0, 0, 0], [0, 2, 2]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_confusion(confusion, ["a", "b", "c"], "title", tmp_path / "a.png")
    pixels(tmp_path / "a.png")


def test_shares_are_those_of_the_rows(tmp_path):
    # Each true class goes to one predicted class in the first picture; half of class a in the second.
    plot_confusion(np.array([[0, 8], [0, 2]]), ["a", "b"], "title", tmp_path / "a.png")
    plot_confusion(np.array([[0, 0], [8, 2]]), ["a", "b"], "title", tmp_path / "b.png")
    dark = []
    for name in ("a.png", "b.png"):
        values = pixels(tmp_path / name)
        cells = values[:, : int(0.8 * values.shape[1])].astype(int)
        wanted = [int(WHOLE_CLASS[i : i + 2], 16) for i in (1, 3, 5)]
        dark.append((np.abs(cells - wanted).max(2) < 3).sum())
    assert dark[0] > 10_000
    assert dark[1] < 2_000
