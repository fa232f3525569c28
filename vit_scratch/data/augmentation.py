"""Augmentation: of single images by torchvision, of whole batches on the device.

A batch is augmented per sample: each image draws its own shift, flip and rectangle, and a few share their random
operations. All draws come from torch's CPU generator inside `seeded`, so that they are a function of the seed, whatever
the device, the number of workers, and the number of processes among which a batch is divided: each of these draws for
the whole batch, which takes no time, and augments the images that are its own.
Shapes: B batch, C channels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

SHARING = 4
"""Images of a batch that share the draws of random operations."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator inside the block; afterwards it is as it was before."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def sample_transform(
    size: tuple[int, int],
    *,
    min_crop_area: float = 1.0,
    interpolation: str = "bicubic",
) -> Callable[[Tensor], Tensor] | None:
    """What is done to one image of bytes (C, height, width), by torchvision; None where that is nothing.

    Args:
        size: (height, width) of the result.
        min_crop_area: smallest share of the image that a random resized crop keeps; 1 for no such crop.
        interpolation: of that crop, "nearest", "bilinear" or "bicubic".
    """
    if min_crop_area == 1:
        return None
    mode = v2.InterpolationMode(interpolation)
    return v2.RandomResizedCrop(size, scale=(min_crop_area, 1.0), interpolation=mode)


class SmallerFirst:
    """Smaller images at the beginning of a training, which take less compute ("EfficientNetV2", section 4).

    Args:
        stages: (size, share of the updates) pairs, in this order, a size being (height, width); after them the images
            are left as they are.
    """

    def __init__(self, stages: list[tuple[tuple[int, int], float]]):
        self.stages = stages

    def __call__(self, images: Tensor, done: float) -> Tensor:
        """Floats (B, C, height, width), and which share of the updates is done -> (B, C, other height, other width)."""
        end = 0.0
        for size, share in self.stages:
            end += share
            if done < end:
                rows, columns = (
                    resizing(old, new, images.device) for old, new in zip(images.shape[2:], size, strict=True)
                )
                return rows @ images @ columns.mT
        return images


@lru_cache
def resizing(length: int, new_length: int, device: torch.device) -> Tensor:
    """The matrix (new length, length) that resizes one side of an image as torch's `interpolate` does.

    Two products with such matrices take a third to a half of the time of `interpolate` on a CPU, and give the same.
    """
    unit = torch.eye(length, device=device).view(1, 1, length, length)
    return F.interpolate(unit, (new_length, length), mode="bilinear", antialias=True)[0, 0]


