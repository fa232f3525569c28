"""Checks sequence metrics against float64 formulas and sacrebleu, and attention maps against a computation by hand."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

from vit_scratch import Decoder, Encoder, Transformer
from vit_scratch.data.sequences import BOS, EOS, PAD, SequenceLoader
from vit_scratch.evaluation.attention import attention_maps
from vit_scratch.evaluation.sequences import (
    TokenResult,
    evaluate_tokens,
    exact_matches,
    translation_scores,
    write_results,
)
from vit_scratch.transformer.attention import MultiHeadAttention

CPU = torch.device("cpu")
VOCABULARY = 11


def pairs(count=60, seed=0):
    random = np.random.default_rng(seed)
    return tuple([random.integers(3, VOCABULARY, random.integers(0, 9)).tolist() for _ in range(count)] for _ in "st")


class Lookup(nn.Module):
    """Logits that depend on the token before and on the first source token: easy to compute by hand."""

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(7)
        self.before, self.first = (
            nn.Parameter(torch.tensor(random.normal(0, 2, (VOCABULARY, VOCABULARY)), dtype=torch.float32))
            for _ in range(2)
        )

    def forward(self, source, target):
        return self.before[target] + self.first[source[:, 0]][:, None]


def by_hand(sources, targets):
    """Number of tokens, right ones and summed loss of `Lookup`, pair by pair in float64, without any padding."""
    model = Lookup()
    before, first = (p.detach().double().numpy() for p in (model.before, model.first))
    count, correct, loss = 0, 0, 0.0
    for source, target in zip(sources, targets, strict=True):
        for last, following in zip([BOS, *target], [*target, EOS], strict=True):
            logits = before[last] + first[[*source, EOS][0]]
            loss += math.log(sum(math.exp(x) for x in logits)) - logits[following]
            correct += int(max(range(VOCABULARY), key=lambda i: logits[i]) == following)
            count += 1
    return count, correct, loss


@pytest.mark.parametrize("batch_tokens", [10, 64, 10_000])
def test_tokens_are_counted_and_the_loss_is_that_of_the_formula(batch_tokens):
    sources, targets = pairs()
    result = evaluate_tokens(Lookup(), SequenceLoader(sources, targets, batch_tokens, device=CPU).batches(), PAD)
    count, correct, loss = by_hand(sources, targets)
    assert (result.count, result.correct) == (count, correct) == (sum(len(t) + 1 for t in targets), correct)
    assert 0 < correct < count
    assert result.loss_sum == pytest.approx(loss, rel=1e-6)
    assert result.loss == pytest.approx(loss / count, rel=1e-6)
    assert result.accuracy == correct / count
    assert result.perplexity == pytest.approx(math.exp(loss / count), rel=1e-5)


def transformer(seed=0, heads=2):
    torch.manual_seed(seed)
    return Transformer(
        Encoder(dim=12, depth=2, heads=heads, activation="relu", dropout=0.2),
        Decoder(dim=12, depth=2, heads=heads, activation="relu", dropout=0.2),
        source_vocabulary=VOCABULARY,
        target_vocabulary=VOCABULARY,
        dropout=0.2,
    )


def test_batches_and_padding_do_not_matter():
    sources, targets = pairs(80)
    results = [
        evaluate_tokens(transformer(), SequenceLoader(sources, targets, tokens, device=CPU).batches(), PAD)
        for tokens in (1, 50, 100_000)
    ]
    assert len({(r.count, r.correct) for r in results}) == 1
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6) == pytest.approx(results[2].loss, rel=1e-6)


def test_padding_is_never_right():
    class Silent(nn.Module):
        """Predicts padding everywhere."""

        def forward(self, source, target):
            return torch.zeros(*target.shape, VOCABULARY).index_fill(-1, torch.tensor(PAD), 5.0)

    result = evaluate_tokens(Silent(), SequenceLoader([[3], [4]], [[5], [5, 6, 7]], 100, device=CPU).batches(), PAD)
    assert (result.count, result.correct) == (6, 0)
    assert result.loss == pytest.approx(math.log(math.exp(5) + VOCABULARY - 1), rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_eval_and_then_as_before(training):
    model = transformer().train(training)
    batches = list(SequenceLoader(*pairs(), 60, device=CPU).batches())
    first, second = (evaluate_tokens(model, batches, PAD) for _ in range(2))
    assert first == second  # with dropout they would differ
    assert model.training is training
    assert model.encoder.training is training


def test_without_tokens_there_is_no_result():
    with pytest.raises(ValueError, match="no sequences to evaluate on"):
        evaluate_tokens(Lookup(), [], PAD)


def test_perplexity_is_infinite_where_no_number_can_hold_it():
    assert TokenResult(2, 0, 2 * 699.0).perplexity == math.exp(699)
    assert TokenResult(2, 0, 2 * 1000.0).perplexity == math.inf


def test_exact_matches_are_those_that_are_equal():
    hypotheses = [[3, 4], [3], [], [4, 3], []]
    references = [[3, 4], [3, 4], [], [3, 4], [3]]
    assert exact_matches(hypotheses, references) == 2
    with pytest.raises(ValueError, match="argument"):
        exact_matches([[3]], [])


HYPOTHESES = ["The cat sat on the mat .", "A dog runs, quickly!", "nothing in common", "It's 3.5 km."]
REFERENCES = ["The cat sat on the mat.", "A dog runs quickly over the grass!", "Eine Katze", "it's 3.5 km."]


def test_bleu_and_chrf_are_sacrebleu_s_cased_on_detokenised_text():
    sacrebleu = pytest.importorskip("sacrebleu", reason="BLEU needs the extra: pip install -e '.[text]'")
    result = translation_scores(HYPOTHESES, REFERENCES)
    assert result["bleu"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert result["chrf"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert 10 < result["bleu"] < 90
    assert "case:mixed" in result["bleu_signature"]
    assert "tok:13a" in result["bleu_signature"]
    assert "nc:6|nw:0" in result["chrf_signature"]
    assert all("version:" in result[f"{n}_signature"] for n in ("bleu", "chrf"))
    lower = translation_scores([h.lower() for h in HYPOTHESES], [r.lower() for r in REFERENCES])
    assert lower["bleu"] > result["bleu"]
    same = translation_scores(REFERENCES, REFERENCES)
    assert (same["bleu"], same["chrf"]) == pytest.approx((100, 100))
    assert translation_scores(["", ""], ["a b", "c d"])["bleu"] == 0


def test_that_sacrebleu_is_missing_is_said_with_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(ValueError, match=r"BLEU needs a package that is missing; pip install 'vit-scratch\[text\]'"):
        translation_scores(["a"], ["a"])


def test_results_and_lines_are_written_as_they_are(tmp_path):
    values = {"bleu": 12.5, "name": "Männer", "parts": {"test": {"count": 2}}}
    write_results(tmp_path / "a" / "b", values, {"test.de": ["zwei Männer 🐈", "", "x"], "other.de": []})
    folder = tmp_path / "a" / "b"
    assert json.loads((folder / "results.json").read_text(encoding="utf-8")) == values
    assert (folder / "test.de").read_bytes() == "zwei Männer 🐈\n\nx\n".encode()
    assert (folder / "other.de").read_bytes() == b""
    assert len(list(folder.iterdir())) == 3


def weights_by_hand(module, x, memory, allowed):
    """Attention weights (B, H, N, S) in float64: softmax of scaled products of queries and keys where allowed."""
    weight, bias = (p.detach().double().numpy() for p in (module.qkv.weight, module.qkv.bias))
    x, memory = (v.detach().double().numpy() for v in (x, memory))
    width = module.dim // module.heads
    result = np.zeros((len(x), module.heads, x.shape[1], memory.shape[1]))
    for row, head, n in np.ndindex(len(x), module.heads, x.shape[1]):
        queries = slice(head * width, (head + 1) * width)
        keys = slice(module.dim + queries.start, module.dim + queries.stop)
        query = weight[queries] @ x[row, n] + bias[queries]
        scores = [
            query @ (weight[keys] @ memory[row, s] + bias[keys]) / math.sqrt(width) for s in range(memory.shape[1])
        ]
        powers = [math.exp(v) if allowed(row, n, s) else 0.0 for s, v in enumerate(scores)]
        result[row, head, n] = np.array(powers) / sum(powers)
    return result


SOURCE = torch.tensor([[3, 4, 5, EOS], [6, EOS, PAD, PAD]])
TARGET = torch.tensor([[BOS, 7, 8], [BOS, 9, 9]])


def test_attention_maps_are_the_weights_that_a_computation_by_hand_gives():
    model, inputs = transformer().eval(), {}
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):
            module.register_forward_pre_hook(lambda m, args, name=name: inputs.update({name: (m, *args)}))
    maps = attention_maps(model, SOURCE, TARGET)
    assert list(maps) == [
        *("encoder.layers.0.attention", "encoder.layers.1.attention"),
        *("decoder.layers.0.self_attention", "decoder.layers.0.cross_attention"),
        *("decoder.layers.1.self_attention", "decoder.layers.1.cross_attention"),
    ]
    real = (SOURCE != PAD).tolist()
    for name, weights in maps.items():
        module, x, *memory = inputs[name]
        causal = name.endswith("self_attention")
        expected = weights_by_hand(
            module, x, memory[0] if memory else x, (lambda b, n, s: s <= n) if causal else lambda b, n, s: real[b][s]
        )
        np.testing.assert_allclose(weights.numpy(), expected, atol=1e-6, err_msg=name)
        assert not weights.requires_grad


@pytest.mark.parametrize("training", [True, False])
def test_attention_maps_leave_model_and_output_as_they_were(training):
    model = transformer().eval()
    expected, outputs = model(SOURCE, TARGET), []
    handle = model.register_forward_hook(lambda m, args, output: outputs.append(output))
    attention_maps(model, SOURCE, TARGET)
    handle.remove()
    assert torch.equal(outputs[0], expected)
    assert torch.equal(model(SOURCE, TARGET), expected)
    model.train(training)
    attention_maps(model, SOURCE, TARGET)
    assert model.training is training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_attention_maps_leave_no_hooks_after_an_error():
    model = transformer().eval()
    with pytest.raises(IndexError):
        attention_maps(model, SOURCE, torch.tensor([[BOS, 99], [BOS, 3]]))
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(RuntimeError, match="in the middle"):
        attention_maps(Broken(model), SOURCE, TARGET)
    assert not any(m._forward_hooks for m in model.modules())


class Broken(nn.Module):
    """Stops after it has used its model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        self.model(*inputs)
        raise RuntimeError("in the middle")


def test_a_vision_transformer_has_attention_maps_too():
    from vit_scratch import create_vit

    model = create_vit("tiny_patch4_32", dim=16, depth=2, heads=2, image_size=8, num_classes=3).eval()
    maps = attention_maps(model, torch.randn(2, 3, 8, 8))
    assert list(maps) == ["encoder.layers.0.attention", "encoder.layers.1.attention"]
    for weights in maps.values():
        assert weights.shape == (2, 2, 5, 5)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 5))
