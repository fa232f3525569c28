"""Checks the running average of weights against its recurrence in float64."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from vit_scratch.training.ema import ExponentialMovingAverage


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def change(model, step):
    """Other weights and buffers, as a training step makes them."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator))
        model[1].running_mean.fill_(step)
        model[1].num_batches_tracked.fill_(step)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 0.9999])
def test_the_average_follows_its_recurrence(decay):
    model = small_model()
    ema = ExponentialMovingAverage(model, decay)
    expected = [p.detach().double().numpy().copy() for p in model.parameters()]
    for update in range(1, 31):
        change(model, update)
        ema.update(model)
        d = min(decay, (1 + update) / (10 + update))
        expected = [
            d * e + (1 - d) * p.detach().double().numpy() for e, p in zip(expected, model.parameters(), strict=True)
        ]
        for mine, e in zip(ema.model.parameters(), expected, strict=True):
            np.testing.assert_allclose(mine.numpy(), e, rtol=1e-5, atol=1e-5)
    assert ema.updates == 30


def test_the_first_weights_are_soon_forgotten():
    model = small_model()
    ema = ExponentialMovingAverage(model, 0.9999)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    change(model, 1)
    for _ in range(10):
        ema.update(model)
    # 2/11 * 3/12 * ... * 11/20 of the first weights is left.
    left = np.prod([(1 + n) / (10 + n) for n in range(1, 11)])
    assert left < 1e-4
    for (name, p), mine in zip(model.named_parameters(), ema.model.parameters(), strict=True):
        expected = p.detach().double() + left * (start[name].double() - p.detach().double())
        torch.testing.assert_close(mine.double(), expected, rtol=1e-5, atol=1e-6)


def test_buffers_are_copied_as_they_are():
    model = small_model()
    ema = ExponentialMovingAverage(model, 0.9)
    change(model, 7)
    ema.update(model)
    assert ema.model[1].running_mean.tolist() == [7.0] * 4
    assert ema.model[1].num_batches_tracked.item() == 7
    change(model, 8)
    assert ema.model[1].running_mean.tolist() == [7.0] * 4


def test_the_copy_is_in_eval_mode_without_gradients_and_the_model_is_left_alone():
    model = small_model().train()
    before = copy.deepcopy(model.state_dict())
    ema = ExponentialMovingAverage(model, 0.9)
    ema.update(model)
    assert not any(m.training for m in ema.model.modules())
    assert all(m.training for m in model.modules())
    assert not any(p.requires_grad for p in ema.model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_it_goes_on_from_its_state_with_the_same_bits(tmp_path):
    model = small_model()
    whole = ExponentialMovingAverage(model, 0.999)
    for step in range(5):
        change(model, step)
        whole.update(model)
    torch.save(whole.state_dict(), tmp_path / "ema.pt")

    other = ExponentialMovingAverage(model, 0.999)
    other.load_state_dict(torch.load(tmp_path / "ema.pt"))
    assert other.updates == 5
    for step in range(5, 9):
        change(model, step)
        whole.update(model)
        other.update(model)
    for (name, a), b in zip(whole.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
