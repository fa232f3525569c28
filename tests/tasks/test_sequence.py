"""Checks parts of the sequence task: the loss leaves padding out, data are as asked for, batches don't matter."""

import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

from vit_scratch.config import DecodeConfig, SequenceDataConfig
from vit_scratch.data.sequences import BOS, EOS, PAD, SPECIAL_TOKENS, pad, source_ids
from vit_scratch.tasks.sequence import (
    Part,
    create_transformer,
    generate,
    prepare,
    scores,
    smoothed_cross_entropy,
    stored_tokenizer,
)
from vit_scratch.transformer.generation import beam_search, greedy

VOCABULARY = 9


def model_of(**options):
    torch.manual_seed(3)
    arguments = dict(
        dim=12,
        encoder_depth=2,
        decoder_depth=2,
        heads=3,
        hidden_dim=None,
        activation="relu",
        norm_first=True,
        dropout=0.0,
        tie="all",
        vocabulary=VOCABULARY,
        max_length=20,
    )
    return create_transformer(**arguments | options)


SOURCE = torch.tensor([[3, 4, 5, EOS], [6, EOS, PAD, PAD], [7, 8, EOS, PAD]])
TARGET = torch.tensor([[BOS, 7, 8, 3], [BOS, 4, EOS, PAD], [BOS, EOS, PAD, PAD]])
NEXT = torch.tensor([[7, 8, 3, EOS], [4, EOS, PAD, PAD], [EOS, PAD, PAD, PAD]])


def by_hand(logits, following, smoothing):
    """Loss and right predictions over the real tokens, in float64 and one by one."""
    total, correct = 0.0, 0
    for row, tokens in zip(logits.detach().double().numpy(), following.tolist(), strict=True):
        for values, token in zip(row, tokens, strict=True):
            if token == PAD:
                continue
            log_p = values - math.log(np.exp(values).sum())
            labels = [smoothing / len(values) + (1 - smoothing) * (i == token) for i in range(len(values))]
            total -= sum(label * p for label, p in zip(labels, log_p, strict=True))
            correct += int(values.argmax() == token)
    return total, correct


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_the_loss_is_the_smoothed_cross_entropy_of_the_real_tokens(smoothing):
    model = model_of()
    loss, correct = smoothed_cross_entropy(smoothing, model, (SOURCE, TARGET), NEXT)
    expected, right = by_hand(model(SOURCE, TARGET), NEXT, smoothing)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert correct.item() == right


def test_smoothing_changes_the_loss_and_padding_is_never_right():
    model = model_of()
    plain, smooth = (smoothed_cross_entropy(s, model, (SOURCE, TARGET), NEXT)[0].item() for s in (0.0, 0.1))
    assert abs(plain - smooth) > 0.01

    def always_padding(source, target):
        return torch.zeros(*target.shape, VOCABULARY).index_fill(-1, torch.tensor(PAD), 5.0)

    assert smoothed_cross_entropy(0.1, always_padding, (SOURCE, TARGET), NEXT)[1].item() == 0


def loss_and_gradients(batch, smoothing):
    model = model_of().double()
    source, target, following = batch
    loss, correct = smoothed_cross_entropy(smoothing, model, (source, target), following)
    loss.backward()
    return loss.item(), correct.item(), {n: p.grad for n, p in model.named_parameters()}


def widen(batch, columns):
    return [torch.cat([t, t.new_full((len(t), columns), PAD)], dim=1) for t in batch]


def add_rows(batch, rows):
    return [torch.cat([t, t.new_full((rows, t.shape[1]), PAD)]) for t in batch]


