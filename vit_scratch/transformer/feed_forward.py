"""The position-wise feed-forward network of a Transformer layer.

Shapes: B batch, N tokens, D model width.
"""

from torch import Tensor, nn

from vit_scratch.transformer.linear import Linear
from vit_scratch.transformer.residual import Dropout

ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU}


class FeedForward(nn.Module):
    """Two linear maps with an activation between ("Attention Is All You Need", section 3.3).

    Args:
        dim: model width D.
        hidden_dim: width between the two maps, 4 * D where None.
        activation: "relu" as in the paper, or "gelu" as in ViT (the exact form, not the tanh one).
        dropout: probability of dropping a hidden unit in training.

    Raises:
        ValueError: an unknown activation, or a hidden width below 1.
    """

    def __init__(self, dim: int, hidden_dim: int | None = None, *, activation: str = "gelu", dropout: float = 0.0):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r} is unknown; choose from {', '.join(ACTIVATIONS)}")
        hidden_dim = 4 * dim if hidden_dim is None else hidden_dim
        if hidden_dim < 1:
            raise ValueError(f"hidden_dim={hidden_dim} is not a width; it must be at least 1, or None for 4 * dim")
        self.linear1 = Linear(dim, hidden_dim)
        self.activation = ACTIVATIONS[activation]()
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        return self.linear2(self.dropout(self.activation(self.linear1(x))))
