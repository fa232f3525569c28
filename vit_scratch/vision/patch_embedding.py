"""Makes token vectors of images: one linear map of each patch, or a few convolutions.

Shapes: B batch, C channels, P patch (height P_h, width P_w), N patches, D model width.
"""

from collections import OrderedDict
from itertools import pairwise

import torch
from einops import rearrange
from torch import Tensor, nn

from vit_scratch.transformer.linear import Linear

Size = int | tuple[int, int]
"""A (height, width) pair, or one number for both."""


def as_pair(name: str, size: Size) -> tuple[int, int]:
    """A size as (height, width).

    Raises:
        ValueError: it is neither a positive whole number nor a pair of them; the message starts with `name`.
    """
    pair = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(s, int) and s > 0 for s in pair):
        raise ValueError(f"{name}={size} is not a size; give a positive whole number or a (height, width) pair")
    return pair


class PatchEmbedding(nn.Module):
    """One linear map of each patch's pixels ("An Image is Worth 16x16 Words", equation 1).

    The patches don't overlap, so that this is a reshape and one matrix product; the weights are those of a
    convolution with kernel and stride P, flattened.

    Args:
        image_size: of every image, in pixels.
        patch_size: in pixels; divides the image size.
        in_channels: number of channels C.
        dim: model width D.
        any_size: take images of other sizes, too, if the patch divides them.
        bias: whether the map has a bias.

    Attributes:
        grid: (rows, columns) of patches.

    Raises:
        ValueError: the patch does not divide the image; the message names the nearest sizes that would do.
    """

    def __init__(
        self,
        image_size: Size,
        patch_size: Size,
        in_channels: int,
        dim: int,
        *,
        any_size: bool = False,
        bias: bool = True,
    ):
        super().__init__()
        self.any_size = any_size
        self.patch_size = as_pair("patch_size", patch_size)
        self.in_channels = in_channels
        self.set_image_size(image_size)
        self.projection = Linear(in_channels * self.patch_size[0] * self.patch_size[1], dim, bias)

    def set_image_size(self, image_size: Size) -> tuple[int, int]:
        """Expect images of this size; returns the grid. Raises ValueError where the patch does not divide it."""
        size = as_pair("image_size", image_size)
        for side, image, patch in zip(("height", "width"), size, self.patch_size, strict=True):
            if image % patch:
                raise ValueError(f"image_size={size}: " + self.no_multiple(side, image, patch))
        self.image_size = size
        self.grid = (size[0] // self.patch_size[0], size[1] // self.patch_size[1])
        return self.grid

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, height, width) -> tokens (B, N, D), patches in reading order.

        Raises:
            ValueError: images of another size or number of channels.
        """
        self.check(images)
        height, width = self.patch_size
        patches = rearrange(images, "b c (n h) (m w) -> b (n m) (c h w)", h=height, w=width)
        return self.projection(patches)

    def no_multiple(self, side: str, image: int, patch: int) -> str:
        """What is wrong with a side of an image that its patch does not divide, and which sizes would do."""
        near = [n for n in (image // patch * patch, (image // patch + 1) * patch) if n]
        return (
            f"the {side} {image} is not a multiple of the patch {side} {patch} (patch_size={self.patch_size}); "
            f"nearest that are: {' and '.join(map(str, near))}"
        )

    def check(self, images: Tensor) -> None:
        """Raise ValueError unless `images` have the type, the size and the number of channels that this takes."""
        needed = self.projection.weight.dtype
        if not images.is_floating_point():
            raise ValueError(
                f"images are {images.dtype}; this model takes floating-point numbers, normalised as in its training, "
                "such as (images / 255 - mean) / std"
            )
        if images.dtype != needed and not torch.is_autocast_enabled(images.device.type):
            raise ValueError(f"images are {images.dtype} and the model {needed}; convert one of them with .to(dtype)")
        size = tuple(images.shape[-2:]) if self.any_size else self.image_size
        expected = (self.in_channels, *size)
        if images.dim() != 4 or tuple(images.shape[1:]) != expected:
            raise ValueError(
                f"images have shape {tuple(images.shape)}; this model takes (B, C, height, width) = (B, "
                f"{', '.join(map(str, expected))}); resize them, or build the model with another image_size, "
                "or any_size=True"
            )
        for side, image, patch in zip(("height", "width"), size, self.patch_size, strict=True):
            if image % patch or not image:
                raise ValueError(f"images have shape {tuple(images.shape)}: " + self.no_multiple(side, image, patch))


class ConvolutionalStem(PatchEmbedding):
    """Convolutions of 3 x 3 that halve the image until one pixel is left of each patch, then a linear map.

    Tokens then overlap, and neighbouring pixels are compared before they are put together ("Early Convolutions Help
    Transformers See Better"; pooling as in "Escaping the Big Data Paradigm with Compact Transformers"). The first
    convolution, D / P wide, keeps the size; each that follows doubles the width and is followed by a max-pooling of
    2 x 2, up to the width D. A batch norm and GELU stand behind each.

    Args:
        patch_size: in pixels, a power of two, equal in both directions; divides the image size.
        dim: model width D, a multiple of the patch size.
        others: as `PatchEmbedding`.

    Raises:
        ValueError: as `PatchEmbedding`, and for a patch or a width that can't be halved like this.
    """

    def __init__(
        self,
        image_size: Size,
        patch_size: Size,
        in_channels: int,
        dim: int,
        *,
        any_size: bool = False,
        bias: bool = True,
    ):
        super().__init__(image_size, patch_size, in_channels, dim, any_size=any_size, bias=bias)
        side = self.patch_size[0]
        if self.patch_size != (side, side) or side & (side - 1):
            raise ValueError(
                f"patch_size={self.patch_size} can't be reached by halving; a convolutional stem needs a power of two"
            )
        if dim % side:
            raise ValueError(
                f"dim={dim} is not a multiple of patch_size={side}: the first convolution of the stem is dim / "
                "patch_size wide"
            )
        widths = [in_channels, *(dim // (side >> i) for i in range(side.bit_length()))]
        self.blocks = nn.Sequential()
        for i, (before, after) in enumerate(pairwise(widths)):
            block = {
                "convolution": nn.Conv2d(before, after, 3, padding=1, bias=False),
                "pool": nn.MaxPool2d(2) if i else nn.Identity(),
                "norm": nn.BatchNorm2d(after),
                "activation": nn.GELU(),
            }
            self.blocks.append(nn.Sequential(OrderedDict(block)))
        self.projection = Linear(dim, dim, bias)

    def forward(self, images: Tensor) -> Tensor:
        """As `PatchEmbedding.forward`."""
        self.check(images)
        x = self.blocks(images.contiguous(memory_format=torch.channels_last))  # (B, D, rows, columns)
        return self.projection(rearrange(x, "b d n m -> b (n m) d"))
