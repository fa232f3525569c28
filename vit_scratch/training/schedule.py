"""The learning rate as a pure function of the update number: a rise, then one of two falls."""

import math
from collections.abc import Callable


def warmup_cosine(update: int, *, updates: int, warmup: int, peak: float, final: float) -> float:
    """Learning rate of an update: a line up to `peak`, then half a cosine down to `final` ("SGDR", equation 5).

    Args:
        update: number of the update, 1 for the first, `updates` for the last.
        updates: number of updates in the run.
        warmup: updates until the peak; the rate of update `warmup` is exactly `peak`.
        peak, final: the highest and the last rate; the rate of the last update is exactly `final`.
    """
    return rise_and_fall(update, updates, warmup, peak, final, lambda done: (1 + math.cos(math.pi * done)) / 2)


def warmup_linear(update: int, *, updates: int, warmup: int, peak: float, final: float) -> float:
    """Learning rate of an update: a line up to `peak`, then a line down to `final` ("Straight to Zero").

    Args:
        update, updates, warmup, peak, final: as `warmup_cosine`.
    """
    return rise_and_fall(update, updates, warmup, peak, final, lambda done: 1 - done)


SCHEDULES = {"cosine": warmup_cosine, "linear": warmup_linear}
"""By the shape of the fall."""


def rise_and_fall(
    update: int, updates: int, warmup: int, peak: float, final: float, left: Callable[[float], float]
) -> float:
    """A line up to `peak`, then down to `final` as `left` says: from 1 to 0 while its argument goes from 0 to 1."""
    top = max(warmup, 1)  # without a warm-up the first update stands at the peak
    if update < top:
        return peak * update / top
    if update == top:
        return peak  # exactly, which the sum below is not always
    return final + (peak - final) * left((update - top) / (updates - top))
