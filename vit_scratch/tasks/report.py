"""The report on an image classifier: one page, and the pictures and tables in it.

Shapes: B batch, H heads, C channels.
"""

import base64
import csv
import json
import time
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml
from sklearn.metrics import precision_recall_fscore_support

from vit_scratch.evaluation.calibration import fit_temperature, negative_log_likelihood, reliability, scaled
from vit_scratch.evaluation.classification import ClassificationResult
from vit_scratch.evaluation.intervals import accuracy_interval
from vit_scratch.evaluation.plots import (
    plot_confusion,
    plot_curves,
    plot_images,
    plot_reliability,
    plot_seen,
    short,
)
from vit_scratch.evaluation.probes import collect
from vit_scratch.tasks.classifier import attention_of
from vit_scratch.tasks.image_data import EvaluationImages
from vit_scratch.tasks.profile import count_operations
from vit_scratch.tasks.run import is_checkpoint, weights_file
from vit_scratch.training.checkpoint import read_description, replacing
from vit_scratch.training.device import device_name
from vit_scratch.training.provenance import versions
from vit_scratch.vision.vit import VisionTransformer

TEMPLATE = Path(__file__).parent / "report.html"
MISTAKES = 24
"""How many of the most confident mistakes are shown."""
EXAMPLES = 6
"""For how many images, and for how many heads of the last layer, attention is shown."""


def write_report(
    folder: Path,
    source: str,
    images: EvaluationImages,
    split: str,
    result: ClassificationResult,
    values: dict[str, Any],
) -> None:
    """Measure what a report has beside the results of an evaluation, and write it.

    Args:
        folder: where it goes: report.html, and the pictures (PNG) and tables (CSV, JSON) in it.
        source: where the model is from.
        images: the model and its images; where held-out ones ("val") are among them, a temperature is fitted to those.
        split: the part that was evaluated.
        result: of the evaluation.
        values: all that it gave, as plain values, flips, seeds and robustness among them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    classifier = images.classifier
    model, classes = classifier.model.to(images.device).eval(), classifier.classes
    loader = images.loader(split)
    began = time.monotonic()
    logits, labels = collect(model, loader.batches())
    speed = loader.count / (time.monotonic() - began)
    result.write_confusion(folder, classes)
    title = f"{split} accuracy {100 * result.accuracy:.2f} % ({result.correct}/{result.count})"
    plot_confusion(result.confusion, classes, title, folder / "confusion_matrix.png")
    calibration = calibrate(folder, images, split, logits, labels)
    about = {
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "multiply-adds per image": f"{count_operations(model)[''] // 2:,}",
        "images of": f"{classifier.form.image_size[0]} x {classifier.form.image_size[1]}, {classifier.form.mode}",
        "images per second": f"{speed:,.0f}, in batches of {images.batch_size}, {device_name(images.device)}",
    }
    configuration = describe(source, model, about)
    temperature = calibration["temperature"] or 1.0
    show_attention(folder, images, split, logits, labels, temperature)
    curves = Path(source) / "metrics.jsonl"
    if curves.is_file():
        plot_curves([json.loads(line) for line in curves.read_text().splitlines()], folder / "curves.png")
    page = {
        "source": source,
        "split": split,
        "data": f"{images.data.kind}" + (f" in {images.data.root}" if images.data.kind != "digits" else ""),
        "result": result,
        "interval": accuracy_interval(result.correct, result.count),
        "values": values,
        "classes": class_table(folder, result, classes),
        "calibration": calibration,
        "other_data": images.changed,
        "mistakes": show_mistakes(folder, images, split, logits, labels, temperature),
        "about": about,
        "configuration": configuration,
        "versions": versions(),
    }
    with replacing(folder / "report.json") as path:
        path.write_text(json.dumps(values | {"calibration": calibration}, indent=1, ensure_ascii=False) + "\n")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"percent": lambda share: f"{100 * share:.2f} %", "picture": embed}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    pictures = {path.stem: path for path in folder.glob("*.png")}
    with replacing(folder / "report.html") as path:
        path.write_text(template.render(page | {"pictures": pictures}), encoding="utf-8")
    print(f"report: {folder / 'report.html'}")


def embed(path: Path) -> str:
    """A picture as a URL that holds it."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def describe(source: str, model: VisionTransformer, about: dict[str, str]) -> str:
    """The configuration as YAML; what a run says about its making is added to `about`."""
    path = Path(source)
    if is_checkpoint(source):
        description = read_description(weights_file(path))
        about["weights"] = f"{weights_file(path).name}, {weights_file(path).stat().st_size / 1e6:.2f} MB"
        made = description.get("versions", {})
        about["trained with"] = ", ".join(f"{name} {version}" for name, version in made.items())
        if description.get("metrics", {}).get("pflop"):
            about["training compute"] = f"{description['metrics']['pflop']:.3g} PFLOP"
        return yaml.safe_dump(description["config"], sort_keys=False, allow_unicode=True)
    for number, sentence in enumerate(model.metadata.get("results", []), 1):
        about[f"known result {number}"] = sentence
    return yaml.safe_dump({"model": model.arguments}, sort_keys=False, allow_unicode=True)


