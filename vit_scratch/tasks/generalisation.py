"""What else an evaluation of an image classifier measures: mirrored images, other seeds, damaged and newer images.

Shapes: B batch, C channels.
"""

import csv
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vit_scratch.config import EvaluateConfig
from vit_scratch.data.loaders import Loader
from vit_scratch.data.sources import ImageSource
from vit_scratch.evaluation.classification import ClassificationResult
from vit_scratch.evaluation.intervals import mean_interval
from vit_scratch.evaluation.plots import plot_robustness
from vit_scratch.evaluation.probes import collect
from vit_scratch.evaluation.robustness import CORRUPTIONS, STRENGTHS, read_cifar10_1, read_cifar10_c
from vit_scratch.tasks.classifier import Classifier, read_classifier
from vit_scratch.tasks.image_data import EvaluationImages

Model = Callable[[Tensor], Tensor]
"""Images (B, C, height, width) -> logits (B, classes)."""


@dataclass
class Extras:
    """What is measured beside the accuracy of one model on one set of images.

    Attributes:
        seeds: other trainings of the same recipe, by their source.
        published: images and labels of published data sets, by their name.
    """

    seeds: dict[str, Classifier] = field(default_factory=dict)
    published: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


def open_extras(config: EvaluateConfig, classifier: Classifier) -> Extras:
    """Open what is asked for, so that what is wrong with it is said before any work is done.

    Raises:
        ValueError: a model with other classes, or published data that are not there or not for this model.
    """
    extras = Extras({source: read_classifier(source)[1] for source in config.seeds})
    for source, other in extras.seeds.items():
        if (other.classes, other.form) != (classifier.classes, classifier.form):
            raise ValueError(
                f"seeds={config.seeds}: {source} has other classes or takes other images; name trainings of one recipe"
            )
    for name, folder in (("cifar10_1", config.cifar10_1), ("cifar10_c", config.cifar10_c)):
        if folder and len(classifier.classes) != 10:
            raise ValueError(f"{name}={folder} has ten classes, and the model {len(classifier.classes)}; leave it out")
    if config.cifar10_1:
        extras.published["CIFAR-10.1"] = read_cifar10_1(Path(config.cifar10_1))
    if config.cifar10_c:
        images, labels = read_cifar10_c(Path(config.cifar10_c))
        extras.published |= {f"CIFAR-10-C {name}": (array, labels) for name, array in images.items()}
    return extras


def measure_extras(
    config: EvaluateConfig,
    source: str,
    images: EvaluationImages,
    extras: Extras,
    result: ClassificationResult,
    folder: Path,
) -> dict[str, Any]:
    """Measure and print what is asked for.

    Args:
        config: what is asked for.
        source: where the model is from.
        images: the model and its images.
        extras: as `open_extras` returned it.
        result: of the model on the images.
        folder: where table and picture of the robustness go.

    Returns:
        `flips`, `seeds` and `robustness`, each where it was asked for, as plain values.
    """
    values: dict[str, Any] = {}
    views: dict[str, Model] = {"single view": images.classifier.model}
    clean = {"single view": result.accuracy}
    if config.flips:
        views["with flips"] = partial(both_sides, images.classifier.model)
        correct = int(hits(views["with flips"], images.loader(config.split)).sum())
        clean["with flips"] = correct / result.count
        values["flips"] = {"accuracy": correct / result.count, "correct": correct}
        print(f"{config.split} accuracy with flips {percent(correct / result.count)} % ({correct}/{result.count})")
    if extras.seeds:
        values["seeds"] = compare_seeds(source, result.accuracy, images, extras.seeds, config.split)
    rows = []
    if config.robustness:
        rows += [
            row(name, [images.loader(config.split, partial(change, strength=s)) for s in strengths], views)
            for name, (change, strengths) in CORRUPTIONS.items()
        ]
    for name, (array, labels) in extras.published.items():
        parts = STRENGTHS if name.startswith("CIFAR-10-C") else 1
        pairs = zip(np.split(array, parts), np.split(labels, parts), strict=True)
        rows.append(row(name, [images.loader_of(ImageSource(*pair)) for pair in pairs], views))
    if rows:
        values["robustness"] = report_robustness(rows, clean, folder)
    return values


def both_sides(model: Model, images: Tensor) -> Tensor:
    """The mean of the logits of images (B, C, height, width) and of their mirror images, (B, classes)."""
    return (model(images) + model(images.flip(-1))) / 2


def hits(model: Model, loader: Loader) -> np.ndarray:
    """Which of the images are predicted right, (images,)."""
    logits, labels = collect(model, loader.batches())
    found: np.ndarray = logits.argmax(axis=1) == labels
    return found


def compare_seeds(
    source: str, accuracy: float, images: EvaluationImages, others: dict[str, Classifier], split: str
) -> dict[str, Any]:
    """Evaluate other trainings on the same images; prints and returns mean, spread and interval of all."""
    accuracies = {source: accuracy}
    for name, other in others.items():
        same = replace(images, classifier=other)
        accuracies[name] = float(hits(other.model.to(images.device), same.loader(split)).mean())
    found = list(accuracies.values())
    mean, deviation, (low, high) = statistics.mean(found), statistics.stdev(found), mean_interval(found)
    for name, value in accuracies.items():
        print(f"  {name:<30} {percent(value)} %")
    print(
        f"{split} accuracy of {len(found)} trainings {percent(mean)} ± {percent(deviation)} %, "
        f"95 % interval of the mean {percent(low)} to {percent(high)} %"
    )
    return {"accuracies": accuracies, "mean": mean, "std": deviation, "interval": [low, high]}


def row(name: str, loaders: list[Loader], views: dict[str, Model]) -> dict[str, Any]:
    """Accuracy on images of one kind, from weak to strong, in each view."""
    accuracies = {view: [float(hits(model, loader).mean()) for loader in loaders] for view, model in views.items()}
    print("".join([f"  {name:<30}", *[f" {percent(value):>6}" for value in accuracies["single view"]]]), flush=True)
    return {"name": name, "accuracy": accuracies}


def report_robustness(rows: list[dict[str, Any]], clean: dict[str, float], folder: Path) -> dict[str, Any]:
    """Write table and picture of the robustness, print means, and return it all as plain values.

    Means are over kinds and strengths, those of CIFAR-10-C apart; a data set without strengths has none.
    """
    groups = {
        "corrupted images": [r for r in rows if r["name"] in CORRUPTIONS],
        "CIFAR-10-C": [r for r in rows if r["name"].startswith("CIFAR-10-C")],
    }
    means = {
        group: {view: float(np.mean([r["accuracy"][view] for r in members])) for view in clean}
        for group, members in groups.items()
        if members
    }
    for group, values in means.items():
        listed = ", ".join(f"{percent(value)} % {view}" for view, value in values.items())
        print(f"mean accuracy on {group}: {listed}")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "robustness.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["images", "strength", *clean])
        writer.writerow(["clean", 0, *clean.values()])
        for r in rows:
            for strength, accuracies in enumerate(zip(*r["accuracy"].values(), strict=True), 1):
                writer.writerow([r["name"], strength, *accuracies])
    curves = {r["name"]: r["accuracy"]["single view"] for r in rows}
    plot_robustness(curves, clean["single view"], folder / "robustness.png")
    print(f"robustness: {folder / 'robustness.csv'}, {folder / 'robustness.png'}")
    return {"clean": clean, "kinds": rows, "means": means}


def percent(share: float) -> str:
    """A share as a percentage with two decimals."""
    return f"{100 * share:.2f}"
