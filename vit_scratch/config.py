"""The configuration of a run: typed fields with their meaning, read from a YAML file and the command line, strictly."""

import argparse
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


def check_at_least(values: dict[str, tuple[float, float]]) -> None:
    """Raise ValueError for the first of {name: (value, lowest)} that is lower, or not finite."""
    for name, (value, low) in values.items():
        if not low <= value < float("inf"):
            raise ValueError(f"{name}={value} is out of range; it must be a finite number of at least {low}")


def check_below_one(values: dict[str, float]) -> None:
    """Raise ValueError for the first of {name: value} that is no share of at least 0 and below 1."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} is out of range; it must be a share between 0 and 1")


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
    stem: Literal["patch", "convolution"] | None = None
    """What makes tokens of pixels: one linear map of each patch, or a few convolutions."""
    feed_forward_kernel: int | None = None
    """Side, in patches, of a convolution inside each feed-forward network, with pooling mean; null for none."""
    positions: Literal["learned", "sinusoidal", "rotary"] | None = None
    """How tokens know where they are: learned vectors, fixed 2-D sinusoids, or rotary 2-D."""
    local_attention: float | None = None
    """With rotary positions: how strongly heads in the first half of the layers attend to neighbours at first."""
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
    smaller_first: list[tuple[Size, float]] = field(default_factory=list)
    """Smaller images at first: [size, share of the updates] pairs, in order; what remains has the full size."""
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
    """Optimisation, and what is written on the way, for every task."""

    epochs: int = 100
    """Passes over the training data."""
    budget_pflop: float | None = None
    """Compute to train for, in 10^15 floating-point operations; it takes the place of epochs. Null for no budget."""
    accumulate: int = 1
    """Batches whose gradients make one update."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for everything, or Muon for the matrices of patch embedding, encoder and decoder and AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    muon_lr: float = 0.01
    """Peak learning rate of Muon, which follows the same schedule."""
    min_lr: float = 1e-5
    """Learning rate of the last update."""
    warmup_epochs: float = 5.0
    """Epochs over which the learning rate rises from 0 to its peak."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """How the learning rate falls from its peak to min_lr: half a cosine, or a line."""
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

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_at_least(
            {
                "train.epochs": (self.epochs, 1),
                "train.accumulate": (self.accumulate, 1),
                "train.lr": (self.lr, 0),
                "train.muon_lr": (self.muon_lr, 0),
                "train.min_lr": (self.min_lr, 0),
                "train.warmup_epochs": (self.warmup_epochs, 0),
                "train.weight_decay": (self.weight_decay, 0),
                "train.clip_norm": (self.clip_norm, 0),
                "train.checkpoint_every": (self.checkpoint_every or 1, 1),
                "train.log_every": (self.log_every, 1),
            }
        )
        check_below_one(
            {
                "train.label_smoothing": self.label_smoothing,
                "train.ema_decay": self.ema_decay,
                "train.betas[0]": self.betas[0],
                "train.betas[1]": self.betas[1],
            }
        )
        if self.optimizer == "muon" and self.lr == 0:
            raise ValueError("train.lr=0 leaves nothing to train of what Muon is not for; raise it")
        if self.min_lr > self.lr:
            raise ValueError(f"train.min_lr={self.min_lr} is above train.lr={self.lr}; lower it")
        if self.budget_pflop is not None and not 0 < self.budget_pflop < float("inf"):
            raise ValueError(f"train.budget_pflop={self.budget_pflop} is out of range; it must be above 0, or null")
        if self.budget_pflop is None and self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"train.warmup_epochs={self.warmup_epochs} leaves nothing of train.epochs={self.epochs}; lower it"
            )


@dataclass
class ImageTrainConfig(TrainConfig):
    """Optimisation, and what is written on the way."""

    batch_size: int = 128
    """Images per forward pass, of all processes together."""
    layer_decay: float = 1.0
    """Factor on the learning rate from each layer to the one before it, for fine-tuning; 1 for equal rates."""
    sharded: bool = False
    """Divide weights, gradients and optimizer state among the processes that torchrun starts, for large models."""

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        if self.sharded:
            other = {
                "train.optimizer": (self.optimizer, "adamw"),
                "train.ema_decay": (self.ema_decay, 0.0),
                "train.compile": (self.compile, False),
            }
            for name, (value, needed) in other.items():
                if value != needed:
                    raise ValueError(f"{name}={value} can't be combined with train.sharded=true; set it to {needed}")
            if self.precision == "fp16":
                raise ValueError("train.precision=fp16 can't be combined with train.sharded=true; use bf16 or fp32")
        check_at_least({"train.batch_size": (self.batch_size, 1)})
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"train.layer_decay={self.layer_decay} is out of range; it must be above 0 and at most 1")


@dataclass
class ClassificationConfig:
    """The training of an image classifier."""

    task: Literal["classification"] = "classification"
    """What is trained: classification, or sequence for an encoder-decoder (its fields: --task sequence --help)."""
    seed: int = 0
    """Seed of weights, order and augmentation."""
    device: str = "auto"
    """cuda, mps, cpu, or auto for the first of them that is there."""
    init: str | None = None
    """Weights to begin with: a run, a saved folder, those of this package, or such as timm:vit_tiny_patch16_224."""
    freeze: bool = False
    """Train the head only and keep everything before it as it is in init (a linear probe)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    train: ImageTrainConfig = field(default_factory=ImageTrainConfig)

    def __post_init__(self) -> None:
        """Refuse values out of range. What the data and the network can't do, they refuse themselves."""
        check_at_least(
            {
                "seed": (self.seed, 0),
                "model.dim": (1 if self.model.dim is None else self.model.dim, 1),
                "data.split_seed": (self.data.split_seed, 0),
                "data.workers": (self.data.workers, 0),
                "data.fake_images": (self.data.fake_images, 20),
                "augment.shift": (self.augment.shift, 0),
                "augment.mixup": (self.augment.mixup, 0),
                "augment.cutmix": (self.augment.cutmix, 0),
            }
        )
        if self.freeze and self.init is None:
            raise ValueError("freeze=true trains the head only, on features that nobody trained; give --init, too")
        check_below_one({"data.hold_out": self.data.hold_out, "model.dropout": self.model.dropout or 0.0})
        for name, share, fits in (
            ("augment.min_crop_area", self.augment.min_crop_area, 0 < self.augment.min_crop_area <= 1),
            ("augment.erase", self.augment.erase, 0 <= self.augment.erase <= 1),
        ):
            if not fits:
                raise ValueError(f"{name}={share} is out of range; it must be a share between 0 and 1")
        if not 0 <= self.augment.magnitude <= 30:
            raise ValueError(f"augment.magnitude={self.augment.magnitude} is out of range; it must be from 0 to 30")
        if self.augment.policy != "none" and self.data.mode == "RGBA":
            raise ValueError(f"augment.policy={self.augment.policy} knows no transparency; set data.mode to RGB or L")


