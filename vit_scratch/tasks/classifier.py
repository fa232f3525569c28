"""A trained image classifier, wherever it is from: a run, a saved folder, this package, or another library.

Shapes: B batch, C channels, H heads.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from vit_scratch.config import ClassificationConfig, DataConfig, build_from_dict
from vit_scratch.data.augmentation import BatchTransform
from vit_scratch.data.images import Mode
from vit_scratch.data.loaders import ImageFormat
from vit_scratch.evaluation.attention import attention_maps, rollout, seen_patches
from vit_scratch.tasks.run import is_checkpoint, load_model, weights_file
from vit_scratch.vision.conversion import ConversionError
from vit_scratch.vision.hub import PACKAGED
from vit_scratch.vision.pretrained import library_of, load_pretrained, open_theirs
from vit_scratch.vision.vit import VisionTransformer, create_vit

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
"""Mean and standard deviation of ImageNet's channels, for colour images that are not held in memory."""
MODES: dict[int, Mode] = {1: "L", 3: "RGB", 4: "RGBA"}
"""Modes of images by their number of channels."""


@dataclass
class Classifier:
    """A model of ours and what is known about its use.

    Args:
        model: in evaluation mode.
        classes: names of the logits.
        form: how images must look.
        mean, std: of each channel, of pixels from 0 to 1; images are normalised with them.
        results: sentences on what was measured.
        temperature: what logits are divided by for calibrated probabilities; None where that is not known.
        half: write the weights in half precision, to which they have been rounded.
        data: what it was trained on, where that is known.
    """

    model: VisionTransformer
    classes: list[str]
    form: ImageFormat
    mean: list[float]
    std: list[float]
    results: list[str] = field(default_factory=list)
    temperature: float | None = None
    half: bool = False
    data: DataConfig = field(default_factory=lambda: DataConfig(kind="imagefolder"))

    def normalised(self, pixels: Sequence[np.ndarray]) -> Tensor:
        """Bytes (height, width, C) of each image -> what the model takes, (B, C, height, width)."""
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
        return BatchTransform(self.mean, self.std)(images, torch.zeros(len(images)))[0]


