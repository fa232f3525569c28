"""Batches for training and evaluation, from memory or from files read by worker processes.

Order and augmentation are functions of (seed, epoch, place in the order), so that a run can go on in the middle of an
epoch, and gives the same batches with any number of workers, and together with any number of processes, which divide
each batch among them.
Shapes: B batch, C channels.
"""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2 import functional as F

from vit_scratch.data.augmentation import BatchTransform, seeded
from vit_scratch.data.images import CHANNELS, ImageError, Mode, fit
from vit_scratch.data.sources import ImageSource

Batch = tuple[Tensor, Tensor, int]
"""Images (B, C, height, width), labels (B,) or (B, classes), and how many images the batch has in all processes."""

SampleTransform = Callable[[Tensor], Tensor]


@dataclass
class ImageFormat:
    """How images must look to a model."""

    mode: Mode
    image_size: tuple[int, int]
    interpolation: str

    def __call__(self, source: ImageSource, index: int) -> Tensor:
        """Read an image as bytes (C, height, width). Raises ImageError where it can't be read."""
        return F.pil_to_tensor(fit(source.read(index, self.mode), self.image_size, self.interpolation))


def read_all(source: ImageSource, work: Callable[[int], object], skip_broken: bool) -> list[tuple[int, str]]:
    """Call `work` with the index of every image, on several threads.

    Args:
        source: the images.
        work: reads an image and does what is to be done with it.
        skip_broken: go on where an image can't be read.

    Returns:
        Index and fault of each image that can't be read.

    Raises:
        ImageError: there are any, and they are not to be skipped.
    """

    def attempt(index: int) -> str | None:
        try:
            work(index)
        except ImageError as error:
            return str(error)
        return None

    with ThreadPoolExecutor() as pool:
        faults = [(i, fault) for i, fault in enumerate(pool.map(attempt, range(len(source)))) if fault]
    if faults and not skip_broken:
        shown = "".join(f"\n  {fault}" for _, fault in faults[:5])
        more = f"\n  and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ImageError(
            f"{len(faults)} of {len(source)} images can't be read:{shown}{more}\n"
            "Mend or remove them, or pass --data.skip_broken true to go on without them"
        )
    return faults


@dataclass
class HeldImages:
    """Images in memory: bytes (images, C, height, width) and labels (images,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)


def open_images(
    source: ImageSource, form: ImageFormat, *, in_memory: bool, skip_broken: bool
) -> tuple[ImageSource | HeldImages, list[str]]:
    """Read all images of a source into memory, or with `skip_broken` once to find those that can't be read.

    Returns:
        The images in memory, or the source of those that can be read; and the faults of the others.

    Raises:
        ImageError: as `read_all`.
    """
    if not in_memory:
        faults = read_all(source, lambda i: source.read(i, form.mode), True) if skip_broken else []
        kept = np.setdiff1d(np.arange(len(source)), [i for i, _ in faults])
        return source.subset(kept), [fault for _, fault in faults]
    if isinstance(source.images, np.ndarray):
        pixels = source.images.reshape(*source.images.shape[:3], -1)  # grey ones come without channels
        if pixels.shape[1:] == (*form.image_size, CHANNELS[form.mode]):  # nothing to convert
            images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
            return HeldImages(images.clone(memory_format=torch.contiguous_format), torch.from_numpy(source.labels)), []
    images = torch.empty(len(source), CHANNELS[form.mode], *form.image_size, dtype=torch.uint8)

    def work(index: int) -> None:
        images[index] = form(source, index)

    faults = read_all(source, work, skip_broken)
    if not faults:
        return HeldImages(images, torch.from_numpy(source.labels)), []
    held = torch.ones(len(source), dtype=torch.bool)
    held[[i for i, _ in faults]] = False
    return HeldImages(images[held], torch.from_numpy(source.labels)[held]), [fault for _, fault in faults]


def channel_statistics(images: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of bytes (images, C, height, width), on the scale from 0 to 1."""
    means, deviations = [], []
    for channel in images.unbind(1):
        counts = torch.bincount(channel.flatten(), minlength=256).double()  # exact, whatever the number of pixels
        share = counts / counts.sum()
        levels = torch.arange(256, dtype=torch.float64) / 255
        mean = (share * levels).sum()
        means.append(mean.item())
        # A channel that never changes would divide by zero.
        deviations.append(max((share * (levels - mean) ** 2).sum().sqrt().item(), 1 / 255))
    return means, deviations


def seeds(count: int, *entropy: int) -> np.ndarray:
    """So many independent seeds, a function of `entropy` (the run's seed, the epoch, ...)."""
    return np.random.SeedSequence(entropy).generate_state(count, np.uint32)


class UnreadableImageError(RuntimeError):
    """An image that can't be read, found while training is under way."""


