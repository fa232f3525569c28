"""Cuts images into patches and maps each patch to a token vector.

Shapes: B batch, C channels, P patch (height P_h, width P_w), N patches, D model width.
"""

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

    Attributes:
        grid: (rows, columns) of patches.

    Raises:
        ValueError: the patch does not divide the image; the message names the nearest sizes that would do.
    """

    def __init__(self, image_size: Size, patch_size: Size, in_channels: int, dim: int, *, any_size: bool = False):
        super().__init__()
        self.any_size = any_size
        self.image_size, self.patch_size = as_pair("image_size", image_size), as_pair("patch_size", patch_size)
        self.in_channels = in_channels
        for side, image, patch in zip(("height", "width"), self.image_size, self.patch_size, strict=True):
            if image % patch:
                raise ValueError(f"image_size={self.image_size}: " + self.no_multiple(side, image, patch))
        self.grid = (self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1])
        self.projection = Linear(in_channels * self.patch_size[0] * self.patch_size[1], dim)

    def no_multiple(self, side: str, image: int, patch: int) -> str:
        """What is wrong with a side of an image that its patch does not divide, and which sizes would do."""
        near = [n for n in (image // patch * patch, (image // patch + 1) * patch) if n]
        return (
            f"the {side} {image} is not a multiple of the patch {side} {patch} (patch_size={self.patch_size}); "
            f"nearest that are: {' and '.join(map(str, near))}"
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, height, width) -> tokens (B, N, D), patches in reading order.

        Raises:
            ValueError: images of another size or number of channels.
        """
        size = tuple(images.shape[-2:]) if self.any_size else self.image_size
        expected = (self.in_channels, *size)
        if images.dim() != 4 or tuple(images.shape[1:]) != expected:
            raise ValueError(
                f"images have shape {tuple(images.shape)}; this model takes (B, C, height, width) = (B, "
                f"{', '.join(map(str, expected))}); resize them, or build the model with another image_size, "
                "or any_size=True"
            )
        height, width = self.patch_size
        for side, image, patch in zip(("height", "width"), size, self.patch_size, strict=True):
            if image % patch or not image:
                raise ValueError(f"images have shape {tuple(images.shape)}: " + self.no_multiple(side, image, patch))
        patches = rearrange(images, "b c (n h) (m w) -> b (n m) (c h w)", h=height, w=width)
        return self.projection(patches)