def attention_of(model: VisionTransformer, images: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """What a model looks at in images (B, C, height, width), which must be on its device.

    Returns:
        For each patch its share in what the classifier reads: by rollout through all layers (B, rows, columns), and
        for each head of the last layer (B, H, rows, columns); each sums to 1.
    """
    maps = list(attention_maps(model, images).values())
    rows, _ = model.grid_of(images)
    flow, heads = (
        seen_patches(weights.float(), model.num_prefix_tokens, model.pooling).cpu().numpy()
        for weights in (rollout(maps), maps[-1])
    )
    return rearrange(flow, "b (n m) -> b n m", n=rows), rearrange(heads, "b h (n m) -> b h n m", n=rows)


def load_classifier(path: Path) -> tuple[VisionTransformer, dict[str, Any]]:
    """The model in a weights file, in eval mode on the CPU, and the file's description.

    Raises:
        ValueError: a file that is not there, damaged, not ours, of another task, or whose weights are another model's.
    """
    return load_model(
        path, "classification", lambda d: create_vit(**d["model"]), {"model", "classes", "preprocessing", "config"}
    )


def read_classifier(
    source: str, architecture: str | None = None, *, incomplete: bool = False
) -> tuple[nn.Module, Classifier]:
    """A trained model, wherever it is from.

    Args:
        source: the folder of a run, a file of weights, a folder that ours, timm or transformers saved, weights that
            come with this package, or a name such as "timm:vit_tiny_patch16_224", whose weights are downloaded.
        architecture: for a file with weights of another library, as `load_pretrained`.
        incomplete: as `load_pretrained`; a note is printed.

    Returns:
        The model as it is there, and as ours with what is known about its use.

    Raises:
        ValueError: a source that can't be read, or a model that can't be converted.
    """
    path = Path(source)
    if architecture is None and (source in PACKAGED or is_ours(path)):
        ours = VisionTransformer.from_pretrained(source)
        return ours, classifier_of(ours, source)
    if architecture is None and is_checkpoint(source) and (path.is_dir() or path.suffix == ".safetensors"):
        try:
            model, description = load_classifier(weights_file(path))
        except ValueError as error:
            if "was not written by vit_scratch" not in str(error):
                raise
            raise ValueError(
                f"{error}. For weights of another library run vit-scratch convert, and say with --architecture of what "
                "model they are, such as timm:vit_tiny_patch16_224"
            ) from error
        look = dict(description["preprocessing"])
        form = ImageFormat(look["mode"], tuple(look["image_size"]), look["interpolation"])
        summary = read_summary(path)
        results = measured(path, description, summary)
        temperature = description.get("temperature", summary.get("temperature"))
        data = build_from_dict(ClassificationConfig, description["config"]).data
        return model, Classifier(
            model, description["classes"], form, look["mean"], look["std"], results, temperature, data=data
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theirs = open_theirs(source, architecture, incomplete=incomplete).eval()
    for warning in caught:
        print(f"note: {warning.message}")
    model = load_pretrained(theirs)
    channels = model.patch_embedding.in_channels
    if channels not in MODES:
        raise ConversionError(f"{source} takes {channels} channels; images have 1, 3 or 4")
    classes, look = KNOWLEDGE[library_of(theirs)](theirs)
    form = ImageFormat(MODES[channels], model.patch_embedding.image_size, look.get("interpolation", "bicubic"))
    return theirs, Classifier(
        model,
        classes or [str(i) for i in range(model.num_classes)],
        form,
        list(look.get("mean", IMAGENET[0] if channels == 3 else [0.5] * channels)),
        list(look.get("std", IMAGENET[1] if channels == 3 else [0.25] * channels)),
    )


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a run, of its folder or of its last weights; nothing for other weights, or where there is none."""
    file = (path if path.is_dir() else path.parent) / "summary.json"
    if not file.is_file() or not (path.is_dir() or path.name == "last.safetensors"):
        return {}
    summary: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return summary


def measured(path: Path, description: dict[str, Any], summary: dict[str, Any]) -> list[str]:
    """Sentences on what a run measured, each with its data, seed, compute and versions."""
    run = description["config"]
    used = description.get("versions", {})
    where = (
        f"{run['data']['kind']} in {run['data']['root']}, seed {run['seed']}, "
        f"{description.get('metrics', {}).get('pflop', 0):.3g} PFLOP of training, torch {used.get('torch')}, "
        f"commit {str(used.get('commit'))[:7]}"
    )
    sentences = []
    if "val_accuracy" in description.get("metrics", {}):
        sentences.append(f"{100 * description['metrics']['val_accuracy']:.2f} % of the images held out ({where})")
    if "test" in summary:
        test = summary["test"]
        share = f"{100 * test['accuracy']:.2f} % ({test['correct']}/{test['count']})"
        sentences.append(f"{share} of the test images, last epoch, single view ({where})")
    return sentences


def classifier_of(model: VisionTransformer, source: str) -> Classifier:
    """A model of a folder of ours with what the folder says about it."""
    look = model.metadata.get("preprocessing")
    if not isinstance(look, dict) or not {"mode", "interpolation", "mean", "std"} <= look.keys():
        raise ValueError(f"{source} does not say how images are to be prepared; its config.json has no preprocessing")
    form = ImageFormat(look["mode"], model.patch_embedding.image_size, look["interpolation"])
    metadata = model.metadata
    return Classifier(
        model,
        metadata.get("classes", []),
        form,
        look["mean"],
        look["std"],
        metadata.get("results", []),
        metadata.get("temperature"),
    )


def is_ours(path: Path) -> bool:
    """Whether a path is a folder that `save_pretrained` wrote."""
    if not (path / "config.json").is_file():
        return False
    try:
        described = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path / 'config.json'} is damaged: {error}") from error
    return isinstance(described, dict) and "arguments" in described


def known_to_timm(model: Any) -> tuple[list[str], dict[str, Any]]:
    """Names of the classes, none if unknown, and the preprocessing of a model of timm."""
    from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_data_config

    names = list(model.pretrained_cfg.get("label_names") or ())
    subset = infer_imagenet_subset(model)
    if not names and subset:
        info = ImageNetInfo(subset)
        names = [info.index_to_description(i) for i in range(model.num_classes)]
    return names, resolve_data_config({}, model=model)


def known_to_torchvision(model: Any) -> tuple[list[str], dict[str, Any]]:
    """As `known_to_timm`; all pretrained models of torchvision normalise alike."""
    from torchvision.models import ViT_B_16_Weights

    names = ViT_B_16_Weights.DEFAULT.meta["categories"]
    found = names if model.num_classes == len(names) else []
    return list(found), {"mean": IMAGENET[0], "std": IMAGENET[1], "interpolation": "bilinear"}


def known_to_transformers(model: Any) -> tuple[list[str], dict[str, Any]]:
    """As `known_to_timm`; what the folder that a model came from says about images."""
    from transformers import ViTImageProcessor

    names = [model.config.id2label[i] for i in sorted(model.config.id2label)]
    look: dict[str, Any] = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "interpolation": "bilinear"}
    if (Path(model.config._name_or_path) / "preprocessor_config.json").is_file():
        processor = ViTImageProcessor.from_pretrained(model.config._name_or_path)
        name = {0: "nearest", 2: "bilinear", 3: "bicubic"}[int(processor.resample)]
        look = {"mean": processor.image_mean, "std": processor.image_std, "interpolation": name}
    return names, look


KNOWLEDGE = {
    "timm": known_to_timm,
    "torchvision": known_to_torchvision,
    "transformers": known_to_transformers,
}
