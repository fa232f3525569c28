"""The position-wise feed-forward network of a Transformer layer.

Shapes: B batch, N tokens, D model width, F hidden width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vit_scratch.transformer.linear import Linear
from vit_scratch.transformer.positions import Grid
from vit_scratch.transformer.residual import Dropout


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), an approximation of GELU that weights of CLIP were trained with."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
}


class FeedForward(nn.Module):
    """Two linear maps with an activation between ("Attention Is All You Need", section 3.3).

    Args:
        dim: model width D.
        hidden_dim: width F between the two maps, 4 * D where None.
        activation: "relu" as in the paper, "gelu" as in ViT (the exact form), or one of its approximations, which some
            pretrained weights need: "gelu_tanh" or "quick_gelu".
        dropout: probability of dropping a hidden unit in training.
        kernel_size: odd side of a `PatchConvolution` before the activation, None for none.

    Raises:
        ValueError: an unknown activation, a hidden width below 1, or an even or negative kernel size.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int | None = None,
        *,
        activation: str = "gelu",
        dropout: float = 0.0,
        kernel_size: int | None = None,
    ):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r} is unknown; choose from {', '.join(ACTIVATIONS)}")
        hidden_dim = 4 * dim if hidden_dim is None else hidden_dim
        if hidden_dim < 1:
            raise ValueError(f"hidden_dim={hidden_dim} is not a width; it must be at least 1, or None for 4 * dim")
        self.linear1 = Linear(dim, hidden_dim)
        self.convolution = None if kernel_size is None else PatchConvolution(hidden_dim, kernel_size)
        self.activation = ACTIVATIONS[activation]()
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(hidden_dim, dim)

    def forward(self, x: Tensor, grid: Grid | None = None) -> Tensor:
        """(B, N, D) -> (B, N, D); a convolution needs the grid of the patches, which are the last of the tokens."""
        x = self.linear1(x)
        if self.convolution is not None:
            assert grid is not None
            x = self.convolution(x, grid)
        return self.linear2(self.dropout(self.activation(x)))


def check_kernel(name: str, size: int) -> None:
    """Raise ValueError unless `size` is the side of a kernel with a middle."""
    if size < 1 or size % 2 == 0:
        raise ValueError(f"{name}={size} is not the side of a kernel with a middle; it must be odd, such as 3")


class PatchConvolution(nn.Module):
    """A convolution over a grid of patches, each channel by itself: neighbours mix at almost no cost.

    It stands inside feed-forward networks as in "Incorporating Convolution Designs into Visual Transformers" and
    "LocalViT". At first it is the identity but for a little noise (`initialise_layers`).

    Args:
        channels: number of channels F.
        kernel_size: side of the kernel in patches, odd, so that it has a middle.

    Raises:
        ValueError: a kernel size that is even or not positive.
    """

    def __init__(self, channels: int, kernel_size: int):
        super().__init__()
        check_kernel("kernel_size", kernel_size)
        self.depthwise = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens (B, N, F) -> (B, N, F); tokens in front of the rows x columns patches stay as they are."""
        prefix = x.shape[1] - grid[0] * grid[1]
        patches = x[:, prefix:].unflatten(1, grid).permute(0, 3, 1, 2)  # (B, F, rows, columns)
        patches = self.depthwise(patches).permute(0, 2, 3, 1).flatten(1, 2)
        return torch.cat([x[:, :prefix], patches], dim=1) if prefix else patches
