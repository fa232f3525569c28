"""Image classification: trains a Vision Transformer on a data set, and evaluates a trained one.

Shapes: B batch, C channels.
"""

from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_scratch.config import FOR_IMAGES, ClassificationConfig, EvaluateConfig, ModelConfig
from vit_scratch.data.augmentation import SmallerFirst
from vit_scratch.data.images import CHANNELS, Mode
from vit_scratch.data.loaders import ImageFormat, Loader
from vit_scratch.data.sources import NATIVE, load
from vit_scratch.evaluation.calibration import fit_temperature
from vit_scratch.evaluation.classification import ClassificationResult, evaluate_classifier
from vit_scratch.evaluation.plots import plot_confusion
from vit_scratch.evaluation.probes import NEIGHBOURS, collect, linear_probe, nearest_neighbours
from vit_scratch.tasks.classifier import Classifier, load_classifier, read_classifier
from vit_scratch.tasks.generalisation import measure_extras, open_extras
from vit_scratch.tasks.image_data import evaluation_images, prepare
from vit_scratch.tasks.report import write_report
from vit_scratch.tasks.run import (
    is_checkpoint,
    open_run,
    refuse_file,
    refuse_overrides,
    train_model,
    weights_file,
    write_json,
)
from vit_scratch.training import distributed
from vit_scratch.training.device import pick_precision, use_deterministic_algorithms
from vit_scratch.vision.patch_embedding import as_pair
from vit_scratch.vision.vit import VisionTransformer, create_vit, vit_arguments


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


def train(config: ClassificationConfig, out: Path, *, resume: bool = False) -> int | None:
    """Train a Vision Transformer and report its accuracy on the test set, which is read once, at the end.

    Args:
        config: what to train, on what, and how.
        out: folder of the run.
        resume: go on from the run's newest training state.

    Returns:
        None when training is complete, or the number of the signal that stopped it.

    Raises:
        ValueError: a configuration that can't work, or data that are not there; before any work is done.
        OSError, NonFiniteError: what can go wrong later, as `train_model`.
    """
    device = distributed.join(config.device)
    precision = pick_precision(config.train.precision, device)
    sharded = config.train.sharded
    if sharded and distributed.process()[1] == 1:
        raise ValueError("train.sharded=true divides a model among several processes; start them with torchrun")
    config, form, initial = resolve(config)
    states = open_run(config, out, resume)
    if config.train.deterministic:
        use_deterministic_algorithms()

    with distributed.first_here_first():
        dataset = load(
            config.data.kind,
            config.data.root,
            image_size=form.image_size,
            fake_images=config.data.fake_images,
            allow_missing_classes=config.data.allow_missing_classes,
        )
    data = prepare(config, dataset, form, device, initial)
    states.identity = data.identity()
    torch.manual_seed(config.seed)
    arguments = model_arguments(config, form.image_size, CHANNELS[form.mode], len(dataset.classes), initial)
    model = create_vit(**arguments)
    if not sharded:
        model = model.to(device)
    notes = data.notes
    if initial is not None:
        notes = [*notes, begin_with(model, initial, dataset.classes, config.init)]
    if config.freeze:
        model.freeze()
    size = f"{form.image_size[0]}x{form.image_size[1]}"

    def validate(network: nn.Module) -> dict[str, float]:
        assert data.val is not None
        result = evaluate_classifier(
            network, data.val.batches(), len(dataset.classes), data.val.count, distributed.gather
        )
        return {"loss": result.loss, "accuracy": result.accuracy}

    stopped, summary = train_model(
        config,
        out,
        model,
        data.train,
        partial(smoothed_cross_entropy, config.train.label_smoothing),
        validate if data.val else None,
        states=states,
        resume=resume,
        device=device,
        precision=precision,
        items="images",
        about=[
            *[f"note: {note}" for note in notes],
            f"{config.data.kind}: {data.train.count} training images {size} {form.mode}, "
            f"{data.val.count if data.val else 0} held out, {data.test.count if data.test else 0} test, "
            f"{len(dataset.classes)} classes",
            f"{config.model.preset}: {model.grid[0]}x{model.grid[1]} patches",
        ],
        description={
            "task": "classification",
            "model": arguments,
            "classes": dataset.classes,
            "preprocessing": asdict(form) | {"mean": data.mean, "std": data.std},
        },
        adapt=SmallerFirst([(as_pair("size", s), share) for s, share in config.augment.smaller_first])
        if config.augment.smaller_first
        else None,
        train_name="train_mixed" if config.augment.mixup or config.augment.cutmix else "train",
        layer_decay=config.train.layer_decay,
        sharded=sharded,
    )
    if stopped is not None:
        return stopped

    if data.val is not None:
        network = model.to(device).eval()
        logits, labels = (
            np.concatenate(p) for p in zip(*distributed.gather(collect(network, data.val.batches())), strict=True)
        )
        summary["temperature"] = fit_temperature(logits, labels)
    if data.test is None:
        print(f"there are no test images in {config.data.root}, so there is no test accuracy")
    else:
        finals = [("last", "test", "evaluation", "test")]  # its sentence is the last line that is printed
        if config.train.ema_decay:
            finals.insert(0, ("ema", "test_ema", "evaluation_ema", "test, averaged weights:"))
        for name, key, folder, label in finals:
            path = out / f"{name}.safetensors"
            trained, described = load_classifier(path)
            if sharded:
                distributed.shard(trained, device)
            classes = described["classes"]
            result = measure(trained, classes, data.test, out / folder, device, label)
            summary[key] = {"checkpoint": str(path), "split": "test"} | result.to_dict(classes)
    if distributed.is_first():
        write_json(out / "summary.json", summary)
    return None


