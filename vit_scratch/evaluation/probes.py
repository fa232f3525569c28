"""How good frozen features are: the accuracy of nearest neighbours and of a linear map on them.

Shapes: B batch, D width of the features.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

NEIGHBOURS = 20
"""How many neighbours vote, as in "Emerging Properties in Self-Supervised Vision Transformers"."""


@torch.inference_mode()
def collect(
    features: Callable[[Tensor], Tensor], batches: Iterable[tuple[Tensor, Tensor, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Features (images, D) and labels (images,) of all batches.

    Args:
        features: images (B, ...) to features (B, D).
        batches: images, labels (B,) and B.
    """
    pairs = [(features(images).float().cpu(), labels.cpu()) for images, labels, _ in batches]
    return torch.cat([f for f, _ in pairs]).numpy(), torch.cat([labels for _, labels in pairs]).numpy()


def nearest_neighbours(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], neighbours: int = NEIGHBOURS
) -> int:
    """How many labels the nearest neighbours get right; each votes with the inverse of its cosine distance.

    Args:
        train, test: features (images, D) and labels (images,).
        neighbours: how many of them, at most all.
    """
    classifier = KNeighborsClassifier(min(neighbours, len(train[1])), weights="distance", metric="cosine")
    return int((classifier.fit(*train).predict(test[0]) == test[1]).sum())


def linear_probe(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> int:
    """How many labels a logistic regression on standardised features gets right; the arguments as above."""
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return int((classifier.fit(*train).predict(test[0]) == test[1]).sum())
