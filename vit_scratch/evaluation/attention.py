"""Attention weights of a model's layers, on request, without changing what the model returns.

Shapes: B batch, H heads, N query tokens, S key tokens.
"""

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