def resolve(config: ClassificationConfig) -> tuple[ClassificationConfig, ImageFormat, Classifier | None]:
    """Fill in what the configuration leaves to the preset, the data set, or the model that the training begins with.

    Returns:
        The whole configuration, how images must look, and the model to begin with, if there is one.

    Raises:
        ValueError: a size that is none, a model that can't be built for it, or one to begin with that does not fit.
    """
    initial = None
    if config.init is not None:
        try:
            initial = read_classifier(config.init)[1]
        except ValueError as error:
            raise ValueError(f"init={config.init}: {error}") from error
    size, native_mode = NATIVE[config.data.kind]
    mode = config.data.mode or native_mode
    if initial is not None:
        size, mode = initial.form.image_size, config.data.mode or initial.form.mode
        check_initial(config, initial, mode)
    elif size is None:
        size = as_pair("image_size", vit_arguments(config.model.preset)["image_size"])
    if config.data.image_size is not None:
        size = as_pair("data.image_size", config.data.image_size)
    data = replace(config.data, image_size=size, mode=mode)
    arguments = model_arguments(config, size, CHANNELS[mode], 10, initial)
    with torch.device("meta"):  # refuses a wrong model in no time, before data are read or downloaded
        network = create_vit(**arguments)
    check_stages(config.augment.smaller_first, size, network.patch_embedding.patch_size)
    model = ModelConfig(**{f.name: arguments[f.name] for f in fields(ModelConfig)})
    return replace(config, data=data, model=model), ImageFormat(mode, size, data.interpolation), initial


FREE = ("preset", "dropout", "drop_path")
"""Fields of the model that a configuration sets even where the model to begin with is given."""


def check_initial(config: ClassificationConfig, initial: Classifier, mode: Mode) -> None:
    """Raise ValueError where a configuration asks for another model than the one that it begins with."""
    has = initial.model.arguments
    asked = {f.name: (getattr(config.model, f.name), f.default) for f in fields(ModelConfig) if f.name not in FREE}
    other = {n: value for n, (value, default) in asked.items() if value not in (None, default, has[n])}
    if other:
        listed = ", ".join(f"model.{name}={value} (it has {has[name]})" for name, value in other.items())
        raise ValueError(f"the model of init={config.init} is another than was asked for; leave out {listed}")
    if CHANNELS[mode] != has["in_channels"]:
        raise ValueError(
            f"data.mode={mode} has {CHANNELS[mode]} channels, and init={config.init} takes {has['in_channels']}; leave "
            f"data.mode out for {initial.form.mode}"
        )