Chunk = tuple[np.ndarray, np.ndarray]
"""Indices of the images of a batch, and a seed for each."""


class DeadWorkerError(RuntimeError):
    """A process that reads images has ended before its work was done."""


class Loader:
    """What the two loaders share: how many batches, in which order, and with which seeds.

    Args:
        count: number of images.
        shape: of an image, (C, height, width).
        batch_size: images per batch, of all processes together; the last batch of an epoch holds what is left.
        transform: from bytes to what the network takes.
        seed: of order and augmentation; None for the given order and no randomness.
        device: where the batches go.
        share: this process's number and how many there are; each gets its part of each batch, which may be empty in the
            last one.
    """

    def __init__(
        self,
        count: int,
        shape: tuple[int, ...],
        batch_size: int,
        transform: BatchTransform,
        seed: int | None,
        device: torch.device,
        share: tuple[int, int],
    ):
        self.count, self.shape, self.batch_size = count, shape, batch_size
        self.transform, self.seed, self.device, self.share = transform, seed, device, share

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return -(-self.count // self.batch_size)

    def plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Order of the images, a seed for each place in that order, and a seed for each batch."""
        if self.seed is None:
            nothing = np.zeros(self.count, np.uint32)
            return np.arange(self.count), nothing, nothing
        order = np.random.default_rng([self.seed, epoch, 0]).permutation(self.count)
        return order, seeds(self.count, self.seed, epoch, 1), seeds(len(self), self.seed, epoch, 2)

    def own(self, total: int) -> range:
        """Places of a batch of so many images that are this process's."""
        number, processes = self.share
        return range(total * number // processes, total * (number + 1) // processes)

    def fetch(self, chunks: list[Chunk]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield bytes (B, C, height, width) and labels (B,) on the device for each chunk; none is empty."""
        raise NotImplementedError

    def shapes(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """What batches an epoch consists of, of all processes together: images and labels without data, on the meta
        device, and how many."""
        whole, rest = divmod(self.count, self.batch_size)
        for batch, number in ((self.batch_size, whole), (rest, 1)):
            if batch and number:
                labels = torch.empty(batch, dtype=torch.long, device="meta")
                yield torch.empty(batch, *self.shape, device="meta"), labels, number

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start` on."""
        order, sample_seeds, batch_seeds = self.plan(epoch)
        divided = self.share[1] > 1
        mixed = divided and self.transform.mix is not None
        places, chunks = [], []
        for first in range(start * self.batch_size, self.count, self.batch_size):
            own = self.own(min(self.batch_size, self.count - first))
            # What is mixed needs the image in front of it, which may be another process's.
            before = [(own.start - 1) % min(self.batch_size, self.count - first)] if mixed and own else []
            places.append(np.array([*before, *own], dtype=np.int64))
            chunks.append((order[first + places[-1]], sample_seeds[first + places[-1]]))
        fetched = self.fetch([chunk for chunk in chunks if len(chunk[0])])
        for number, own_places in enumerate(places, start):
            total = min(self.batch_size, self.count - number * self.batch_size)
            if len(own_places):
                images, labels = next(fetched)
            else:
                images = torch.empty(0, *self.shape, dtype=torch.uint8, device=self.device)
                labels = torch.empty(0, dtype=torch.long, device=self.device)
            part = (torch.from_numpy(own_places), total) if divided else ()
            x, y = self.transform(images, labels, int(batch_seeds[number]), *part)
            extra = len(x) - len(self.own(total))
            yield x[extra:], y[extra:], total


class MemoryLoader(Loader):
    """Batches of images that are held in memory, on the device.

    Args:
        held: the images.
        sample_transform: applied to each image by itself, None for nothing.
        others: as `Loader`.
    """

    def __init__(
        self,
        held: HeldImages,
        batch_size: int,
        transform: BatchTransform,
        *,
        sample_transform: SampleTransform | None = None,
        seed: int | None = None,
        device: torch.device,
        share: tuple[int, int] = (0, 1),
    ):
        super().__init__(len(held), held.images.shape[1:], batch_size, transform, seed, device, share)
        self.images, self.labels = held.images.to(device), held.labels.to(device)
        self.sample_transform = sample_transform

    def fetch(self, chunks: list[Chunk]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield bytes and labels, gathered on the device."""
        for indices, sample_seeds in chunks:
            index = torch.from_numpy(indices).to(self.device, non_blocking=True)
            images = self.images.index_select(0, index)  # in a fifth of the time of indexing, on a CPU
            if self.sample_transform is not None:
                pairs = zip(images, sample_seeds.tolist(), strict=True)
                images = torch.stack([transform_sample(self.sample_transform, i, s) for i, s in pairs])
            yield images, self.labels.index_select(0, index)


class StreamLoader(Loader):
    """Batches of images that worker processes read from their files.

    Args:
        source: the images.
        form: how they must look.
        sample_transform: applied to each image by itself in the worker, None for nothing.
        crops: the sample transform crops and resizes, so that it gets images of their original size.
        workers: number of processes; 0 reads in this one.
        others: as `Loader`.

    Raises, while it runs:
        UnreadableImageError: an image that can't be read.
        DeadWorkerError: a worker that was killed.
    """

    def __init__(
        self,
        source: ImageSource,
        form: ImageFormat,
        batch_size: int,
        transform: BatchTransform,
        *,
        sample_transform: SampleTransform | None = None,
        crops: bool = False,
        seed: int | None = None,
        workers: int = 0,
        device: torch.device,
        share: tuple[int, int] = (0, 1),
    ):
        shape = (CHANNELS[form.mode], *form.image_size)
        super().__init__(len(source), shape, batch_size, transform, seed, device, share)
        self.order = _Order()
        self.loader = DataLoader(
            _Samples(source, form, sample_transform, crops),  # its index has two parts
            batch_sampler=self.order,
            num_workers=workers,
            collate_fn=_collate,
            worker_init_fn=_leave_signals_to_the_training_process,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
            # Otherwise each epoch draws a seed from torch's global generator, and dropout differs after a resume.
            generator=torch.Generator(),
        )

    def fetch(self, chunks: list[Chunk]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield bytes and labels as the workers deliver them."""
        self.order.chunks = chunks
        for batch in self.deliver():
            if isinstance(batch, str):
                raise UnreadableImageError(
                    f"{batch}\nMend it and go on with --resume, or start anew with --data.skip_broken true, "
                    "which looks for all such images beforehand"
                )
            images, labels = batch
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def deliver(self) -> Iterator[Any]:
        """Yield what the workers collate. Raises DeadWorkerError where one of them ends."""
        batches = iter(self.loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if "worker" not in str(error):
                    raise
                raise DeadWorkerError(
                    f"a process that reads images has ended ({str(error).strip()}). Often there was too little memory, "
                    "or shared memory (/dev/shm): go on with --resume and a lower --data.workers, 0 for none"
                ) from error
            yield batch


def make_loader(
    images: ImageSource | HeldImages,
    form: ImageFormat,
    batch_size: int,
    transform: BatchTransform,
    *,
    sample_transform: SampleTransform | None = None,
    crops: bool = False,
    seed: int | None = None,
    workers: int = 0,
    device: torch.device,
    share: tuple[int, int] = (0, 1),
) -> Loader:
    """The loader for images in memory or in files; arguments as `MemoryLoader` and `StreamLoader`."""
    options: dict[str, Any] = {"sample_transform": sample_transform, "seed": seed, "device": device, "share": share}
    if isinstance(images, HeldImages):
        return MemoryLoader(images, batch_size, transform, **options)
    return StreamLoader(images, form, batch_size, transform, crops=crops, workers=workers, **options)


def transform_sample(transform: SampleTransform, image: Tensor, seed: int) -> Tensor:
    """Apply a random transform to one image, as a function of the seed."""
    with seeded(seed):
        return transform(image)


class _Order:
    """Hands out (index, seed) pairs in batches; these change from epoch to epoch, the workers stay."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for indices, sample_seeds in self.chunks:
            yield list(zip(indices.tolist(), sample_seeds.tolist(), strict=True))


class _Samples(Dataset):
    """Reads and transforms one image in a worker; a fault travels as text, so that it arrives without a traceback."""

    def __init__(self, source: ImageSource, form: ImageFormat, transform: SampleTransform | None, crops: bool):
        self.source, self.form, self.transform, self.crops = source, form, transform, crops

    def __getitem__(self, entry: tuple[int, int]) -> tuple[Tensor, int] | str:
        index, seed = entry
        try:
            image = (
                F.pil_to_tensor(self.source.read(index, self.form.mode))
                if self.crops
                else self.form(self.source, index)
            )
        except ImageError as error:
            return str(error)
        if self.transform is not None:
            image = transform_sample(self.transform, image, seed)
        return image, int(self.source.labels[index])


def _leave_signals_to_the_training_process(worker: int) -> None:
    """Keep Ctrl-C, and signals to the process group, from a worker: the training process saves and ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the handler that a fork has taken over
    if hasattr(os, "setpgrp"):
        os.setpgrp()


def _collate(samples: list[tuple[Tensor, int] | str]) -> tuple[Tensor, Tensor] | str:
    images, labels = [], []
    for sample in samples:
        if isinstance(sample, str):
            return sample
        images.append(sample[0])
        labels.append(sample[1])
    return torch.stack(images), torch.tensor(labels)
