"""The first weights of encoders and decoders."""

import torch
from torch import nn

from vit_scratch.transformer.feed_forward import PatchConvolution
from vit_scratch.transformer.linear import Linear


def initialise_layers(model: nn.Module) -> None:
    """Set the first weights of an `Encoder` or a `Decoder`.

    | what                    | distribution                                                     |
    |-------------------------|------------------------------------------------------------------|
    | weights of linear maps  | Xavier uniform; queries, keys and values count as separate maps  |
    | convolutions            | 1 in the middle, 0 elsewhere, plus normal with deviation 0.02    |
    | biases                  | 0                                                                |
    | layer norms             | weight 1, bias 0                                                 |
    | LayerScale              | the value given to the constructor                               |

    Source: "Understanding the difficulty of training deep feedforward neural networks", equation 16; it is the choice
    of the original code of both "Attention Is All You Need" and "An Image is Worth 16x16 Words".
    """
    for module in model.modules():
        if isinstance(module, Linear):
            for part in module.weight.chunk(module.stacked):
                nn.init.xavier_uniform_(part)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, PatchConvolution):
            kernel, bias = module.depthwise.parameters()
            nn.init.normal_(kernel, std=0.02)
            nn.init.zeros_(bias)
            with torch.no_grad():
                kernel[:, :, kernel.shape[2] // 2, kernel.shape[3] // 2] += 1
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
