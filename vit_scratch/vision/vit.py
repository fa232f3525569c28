"""The Vision Transformer: patches and a class token in front of the package's own `Encoder`, a classifier behind.

Shapes: B batch, C channels, N patches, D model width, K head width. Tokens stand in the order class token (if any),
registers (if any), patches in reading order.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vit_scratch.transformer.encoder import Encoder
from vit_scratch.transformer.linear import Linear, matrices
from vit_scratch.transformer.positions import Grid, Rotation, rotation_2d, sinusoids_2d
from vit_scratch.transformer.residual import Dropout
from vit_scratch.vision.hub import Hub
from vit_scratch.vision.local_attention import attend_nearby
from vit_scratch.vision.patch_embedding import ConvolutionalStem, PatchEmbedding, Size

POOLINGS = ("class", "mean")
POSITIONS = ("learned", "sinusoidal", "rotary")
PREFIX_POSITIONS = ("none", "class", "all")
TIMM_POOLINGS = {"token": "class", "avg": "mean"}
"""Our poolings by timm's names."""
STEMS = {"patch": PatchEmbedding, "convolution": ConvolutionalStem}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny_patch4_32": dict(image_size=32, patch_size=4, dim=192, depth=9, heads=3),
    "small_patch4_32": dict(image_size=32, patch_size=4, dim=384, depth=12, heads=6),
    "base_patch4_32": dict(image_size=32, patch_size=4, dim=768, depth=12, heads=12),
    "tiny_patch16_224": dict(image_size=224, patch_size=16, dim=192, depth=12, heads=3),
    "small_patch16_224": dict(image_size=224, patch_size=16, dim=384, depth=12, heads=6),
    "base_patch16_224": dict(image_size=224, patch_size=16, dim=768, depth=12, heads=12),
    "base_patch32_224": dict(image_size=224, patch_size=32, dim=768, depth=12, heads=12),
    "large_patch16_224": dict(image_size=224, patch_size=16, dim=1024, depth=24, heads=16),
}
"""Arguments of `create_vit` by name; those for 224 pixels are the models of the ViT and DeiT papers."""


