"""What becomes of the accuracy when images are noisy, blurred, dark, bright, pale, compressed or coarse.

Kinds and strengths are like those of "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations",
computed anew by torchvision; the published images of that paper, CIFAR-10-C, and those of "Do CIFAR-10 Classifiers
Generalize to CIFAR-10?", CIFAR-10.1, are read from their files.
Shapes: B batch, C channels.
"""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

Corruption = Callable[..., Tensor]
"""(bytes (B, C, height, width), strength=number) -> bytes of the same shape."""


def noise(images: Tensor, strength: float) -> Tensor:
    """Add normal noise, the same for each batch; the strength is its standard deviation, on the scale from 0 to 1."""
    draws = torch.randn(images.shape, generator=torch.Generator().manual_seed(0)).to(images.device)
    return (images + draws * (strength * 255)).round_().clamp_(0, 255).to(torch.uint8)


def blur(images: Tensor, strength: float) -> Tensor:
    """Blur with a Gaussian; the strength is its standard deviation in 32nds of the image's shorter side."""
    sigma = strength * min(images.shape[2:]) / 32
    width = 2 * min(int(np.ceil(3 * sigma)), min(images.shape[2:]) - 1) + 1  # at most a reflection of the image
    return F.gaussian_blur(images, kernel_size=[width, width], sigma=[sigma, sigma])


def jpeg(images: Tensor, strength: float) -> Tensor:
    """Compress each image; the strength is the quality. Transparency stays."""
    seen = []
    for image in images[:, :3].cpu():  # by Pillow: torchvision 0.29 deprecates its own coders
        buffer = io.BytesIO()
        F.to_pil_image(image).save(buffer, "JPEG", quality=int(strength))
        seen.append(F.pil_to_tensor(Image.open(buffer)))
    return torch.cat([torch.stack(seen).to(images.device), images[:, 3:]], dim=1) if seen else images


def pixelate(images: Tensor, strength: float) -> Tensor:
    """Resize to a share of the sides, the strength, and back by repeating pixels."""
    size = [max(round(side * strength), 1) for side in images.shape[2:]]
    # As numbers: torch 2.14 fails on bytes of few pixels.
    small = F.resize(images.float(), size, F.InterpolationMode.BILINEAR, antialias=True).round().to(torch.uint8)
    return F.resize(small, list(images.shape[2:]), F.InterpolationMode.NEAREST_EXACT)


def brightness(images: Tensor, strength: float) -> Tensor:
    """Multiply pixels by the strength; transparency stays."""
    return torch.cat([F.adjust_brightness(images[:, :3], strength), images[:, 3:]], dim=1)


def contrast(images: Tensor, strength: float) -> Tensor:
    """Mix pixels with the mean grey of the image, of which they keep the strength as a share; transparency stays."""
    return torch.cat([F.adjust_contrast(images[:, :3], strength), images[:, 3:]], dim=1)


STRENGTHS = 5
"""How many there are of each kind."""
CORRUPTIONS: dict[str, tuple[Corruption, tuple[float, ...]]] = {
    "noise": (noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "blur": (blur, (0.4, 0.6, 0.8, 1.0, 1.5)),
    "bright": (brightness, (1.2, 1.4, 1.6, 1.8, 2.0)),
    "dark": (brightness, (0.8, 0.6, 0.5, 0.4, 0.3)),
    "contrast": (contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "jpeg": (jpeg, (80, 65, 58, 50, 40)),
    "pixelate": (pixelate, (0.75, 0.625, 0.5, 0.375, 0.25)),
}
"""A function and its strengths, from weak to strong, of each kind."""

PUBLISHED = 50_000
"""Images in each file of CIFAR-10-C: 10,000 for each of five strengths."""


def read_cifar10_c(folder: Path) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The images of CIFAR-10-C by kind, bytes (50000, 32, 32, 3), not yet read into memory, and their labels (50000,).

    Raises:
        ValueError: files that are missing or hold something else.
    """
    labels_file, others = folder / "labels.npy", []
    if folder.is_dir():
        others = sorted(p for p in folder.glob("*.npy") if p != labels_file)
    if not labels_file.is_file() or not others:
        raise ValueError(
            f"cifar10_c={folder} does not hold labels.npy and a file such as fog.npy for each kind; CIFAR-10-C.tar is "
            "at https://zenodo.org/records/2535967; unpack it and give the folder"
        )
    labels = read_array(labels_file, (PUBLISHED,))
    return {p.stem: read_array(p, (PUBLISHED, 32, 32, 3)) for p in others}, labels.astype(np.int64)


def read_cifar10_1(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The images of CIFAR-10.1 (version 6), bytes (2000, 32, 32, 3), and their labels (2000,).

    Raises:
        ValueError: files that are missing or hold something else.
    """
    names = ("cifar10.1_v6_data.npy", "cifar10.1_v6_labels.npy")
    if not all((folder / name).is_file() for name in names):
        raise ValueError(
            f"cifar10_1={folder} does not hold {' and '.join(names)}; they are in the folder datasets of "
            "https://github.com/modestyachts/CIFAR-10.1"
        )
    images = read_array(folder / names[0], (2000, 32, 32, 3))
    return images, read_array(folder / names[1], (2000,)).astype(np.int64)


def read_array(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """An array of integers from a file, mapped into memory. Raises ValueError for one of another shape or type."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is damaged, or no array of numpy ({error})") from error
    if array.shape != shape or array.dtype.kind not in "iu" or (len(shape) > 1 and array.dtype != np.uint8):
        raise ValueError(f"{path} holds {array.dtype} {array.shape} where integers {shape} should be")
    return array
