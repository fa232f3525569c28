"""How well a classifier does: exact counts, loss, per-class accuracy and the confusion matrix.

Shapes: B batch.
"""

import csv
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import confusion_matrix
from torch import Tensor, nn


@dataclass
class ClassificationResult:
    """What `evaluate_classifier` counted.

    Attributes:
        count: number of images.
        correct: those whose highest logit is that of their class.
        correct_top5: those whose class is among the five highest logits; None with five classes or fewer.
        loss_sum: sum of the cross-entropy, without label smoothing.
        confusion: images by true class (rows) and predicted class (columns).
    """

    count: int
    correct: int
    correct_top5: int | None
    loss_sum: float
    confusion: np.ndarray

    @property
    def accuracy(self) -> float:
        """Share of images predicted right."""
        return self.correct / self.count

    @property
    def loss(self) -> float:
        """Mean cross-entropy."""
        return self.loss_sum / self.count

    def per_class(self) -> list[float | None]:
        """Share of each class's images predicted right; None for a class without images."""
        totals = self.confusion.sum(axis=1)
        return [float(self.confusion[i, i] / n) if n else None for i, n in enumerate(totals)]

    def to_dict(self, classes: list[str]) -> dict[str, Any]:
        """All of it as plain values for JSON."""
        result: dict[str, Any] = {
            "accuracy": self.accuracy,
            "correct": self.correct,
            "count": self.count,
            "loss": self.loss if math.isfinite(self.loss) else None,  # JSON knows no NaN
        }
        if self.correct_top5 is not None:
            result |= {"top5_accuracy": self.correct_top5 / self.count, "top5_correct": self.correct_top5}
        per_class = zip(classes, self.per_class(), self.confusion.sum(axis=1).tolist(), strict=True)
        result["classes"] = [{"class": c, "accuracy": a, "count": n} for c, a, n in per_class]
        result["confusion"] = self.confusion.tolist()
        return result

    def write(self, folder: Path, classes: list[str]) -> None:
        """Write results.json, confusion_matrix.csv and per_class.csv into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(self.to_dict(classes), indent=1, ensure_ascii=False) + "\n")
        self.write_confusion(folder, classes)
        with open(folder / "per_class.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["class", "accuracy", "correct", "count"])
            totals = self.confusion.sum(axis=1).tolist()
            rows = zip(classes, self.per_class(), np.diag(self.confusion).tolist(), totals, strict=True)
            writer.writerows(["" if v is None else v for v in row] for row in rows)

    def write_confusion(self, folder: Path, classes: list[str]) -> None:
        """Write confusion_matrix.csv into a folder."""
        with open(folder / "confusion_matrix.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["true \\ predicted", *classes])
            writer.writerows([name, *row] for name, row in zip(classes, self.confusion.tolist(), strict=True))


def alone(value: Any) -> list[Any]:
    """What the only process has."""
    return [value]


@torch.inference_mode()
def evaluate_classifier(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor, int]],
    num_classes: int,
    expected: int,
    gather: Callable[[Any], list[Any]] = alone,
) -> ClassificationResult:
    """Evaluate a classifier on all batches; integers are summed and divided once, at the end.

    Args:
        model: images (B, ...) to logits (B, classes). Left in the mode (train or eval) it came in.
        batches: images, labels (B,) and what is not looked at; of several processes each has its part of each batch.
        num_classes: number of classes.
        expected: number of images there must be, in all processes together.
        gather: from a value of this process to the values of all that evaluate together.

    Raises:
        ValueError: there are no images.
    """
    if expected == 0:
        raise ValueError("there are no images to evaluate on")
    was_training = model.training
    model.eval()
    labels, predictions, losses, top5 = [], [], [], []
    for images, target, _ in batches:
        logits = model(images).float()
        losses.append(F.cross_entropy(logits, target, reduction="none").double().sum())
        labels.append(target)
        predictions.append(logits.argmax(dim=1))
        if num_classes > 5:
            top5.append((logits.topk(5, dim=1).indices == target[:, None]).sum())
    model.train(was_training)
    here = [joined(labels), joined(predictions), joined(losses), joined(top5)]
    true, predicted, loss, top = (np.concatenate(parts) for parts in zip(*gather(here), strict=True))
    assert len(true) == expected, f"{len(true)} images evaluated, {expected} expected"
    confusion = confusion_matrix(true, predicted, labels=np.arange(num_classes))
    return ClassificationResult(
        count=expected,
        correct=int((true == predicted).sum()),
        correct_top5=int(top.sum()) if num_classes > 5 else None,
        loss_sum=float(loss.sum()),
        confusion=confusion,
    )


def joined(values: list[Tensor]) -> np.ndarray:
    """Vectors or numbers one behind the other, read from the device in one go; there may be none."""
    return torch.cat([v.reshape(-1) for v in values]).cpu().numpy() if values else np.zeros(0, np.int64)
