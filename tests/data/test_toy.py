"""Checks made-up sequences: right targets, no source twice, all lengths, the same ones for a seed."""

from collections import Counter

import pytest

from vit_scratch.data.toy import TOYS, toy_pairs


def is_right(kind, source, target):
    """The definitions, without the functions of the package."""
    n = len(source)
    if kind == "sort":
        ordered = all(target[i] <= target[i + 1] for i in range(len(target) - 1))
        return ordered and Counter(target) == Counter(source)
    return len(target) == n and all(target[i] == source[i if kind == "copy" else n - 1 - i] for i in range(n))


def make(kind="reverse", counts=(600, 100, 100), symbols=7, longest=6, seed=0):
    return toy_pairs(kind, list(counts), symbols=symbols, longest=longest, seed=seed)


@pytest.mark.parametrize("kind", ["copy", "reverse", "sort"])
def test_targets_are_right(kind):
    parts = make(kind)
    assert [(len(s), len(t)) for s, t in parts] == [(600, 600), (100, 100), (100, 100)]
    for sources, targets in parts:
        assert all(is_right(kind, s, t) for s, t in zip(sources, targets, strict=True))
    mistaken = {"copy": "reverse", "reverse": "copy", "sort": "copy"}[kind]
    assert not all(is_right(mistaken, s, t) for s, t in zip(*parts[0], strict=True))
    assert set(TOYS) == {"copy", "reverse", "sort"}


@pytest.mark.parametrize(
    ("symbols", "longest", "counts"), [(7, 6, [600, 100, 100]), (2, 6, [20, 6, 6]), (20, 10, [3000, 1000, 1000])]
)
def test_no_source_is_in_two_parts_or_twice_in_one(symbols, longest, counts):
    parts = make(counts=counts, symbols=symbols, longest=longest)
    sources = [tuple(s) for part, _ in parts for s in part]
    assert len(set(sources)) == len(sources) == sum(counts)
    assert {symbol for s in sources for symbol in s} == set(range(symbols))


def test_lengths_go_from_one_to_the_longest_and_are_equally_likely():
    parts = make(counts=(20_000, 4000), symbols=20, longest=8)
    for sources, _ in parts:
        counts = Counter(map(len, sources))
        assert set(counts) == set(range(1, 9))
        long = [counts[length] for length in range(5, 9)]  # of shorter ones there are too few
        assert max(long) < 1.15 * min(long)
        assert sum(long) < 0.75 * len(sources)


def test_short_ones_are_in_every_part():
    parts = make(counts=(2000, 2000), symbols=20, longest=8)  # 420 have one or two symbols
    assert all(sum(len(s) <= 2 for s in sources) >= 100 for sources, _ in parts)


def test_they_are_a_function_of_the_seed():
    assert make(seed=3) == make(seed=3)
    assert make(seed=3) != make(seed=4)
    assert [s for s, _ in make("copy", seed=3)] == [s for s, _ in make("sort", seed=3)]


def test_more_than_half_of_the_longest_ones_are_refused_and_half_are_found():
    assert len({tuple(s) for s in make(counts=[32], symbols=2, longest=6)[0][0]}) == 32
    with pytest.raises(ValueError, match="33 different sequences of at most longest=6 out of symbols=2 are too many"):
        make(counts=[32, 1], symbols=2, longest=6)
    with pytest.raises(ValueError, match="symbols=1 are too many"):
        make(counts=[1], symbols=1)


def test_an_unknown_kind_is_refused_and_the_known_ones_are_named():
    with pytest.raises(ValueError, match="'shuffle' is unknown; choose from copy, reverse, sort"):
        make("shuffle")
