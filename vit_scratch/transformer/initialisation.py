"""The first weights of encoders and decoders."""

from torch import nn


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
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            for part in module.weight.chunk(3 if name.endswith(".qkv") else 1):
                nn.init.xavier_uniform_(part)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
