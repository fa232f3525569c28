"""A running average of the weights."""

import copy

import torch
from torch import nn


class ExponentialMovingAverage:
    """Keeps a copy of a model whose weights are an exponential moving average of the model's.

    The decay warms up as min(decay, (1 + n) / (10 + n)) over updates n, so that the first weights, which are random,
    don't linger ("TensorFlow: tf.train.ExponentialMovingAverage", num_updates).

    Args:
        model: whose weights are averaged; not yet compiled.
        decay: at least 0 and below 1.

    Attributes:
        model: the averaged copy, in eval mode.
        updates: number of updates so far.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the model's weights after an optimizer update; buffers are copied as they are."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - decay)
        for mine, theirs in zip(self.model.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)

    def state_dict(self) -> dict:
        """Weights and number of updates."""
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict) -> None:
        """Continue from what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]
