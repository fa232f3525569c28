"""The configuration of a run: typed fields with their meaning, read from a YAML file and the command line, strictly."""

import dataclasses
import difflib
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

set_parsing_settings(docstring_parse_attribute_docstrings=True)

Size = int | tuple[int, int]


@dataclass
class ModelConfig:
    """The network. Fields left at null are as in the preset."""

    preset: str = "tiny_patch4_32"
    """Name of a preset: tiny_patch4_32, small_patch4_32, base_patch4_32, tiny_patch16_224, small_patch16_224, ..."""
    patch_size: Size | None = None
    """Side of a patch in pixels, or [height, width]; must divide the image size."""
    dim: int | None = None
    """Width of the token vectors."""
    depth: int | None = None
    """Number of encoder layers."""
    heads: int | None = None
    """Number of attention heads; must divide dim."""
    hidden_dim: int | None = None
    """Width inside the feed-forward networks; 4 * dim where neither this nor the preset says otherwise."""
    pooling: Literal["class", "mean"] | None = None
    """What the classifier reads: the class token, or the mean of the patches."""
    registers: int | None = None
    """Number of register tokens."""
    positions: Literal["learned", "sinusoidal", "rotary"] | None = None
    """How tokens know where they are: learned vectors, fixed 2-D sinusoids, or rotary 2-D."""
    dropout: float | None = None
    """Probability of dropping an element of tokens, attention weights, hidden units and branch outputs."""
    drop_path: float | None = None
    """Probability of dropping a branch of the last layer for a sample; rises linearly from 0 in the first."""
    layer_scale: float | None = None
    """Initial value of a learned factor per channel on each branch."""
    qk_norm: bool | None = None
    """Normalise queries and keys."""


@dataclass
class DataConfig:
    """The images."""

    kind: Literal["digits", "cifar10", "cifar100", "imagefolder", "fake"] = "cifar10"
    """Data set: scikit-learn's digits (no download), CIFAR, your own folders, or random images."""
    root: str = "data"
    """Folder of the data: CIFAR is downloaded there; imagefolder reads ROOT/train/CLASS/FILE, and val/ and test/."""
    image_size: Size | None = None
    """Pixels a side, or [height, width]; null for the data set's own (digits 8, CIFAR 32) or the preset's."""
    mode: Literal["L", "RGB", "RGBA"] | None = None
    """Grey, colour, or colour with transparency; null for the data set's own. Images of any mode are converted."""
    interpolation: Literal["nearest", "bilinear", "bicubic"] = "bicubic"
    """How images of another size are resized."""
    hold_out: float = 0.1
    """Share of the training images held out to select models on, class by class (a val folder takes their place)."""
    split_seed: int = 0
    """Seed of that choice; the same for all seeds of training, so that their results compare."""
    skip_broken: bool = False
    """Leave out images that can't be read instead of stopping; all are read once beforehand."""
    allow_missing_classes: bool = False
    """Let val and test folders lack classes."""
    in_memory: bool | None = None
    """Hold all images in memory; null does so for sizes up to 64 pixels where they take at most 2 GiB."""
    workers: int = 2
    """Processes that read images which are not held in memory; 0 reads them in the training process."""
    fake_images: int = 1000
    """Number of random training images of kind fake."""


@dataclass
class AugmentConfig:
    """Augmentation of the training images."""

    shift: int = 4
    """Move each image by up to so many pixels."""
    padding: Literal["reflect", "zero"] = "reflect"
    """What comes in from outside then: the image's reflection, or black."""
    flip: bool = True
    """Mirror half of the images, left to right."""
    min_crop_area: float = 1.0
    """Smallest share of an image that a random resized crop keeps; 1 for no such crop."""
    policy: Literal["none", "randaugment", "trivialaugment"] = "none"
    """Random operations on each image."""
    magnitude: int = 9
    """Strength of randaugment's operations, 0 to 30."""
    erase: float = 0.0
    """Probability of erasing a rectangle of an image."""
    mixup: float = 0.0
    """Beta parameter of MixUp, 0 for none; with CutMix too, each batch takes one of the two."""
    cutmix: float = 0.0
    """Beta parameter of CutMix, 0 for none."""


