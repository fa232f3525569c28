"""Made-up sequences to learn on without any files: to be copied, reversed, or sorted."""

from collections.abc import Callable

import numpy as np

Sequence = list[int]

TOYS: dict[str, Callable[[Sequence], Sequence]] = {
    "copy": lambda symbols: symbols,
    "reverse": lambda symbols: symbols[::-1],
    "sort": sorted,
}
"""What each task makes of a sequence."""


def toy_pairs(
    kind: str, counts: list[int], *, symbols: int, longest: int, seed: int
) -> list[tuple[list[Sequence], list[Sequence]]]:
    """Sources and targets of several parts, no source twice in any of them.

    Args:
        kind: a key of `TOYS`.
        counts: number of pairs of each part.
        symbols: number of different symbols, 0 to symbols - 1.
        longest: the most symbols in a sequence; each length from 1 on is equally likely.
        seed: of the sequences.

    Raises:
        ValueError: an unknown kind, or more pairs than there can be different ones.
    """
    if kind not in TOYS:
        raise ValueError(f"kind={kind!r} is unknown; choose from {', '.join(TOYS)}")
    # Half of the longest ones: drawing goes on until enough are different.
    if 2 * sum(counts) > symbols**longest:
        raise ValueError(
            f"{sum(counts)} different sequences of at most longest={longest} out of symbols={symbols} are too many; "
            "raise one of these, or lower the count"
        )
    random = np.random.default_rng(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < sum(counts):
        lengths = random.integers(1, longest + 1, size=1024)
        drawn = random.integers(0, symbols, size=(1024, longest))
        found |= dict.fromkeys(tuple(row[:n]) for row, n in zip(drawn.tolist(), lengths.tolist(), strict=True))
    order = random.permutation(len(found))[: sum(counts)]  # short ones, which soon are all found, in every part
    everything = list(found)
    sources = [list(everything[i]) for i in order]
    ends = np.cumsum(counts).tolist()
    parts = [sources[end - count : end] for end, count in zip(ends, counts, strict=True)]
    return [(part, [TOYS[kind](s) for s in part]) for part in parts]
