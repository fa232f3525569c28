"""Generation: from a source to the target that a model makes of it, greedily, by sampling, or by beam search.

All three work on batches, keep keys and values from step to step, and leave out a row as soon as it has ended.
Shapes: B batch, S source tokens, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class State(Protocol):
    """Where a batch stands, as `DecodingState`."""

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may be taken more than once."""


class Model(Protocol):
    """What generation needs of a model; `Transformer` has it."""

    pad_id: int

    def start(self, source: Tensor) -> Any:
        """Source ids (B, S) -> a `State`."""

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        """Ids (B,) of the next target token -> logits (B, V) for the one after it; moves the state on."""


class Hypothesis(NamedTuple):
    """A generated target.

    Attributes:
        tokens: its ids, without start and end token.
        log_probability: the sum over its tokens, the end token included.
        ended: whether it ends with the end token, or was cut off at the greatest length.
    """

    tokens: list[int]
    log_probability: float
    ended: bool


def check_generation(model: Model, source: Tensor, bos_id: int, eos_id: int, max_length: int) -> None:
    """Raise ValueError unless `source` is a batch of ids (B, S), the ids differ and `max_length` is not negative."""
    if source.dim() != 2 or source.is_floating_point():
        raise ValueError(f"source has shape {tuple(source.shape)} and dtype {source.dtype}; it must be ids (B, S)")
    if eos_id in (bos_id, model.pad_id):
        raise ValueError(
            f"eos_id={eos_id} must differ from bos_id={bos_id} and pad_id={model.pad_id}, which are never written"
        )
    if max_length < 0:
        raise ValueError(f"max_length={max_length} is no number of tokens; it must be at least 0")


def log_probabilities(model: Model, tokens: Tensor, state: Any, bos_id: int) -> Tensor:
    """Ids (B,) -> log-probabilities (B, V) of the next; none for padding and the start token, which end no sentence."""
    logits = model.step(tokens, state).to(torch.float32, copy=True)  # what the model returns stays as it is
    logits[:, [model.pad_id, bos_id]] = -math.inf
    return logits.log_softmax(dim=-1)


def _one_by_one(
    model: Model, source: Tensor, bos_id: int, eos_id: int, max_length: int, choose: Callable[[Tensor], Tensor]
) -> list[Hypothesis]:
    """Let `choose` pick a token (B,) from log-probabilities (B, V), step after step."""
    check_generation(model, source, bos_id, eos_id, max_length)
    found = [Hypothesis([], 0.0, False) for _ in source]
    if max_length == 0 or len(source) == 0:
        return found
    state = model.start(source)
    rows = torch.arange(len(source), device=source.device)  # those that have not ended
    total = torch.zeros(len(source), device=source.device)
    tokens = torch.full_like(rows, bos_id)
    history = source.new_empty(len(source), 0)
    for length in range(1, max_length + 1):
        log_p = log_probabilities(model, tokens, state, bos_id)
        tokens = choose(log_p)
        total = total + log_p.gather(1, tokens[:, None])[:, 0]
        ended = tokens == eos_id
        leaving = ended | (length == max_length)
        if leaving.any():
            complete = torch.cat([history, tokens[:, None]], dim=1)
            columns = (rows, complete, total, ended)
            for row, ids, log_probability, end in zip(*(c[leaving].tolist() for c in columns), strict=True):
                found[row] = Hypothesis(ids[: len(ids) - end], log_probability, end)
            staying = (~leaving).nonzero()[:, 0]
            if not len(staying):
                break
            rows, tokens, total, history = rows[staying], tokens[staying], total[staying], history[staying]
            state.select(staying)
        history = torch.cat([history, tokens[:, None]], dim=1)
    return found


@torch.inference_mode()
def greedy(model: Model, source: Tensor, *, bos_id: int, eos_id: int, max_length: int) -> list[Hypothesis]:
    """Take the likeliest token at each step.

    Args:
        model: in eval mode, where it has dropout.
        source: ids (B, S), padded at the end with the model's `pad_id`; may be empty in both dimensions.
        bos_id, eos_id: ids that start and end a target.
        max_length: the most tokens to generate, the end token included.

    Returns:
        A hypothesis for each row.

    Raises:
        ValueError: a source that is no batch of ids, an `eos_id` that is no other id, or a negative `max_length`.
    """
    return _one_by_one(model, source, bos_id, eos_id, max_length, lambda log_p: log_p.argmax(dim=-1))


def restrict(
    log_p: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The distribution that `sample` draws from.

    Args:
        log_p: log-probabilities (B, V).
        temperature, top_k, top_p: as `sample`; applied in this order.

    Returns:
        Probabilities (B, V) that sum to 1.
    """
    if top_k is not None and top_k < log_p.shape[-1]:
        kept = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, log_p.topk(top_k).indices, True)
        log_p = log_p.masked_fill(~kept, -math.inf)
    p = (log_p / min(max(temperature, 1e-30), 1e30)).softmax(dim=-1)  # beyond, float32 runs out of range
    if top_p is not None and top_p < 1:
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered  # the mass of all that are likelier
        p = torch.zeros_like(p).scatter(-1, order, ordered.masked_fill((before > 0) & (before >= top_p), 0.0))
        p = p / p.sum(dim=-1, keepdim=True)
    return p


@torch.inference_mode()
def sample(
    model: Model,
    source: Tensor,
    *,
    bos_id: int,
    eos_id: int,
    max_length: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> list[Hypothesis]:
    """Draw each token from the model's distribution.

    Args:
        temperature: above 0; below 1 sharpens the distribution, above 1 flattens it.
        top_k: draw from the so many likeliest tokens only.
        top_p: draw from the fewest likeliest tokens that together have at least this probability ("The Curious Case
            of Neural Text Degeneration"); above 0, at most 1.
        generator: source of randomness, on the device of `source`.
        others: as `greedy`.

    Returns:
        A hypothesis for each row; its log-probability is the model's, before these changes.

    Raises:
        ValueError: as `greedy`, or a temperature, `top_k` or `top_p` out of range.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} is out of range; it must be above 0 (greedy is its limit)")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} is out of range; it must be at least 1, or None for all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is out of range; it must be above 0 and at most 1, or None for all tokens")

    def choose(log_p: Tensor) -> Tensor:
        p = restrict(log_p, temperature=temperature, top_k=top_k, top_p=top_p)
        return torch.multinomial(p, 1, generator=generator)[:, 0]

    return _one_by_one(model, source, bos_id, eos_id, max_length, choose)


