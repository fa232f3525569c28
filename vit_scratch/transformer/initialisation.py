"""The first weights of encoders and decoders."""

from torch import nn

from vit_scratch.transformer.linear import Linear


def initialise_layers(model: nn.Module) -> None:
    """Set the first weights of an `Encoder` or a `Decoder`.

    | what                    | distribution                                                     |
    |-------------------------|------------------------------------------------------------------|
    | weights of linear maps  | Xavier uniform; queries, keys and values count as separate maps  |
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
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
