"""Checks the evaluation of classifiers by hand, against scikit-learn, and for data cut into batches of any size."""

import csv
import json

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import nn

from vit_scratch.evaluation.classification import ClassificationResult, evaluate_classifier

# Six classes, seven images; the comments say the prediction, and whether the class is among the five likeliest.
LOGITS = torch.tensor(
    [
        [5.0, 0.0, 1.0, 2.0, 3.0, 4.0],  # 0, without 1
        [5.0, 0.0, 1.0, 2.0, 3.0, 4.0],  # 0, without 1
        [0.0, 9.0, 1.0, 2.0, 3.0, 4.0],  # 1, without 0
        [0.0, 1.0, 9.0, 2.0, 3.0, 4.0],  # 2, without 0
        [0.0, 1.0, 9.0, 2.0, 3.0, 4.0],  # 2, without 0
        [6.0, 1.0, 2.0, 7.0, 5.0, 0.0],  # 3, without 5
        [6.0, 1.0, 2.0, 7.0, 5.0, 0.0],  # 3, without 5
    ]
)
LABELS = torch.tensor([0, 1, 1, 2, 0, 3, 5])
NAMES = ["ant", "bee", "cat, tame", 'dog "big"', "Ente", "fox"]


def cut(logits, labels, size):
    for first in range(0, len(labels), size):
        part = slice(first, first + size)
        yield logits[part], labels[part], len(labels[part])


def evaluate(logits, labels, size=512, classes=None, model=None):
    return evaluate_classifier(
        model or nn.Identity(), cut(logits, labels, size), classes or logits.shape[1], len(labels)
    )


def many(classes, count=600, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=generator)
    logits = torch.randn(count, classes, generator=generator)
    logits[range(count), labels] += 1.0
    return logits, labels


def test_counts_by_hand():
    result = evaluate(LOGITS, LABELS)
    assert (result.count, result.correct, result.correct_top5) == (7, 4, 4)
    assert result.accuracy == 4 / 7
    assert result.confusion.tolist() == [
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
    ]
    assert result.per_class() == [0.5, 0.5, 1.0, 1.0, None, 0.0]


def test_the_loss_by_hand():
    logits = torch.tensor([[0.0, 0.0], [np.log(3.0), 0.0]])
    result = evaluate(logits, torch.tensor([0, 1]))
    assert result.loss_sum == pytest.approx(np.log(2) + np.log(4), rel=1e-6)
    assert result.loss == pytest.approx((np.log(2) + np.log(4)) / 2, rel=1e-6)
    assert result.correct == 1


@pytest.mark.parametrize("classes", [2, 6, 10, 100])
def test_everything_equals_scikit_learns(classes):
    logits, labels = many(classes)
    result = evaluate(logits, labels, size=37)
    y, scores, predicted = labels.numpy(), logits.double().softmax(1).numpy(), logits.argmax(1).numpy()
    every = list(range(classes))
    assert result.accuracy == metrics.accuracy_score(y, predicted)
    assert result.loss == pytest.approx(metrics.log_loss(y, scores, labels=every), rel=1e-6)
    np.testing.assert_array_equal(result.confusion, metrics.confusion_matrix(y, predicted, labels=every))
    recall = metrics.recall_score(y, predicted, labels=every, average=None, zero_division=np.nan)
    assert result.per_class() == pytest.approx([None if np.isnan(r) else r for r in recall])
    if classes > 5:
        assert result.correct_top5 == metrics.top_k_accuracy_score(y, scores, k=5, labels=every, normalize=False)
    else:
        assert result.correct_top5 is None


def test_the_result_does_not_depend_on_the_batch_size():
    logits, labels = many(10)
    results = [evaluate(logits, labels, size=size) for size in (1, 7, 512, 600)]
    for result in results[1:]:
        assert (result.count, result.correct, result.correct_top5) == (600, results[0].correct, results[0].correct_top5)
        np.testing.assert_array_equal(result.confusion, results[0].confusion)
        assert result.loss_sum == pytest.approx(results[0].loss_sum, rel=1e-12)


def test_the_confusion_matrix_sums_to_the_counts():
    logits, labels = many(10)
    result = evaluate(logits, labels, size=64)
    assert result.confusion.sum() == result.count == 600
    assert np.trace(result.confusion) == result.correct
    np.testing.assert_array_equal(result.confusion.sum(1), np.bincount(labels, minlength=10))
    np.testing.assert_array_equal(result.confusion.sum(0), np.bincount(logits.argmax(1), minlength=10))