@dataclass
class SequenceModelConfig:
    """The encoder-decoder."""

    dim: int = 256
    """Width of the token vectors."""
    encoder_depth: int = 3
    """Number of encoder layers."""
    decoder_depth: int = 3
    """Number of decoder layers."""
    heads: int = 4
    """Number of attention heads; must divide dim."""
    hidden_dim: int | None = None
    """Width inside the feed-forward networks; null for 4 * dim."""
    activation: Literal["relu", "gelu"] = "relu"
    """Activation inside the feed-forward networks."""
    norm_first: bool = True
    """Normalise the input of each branch; false normalises the sum after it, as in 2017."""
    dropout: float = 0.1
    """Probability of dropping an element of embeddings, attention weights, hidden units and branch outputs."""
    tie: Literal["none", "target", "all"] = "all"
    """What shares one matrix: nothing, target embedding and output, or the source embedding with them."""


@dataclass
class SequenceDataConfig:
    """The pairs of sequences."""

    kind: Literal["copy", "reverse", "sort", "text"] = "reverse"
    """Made-up sequences to copy, reverse or sort, or text files, one sentence a line."""
    symbols: int = 20
    """Made-up sequences: number of different symbols."""
    longest: int = 10
    """Made-up sequences: the most symbols one has; they have at least 1."""
    count: int = 20_000
    """Made-up sequences for training; 1,000 others are made to select models on, and 1,000 for testing."""
    root: str = "data"
    """Text: folder of the files, ROOT/train.SOURCE and ROOT/train.TARGET, and val and the test files likewise."""
    source: str = "en"
    """Text: language that is read, as the files' names end."""
    target: str = "de"
    """Text: language that is written, as the files' names end."""
    test: list[str] = field(default_factory=lambda: ["test"])
    """Text: names of the test files, without the language; [] for none."""
    vocabulary: int = 8000
    """Text: size of the byte-pair vocabulary that both languages share, learned from the training files."""
    max_length: int = 128
    """Most tokens a sequence may have; longer training pairs are left out and counted."""
    skip_empty: bool = False
    """Text: leave out pairs with an empty line instead of stopping."""


