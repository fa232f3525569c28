"""What the output of a residual branch passes through before it is added to its input.

The addition itself stands in the layers, in the open: x = x + self.branch1(self.attention(self.norm1(x))).
Shapes: B batch, N tokens, D model width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def check_probability(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a probability of at least 0 and below 1."""
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value} is not a probability of at least 0 and below 1")


def drop_elements(x: Tensor, probability: float) -> Tensor:
    """Set elements to zero with this probability and scale the others so that the expectation is unchanged.

    PyTorch draws a number for each element one after the other on a CPU, which took a tenth of the time of training a
    translation model (LOG.md). Here a draw of 64 bits serves four elements; the probability is rounded to 1/65536.
    """
    if probability == 0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, probability)
    dropped = min(round(probability * 65536), 65535)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    keep = (bits[: x.numel()] >= dropped - 32768).view(x.shape)
    return x * keep.to(x.dtype).mul_(65536 / (65536 - dropped))


class Dropout(nn.Dropout):
    """`drop_elements` in training ("Dropout: A Simple Way to Prevent Neural Networks from Overfitting").

    Args:
        p: probability of dropping an element, at least 0 and below 1.

    Raises:
        ValueError: a probability outside that range.
    """

    def __init__(self, p: float):
        check_probability("dropout", p)
        super().__init__(p)

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        return drop_elements(x, self.p) if self.training else x


class DropPath(nn.Module):
    """Stochastic depth ("Deep Networks with Stochastic Depth"): drops a whole branch for a sample in training.

    Branches that stay are divided by the probability of staying, so that the expectation is unchanged.

    Args:
        probability: of dropping the branch, at least 0 and below 1.

    Raises:
        ValueError: a probability outside that range.
    """

    def __init__(self, probability: float):
        super().__init__()
        check_probability("drop_path", probability)
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        if not self.training or self.probability == 0:
            return x
        keep = 1 - self.probability
        mask = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) < keep  # (B, 1, 1)
        return x * (mask.to(x.dtype) / keep)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"probability={self.probability:.3f}"


class LayerScale(nn.Module):
    """A learned factor per channel ("Going Deeper with Image Transformers", equation 3).

    Args:
        dim: model width D.
        initial: value of every factor at first.
    """

    def __init__(self, dim: int, initial: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), float(initial)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        return x * self.weight


def residual_branch(dim: int, dropout: float, drop_path: float, layer_scale: float | None) -> nn.Sequential:
    """Dropout, LayerScale and DropPath, in this order; only those that do something.

    Args:
        dim: model width D.
        dropout: probability of dropping an element.
        drop_path: probability of dropping the whole branch for a sample.
        layer_scale: initial value of LayerScale, None for none.
    """
    branch = nn.Sequential()
    if dropout:
        branch.add_module("dropout", Dropout(dropout))
    if layer_scale is not None:
        branch.add_module("layer_scale", LayerScale(dim, layer_scale))
    if drop_path:
        branch.add_module("drop_path", DropPath(drop_path))
    return branch
