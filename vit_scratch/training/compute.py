"""Training compute: the floating-point operations that a training takes, counted by torch's own counter.

An operation is a multiplication or an addition, so that a multiply-add is two. Counted are the matrix products and
convolutions, attention included, which is where nearly all operations are. A training step counts as three forward
passes, as each product of the forward pass becomes two in the backward pass; where matrices are kept as they are,
both passes are counted as they are.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

PETA = 1e15
"""Operations in a PFLOP."""
POINTS = 1000
"""How many points of a training stand for it where its batches change in its course."""


class ComputeCounter:
    """Counts the operations of a training step on a batch, from the shapes of the batch.

    The pass that is counted runs on torch's meta device, where tensors have no data: it takes milliseconds, once for
    each shape. There, too, PyTorch's fused attention is taken apart into the products that the counter knows.

    Args:
        model: of which a copy without data is made.
        loss: (model, inputs, targets) -> the loss, or a tuple of it and more, which is not looked at.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any, Any], Any]):
        self.model, self.loss = copy.deepcopy(model).to("meta").train(), loss
        self.frozen = not all(p.requires_grad for p in model.parameters() if p.dim() > 1)
        self.known: dict[Any, int] = {}

    def __call__(self, inputs: Any, targets: Any) -> int:
        """Operations of training on a batch.

        Args:
            inputs: a tensor, or a tuple of tensors, on any device.
            targets: a tensor.
        """
        key = shapes(inputs), shapes(targets)
        if key not in self.known:
            with torch.set_grad_enabled(self.frozen), FlopCounterMode(display=False) as counter:
                result = self.loss(self.model, without_data(inputs), without_data(targets))
                if self.frozen:
                    (result[0] if isinstance(result, tuple) else result).backward()
            self.known[key] = counter.get_total_flops() * (1 if self.frozen else 3)
        return self.known[key]

    def mean(self, batches: Iterable[tuple[Any, Any, int]], adapt: Callable[[Any, float], Any] | None = None) -> float:
        """Operations of a batch in the mean over a training.

        Args:
            batches: inputs, targets, and how many of the kind there are, as a loader's `shapes` gives them.
            adapt: (inputs, share of the training that is done) -> what the model gets.
        """
        points = [(i + 0.5) / POINTS for i in range(POINTS)] if adapt is not None else [0.0]
        total, number = 0.0, 0
        for inputs, targets, count in batches:
            adapted = (inputs if adapt is None else adapt(inputs, done) for done in points)
            total += count * sum(self(x, targets) for x in adapted) / len(points)
            number += count
        return total / number


def without_data(batch: Any) -> Any:
    """The tensors of a batch on the meta device."""
    return batch.to("meta") if isinstance(batch, Tensor) else tuple(without_data(part) for part in batch)


def shapes(batch: Any) -> Any:
    """The shapes of the tensors of a batch."""
    return batch.shape if isinstance(batch, Tensor) else tuple(shapes(part) for part in batch)
