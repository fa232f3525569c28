"""First weights with which the heads of an encoder attend to neighbouring patches, as a convolution does.

Shapes: D model width, H heads, K head width (D = H * K).
"""

from itertools import cycle

import torch

from vit_scratch.transformer.encoder import Encoder, EncoderLayer
from vit_scratch.transformer.positions import rotary_frequencies

NEIGHBOURS = ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (-1, -1), (1, -1), (-1, 1))
"""Rows down and columns to the right, from a patch to itself and its eight neighbours."""


@torch.no_grad()
def attend_nearby(encoder: Encoder, strength: float, depth: int) -> None:
    """Set the biases of queries and keys so that each head at first attends to one neighbour of each patch.

    It is for encoders that get rotary positions from `rotation_2d`. There the biases of query and key give a score that
    depends on nothing but the offset between two patches: for a channel pair with frequency f, a query bias turned by
    f * offset against that of the key contributes strength^2 * cos(f * (distance - offset)), so that the sum over the
    pairs is largest at the offset. The heads take the patch itself and its eight neighbours in turns.
    The idea to start attention as single taps of a 3 x 3 convolution is that of "Structured Initialization for Vision
    Transformers" (which solves for the weights of queries and keys instead); it costs no operations.

    Args:
        encoder: whose query and key biases are set; head width K a multiple of 4, without norms on queries and keys.
        strength: size of the biases; the larger, the sharper the attention.
        depth: how many layers, from the first. Those that remain gather from everywhere, and a class token needs them.

    Raises:
        ValueError: an encoder that normalises queries and keys or has no biases there, or a head width that is no
            multiple of 4.
    """
    head_dim = encoder.dim // encoder.heads
    frequency = rotary_frequencies(head_dim)  # (K / 4,)
    offsets = cycle(NEIGHBOURS)
    layers = [layer for layer in encoder.layers if isinstance(layer, EncoderLayer)]
    if any(layer.attention.qk_norm for layer in layers):
        raise ValueError("local_attention needs qk_norm=False: the norms would undo its biases")
    if any(layer.attention.qkv.bias is None for layer in layers):
        raise ValueError("local_attention needs qkv_bias=True: it sets the biases of queries and keys")
    for layer in layers[:depth]:
        query, key, _ = layer.attention.qkv.bias.view(3, encoder.heads, head_dim)
        for head, (down, right) in zip(range(encoder.heads), offsets, strict=False):
            angle = torch.cat([frequency * down, frequency * right])  # (K / 2,)
            query[head] = strength * torch.cat([angle.cos(), angle.sin()])
            key[head] = strength * torch.cat([torch.ones_like(angle), torch.zeros_like(angle)])
