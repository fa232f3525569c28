"""Generation: greedy, sampling and beam search against full passes, all targets one by one, and a plain reference."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vit_scratch.transformer.decoder import Decoder
from vit_scratch.transformer.encoder import Encoder
from vit_scratch.transformer.generation import Hypothesis, beam_search, greedy, length_norm, restrict, sample
from vit_scratch.transformer.transformer import Transformer

PAD, BOS, EOS, A, B = range(5)
IDS = dict(bos_id=BOS, eos_id=EOS)
PENALTIES = pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
ALL = pytest.mark.parametrize("generate", [greedy, sample, beam_search])
SMALL = torch.finfo(torch.float32).tiny


# Models


class Rows:
    """The state of a `Table`: the name of each row of the batch, and its ids so far."""

    def __init__(self, rows):
        self.rows = rows

    def select(self, rows):
        self.rows = [self.rows[row] for row in rows.tolist()]


class Table:
    """A model whose logits for the next token are any function of the source's first id and the target so far.

    It counts the rows of each step.
    """

    pad_id = PAD

    def __init__(self, logits):
        self.logits, self.steps = functools.cache(logits), []

    def start(self, source):
        return Rows([(name, ()) for name in source[:, 0].tolist()])

    def step(self, tokens, state):
        self.steps.append(len(tokens))
        state.rows = [(name, (*ids, token)) for (name, ids), token in zip(state.rows, tokens.tolist(), strict=True)]
        assert all(ids[0] == BOS for _, ids in state.rows)
        return torch.stack([self.logits(name, ids[1:]) for name, ids in state.rows])


def random_table(seed, vocabulary=6, *, ties=False, impossible=0.0):
    """Random logits, the highest for padding and the start token; `ties` rounds, `impossible` puts some at -inf."""

    def logits(name, ids):
        random = np.random.default_rng([seed, name, len(ids), *ids])
        values = random.normal(scale=2, size=vocabulary)
        values[3:][random.random(vocabulary - 3) < impossible] = -math.inf
        values[[PAD, BOS]] = 10
        return torch.tensor(values.round() if ties else values, dtype=torch.float32)

    return Table(logits)


def table_of(probabilities):
    """A table written out: {name: {target so far: {token: probability}}}; what is left out leads to all alike."""

    def logits(name, ids):
        row = probabilities[name].get(ids, dict.fromkeys((EOS, A, B), 1 / 3))
        assert sum(row.values()) == pytest.approx(1)
        return torch.tensor([row.get(token, 0.0) for token in range(5)]).log()

    return Table(logits)


def names(*of_rows):
    return torch.tensor(of_rows)[:, None]


class Chain:
    """A model whose next token depends on the last one only; `table` (V, V) holds the logits."""

    pad_id = PAD

    def __init__(self, table):
        self.table = table

    def start(self, source):
        return Rows(source.tolist())

    def step(self, tokens, state):
        return self.table[tokens]


def build_transformer(seed, vocabulary=6, *, norm_first=True, pad_id=PAD, end=(EOS, 0.0), tie="none"):
    """A small model with strong opinions; `end` adds to the logit of one token."""
    torch.manual_seed(seed)
    encoder, decoder = Encoder(8, 1, 2, norm_first=norm_first), Decoder(8, 2, 2, norm_first=norm_first)
    model = Transformer(
        encoder,
        decoder,
        source_vocabulary=vocabulary,
        target_vocabulary=vocabulary,
        pad_id=pad_id,
        max_length=30,
        tie=tie,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter, std=0.5 if "embedding" in name else 0.3)
            if "cross_attention" in name:
                parameter *= 2
            if "norm" in name and name.endswith("weight"):
                parameter += 1
        model.head.bias[end[0]] += end[1]
    return model.eval()


def random_sources(lengths, vocabulary=6, pad_id=PAD, total=5):
    """(B, total), the first `lengths[b]` of them no padding."""
    source = torch.randint(1, vocabulary, (len(lengths), total))
    source = torch.where(source == pad_id, 0, source)
    source[torch.arange(total) >= torch.tensor(lengths)[:, None]] = pad_id
    return source


# References


def allowed_log_p(logits, banned=(PAD, BOS)):
    """In float64, without those tokens that end no sentence."""
    logits = logits.detach().double().clone()
    logits[..., list(banned)] = -math.inf
    return logits.log_softmax(dim=-1)


def beginnings_of_table(table, name):
    return lambda ids: allowed_log_p(table.logits(name, ids)).tolist()


def beginnings_of_transformer(model, source, max_length):
    """Log-probabilities after every beginning, from one full pass over all of them."""
    usable = [token for token in range(model.head.out_features) if token not in (PAD, BOS, EOS)]
    targets = torch.tensor([(BOS, *ids) for ids in itertools.product(usable, repeat=max_length - 1)])
    with torch.no_grad():
        log_p = allowed_log_p(model(source.expand(len(targets), -1), targets)).tolist()
    table = {}
    for ids, rows in zip(targets.tolist(), log_p, strict=True):
        table.update({tuple(ids[1 : n + 1]): row for n, row in enumerate(rows)})
    return table.__getitem__


def all_targets(log_p, max_length, ids=(), total=0.0):
    """Every target that ends, or is cut off at the greatest length."""
    for token, value in enumerate(log_p(ids)):
        if value == -math.inf:
            continue
        if token == EOS:
            yield Hypothesis(list(ids), total + value, True)
        elif len(ids) + 1 == max_length:
            yield Hypothesis([*ids, token], total + value, False)
        else:
            yield from all_targets(log_p, max_length, (*ids, token), total + value)


def score(hypothesis, penalty):
    """Equation 14 of "Google's Neural Machine Translation System" without coverage; the end token counts."""
    length = len(hypothesis.tokens) + hypothesis.ended
    return hypothesis.log_probability / ((5 + length) / (5 + 1)) ** penalty


def plain_beam_search(log_p, max_length, beams, penalty):
    """One row, nothing clever: what has ended keeps its place, and the search goes on while anything has not."""
    living, done = [((), 0.0)], []
    for length in range(1, max_length + 1):
        candidates = [
            ((*ids, token), total + value)
            for ids, total in living
            for token, value in enumerate(log_p(ids))
            if value > -math.inf
        ]
        candidates.sort(key=lambda candidate: -candidate[1])
        places = beams - sum(hypothesis.ended for hypothesis in done)
        living = []
        for ids, total in candidates[:places]:
            if ids[-1] == EOS:
                done.append(Hypothesis(list(ids[:-1]), total, True))
            elif length == max_length:
                done.append(Hypothesis(list(ids), total, False))
            else:
                living.append((ids, total))
    return max(done, key=lambda hypothesis: score(hypothesis, penalty))


@torch.no_grad()
def plain_greedy(model, source, max_length, *, bos_id=BOS, eos_id=EOS):
    """A full pass over sources and targets for each token, on and on; the targets are cut at their end afterwards."""
    target, values = torch.full((len(source), 1), bos_id), []
    for _ in range(max_length):
        log_p = allowed_log_p(model(source, target)[:, -1], (model.pad_id, bos_id))
        value, token = log_p.max(dim=-1)
        target, values = torch.cat([target, token[:, None]], dim=1), [*values, value.tolist()]
    found = []
    for ids, row in zip(target[:, 1:].tolist(), zip(*values, strict=True), strict=True):
        length = ids.index(eos_id) + 1 if eos_id in ids else max_length
        found.append(Hypothesis([token for token in ids[:length] if token != eos_id], sum(row[:length]), eos_id in ids))
    return found


def plain_restrict(probabilities, temperature=1.0, top_k=None, top_p=None):
    """One row of numbers."""
    p = [x ** (1 / temperature) for x in probabilities]
    p = [x / sum(p) for x in p]
    order = sorted(range(len(p)), key=lambda token: -p[token])[:top_k]
    p = [x / sum(p[i] for i in order) if token in order else 0.0 for token, x in enumerate(p)]
    if top_p is not None:
        kept, mass = [], 0.0
        while mass < top_p - 1e-12 and len(kept) < len(order):
            kept.append(order[len(kept)])
            mass += p[kept[-1]]
        p = [x / mass if token in kept else 0.0 for token, x in enumerate(p)]
    return p


def check(found, expected, tolerance=1e-5):
    assert [h.tokens for h in found] == [h.tokens for h in expected]
    assert [h.ended for h in found] == [h.ended for h in expected]
    assert [h.log_probability for h in found] == pytest.approx([h.log_probability for h in expected], abs=tolerance)


# Greedy


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("tie", ["none", "target", "all"])
@pytest.mark.parametrize(("pad_id", "bos_id", "eos_id"), [(PAD, BOS, EOS), (7, 0, 4)])
def test_greedy_equals_a_loop_of_full_passes(norm_first, tie, pad_id, bos_id, eos_id):
    different = []
    for seed in range(10):
        options = dict(norm_first=norm_first, pad_id=pad_id, end=(eos_id, 0.5), tie=tie)
        model = build_transformer(seed, 9, **options)
        source = random_sources([5, 3, 1, 0, 4, 2, 5, 1] * 2, 9, pad_id)
        found = greedy(model, source, bos_id=bos_id, eos_id=eos_id, max_length=7)
        check(found, plain_greedy(model, source, 7, bos_id=bos_id, eos_id=eos_id), 1e-4)
        different.append(len({len(h.tokens) for h in found}))
    assert sum(d > 1 for d in different) >= 3
    assert max(different) >= 3


def test_padding_and_start_token_are_not_generated_even_where_they_are_the_likeliest():
    model, source = build_transformer(1, 9, end=(PAD, 50.0)), random_sources([5, 2, 4], 9)
    with torch.no_grad():
        model.head.bias[BOS] += 40
    assert (model(source, torch.ones(3, 1, dtype=torch.long)).argmax(-1) == PAD).all()
    check(greedy(model, source, max_length=6, **IDS), plain_greedy(model, source, 6), 1e-4)


@pytest.mark.parametrize("max_length", [1, 2, 3, 4])
def test_a_target_that_does_not_end_in_time_is_cut_off_and_the_end_token_counts_as_one(max_length):
    # A B end, of probability 0.5 * 0.6 * 0.7
    table = table_of({1: {(): {A: 0.5, B: 0.3, EOS: 0.2}, (A,): {B: 0.6, EOS: 0.4}, (A, B): {EOS: 0.7, A: 0.3}}})
    expected = {
        1: Hypothesis([A], math.log(0.5), False),
        2: Hypothesis([A, B], math.log(0.3), False),
        3: Hypothesis([A, B], math.log(0.21), True),
        4: Hypothesis([A, B], math.log(0.21), True),
    }[max_length]
    check(greedy(table, names(1), max_length=max_length, **IDS), [expected])
    check(sample(table, names(1), max_length=max_length, top_k=1, **IDS), [expected])
    check(beam_search(table, names(1), max_length=max_length, beams=1, **IDS), [expected])


@ALL
@pytest.mark.parametrize(("batch", "length", "max_length"), [(3, 4, 0), (0, 4, 5), (0, 0, 5), (2, 0, 0), (0, 3, 0)])
def test_nothing_to_generate_gives_empty_targets_without_a_step(generate, batch, length, max_length):
    table = random_table(0)
    found = generate(table, torch.ones(batch, length, dtype=torch.long), max_length=max_length, **IDS)
    assert found == [Hypothesis([], 0.0, False)] * batch
    assert table.steps == []


def test_an_empty_source_is_one_of_padding():
    model = build_transformer(2, 9, end=(EOS, 1.0))
    empty, padding = torch.zeros(2, 0, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)
    expected = plain_greedy(model, padding, 6) * 2
    assert len(expected[0].tokens) > 1
    check(greedy(model, empty, max_length=6, **IDS), expected, 1e-4)
    check(beam_search(model, empty, max_length=6, beams=1, **IDS), expected, 1e-4)
    check(sample(model, empty, max_length=6, top_k=1, **IDS), expected, 1e-4)


@pytest.mark.parametrize(
    "generate",
    [
        greedy,
        functools.partial(beam_search, length_penalty=3.0),
        functools.partial(beam_search, beams=2),
        functools.partial(sample, top_k=1),
    ],
    ids=["greedy", "beam search of 5", "beam search of 2", "sample"],
)
def test_a_row_depends_neither_on_the_other_rows_nor_on_the_amount_of_padding(generate):
    generate = functools.partial(generate, max_length=6, **IDS)
    lengths, different = [5, 3, 1, 0, 4, 2], []
    for seed in range(3):
        model, source = build_transformer(seed, 9, end=(EOS, 1.0)), random_sources(lengths, 9)
        found = generate(model, source)
        different.append(len({tuple(h.tokens) for h in found}))
        alone = [generate(model, row[None, :length])[0] for row, length in zip(source, lengths, strict=True)]
        check(found, alone, 1e-4)
        check(found, generate(model, nn.functional.pad(source, (0, 7), value=PAD)), 1e-4)
        order = [3, 0, 0, 5, 1, 4, 2, 2]
        check([found[i] for i in order], generate(model, source[order]), 1e-4)
    assert sum(d > 2 for d in different) >= 2


def test_the_source_may_be_of_any_integer_type():
    model, source = build_transformer(0, 9), random_sources([5, 2], 9)
    for generate in (greedy, beam_search):
        expected = generate(model, source, max_length=5, **IDS)
        check(generate(model, source.int(), max_length=5, **IDS), expected)


@ALL
def test_tokens_that_the_model_rules_out_are_never_generated(generate):
    for seed in range(5):
        table = random_table(seed, 8, impossible=0.6)
        found = generate(table, names(*range(1, 9)), max_length=5, **IDS)
        for name, hypothesis in enumerate(found, 1):
            ids = [*hypothesis.tokens, *[EOS] * hypothesis.ended]
            log_p = [beginnings_of_table(table, name)(tuple(ids[:n]))[token] for n, token in enumerate(ids)]
            assert sum(log_p) == pytest.approx(hypothesis.log_probability, abs=1e-4)
            assert math.isfinite(sum(log_p))


@ALL
def test_generation_leaves_the_logits_of_the_model_alone(generate):
    model = Chain(torch.randn(6, 6))
    model.step = lambda tokens, state: model.table[: len(tokens)]  # a view
    before = model.table.clone()
    generate(model, names(1), max_length=3, **IDS)
    assert torch.equal(model.table, before)


@ALL
def test_no_target_contains_padding_start_or_end_token(generate):
    seen = set()
    for seed in range(10):
        for hypothesis in generate(random_table(seed, 7), names(1, 2, 3), max_length=5, **IDS):
            assert len(hypothesis.tokens) + hypothesis.ended <= 5
            assert hypothesis.ended or len(hypothesis.tokens) == 5
            seen |= set(hypothesis.tokens)
    assert seen == {3, 4, 5, 6}


# Efficiency: what is stepped


def ends_after(length):
    """Ends surely with its `length`-th token."""
    return {(A,) * n: {A: 1.0} for n in range(length - 1)} | {(A,) * (length - 1): {EOS: 1.0}}


@pytest.mark.parametrize(("generate", "width"), [(greedy, 1), (sample, 1), (beam_search, 5)])
def test_rows_that_have_ended_are_no_longer_stepped_and_the_loop_ends_with_the_last(generate, width):
    table = table_of({1: ends_after(3), 2: ends_after(1), 3: ends_after(4), 4: ends_after(3)})
    found = generate(table, names(1, 2, 3, 4), max_length=20, **IDS)
    check(found, [Hypothesis([A] * n, 0.0, True) for n in (2, 0, 3, 2)])
    assert table.steps == [width * rows for rows in (4, 3, 3, 1)]


@pytest.mark.parametrize("generate", [greedy, functools.partial(beam_search, beams=1)])
def test_no_step_is_taken_beyond_the_greatest_length(generate):
    table = table_of({1: ends_after(9), 2: ends_after(3), 3: ends_after(1)})
    generate(table, names(1, 2, 3), max_length=3, **IDS)
    assert table.steps == [3, 2, 2]


@pytest.mark.parametrize(
    ("penalty", "max_length", "steps"),
    [
        # After step 1: ended log 0.9 = -0.10536; left A of log 0.06 = -2.8134, which has no chance without a penalty.
        (0.0, 300, 1),
        # -2.8134 over 160/6 = -0.10550 can't win any more, over 161/6 = -0.10485 might yet.
        (1.0, 155, 1),
        (1.0, 156, 2),
        # Step 2 halves it: -3.5066 over 199/6 = -0.10573 and over 200/6 = -0.10520.
        (1.0, 194, 2),
        (1.0, 195, 3),
    ],
)
def test_a_beam_search_stops_as_soon_as_nothing_left_can_win(penalty, max_length, steps):
    halves = {ids: {A: 0.5, B: 0.5} for n in range(1, 9) for ids in itertools.product((A, B), repeat=n)}
    table = table_of({1: {(): {EOS: 0.9, A: 0.06, B: 0.04}} | halves})
    found = beam_search(table, names(1), max_length=max_length, beams=2, length_penalty=penalty, **IDS)
    check(found, [Hypothesis([], math.log(0.9), True)])
    assert table.steps == [2] * steps


# Beam search: all targets


@PENALTIES
@pytest.mark.parametrize("seed", range(8))
def test_a_wide_beam_finds_the_best_of_all_targets_of_a_table(seed, penalty):
    # 4 usable ids, 4 tokens: 1 + 3 + 9 targets end early, 27 * 4 at the last token.
    table = random_table(seed)
    found = beam_search(table, names(1, 2, 3), max_length=4, beams=121, length_penalty=penalty, **IDS)
    for name, hypothesis in enumerate(found, 1):
        targets = list(all_targets(beginnings_of_table(table, name), 4))
        assert len(targets) == 121
        check([hypothesis], [max(targets, key=lambda target: score(target, penalty))])


@PENALTIES
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_a_wide_beam_finds_the_best_of_all_targets_of_a_transformer(norm_first, penalty):
    lengths = []
    for seed in range(3):
        model, source = build_transformer(seed, norm_first=norm_first), random_sources([5, 2, 0, 3])
        found = beam_search(model, source, max_length=4, beams=121, length_penalty=penalty, **IDS)
        for row, hypothesis in zip(source, found, strict=True):
            targets = all_targets(beginnings_of_transformer(model, row, 4), 4)
            check([hypothesis], [max(targets, key=lambda target: score(target, penalty))], 1e-4)
        lengths += [len(h.tokens) for h in found]
    assert len(set(lengths)) > 1


@pytest.mark.parametrize("beams", [7, 50, 500])
def test_a_beam_wider_than_the_vocabulary_and_than_all_targets_is_no_problem(beams):
    table = random_table(3, impossible=0.3)
    found = beam_search(table, names(1, 2), max_length=2, beams=beams, **IDS)
    for name, hypothesis in enumerate(found, 1):
        targets = all_targets(beginnings_of_table(table, name), 2)
        check([hypothesis], [max(targets, key=lambda target: score(target, 1.0))])


# Beam search: the plain reference


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 3.0])
@pytest.mark.parametrize("beams", [1, 2, 3, 5])
@pytest.mark.parametrize("impossible", [0.0, 0.5])
def test_beam_search_equals_the_plain_algorithm(impossible, beams, penalty):
    ended = 0
    for seed in range(12):
        table = random_table(seed, 7, impossible=impossible)
        found = beam_search(table, names(1, 2, 3), max_length=6, beams=beams, length_penalty=penalty, **IDS)
        log_p = [beginnings_of_table(table, name) for name in (1, 2, 3)]
        check(found, [plain_beam_search(row, 6, beams, penalty) for row in log_p])
        ended += sum(h.ended for h in found)
    assert 0 < ended < 36 or penalty in (0, 3)


@PENALTIES
def test_beam_search_over_a_transformer_equals_the_plain_algorithm(penalty):
    for seed in range(4):
        model, source = build_transformer(seed, end=(EOS, 0.5)), random_sources([5, 2, 0, 3])
        found = beam_search(model, source, max_length=5, beams=3, length_penalty=penalty, **IDS)
        log_p = [beginnings_of_transformer(model, row, 5) for row in source]
        check(found, [plain_beam_search(row, 5, 3, penalty) for row in log_p], 1e-4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.6, 1.0]), st.integers(1, 8), st.booleans())
def test_a_beam_of_one_is_greedy(seed, penalty, max_length, ties):
    table = random_table(seed, 8, ties=ties)
    found = beam_search(table, names(1, 2, 3), max_length=max_length, beams=1, length_penalty=penalty, **IDS)
    check(found, greedy(table, names(1, 2, 3), max_length=max_length, **IDS), 0)


@PENALTIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # the latter has equal logits
def test_a_beam_of_one_is_greedy_over_a_transformer(dtype, penalty):
    for seed in range(5):
        model, source = build_transformer(seed, 40, end=(EOS, 1.0)).to(dtype), random_sources([5, 3, 0, 1], 40)
        found = beam_search(model, source, max_length=8, beams=1, length_penalty=penalty, **IDS)
        check(found, greedy(model, source, max_length=8, **IDS), 0)


def test_a_beam_of_one_is_greedy_where_the_sum_can_no_longer_tell_two_tokens_apart():
    table = torch.tensor(np.random.default_rng(0).normal(scale=2e-5, size=(300, 300)), dtype=torch.float32)
    found = beam_search(Chain(table), names(1), max_length=60, beams=1, **IDS)
    assert len(found[0].tokens) == 60
    assert found[0].log_probability < -256  # where numbers are 3e-5 apart
    check(found, greedy(Chain(table), names(1), max_length=60, **IDS), 0)


# Beam search: by hand


def best(probabilities, beams=2, max_length=4, penalty=1.0):
    found = beam_search(
        table_of({1: probabilities}), names(1), max_length=max_length, beams=beams, length_penalty=penalty, **IDS
    )
    return found[0]


@PENALTIES
def test_the_best_target_is_returned_also_where_another_one_ended_first(penalty):
    # "end" 0.4: log -0.916. "A end" 0.5 * 0.9 = 0.45: log -0.799, over 7/6 -0.684. Greedy would do it too.
    hypothesis = best({(): {EOS: 0.4, A: 0.5, B: 0.1}, (A,): {EOS: 0.9, B: 0.1}}, penalty=penalty)
    check([hypothesis], [Hypothesis([A], math.log(0.45), True)])


def test_the_best_target_is_not_lost_by_stopping_at_the_first_that_ended():
    # "end" 0.5: log -0.693, the best by far at length 1, where A 0.4 has log -0.916.
    # "A B A end" 0.4: -0.916 over 9/6 = -0.611.
    surely = {(A,): {B: 1.0}, (A, B): {A: 1.0}, (A, B, A): {EOS: 1.0}}
    first = {(): {EOS: 0.5, A: 0.4, B: 0.1}}
    check([best(first | surely)], [Hypothesis([A, B, A], math.log(0.4), True)])
    # A shorter limit cuts it off at A B: -0.916 over 7/6 = -0.786 loses.
    check([best(first | surely, max_length=2)], [Hypothesis([], math.log(0.5), True)])
    check([best(first | surely, penalty=0.0)], [Hypothesis([], math.log(0.5), True)])


def test_a_target_that_was_cut_off_competes_with_those_that_ended():
    # "end" 0.5: log -0.693; "A A" 0.45: -0.799 over 7/6 = -0.684.
    table = {(): {EOS: 0.5, A: 0.45, B: 0.05}, (A,): {A: 1.0}}
    check([best(table, max_length=2)], [Hypothesis([A, A], math.log(0.45), False)])
    check([best(table, max_length=2, penalty=0.5)], [Hypothesis([], math.log(0.5), True)])  # -0.799 / 1.080 = -0.739


def test_an_ended_target_never_grows():
    # After "end" the table would go on at no cost, and "end A A A" would have -0.693 over 9/6.
    for_free = {(EOS, *[A] * n): {A: 1.0} for n in range(4)}
    table = {(): {EOS: 0.5, A: 0.3, B: 0.2}, (A,): {A: 0.5, B: 0.5}, (B,): {A: 0.5, B: 0.5}} | for_free
    for beams in (1, 2, 3):
        check([best(table, beams)], [Hypothesis([], math.log(0.5), True)])


def test_an_ended_target_keeps_its_place():
    # A beam of 2, norms 1, (7/6)^2 = 1.361, (8/6)^2 = 1.778. Step 1: A 0.5, and "end" 0.3 (log -1.204), which leaves
    # one place. Step 2: A B 0.26 takes it, before "A end" 0.24. Step 3: each of A B A, A B B and "A B end" has a third,
    # log -2.446 over 1.778 = -1.376. In a beam of 3, "A end" has a place: log -1.427 over 1.361 = -1.048.
    table = {(): {A: 0.5, EOS: 0.3, B: 0.2}, (A,): {B: 0.52, EOS: 0.48}}
    check([best(table, 2, max_length=3, penalty=2.0)], [Hypothesis([], math.log(0.3), True)])
    check([best(table, 3, max_length=3, penalty=2.0)], [Hypothesis([A], math.log(0.24), True)])


@pytest.mark.parametrize(
    ("second", "winner"),
    [
        # "end" 0.4: log -0.9163 over 1. "A end" wins over 7/6 where its log is above -1.0690, probability 0.3434.
        # Were the end token not counted, over 5/6 and 1: where above -1.0996, probability 0.3330.
        # Were one too many counted, over 7/6 and 8/6: where above -1.0472, probability 0.3509.
        (0.338, []),
        (0.343, []),
        (0.344, [A]),
        (0.347, [A]),
    ],
)
def test_the_end_token_counts_in_the_length_penalty(second, winner):
    log_probability = math.log(second if winner else 0.4)
    hypothesis = best({(): {EOS: 0.4, A: 0.5, B: 0.1}, (A,): {EOS: second / 0.5, B: 1 - second / 0.5}}, max_length=9)
    check([hypothesis], [Hypothesis(winner, log_probability, True)])


def test_the_length_norm_by_hand():
    assert [length_norm(1, p) for p in (0.0, 0.6, 1.0)] == [1, 1, 1]
    assert [length_norm(7, p) for p in (0.0, 1.0, 2.0)] == [1, 2, 4]
    assert length_norm(13, 0.5) == pytest.approx(1.7320508)
    assert length_norm(2, 0.6) == pytest.approx(1.0969025)


# Sampling


QUARTERS = [0.5, 0.25, 0.15, 0.1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, QUARTERS),
        ({"temperature": 0.5}, [0.724638, 0.181159, 0.065217, 0.028986]),  # 0.25, 0.0625, 0.0225, 0.01 over 0.345
        ({"temperature": 2.0}, [0.370090, 0.261693, 0.202707, 0.165509]),  # roots, 1.910633 in all
        ({"temperature": 1e50}, [0.25, 0.25, 0.25, 0.25]),
        ({"temperature": 1e-50}, [1, 0, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 3}, [5 / 9, 2.5 / 9, 1.5 / 9, 0]),
        ({"top_k": 4}, QUARTERS),
        ({"top_k": 99}, QUARTERS),
        ({"top_p": 1e-50}, [1, 0, 0, 0]),
        ({"top_p": 0.49}, [1, 0, 0, 0]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),  # at least 0.5, no more
        ({"top_p": 0.51}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.75}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.76}, [5 / 9, 2.5 / 9, 1.5 / 9, 0]),
        ({"top_p": 0.91}, QUARTERS),
        ({"top_p": 1.0}, QUARTERS),
        # The order shows. Roots of the first three: 0.443493, 0.313597, 0.242911. Without roots 0.556 would do at 0.5;
        ({"temperature": 2.0, "top_k": 3, "top_p": 0.5}, [0.585786, 0.414214, 0, 0]),
        # without leaving out the fourth first, 0.370 + 0.262 would not do at 0.7.
        ({"temperature": 2.0, "top_k": 3, "top_p": 0.7}, [0.585786, 0.414214, 0, 0]),
        ({"top_k": 2, "top_p": 0.66}, [1, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.67}, [2 / 3, 1 / 3, 0, 0]),
    ],
)
def test_restrict_by_hand(options, expected):
    orders = list(itertools.permutations(range(4)))
    rows = torch.tensor([[QUARTERS[i] for i in order] for order in orders])
    result = restrict(rows.log(), **options)
    torch.testing.assert_close(
        result, torch.tensor([[expected[i] for i in order] for order in orders], dtype=result.dtype)
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.floats(0.05, 20),
    st.none() | st.integers(1, 12),
    st.none() | st.floats(0.01, 1),
    st.booleans(),
)
def test_restrict_equals_the_plain_algorithm(seed, temperature, top_k, top_p, banned):
    logits = torch.tensor(np.random.default_rng(seed).normal(scale=3, size=(3, 9)))
    if banned:
        logits[:, :2] = -math.inf
    log_p = logits.log_softmax(-1)
    result = restrict(log_p.float(), temperature=temperature, top_k=top_k, top_p=top_p)
    expected = [plain_restrict(row, temperature, top_k, top_p) for row in log_p.exp().tolist()]
    torch.testing.assert_close(result.double(), torch.tensor(expected, dtype=torch.double), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(result.sum(-1), torch.ones(3))


def test_among_equals_restrict_keeps_as_many_as_were_asked_for():
    log_p = torch.full((2, 4), 0.25).log()
    for options, kept in [({"top_k": 1}, 1), ({"top_k": 3}, 3), ({"top_p": 0.5}, 2), ({"top_p": 0.51}, 3)]:
        result = restrict(log_p, **options).sort(dim=-1, descending=True).values
        torch.testing.assert_close(result, torch.tensor([[1 / kept] * kept + [0.0] * (4 - kept)] * 2))


def test_all_of_the_probability_are_all_tokens():
    log_p = (5 * torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))).log_softmax(-1)
    assert log_p.exp().amin() < 1e-15
    assert torch.equal(restrict(log_p, top_p=1.0), restrict(log_p))


OPTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 2},
    {"top_p": 0.7},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.8},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_targets_occur_as_often_as_their_probabilities_say(options):
    rows, chain = 20_000, Chain(torch.tensor(np.random.default_rng(0).normal(size=(6, 6)), dtype=torch.float32))
    random = torch.Generator().manual_seed(0)
    found = sample(chain, torch.ones(rows, 1).long(), max_length=3, generator=random, **options, **IDS)
    probabilities = [plain_restrict(row, **options) for row in allowed_log_p(chain.table).exp().tolist()]
    expected = {}
    for target in all_targets(lambda ids: allowed_log_p(chain.table).tolist()[(BOS, *ids)[-1]], 3):
        ids = (*target.tokens, *[EOS] * target.ended)
        expected[ids] = rows * math.prod(probabilities[a][b] for a, b in itertools.pairwise((BOS, *ids)))
    counts = dict.fromkeys(expected, 0)
    for hypothesis in found:
        counts[(*hypothesis.tokens, *[EOS] * hypothesis.ended)] += 1
    assert sum(expected.values()) == pytest.approx(rows)
    assert all(counts[ids] == 0 for ids in expected if expected[ids] == 0)
    groups = [ids for ids in expected if expected[ids] >= 5]
    assert len(groups) >= (7 if options else 30)
    chi_square = sum((counts[ids] - expected[ids]) ** 2 / expected[ids] for ids in groups)
    assert chi_square < len(groups) + 4 * math.sqrt(2 * len(groups))
    assert chi_square > len(groups) - 4 * math.sqrt(2 * len(groups))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_log_probability_of_a_sample_is_the_models_own(options):
    table = random_table(5, 8)
    found = sample(
        table, names(*[1, 2] * 30), max_length=5, generator=torch.Generator().manual_seed(0), **options, **IDS
    )
    assert len({tuple(h.tokens) for h in found}) > 5
    assert len({h.ended for h in found}) == 2
    for name, hypothesis in zip([1, 2] * 30, found, strict=True):
        log_p, ids = beginnings_of_table(table, name), [*hypothesis.tokens, *[EOS] * hypothesis.ended]
        total = sum(log_p(tuple(ids[:n]))[token] for n, token in enumerate(ids))
        assert hypothesis.log_probability == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 1, "temperature": 100.0},
        {"top_p": 1e-6},
        {"top_p": 1e-60},
        {"temperature": 1e-4},
        {"temperature": SMALL / 1000},
        {"temperature": 1e-300},
        {"top_k": 5, "top_p": 0.01, "temperature": 0.5},
    ],
    ids=str,
)
def test_the_limits_of_sampling_are_greedy(options):
    for seed in range(3):
        model, source = build_transformer(seed, 9, end=(EOS, 1.0)), random_sources([5, 3, 0, 1], 9)
        check(sample(model, source, max_length=7, **options, **IDS), greedy(model, source, max_length=7, **IDS), 0)


def test_the_same_seed_gives_the_same_targets_and_another_one_others():
    table, source = random_table(5, 8), names(*range(1, 13))

    def run(seed):
        return sample(table, source, max_length=5, generator=torch.Generator().manual_seed(seed), **IDS)

    assert run(0) == run(0)
    assert run(0) != run(1)
    state = torch.random.get_rng_state()
    run(0)
    assert torch.equal(torch.random.get_rng_state(), state)
    by_default = []
    for _ in range(2):
        torch.manual_seed(3)
        by_default.append(sample(table, source, max_length=5, **IDS))
    assert by_default[0] == by_default[1]


# Errors


@ALL
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (torch.ones(3).long(), r"source has shape \(3,\) and dtype torch.int64; it must be ids \(B, S\)"),
        (torch.ones(1, 2, 3).long(), r"source has shape \(1, 2, 3\)"),
        (torch.ones(2, 3), r"source has shape \(2, 3\) and dtype torch.float32"),
    ],
)
def test_a_source_that_is_no_batch_of_ids_is_refused(generate, source, message):
    with pytest.raises(ValueError, match=message):
        generate(random_table(0), source, max_length=3, **IDS)


@ALL
@pytest.mark.parametrize("other", ["bos", "pad"])
def test_an_end_that_is_never_written_is_refused(generate, other):
    table = random_table(0)
    eos_id = {"bos": IDS["bos_id"], "pad": table.pad_id}[other]
    with pytest.raises(ValueError, match=rf"eos_id={eos_id} must differ from bos_id={IDS['bos_id']}"):
        generate(table, names(1), max_length=3, bos_id=IDS["bos_id"], eos_id=eos_id)


@ALL
def test_a_negative_length_is_refused(generate):
    with pytest.raises(ValueError, match=r"max_length=-1 is no number of tokens; it must be at least 0"):
        generate(random_table(0), names(1), max_length=-1, **IDS)


@pytest.mark.parametrize(
    ("generate", "options", "message"),
    [
        *[(sample, {"temperature": t}, rf"temperature={t} .* above 0") for t in (0, -1.5, math.inf, math.nan)],
        *[(sample, {"top_k": k}, rf"top_k={k} .* at least 1") for k in (0, -2)],
        *[(sample, {"top_p": p}, rf"top_p={p} .* above 0 and at most 1") for p in (0.0, -0.1, 1.5, math.nan)],
        *[(beam_search, {"beams": b}, rf"beams={b} .* at least 1") for b in (0, -3)],
        *[
            (beam_search, {"length_penalty": p}, rf"length_penalty={p} .* from 0 to 100")
            for p in (-0.5, math.inf, math.nan)
        ],
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_option_out_of_range_is_refused_with_its_value(generate, options, message):
    with pytest.raises(ValueError, match=message):
        generate(random_table(0), names(1), max_length=3, **options, **IDS)
