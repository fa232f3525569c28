"""The Transformer decoder: causal self-attention, attention to the encoder's output, feed-forward.

Shapes: B batch, N target tokens, S source tokens, D model width, H heads.
"""

from torch import Tensor, nn

from vit_scratch.transformer.attention import KeyValueCache, MultiHeadAttention, expand_mask
from vit_scratch.transformer.encoder import check_width
from vit_scratch.transformer.feed_forward import FeedForward
from vit_scratch.transformer.initialisation import initialise_layers
from vit_scratch.transformer.residual import residual_branch


class LayerCache:
    """What a decoder layer keeps from step to step: the target's keys and values, which grow, and the memory's."""

    def __init__(self) -> None:
        self.target, self.memory = KeyValueCache(), KeyValueCache()


class DecoderCache:
    """What a decoder keeps from step to step of a generation.

    Args:
        depth: number of layers of the decoder.
    """

    def __init__(self, depth: int):
        self.layers = [LayerCache() for _ in range(depth)]

    @property
    def length(self) -> int:
        """Number of target tokens so far."""
        return self.layers[0].target.length

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may be taken more than once."""
        for layer in self.layers:
            layer.target.select(rows)
            layer.memory.select(rows)


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention and a feed-forward network, each with a residual connection.

    Args:
        dim: model width D.
        heads: number of heads H, a divisor of D.
        hidden_dim: width inside the feed-forward network, 4 * D by default.
        activation: "gelu" or "relu".
        norm_first: True normalises the input of each branch, False the sum after it (as in 2017).
        dropout: probability for attention weights, hidden units and branch outputs.
        norm_eps: epsilon of all layer norms.
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
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        self.norm_first = norm_first
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.self_attention = MultiHeadAttention(dim, heads, dropout=dropout)
        self.branch1 = residual_branch(dim, dropout, 0.0, None)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.cross_attention = MultiHeadAttention(dim, heads, dropout=dropout)
        self.branch2 = residual_branch(dim, dropout, 0.0, None)
        self.norm3 = nn.LayerNorm(dim, eps=norm_eps)
        self.feed_forward = FeedForward(dim, hidden_dim, activation=activation, dropout=dropout)
        self.branch3 = residual_branch(dim, dropout, 0.0, None)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """(B, N, D) and memory (B, S, D) -> (B, N, D); masks and cache as `Decoder.forward`."""
        target, source = (None, None) if cache is None else (cache.target, cache.memory)
        if self.norm_first:
            x = x + self.branch1(self.self_attention(self.norm1(x), mask=mask, causal=True, cache=target))
            x = x + self.branch2(self.cross_attention(self.norm2(x), memory, mask=memory_mask, cache=source))
            x = x + self.branch3(self.feed_forward(self.norm3(x)))
        else:
            x = self.norm1(x + self.branch1(self.self_attention(x, mask=mask, causal=True, cache=target)))
            x = self.norm2(x + self.branch2(self.cross_attention(x, memory, mask=memory_mask, cache=source)))
            x = self.norm3(x + self.branch3(self.feed_forward(x)))
        return x


class Decoder(nn.Module):
    """A stack of decoder layers, always causal: token n sees tokens 0..n and the whole memory.

    With `norm_first` a final norm follows the stack; without it the last layer has normalised already.

    Args:
        dim: model width D.
        depth: number of layers.
        heads: number of heads H, a divisor of D.
        others: as `DecoderLayer`.

    Raises:
        ValueError: `heads` does not divide `dim`, an unknown activation, or a depth, width or probability out of range.
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
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        if depth < 1:
            raise ValueError(f"depth={depth} is not a number of layers; it must be at least 1")
        self.dim, self.depth, self.heads = dim, depth, heads
        self.layers = nn.ModuleList(
            DecoderLayer(
                dim,
                heads,
                hidden_dim=hidden_dim,
                activation=activation,
                norm_first=norm_first,
                dropout=dropout,
                norm_eps=norm_eps,
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim, eps=norm_eps) if norm_first else nn.Identity()
        initialise_layers(self)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """Decode target token vectors.

        Args:
            x: (B, N, D), the target tokens; with a cache, those that follow the ones it knows.
            memory: (B, S, D), the encoder's output.
            mask: boolean, True means "may attend", on top of the causal mask; (N, N), (B, N), (B, N, N), (B, H, N, N).
                With a cache the last dimension counts the tokens in it too.
            memory_mask: likewise for the memory; (N, S), (B, S) for padding, (B, N, S) or (B, H, N, S).
            cache: keys and values from step to step, for inference; the memory is read in the first step only.

        Returns:
            (B, N, D).

        Raises:
            ValueError: x or memory of another width, or a mask that `expand_mask` refuses.
        """
        check_width(x, self.dim)
        check_width(memory, self.dim)
        batch, length = x.shape[:2]
        if mask is not None:
            mask = expand_mask(mask, batch, self.heads, length, length + (cache.length if cache else 0))
        if memory_mask is not None:
            memory_mask = expand_mask(memory_mask, batch, self.heads, length, memory.shape[1])
        for layer, kept in zip(self.layers, cache.layers if cache else [None] * self.depth, strict=True):
            x = layer(x, memory, mask, memory_mask, kept)
        return self.norm(x)
