"""Where a token stands: sinusoidal, learned, two-dimensional and rotary positions.

Positions belong to whoever makes the tokens (a token embedding, a Vision Transformer), never to the encoder.
Shapes: B batch, N tokens, D model width, H heads, K head width.
"""

import torch
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, each (N, K)."""


def sinusoids(positions: Tensor, dim: int, base: float = 10_000.0) -> Tensor:
    """Sinusoidal encoding of any positions ("Attention Is All You Need", section 3.5).

    Column 2i holds sin(position * base^(-2i/D)) and column 2i + 1 the cosine of the same angle. With an odd
    `dim` the last column is a sine without its cosine.

    Args:
        positions: (N,), any real numbers.
        dim: width D of the encoding.

    Returns:
        (N, D) in float32, on the device of `positions`.

    Raises:
        ValueError: `dim` is not positive.
    """
    if dim < 1:
        raise ValueError(f"dim={dim} is not a width; it must be at least 1")
    device = positions.device
    if device.type == "mps":  # which has no float64, and in float32 the angle at position 5000 is off by 3e-4
        positions = positions.cpu()
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)  # (ceil(D / 2),)
    angle = positions.double()[:, None] * frequency  # (N, ceil(D / 2))
    table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :dim]  # (N, D)
    return table.float().to(device)


class SinusoidalPositions(nn.Module):
    """Adds the fixed sinusoidal encoding to token vectors.

    Args:
        dim: model width D, even or odd.
        max_length: the most tokens a sequence may have.
    """

    table: Tensor

    def __init__(self, dim: int, max_length: int = 5000):
        super().__init__()
        self.max_length = max_length
        # Not in the state dict: it is a constant, and checkpoints of other lengths stay loadable.
        self.register_buffer("table", sinusoids(torch.arange(max_length), dim), persistent=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """(B, N, D) -> (B, N, D), a new tensor; the first token stands at position `start`.

        Raises ValueError where the last one exceeds `max_length`.
        """
        end = start + x.shape[1]
        check_length(end, self.max_length)
        return x + self.table[start:end].to(x.dtype)


class LearnedPositions(nn.Module):
    """Adds a learned vector per position to token vectors.

    Args:
        length: number of positions, the most tokens a sequence may have.
        dim: model width D.
    """

    def __init__(self, length: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, dim))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D), a new tensor. Raises ValueError where N exceeds `length`."""
        check_length(x.shape[1], len(self.weight))
        return x + self.weight[: x.shape[1]]


def check_length(length: int, limit: int) -> None:
    """Raise ValueError for a sequence that has more tokens than there are positions."""
    if length > limit:
        raise ValueError(f"a sequence of {length} tokens exceeds the {limit} positions; build with a larger limit")


Grid = tuple[int, int]
"""Rows and columns of patches."""


def grid_coordinates(grid: Grid, native: Grid | None = None) -> tuple[Tensor, Tensor]:
    """Row and column of each cell of a grid in reading order, each (N,) in float64.

    Args:
        grid: (rows, columns).
        native: the grid whose coordinates are meant: the cells of `grid` are stretched or shrunk to cover the same
            area, so that an image has the same coordinates at any size. None for `grid` itself.
    """
    axes = []
    for length, whole in zip(grid, native or grid, strict=True):
        centres = torch.arange(length, dtype=torch.float64) + 0.5
        axes.append(centres * whole / length - 0.5)
    rows, columns = torch.meshgrid(*axes, indexing="ij")
    return rows.flatten(), columns.flatten()


def sinusoids_2d(grid: Grid, dim: int, native: Grid | None = None) -> Tensor:
    """Fixed two-dimensional encoding: the first half of the width encodes the row, the second the column.

    Args:
        grid: (rows, columns) of patches.
        dim: model width D, a multiple of 4.
        native: as `grid_coordinates`.

    Returns:
        (rows * columns, D) in float32, patches in reading order.

    Raises:
        ValueError: `dim` is not a multiple of 4.
    """
    if dim % 4:
        raise ValueError(f"dim={dim} is not a multiple of 4, which two-dimensional sinusoidal positions need")
    return torch.cat([sinusoids(c, dim // 2) for c in grid_coordinates(grid, native)], dim=1)


def rotary_frequencies(head_dim: int, base: float = 100.0) -> Tensor:
    """Radians per row, and per column, that the channel pairs of a head turn in `rotation_2d`: (K / 4,) in float64.

    Args:
        head_dim: head width K, a multiple of 4.
        base: ratio of the highest to the lowest frequency; 100 suits grids of 4 to 40 patches a side.

    Raises:
        ValueError: `head_dim` is not a multiple of 4.
    """
    if head_dim % 4:
        raise ValueError(f"head width {head_dim} is not a multiple of 4, which rotary 2-D positions need")
    return base ** (-torch.arange(0, head_dim, 4, dtype=torch.float64) / head_dim)


def rotation_2d(
    grid: Grid, head_dim: int, prefix: int = 0, base: float = 100.0, native: Grid | None = None
) -> Rotation:
    """Rotary positions on a grid ("RoFormer", equation 34, once per axis: the axial form of "RoPE-ViT").

    Half of the channel pairs turn with the row, the other half with the column. Prefix tokens (class token,
    registers) do not turn.

    Args:
        grid: (rows, columns) of patches.
        head_dim: head width K, a multiple of 4.
        prefix: number of tokens that stand before the patches.
        base: as `rotary_frequencies`.
        native: as `grid_coordinates`.

    Returns:
        Cosines and sines, each (prefix + rows * columns, K) in float32.

    Raises:
        ValueError: `head_dim` is not a multiple of 4.
    """
    frequency = rotary_frequencies(head_dim, base)
    angle = torch.cat([c[:, None] * frequency for c in grid_coordinates(grid, native)], dim=1)  # (N, K / 2)
    angle = torch.cat([angle.new_zeros(prefix, head_dim // 2), angle]).repeat(1, 2)  # (prefix + N, K)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn each channel pair (i, i + K/2) of queries or keys by its token's angle.

    Args:
        x: (B, H, N, K).
        rotation: cosines and sines, each (N, K).

    Returns:
        (B, H, N, K); the length of every vector is unchanged.
    """
    cos, sin = (part.to(x.dtype) for part in rotation)
    half = x.shape[-1] // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    return torch.addcmul(x * cos, x.roll(half, dims=-1), sin)  # (x1, x2) * cos + (-x2, x1) * sin
