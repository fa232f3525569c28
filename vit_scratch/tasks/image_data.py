"""The images of a task: from a configuration to batches, for training and for evaluation.

Shapes: B batch, C channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit_scratch.config import ClassificationConfig, DataConfig, EvaluateConfig
from vit_scratch.data.augmentation import BatchTransform, sample_transform
from vit_scratch.data.images import CHANNELS
from vit_scratch.data.loaders import (
    HeldImages,
    ImageFormat,
    Loader,
    channel_statistics,
    make_loader,
    open_images,
)
from vit_scratch.data.sources import ImageDataset, ImageSource, load
from vit_scratch.tasks.classifier import IMAGENET, Classifier
from vit_scratch.training import distributed

MEMORY_LIMIT = 2 * 1024**3
"""Bytes of images that are held in memory unless the configuration says otherwise."""
EVALUATION_BATCH = 256
"""Images per forward pass in evaluation during training, as `EvaluateConfig` has it."""


@dataclass
class Data:
    """The loaders of a run, and what they found."""

    train: Loader
    val: Loader | None
    test: Loader | None
    mean: list[float]
    std: list[float]
    notes: list[str]

    def identity(self) -> dict[str, Any]:
        """What tells these data from others: how many images there are, and their statistics."""
        counts = {n: loader.count if loader else 0 for n, loader in (("train", self.train), ("val", self.val))}
        return counts | {"mean": self.mean, "std": self.std}


def prepare(
    config: ClassificationConfig,
    dataset: ImageDataset,
    form: ImageFormat,
    device: torch.device,
    initial: Classifier | None = None,
) -> Data:
    """Read a data set and wrap it for training and evaluation, normalised as the model to begin with was trained.

    Raises:
        ImageError: images that can't be read, unless they are to be skipped.
        ValueError: a hold-out that is not possible.
    """
    dataset.hold_out(config.data.hold_out, config.data.split_seed)
    in_memory = hold_in_memory(config.data, form, sum(len(s) for s in (dataset.train, dataset.val, dataset.test) if s))
    train, notes = open_part("train", dataset.train, config.data, form, in_memory)
    if initial is not None:
        mean, std = initial.mean, initial.std
    elif isinstance(train, HeldImages):
        mean, std = channel_statistics(train.images)
    else:
        mean, std = IMAGENET if form.mode == "RGB" else ([0.5] * CHANNELS[form.mode], [0.25] * CHANNELS[form.mode])
    a = config.augment
    augmented = BatchTransform(
        mean,
        std,
        policy=a.policy,
        magnitude=a.magnitude,
        shift=a.shift,
        padding=a.padding,
        flip=a.flip,
        erase=a.erase,
        mixup=a.mixup,
        cutmix=a.cutmix,
        num_classes=len(dataset.classes),
    )
    train_loader = make_loader(
        train,
        form,
        config.train.batch_size,
        augmented,
        sample_transform=sample_transform(
            form.image_size,
            min_crop_area=a.min_crop_area,
            interpolation=form.interpolation,
        ),
        crops=a.min_crop_area < 1,
        seed=config.seed,
        workers=config.data.workers,
        device=device,
        share=distributed.process(),
    )
    loaders: dict[str, Loader | None] = {}
    for part, source in (("val", dataset.val), ("test", dataset.test)):
        loader = None
        if source is not None:
            images, faults = open_part(part, source, config.data, form, in_memory)
            notes += faults
            loader = plain_loader(images, form, BatchTransform(mean, std), config.data.workers, device)
        loaders[part] = loader
    return Data(train_loader, loaders["val"], loaders["test"], mean, std, [*dataset.notes, *notes])


def hold_in_memory(data: DataConfig, form: ImageFormat, count: int) -> bool:
    """Whether so many images are to be held in memory."""
    if data.in_memory is not None:
        return data.in_memory
    height, width = form.image_size
    return max(height, width) <= 64 and count * CHANNELS[form.mode] * height * width <= MEMORY_LIMIT


def open_part(
    part: str, source: ImageSource, data: DataConfig, form: ImageFormat, in_memory: bool
) -> tuple[ImageSource | HeldImages, list[str]]:
    """`open_images`, and a note on the images that were left out. Raises ImageError, also where no image is left."""
    images, faults = open_images(source, form, in_memory=in_memory, skip_broken=data.skip_broken)
    if not len(images):
        raise ValueError(f"none of the {len(source)} {part} images can be read")
    listed = "".join(f"\n  {fault}" for fault in faults)
    return images, [f"left out {len(faults)} {part} images that can't be read:{listed}"] if faults else []


def plain_loader(
    images: ImageSource | HeldImages,
    form: ImageFormat,
    transform: BatchTransform,
    workers: int,
    device: torch.device,
    batch_size: int = EVALUATION_BATCH,
) -> Loader:
    """Batches of images in their order, for evaluation; each process gets its part of each."""
    return make_loader(images, form, batch_size, transform, workers=workers, device=device, share=distributed.process())


@dataclass
class EvaluationImages:
    """Parts of a data set as a trained model takes them.

    Attributes:
        classifier: the model, and how it takes images.
        data: the images, and how they are read.
        parts: the images by the name of their part, such as "test".
        batch_size: images per forward pass.
        device: where to compute.
    """

    classifier: Classifier
    data: DataConfig
    parts: dict[str, ImageSource | HeldImages]
    batch_size: int
    device: torch.device

    @property
    def changed(self) -> bool:
        """Whether these are other data than those that the model was trained on."""
        return (self.data.kind, self.data.root) != (self.classifier.data.kind, self.classifier.data.root)

    def pixels(self, part: str, index: int) -> np.ndarray:
        """An image as the model takes it, before normalisation: bytes (height, width, C)."""
        images = self.parts[part]
        held = images.images[index] if isinstance(images, HeldImages) else self.classifier.form(images, index)
        return held.permute(1, 2, 0).cpu().numpy()

    def loader(self, part: str, change: Callable[[Tensor], Tensor] | None = None) -> Loader:
        """Batches of a part, of changed images where there is a change: bytes (B, C, height, width) -> the same."""
        transform = ChangedFirst(change, self.classifier.mean, self.classifier.std)
        form, workers = self.classifier.form, self.data.workers
        return plain_loader(self.parts[part], form, transform, workers, self.device, self.batch_size)

    def loader_of(self, source: ImageSource) -> Loader:
        """Batches of other images, which are read into memory."""
        held, _ = open_images(source, self.classifier.form, in_memory=True, skip_broken=False)
        return replace(self, parts={"": held}).loader("")


class ChangedFirst(BatchTransform):
    """Normalises images as `BatchTransform`, after a change of their bytes (B, C, height, width)."""

    def __init__(self, change: Callable[[Tensor], Tensor] | None, mean: list[float], std: list[float]):
        super().__init__(mean, std)
        self.change = change

    def __call__(self, images: Tensor, labels: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        """As `BatchTransform.__call__`."""
        return super().__call__(images if self.change is None else self.change(images), labels, *others)


def evaluation_images(
    config: EvaluateConfig,
    classifier: Classifier,
    parts: list[str],
    device: torch.device,
    *,
    optional: Sequence[str] = (),
) -> EvaluationImages:
    """Find and open parts of the data that a model was trained on, or of others that the configuration names.

    Args:
        config: which data.
        classifier: the model; the data must have its classes, but for a probe.
        parts: "train", "val" or "test".
        device: where to compute.
        optional: more of them, which may be missing.

    Raises:
        ValueError: data or a part that are not there, or other classes.
    """
    changed = {k: v for k, v in asdict(config.data).items() if v is not None}
    data, wanted = replace(classifier.data, **changed), [*parts, *optional]
    with distributed.first_here_first():
        dataset = load(
            data.kind,
            data.root,
            image_size=classifier.form.image_size,
            fake_images=data.fake_images,
            classes=None if config.probe else classifier.classes,
            parts=("train", *parts, *optional) if "val" in wanted else tuple(parts),
            allow_missing_classes=data.allow_missing_classes,
        )
    if "val" in parts or ("val" in optional and len(dataset.train)):
        dataset.hold_out(data.hold_out, data.split_seed)
    for note in [*[f"data.{k} is {v}, other than in training" for k, v in changed.items()], *dataset.notes]:
        print(f"note: {note}")
    opened = {}
    for part in wanted:
        source: ImageSource | None = getattr(dataset, part)
        if source is None or not len(source):
            if part in optional:
                continue
            raise ValueError(f"{data.kind} in {data.root} has no {part} images; choose another --split or --data.root")
        in_memory = hold_in_memory(data, classifier.form, len(source))
        opened[part], notes = open_part(part, source, data, classifier.form, in_memory)
        for note in notes:
            print(f"note: {note}")
    return EvaluationImages(classifier, data, opened, config.batch_size, device)
