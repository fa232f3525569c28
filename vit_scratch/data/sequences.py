"""Pairs of sequences of token ids, in batches of about equally many tokens.

Shapes: B batch, N target tokens, S source tokens.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
"""The first ids of every vocabulary: padding, start and end."""

Batch = tuple[tuple[Tensor, Tensor], Tensor, int]
"""Source (B, S) and target up to its last token (B, N); target from its second token on (B, N); how many target tokens
the batch has in all processes."""


def pad(sequences: list[list[int]], device: torch.device | None = None) -> Tensor:
    """Sequences of ids as one tensor (B, longest), padded at the end."""
    if not sequences:
        return torch.empty(0, 0, dtype=torch.long, device=device)
    tensors = [torch.tensor(s, dtype=torch.long) for s in sequences]
    return pad_sequence(tensors, batch_first=True, padding_value=PAD).to(device)


def source_ids(sequence: list[int]) -> list[int]:
    """A source as the encoder reads it: with its end, so that it is never empty."""
    return [*sequence, EOS]


class SequenceLoader:
    """Batches of pairs of about equal length, so that there is little padding, each of at most so many tokens.

    The pairs are sorted by length, those of equal length in random order, and cut into batches, which come in random
    order. How many batches there are, and of which lengths, is the same in every epoch.

    Args:
        sources, targets: ids without start and end.
        batch_tokens: most tokens of a batch on the side that has more, padding included (a single pair may have more).
        seed: of the order; None for the same order each time.
        device: where the batches go.
        share: this process's number and how many there are; each gets its part of each batch, which may be empty.

    Attributes:
        count: number of pairs.
    """

    def __init__(
        self,
        sources: list[list[int]],
        targets: list[list[int]],
        batch_tokens: int,
        *,
        seed: int | None = None,
        device: torch.device,
        share: tuple[int, int] = (0, 1),
    ):
        assert len(sources) == len(targets)
        self.sources, self.targets, self.seed, self.device, self.share = sources, targets, seed, device, share
        self.count = len(sources)
        # Both sides have one token more than their symbols: a source its end, a target its start or its end.
        self.lengths = np.array([[len(t) + 1, len(s) + 1] for s, t in zip(sources, targets, strict=True)])
        self.ends: list[int] = []  # of the batches, in the order by length
        longest, first = 0, 0
        for place, length in enumerate(self.lengths[self.by_length(np.arange(self.count))].max(axis=1)):
            if place > first and max(longest, length) * (place - first + 1) > batch_tokens:
                self.ends.append(place)
                longest, first = 0, place
            longest = max(longest, int(length))
        self.ends.append(self.count)

    def by_length(self, order: np.ndarray) -> np.ndarray:
        """Sort numbers of pairs by target length, then by source length; equals keep their order."""
        return order[np.lexsort(self.lengths[order].T[::-1])]

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return len(self.ends)

    def plan(self, epoch: int = 0) -> list[np.ndarray]:
        """The numbers of the pairs in each batch of an epoch."""
        order = np.arange(self.count)
        random = None if self.seed is None else np.random.default_rng([self.seed, epoch, 0])
        if random is not None:
            random.shuffle(order)
        batches = np.split(self.by_length(order), self.ends[:-1])
        return batches if random is None else [batches[i] for i in random.permutation(len(batches))]

    def shapes(self) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor, int]]:
        """What batches an epoch consists of: inputs and targets without data, on the meta device, and how many."""
        for numbers in np.split(self.by_length(np.arange(self.count)), self.ends[:-1]):
            (n, s), b = self.lengths[numbers].max(axis=0).tolist(), len(numbers)
            target = torch.empty(b, n, dtype=torch.long, device="meta")
            yield (torch.empty(b, s, dtype=torch.long, device="meta"), target), target, 1

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start` on."""
        process, processes = self.share
        for numbers in self.plan(epoch)[start:]:
            own = slice(len(numbers) * process // processes, len(numbers) * (process + 1) // processes)
            # Padded as the whole batch is: an empty part of it, too, is so long.
            source = pad([source_ids(self.sources[i]) for i in numbers])[own].to(self.device)
            target = pad([[BOS, *self.targets[i], EOS] for i in numbers])[own].to(self.device)
            yield (source, target[:, :-1]), target[:, 1:], int(self.lengths[numbers, 0].sum())
