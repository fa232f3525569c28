"""Attention weights of a model's layers, on request, without changing what the model returns.

Shapes: B batch, H heads, N query tokens, S key tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vit_scratch.transformer.attention import MultiHeadAttention


@torch.no_grad()
def attention_maps(model: nn.Module, *inputs: Any) -> dict[str, Tensor]:
    """Run a model and collect the weights of every `MultiHeadAttention` in it.

    Args:
        model: left as it is; put it in eval mode first.
        inputs: what it is called with.

    Returns:
        Weights (B, H, N, S) by the module's name, such as "decoder.layers.2.cross_attention", in the order of use.
    """
    maps: dict[str, Tensor] = {}
    hooks = []

    def hook(name: str) -> Any:
        def collect(module: MultiHeadAttention, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            # Straight to forward: calling the module would come back here. Weights of all tokens, whatever is read.
            maps[name] = module.forward(*args, **kwargs | {"return_weights": True, "num_queries": None})[1]

        return collect

    try:
        for name, module in model.named_modules():
            if isinstance(module, MultiHeadAttention):
                hooks.append(module.register_forward_hook(hook(name), with_kwargs=True))
        model(*inputs)
    finally:
        for handle in hooks:
            handle.remove()
    return maps


def rollout(weights: Sequence[Tensor]) -> Tensor:
    """How much of each input token is in each output token ("Quantifying Attention Flow in Transformers", section 3).

    Heads count alike, and each layer is half attention, half the identity that its residual connection adds.

    Args:
        weights: attention weights (B, H, N, N) of each layer, the first layer first.

    Returns:
        (B, N, N); each row, an output token, sums to 1.

    Raises:
        ValueError: no layer, or weights that are not square.
    """
    if not weights or any(w.dim() != 4 or w.shape[2] != w.shape[3] for w in weights):
        raise ValueError(
            f"weights have shapes {[tuple(w.shape) for w in weights]}; they must be (B, H, N, N), one for each layer"
        )
    identity = torch.eye(weights[0].shape[-1], dtype=weights[0].dtype, device=weights[0].device)
    mixed = identity.expand(len(weights[0]), -1, -1)
    for layer in weights:
        mixed = (layer.mean(dim=1) + identity) / 2 @ mixed
    return mixed


def seen_patches(weights: Tensor, prefix: int, pooling: str) -> Tensor:
    """What a classifier's output is drawn from: the weights of the patches, without class token and registers.

    Args:
        weights: (..., N, N), such as of `rollout` or of one layer.
        prefix: number of tokens in front of the patches.
        pooling: "class" for what the class token gathers, "mean" for the mean of what the patches gather.

    Returns:
        (..., patches); they sum to 1, or are all 0 where nothing but the tokens in front is attended to.
    """
    row = weights[..., 0, prefix:] if pooling == "class" else weights[..., prefix:, prefix:].mean(dim=-2)
    total = row.sum(dim=-1, keepdim=True)
    return row / total.where(total > 0, torch.ones_like(total))
