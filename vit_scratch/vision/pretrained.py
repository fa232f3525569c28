"""Pretrained weights by name and from files: timm, torchvision and transformers, as one of our Vision Transformers."""

import difflib
import importlib.util
import json
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vit_scratch.files import check_archive
from vit_scratch.vision.conversion import (
    NOT_ITS_OWN,
    ConversionError,
    from_timm,
    from_torchvision,
    from_transformers,
    to_timm,
    to_torchvision,
    to_transformers,
)
from vit_scratch.vision.matching import weight_differences
from vit_scratch.vision.vit import VisionTransformer

CONVERSIONS: dict[
    str, tuple[Callable[[nn.Module], VisionTransformer], Callable[[VisionTransformer], nn.Module], str]
] = {
    "timm": (from_timm, to_timm, "head.weight"),
    "torchvision": (from_torchvision, to_torchvision, "heads.head.weight"),
    "transformers": (from_transformers, to_transformers, "classifier.weight"),
}
"""The two conversions of each library, and what it calls the weight of a classifier."""
REFUSED = "it is damaged, or holds more than tensors and plain values, and nothing in a file is executed here"


def library_of(model: nn.Module) -> str:
    """The library that a model is of. Raises ConversionError for any that is not in `CONVERSIONS`."""
    library = type(model).__module__.partition(".")[0]
    if library not in CONVERSIONS:
        raise ConversionError(f"{type(model).__name__} is of {library}; known are {', '.join(CONVERSIONS)}")
    return library


def split_name(name: str) -> tuple[str, str]:
    """The library and the model in a name such as "timm:vit_tiny_patch16_224".

    Raises:
        ValueError: a name of another form, of another library, or of one that is not installed.
    """
    library, colon, model = name.partition(":")
    if not colon or library not in CONVERSIONS or not model:
        raise ValueError(
            f"{name!r} is no name of a model; give LIBRARY:NAME, such as timm:vit_tiny_patch16_224, "
            f"with one of {', '.join(CONVERSIONS)}"
        )
    if importlib.util.find_spec(library) is None:
        raise ValueError(f"{name}: {library} is not installed; install it with: pip install {library}")
    return library, model


def build_theirs(name: str, *, pretrained: bool, num_classes: int | None = None) -> nn.Module:
    """A model of another library.

    Args:
        name: "timm:NAME", "torchvision:NAME" or "transformers:NAME"; the last may be a folder.
        pretrained: with its published weights, which are downloaded unless they have been before; or with random ones.
        num_classes: number of logits, None for as many as it has.

    Raises:
        ValueError: an unknown name, or weights that can't be fetched.
    """
    library, model = split_name(name)
    change: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    if library == "timm":
        import timm

        known = timm.list_models()
        if model.partition(".")[0] not in known and not model.startswith(("hf-hub:", "local-dir:")):
            raise ValueError(f"timm knows no {model}{did_you_mean(model, known)}")
        build: Callable[[], Any] = partial(timm.create_model, model, pretrained=pretrained, **change)
    elif library == "torchvision":
        from torchvision import models

        if model not in models.list_models():
            raise ValueError(f"torchvision knows no {model}{did_you_mean(model, models.list_models())}")
        build = partial(models.get_model, model, weights="DEFAULT" if pretrained else None, **change)
    else:
        from transformers import AutoConfig, ViTForImageClassification

        if pretrained:
            build = partial(ViTForImageClassification.from_pretrained, model)
        else:
            labels = {} if num_classes is None else {"num_labels": num_classes}
            build = lambda: ViTForImageClassification(AutoConfig.from_pretrained(model, **labels))  # noqa: E731
    try:
        return build()
    except Exception as error:  # there are many kinds of no network, and each library has its own
        if not pretrained and library != "transformers":
            raise
        if Path(model.removeprefix("local-dir:")).is_dir():
            raise ValueError(
                f"the weights in {model.removeprefix('local-dir:')} can't be read: {REFUSED} ({type(error).__name__})"
            ) from error
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"the weights of {name} could not be fetched: {type(error).__name__}: {first}") from error


