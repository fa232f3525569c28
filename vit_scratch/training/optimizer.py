"""The optimizer, and which parameters decay."""

from collections.abc import Callable

import torch
from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Divide the trainable parameters into those that decay and those that do not.

    Weight matrices decay. Whatever has fewer than two dimensions (biases, norms, LayerScale) does not, nor do the
    parameters that the model's `no_weight_decay()` names (class token, registers, positions).

    Returns:
        Two groups for a torch optimizer, each with the `names` of its parameters; every trainable parameter is in
        exactly one.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    no_weight_decay: Callable[[], set[str]] = getattr(model, "no_weight_decay", set)
    exempt = no_weight_decay()
    decayed = [n for n, p in named.items() if p.dim() >= 2 and n not in exempt]
    rest = [n for n in named if n not in set(decayed)]
    return [
        {"params": [named[n] for n in names], "names": names, "weight_decay": decay}
        for names, decay in ((decayed, weight_decay), (rest, 0.0))
    ]


def adamw(model: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """AdamW ("Decoupled Weight Decay Regularization") on `parameter_groups`."""
    groups = parameter_groups(model, weight_decay)
    for group in groups:
        del group["names"]  # the optimizer's state stays free of what the model knows
    fused = all(p.device.type in ("cpu", "cuda") for g in groups for p in g["params"])
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused)
