"""Image classification: trains a Vision Transformer on a data set, and evaluates a trained one.

Shapes: B batch, C channels.
"""

import json
import math
import sys
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_scratch.config import (
    Config,
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    build_from_dict,
    differences,
    read_config,
    to_dict,
    to_yaml,
)
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
from vit_scratch.data.sources import NATIVE, ImageDataset, ImageSource, load
from vit_scratch.evaluation.classification import evaluate_classifier
from vit_scratch.evaluation.plots import plot_confusion, plot_curves
from vit_scratch.training.checkpoint import TrainingStates, load_weights, replacing, save_weights
from vit_scratch.training.device import device_name, pick_device, pick_precision, use_deterministic_algorithms
from vit_scratch.training.ema import ExponentialMovingAverage
from vit_scratch.training.log import Row, RunLog
from vit_scratch.training.loop import fit
from vit_scratch.training.optimizer import adamw
from vit_scratch.training.provenance import versions
from vit_scratch.training.schedule import warmup_cosine
from vit_scratch.vision.patch_embedding import as_pair
from vit_scratch.vision.vit import VisionTransformer, create_vit, vit_arguments

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
"""Mean and standard deviation of ImageNet's channels, for colour images that are not held in memory."""
MEMORY_LIMIT = 2 * 1024**3
"""Bytes of images that are held in memory unless the configuration says otherwise."""
EVALUATION_BATCH = 256
"""Images per forward pass in evaluation during training, as `EvaluateConfig` has it."""


