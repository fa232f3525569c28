"""Pictures of a training and of its result.

Shapes: H heads, C channels.
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from vit_scratch.evaluation.calibration import Reliability

# Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "os^vDPX*"
"""A mark for each colour, for those who see none."""


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


def plot_reliability(tables: dict[str, Reliability], path: Path) -> None:
    """Accuracy by confidence, a panel for each table, with the share of the images in each bin below it."""
    figure = Figure(figsize=(4.2 * len(tables), 5), layout="constrained")
    grid = figure.subplots(2, len(tables), squeeze=False, sharex=True, sharey="row", height_ratios=(3, 1))
    for (upper, lower), (title, table) in zip(grid.T, tables.items(), strict=True):
        middles, width = (table.edges[:-1] + table.edges[1:]) / 2, table.edges[1]
        upper.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=1, label="confidence = accuracy")
        upper.bar(middles, np.nan_to_num(table.accuracy), width * 0.9, color=COLOURS[0], label="accuracy")
        upper.plot(table.confidence, table.confidence, "_", color=COLOURS[1], markersize=14, label="mean confidence")
        upper.set(title=f"{title}: ECE {100 * table.error:.2f} %", xlim=(0, 1), ylim=(0, 1))
        upper.legend(loc="upper left", fontsize=8)
        lower.bar(middles, 100 * table.count / table.count.sum(), width * 0.9, color=COLOURS[7])
        lower.set(xlabel="confidence")
    grid[0, 0].set(ylabel="accuracy")
    grid[1, 0].set(ylabel="images (%)")
    figure.savefig(path, dpi=120)


def plot_images(images: list[np.ndarray], captions: list[str], path: Path) -> None:
    """Images with a caption each, in rows of six.

    Args:
        images: bytes (height, width, C), C being 1, 3 or 4.
        captions: of one or two lines.
    """
    columns = 6
    rows = max(-(-len(images) // columns), 1)
    figure = Figure(figsize=(1.5 * columns, 1.95 * rows), layout="constrained")
    for axes in figure.subplots(rows, columns, squeeze=False).flat:
        axes.set_axis_off()
    for axes, image, caption in zip(figure.axes, images, captions, strict=False):
        show(axes, image)
        axes.set_title(caption, fontsize=8, parse_math=False)
    figure.savefig(path, dpi=120)


def plot_robustness(accuracies: dict[str, list[float]], clean: float, path: Path) -> None:
    """Accuracy by strength, a line for each kind of corruption, from the clean images at strength 0 on."""
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.subplots()
    for i, (name, values) in enumerate(accuracies.items()):
        line = ("-", "--", ":")[i // len(COLOURS) % 3]
        axes.plot(
            100 * np.array([clean, *values]),
            label=name,
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            linestyle=line,
            markersize=5,
        )
    axes.set(xlabel="strength", ylabel="accuracy (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)


def plot_seen(images: list[np.ndarray], seen: list[np.ndarray], titles: list[list[str]], path: Path) -> None:
    """What a classifier looks at: for each image a row, or more, with the image and then maps of weights over it.

    Args:
        images: bytes (height, width, C).
        seen: for each image, maps (maps, rows, columns) of weights of its patches, each summing to 1.
        titles: for each image, what stands over it and over each of its maps.
        path: of the picture.
    """
    columns = min(max(len(words) for words in titles), 8)
    rows = [-(-len(words) // columns) for words in titles]
    figure = Figure(figsize=(1.5 * columns, 1.95 * sum(rows)), layout="constrained")
    grid = figure.subplots(sum(rows), columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for i, (image, maps, words) in enumerate(zip(images, seen, titles, strict=True)):
        panels = grid[sum(rows[:i]) : sum(rows[: i + 1])].flatten()
        show(panels[0], image)
        for axes, weights in zip(panels[1:], maps, strict=False):
            axes.imshow(overlay(image, weights))
        for axes, title in zip(panels, words, strict=False):
            axes.set_title(title, fontsize=8, parse_math=False)
    figure.savefig(path, dpi=120)


def short(name: str) -> str:
    """A name that fits a caption."""
    return name if len(name) <= 14 else name[:13] + "…"


def overlay(image: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """A grey version of an image (height, width, C) with weights (rows, columns) as colours over it.

    Yellow is the highest weight of the map, dark blue is 0; cividis looks alike to all kinds of colour vision.
    """
    height, width = image.shape[:2]
    share = np.asarray(
        Image.fromarray((255 * weights / max(float(weights.max()), 1e-9)).astype(np.uint8)).resize(
            (width, height), Image.Resampling.BILINEAR
        )
    )
    grey = image[..., :3].mean(axis=2, keepdims=True) / 255
    colours = mpl.colormaps["cividis"](share)[..., :3]
    mixed: np.ndarray = 0.35 * grey + 0.65 * colours
    return mixed


def show(axes: Axes, image: np.ndarray) -> None:
    """Draw an image (height, width, C) of bytes."""
    axes.imshow(image[..., 0] if image.shape[2] == 1 else image, cmap="gray", vmin=0, vmax=255)
