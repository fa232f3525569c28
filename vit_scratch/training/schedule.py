"""The learning rate as a pure function of the update number."""

import math


def warmup_cosine(update: int, *, updates: int, warmup: int, peak: float, final: float) -> float:
    """Learning rate of an update: a line up to `peak`, then half a cosine down to `final` ("SGDR", equation 5).

    Args:
        update: number of the update, 1 for the first, `updates` for the last.
        updates: number of updates in the run.
        warmup: updates until the peak; the rate of update `warmup` is exactly `peak`.
        peak, final: the highest and the last rate; the rate of the last update is exactly `final`.
    """
    top = max(warmup, 1)  # without a warm-up the first update stands at the peak
    if update < top:
        return peak * update / top
    if update == top:
        return peak  # exactly, which the sum below is not always
    done = (update - top) / (updates - top)
    return final + (peak - final) * (1 + math.cos(math.pi * done)) / 2
