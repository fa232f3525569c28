"""Whether a classifier's confidence is worth anything: reliability, calibration error, and temperature scaling."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

BINS = 15
"""Intervals of confidence, as in "On Calibration of Modern Neural Networks"."""


@dataclass
class Reliability:
    """Predictions by their confidence, which is the probability of the predicted class.

    Attributes:
        edges: (bins + 1,), from 0 to 1; a bin holds confidences above its lower and up to its upper edge.
        count: (bins,), images in each.
        confidence, accuracy: (bins,), their mean confidence, and the share that is right; NaN where there are none.
    """

    edges: np.ndarray
    count: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray

    @property
    def error(self) -> float:
        """The expected calibration error: the mean distance of confidence and accuracy, weighted with the images."""
        return float(np.nansum(self.count * np.abs(self.accuracy - self.confidence)) / self.count.sum())


def reliability(probabilities: np.ndarray, labels: np.ndarray, bins: int = BINS) -> Reliability:
    """Confidence beside accuracy, in bins of equal width.

    Args:
        probabilities: (images, classes).
        labels: (images,).
        bins: how many.
    """
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    edges = np.linspace(0, 1, bins + 1)
    place = np.clip(np.searchsorted(edges, confidence) - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        means = [np.bincount(place, values, minlength=bins) / count for values in (confidence, right)]
    return Reliability(edges, count, *means)


def scaled(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Probabilities (images, classes) of logits that are divided by a temperature first."""
    return softmax(logits.astype(np.float64) / temperature, axis=1)


def negative_log_likelihood(logits: np.ndarray, labels: np.ndarray, temperature: float = 1.0) -> float:
    """Mean cross-entropy of logits (images, classes) that are divided by a temperature first."""
    log_probabilities = log_softmax(logits.astype(np.float64) / temperature, axis=1)
    return float(-log_probabilities[np.arange(len(labels)), labels].mean())


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The temperature with the lowest cross-entropy ("On Calibration of Modern Neural Networks", section 4.2).

    It is between 0.01 and 100; all predictions right, as on a few easy images, would ask for 0.

    Args:
        logits: (images, classes), of images that the model was not trained on.
        labels: (images,).
    """
    # Convex in the inverse of the temperature, so that there is one minimum.
    found = minimize_scalar(
        lambda log: negative_log_likelihood(logits, labels, np.exp(log)), bounds=(np.log(0.01), np.log(100))
    )
    return float(np.exp(found.x))