def length_norm(length: int, penalty: float) -> float:
    """What a log-probability is divided by ("Google's Neural Machine Translation System", equation 14).

    Args:
        length: number of tokens, the end token included.
        penalty: 0 for no normalisation; the greater, the longer the targets.
    """
    return ((5 + length) / 6) ** penalty


@torch.inference_mode()
def beam_search(
    model: Model,
    source: Tensor,
    *,
    bos_id: int,
    eos_id: int,
    max_length: int,
    beams: int = 5,
    length_penalty: float = 1.0,
) -> list[Hypothesis]:
    """Follow the likeliest beginnings, and return the ended target of the best score.

    The score is the log-probability divided by `length_norm`; targets that are cut off at `max_length` compete with
    theirs. At each step the best continuations take the places of the beam. One that ends is set aside and keeps its
    place ("Sequence to Sequence Learning with Neural Networks", section 3.2), so that a beam of 1 is `greedy`. The
    search of a row stops when no beginning that is left can reach the best score found, and not earlier.

    Args:
        beams: width of the beam.
        length_penalty: exponent of `length_norm`, from 0 to 100; 0 to 2 are sensible.
        others: as `greedy`.

    Returns:
        The best hypothesis for each row.

    Raises:
        ValueError: as `greedy`, a beam below 1, or a penalty out of range.
    """
    check_generation(model, source, bos_id, eos_id, max_length)
    if beams < 1:
        raise ValueError(f"beams={beams} is out of range; it must be at least 1")
    if not 0 <= length_penalty <= 100:  # beyond, the norm of a long target is no number any more
        raise ValueError(f"length_penalty={length_penalty} is out of range; it must be from 0 to 100")
    device = source.device
    found = [Hypothesis([], 0.0, False) for _ in source]
    if max_length == 0 or len(source) == 0:
        return found
    state = model.start(source)
    state.select(torch.arange(len(source), device=device).repeat_interleave(beams))
    rows = list(range(len(source)))  # those that are still searched
    best = [-math.inf] * len(source)  # scores of what was found
    tokens = torch.full((len(source) * beams,), bos_id, device=device)
    history = source.new_empty(len(source) * beams, 0)
    total = torch.full((len(source), beams), -math.inf, device=device)  # of each beginning; -inf is no beginning
    total[:, 0] = 0.0
    places = torch.full((len(source), 1), beams, device=device)  # left in the beam
    rank = torch.arange(beams, device=device)
    for length in range(1, max_length + 1):
        log_p = log_probabilities(model, tokens, state, bos_id)
        vocabulary = log_p.shape[-1]
        candidates = (total.flatten()[:, None] + log_p).view(len(rows), beams * vocabulary)
        # A beam of 1 chooses as `greedy`, also among equals, of which topk takes any.
        chosen = log_p.argmax(dim=1, keepdim=True) if beams == 1 else candidates.topk(beams, dim=1).indices
        total = candidates.gather(1, chosen).masked_fill(rank >= places, -math.inf)  # (rows, beams)
        parents = chosen // vocabulary
        tokens = chosen % vocabulary
        first = torch.arange(len(rows), device=device)[:, None] * beams
        history = torch.cat([history[(first + parents).flatten()], tokens.reshape(-1, 1)], dim=1)

        ended = (tokens == eos_id) & (total > -math.inf)
        closing = total > -math.inf if length == max_length else ended
        norm = length_norm(length, length_penalty)
        for place in closing.nonzero().tolist():
            row, value = rows[place[0]], float(total[place[0], place[1]])
            if value / norm > best[row]:
                ids, end = history[place[0] * beams + place[1]].tolist(), bool(ended[place[0], place[1]])
                best[row], found[row] = value / norm, Hypothesis(ids[: len(ids) - end], value, end)
        if length == max_length:
            break
        places = places - ended.sum(dim=1, keepdim=True)
        total = total.masked_fill(ended, -math.inf)
        # A log-probability only falls, and is divided by at most the norm of the greatest length.
        reachable = (total.amax(dim=1) / length_norm(max_length, length_penalty)).tolist()
        staying = [i for i, row in enumerate(rows) if reachable[i] > best[row]]
        if not staying:
            break
        keep = torch.tensor(staying, device=device)
        state.select((first + parents)[keep].flatten())
        history = history.view(len(rows), beams, -1)[keep].flatten(0, 1)
        tokens, total, places = tokens[keep].flatten(), total[keep], places[keep]
        rows = [rows[i] for i in staying]
    return found
