"""Where images come from: the data sets by name, their classes, and the split of the training set.

Every data set ends as one or more `ImageSource`: images that can be read one by one, with labels known beforehand.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS

from vit_scratch.data.images import Mode, open_file, read

Pair = tuple[int, int]


class ImageSource:
    """Images that are read on request.

    Args:
        images: paths of files, or an array (n, height, width) or (n, height, width, C) of bytes.
        labels: class index of each image.
    """

    def __init__(self, images: Sequence[str] | np.ndarray, labels: Sequence[int] | np.ndarray):
        self.images = images
        self.labels = np.asarray(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int, mode: Mode) -> Image.Image:
        """The image as Pillow image of `mode`. Raises ImageError, which names it, where it can't be read."""
        image = self.images[index]
        if isinstance(image, np.ndarray):
            return read(f"image {index}", partial(Image.fromarray, image), mode)
        return read(image, partial(open_file, image), mode)

    def subset(self, indices: np.ndarray) -> "ImageSource":
        """The source with only the images at `indices`, in that order."""
        images = self.images[indices] if isinstance(self.images, np.ndarray) else [self.images[i] for i in indices]
        return ImageSource(images, self.labels[indices])


NATIVE: dict[str, tuple[Pair | None, Mode]] = {
    "digits": ((8, 8), "L"),
    "cifar10": ((32, 32), "RGB"),
    "cifar100": ((32, 32), "RGB"),
    "fake": (None, "RGB"),
    "imagefolder": (None, "RGB"),
}
"""Size (height, width; None for any) and mode of each kind's images, for where the configuration leaves them open."""


@dataclass
class ImageDataset:
    """A data set: images to learn from, and held-out and test images where there are any."""

    classes: list[str]
    train: ImageSource
    val: ImageSource | None = None
    test: ImageSource | None = None
    notes: list[str] = field(default_factory=list)

    def hold_out(self, share: float, seed: int) -> None:
        """Move a share of the training images to `val`, unless there is a `val` already. Raises as `split`."""
        if self.val is None:
            learn, held = split(self.train.labels, share, seed)
            if len(held):
                self.train, self.val = self.train.subset(learn), self.train.subset(held)


def load(
    kind: str,
    root: str,
    *,
    image_size: Pair = (32, 32),
    fake_images: int = 1000,
    classes: list[str] | None = None,
    parts: tuple[str, ...] = ("train", "val", "test"),
    allow_missing_classes: bool = False,
) -> ImageDataset:
    """Find a data set by name. No image is decoded yet.

    Args:
        kind: a key of `NATIVE`.
        root: folder of the data; unused for "digits" and "fake".
        image_size: (height, width) of the images of kind "fake".
        fake_images: number of training images of kind "fake"; a fifth as many are test images.
        classes: the classes of a trained model, which those of the data must match.
        parts: folders to look into, for "imagefolder".
        allow_missing_classes: let val and test folders lack some of the classes.

    Raises:
        ValueError: the data are not where they should be, or their classes do not match; the message says what to do.
    """
    if kind == "digits":
        dataset = _digits()
    elif kind in ("cifar10", "cifar100"):
        dataset = _cifar(kind, root)
    elif kind == "fake":
        dataset = _fake(image_size, fake_images)
    elif kind == "imagefolder":
        dataset = _folders(Path(root), classes, parts, allow_missing_classes)
    else:
        raise ValueError(f"data.kind={kind!r} is unknown; choose from {', '.join(NATIVE)}")
    if classes is not None and dataset.classes != classes:
        raise ValueError(f"the classes of {kind} ({_some(dataset.classes)}) are not the model's ({_some(classes)})")
    return dataset


def _digits() -> ImageDataset:
    """1,797 handwritten digits of 8 x 8 pixels, 17 grey levels; a fixed fifth of them, 360 images, is the test set."""
    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8)
    train, test = train_test_split(np.arange(len(pixels)), test_size=360, stratify=digits.target, random_state=0)
    source = ImageSource(pixels, digits.target)
    classes = [str(d) for d in range(10)]
    return ImageDataset(classes, source.subset(np.sort(train)), test=source.subset(np.sort(test)))


def _cifar(kind: str, root: str) -> ImageDataset:
    dataset = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[kind]
    try:
        train, test = (dataset(root, train=part, download=True) for part in (True, False))
    except (OSError, RuntimeError) as error:  # no network, no certificate, a wrong md5, no right to write
        raise ValueError(
            f"{kind} is neither in {Path(root).resolve()} nor could it be downloaded ({error}). "
            f"Place {dataset.filename} (md5 {dataset.tgz_md5}, from {dataset.url}) there; it is unpacked on the next "
            "run. Another folder: --data.root DIR. Without any download: --config configs/digits.yaml"
        ) from error
    return ImageDataset(
        list(train.classes),
        ImageSource(train.data, train.targets),
        test=ImageSource(test.data, test.targets),
    )