BATCH = [SOURCE, TARGET, NEXT]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    "more",
    [
        [widen([SOURCE], 3)[0], TARGET, NEXT],
        [SOURCE, *widen([TARGET, NEXT], 2)],
        add_rows(BATCH, 2),
        add_rows(widen(BATCH, 5), 1),
    ],
    ids=["wider source", "wider target", "rows", "all"],
)
def test_more_padding_changes_neither_the_loss_nor_a_gradient(smoothing, more):
    loss, correct, gradients = loss_and_gradients(BATCH, smoothing)
    padded_loss, padded_correct, padded_gradients = loss_and_gradients(more, smoothing)
    assert padded_loss == pytest.approx(loss, rel=1e-12)
    assert padded_correct == correct
    for name, gradient in gradients.items():
        torch.testing.assert_close(padded_gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_batch_of_padding_alone_gives_zero_and_no_nan(smoothing):
    batch = [torch.full((2, n), PAD) for n in (4, 3, 3)]
    loss, correct, gradients = loss_and_gradients(batch, smoothing)
    assert (loss, correct) == (0.0, 0)
    assert all((g == 0).all() for g in gradients.values())


def test_made_up_parts_are_disjoint_and_a_function_of_the_seed():
    config = SequenceDataConfig(kind="reverse", symbols=9, longest=5, count=300)
    data = prepare(config, 4, ["train", "val", "test"])
    assert [len(p.sources) for p in data.parts.values()] == [300, 1000, 1000]
    assert data.vocabulary == len(SPECIAL_TOKENS) + 9
    sources = [tuple(s) for part in data.parts.values() for s in part.sources]
    assert len(set(sources)) == 2300
    assert {i for s in sources for i in s} == set(range(3, 12))
    for part in data.parts.values():
        assert all(t == s[::-1] for s, t in zip(part.sources, part.targets, strict=True))
        assert part.texts is None
    assert prepare(config, 4, ["test"]).parts["test"] == data.parts["test"]
    assert prepare(config, 5, ["test"]).parts["test"] != data.parts["test"]
    assert (
        data.identity()
        == prepare(config, 4, ["val", "train"]).identity()
        != prepare(config, 5, ["train", "val"]).identity()
    )


TEXT = {
    "train": [("a red dog", "ein roter Hund"), ("a dog", "ein Hund"), ("a cat", "eine Katze")] * 4,
    "val": [("a red cat", "eine rote Katze")],
    "test": [("a zebra", "ein Zebra"), ("a zebra", "ein Zebra"), ("a very long sentence " * 3, "ein Satz")],
}


def write(root, parts=None):
    root.mkdir(exist_ok=True)
    for name, pairs in (parts or TEXT).items():
        for side, language in enumerate(("en", "de")):
            (root / f"{name}.{language}").write_text("".join(f"{p[side]}\n" for p in pairs), encoding="utf-8")
    return root


def text_config(root, **options):
    return SequenceDataConfig(**{"kind": "text", "root": str(root), "vocabulary": 300, "max_length": 40} | options)


def test_the_tokenizer_is_learned_from_both_sides_of_the_training_part_only(tmp_path):
    text = pytest.importorskip("vit_scratch.data.text", reason="text needs the extra: pip install -e '.[text]'")
    data = prepare(text_config(write(tmp_path)), 0, ["train", "val", "test"])
    sides = [*(s for s, _ in TEXT["train"]), *(t for _, t in TEXT["train"])]
    assert data.tokenizer.to_str() == text.train_tokenizer(sides, 300).to_str()
    assert data.vocabulary == data.tokenizer.get_vocab_size()
    part = data.parts["train"]
    assert text.decode(data.tokenizer, part.sources) == [s for s, _ in TEXT["train"]]
    assert text.decode(data.tokenizer, part.targets) == part.texts == [t for _, t in TEXT["train"]]
    given = prepare(text_config(tmp_path), 0, ["test"], data.tokenizer)
    assert given.parts["test"] == data.parts["test"]


def test_too_long_training_pairs_are_left_out_others_cut_and_both_are_counted(tmp_path):
    text = pytest.importorskip("vit_scratch.data.text", reason="text needs the extra: pip install -e '.[text]'")
    parts = TEXT | {"train": [*TEXT["train"][:5], ("a " * 40, "x"), ("b", "ein " * 40), *TEXT["train"][5:]]}
    config = text_config(write(tmp_path, parts))
    data = prepare(config, 0, ["train", "val", "test"])
    assert data.parts["train"].texts == [t for _, t in TEXT["train"]]
    assert data.parts["test"].texts == [t for _, t in TEXT["test"]]
    assert [len(s) for s in data.parts["test"].sources][2] == 39
    (full,) = text.encode(data.tokenizer, [TEXT["test"][2][0]])
    assert data.parts["test"].sources[2] == full[:39]
    assert data.notes == [
        "left out 2 train pairs with more than data.max_length=40 tokens; the first is line 6",
        "cut 1 test pairs with more than data.max_length=40 tokens; the first is line 3",
    ]
    for part in data.parts.values():
        assert max(len(ids) + 1 for side in (part.sources, part.targets) for ids in side) <= 40


def test_a_sentence_of_exactly_the_limit_is_kept(tmp_path):
    pytest.importorskip("tokenizers", reason="text needs the extra: pip install -e '.[text]'")
    write(tmp_path, {"train": [("a" * 8, "b"), ("ab" * 4, "a"), ("a", "b" * 9)]})
    data = prepare(text_config(tmp_path, vocabulary=259, max_length=10), 0, ["train"])
    # Each has a space before it and an end, or a start, so that 8 letters make 10 tokens.
    assert [len(s) for s in data.parts["train"].sources] == [9, 9]
    assert data.notes == ["left out 1 train pairs with more than data.max_length=10 tokens; the first is line 3"]
    with pytest.raises(ValueError, match=r"no train pair has at most data\.max_length=2 tokens; raise it"):
        prepare(text_config(tmp_path, vocabulary=259, max_length=2), 0, ["train"])


def test_with_empty_lines_left_out_no_line_is_named_that_is_another(tmp_path):
    pytest.importorskip("tokenizers", reason="text needs the extra: pip install -e '.[text]'")
    write(tmp_path, {"train": [("", "x"), ("a", "b"), ("a " * 40, "x")]})
    notes = prepare(text_config(tmp_path, skip_empty=True), 0, ["train"]).notes
    assert notes[0].startswith("left out 1 train pairs with an empty line (")
    assert notes[1].endswith("the first is pair 2 of those that are not empty")


@pytest.mark.parametrize("missing", ["tokenizers", "sacrebleu"])
def test_a_missing_package_is_named_before_files_are_read(tmp_path, monkeypatch, missing):
    hide(monkeypatch, missing)
    with pytest.raises(ValueError, match=r"needs a package that is missing; pip install 'vit-scratch\[text\]'"):
        prepare(text_config(tmp_path / "nowhere"), 0, ["train"])


def hide(monkeypatch, package):
    """Let imports of a package fail, also where it was imported before."""
    import vit_scratch.data

    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    if package == "tokenizers":
        monkeypatch.delitem(sys.modules, "vit_scratch.data.text", raising=False)
        monkeypatch.delattr(vit_scratch.data, "text", raising=False)


def test_a_tokenizer_of_another_vocabulary_than_the_model_s_is_refused():
    text = pytest.importorskip("vit_scratch.data.text", reason="text needs the extra: pip install -e '.[text]'")
    stored = text.train_tokenizer(["a red dog"] * 3, 265).to_str()
    assert stored_tokenizer({"tokenizer": stored, "model": {"vocabulary": 265}}).to_str() == stored
    with pytest.raises(ValueError, match="the stored tokenizer has 265 tokens, and its model 300"):
        stored_tokenizer({"tokenizer": stored, "model": {"vocabulary": 300}})
    assert stored_tokenizer({"tokenizer": None, "model": {"vocabulary": 300}}) is None


def sources_of(count=40):
    random = np.random.default_rng(1)
    return [random.integers(3, VOCABULARY, random.integers(0, 19)).tolist() for _ in range(count)]


def lively():
    """A model whose targets differ."""
    model, generator = model_of(tie="none").double().eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.5
    return model


@pytest.mark.parametrize("beams", [1, 3])
def test_targets_come_in_the_order_of_their_sources_and_do_not_depend_on_batches(beams):
    model, sources, expected = lively(), sources_of(), []
    for source in sources:
        limit, ids = min(19, 16 * math.ceil(len(source) / 8) + 10), pad([source_ids(source)])
        options = dict(bos_id=BOS, eos_id=EOS, max_length=limit)
        if beams == 1:
            (one,) = greedy(model, ids, **options)
        else:
            (one,) = beam_search(model, ids, **options, beams=3, length_penalty=0.6)
        expected.append(one.tokens)
    for batch_size in (1, 7, 1000):
        assert generate(model, sources, DecodeConfig(beams, 0.6), 20, batch_size) == expected
    assert len({len(t) for t in expected}) > 3
    assert len({tuple(t) for t in expected}) > 10


def test_the_length_of_a_target_has_a_limit_that_its_source_sets():
    class Endless(nn.Module):
        """Never writes an end."""

        pad_id = PAD

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def start(self, source):
            return type("State", (), {"select": lambda self, rows: None})()

        def step(self, tokens, state):
            return torch.zeros(len(tokens), VOCABULARY).index_fill(1, torch.tensor(5), 9.0)

    sources = [[], [3], [3] * 8, [3] * 9, [3] * 60]
    found = generate(Endless(), sources, DecodeConfig(beams=1), 100, 10)
    assert [len(t) for t in found] == [10, 26, 26, 42, 99]
    assert all(set(t) == {5} for t in found)


@pytest.mark.parametrize("training", [True, False])
def test_generation_is_without_dropout_and_leaves_the_mode(training):
    model = model_of(dropout=0.5).train(training)
    first, second = (generate(model, sources_of(), DecodeConfig(beams=1), 20, 16) for _ in range(2))
    assert first == second
    assert model.training is training


def test_exact_matches_are_scored_on_ids_and_written_as_symbols():
    part = Part([[3]] * 4, [[3, 4], [5], [], [4]])
    result, lines = scores(part, [[3, 4], [6], [], []], None)
    assert result == {"exact_match": 0.5, "correct": 2}
    assert lines == ["0 1", "3", "", ""]


def test_texts_are_scored_as_people_wrote_them():
    text = pytest.importorskip("vit_scratch.data.text", reason="text needs the extra: pip install -e '.[text]'")
    sacrebleu = pytest.importorskip("sacrebleu", reason="BLEU needs the extra: pip install -e '.[text]'")
    written, references = (
        ["ein roter Hund sieht die Katze", "ein Hund"],
        ["Ein roter Hund sieht die Katze", "ein  Hund."],
    )
    tokenizer = text.train_tokenizer(written, 300)
    ids = text.encode(tokenizer, written)
    result, lines = scores(Part([[3]] * 2, [i[:1] for i in ids], references), ids, tokenizer)
    assert lines == written
    assert result["bleu"] == sacrebleu.corpus_bleu(written, [references]).score
    assert 0 < result["bleu"] < 100