def begin_with(model: VisionTransformer, initial: Classifier, classes: list[str], name: str | None) -> str:
    """Give a model the weights of one to begin with, positions resized, but for the head where the classes differ.

    Args:
        model: with the same arguments but for image size, classes and dropout.
        initial: the one to begin with.
        classes: of the data.
        name: what the source is called.

    Returns:
        A sentence on what was done.
    """
    if model.patch_embedding.image_size != initial.model.patch_embedding.image_size:
        initial.model.set_input_size(model.patch_embedding.image_size)
    weights = initial.model.state_dict()
    if same := classes == initial.classes:
        head = "its head, too"
    else:
        weights = {n: t for n, t in weights.items() if not n.startswith("head.")}
        head = f"a new head, as the {len(classes)} classes are not its {len(initial.classes)}"
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) == (set() if same else {"head.weight", "head.bias"})
    return f"begins with {name}: {len(weights)} of {len(model.state_dict())} weights; {head}"


def check_stages(stages: list[tuple[Any, float]], size: tuple[int, int], patch_size: tuple[int, int]) -> None:
    """Raise ValueError for stages of smaller images that are none, that patches don't divide, or that leave nothing."""
    for stage, share in stages:
        pair = as_pair("augment.smaller_first", stage)
        if any(n > whole or n % patch for n, whole, patch in zip(pair, size, patch_size, strict=True)):
            raise ValueError(
                f"augment.smaller_first={stages}: {stage} is no size of at most {size} "
                f"that patches of {patch_size} divide"
            )
        if not 0 < share < 1:
            raise ValueError(f"augment.smaller_first={stages}: {share} is no share of the updates between 0 and 1")
    if sum(share for _, share in stages) > 1:
        raise ValueError(f"augment.smaller_first={stages}: the shares exceed 1; what they leave has the full size")


def model_arguments(
    config: ClassificationConfig,
    size: tuple[int, int],
    channels: int,
    num_classes: int,
    initial: Classifier | None = None,
) -> dict[str, Any]:
    """All arguments of `create_vit`: those of the preset or of the model to begin with, and what else is asked for."""
    changes = {k: v for k, v in asdict(config.model).items() if v is not None and k != "preset"}
    if initial is not None:
        changes = initial.model.arguments | {k: changes[k] for k in FREE if k in changes}
    given = changes | {"image_size": list(size), "in_channels": channels, "num_classes": num_classes}
    given["any_size"] = bool(config.augment.smaller_first)
    return {"preset": config.model.preset} | vit_arguments(config.model.preset, **given)


def measure(
    model: VisionTransformer,
    classes: list[str],
    loader: Loader,
    folder: Path,
    device: torch.device,
    label: str,
) -> ClassificationResult:
    """Evaluate a model, write results and confusion matrix, and print them.

    Args:
        model: the model.
        classes: names of its classes.
        loader: the images.
        folder: where results and pictures go.
        device: where to compute.
        label: what the printed sentence calls the images.
    """
    result = evaluate_classifier(model.to(device), loader.batches(), len(classes), loader.count, distributed.gather)
    if not distributed.is_first():
        return result
    result.write(folder, classes)
    sentence = f"{label} accuracy {100 * result.accuracy:.2f} % ({result.correct}/{result.count})"
    plot_confusion(result.confusion, classes, sentence, folder / "confusion_matrix.png")
    for entry in result.to_dict(classes)["classes"][:20]:
        accuracy = "no images" if entry["accuracy"] is None else f"{100 * entry['accuracy']:.2f} %"
        print(f"  {entry['class']:<20} {accuracy:>10}  of {entry['count']}")
    print(f"confusion matrix and results: {folder}")
    top5 = "" if result.correct_top5 is None else f", top-5 {100 * result.correct_top5 / result.count:.2f} %"
    print(f"loss {result.loss:.4f}{top5}")
    print(sentence)
    return result