@dataclass
class TrainConfig:
    """Optimisation, and what is written on the way."""

    epochs: int = 100
    """Passes over the training images."""
    batch_size: int = 128
    """Images per forward pass."""
    accumulate: int = 1
    """Batches whose gradients make one update."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    min_lr: float = 1e-5
    """Learning rate of the last update."""
    warmup_epochs: float = 5.0
    """Epochs over which the learning rate rises from 0 to its peak; a cosine takes it down to min_lr."""
    weight_decay: float = 0.05
    """Decoupled weight decay of weight matrices; biases, norms, class token, registers and positions have none."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    clip_norm: float = 1.0
    """Largest norm of the gradient, 0 for any."""
    label_smoothing: float = 0.1
    """Probability that labels give to all classes alike."""
    ema_decay: float = 0.0
    """Decay of the running average of the weights per update, 0 for no average."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of the forward pass; auto takes bf16 or else fp16 on cuda, fp32 elsewhere."""
    compile: bool = False
    """Compile the model with torch.compile."""
    deterministic: bool = False
    """Allow only operations that give the same bits on each run (on the CPU they do so without this)."""
    checkpoint_every: int | None = None
    """Updates between two training states; null for one at the end of each epoch only."""
    log_every: int = 10
    """Updates between two readings of the loss (and checks that it is finite)."""
    tensorboard: bool = False
    """Also write TensorBoard files (needs the tensorboard extra)."""


@dataclass
class Config:
    """A training run."""

    seed: int = 0
    """Seed of weights, order and augmentation."""
    device: str = "auto"
    """cuda, mps, cpu, or auto for the first of them that is there."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        """Refuse values out of range. What the data and the network can't do, they refuse themselves."""
        at_least = {
            "seed": (self.seed, 0),
            "data.split_seed": (self.data.split_seed, 0),
            "data.workers": (self.data.workers, 0),
            "data.fake_images": (self.data.fake_images, 20),
            "augment.shift": (self.augment.shift, 0),
            "augment.mixup": (self.augment.mixup, 0),
            "augment.cutmix": (self.augment.cutmix, 0),
            "train.epochs": (self.train.epochs, 1),
            "train.batch_size": (self.train.batch_size, 1),
            "train.accumulate": (self.train.accumulate, 1),
            "train.lr": (self.train.lr, 0),
            "train.min_lr": (self.train.min_lr, 0),
            "train.warmup_epochs": (self.train.warmup_epochs, 0),
            "train.weight_decay": (self.train.weight_decay, 0),
            "train.clip_norm": (self.train.clip_norm, 0),
            "train.checkpoint_every": (self.train.checkpoint_every or 1, 1),
            "train.log_every": (self.train.log_every, 1),
        }
        for name, (value, low) in at_least.items():
            if not low <= value < float("inf"):
                raise ValueError(f"{name}={value} is out of range; it must be a finite number of at least {low}")
        shares = {
            "data.hold_out": (self.data.hold_out, self.data.hold_out < 1),
            "augment.min_crop_area": (self.augment.min_crop_area, 0 < self.augment.min_crop_area <= 1),
            "augment.erase": (self.augment.erase, self.augment.erase <= 1),
            "train.label_smoothing": (self.train.label_smoothing, self.train.label_smoothing < 1),
            "train.ema_decay": (self.train.ema_decay, self.train.ema_decay < 1),
            "train.betas[0]": (self.train.betas[0], self.train.betas[0] < 1),
            "train.betas[1]": (self.train.betas[1], self.train.betas[1] < 1),
            "model.dropout": (self.model.dropout or 0.0, (self.model.dropout or 0.0) < 1),
        }
        for name, (share, fits) in shares.items():
            if share < 0 or not fits:
                raise ValueError(f"{name}={share} is out of range; it must be a share between 0 and 1")
        if not 0 <= self.augment.magnitude <= 30:
            raise ValueError(f"augment.magnitude={self.augment.magnitude} is out of range; it must be from 0 to 30")
        if self.train.min_lr > self.train.lr:
            raise ValueError(f"train.min_lr={self.train.min_lr} is above train.lr={self.train.lr}; lower it")
        if self.train.warmup_epochs >= self.train.epochs:
            raise ValueError(
                f"train.warmup_epochs={self.train.warmup_epochs} leaves nothing of train.epochs={self.train.epochs}; "
                "lower it"
            )
        if self.augment.policy != "none" and self.data.mode == "RGBA":
            raise ValueError(f"augment.policy={self.augment.policy} knows no transparency; set data.mode to RGB or L")


@dataclass
class DataOverrides:
    """Other data than those of training; fields left at null are as in training."""

    kind: Literal["digits", "cifar10", "cifar100", "imagefolder", "fake"] | None = None
    """Data set; its classes must be those of the model."""
    root: str | None = None
    """Folder of the data."""
    skip_broken: bool | None = None
    """Leave out images that can't be read instead of stopping."""
    allow_missing_classes: bool | None = None
    """Let the folders lack classes."""
    workers: int | None = None
    """Processes that read images which are not held in memory."""


@dataclass
class EvaluateConfig:
    """An evaluation of a trained model."""

    split: Literal["test", "val"] = "test"
    """Which images: the test set, or those held out from the training set."""
    json: str | None = None
    """Also write all results into this file."""
    out: str | None = None
    """Folder for the confusion matrix and the results; null for `evaluation` beside the checkpoint."""
    batch_size: int = 256
    """Images per forward pass; the result does not depend on it."""
    device: str = "auto"
    """cuda, mps, cpu, or auto for the first of them that is there."""
    data: DataOverrides = field(default_factory=DataOverrides)

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} is out of range; it must be at least 1")


