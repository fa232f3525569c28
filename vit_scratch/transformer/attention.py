"""Attention: the scaled dot product, its masks, and the multi-head module every layer uses.

Shapes: B batch, N query tokens, S key tokens, D model width, H heads, K head width (D = H * K).
Masks are boolean, True means "may attend". A query that may attend to nothing gets zeros.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vit_scratch.transformer.linear import Linear, linear
from vit_scratch.transformer.positions import Rotation, rotate
from vit_scratch.transformer.residual import check_probability, drop_elements


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention, step by step ("Attention Is All You Need", equation 1).

    Args:
        query: (B, H, N, K).
        key, value: (B, H, S, K).
        mask: boolean, broadcastable to (B, H, N, S); True means "may attend".
        dropout: probability of dropping an attention weight.

    Returns:
        The attended values (B, H, N, K) and the attention weights (B, H, N, S). Each row of weights sums
        to 1, or to 0 where the mask allows nothing.
    """
    scale = query.shape[-1] ** -0.5
    scores = (query * scale) @ key.transpose(-2, -1)  # (B, H, N, S)
    if mask is not None:
        # The lowest finite number rather than -inf: a row with nothing allowed stays free of NaN, also backwards.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    return drop_elements(weights, dropout) @ value, weights


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0, causal: bool = False
) -> Tensor:
    """The same attended values as `attention` from PyTorch's fused kernels, without the weights.

    Args:
        causal: instead of a mask: the last query sees all keys, the one before it all but the last, and so on.
        others: as `attention`, and so is the first value that it returns.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    if causal and queries not in (1, keys):  # PyTorch would align the first query with the first key
        mask = causal_mask(queries, keys, query.device)
    if mask is None:
        causal = causal and queries > 1
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=causal)
    # What a kernel does with a row that allows nothing differs between devices, so no kernel gets to see one.
    empty = ~mask.any(dim=-1, keepdim=True)  # (..., N or 1, 1)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask | empty, dropout_p=dropout)
    return output.masked_fill(empty, 0.0)


def expand_mask(mask: Tensor, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """Check an attention mask and give it four dimensions, broadcastable to (B, H, N, S).

    Args:
        mask: boolean, True means "may attend"; of shape (N, S), (B, S), (B, N, S) or (B, H, N, S).
            A dimension of size 1 stands for all of its kind in the shapes with three or four dimensions.

    Raises:
        ValueError: the mask is not boolean, has another shape, or is a square that could be (N, S) or (B, S).
    """
    if mask.dtype != torch.bool:
        raise ValueError(
            f'mask has dtype {mask.dtype}; it must be torch.bool, True meaning "may attend" (mask != 0 converts 0/1)'
        )
    if mask.dim() == 2:
        as_pairs, as_padding = mask.shape == (queries, keys), mask.shape == (batch, keys)
        if as_pairs and as_padding and batch > 1:
            raise ValueError(
                f"mask of shape {tuple(mask.shape)} could be (N, S) or (B, S), as B = N = {batch}; "
                "pass mask[None] to mean (1, N, S) or mask[:, None] to mean (B, 1, S)"
            )
        if as_pairs:
            return mask[None, None]
        if as_padding:
            return mask[:, None, None]
    sizes = (batch, heads, queries, keys) if mask.dim() == 4 else (batch, queries, keys)
    if mask.dim() == len(sizes) and all(m in (1, s) for m, s in zip(mask.shape, sizes, strict=True)):
        return mask if mask.dim() == 4 else mask[:, None]
    raise ValueError(
        f"mask has shape {tuple(mask.shape)}; accepted here are (N, S) = {(queries, keys)}, (B, S) = {(batch, keys)}, "
        f"(B, N, S) = {(batch, queries, keys)} and (B, H, N, S) = {(batch, heads, queries, keys)}"
    )


def causal_mask(length: int, keys: int | None = None, device: torch.device | None = None) -> Tensor:
    """The (N, N) mask in which token n may attend to tokens 0..n, itself included.

    With more `keys` S than tokens, the tokens are the last of them: (N, S), the last row all True.
    """
    keys = length if keys is None else keys
    return torch.ones(length, keys, dtype=torch.bool, device=device).tril(keys - length)


def check_heads(dim: int, heads: int) -> None:
    """Raise ValueError unless `heads` divides `dim`; the message lists the head counts that do."""
    if dim < 1 or heads < 1 or dim % heads:
        valid = ", ".join(str(h) for h in range(1, max(dim, 0) + 1) if dim % h == 0)
        raise ValueError(f"dim={dim} is not divisible by heads={heads}; valid head counts: {valid or 'none'}")


class KeyValueCache:
    """Keys and values of the tokens so far, kept from step to step of a generation.

    Attributes:
        length: number of tokens S.
    """

    def __init__(self) -> None:
        self.length = 0
        self.buffers: tuple[Tensor, Tensor] | None = None  # keys and values (B, H, room, K), room >= S

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take in keys and values (B, H, N, K) of new tokens; returns all of them, (B, H, S, K)."""
        before, self.length = self.length, self.length + key.shape[2]
        if self.buffers is None or self.length > self.buffers[0].shape[2]:
            room = 2 * self.length if before else self.length  # a memory is never added to
            grown = tuple(new.new_empty(*new.shape[:2], room, new.shape[3]) for new in (key, value))
            for new, old in zip(grown, self.buffers or (), strict=False):
                new[:, :, :before] = old[:, :, :before]
            self.buffers = grown[0], grown[1]
        for buffer, new in zip(self.buffers, (key, value), strict=True):
            buffer[:, :, before : self.length] = new
        return self.contents()

    def contents(self) -> tuple[Tensor, Tensor]:
        """Keys and values so far, each (B, H, S, K)."""
        assert self.buffers is not None
        return self.buffers[0][:, :, : self.length], self.buffers[1][:, :, : self.length]

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may be taken more than once."""
        if self.buffers is not None:
            self.buffers = self.buffers[0][rows], self.buffers[1][rows]


class MultiHeadAttention(nn.Module):
    """Multi-head attention ("Attention Is All You Need", section 3.2.2), for self- and cross-attention.

    Args:
        dim: model width D.
        heads: number of heads H, a divisor of D.
        dropout: probability of dropping an attention weight in training.
        qk_norm: normalise queries and keys per head ("Scaling Vision Transformers to 22 Billion Parameters").
        norm_eps: epsilon of those norms.
        qkv_bias: whether the maps to queries, keys and values have biases.

    The attribute `fused` (True at first) chooses the path: PyTorch's fused kernels, or `attention` above.

    Raises:
        ValueError: `heads` does not divide `dim`, or a dropout that is no probability.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        dropout: float = 0.0,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        qkv_bias: bool = True,
    ):
        super().__init__()
        check_heads(dim, heads)
        check_probability("dropout", dropout)
        self.dim, self.heads, self.dropout, self.qk_norm, self.fused = dim, heads, dropout, qk_norm, True
        self.qkv = Linear(dim, 3 * dim, qkv_bias, stacked=3)  # rows: D for queries, D for keys, D for values
        self.query_norm = nn.LayerNorm(dim // heads, eps=norm_eps) if qk_norm else nn.Identity()
        self.key_norm = nn.LayerNorm(dim // heads, eps=norm_eps) if qk_norm else nn.Identity()
        self.out = Linear(dim, dim)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        rotation: Rotation | None = None,
        cache: KeyValueCache | None = None,
        num_queries: int | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Let each token of `x` gather from `memory`, or from `x` itself where no memory is given.

        Args:
            x: (B, N, D).
            memory: (B, S, D); without it this is self-attention and S = N.
            mask: boolean, True means "may attend"; shapes as `expand_mask`.
            causal: on top of the mask, let no token attend to a later one; for self-attention only.
            rotation: rotary positions of the N tokens, for self-attention only.
            cache: keys and values from step to step, for inference. In self-attention `x` holds the tokens that
                follow those in the cache, and S counts them all. A memory is read in the first step only.
            num_queries: let only the first so many tokens gather, for self-attention; they are the N tokens of the
                result then, and see all. Mask and rotation are those of all tokens nonetheless.
            return_weights: also return the weights; this takes the readable path, the output stays the same.

        Returns:
            (B, N, D), and with `return_weights` the weights (B, H, N, S) beside it.

        Raises:
            ValueError: a mask that `expand_mask` refuses, `rotation`, `causal` or `num_queries` together with a memory,
                `num_queries` together with `causal` or a cache, or out of range.
        """
        if num_queries is not None and (memory is not None or causal or cache is not None):
            raise ValueError("num_queries can't be used with a memory, a cache or causal")
        tokens = x.shape[1]
        if num_queries is not None and not 1 <= num_queries <= tokens:
            raise ValueError(f"num_queries={num_queries} is out of range; x has {tokens} tokens, None is for all")
        if num_queries is not None and num_queries < tokens:
            query = self.queries(x[:, :num_queries])
            key, value = self.keys_and_values(x)
            if rotation is not None:
                query = rotate(query, (rotation[0][:num_queries], rotation[1][:num_queries]))
                key = rotate(key, rotation)
        elif memory is None:
            query, key, value = rearrange(self.qkv(x), "b n (three h k) -> three b h n k", three=3, h=self.heads)
            query, key = self.query_norm(query), self.key_norm(key)
            if rotation is not None:
                query, key = rotate(query, rotation), rotate(key, rotation)
            if cache is not None:
                key, value = cache.append(key, value)
        else:
            if rotation is not None or causal:
                raise ValueError("rotation and causal describe the tokens of x and can't be used with a memory")
            query = self.queries(x)
            if cache is not None and cache.length:
                key, value = cache.contents()
            else:
                key, value = self.keys_and_values(memory)
                if cache is not None:
                    cache.append(key, value)
        queries, keys = query.shape[-2], key.shape[-2]
        if mask is not None:
            mask = expand_mask(mask, x.shape[0], self.heads, tokens, keys)
            mask = mask[:, :, :queries] if mask.shape[2] > 1 else mask
        dropout = self.dropout if self.training else 0.0
        readable = return_weights or not self.fused
        if causal and (readable or mask is not None):
            triangle = causal_mask(queries, keys, x.device)
            mask, causal = triangle if mask is None else mask & triangle, False
        weights = None
        if readable:
            output, weights = attention(query, key, value, mask, dropout)
        else:
            output = fused_attention(query, key, value, mask, dropout, causal)
        output = self.out(rearrange(output, "b h n k -> b n (h k)"))
        return output if weights is None or not return_weights else (output, weights)

    def queries(self, x: Tensor) -> Tensor:
        """(B, N, D) -> queries (B, H, N, K)."""
        bias = None if self.qkv.bias is None else self.qkv.bias[: self.dim]
        query = linear(x, self.qkv.weight[: self.dim], bias)
        return self.query_norm(rearrange(query, "b n (h k) -> b h n k", h=self.heads))

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, D) -> keys and values, each (B, H, S, K)."""
        bias = None if self.qkv.bias is None else self.qkv.bias[self.dim :]
        projected = linear(memory, self.qkv.weight[self.dim :], bias)
        key, value = rearrange(projected, "b s (two h k) -> two b h s k", two=2, h=self.heads)
        return self.key_norm(key), value
