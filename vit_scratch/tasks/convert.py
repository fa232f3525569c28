"""The command convert: a Vision Transformer with classes and preprocessing, from one library's form to another's."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vit_scratch.config import ClassificationConfig, ConvertConfig, DataConfig, to_dict
from vit_scratch.files import let_others_read
from vit_scratch.tasks.classifier import Classifier, load_classifier, read_classifier
from vit_scratch.training.checkpoint import replacing, save_weights
from vit_scratch.training.provenance import versions
from vit_scratch.vision.conversion import (
    TOLERANCE,
    ConversionError,
    largest_difference,
    timm_options,
    to_timm,
    to_torchvision,
    to_transformers,
)
from vit_scratch.vision.patch_embedding import as_pair
from vit_scratch.vision.vit import VisionTransformer

TIMM_BASES = {1e-6: "vit_base_patch16_224", 1e-5: "vit_base_patch16_clip_224"}
"""An architecture of timm for each epsilon of the norms, which is the one thing that timm's folders can't hold."""


def convert(config: ConvertConfig, source: str, destination: Path) -> None:
    """Read a model, write it in the form that `config` asks for, and print how much its logits differ.

    Args:
        config: into what, and how the source is to be read.
        source: a file, a folder, or the name of a pretrained model, such as "timm:vit_tiny_patch16_224".
        destination: what to write: a folder for timm and transformers, a .safetensors file for torchvision, and one or
            the other for vit_scratch.

    Raises:
        ValueError: a source that can't be read or converted, or a destination that is there or of the wrong kind.
    """
    if config.half and config.to != "vit_scratch":
        raise ValueError(f"half=true is for --to vit_scratch, not for {config.to}")
    check_destination(config.to, destination)
    original, classifier = read_classifier(source, config.architecture, incomplete=config.incomplete)
    model = classifier.model
    height, width = model.patch_embedding.image_size
    print(
        f"{source}: {sum(p.numel() for p in model.parameters()):,} parameters, images of {height} x {width}, "
        f"{model.num_classes} classes"
    )
    if original is not model:
        report_difference("read", largest_difference(model, original))
    if config.image_size is not None:
        model.set_input_size(as_pair("image_size", config.image_size))
        height, width = model.patch_embedding.image_size
        classifier.form = replace(classifier.form, image_size=(height, width))
        print(f"resized for images of {height} x {width}")
    if config.about:
        classifier.results.insert(0, config.about)
    if config.half:
        round_to_half(classifier)
    with torch.random.fork_rng():
        written, hint = WRITERS[config.to](classifier, destination)
    for file in destination.glob("*.safetensors"):  # of timm and transformers
        let_others_read(file)
    report_difference("written", largest_difference(classifier.model, written))
    print(f"wrote {destination}; load it with\n  {hint}")


def check_destination(to: str, destination: Path) -> None:
    """Raise ValueError for a destination that exists, or is of the wrong kind."""
    is_file, wants_file = destination.suffix == ".safetensors", to == "torchvision"
    if is_file != wants_file and to != "vit_scratch":
        kind = "a .safetensors file" if wants_file else "a folder"
        raise ValueError(f"destination={destination}: --to {to} writes {kind}; choose such a name")
    if destination.exists():
        raise ValueError(f"destination={destination} is there already; choose another, or remove it first")


def report_difference(what: str, difference: float) -> None:
    """Print a difference of logits. Raises ConversionError where it is too large."""
    print(f"largest difference of the logits on random images, as {what}: {difference:.1e}")
    if not difference <= TOLERANCE:
        raise ConversionError(f"the logits of the model as {what} differ by {difference:.2g}, more than {TOLERANCE}")


@torch.no_grad()
def round_to_half(classifier: Classifier) -> None:
    """Round weights to half precision, in which they are written then, and print what it changes."""
    rounded = copy.deepcopy(classifier.model)
    for tensor in rounded.state_dict().values():
        tensor.copy_(tensor.half())
    change = largest_difference(rounded, classifier.model)
    print(f"rounding to half precision changes the logits on random images by at most {change:.1e}")
    classifier.model, classifier.half = rounded, True


# Writing: each returns the model as it is read from the files again, and how a user does that


def write_ours(classifier: Classifier, path: Path) -> tuple[nn.Module, str]:
    """One of our checkpoints, which `vit-scratch evaluate` takes, or a folder with a model card."""
    form = classifier.form
    data = DataConfig(kind="imagefolder", image_size=form.image_size, mode=form.mode)
    data.interpolation = form.interpolation  # type: ignore[assignment]
    look: dict[str, Any] = {"mode": form.mode, "image_size": list(form.image_size)}
    look |= {"interpolation": form.interpolation} | {"mean": classifier.mean, "std": classifier.std}
    temperature = {} if classifier.temperature is None else {"temperature": classifier.temperature}
    model = copy.deepcopy(classifier.model).half() if classifier.half else classifier.model
    if path.suffix != ".safetensors":
        model.metadata = {"classes": classifier.classes, "preprocessing": look, "results": classifier.results}
        model.metadata |= temperature
        model.save_pretrained(path)
        hint = f'vit_scratch.VisionTransformer.from_pretrained("{path}")'
        return VisionTransformer.from_pretrained(path), hint
    description = {
        "task": "classification",
        "model": model.arguments,
        "classes": classifier.classes,
        "preprocessing": look,
        "config": to_dict(ClassificationConfig(data=data)),
        "versions": versions(),
    } | temperature
    save_weights(path, model.state_dict(), description)
    return load_classifier(path)[0], f"vit-scratch evaluate {path} --data.root DIR"


def write_timm(classifier: Classifier, folder: Path) -> tuple[nn.Module, str]:
    """A folder from which timm builds the model."""
    import timm

    model = classifier.model
    eps = model.arguments["norm_eps"]
    if eps not in TIMM_BASES:
        raise ConversionError(
            f"a folder of timm can't say that the epsilon of the norms is {eps}, only "
            f"{' or '.join(map(str, TIMM_BASES))}; in Python, to_timm(model) converts it"
        )
    options = timm_options(model)
    del options["norm_layer"]
    options["act_layer"] = model.arguments["activation"]  # a name, which timm can write; it has the same names
    named = timm.create_model(TIMM_BASES[eps], **options)
    named.load_state_dict(to_timm(model).state_dict())
    channels = model.patch_embedding.in_channels
    timm.models.save_for_hf(
        named,
        str(folder),
        model_config={"label_names": classifier.classes} if classifier.classes else {},
        safe_serialization=True,
        data_config={
            "input_size": (channels, *classifier.form.image_size),
            "mean": tuple(classifier.mean),
            "std": tuple(classifier.std),
            "interpolation": classifier.form.interpolation,
            "crop_pct": 1.0,
        },
    )
    hint = f'timm.create_model("local-dir:{folder}", pretrained=True)'
    return timm.create_model(f"local-dir:{folder}", pretrained=True), hint


def write_torchvision(classifier: Classifier, path: Path) -> tuple[nn.Module, str]:
    """The state dict of torchvision's class."""
    theirs: Any = to_torchvision(classifier.model)
    with replacing(path) as temporary:
        save_file(theirs.state_dict(), temporary)
    theirs.load_state_dict(load_file(path))
    layers = theirs.encoder.layers
    positional = (
        theirs.image_size,
        theirs.patch_size,
        len(layers),
        layers[0].num_heads,
        theirs.hidden_dim,
        theirs.mlp_dim,
    )
    arguments = f"{', '.join(map(str, positional))}, num_classes={theirs.num_classes}"
    if layers[0].ln_1.eps != 1e-6:
        arguments += f", norm_layer=functools.partial(torch.nn.LayerNorm, eps={layers[0].ln_1.eps})"
    return theirs, (
        f"model = torchvision.models.VisionTransformer({arguments})\n"
        f'  model.load_state_dict(safetensors.torch.load_file("{path}"))'
    )


def write_transformers(classifier: Classifier, folder: Path) -> tuple[nn.Module, str]:
    """A folder from which transformers builds the model and the preprocessing of images."""
    from transformers import ViTImageProcessor

    theirs: Any = to_transformers(classifier.model)
    if classifier.classes:
        theirs.config.id2label = dict(enumerate(classifier.classes))
        theirs.config.label2id = {name: i for i, name in enumerate(classifier.classes)}
    height, width = classifier.form.image_size
    theirs.save_pretrained(folder)
    ViTImageProcessor(
        size={"height": height, "width": width},
        resample={"nearest": 0, "bilinear": 2, "bicubic": 3}[classifier.form.interpolation],
        image_mean=classifier.mean,
        image_std=classifier.std,
    ).save_pretrained(folder)
    name = type(theirs).__name__
    return type(theirs).from_pretrained(folder), f'transformers.{name}.from_pretrained("{folder}")'


WRITERS = {
    "vit_scratch": write_ours,
    "timm": write_timm,
    "torchvision": write_torchvision,
    "transformers": write_transformers,
}
