"""Pictures of a training and of its result."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def plot_curves(rows: list[dict], path: Path) -> None:
    """Loss, accuracy, what else was measured on held-out data, and learning rate, from the rows of metrics.jsonl."""
    epochs = [r["epoch"] for r in rows]
    keys = dict.fromkeys(k for r in rows for k in r)
    names = [k.removesuffix("_loss") for k in keys if k.endswith("_loss")]
    metrics = dict.fromkeys(k.removeprefix(f"{n}_") for n in names for k in keys if k.startswith(f"{n}_"))
    titles = {m: m.replace("_", " ") for m in metrics} | {"accuracy": "accuracy (%)"}
    figure = Figure(figsize=(4 * len(metrics) + 4, 3.6), layout="constrained")
    *panels, rate = np.atleast_1d(figure.subplots(1, len(metrics) + 1))
    marker = "o" if len(rows) < 30 else None
    for axes, metric in zip(panels, metrics, strict=True):
        for name, colour in zip(names, COLOURS, strict=False):
            if f"{name}_{metric}" in keys:
                series = [r.get(f"{name}_{metric}") for r in rows]
                values = [np.nan if v is None else v * (100 if metric == "accuracy" else 1) for v in series]
                axes.plot(epochs, values, label=name.replace("_", " "), color=colour, marker=marker, markersize=3)
        axes.set_title(titles[metric])
        axes.legend(loc="upper right" if metric == "loss" else "lower right")
    rate.plot(epochs, [r["lr"] for r in rows], color="black", marker=marker, markersize=3)
    rate.set_title("learning rate, last of the epoch")
    for axes in (*panels, rate):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def plot_attention(weights: np.ndarray, source: list[str], target: list[str], path: Path) -> None:
    """What each written word attended to among the words that were read.

    Args:
        weights: (target words, source words); each row sums to 1.
        source, target: the words.
    """
    source, target = ([w if len(w) <= 20 else w[:19] + "…" for w in side] for side in (source, target))
    room = 0.1 * max(map(len, [*source, *target]))  # inches for the words
    size = 2 + 0.5 * len(source) + room, 1.5 + 0.4 * len(target) + room
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=max(float(weights.max()), 1e-9))
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.8)
    axes.set_xticks(range(len(source)), source, rotation=45, ha="left", rotation_mode="anchor", parse_math=False)
    axes.set_yticks(range(len(target)), target, parse_math=False)
    axes.xaxis.tick_top()
    axes.tick_params(labelsize=11, length=0)
    axes.spines[:].set_visible(False)
    figure.savefig(path, dpi=120, format="png")  # whatever the path ends with


def plot_confusion(confusion: np.ndarray, classes: list[str], title: str, path: Path) -> None:
    """The confusion matrix; colour is the share of the true class, numbers are images (up to 30 classes).

    Args:
        confusion: (classes, classes), images by true class (rows) and predicted class (columns).
    """
    count = len(classes)
    share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    side = float(np.clip(2.5 + 0.55 * count, 5, 16))
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    axes.set_title(title, parse_math=False)
    axes.set(xlabel="predicted class", ylabel="true class")
    size = 10 if count <= 30 else 5
    names = [c if len(c) <= 16 else c[:15] + "…" for c in classes]
    short = max(map(len, names)) <= 3 and count <= 30
    rotation, align = (0, "center") if short else (45, "right") if count <= 30 else (90, "center")
    axes.set_xticks(range(count), names, rotation=rotation, ha=align, parse_math=False)
    axes.set_yticks(range(count), names, parse_math=False)
    axes.tick_params(labelsize=size, length=0)
    axes.spines[:].set_visible(False)
    if count <= 30:
        for row, column in np.ndindex(count, count):
            if confusion[row, column]:
                colour = "white" if share[row, column] > 0.5 else "black"
                axes.text(column, row, confusion[row, column], ha="center", va="center", color=colour, fontsize=9)
    figure.savefig(path, dpi=120 if count <= 30 else 200)