class BatchTransform:
    """Bytes (B, C, height, width) to what the network takes, augmented where asked.

    In this order: random operations, shift, flip, normalisation, erasing, MixUp or CutMix.

    Args:
        mean, std: per channel, of pixels from 0 to 1.
        policy: "none", "randaugment" (two operations, "RandAugment") or "trivialaugment" (one, "TrivialAugment"), by
            torchvision. Four images that stand together in a batch, which is in random order, share their draws: one
            by one takes as long as training a small model on them.
        magnitude: strength of RandAugment's operations, from 0 to 30.
        shift: move each image by up to so many pixels each way.
        padding: what comes in from outside then, "reflect" for the image's reflection or "zero" for black.
        flip: mirror half of the images, left to right.
        erase: probability of erasing a rectangle of an image ("Random Erasing Data Augmentation").
        mixup, cutmix: parameter of the Beta distribution of "mixup" and "CutMix", 0 for none; with both, each batch
            takes one of the two.
        num_classes: for MixUp and CutMix, whose labels are probabilities (B, classes).
    """

    def __init__(
        self,
        mean: list[float],
        std: list[float],
        *,
        policy: str = "none",
        magnitude: int = 9,
        shift: int = 0,
        padding: str = "reflect",
        flip: bool = False,
        erase: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        num_classes: int = 0,
    ):
        self.mean = torch.tensor(mean).view(-1, 1, 1) * 255
        self.std = torch.tensor(std).view(-1, 1, 1) * 255
        policies = {"randaugment": v2.RandAugment(2, magnitude), "trivialaugment": v2.TrivialAugmentWide()}
        self.policy = policies.get(policy)
        self.shift, self.padding, self.flip, self.erase = shift, padding, flip, erase
        mixes = [
            kind(alpha=alpha, num_classes=num_classes)
            for kind, alpha in ((v2.MixUp, mixup), (v2.CutMix, cutmix))
            if alpha > 0
        ]
        self.mix = v2.RandomChoice(mixes) if mixes else None

    def __call__(
        self, images: Tensor, labels: Tensor, seed: int = 0, places: Tensor | None = None, total: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Augment a batch, or those images of a larger one that are here.

        Args:
            images: bytes (B, C, height, width).
            labels: (B,).
            seed: of the batch.
            places: where each of them stands in the larger batch, (B,), ascending; with MixUp or CutMix each is mixed
                with the one in front of it, the first with the last.
            total: images of the larger batch; without it these are all.

        Returns:
            Floats of the same shape, and labels (B,) or (B, classes).
        """
        total = len(images) if total is None else total
        with seeded(seed):
            if self.policy is not None:
                places = torch.arange(total) if places is None else places
                group_seeds = torch.randint(2**31, (-(-total // SHARING),)).tolist()
                groups, sizes = (places // SHARING).unique_consecutive(return_counts=True)
                parts = zip(groups.tolist(), images.split(sizes.tolist()), strict=True)
                images = torch.cat([images[:0], *(self.operate(group_seeds[g], part) for g, part in parts)])
            if self.shift or self.flip:
                images = shift_and_flip(images, self.shift, self.flip, self.padding, places, total)
            x = images.float().sub_(self.mean.to(images.device)).div_(self.std.to(images.device))
            if self.erase:
                x = erase(x, self.erase, places, total)
            if self.mix is not None:
                x, labels = self.mix(x, labels)
        return x, labels

    def operate(self, seed: int, images: Tensor) -> Tensor:
        """Apply the random operations that a seed stands for to images of bytes (B, C, height, width)."""
        assert self.policy is not None
        with seeded(seed):
            return self.policy(images)


def shift_and_flip(
    images: Tensor,
    shift: int,
    flip: bool,
    padding: str = "reflect",
    places: Tensor | None = None,
    total: int | None = None,
) -> Tensor:
    """Move and mirror each image of a batch (B, C, height, width) by its own draw, in one gather.

    Args:
        shift: at most so many pixels in each direction.
        flip: mirror each image left to right with probability one half.
        padding: what lies outside of the image, "reflect" for its reflection or "zero" for black.
        places, total: as `BatchTransform.__call__`; by default all of a batch.
    """
    batch, channels, height, width = images.shape
    total = batch if total is None else total
    draws = torch.randint(2 * shift + 1, (2, total))
    if flip:
        draws[1] += (torch.rand(total) < 0.5) * (2 * shift + 1)
    down, right = draws if places is None else draws[:, places]
    if padding == "zero":
        images = F.pad(images, (0, 1, 0, 1))  # black, for what comes from outside
    rows = _sources(height, shift, padding).index_select(0, down)  # (B, height)
    columns = _sources(width, shift, padding).index_select(0, right)  # (B, width)
    index = torch.add(columns[:, None, :], rows[:, :, None], alpha=images.shape[3])  # (B, height, width)
    flat = index.to(images.device, non_blocking=True).flatten(1)[:, None].expand(-1, channels, -1)
    return images.flatten(2).gather(2, flat).view(batch, channels, height, width)


@lru_cache
def _sources(length: int, shift: int, padding: str) -> Tensor:
    """Which pixels of a side a moved image shows: (2 * (2 * shift + 1), length), from a move by -shift to one by shift,
    and the same mirrored.

    Those from outside are reflected at the first and the last, as often as it takes, or `length` if padding is "zero".
    """
    places = torch.arange(-shift, length + shift)
    if padding == "zero":
        places[(places < 0) | (places >= length)] = length
    else:
        last = max(length - 1, 1)
        places = (last - (last - places.abs() % (2 * last)).abs()).clamp(max=length - 1)
    moved = places.unfold(0, length, 1)
    return torch.cat([moved, moved.flip(1)])


def erase(images: Tensor, probability: float, places: Tensor | None = None, total: int | None = None) -> Tensor:
    """Set a random rectangle of some images (B, C, height, width) to 0.

    Its share of the area is uniform from 0.02 to 0.33, the logarithm of its aspect ratio uniform from 0.3 to 3.3, as
    torchvision's `RandomErasing` has them. `places` and `total` are as in `BatchTransform.__call__`; by default all of
    a batch.
    """
    batch, _, height, width = images.shape
    total, own = batch if total is None else total, slice(None) if places is None else places
    area = torch.empty(total, 1).uniform_(0.02, 0.33) * height * width
    ratio = torch.empty(total, 1).uniform_(torch.tensor(0.3).log().item(), torch.tensor(3.3).log().item()).exp()
    h = (area * ratio).sqrt().round().clamp(1, height)  # (B, 1)
    w = (area / ratio).sqrt().round().clamp(1, width)
    top = (torch.rand(total, 1) * (height - h + 1)).floor()
    left = (torch.rand(total, 1) * (width - w + 1)).floor()
    chosen = torch.rand(total, 1) < probability
    rows, columns = torch.arange(height), torch.arange(width)
    in_rows = ((rows >= top) & (rows < top + h) & chosen)[own]  # (B, height)
    in_columns = ((columns >= left) & (columns < left + w))[own]  # (B, width)
    mask = in_rows[:, None, :, None] & in_columns[:, None, None, :]  # (B, 1, height, width)
    return images.masked_fill(mask.to(images.device, non_blocking=True), 0.0)
