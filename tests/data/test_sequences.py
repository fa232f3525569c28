"""Checks the batches of pairs: each pair once an epoch, little padding, an order of seed and epoch alone."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_scratch.data.sequences import BOS, EOS, PAD, SPECIAL_TOKENS, SequenceLoader, pad, source_ids

CPU = torch.device("cpu")


def pairs_of(lengths, seed=0):
    """Random sources and targets of these (source, target) lengths; ids that are none of the special ones."""
    random = np.random.default_rng(seed)
    draw = [[random.integers(3, 1000, n).tolist() for n in pair] for pair in lengths]
    return [s for s, _ in draw], [t for _, t in draw]


def loader_of(lengths, batch_tokens, seed=None):
    return SequenceLoader(*pairs_of(lengths), batch_tokens, seed=seed, device=CPU)


def pairs_in(batch):
    """The pairs of a batch, read back from its tensors."""
    (source, _), following, _ = batch
    return [
        tuple(tuple(x for x in row if x > EOS) for row in (s, t))
        for s, t in zip(source.tolist(), following.tolist(), strict=True)
    ]


def equal(first, second):
    first, second = list(first), list(second)
    return len(first) == len(second) and all(
        all(map(torch.equal, a[0], b[0])) and torch.equal(a[1], b[1]) and a[2] == b[2]
        for a, b in zip(first, second, strict=True)
    )


LENGTHS = [(n % 3, n % 5) for n in range(150)]  # ten of each kind


def test_a_batch_holds_what_the_model_reads_and_what_it_must_predict():
    loader = SequenceLoader([[5, 6], [7]], [[8], [9, 10, 11]], 100, device=CPU)
    ((source, target), following, count), *others = loader.batches()
    assert source.tolist() == [[5, 6, EOS], [7, EOS, PAD]]
    assert target.tolist() == [[BOS, 8, EOS, PAD], [BOS, 9, 10, 11]]  # what follows an end predicts nothing
    assert following.tolist() == [[8, EOS, PAD, PAD], [9, 10, 11, EOS]]
    assert count == 6
    assert others == []
    assert (PAD, BOS, EOS) == tuple(range(len(SPECIAL_TOKENS))) == (0, 1, 2)
    assert {t.dtype for t in (source, target, following)} == {torch.int64}


def test_empty_sequences_are_their_end():
    ((source, target), following, count), *_ = SequenceLoader([[]], [[]], 10, device=CPU).batches()
    assert (source.tolist(), target.tolist(), following.tolist(), count) == ([[EOS]], [[BOS]], [[EOS]], 1)
    assert source_ids([]) == [EOS]
    assert pad([]).shape == (0, 0)
    assert pad([[3], [], [4, 5]]).tolist() == [[3, PAD], [PAD, PAD], [4, 5]]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=40),
    st.integers(1, 60),
    st.none() | st.integers(0, 2**31),
    st.integers(0, 1000),
)
def test_every_epoch_holds_each_pair_once_in_batches_within_the_limit(lengths, batch_tokens, seed, epoch):
    sources, targets = pairs_of(lengths)
    loader = SequenceLoader(sources, targets, batch_tokens, seed=seed, device=CPU)
    batches = list(loader.batches(epoch))
    assert len(batches) == len(loader)
    assert loader.count == len(lengths)
    expected = Counter((tuple(s), tuple(t)) for s, t in zip(sources, targets, strict=True))
    assert Counter(pair for batch in batches for pair in pairs_in(batch)) == expected
    for (source, target), following, count in batches:
        assert len(source) == 1 or max(source.numel(), target.numel()) <= batch_tokens
        assert target.shape == following.shape
        assert count == int((following != PAD).sum())
        assert source.shape[1] == int((source != PAD).sum(1).max())  # no column of padding alone
        assert following.shape[1] == int((following != PAD).sum(1).max())
        assert torch.equal(target[:, 1:][following[:, 1:] != PAD], following[:, :-1][following[:, 1:] != PAD])
        assert (target[:, 0] == BOS).all()
    assert sum(count for _, _, count in batches) == sum(n + 1 for _, n in lengths)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=40), st.integers(1, 60))
def test_a_batch_is_closed_only_where_the_next_pair_has_no_room(lengths, batch_tokens):
    loader = loader_of(lengths, batch_tokens)
    plan = [numbers.tolist() for numbers in loader.plan()]
    order = [(lengths[i][1], lengths[i][0]) for numbers in plan for i in numbers]
    assert order == sorted(order)
    for numbers, following in pairwise(plan):
        widest = max(max(lengths[i]) + 1 for i in [*numbers, following[0]])
        assert widest * (len(numbers) + 1) > batch_tokens


def test_all_epochs_have_the_same_batches_by_length_and_other_pairs_in_them():
    loader = loader_of(LENGTHS, 60, seed=5)
    assert len({len(loader.plan(epoch)) for epoch in range(5)}) == 1

    def by_length(epoch):
        return Counter(tuple(sorted(LENGTHS[i] for i in numbers)) for numbers in loader.plan(epoch))

    def by_pair(epoch):
        return {frozenset(numbers.tolist()) for numbers in loader.plan(epoch)}

    assert by_length(0) == by_length(1) == by_length(7)
    assert len(by_pair(0) & by_pair(1)) < len(loader) / 2
    widths = [[int(loader.lengths[numbers, 0].max()) for numbers in loader.plan(epoch)] for epoch in (0, 1)]
    assert widths[0] != widths[1]
    assert widths[0] != sorted(widths[0])


def test_the_order_is_a_function_of_seed_and_epoch():
    first, again, other = (loader_of(LENGTHS, 60, seed) for seed in (5, 5, 6))
    list(again.batches(0))  # what was read before has no influence
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  # nor has any global state
    assert equal(first.batches(3), again.batches(3))
    assert not equal(first.batches(3), first.batches(4))
    assert not equal(first.batches(3), other.batches(3))


@pytest.mark.parametrize("seed", [None, 5])
def test_an_epoch_goes_on_in_the_middle(seed):
    loader = loader_of(LENGTHS, 60, seed)
    whole = list(loader.batches(2))
    for start in (0, 1, len(whole) // 2, len(whole) - 1, len(whole)):
        assert equal(loader.batches(2, start), whole[start:])


def test_without_a_seed_every_epoch_is_the_same():
    loader = loader_of(LENGTHS, 60)
    assert equal(loader.batches(0), loader.batches(9))


def test_a_pair_that_is_longer_than_the_limit_is_a_batch_by_itself():
    loader = loader_of([(1, 1), (30, 2), (2, 40), (1, 2)], 20)
    shapes = sorted((*source.shape, target.shape[1]) for (source, target), _, _ in loader.batches())
    assert shapes == [(1, 3, 41), (1, 31, 3), (2, 2, 3)]


def test_there_is_little_padding():
    random = np.random.default_rng(0)
    targets = random.integers(1, 60, 3000)
    lengths = [(int(max(1, n + d)), int(n)) for n, d in zip(targets, random.integers(-2, 3, 3000), strict=True)]
    loader = loader_of(lengths, 1000, seed=0)
    real = sum(s + 1 + t + 1 for s, t in lengths)
    padded = sum(source.numel() + target.numel() for (source, target), _, _ in loader.batches())

    unsorted, batch = 0, []
    for pair in [*lengths, (10**6, 10**6)]:
        if batch and (len(batch) + 1) * (max(map(max, [*batch, pair])) + 1) > 1000:
            unsorted += len(batch) * (max(s for s, _ in batch) + max(t for _, t in batch) + 2)
            batch = []
        batch.append(pair)
    assert real <= padded < 1.1 * real
    assert unsorted > 1.5 * real


def shapes_of(batches):
    """How often batches of each shape come: of source, of target so far and of what follows."""
    return Counter(tuple(tuple(t.shape) for t in (*inputs, following)) for inputs, following, _ in batches)


def announced(loader):
    """The same, of the batches that a loader says it will yield."""
    found = Counter()
    for inputs, following, number in loader.shapes():
        assert number > 0
        found[tuple(tuple(t.shape) for t in (*inputs, following))] += number
    return found


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=40),
    st.integers(1, 60),
    st.none() | st.integers(0, 2**31),
    st.integers(0, 1000),
)
@settings(max_examples=50)
def test_the_shapes_are_those_of_the_batches_of_every_epoch(lengths, batch_tokens, seed, epoch):
    loader = loader_of(lengths, batch_tokens, seed)
    assert announced(loader) == shapes_of(loader.batches(epoch))


def test_the_shapes_are_without_data_and_need_no_random_numbers():
    loader = loader_of(LENGTHS, 60, seed=5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    shapes = list(loader.shapes())
    assert before[1] == np.random.get_state()[1].tolist()  # noqa: NPY002
    assert torch.equal(before[0], torch.get_rng_state())
    for (source, target), following, _ in shapes:
        assert {t.device.type for t in (source, target, following)} == {"meta"}
        assert {t.dtype for t in (source, target, following)} == {torch.int64}
    assert sum(number * len(following) for _, following, number in shapes) == len(LENGTHS)
    assert announced(loader) == shapes_of(loader.batches(3))
    assert len(announced(loader)) > 3


def test_the_shapes_of_unequal_pairs_by_hand():
    loader = SequenceLoader([[5, 6, 7], [8], []], [[9], [10, 11, 12, 13], [14]], 8, device=CPU)
    assert announced(loader) == {((2, 4), (2, 2), (2, 2)): 1, ((1, 2), (1, 5), (1, 5)): 1}


@pytest.mark.parametrize("processes", [2, 5])
def test_processes_divide_each_batch_of_one(processes):
    lengths = [(i % 7, (3 * i) % 5) for i in range(40)]
    whole = SequenceLoader(*pairs_of(lengths), 30, seed=2, device=CPU)
    parts = [
        SequenceLoader(*pairs_of(lengths), 30, seed=2, device=CPU, share=(number, processes))
        for number in range(processes)
    ]
    for batch, *divided in zip(whole.batches(1), *(loader.batches(1) for loader in parts), strict=True):
        (source, target), following, count = batch
        assert torch.equal(torch.cat([d[0][0] for d in divided]), source)
        assert torch.equal(torch.cat([d[0][1] for d in divided]), target)
        assert torch.equal(torch.cat([d[1] for d in divided]), following)
        assert {d[2] for d in divided} == {count}
        assert {len(d[1]) for d in divided} <= {len(source) // processes, -(-len(source) // processes)}
    assert len(parts[0]) == len(whole)