def test_permuted_classes_permute_rows_and_columns():
    logits, labels = many(7)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    result = evaluate(logits, labels)
    # Class c of the one is class place[c] of the other.
    place = order.argsort()
    permuted = evaluate(logits[:, order], place[labels])
    np.testing.assert_array_equal(permuted.confusion, result.confusion[np.ix_(order, order)])
    assert permuted.per_class() == [result.per_class()[c] for c in order]
    assert (permuted.correct, permuted.correct_top5) == (result.correct, result.correct_top5)
    assert permuted.loss_sum == pytest.approx(result.loss_sum, rel=1e-6)


def test_a_class_that_only_appears_in_predictions_has_no_accuracy():
    logits = torch.eye(4)[[0, 1, 3, 3]]
    result = evaluate(logits, torch.tensor([0, 1, 0, 1]))
    assert result.per_class() == [0.5, 0.5, None, None]
    assert result.confusion[:, 3].tolist() == [1, 1, 0, 0]


def test_half_precision_logits_are_counted_and_summed_in_full():
    logits, labels = many(10)
    result = evaluate(logits.bfloat16(), labels)
    exact = evaluate(logits.bfloat16().float(), labels)
    assert (result.correct, result.loss_sum) == (exact.correct, exact.loss_sum)


def test_an_empty_set_is_refused():
    with pytest.raises(ValueError, match="no images to evaluate on"):
        evaluate_classifier(nn.Identity(), [], 3, 0)


@pytest.mark.parametrize("expected", [599, 601])
def test_a_wrong_number_of_images_is_noticed(expected):
    logits, labels = many(10)
    with pytest.raises(AssertionError, match=f"600 images evaluated, {expected} expected"):
        evaluate_classifier(nn.Identity(), cut(logits, labels, 64), 10, expected)


@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_evaluated_in_eval_mode_and_left_in_its_own(training):
    model = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(6)).train(training)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    generator = torch.get_rng_state()
    first, second = (evaluate(LOGITS, LABELS, size=3, model=model) for _ in range(2))
    assert first.correct == 4
    assert first.loss_sum == second.loss_sum
    assert model.training == training
    assert all(m.training == training for m in model.modules())
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_evaluation_keeps_no_graph():
    model = nn.Linear(6, 6)
    evaluate(LOGITS, LABELS, model=model)
    loss = model(LOGITS).sum()
    loss.backward()
    assert model.weight.grad is not None


def table(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize("kind", ["by hand", "100 classes", "2 classes"])
def test_the_files_hold_the_same_numbers(tmp_path, kind):
    logits, labels = (LOGITS, LABELS) if kind == "by hand" else many(int(kind.split()[0]), count=150)
    names = NAMES if kind == "by hand" else [f"class {i}" for i in range(logits.shape[1])]
    result = evaluate(logits, labels)
    folder = tmp_path / "new" / "folder"
    result.write(folder, names)

    values = json.loads((folder / "results.json").read_text())
    assert values == result.to_dict(names)
    assert values["accuracy"] == result.correct / len(labels)
    assert (values["correct"], values["count"], values["loss"]) == (result.correct, len(labels), result.loss)
    assert values["confusion"] == result.confusion.tolist()
    assert ("top5_correct" in values) == (logits.shape[1] > 5)
    if logits.shape[1] > 5:
        assert values["top5_correct"] == result.correct_top5
        assert values["top5_accuracy"] == result.correct_top5 / len(labels)
    assert [entry["class"] for entry in values["classes"]] == names
    assert [entry["accuracy"] for entry in values["classes"]] == result.per_class()
    assert [entry["count"] for entry in values["classes"]] == np.bincount(labels, minlength=len(names)).tolist()

    header, *rows = table(folder / "confusion_matrix.csv")
    assert header[1:] == [r[0] for r in rows] == names
    assert [[int(v) for v in r[1:]] for r in rows] == result.confusion.tolist()

    header, *rows = table(folder / "per_class.csv")
    assert header == ["class", "accuracy", "correct", "count"]
    assert [r[0] for r in rows] == names
    assert [float(r[1]) if r[1] else None for r in rows] == result.per_class()
    assert [int(r[2]) for r in rows] == np.diag(result.confusion).tolist()
    assert [int(r[3]) for r in rows] == result.confusion.sum(1).tolist()


def test_names_that_do_not_fit_the_matrix_are_noticed(tmp_path):
    result = ClassificationResult(1, 1, None, 0.5, np.array([[1, 0], [0, 0]]))
    with pytest.raises(ValueError, match="zip"):
        result.write(tmp_path, ["only one"])