class VisionTransformer(nn.Module, Hub):
    """A Vision Transformer ("An Image is Worth 16x16 Words", section 3.1) around a given encoder.

    Args:
        encoder: any `Encoder`; its width is the width D of the tokens.
        image_size: of every image in pixels, a number or (height, width).
        patch_size: in pixels, likewise; divides the image size.
        in_channels: number of channels C.
        num_classes: number of logits; 0 leaves the head out, the output is then the pooled features.
        stem: what makes tokens of pixels: "patch" (`PatchEmbedding`) or "convolution" (`ConvolutionalStem`).
        pooling: "class" reads the class token, "mean" averages the patches.
        class_token: whether there is one; None where the pooling reads it.
        registers: number of register tokens ("Vision Transformers Need Registers").
        positions: "learned" (one vector for the class token and each patch), "sinusoidal" (2-D, fixed, patches
            only) or "rotary" (2-D, in every attention, patches only).
        prefix_positions: which tokens in front of the patches have a learned position: "none" of them, the "class"
            token, or "all", registers too.
        embedding_norm: a layer norm of the tokens that enter the encoder, as in CLIP; the patch embedding has no bias
            then.
        pooled_norm: a layer norm of the pooled features; for an encoder without a final norm.
        local_attention: with rotary positions, strength with which each head at first attends to one neighbour of each
            patch in the first half of the layers; it sets the encoder's biases of queries and keys, see
            `attend_nearby`. None leaves them alone.
        any_size: take images of other sizes, too, if the patch divides them; positions are stretched to cover them.
        dropout: probability of dropping an element of the tokens that enter the encoder.

    Attributes:
        arguments: what it was built with, by name, the encoder's among them: `create_vit(**model.arguments)` builds
            the like.
        frozen: whether `freeze` was called.
        metadata: what else is known about it, see `Hub`; empty at first.
        grid: (rows, columns) of patches.
        num_prefix_tokens: class token and registers.
        num_features: D.

    Raises:
        ValueError: the patch does not divide the image or does not suit the stem, an unknown stem, pooling or kind of
            positions, no class token to read, a negative number of registers, two final norms, local attention without
            rotary positions, or a class token for an encoder with convolutions, which pass it by.
    """

    fixed_positions: Tensor | None
    rotation_cos: Tensor | None
    rotation_sin: Tensor | None

    def __init__(
        self,
        encoder: Encoder,
        *,
        image_size: Size = 32,
        patch_size: Size = 4,
        in_channels: int = 3,
        num_classes: int = 10,
        stem: str = "patch",
        pooling: str = "class",
        class_token: bool | None = None,
        registers: int = 0,
        positions: str = "learned",
        prefix_positions: str = "class",
        embedding_norm: bool = False,
        pooled_norm: bool = False,
        local_attention: float | None = None,
        any_size: bool = False,
        dropout: float = 0.0,
    ):
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__", "encoder")}
        super().__init__()
        self.arguments = encoder.arguments | arguments
        self.metadata = {}
        self.frozen = False
        check_choice("stem", stem, tuple(STEMS))
        check_choice("pooling", pooling, POOLINGS)
        check_choice("positions", positions, POSITIONS)
        check_choice("prefix_positions", prefix_positions, PREFIX_POSITIONS)
        has_class = pooling == "class" if class_token is None else class_token
        if pooling == "class" and not has_class:
            raise ValueError("pooling='class' reads the class token; class_token=False needs pooling='mean'")
        if prefix_positions != "class" and positions != "learned":
            raise ValueError(
                f"prefix_positions={prefix_positions!r} is for positions='learned'; with {positions!r} only patches "
                "have positions"
            )
        if pooled_norm and isinstance(encoder.norm, nn.LayerNorm):
            raise ValueError("pooled_norm=True would normalise twice; build the encoder with final_norm=False")
        if registers < 0:
            raise ValueError(f"registers={registers} is negative; 0 for none")
        if local_attention is not None and positions != "rotary":
            raise ValueError(
                f"local_attention={local_attention} works through rotary positions; set positions='rotary', "
                f"which is {positions!r}, or local_attention=None"
            )
        if encoder.feed_forward_kernel is not None and pooling == "class":
            raise ValueError(
                f"feed_forward_kernel={encoder.feed_forward_kernel} convolves over patches only, so that in the last "
                "layer it would have no effect on a class token; set pooling='mean'"
            )
        self.patch_embedding = STEMS[stem](
            image_size, patch_size, in_channels, encoder.dim, any_size=any_size, bias=not embedding_norm
        )
        self.encoder = encoder
        self.pooling, self.num_features, self.num_classes = pooling, encoder.dim, num_classes
        self.prefix_positions = prefix_positions
        self.grid = self.patch_embedding.grid
        self.num_prefix_tokens = has_class + registers

        self.class_token = nn.Parameter(torch.empty(1, 1, encoder.dim)) if has_class else None
        self.register_tokens = nn.Parameter(torch.empty(1, registers, encoder.dim)) if registers else None
        patches = self.grid[0] * self.grid[1]
        self.positions = None
        if positions == "learned":
            prefix = {"none": 0, "class": int(has_class), "all": self.num_prefix_tokens}[prefix_positions]
            self.positions = nn.Parameter(torch.empty(1, prefix + patches, encoder.dim))
        # Constants are not in the state dict: they follow from the arguments.
        for name, table in self.constants().items():
            self.register_buffer(name, table, persistent=False)
        self.dropout = Dropout(dropout)
        eps = encoder.arguments["norm_eps"]
        self.embedding_norm = nn.LayerNorm(encoder.dim, eps=eps) if embedding_norm else nn.Identity()
        self.pooled_norm = nn.LayerNorm(encoder.dim, eps=eps) if pooled_norm else nn.Identity()
        self.head: nn.Module = nn.Identity()
        self.reset_classifier(num_classes)
        initialise(self)
        if local_attention is not None:
            attend_nearby(encoder, local_attention, encoder.depth // 2)

    @classmethod
    def from_arguments(cls, arguments: dict[str, Any]) -> "VisionTransformer":
        """What `create_vit` builds with them."""
        return create_vit(None, cls, **arguments)

    def constants(self) -> dict[str, Tensor | None]:
        """Tables of the positions that are not learned, by the names of their buffers; None for those not needed."""
        kind = self.arguments["positions"]
        cos, sin = None, None
        if kind == "rotary":
            cos, sin = rotation_2d(self.grid, self.encoder.dim // self.encoder.heads, prefix=self.num_prefix_tokens)
        fixed = sinusoids_2d(self.grid, self.encoder.dim) if kind == "sinusoidal" else None
        return {"fixed_positions": fixed, "rotation_cos": cos, "rotation_sin": sin}

    def embed(self, images: Tensor) -> Tensor:
        """Images (B, C, height, width) -> the tokens (B, prefix + N, D) that enter the encoder."""
        x = self.patch_embedding(images)
        grid = self.grid_of(images)
        if self.fixed_positions is not None:
            fixed = self.fixed_positions
            if grid != self.grid:
                fixed = stretched_sinusoids(grid, self.grid, self.num_features, x.device)
            x = x + fixed.to(x.dtype)
        positions = None if self.positions is None else resize_positions(self.positions, self.grid, grid)
        at, tokens = 0, []
        for kind, prefix in (("class", self.class_token), ("registers", self.register_tokens)):
            if prefix is None:
                continue
            if positions is not None and self.prefix_positions in (kind, "all"):
                at, start = at + prefix.shape[1], at
                tokens.append((prefix + positions[:, start:at]).expand(x.shape[0], -1, -1))
            else:
                tokens.append(prefix.expand(x.shape[0], -1, -1))
        if positions is not None:
            x = x + positions[:, at:]
        x = torch.cat([*tokens, x], dim=1) if tokens else x
        return self.embedding_norm(self.dropout(x))

    def grid_of(self, images: Tensor) -> Grid:
        """Rows and columns of patches of images (B, C, height, width)."""
        height, width = self.patch_embedding.patch_size
        return images.shape[2] // height, images.shape[3] // width

    def forward_features(self, images: Tensor, num_outputs: int | None = None) -> Tensor:
        """Images (B, C, height, width) -> encoded tokens (B, prefix + N, D), or the first `num_outputs` of them."""
        x = self.embed(images)  # refuses images that are none
        grid = self.grid_of(images)
        return self.encoder(x, rotation=self.rotation(grid), num_outputs=num_outputs, grid=grid)

    def rotation(self, grid: Grid) -> Rotation | None:
        """Rotary positions of all tokens for this grid of patches, None for a model that has others."""
        cos, sin = self.rotation_cos, self.rotation_sin
        if cos is None or sin is None:
            return None
        if grid == self.grid:
            return cos, sin
        head_dim = self.encoder.dim // self.encoder.heads
        return stretched_rotation(grid, self.grid, head_dim, self.num_prefix_tokens, cos.device)

    def features(
        self, images: Tensor, layers: Sequence[int] = (-1,), *, norm: bool = True
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Feature maps of some layers, for heads that need to know where things are. Nothing else is kept in memory.

        Args:
            images: (B, C, height, width), of any size that the patch divides if the model was built with `any_size`.
            layers: which layers' outputs, counted from 0; negative ones from the last, which is -1.
            norm: apply the final norm of the encoder to each.

        Returns:
            For each layer, in the order asked for, its patches (B, D, rows, columns) and its class token (B, D), None
            for a model without one.

        Raises:
            ValueError: a layer that there is not, or images that the model does not take.
        """
        depth = self.encoder.depth
        wanted = [i + depth if -depth <= i < 0 else i for i in layers]
        if not wanted or not all(0 <= i < depth for i in wanted):
            raise ValueError(
                f"layers={list(layers)}: this model has {depth} layers, from 0 to {depth - 1} or -1 to -{depth}"
            )
        found, grid = self.intermediates(images, wanted), self.grid_of(images)
        results = []
        for i in wanted:
            tokens = self.encoder.norm(found[i]) if norm else found[i]
            patches = tokens[:, self.num_prefix_tokens :]
            feature_map = rearrange(patches, "b (n m) d -> b d n m", n=grid[0]).contiguous()
            results.append((feature_map, None if self.class_token is None else tokens[:, 0]))
        return results

    def intermediates(self, images: Tensor, layers: Collection[int]) -> dict[int, Tensor]:
        """`Encoder.intermediates` of images (B, C, height, width): tokens (B, prefix + N, D) of each of the layers."""
        x, grid = self.embed(images), self.grid_of(images)
        return self.encoder.intermediates(x, layers, rotation=self.rotation(grid), grid=grid)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Encoded tokens (B, prefix + N, D) -> logits (B, classes), or pooled features (B, D) with `pre_logits`."""
        x = x[:, 0] if self.pooling == "class" else x[:, self.num_prefix_tokens :].mean(dim=1)
        x = self.pooled_norm(x)
        return x if pre_logits else self.head(x)

    def pooled_features(self, images: Tensor) -> Tensor:
        """Images (B, C, height, width) -> what the head reads (B, D)."""
        num_outputs = 1 if self.pooling == "class" else None
        return self.forward_head(self.forward_features(images, num_outputs), pre_logits=True)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, height, width) -> logits (B, classes).

        For a class token these are those of all encoded tokens, but the last layer computes that one only, which saves
        a tenth of the operations of `tiny_patch4_32`.
        """
        return self.head(self.pooled_features(images))

    def freeze(self) -> None:
        """Keep everything but the head as it is: no gradients, and evaluation mode even in training."""
        self.frozen = True
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith("head."))
        self.train(self.training)

    def train(self, mode: bool = True) -> "VisionTransformer":
        """As `nn.Module.train`, but for what `freeze` keeps as it is."""
        super().train(mode)
        if self.frozen:
            for name, child in self.named_children():
                child.train(mode and name == "head")
        return self

    # The contract of timm's models.

    def get_classifier(self) -> nn.Module:
        """The head: a linear map from D to the classes, or an identity where there are none."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one.

        Args:
            num_classes: number of logits; 0 for none.
            global_pool: timm's names "token" or "avg" to change the pooling too, None to keep it.

        Raises:
            ValueError: an unknown pooling, or "token" for a model that has no class token.
        """
        if num_classes < 0:
            raise ValueError(f"num_classes={num_classes} is negative; 0 leaves the head out")
        if global_pool is not None:
            check_choice("global_pool", global_pool, tuple(TIMM_POOLINGS))
            if global_pool == "token" and self.class_token is None:
                raise ValueError("global_pool='token' needs a class token; this model was built without one")
            self.pooling = TIMM_POOLINGS[global_pool]
        self.num_classes = num_classes
        has_class = self.class_token is not None
        self.arguments |= dict(num_classes=num_classes, pooling=self.pooling, class_token=has_class)
        like = self.patch_embedding.projection.weight
        if num_classes:
            self.head = Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)
        else:
            self.head = nn.Identity()

    def set_input_size(self, img_size: Size) -> None:
        """Make this a model for images of another size, in pixels; the patch has to divide it.

        Learned positions are resized to the new grid. Others become those of a model built for that size, where
        neighbouring patches are as far apart as before; `any_size` stretches them over the native size instead.

        Raises:
            ValueError: no size, or one that the patch does not divide; the model stays as it was.
        """
        native, device = self.grid, self.patch_embedding.projection.weight.device
        self.grid = self.patch_embedding.set_image_size(img_size)
        self.arguments |= dict(image_size=self.patch_embedding.image_size)
        if self.positions is not None:
            resized = resize_positions(self.positions.detach(), native, self.grid)
            self.positions = nn.Parameter(resized, requires_grad=self.positions.requires_grad)
        for name, table in self.constants().items():
            setattr(self, name, None if table is None else table.to(device))

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that are not to decay although they are no biases or norms."""
        return {"class_token", "register_tokens", "positions"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns by which timm finds the layer of a parameter, for learning rates that decay from layer to layer."""
        return {
            "stem": r"^class_token|^register_tokens|^positions|^patch_embedding|^embedding_norm",
            "blocks": [(r"^encoder\.layers\.(\d+)", None), (r"^encoder\.norm", (99999,))],
        }

    def hidden_matrices(self) -> dict[str, int]:
        """Names of the weight matrices before the head, and of how many stacked maps each consists."""
        return {name: stacked for name, stacked in matrices(self).items() if not name.startswith("head.")}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each encoder layer in the backward pass: less memory, about a third more time."""
        self.encoder.gradient_checkpointing = enable


def resize_positions(positions: Tensor, native: Grid, grid: Grid) -> Tensor:
    """Learned positions (1, prefix + N, D) of one grid for another one, by bicubic interpolation with antialiasing.

    Those of prefix tokens, which are what exceeds the native grid, stay as they are, and for the same grid all do.
    """
    if grid == native:
        return positions
    prefix = positions.shape[1] - native[0] * native[1]
    image = rearrange(positions[:, prefix:], "one (n m) d -> one d n m", n=native[0])
    image = image.to(torch.promote_types(image.dtype, torch.float32))  # there is none for half precision on a CPU
    image = F.interpolate(image, size=grid, mode="bicubic", antialias=True, align_corners=False)
    resized = rearrange(image, "one d n m -> one (n m) d").to(positions.dtype)
    return torch.cat([positions[:, :prefix], resized], dim=1)


@lru_cache
def stretched_sinusoids(grid: Grid, native: Grid, dim: int, device: torch.device) -> Tensor:
    """`sinusoids_2d` of a grid in the coordinates of another one, (N, D), made once for each."""
    with torch.inference_mode(False), torch.device("cpu"):  # whoever asks first must not decide for all
        return sinusoids_2d(grid, dim, native).to(device)


@lru_cache
def stretched_rotation(grid: Grid, native: Grid, head_dim: int, prefix: int, device: torch.device) -> Rotation:
    """`rotation_2d` of a grid in the coordinates of another one, each (prefix + N, K), made once for each."""
    with torch.inference_mode(False), torch.device("cpu"):
        cos, sin = rotation_2d(grid, head_dim, prefix, native=native)
        return cos.to(device), sin.to(device)


def initialise(model: VisionTransformer) -> None:
    """Set the first weights of a `VisionTransformer`; the encoder keeps those it came with.

    | what                                      | distribution                                                  |
    |-------------------------------------------|---------------------------------------------------------------|
    | patch embedding weight                    | normal, variance 1 / (C * P^2): patches of unit variance keep it |
    | kernels of a convolutional stem           | normal, variance 1 / (9 * channels), and its last map 1 / D   |
    | class token, registers                    | normal, standard deviation 0.02                               |
    | learned positions                         | normal, standard deviation 0.5: a quarter of a patch's        |
    |                                           | variance, so that they count from the first update (LOG.md)   |
    | head weight (`reset_classifier`)          | normal, standard deviation 0.02, cut off at 2                 |
    | biases                                    | 0                                                             |
    """
    projection = model.patch_embedding.projection
    nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
    if projection.bias is not None:
        nn.init.zeros_(projection.bias)
    for module in model.patch_embedding.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
    for parameter, std in ((model.class_token, 0.02), (model.register_tokens, 0.02), (model.positions, 0.5)):
        if parameter is not None:
            nn.init.normal_(parameter, std=std)


def vit_arguments(preset: str | None = None, **overrides: Any) -> dict[str, Any]:
    """All arguments of `VisionTransformer` and its `Encoder`: their defaults, the preset's, and `overrides`.

    Raises:
        ValueError: an unknown preset or argument, or without a preset one that has no default.
    """
    if preset is not None:
        check_choice("preset", preset, tuple(PRESETS))
    accepted = {n: p.default for cls in (Encoder, VisionTransformer) for n, p in signature(cls).parameters.items()}
    del accepted["encoder"]
    for name in overrides:
        check_choice("argument", name, tuple(sorted(accepted)))
    arguments = accepted | ({} if preset is None else PRESETS[preset]) | overrides
    missing = [name for name, value in arguments.items() if value is Parameter.empty]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given, or a preset: {', '.join(PRESETS)}")
    return arguments


def create_vit(
    preset: str | None = None, cls: type[VisionTransformer] = VisionTransformer, **overrides: Any
) -> VisionTransformer:
    """Build a Vision Transformer and its encoder from one of `PRESETS`.

    Args:
        preset: a key of `PRESETS`, such as "tiny_patch4_32"; without one, the overrides give at least `dim`, `depth`
            and `heads`.
        cls: the class to build, `VisionTransformer` or one derived from it.
        overrides: arguments of `VisionTransformer` (all but the encoder) or of `Encoder` that differ from the
            preset's. `dropout` goes to both; `dim`, `depth` and `heads` describe the encoder.

    Raises:
        ValueError: an unknown preset or argument, or values that the two classes refuse.
    """
    arguments = vit_arguments(preset, **overrides)
    encoder = Encoder(**{n: arguments[n] for n in signature(Encoder).parameters})
    names = [n for n in signature(VisionTransformer).parameters if n != "encoder"]
    return cls(encoder, **{n: arguments[n] for n in names})


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(choices)}")