def stay_inside(folder: Path) -> None:
    """Raise ValueError where a list of files in a folder of transformers has one that is not in this folder."""
    for index in folder.glob("*.index.json"):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is damaged: it does not say which weights are in which file") from error
        outside = sorted(str(name) for name in names if not isinstance(name, str) or Path(name).name != name)
        if outside:
            raise ValueError(f"{index} names a file that is not in its folder: {outside[0]}")


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A hint at the nearest of the known names, or nothing."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The weights in a file: safetensors, or what `torch.save` wrote if it is tensors and plain values only.

    Raises:
        ValueError: a file that is not there, damaged, or that holds something else.
    """
    from timm.models import load_state_dict

    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        if zipfile.is_zipfile(path):  # before torch 1.6 files were no archives
            check_archive(path)
        weights = load_state_dict(str(path), device="cpu", weights_only=True)
    # torch raises many kinds for a damaged file, and its messages advise to switch the safety off.
    except Exception as error:
        raise ValueError(f"{path} can't be read: {REFUSED} ({type(error).__name__})") from error
    if not weights or not all(isinstance(t, Tensor) for t in weights.values()):
        raise ValueError(f"{path} holds no weights: they are tensors by name")
    return weights


def open_theirs(
    source: str | Path | Mapping[str, Tensor], architecture: str | None = None, *, incomplete: bool = False
) -> nn.Module:
    """A model of timm, torchvision or transformers with its weights; the arguments are those of `load_pretrained`."""
    path = Path(source) if isinstance(source, (str, Path)) else None
    if path is not None and architecture is None and (path / "config.json").is_file():
        stay_inside(path)
        described = json.loads((path / "config.json").read_text(encoding="utf-8"))
        prefix = "timm:local-dir:" if "architecture" in described else "transformers:"
        return build_theirs(f"{prefix}{path}", pretrained=True)
    if isinstance(source, str) and architecture is None and source.partition(":")[0] in CONVERSIONS:
        return build_theirs(source, pretrained=True)
    weights = read_tensors(path) if path is not None else source
    assert isinstance(weights, Mapping)
    if architecture is None:
        raise ValueError(
            f"weights alone do not say of what model they are; name it with architecture, such as "
            f"timm:vit_tiny_patch16_224 ({len(weights)} tensors: {', '.join(list(weights)[:3])}, ...)"
        )
    head = CONVERSIONS[split_name(architecture)[0]][2]
    classes = weights[head].shape[0] if head in weights and weights[head].dim() == 2 else None
    model = build_theirs(architecture, pretrained=False, num_classes=classes)
    fill(model, weights, incomplete=incomplete)
    return model


def load_pretrained(
    source: str | Path | Mapping[str, Tensor] | nn.Module, architecture: str | None = None, *, incomplete: bool = False
) -> VisionTransformer:
    """A Vision Transformer of timm, torchvision or transformers as one of ours.

    Args:
        source: a model; a name, such as "timm:vit_tiny_patch16_224", whose weights are downloaded; a folder that timm
            or transformers saved; a file of weights; or a state dict.
        architecture: for a file or a state dict, of which model its weights are, as such a name: they do not say
            themselves, how many heads there are for example. The number of classes is theirs.
        incomplete: take the weights that fit and leave the others as they are at first; a warning says how many.

    Raises:
        ConversionError: a model that computes something that ours doesn't, or weights that are not its own.
        ValueError: a name that is unknown, or a file that can't be read.
    """
    theirs = source if isinstance(source, nn.Module) else open_theirs(source, architecture, incomplete=incomplete)
    return CONVERSIONS[library_of(theirs)][0](theirs)


def fill(model: nn.Module, weights: Mapping[str, Tensor], *, incomplete: bool = False) -> None:
    """Give a model weights, all of them, or with `incomplete` those that fit.

    Raises:
        ConversionError: weights that are missing, left over or of another shape; with `incomplete`, where none fits.
    """
    wanted = model.state_dict()
    loaded = {n: t for n, t in weights.items() if n in wanted and t.shape == wanted[n].shape}
    fault = weight_differences(weights, wanted)
    if fault and not (incomplete and loaded):
        raise ConversionError(f"{'none fits; ' if incomplete else ''}{NOT_ITS_OWN}{fault}")
    model.load_state_dict(loaded, strict=False)
    if len(loaded) < len(wanted):
        rest = [n for n in wanted if n not in loaded]
        warnings.warn(
            f"loaded {len(loaded)} of {len(wanted)} weights; as they were at first: {', '.join(rest[:3])}"
            f"{', ...' if len(rest) > 3 else ''}",
            stacklevel=2,
        )