def smoothed_cross_entropy(smoothing: float, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropy over a batch, and how many images are predicted right.

    Args:
        smoothing: share of each label that goes to all classes alike ("Rethinking the Inception Architecture").
        images: (B, C, height, width).
        labels: (B,), or probabilities (B, classes) after MixUp and CutMix; right is then the likeliest class.
    """
    logits = model(images)
    hard = labels if labels.dim() == 1 else labels.argmax(dim=1)
    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    return loss, (logits.argmax(dim=1) == hard).sum()


def train(config: Config, out: Path, *, resume: bool = False) -> int | None:
    """Train a Vision Transformer and report its accuracy on the test set, which is read once, at the end.

    Args:
        config: what to train, on what, and how.
        out: folder of the run.
        resume: go on from the run's newest training state.

    Returns:
        None when training is complete, or the number of the signal that stopped it.

    Raises:
        ValueError: a configuration that can't work, or data that are not there; before any work is done.
        OSError, NonFiniteError: what can go wrong later, as `fit`.
    """
    device = pick_device(config.device)
    precision = pick_precision(config.train.precision, device)
    config, form = resolve(config)
    states = open_run(config, out, resume)
    if config.train.deterministic:
        use_deterministic_algorithms()

    dataset = load(
        config.data.kind,
        config.data.root,
        image_size=form.image_size,
        fake_images=config.data.fake_images,
        allow_missing_classes=config.data.allow_missing_classes,
    )
    data = prepare(config, dataset, form, device)
    states.identity = data.identity()
    state, faults = states.load() if resume else (None, [])
    torch.manual_seed(config.seed)
    arguments = model_arguments(config.model, form.image_size, CHANNELS[form.mode], len(dataset.classes))
    model = create_vit(**arguments).to(device)
    updates_per_epoch = math.ceil(len(data.train) / config.train.accumulate)
    updates = config.train.epochs * updates_per_epoch
    ema = ExponentialMovingAverage(model, config.train.ema_decay) if config.train.ema_decay else None
    optimizer = adamw(model, lr=config.train.lr, betas=config.train.betas, weight_decay=config.train.weight_decay)
    done = state["progress"]["update"] if state else 0
    log = RunLog(
        out,
        epochs=config.train.epochs,
        updates=updates,
        items="images",
        start=done,
        tensorboard=config.train.tensorboard,
    )

    with replacing(out / "config.yaml") as path:
        path.write_text(to_yaml(config))
    log.say(to_yaml(config))
    for note in [*faults, *data.notes]:
        log.say(f"note: {note}")
    size = f"{form.image_size[0]}x{form.image_size[1]}"
    parameters = sum(p.numel() for p in model.parameters())
    log.say(
        f"{config.data.kind}: {data.train.count} training images {size} {form.mode}, "
        f"{data.val.count if data.val else 0} held out, {data.test.count if data.test else 0} test, "
        f"{len(dataset.classes)} classes"
    )
    log.say(
        f"{config.model.preset}: {parameters:,} parameters, {model.grid[0]}x{model.grid[1]} patches; "
        f"{config.train.epochs} epochs, {updates} updates{f', {done} done' if done else ''}; "
        f"{device_name(device)}, {str(precision).removeprefix('torch.')}"
    )

    description = {
        "task": "classification",
        "model": arguments,
        "classes": dataset.classes,
        "preprocessing": asdict(form) | {"mean": data.mean, "std": data.std},
        "config": to_dict(config),
        "versions": versions(),
    }

    def save(name: str, weights: nn.Module, row: Row) -> None:
        save_weights(out / f"{name}.safetensors", weights.state_dict(), description | {"metrics": row})

    def validate(network: nn.Module) -> dict[str, float]:
        assert data.val is not None
        result = evaluate_classifier(network, data.val.batches(), len(dataset.classes), data.val.count)
        return {"loss": result.loss, "accuracy": result.accuracy}

    if config.train.compile:
        model.compile()
    try:
        stopped = fit(
            model,
            data.train,
            partial(smoothed_cross_entropy, config.train.label_smoothing),
            validate if data.val else None,
            optimizer,
            partial(
                warmup_cosine,
                updates=updates,
                warmup=min(round(config.train.warmup_epochs * updates_per_epoch), updates - 1),
                peak=config.train.lr,
                final=config.train.min_lr,
            ),
            epochs=config.train.epochs,
            accumulate=config.train.accumulate,
            clip_norm=config.train.clip_norm,
            precision=precision,
            device=device,
            ema=ema,
            log=log,
            states=states,
            state=state,
            save_weights=save,
            checkpoint_every=config.train.checkpoint_every,
            log_every=config.train.log_every,
            train_name="train_mixed" if config.augment.mixup or config.augment.cutmix else "train",
        )
    finally:
        log.close()
    if stopped is not None:
        return stopped

    plot_curves(log.rows, out / "curves.png")
    summary: dict[str, Any] = {
        "command": sys.argv,
        "seed": config.seed,
        "parameters": parameters,
        "device": device_name(device),
        "versions": versions(),
        "training_seconds": sum(r["seconds"] for r in log.rows),
        "last": log.rows[-1] if log.rows else None,
    }
    print(f"curves: {out / 'curves.png'}")
    if data.test is None:
        print(f"there are no test images in {config.data.root}, so there is no test accuracy")
    else:
        finals = [("last", "test", "evaluation", "test")]  # its sentence is the last line that is printed
        if ema is not None:
            finals.insert(0, ("ema", "test_ema", "evaluation_ema", "test, averaged weights:"))
        for name, key, folder, label in finals:
            path = out / f"{name}.safetensors"
            summary[key] = report(path, load_classifier(path), data.test, "test", out / folder, device, label)
    with replacing(out / "summary.json") as path:
        path.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    return None


def resolve(config: Config) -> tuple[Config, ImageFormat]:
    """Fill in what the configuration leaves to the preset and to the data set, and say how images must look.

    Raises:
        ValueError: a size that is none, or a model that can't be built for it.
    """
    size, native_mode = NATIVE[config.data.kind]
    mode = config.data.mode or native_mode
    if size is None:
        size = as_pair("image_size", vit_arguments(config.model.preset)["image_size"])
    if config.data.image_size is not None:
        size = as_pair("data.image_size", config.data.image_size)
    data = replace(config.data, image_size=size, mode=mode)
    arguments = model_arguments(config.model, size, CHANNELS[mode], num_classes=10)
    with torch.device("meta"):  # refuses a wrong model in no time, before data are read or downloaded
        create_vit(**arguments)
    model = ModelConfig(**{f.name: arguments[f.name] for f in fields(ModelConfig)})
    return replace(config, data=data, model=model), ImageFormat(mode, size, data.interpolation)


def model_arguments(config: ModelConfig, size: tuple[int, int], channels: int, num_classes: int) -> dict[str, Any]:
    """All arguments of `create_vit`: the preset's, what the configuration changes, and what the data ask for."""
    changes = {k: v for k, v in asdict(config).items() if v is not None and k != "preset"}
    given = changes | {"image_size": list(size), "in_channels": channels, "num_classes": num_classes}
    return {"preset": config.preset} | vit_arguments(config.preset, **given)


def open_run(config: Config, out: Path, resume: bool) -> TrainingStates:
    """The training states of a run's folder.

    Raises:
        ValueError: it is no folder, or holds a run that is not to be resumed, or one of another configuration.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out={out} is a file; choose a folder")
    states, saved = TrainingStates(out / "states"), out / "config.yaml"
    if states.paths() and not saved.exists():
        raise ValueError(f"{states.folder} holds training states without {saved}; choose another --out")
    if saved.exists() and not resume:
        raise ValueError(f"--out={out} already holds a run; go on with it with --resume, or choose another --out")
    if saved.exists():
        changed = differences(read_config(saved), config)
        if changed:
            listed = "".join(f"\n  {k}: {a} then, {b} now" for k, (a, b) in changed.items())
            raise ValueError(
                f"{out} was started with another configuration, and a run goes on as it began:{listed}\n"
                "Leave these fields as they were, or start anew with another --out"
            )
    return states


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


def prepare(config: Config, dataset: ImageDataset, form: ImageFormat, device: torch.device) -> Data:
    """Read a data set and wrap it for training and evaluation.

    Raises:
        ImageError: images that can't be read, unless they are to be skipped.
        ValueError: a hold-out that is not possible.
    """
    dataset.hold_out(config.data.hold_out, config.data.split_seed)
    in_memory = hold_in_memory(config.data, form, sum(len(s) for s in (dataset.train, dataset.val, dataset.test) if s))
    train, notes = open_part("train", dataset.train, config.data, form, in_memory)
    if isinstance(train, HeldImages):
        mean, std = channel_statistics(train.images)
    else:
        mean, std = IMAGENET if form.mode == "RGB" else ([0.5] * CHANNELS[form.mode], [0.25] * CHANNELS[form.mode])
    a = config.augment
    augmented = BatchTransform(
        mean,
        std,
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
            policy=a.policy,
            magnitude=a.magnitude,
        ),
        crops=a.min_crop_area < 1,
        seed=config.seed,
        workers=config.data.workers,
        device=device,
    )
    loaders: dict[str, Loader | None] = {}
    for part, source in (("val", dataset.val), ("test", dataset.test)):
        loader = None
        if source is not None:
            images, faults = open_part(part, source, config.data, form, in_memory)
            notes += faults
            loader = make_loader(
                images,
                form,
                EVALUATION_BATCH,
                BatchTransform(mean, std),
                workers=config.data.workers,
                device=device,
            )
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


def load_classifier(path: Path) -> tuple[VisionTransformer, dict[str, Any]]:
    """The model in a weights file, in eval mode on the CPU, and the file's description.

    Raises:
        ValueError: a file that is not there, damaged, not ours, of another task, or whose weights are another model's.
    """
    weights, description = load_weights(path)
    if description.get("task") != "classification":
        raise ValueError(f"{path} holds a model for {description.get('task')!r}, not for classification")
    missing_parts = {"model", "classes", "preprocessing", "config"} - description.keys()
    if missing_parts:
        raise ValueError(
            f"{path} does not say everything about its model; missing are {', '.join(sorted(missing_parts))}"
        )
    try:
        model = create_vit(**description["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} describes a model that can't be built: {error}") from error
    expected = model.state_dict()
    matching = [n for n, w in weights.items() if n in expected and w.shape == expected[n].shape]
    if len(matching) < len(weights) or len(matching) < len(expected):
        others = [n for n in weights if n not in matching]
        missing = [n for n in expected if n not in matching]
        raise ValueError(
            f"{path} holds the weights of another model than it describes: {len(matching)} of {len(expected)} fit; "
            f"{len(missing)} missing or of another shape ({', '.join(missing[:3])}{', ...' if missing[3:] else ''}), "
            f"{len(others)} not of this model ({', '.join(others[:3])}{', ...' if others[3:] else ''})"
        )
    model.load_state_dict(weights)
    return model.eval(), description


def report(
    path: Path,
    loaded: tuple[VisionTransformer, dict[str, Any]],
    loader: Loader,
    split: str,
    folder: Path,
    device: torch.device,
    label: str | None = None,
) -> dict[str, Any]:
    """Evaluate the model of a weights file, write results and confusion matrix, and print them.

    Args:
        path: the weights file, as the results name it.
        loaded: what `load_classifier` returned for it.
        loader: the images.
        split: what they are called, "test" or "val".
        folder: where results and pictures go.
        device: where to compute.
        label: what the printed sentence calls it; `split` where None.

    Returns:
        All results as plain values.
    """
    model, description = loaded
    classes = description["classes"]
    result = evaluate_classifier(model.to(device), loader.batches(), len(classes), loader.count)
    values = {"checkpoint": str(path), "split": split} | result.to_dict(classes)
    result.write(folder, classes)
    sentence = f"{label or split} accuracy {100 * result.accuracy:.2f} % ({result.correct}/{result.count})"
    plot_confusion(result.confusion, classes, sentence, folder / "confusion_matrix.png")
    for entry in values["classes"][:20]:
        accuracy = "no images" if entry["accuracy"] is None else f"{100 * entry['accuracy']:.2f} %"
        print(f"  {entry['class']:<20} {accuracy:>10}  of {entry['count']}")
    print(f"confusion matrix and results: {folder}")
    top5 = "" if result.correct_top5 is None else f", top-5 {100 * result.correct_top5 / result.count:.2f} %"
    print(f"loss {result.loss:.4f}{top5}")
    print(sentence)
    return values


def evaluate(config: EvaluateConfig, checkpoint: Path) -> None:
    """Evaluate a trained model.

    Args:
        config: on which images, and where the results go.
        checkpoint: a weights file, or the folder of a run, whose last weights are taken.

    Raises:
        ValueError: a checkpoint or data that are not there or don't fit; before any work is done.
    """
    path = checkpoint / "last.safetensors" if checkpoint.is_dir() else checkpoint
    if checkpoint.is_dir() and not path.exists():
        raise ValueError(f"{checkpoint} holds no last.safetensors; give the folder of a run, or a .safetensors file")
    if config.json and not Path(config.json).absolute().parent.is_dir():
        raise ValueError(
            f"--json={config.json}: there is no folder {Path(config.json).absolute().parent}; make it first"
        )
    device = pick_device(config.device)
    model, description = load_classifier(path)
    data = build_from_dict(Config, description["config"]).data
    changed = {k: v for k, v in asdict(config.data).items() if v is not None}
    for name, value in changed.items():
        setattr(data, name, value)
    look = dict(description["preprocessing"])
    mean, std = look.pop("mean"), look.pop("std")
    form = ImageFormat(look["mode"], tuple(look["image_size"]), look["interpolation"])

    dataset = load(
        data.kind,
        data.root,
        image_size=form.image_size,
        fake_images=data.fake_images,
        classes=description["classes"],
        parts=("test",) if config.split == "test" else ("train", "val"),
        allow_missing_classes=data.allow_missing_classes,
    )
    if config.split == "val":
        dataset.hold_out(data.hold_out, data.split_seed)
    source = dataset.val if config.split == "val" else dataset.test
    if source is None:
        raise ValueError(
            f"{data.kind} in {data.root} has no {config.split} images; choose another --split or --data.root"
        )
    in_memory = hold_in_memory(data, form, len(source))
    images, notes = open_part(config.split, source, data, form, in_memory)
    for note in [*[f"data.{k} is {v}, other than in training" for k, v in changed.items()], *dataset.notes, *notes]:
        print(f"note: {note}")
    loader = make_loader(
        images, form, config.batch_size, BatchTransform(mean, std), workers=data.workers, device=device
    )
    parts = (path.stem, config.split, Path(data.root).name if {"kind", "root"} & changed.keys() else "test")
    name = "_".join(["evaluation", *[p for p in parts if p not in ("last", "test")]])
    folder = Path(config.out) if config.out else path.parent / name
    values = report(path, (model, description), loader, config.split, folder, device)
    if config.json:
        with replacing(Path(config.json)) as temporary:
            temporary.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