def evaluate(config: EvaluateConfig, source: str) -> None:
    """Evaluate a trained model: its head, or with `probe` its features, whose data may have other classes.

    Args:
        config: on which images, and where the results go. A probe is fitted to all training images and evaluated on the
            test images, or with the split "val" on those held out and fitted to the others.
        source: as `read_classifier`.

    Raises:
        ValueError: a model or data that are not there or don't fit; before any work is done.
    """
    refuse_overrides(config, {"data.test", "data.skip_empty", "decode.beams", "decode.length_penalty"}, "images")
    device = distributed.join(config.device)
    classifier = read_classifier(source)[1]
    asked = [name for name in FOR_IMAGES if getattr(config, name)]
    if asked and distributed.process()[1] > 1:
        raise ValueError(f"{asked[0]}={getattr(config, asked[0])} works in one process; start it without torchrun")
    if config.probe and len(asked) > 1:
        other = next(name for name in asked if name != "probe")
        raise ValueError(f"{other}={getattr(config, other)} is for the model's head; leave it out, or probe=true")
    if not classifier.classes and not config.probe:
        raise ValueError(
            f"the model in {source} has no classifier, so there is no accuracy to measure; --probe true fits one"
        )
    refuse_file("report", config.report)
    extras = open_extras(config, classifier)
    parts: list[str] = ["train", config.split] if config.probe else [config.split]
    optional = ["val"] if config.report and config.split != "val" else []  # a report's temperature is fitted to these
    images = evaluation_images(config, classifier, parts, device, optional=optional)
    path = Path(source)
    if config.probe:
        train_loader, loader = images.loader("train"), images.loader(config.split)
        values: dict[str, Any] = {"checkpoint": source}
        values |= report_probes(classifier.model.to(device), train_loader, loader, config.split)
    else:
        if path.is_dir():
            home, name = path, "last"
        elif path.is_file():
            home, name = path.parent, path.stem
        else:
            home, name = Path(), source.replace(":", "_").replace("/", "_")
        words = (name, config.split, Path(images.data.root).name if images.changed else "test")
        folder_name = "_".join(["evaluation", *[w for w in words if w not in ("last", "test")]])
        folder = Path(config.out) if config.out else home / folder_name
        loader = images.loader(config.split)
        result = measure(classifier.model, classifier.classes, loader, folder, device, config.split)
        values = {"checkpoint": str(weights_file(path) if is_checkpoint(source) else source), "split": config.split}
        values |= result.to_dict(classifier.classes)
        values |= measure_extras(config, source, images, extras, result, Path(config.report or folder))
        if config.report:
            write_report(Path(config.report), source, images, config.split, result, values)
    if config.json and distributed.is_first():
        write_json(Path(config.json), values)


def report_probes(model: VisionTransformer, train: Loader, test: Loader, split: str) -> dict[str, Any]:
    """Fit probes to the features of some images, print how good they are on others, and return it as plain values."""
    fitted_to, on = (collect(model.eval().pooled_features, loader.batches()) for loader in (train, test))
    total, values = len(on[1]), {"split": split, "fitted_to": len(fitted_to[1]), "count": len(on[1])}
    for name, label, correct in (
        ("knn", f"{min(NEIGHBOURS, len(fitted_to[1]))} nearest neighbours", nearest_neighbours(fitted_to, on)),
        ("linear", "linear probe", linear_probe(fitted_to, on)),
    ):
        values |= {name: {"accuracy": correct / total, "correct": correct}}
        print(f"{split} accuracy of the {label}: {100 * correct / total:.2f} % ({correct}/{total})")
    return values
