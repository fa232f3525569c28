"""How far a measured accuracy can be from the true one: confidence intervals of 95 %."""

import numpy as np
from scipy import stats

LEVEL = 0.95
"""How often such an interval holds the true value."""


def accuracy_interval(correct: int, count: int) -> tuple[float, float]:
    """Wilson's interval of a share, for the draw of the images: (lowest, highest)."""
    interval = stats.binomtest(correct, count).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def mean_interval(values: list[float]) -> tuple[float, float]:
    """Student's interval of a mean of at least two values, such as accuracies of seeds: (lowest, highest)."""
    error = stats.sem(values)
    low, high = stats.t.interval(LEVEL, len(values) - 1, np.mean(values), error) if error else [np.mean(values)] * 2
    return float(low), float(high)