class Parser(ArgumentParser):
    """A parser whose errors are one sentence, name the nearest valid key, and end with exit status 2."""

    def __init__(self, **arguments: Any):
        super().__init__(allow_abbrev=False, **arguments)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message, with the nearest valid key where it is about an unknown one, and exit with status 2."""
        hint = ""
        if message.startswith("Unexpected config"):
            message = "the configuration file holds no fields; expected are sections such as `train:` with fields below"
        if any(w in message for w in ("not accept", "unrecognized", "ambiguous")):
            words = [w.strip("'\",:=").lstrip("-").split("=")[0] for w in message.split()]
            group = f"{words[1]}." if words[0] == "Group" else ""
            near = next(filter(None, (self.nearest(group, word) for word in reversed(words) if word)), None)
            hint = f"; did you mean {near}?" if near else ""
        print(f"{self.prog}: error: {message}{hint} ({self.prog} --help lists all fields)", file=sys.stderr)
        raise SystemExit(2)

    def nearest(self, group: str, key: str) -> str | None:
        """The field whose name is most like an unknown key: in its own section, or in another one."""
        fields = [a.dest for a in self._actions if a.option_strings and a.dest not in ("help", "print_config")]
        if close := difflib.get_close_matches(group + key, fields, n=1, cutoff=0.8):
            return close[0]
        leaves = {name.rpartition(".")[2]: name for name in reversed(fields)}
        close = difflib.get_close_matches(key.rpartition(".")[2], list(leaves), n=1, cutoff=0.75)
        return leaves[close[0]] if close else None


T = typing.TypeVar("T")


def build(cls: type[T], values: Namespace, where: str = "") -> T:
    """A dataclass from parsed values.

    The parser accepts null, and a bare value for a whole section; this does not.

    Raises:
        ValueError: null for a field that can't be null, a section that is no section, or values out of range.
    """
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        value, name = getattr(values, f.name), where + f.name
        if dataclasses.is_dataclass(hints[f.name]):
            if not isinstance(value, Namespace):
                raise ValueError(f"{name}={value!r} is not a section; give it fields of its own, indented, one a line")
            value = build(hints[f.name], value, name + ".")
        elif value is None and types.NoneType not in typing.get_args(hints[f.name]):
            raise ValueError(f"{name} has no value; remove the line to use the default ({f.default})")
        arguments[f.name] = value
    return cls(**arguments)


def build_from_dict(cls: type[T], values: dict[str, Any]) -> T:
    """A configuration from what `to_dict` made of it, checked like one from a file. Raises ValueError."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, None)
    try:
        return build(cls, parser.parse_object(values))
    except (TypeError, KeyError, ArgumentError) as error:
        raise ValueError(f"the stored configuration can't be used: {error}") from error


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as nested dictionaries of plain values, for YAML and JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return plain(dataclasses.asdict(config))


def to_yaml(config: Any) -> str:
    """A configuration as YAML text that `read_config` reads again."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


FREE_TO_CHANGE = {"device", "data.root", "data.workers", "train.log_every", "train.checkpoint_every"}
"""Fields that a resumed run may change: its result does not depend on them, but for rounding on another device."""


def differences(before: Any, now: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """Fields whose values differ between two configurations and must not, as {name: (before, now)}."""
    found: dict[str, tuple[Any, Any]] = {}
    for f in dataclasses.fields(before):
        a, b, name = getattr(before, f.name), getattr(now, f.name), where + f.name
        if dataclasses.is_dataclass(a):
            found |= differences(a, b, name + ".")
        elif a != b and name not in FREE_TO_CHANGE:
            found[name] = (a, b)
    return found


def add_config(parser: Parser, cls: type) -> None:
    """Give a parser `--config FILE` and an option for every field of a configuration."""
    parser.add_argument("--config", action="config", help="YAML file with any of the fields below.")
    parser.add_class_arguments(cls, None)


def parse(parser: Parser, arguments: list[str]) -> Namespace:
    """Parse a command line; whatever is wrong with it or its files ends in `Parser.error`."""
    try:
        return parser.parse_args(arguments)
    except (TypeError, UnicodeDecodeError, yaml.YAMLError) as error:
        parser.error(str(error))


def read_config(path: str | Path, overrides: list[str] | None = None, prog: str = "vit-scratch") -> Config:
    """The configuration in a YAML file, with overrides such as ["--train.lr", "1e-4"].

    Raises:
        SystemExit: with status 2 where file or overrides are wrong, after a message.
        ValueError: as `build`.
    """
    parser = Parser(prog=prog)
    add_config(parser, Config)
    return build(Config, parse(parser, ["--config", str(path), *(overrides or [])]))
