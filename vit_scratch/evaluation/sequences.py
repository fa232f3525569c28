"""How well an encoder-decoder does: exact counts, loss, perplexity, exact matches, BLEU and chrF.

Shapes: B batch, N target tokens, V vocabulary.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class TokenResult:
    """What `evaluate_tokens` counted over all target tokens, ends included.

    Attributes:
        count: number of tokens.
        correct: those that get the highest logit, given the true ones before them.
        loss_sum: sum of the cross-entropy, without label smoothing.
    """

    count: int
    correct: int
    loss_sum: float

    @property
    def accuracy(self) -> float:
        """Share of tokens predicted right."""
        return self.correct / self.count

    @property
    def loss(self) -> float:
        """Mean cross-entropy of a token."""
        return self.loss_sum / self.count

    @property
    def perplexity(self) -> float:
        """Exponential of the loss; infinite where that is too great for a number."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.inference_mode()
def evaluate_tokens(
    model: nn.Module,
    batches: Iterable[tuple[tuple[Tensor, Tensor], Tensor, int]],
    pad_id: int,
    total: Callable[[Tensor], Tensor] = torch.clone,
) -> TokenResult:
    """Evaluate the prediction of each next token; integers are summed and divided once, at the end.

    Args:
        model: source and target ids to logits (B, N, V). Left in the mode (train or eval) it came in.
        batches: inputs, next tokens (B, N) and their number; of several processes each has its part of each batch, and
            the number is that of all.
        pad_id: what does not count among the next tokens.
        total: from a tensor of this process to the sum over all that evaluate together.

    Raises:
        ValueError: there are no tokens.
    """
    was_training = model.training
    model.eval()
    count, losses, correct = 0, [], []
    for inputs, targets, tokens in batches:
        logits, count = model(*inputs).float(), count + tokens
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=pad_id, reduction="sum"))
        correct.append(((logits.argmax(dim=-1) == targets) & (targets != pad_id)).sum())
    model.train(was_training)
    if count == 0:
        raise ValueError("there are no sequences to evaluate on")
    right, loss = total(torch.stack(correct).sum()), total(torch.stack(losses).double().sum())
    return TokenResult(count, int(right), float(loss))


def exact_matches(hypotheses: list[list[int]], references: list[list[int]]) -> int:
    """How many sequences of ids are exactly as they should be."""
    return sum(h == r for h, r in zip(hypotheses, references, strict=True))


def translation_scores(hypotheses: list[str], references: list[str]) -> dict[str, Any]:
    """BLEU and chrF of sacrebleu, on text as people write it: cased, detokenised.

    Args:
        hypotheses: a translation for each sentence.
        references: the one translation that each is compared with.

    Returns:
        `bleu` and `chrf`, from 0 to 100, and the signatures that say how they were computed.

    Raises:
        ValueError: sacrebleu is not installed.
    """
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise ValueError("BLEU needs a package that is missing; pip install 'vit-scratch[text]'") from error
    result: dict[str, Any] = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        result[name] = metric.corpus_score(hypotheses, [references]).score
        result[f"{name}_signature"] = str(metric.get_signature())
    return result


def write_results(folder: Path, values: dict[str, Any], lines: dict[str, list[str]]) -> None:
    """Write results.json into a folder, and for each name in `lines` a text file, a line a sequence."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, content in lines.items():
        (folder / name).write_text("".join(line + "\n" for line in content), encoding="utf-8")
