"""Checks reliability and calibration error against torchmetrics and by hand, temperature scaling, and intervals."""

import numpy as np
import pytest
import torch
from scipy.special import softmax
from torchmetrics.functional.classification import multiclass_calibration_error

from vit_scratch.evaluation.calibration import fit_temperature, negative_log_likelihood, reliability, scaled
from vit_scratch.evaluation.intervals import accuracy_interval, mean_interval


def overconfident(images=4000, classes=7, factor=3.0, seed=0):
    """Labels drawn from the probabilities of logits, and these logits times a factor."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(images, classes)) * 1.5
    labels = np.array([random.choice(classes, p=p) for p in softmax(logits, axis=1)])
    return (logits * factor).astype(np.float32), labels


@pytest.mark.parametrize("bins", [1, 10, 15, 100])
@pytest.mark.parametrize("factor", [0.2, 1.0, 3.0, 100.0])
def test_the_error_is_that_of_torchmetrics(bins, factor):
    logits, labels = overconfident(factor=factor)
    probabilities = softmax(logits, axis=1)
    expected = multiclass_calibration_error(
        torch.from_numpy(probabilities), torch.from_numpy(labels), num_classes=7, n_bins=bins, norm="l1"
    )
    assert reliability(probabilities, labels, bins).error == pytest.approx(expected.item(), abs=1e-6)


def test_reliability_by_hand():
    probabilities = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.5, 0.5], [0.0, 1.0]])
    table = reliability(probabilities, np.array([0, 0, 0, 1, 1]), bins=4)
    assert table.count.tolist() == [0, 1, 1, 3]  # 0.5 belongs to the bin below it, 1 to the last
    np.testing.assert_allclose(table.confidence, [np.nan, 0.5, 0.6, 0.9])
    np.testing.assert_allclose(table.accuracy, [np.nan, 0.0, 1.0, 2 / 3])
    assert table.error == pytest.approx((0.5 + 0.4 + 3 * (0.9 - 2 / 3)) / 5)


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0, 10.0])
def test_the_temperature_is_what_the_logits_were_multiplied_by(factor):
    logits, labels = overconfident(images=8000, factor=factor)
    found = fit_temperature(logits, labels)
    assert found == pytest.approx(factor, rel=0.05)
    best = negative_log_likelihood(logits, labels, found)
    for near in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert negative_log_likelihood(logits, labels, found * near) > best
    assert best <= negative_log_likelihood(logits, labels)
    assert (scaled(logits, found).argmax(axis=1) == logits.argmax(axis=1)).all()
    if factor != 1.0:
        assert reliability(scaled(logits, found), labels).error < reliability(scaled(logits, 1.0), labels).error / 2


def test_the_likelihood_is_torch_s_cross_entropy():
    logits, labels = overconfident()
    expected = torch.nn.functional.cross_entropy(torch.from_numpy(logits).double() / 1.7, torch.from_numpy(labels))
    assert negative_log_likelihood(logits, labels, 1.7) == pytest.approx(expected.item(), rel=1e-12)


def test_a_temperature_is_found_where_all_is_right_or_wrong():
    logits, labels = np.eye(3, dtype=np.float32)[[0, 1, 2, 2]], np.array([0, 1, 2, 2])
    assert 0.01 <= fit_temperature(logits, labels) < 0.05
    assert 50 < fit_temperature(logits, (labels + 1) % 3) <= 100


def test_wilson_s_interval_by_its_formula():
    for correct, count in ((0, 10), (7, 10), (10, 10), (8731, 10000)):
        share, z = correct / count, 1.959963984540054
        centre = (share + z * z / (2 * count)) / (1 + z * z / count)
        half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count**2)) ** 0.5
        np.testing.assert_allclose(accuracy_interval(correct, count), (centre - half, centre + half), atol=1e-12)


def test_student_s_interval_by_hand():
    low, high = mean_interval([0.80, 0.82, 0.81])
    half = 4.302652729911275 * 0.01 / 3**0.5  # the t distribution with two degrees of freedom
    assert (low, high) == pytest.approx((0.81 - half, 0.81 + half))
    assert mean_interval([0.5, 0.5]) == (0.5, 0.5)