def _fake(image_size: Pair, count: int) -> ImageDataset:
    parts = []
    for size, offset in ((count, 0), (max(count // 5, 1), count)):
        fake = datasets.FakeData(size, (3, *image_size), num_classes=10, random_offset=offset)
        images, labels = zip(*fake, strict=True)
        parts.append(ImageSource(np.stack([np.asarray(i) for i in images]), [int(label) for label in labels]))
    return ImageDataset([str(c) for c in range(10)], parts[0], test=parts[1])


def _folders(root: Path, classes: list[str] | None, names: tuple[str, ...], allow_missing: bool) -> ImageDataset:
    """The user's own images, root/train/CLASS/FILE and likewise val/ and test/; classes in alphabetical order."""
    if classes is None:
        if not (root / "train").is_dir():
            raise ValueError(
                f"data.root={root} has no folder 'train'; expected are {root}/train/CLASS/IMAGE and, if you have them, "
                f"{root}/val/CLASS/IMAGE and {root}/test/CLASS/IMAGE"
            )
        classes = sorted(class_folders(root / "train"))
        if len(classes) < 2:
            raise ValueError(f"{root}/train holds {len(classes)} class folders; training needs at least 2")
    parts: dict[str, ImageSource] = {}
    notes = []
    for part in names:
        if not (root / part).is_dir():
            continue
        present = class_folders(root / part)
        extra, missing = sorted(present - set(classes)), [c for c in classes if c not in present]
        if extra:
            raise ValueError(
                f"{root / part} holds folders that are no classes of the model: {_some(extra)}; "
                f"remove or rename them (classes: {_some(classes)})"
            )
        if missing and not allow_missing:
            raise ValueError(
                f"{root / part} lacks a folder for the classes {_some(missing)}; add them, or pass "
                "--data.allow_missing_classes true to go on without (class indices stay as they are)"
            )
        if missing:
            notes.append(f"{part} has no images of the classes {_some(missing)}")
        paths, labels = [], []
        for label, name in enumerate(classes):
            files = image_files(root / part / name)
            if not files and name in present and not allow_missing:
                raise ValueError(
                    f"{root / part / name} holds no image (known endings: {' '.join(IMG_EXTENSIONS)}); add some, "
                    "or pass --data.allow_missing_classes true"
                )
            paths += files
            labels += [label] * len(files)
        parts[part] = ImageSource(paths, labels)
    empty = ImageSource([], [])
    return ImageDataset(classes, parts.get("train", empty), parts.get("val"), parts.get("test"), notes)


def image_files(folder: Path) -> list[str]:
    """Paths of files below a folder whose names end like an image's, without hidden ones and those in hidden folders.

    None where there is no such folder. Links to folders are followed, each folder is entered once, and a link that
    leads nowhere counts, as an image that can't be read.
    """
    found, entered, left = [], set(), [str(folder)] if folder.is_dir() else []
    while left:
        here = left.pop()
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in entered:
            continue
        entered.add((status.st_dev, status.st_ino))
        for entry in os.scandir(here):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                left.append(entry.path)
            elif entry.name.lower().endswith(IMG_EXTENSIONS) and (entry.is_file() or not os.path.exists(entry.path)):
                found.append(entry.path)
    return sorted(found, key=lambda path: path.split(os.sep))


def class_folders(folder: Path) -> set[str]:
    """Names of the folders in a folder, without hidden ones such as .ipynb_checkpoints."""
    return {d.name for d in folder.iterdir() if d.is_dir() and not d.name.startswith(".")}


def _some(names: Sequence[str], limit: int = 8) -> str:
    """At most `limit` names and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more


def split(labels: np.ndarray, hold_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide a training set at random into one part to learn from and one that selects models, class by class.

    Args:
        labels: class index of each image.
        hold_out: share of the images to hold out, from 0 to below 1.
        seed: of the random choice.

    Returns:
        Indices of the images to learn from and of those held out, each in ascending order.

    Raises:
        ValueError: a share outside that range, or too few images of a class.
    """
    if not 0 <= hold_out < 1:
        raise ValueError(f"data.hold_out={hold_out} is not a share of at least 0 and below 1")
    everything = np.arange(len(labels))
    count = round(len(labels) * hold_out)
    if hold_out == 0:
        return everything, everything[:0]
    if count == 0:
        raise ValueError(
            f"data.hold_out={hold_out} of {len(labels)} training images is none; raise it, or set 0 to hold out nothing"
        )
    try:
        learn, held = train_test_split(everything, test_size=count, stratify=labels, random_state=seed)
    except ValueError as error:
        raise ValueError(
            f"data.hold_out={hold_out} of {len(labels)} training images can't be split class by class ({error}); "
            "choose another share, 0 to hold out nothing, or add images"
        ) from error
    return np.sort(learn), np.sort(held)
