"""Checks which parameters decay, and the steps of AdamW against the paper's recurrence in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from vit_scratch.training.optimizer import adamw, parameter_groups
from vit_scratch.vision.vit import create_vit

SMALL = dict(image_size=8, dim=16, depth=2, heads=2, num_classes=3)
VARIANTS = {
    "class token": {},
    "mean": dict(pooling="mean"),
    "everything": dict(registers=2, layer_scale=1e-4, qk_norm=True),
    "sinusoidal": dict(positions="sinusoidal", registers=1),
    "rotary": dict(positions="rotary", pooling="mean"),
    "no head": dict(num_classes=0),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_is_in_exactly_one_group(variant):
    model = create_vit("tiny_patch4_32", **SMALL | VARIANTS[variant])
    groups = parameter_groups(model, 0.05)
    names = [n for group in groups for n in group["names"]]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    by_name = dict(model.named_parameters())
    for group in groups:
        assert all(by_name[n] is p for n, p in zip(group["names"], group["params"], strict=True))
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_weight_matrices_decay_and_nothing_else(variant):
    model = create_vit("tiny_patch4_32", **SMALL | VARIANTS[variant])
    expected = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    decayed, rest = (set(group["names"]) for group in parameter_groups(model, 0.05))
    assert decayed == expected
    special = {"class_token", "register_tokens", "positions"}
    for name in rest:
        assert name in special or name.endswith("bias") or "norm" in name or "scale" in name, name
    assert not any("norm" in n or "scale" in n or n.endswith("bias") for n in decayed)


def test_a_model_with_everything_has_everything():
    model = create_vit("tiny_patch4_32", **SMALL | VARIANTS["everything"])
    rest = set(parameter_groups(model, 0.05)[1]["names"])
    assert {"class_token", "register_tokens", "positions"} <= rest
    assert sum("scale" in name for name in rest) >= 4
    assert sum("norm" in name for name in rest) >= 10


def test_frozen_parameters_are_in_no_group():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    decayed, rest = (group["names"] for group in parameter_groups(model, 0.1))
    assert (decayed, rest) == (["2.weight"], ["1.weight", "1.bias", "2.bias"])


def test_a_step_without_gradient_shrinks_only_what_decays():
    model = create_vit("tiny_patch4_32", **SMALL | VARIANTS["everything"])
    decayed = set(parameter_groups(model, 0.05)[0]["names"])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = adamw(model, lr=0.1, betas=(0.9, 0.999), weight_decay=0.05)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 1 - 0.1 * 0.05 if name in decayed else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_steps_equal_the_recurrence_of_the_paper(weight_decay):
    torch.manual_seed(0)
    model, (lr, beta1, beta2) = nn.Linear(3, 2), (0.05, 0.8, 0.95)
    optimizer = adamw(model, lr=lr, betas=(beta1, beta2), weight_decay=weight_decay)
    values = {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}
    moments = {n: (np.zeros_like(v), np.zeros_like(v)) for n, v in values.items()}
    generator = np.random.default_rng(0)
    for step in range(1, 6):
        for name, p in model.named_parameters():
            gradient = generator.normal(size=p.shape)
            p.grad = torch.from_numpy(gradient).float()
            first, second = moments[name]
            first = beta1 * first + (1 - beta1) * gradient
            second = beta2 * second + (1 - beta2) * gradient**2
            moments[name] = (first, second)
            decay = weight_decay if name == "weight" else 0.0
            step_size = (first / (1 - beta1**step)) / (np.sqrt(second / (1 - beta2**step)) + 1e-8)
            values[name] = values[name] * (1 - lr * decay) - lr * step_size
        optimizer.step()
        for name, p in model.named_parameters():
            np.testing.assert_allclose(p.detach().numpy(), values[name], rtol=1e-5, atol=1e-6)


def test_the_state_of_the_optimizer_holds_no_names():
    optimizer = adamw(nn.Linear(3, 2), lr=0.1, betas=(0.9, 0.999), weight_decay=0.1)
    assert all("names" not in group for group in optimizer.state_dict()["param_groups"])