def class_table(folder: Path, result: ClassificationResult, classes: list[str]) -> list[dict[str, Any]]:
    """What is to be said of each class; also written as classes.csv."""
    true = np.repeat(np.arange(len(classes)), result.confusion.sum(axis=1))
    predicted = np.concatenate([np.repeat(np.arange(len(classes)), row) for row in result.confusion])
    precision, recall, f1, _ = precision_recall_fscore_support(
        true, predicted, labels=np.arange(len(classes)), zero_division=0.0
    )
    rows = []
    for i, name in enumerate(classes):
        count, right = int(result.confusion[i].sum()), int(result.confusion[i, i])
        others = result.confusion[i].copy()
        others[i] = 0
        low, high = accuracy_interval(right, count) if count else (0.0, 1.0)
        taken = f"{classes[others.argmax()]} ({others.max()})" if others.any() else ""
        rows.append(
            {"class": name, "images": count, "right": right, "accuracy": float(recall[i]), "low": low, "high": high}
            | {"precision": float(precision[i]), "f1": float(f1[i]), "mostly_taken_for": taken}
        )
    write_table(folder / "classes.csv", rows)
    return rows


def calibrate(
    folder: Path, images: EvaluationImages, split: str, logits: np.ndarray, labels: np.ndarray
) -> dict[str, Any]:
    """Calibration before and after temperature scaling, which needs held-out images; draws reliability.png."""
    sets, temperature = {split: (logits, labels)}, None
    if split != "val" and "val" in images.parts:
        sets["val"] = collect(images.classifier.model, images.loader("val").batches())
        temperature = fit_temperature(*sets["val"])
    rows, tables = [], {}
    for name, (values, true) in sets.items():
        for when, scale in (("before", 1.0), *([("after", temperature)] if temperature else [])):
            probabilities = scaled(values, scale)
            table = reliability(probabilities, true)
            rows.append(
                {"images": "held out" if name == "val" else name, "scaling": when, "temperature": scale}
                | {"nll": negative_log_likelihood(values, true, scale), "ece": table.error}
                | {"confidence": float(probabilities.max(axis=1).mean())}
            )
            if name == split:
                tables["as it is" if when == "before" else f"divided by {scale:.2f}"] = table
    plot_reliability(tables, folder / "reliability.png")
    write_table(folder / "calibration.csv", rows)
    return {"temperature": temperature, "rows": rows}


def show_mistakes(
    folder: Path, images: EvaluationImages, split: str, logits: np.ndarray, labels: np.ndarray, temperature: float
) -> int:
    """Draw the most confident mistakes into mistakes.png, list them in mistakes.csv, and return how many there are."""
    classes, probabilities = images.classifier.classes, scaled(logits, temperature)
    predicted, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1)
    wrong = np.flatnonzero(predicted != labels)
    worst = wrong[np.argsort(-confidence[wrong], kind="stable")][:MISTAKES]
    rows = [
        {"number": int(i), "true": classes[labels[i]], "predicted": classes[predicted[i]], "confidence": confidence[i]}
        for i in worst
    ]
    write_table(folder / "mistakes.csv", rows)
    captions = [
        f"{short(r['predicted'])} {100 * r['confidence']:.0f} %\nis {short(r['true'])}, no. {r['number']}" for r in rows
    ]
    if rows:
        plot_images([images.pixels(split, int(i)) for i in worst], captions, folder / "mistakes.png")
    return len(wrong)


def show_attention(
    folder: Path, images: EvaluationImages, split: str, logits: np.ndarray, labels: np.ndarray, temperature: float
) -> None:
    """Draw what the model looks at in the first image of each of some classes, into attention.png."""
    model, classes = images.classifier.model, images.classifier.classes
    _, first = np.unique(labels, return_index=True)
    chosen = np.sort(first[:EXAMPLES])
    pixels = [images.pixels(split, int(i)) for i in chosen]
    inputs = images.classifier.normalised(pixels).to(images.device)
    flow, heads = attention_of(model, inputs)
    probabilities = scaled(logits[chosen], temperature)
    titles = [
        [f"is {short(classes[labels[i]])}", f"rollout:\n{short(classes[p.argmax()])} {100 * p.max():.0f} %"]
        + [f"head {h + 1}" for h in range(min(heads.shape[1], EXAMPLES))]
        for i, p in zip(chosen, probabilities, strict=True)
    ]
    maps = [np.concatenate([f[None], h[:EXAMPLES]]) for f, h in zip(flow, heads, strict=True)]
    plot_seen(pixels, maps, titles, folder / "attention.png")


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows, all with the same keys, as CSV; none gives an empty file."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