@dataclass
class DecodeConfig:
    """How targets are generated in evaluation."""

    beams: int = 5
    """Width of the beam search; 1 is greedy."""
    length_penalty: float = 1.0
    """Exponent of the length that scores are divided by; 0 prefers short targets."""

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_at_least({"decode.beams": (self.beams, 1)})
        if not 0 <= self.length_penalty <= 100:
            raise ValueError(f"decode.length_penalty={self.length_penalty} is out of range; it must be from 0 to 100")


@dataclass
class SequenceTrainConfig(TrainConfig):
    """Optimisation, and what is written on the way."""

    batch_tokens: int = 4096
    """Most tokens of a batch, on the side that has more, padding included."""
    weight_decay: float = 0.0
    """Decoupled weight decay of weight matrices; biases and norms have none."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of AdamW's moments."""
    warmup_epochs: float = 1.0
    """Epochs over which the learning rate rises from 0 to its peak."""

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        check_at_least({"train.batch_tokens": (self.batch_tokens, 1)})


@dataclass
class SequenceConfig:
    """The training of an encoder-decoder on pairs of sequences."""

    task: Literal["sequence"] = "sequence"
    """What is trained: sequence, or classification for images (its fields: --task classification --help)."""
    seed: int = 0
    """Seed of weights, order and made-up sequences."""
    device: str = "auto"
    """cuda, mps, cpu, or auto for the first of them that is there."""
    model: SequenceModelConfig = field(default_factory=SequenceModelConfig)
    data: SequenceDataConfig = field(default_factory=SequenceDataConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    train: SequenceTrainConfig = field(default_factory=SequenceTrainConfig)

    def __post_init__(self) -> None:
        """Refuse values out of range. What the data and the network can't do, they refuse themselves."""
        check_at_least(
            {
                "seed": (self.seed, 0),
                "model.dim": (self.model.dim, 1),
                "data.symbols": (self.data.symbols, 1),
                "data.longest": (self.data.longest, 1),
                "data.count": (self.data.count, 1),
                "data.max_length": (self.data.max_length, 2),
            }
        )
        check_below_one({"model.dropout": self.model.dropout})
        if self.data.kind == "text" and self.data.source == self.data.target:
            raise ValueError(
                f"data.source={self.data.source!r} and data.target={self.data.target!r} are the same; "
                "name two languages, as the files' names end"
            )
        if self.data.kind != "text" and self.data.longest + 2 > self.data.max_length:
            raise ValueError(
                f"data.longest={self.data.longest} symbols with start and end exceed "
                f"data.max_length={self.data.max_length} tokens; raise it"
            )
        if self.train.batch_tokens < self.data.max_length:
            raise ValueError(
                f"train.batch_tokens={self.train.batch_tokens} has no room for a sequence of "
                f"data.max_length={self.data.max_length} tokens; raise it"
            )


TASKS: dict[str, Any] = {"classification": ClassificationConfig, "sequence": SequenceConfig}
"""The configuration of each task, by its `task`."""


@dataclass
class DataOverrides:
    """Other data than those of training; fields left at null are as in training."""

    kind: Literal["digits", "cifar10", "cifar100", "imagefolder", "fake"] | None = None
    """Images: data set; its classes must be those of the model."""
    root: str | None = None
    """Folder of the data."""
    skip_broken: bool | None = None
    """Images: leave out those that can't be read instead of stopping."""
    allow_missing_classes: bool | None = None
    """Images: let the folders lack classes."""
    workers: int | None = None
    """Images: processes that read those which are not held in memory."""
    test: list[str] | None = None
    """Text: names of the test files, without the language."""
    skip_empty: bool | None = None
    """Text: leave out pairs with an empty line instead of stopping."""


@dataclass
class DecodeOverrides:
    """How targets of a sequence model are generated; fields left at null are as in its configuration."""

    beams: int | None = None
    """Width of the beam search; 1 is greedy."""
    length_penalty: float | None = None
    """Exponent of the length that scores are divided by; 0 prefers short targets."""


@dataclass
class EvaluateConfig:
    """An evaluation of a trained model."""

    split: Literal["test", "val"] = "test"
    """Which data: those for testing, or those held out to select models on."""
    probe: bool = False
    """Evaluate the features instead of the head: nearest neighbours and a linear map, fitted to the training images."""
    report: str | None = None
    """Also write a report into this folder: report.html, which holds everything, and its pictures and tables."""
    seeds: list[str] = field(default_factory=list)
    """Other trainings of the same recipe, whose accuracy is averaged with this one's: [RUN, RUN]."""
    flips: bool = False
    """Also evaluate the mean of the logits of each image and its mirror image."""
    robustness: bool = False
    """Also evaluate on images with noise, blur, other brightness and contrast, compression and coarse pixels."""
    cifar10_c: str | None = None
    """Folder of CIFAR-10-C, to evaluate on it, too."""
    cifar10_1: str | None = None
    """Folder of CIFAR-10.1, likewise."""
    json: str | None = None
    """Also write all results into this file."""
    out: str | None = None
    """Folder for the results (confusion matrix, translations); null for `evaluation` beside the checkpoint."""
    batch_size: int = 256
    """Images or sequences per forward pass; the result does not depend on it."""
    device: str = "auto"
    """cuda, mps, cpu, or auto for the first of them that is there."""
    data: DataOverrides = field(default_factory=DataOverrides)
    decode: DecodeOverrides = field(default_factory=DecodeOverrides)

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_at_least({"batch_size": (self.batch_size, 1)})


FOR_IMAGES = ("probe", "report", "seeds", "flips", "robustness", "cifar10_c", "cifar10_1")
"""Fields of `EvaluateConfig` that are for models of images only."""


@dataclass
class TranslateConfig:
    """A translation of sentences."""

    attention: str | None = None
    """Also draw what the first sentence's translation attends to, into this PNG file."""
    device: str = "auto"
    """cuda, mps, cpu, or auto for the first of them that is there."""
    decode: DecodeOverrides = field(default_factory=DecodeOverrides)


@dataclass
class PredictConfig:
    """What a trained model says about images."""

    checkpoint: str = "cifar10-tiny"
    """Folder of a run (its last weights), a .safetensors file, a folder that save_pretrained wrote, weights of this
    package, or such as timm:vit_tiny_patch16_224."""
    top: int = 5
    """How many classes to name for each image."""
    attention: str | None = None
    """Folder for a picture of each image with what the model looks at."""
    device: str = "auto"
    """cuda, mps, cpu, or auto for the first of them that is there."""

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_at_least({"top": (self.top, 1)})


@dataclass
class ConvertConfig:
    """A conversion of a Vision Transformer's weights."""

    to: Literal["timm", "torchvision", "transformers", "vit_scratch"] = "vit_scratch"
    """In whose form to write it."""
    architecture: str | None = None
    """For a file with weights of another library: of what model, such as timm:vit_tiny_patch16_224."""
    incomplete: bool = False
    """Take those weights of such a file that fit, and leave the others as they are at first."""
    image_size: Size | None = None
    """Make it a model for images of this size; learned positions are resized. Null leaves it as it is."""
    half: bool = False
    """Write weights in half precision (float16), for vit_scratch only: half the size, and computed in float32 again."""
    about: str | None = None
    """A sentence for the model card of a folder, such as on which data the model was trained."""


@dataclass
class ExportConfig:
    """An export of a trained model, for use without this package."""

    quantize: bool = False
    """Images, as .onnx: 8-bit integers for the weights of linear maps, for CPUs; about a quarter of the size."""
    evaluate: bool = False
    """Images, for a run: measure the accuracy on its test images, before and after."""


@dataclass
class ProfileConfig:
    """A profile of a Vision Transformer: what its parts cost, and how fast it is here."""

    batch_size: int = 64
    """Images per step of what is measured."""
    json: str | None = None
    """Also write all figures into this file."""
    device: str = "auto"
    """cuda, mps, cpu, or auto for the first of them that is there."""

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_at_least({"batch_size": (self.batch_size, 1)})


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
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            raise ValueError(f"{name} has no value; remove the line to use the default ({default})")
        arguments[f.name] = value
    return cls(**arguments)


def build_from_dict(cls: type[T], values: dict[str, Any]) -> T:
    """A configuration from what `to_dict` made of it, checked like one from a file. Raises ValueError."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, None)
    try:
        return build(cls, parser.parse_object(values))
    except (AttributeError, TypeError, KeyError, ArgumentError) as error:
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
    if type(before) is not type(now):  # of two tasks, which have other fields
        return {"task": (before.task, now.task)}
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


def preview(arguments: list[str]) -> argparse.Namespace:
    """What a command line of `train` says about its task, configuration files, folder and whether to resume.

    Nothing of it is checked; `parse` does that.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--task")
    first.add_argument("--config", action="append", default=[])
    first.add_argument("--out")
    first.add_argument("--resume", action="store_true")
    try:
        return first.parse_known_args(arguments)[0]
    except argparse.ArgumentError:
        return argparse.Namespace(task=None, config=[], out=None, resume=False)


def config_class(arguments: list[str]) -> Any:
    """The class of the configuration that a command line is about.

    What --task says, or else the `task` in the last --config file that has one; classification where neither does.

    Raises:
        ValueError: an unknown task, or a file that gives a field twice, or is a trap.
    """
    known = preview(arguments)
    task = known.task
    for path in known.config:
        try:
            text = Path(path).read_text(encoding="utf-8")
            refuse_traps(path, text)
            content = yaml.safe_load(text)
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            continue  # `parse` says what is wrong
        refuse_repetitions(path, yaml.compose(text, yaml.SafeLoader))
        if isinstance(content, dict) and known.task is None:
            task = content.get("task", task)
    task = "classification" if task is None else task
    if not isinstance(task, str) or task not in TASKS:
        raise ValueError(f"task={task!r} is unknown; choose from {', '.join(TASKS)}")
    return TASKS[task]


DEEPEST = 20
"""So deep may lists and sections stand in each other."""


def refuse_traps(path: str, text: str) -> None:
    """Raise ValueError for YAML that takes more memory or a deeper stack than there is, however short it is."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        place = f"{path}, line {event.start_mark.line + 1 if event.start_mark else '?'}"
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"{place}: *{event.anchor} stands for another part; write that part out")
        if depth > DEEPEST:
            raise ValueError(f"{place}: more than {DEEPEST} lists or sections stand in each other")


def refuse_repetitions(path: str, node: Any, where: str = "") -> None:
    """Raise ValueError for a field that a YAML file gives twice: the first would be lost without a word."""
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = f"{where}{key.value}", key.start_mark.line + 1
        if name in lines:
            raise ValueError(f"{path} gives {name} twice, in lines {lines[name]} and {line}; put them together")
        lines[name] = line
        refuse_repetitions(path, value, f"{name}.")


def read_config(path: str | Path, overrides: list[str] | None = None, prog: str = "vit-scratch") -> Any:
    """The configuration in a YAML file, with overrides such as ["--train.lr", "1e-4"].

    Raises:
        SystemExit: with status 2 where file or overrides are wrong, after a message.
        ValueError: as `build` and `config_class`.
    """
    arguments = ["--config", str(path), *(overrides or [])]
    cls = config_class(arguments)
    parser = Parser(prog=prog)
    add_config(parser, cls)
    return build(cls, parse(parser, arguments))
