"""The Transformer encoder: the same class reads sentences in `Transformer` and image patches in `VisionTransformer`.

Shapes: B batch, N tokens, D model width, H heads.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit_scratch.transformer.attention import MultiHeadAttention, expand_mask
from vit_scratch.transformer.feed_forward import FeedForward, check_kernel
from vit_scratch.transformer.initialisation import initialise_layers
from vit_scratch.transformer.positions import Grid, Rotation
from vit_scratch.transformer.residual import check_probability, residual_branch


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network, each with a residual connection.

    Args:
        dim: model width D.
        heads: number of heads H, a divisor of D.
        hidden_dim: width inside the feed-forward network, 4 * D by default.
        activation: a key of `ACTIVATIONS`, such as "gelu" or "relu".
        norm_first: True normalises the input of each branch (as ViT), False the sum after it (as in 2017).
        dropout: probability for attention weights, hidden units and branch outputs.
        drop_path: probability of dropping a branch for a sample.
        layer_scale: initial value of a learned factor per channel on each branch, None for none.
        qk_norm: normalise queries and keys.
        norm_eps: epsilon of all layer norms.
        qkv_bias: whether the maps to queries, keys and values have biases.
        feed_forward_kernel: side of a convolution over the patches inside the feed-forward network, see
            `PatchConvolution`; None for none.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        hidden_dim: int | None = None,
        activation: str = "gelu",
        norm_first: bool = True,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        qkv_bias: bool = True,
        feed_forward_kernel: int | None = None,
    ):
        super().__init__()
        self.norm_first = norm_first
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attention = MultiHeadAttention(
            dim, heads, dropout=dropout, qk_norm=qk_norm, norm_eps=norm_eps, qkv_bias=qkv_bias
        )
        self.branch1 = residual_branch(dim, dropout, drop_path, layer_scale)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.feed_forward = FeedForward(
            dim, hidden_dim, activation=activation, dropout=dropout, kernel_size=feed_forward_kernel
        )
        self.branch2 = residual_branch(dim, dropout, drop_path, layer_scale)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
        num_outputs: int | None = None,
        grid: Grid | None = None,
    ) -> Tensor:
        """(B, N, D) -> (B, N, D), or only its first `num_outputs` tokens; the other arguments as `Encoder.forward`."""
        if self.norm_first:
            attended = self.attention(self.norm1(x), mask=mask, rotation=rotation, num_queries=num_outputs)
            x = x[:, :num_outputs] + self.branch1(attended)
            x = x + self.branch2(self.feed_forward(self.norm2(x), grid))
        else:
            attended = self.attention(x, mask=mask, rotation=rotation, num_queries=num_outputs)
            x = self.norm1(x[:, :num_outputs] + self.branch1(attended))
            x = self.norm2(x + self.branch2(self.feed_forward(x, grid)))
        return x


class Encoder(nn.Module):
    """A stack of encoder layers on any token vectors; positions are added, or handed in, by whoever makes the tokens.

    With `norm_first` a final norm follows the stack; without it the last layer has normalised already and none is
    needed ("On Layer Normalization in the Transformer Architecture" compares the two).

    Args:
        dim: model width D.
        depth: number of layers.
        heads: number of heads H, a divisor of D.
        drop_path: probability of dropping a branch in the last layer; it rises linearly from 0 in the first,
            so that a single layer drops none.
        final_norm: whether a norm follows the stack; None is for as `norm_first`.
        others: as `EncoderLayer`.

    Attributes:
        arguments: what it was built with, by name.
        gradient_checkpointing: recompute each layer in the backward pass to save memory (False at first).

    Raises:
        ValueError: `heads` does not divide `dim`, an unknown activation, or a depth, width, kernel or probability out
            of range.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        *,
        hidden_dim: int | None = None,
        activation: str = "gelu",
        norm_first: bool = True,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        qkv_bias: bool = True,
        final_norm: bool | None = None,
        feed_forward_kernel: int | None = None,
    ):
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self.arguments: dict[str, Any] = arguments
        if depth < 1:
            raise ValueError(f"depth={depth} is not a number of layers; it must be at least 1")
        check_probability("drop_path", drop_path)
        if feed_forward_kernel is not None:
            check_kernel("feed_forward_kernel", feed_forward_kernel)
        self.dim, self.depth, self.heads, self.gradient_checkpointing = dim, depth, heads, False
        self.feed_forward_kernel = feed_forward_kernel
        self.layers = nn.ModuleList(
            EncoderLayer(
                dim,
                heads,
                hidden_dim=hidden_dim,
                activation=activation,
                norm_first=norm_first,
                dropout=dropout,
                drop_path=drop_path * i / max(depth - 1, 1),
                layer_scale=layer_scale,
                qk_norm=qk_norm,
                norm_eps=norm_eps,
                qkv_bias=qkv_bias,
                feed_forward_kernel=feed_forward_kernel,
            )
            for i in range(depth)
        )
        final_norm = norm_first if final_norm is None else final_norm
        self.norm = nn.LayerNorm(dim, eps=norm_eps) if final_norm else nn.Identity()
        initialise_layers(self)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
        num_outputs: int | None = None,
        grid: Grid | None = None,
    ) -> Tensor:
        """Encode token vectors.

        Args:
            x: (B, N, D).
            mask: boolean, True means "may attend"; (N, N), (B, N) for padding, (B, N, N) or (B, H, N, N).
            rotation: rotary positions of the N tokens, applied to queries and keys in every layer.
            num_outputs: return only the first so many tokens, at most N, and let the last layer compute no others:
                a classifier that reads nothing but its class token needs a fifth less of a model with four layers.
            grid: rows and columns of the patches, which are the last of the tokens; for `feed_forward_kernel`.

        Returns:
            (B, N, D), or (B, num_outputs, D).

        Raises:
            ValueError: x of another width, a mask that `expand_mask` refuses, `num_outputs` out of range, or a grid
                that is missing or has more patches than there are tokens.
        """
        mask = self.check(x, mask, num_outputs, grid)
        for layer in self.layers:
            outputs = num_outputs if layer is self.layers[-1] else None
            x = self.run(layer, x, mask, rotation, outputs, grid)
        return self.norm(x)

    def intermediates(
        self,
        x: Tensor,
        layers: Collection[int],
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
        grid: Grid | None = None,
    ) -> dict[int, Tensor]:
        """What some of the layers return, before the final norm; those behind the last of them are not computed.

        Args:
            layers: which, counted from 0.
            others: as `forward`.

        Returns:
            (B, N, D) for each of these layers; nothing else is kept.

        Raises:
            ValueError: a layer that there is not, or none at all, and as `forward`.
        """
        if not layers or not all(0 <= i < self.depth for i in layers):
            raise ValueError(
                f"layers={list(layers)} are not layers of an encoder with {self.depth}, 0 to {self.depth - 1}"
            )
        mask = self.check(x, mask, None, grid)
        kept = {}
        for i in range(max(layers) + 1):
            x = self.run(self.layers[i], x, mask, rotation, None, grid)
            if i in layers:
                kept[i] = x
        return kept

    def run(
        self,
        layer: nn.Module,
        x: Tensor,
        mask: Tensor | None,
        rotation: Rotation | None,
        num_outputs: int | None,
        grid: Grid | None,
    ) -> Tensor:
        """One layer, with or without gradient checkpointing; the arguments as `EncoderLayer.forward`."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(layer, x, mask, rotation, num_outputs, grid, use_reentrant=False)
        return layer(x, mask, rotation, num_outputs, grid)

    def check(self, x: Tensor, mask: Tensor | None, num_outputs: int | None, grid: Grid | None) -> Tensor | None:
        """Raise ValueError as `forward`; returns the mask with four dimensions."""
        check_width(x, self.dim)
        if self.feed_forward_kernel is not None:
            if grid is None or grid[0] * grid[1] > x.shape[1]:
                raise ValueError(
                    f"grid={grid} does not describe the patches among {x.shape[1]} tokens, over which "
                    f"feed_forward_kernel={self.feed_forward_kernel} convolves; pass their (rows, columns)"
                )
            if num_outputs is not None:
                raise ValueError(
                    f"num_outputs={num_outputs} leaves out patches over which feed_forward_kernel="
                    f"{self.feed_forward_kernel} convolves; take the tokens from the result instead"
                )
        if num_outputs is not None and not 1 <= num_outputs <= x.shape[1]:
            raise ValueError(f"num_outputs={num_outputs} is out of range; x has {x.shape[1]} tokens, None is for all")
        return None if mask is None else expand_mask(mask, x.shape[0], self.heads, x.shape[1], x.shape[1])


def check_width(x: Tensor, dim: int) -> None:
    """Raise ValueError unless x is a batch of token vectors (B, N, D) of width `dim`."""
    if x.dim() != 3 or x.shape[-1] != dim:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (B, N, D) with D = {dim}")
