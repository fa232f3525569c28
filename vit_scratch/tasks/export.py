"""The command export: a trained model as a program for ONNX Runtime or torch.export, which is compared with the model.

Shapes: B batch, C channels, S source tokens, N target tokens so far, V vocabulary; L decoder layers, H heads, K head
width. The memory (L, 2, B, H, S, K) and the past (L, 2, B, H, N, K) of an exported encoder-decoder are the keys and
values of all layers of the decoder, for its attention to the source and to what it has written.
"""

import json
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vit_scratch.config import TASKS, ExportConfig
from vit_scratch.data.augmentation import BatchTransform
from vit_scratch.data.loaders import Loader, open_images
from vit_scratch.data.sequences import BOS, EOS, PAD, SPECIAL_TOKENS, pad, source_ids
from vit_scratch.data.sources import load
from vit_scratch.evaluation.classification import evaluate_classifier
from vit_scratch.tasks.classifier import Classifier, read_classifier
from vit_scratch.tasks.image_data import plain_loader
from vit_scratch.tasks.run import is_checkpoint, task_of, weights_file
from vit_scratch.tasks.sequence import load_transformer
from vit_scratch.training.checkpoint import replacing
from vit_scratch.transformer.attention import KeyValueCache
from vit_scratch.transformer.decoder import DecoderCache
from vit_scratch.transformer.generation import greedy
from vit_scratch.transformer.transformer import Transformer

TOLERANCE = 1e-4
"""The largest difference of logits that an export may leave; where they exceed 1, as a share of the largest."""
FILES = (".pt2", ".onnx")
"""As what image models are written."""
ONNX_LIMIT = 2**31
"""Bytes that an ONNX file with its weights inside can't exceed."""
BATCHES = (1, 2, 7)
"""Numbers of images that are compared: one, as many as the program was made with, and another number."""
LENGTHS = (1, 3, 7, 20)
"""Tokens of the sources that are compared, and the most that are generated for each is the last of them."""
ANY_BATCH = ({0: Dim("batch")},)
"""That images come in any number."""


def export(config: ExportConfig, source: str, destination: Path) -> None:
    """Write a trained model as a program, print how much it differs from the model, and refuse to if that is too much.

    Args:
        config: what else to do.
        source: as `read_classifier`, or the run or the weights of a sequence model.
        destination: for an image model a .pt2 or an .onnx file, for a sequence model a folder, which will hold
            encoder.onnx, decoder.onnx and, for text, tokenizer.json.

    Raises:
        ValueError: a source that can't be read, a destination of the wrong kind, options that don't fit, or a package
            that is missing; before any work is done.
        RuntimeError, OSError: what can go wrong later, such as a program that differs; nothing is left then.
    """
    if task_of(source, list(TASKS)) == "classification":
        export_classifier(config, source, destination)
    else:
        export_transformer(config, source, destination)


def check_destination(destination: Path, fits: bool, wanted: str) -> None:
    """Raise ValueError for a destination whose name does not fit what is wanted, that exists, or has no folder."""
    if not fits:
        raise ValueError(f"destination={destination} is not {wanted}; choose such a name")
    if destination.exists():
        raise ValueError(f"destination={destination} is there already; choose another, or remove it first")
    if not destination.absolute().parent.is_dir():
        raise ValueError(
            f"destination={destination}: there is no folder {destination.absolute().parent}; make it first"
        )


def check_packages() -> None:
    """Raise ValueError where a package that writes or runs ONNX is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"ONNX needs a package that is missing ({error.name}); pip install 'vit-scratch[export]'"
        ) from error


# Images


class PixelClassifier(nn.Module):
    """A classifier with its normalisation in front, which those who run the program can't forget or get wrong then.

    Args:
        classifier: the model, and mean and standard deviation of each channel.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, classifier: Classifier):
        super().__init__()
        self.model = classifier.model
        self.register_buffer("mean", torch.tensor(classifier.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(classifier.std).view(-1, 1, 1))
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Pixels from 0 to 1 (B, C, height, width) -> logits (B, classes)."""
        return self.model((images - self.mean) / self.std)


def program_of(model: PixelClassifier, shape: tuple[int, ...]) -> ExportedProgram:
    """The program for any number of images (C, height, width)."""
    # Made with two, as torch.export takes a dimension of one for a constant.
    return torch.export.export(model, (torch.zeros(2, *shape),), dynamic_shapes=ANY_BATCH)


def export_classifier(config: ExportConfig, source: str, destination: Path) -> None:
    """Write an image model as a .pt2 or an .onnx file; arguments and errors as `export`.

    The program takes pixels from 0 to 1 (B, C, height, width) in float32, for any B, and gives logits (B, classes).
    Beside it, in ONNX's metadata_props or torch.export's extra_files, stand as JSON the `classes` and the
    `preprocessing`: mode, image_size and interpolation for whoever prepares images, and mean and std, which are inside;
    and, where it is known, the `temperature` that divides the logits for calibrated probabilities.
    """
    check_destination(
        destination, destination.suffix in FILES, "a .pt2 or an .onnx file, as which image models are written"
    )
    if destination.suffix == ".onnx":
        check_packages()
    elif config.quantize:
        raise ValueError(f"quantize=true is for .onnx files, not for destination={destination}")
    if config.evaluate and not is_checkpoint(source):
        raise ValueError(f"evaluate=true needs a run of ours, which knows its data, and {source} is none")
    classifier = read_classifier(source)[1]
    if destination.suffix == ".onnx" and 4 * sum(p.numel() for p in classifier.model.parameters()) > ONNX_LIMIT:
        raise ValueError(
            f"destination={destination}: one ONNX file can't hold {source}, whose weights exceed 2 GiB; take .pt2"
        )
    loader = testing_images(classifier, source) if config.evaluate else None
    model = PixelClassifier(classifier)
    height, width = classifier.model.patch_embedding.image_size
    shape = classifier.model.patch_embedding.in_channels, height, width
    print(
        f"{source}: {sum(p.numel() for p in model.parameters()):,} parameters, images of {height} x {width}, "
        f"{classifier.model.num_classes} classes"
    )
    form = classifier.form
    look: dict[str, Any] = {"mode": form.mode, "image_size": [height, width], "interpolation": form.interpolation}
    look |= {"mean": classifier.mean, "std": classifier.std}
    known = {"classes": classifier.classes, "preprocessing": look, "temperature": classifier.temperature}
    description = {name: json.dumps(value) for name, value in known.items() if value is not None}

    program = program_of(model, shape)
    programs: dict[str, nn.Module] = {"before": model}
    with replacing(destination) as temporary:
        if destination.suffix == ".pt2":
            with open(temporary, "wb") as file:
                torch.export.save(program, file, extra_files=description)
            with open(temporary, "rb") as file:
                programs["exported"] = torch.export.load(file).module()
        else:
            write_onnx(program, temporary, ["images"], ["logits"], ANY_BATCH, description)
            programs["exported"] = OnnxProgram(temporary)
        size = temporary.stat().st_size
        difference, largest = compare(model, programs["exported"], shape)
        print(f"largest difference of the logits, for {', '.join(map(str, BATCHES))} random images: {difference:.1e}")
        check_difference(difference, largest)
        if config.quantize:
            quantize(temporary)
            programs["8-bit integers"] = OnnxProgram(temporary)
            before, size = size, temporary.stat().st_size
            difference, largest = compare(model, programs["8-bit integers"], shape)
            print(
                f"8-bit integers: {before / 1e6:.2f} MB become {size / 1e6:.2f} MB, and logits of up to {largest:.1f} "
                f"differ by at most {difference:.1e}"
            )
    if loader is not None:
        for name, network in programs.items():
            result = evaluate_classifier(network, loader.batches(), len(classifier.classes), loader.count)
            print(f"test accuracy, {name}: {100 * result.accuracy:.2f} % ({result.correct}/{result.count})")
    print(f"wrote {destination} ({size / 1e6:.2f} MB): pixels from 0 to 1 (B, {', '.join(map(str, shape))}) -> logits")


def testing_images(classifier: Classifier, source: str) -> Loader:
    """The test images of a run, with pixels from 0 to 1. Raises ValueError where there are none."""
    if not classifier.classes:
        raise ValueError(f"evaluate=true measures accuracy, and the model in {source} has no classifier")
    data, form = classifier.data, classifier.form
    dataset = load(
        data.kind,
        data.root,
        image_size=form.image_size,
        fake_images=data.fake_images,
        classes=classifier.classes,
        parts=("test",),
        allow_missing_classes=data.allow_missing_classes,
    )
    if dataset.test is None:
        raise ValueError(f"evaluate=true needs test images, and {data.kind} in {data.root} has none")
    images, faults = open_images(dataset.test, form, in_memory=False, skip_broken=data.skip_broken)
    for note in [*dataset.notes, *faults]:
        print(f"note: {note}")
    channels = len(classifier.mean)
    as_pixels = BatchTransform([0.0] * channels, [1.0] * channels)
    return plain_loader(images, form, as_pixels, data.workers, torch.device("cpu"))


@torch.inference_mode()
def compare(model: nn.Module, program: nn.Module, shape: tuple[int, ...]) -> tuple[float, float]:
    """Largest difference between the logits of two programs for random images (C, height, width), and largest logit."""
    generator = torch.Generator().manual_seed(0)
    differences, largest = [], []
    for batch in BATCHES:
        images = torch.rand(batch, *shape, generator=generator)
        expected, found = model(images), program(images)
        assert found.shape == expected.shape
        differences.append((found - expected).abs().max())
        largest.append(expected.abs().max())
    return torch.stack(differences).max().item(), torch.stack(largest).max().item()  # max keeps a NaN


def check_difference(difference: float, largest: float) -> None:
    """Raise RuntimeError for a difference that is too large, or no number, for values of this size."""
    limit = TOLERANCE * max(1.0, largest)
    if not difference <= limit:
        raise RuntimeError(f"what it computes differs from the model by {difference:.2g}, more than {limit:.2g}")


# ONNX


class OnnxProgram(nn.Module):
    """What an .onnx file computes, on the CPU: tensors in the order of its inputs -> a tensor, or a tuple of them.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path):
        from onnxruntime import InferenceSession, SessionOptions

        super().__init__()
        options = SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.names = [x.name for x in self.session.get_inputs()]

    def forward(self, *inputs: Tensor) -> Any:
        """One tensor for each input."""
        arrays = {name: x.numpy() for name, x in zip(self.names, inputs, strict=True)}
        outputs = [torch.from_numpy(y) for y in self.session.run(None, arrays)]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def write_onnx(
    program: ExportedProgram,
    path: Path,
    inputs: list[str],
    outputs: list[str],
    dynamic_shapes: tuple[dict[int, Any], ...],
    description: dict[str, str],
) -> None:
    """Write a program as one ONNX file, its weights inside.

    Args:
        program: the program.
        path: where to.
        inputs, outputs: their names.
        dynamic_shapes: for each input the dimensions that may change, and their names.
        description: texts for its metadata_props.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a dimension that several inputs have is named once
        written = torch.onnx.export(
            program,
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=dynamic_shapes,
            dynamo=True,
            verbose=False,
        )
    assert written is not None
    written.model.metadata_props.update(description)
    written.save(path, external_data=False)


def quantize(path: Path) -> None:
    """Replace the weights of all linear maps in an ONNX file by 8-bit integers.

    Activations become integers while the program runs, so that no images are needed for it. By ONNX Runtime, as
    PyTorch's own dynamic quantisation (torch.ao) is deprecated and about to go; its successor is one more package.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quant_pre_process, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(path, prepared, skip_symbolic_shape=True)
        quantize_dynamic(
            onnx.load(prepared),
            path,
            op_types_to_quantize=["MatMul", "Gemm"],  # convolutions of integers are slower than those of floats
            per_channel=True,
            weight_type=QuantType.QUInt8,  # signed weights overflow on CPUs without VNNI, for the sake of speed
        )


# Sequences


class GivenCache(KeyValueCache):
    """Keys and values (B, H, S, K) that a program is given and hands back; unlike its base, it writes into nothing."""

    def __init__(self, keys_and_values: Tensor):
        super().__init__()
        key, value = keys_and_values
        self.buffers, self.length = (key, value), key.shape[2]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """As `KeyValueCache.append`, into new tensors."""
        before = self.contents()
        self.buffers = torch.cat([before[0], key], dim=2), torch.cat([before[1], value], dim=2)
        self.length = self.buffers[0].shape[2]
        return self.buffers


class Beginning(nn.Module):
    """What is done once for a source, of a `Transformer`."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Ids (B, S) -> memory (L, 2, B, H, S, K) and its padding mask (B, 1, S), True at real tokens."""
        memory, mask = self.model.encode(source)
        layers: Any = self.model.decoder.layers
        return torch.stack([torch.stack(layer.cross_attention.keys_and_values(memory)) for layer in layers]), mask


class Step(nn.Module):
    """What is done for each token of a target, of a `Transformer`."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, memory: Tensor, mask: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Ids (B,), memory, mask and past (L, 2, B, H, N, K) -> logits (B, V) and the past (L, 2, B, H, N + 1, K)."""
        cache = DecoderCache(self.model.decoder.depth)
        for i, layer in enumerate(cache.layers):
            layer.memory, layer.target = GivenCache(memory[i]), GivenCache(past[i])
        x = self.model.target_embedding(token[:, None], past.shape[4])
        in_place_of_memory = x.new_empty(token.shape[0], mask.shape[2], x.shape[2])  # whose keys and values are known
        logits = self.model.head(self.model.decoder(x, in_place_of_memory, None, mask, cache))[:, 0]
        return logits, torch.stack([torch.stack(layer.target.contents()) for layer in cache.layers])


@dataclass
class PairState:
    """Where an `OnnxTransformer` stands; shapes as the module has them."""

    memory: Tensor
    mask: Tensor
    past: Tensor

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        self.memory, self.mask, self.past = self.memory[:, :, rows], self.mask[rows], self.past[:, :, rows]


class OnnxTransformer:
    """An exported encoder-decoder with what `greedy` and `beam_search` need.

    Args:
        folder: with encoder.onnx and decoder.onnx.
    """

    pad_id = PAD

    def __init__(self, folder: Path):
        self.encoder, self.decoder = OnnxProgram(folder / "encoder.onnx"), OnnxProgram(folder / "decoder.onnx")

    def start(self, source: Tensor) -> PairState:
        """Encode source ids (B, S), at least one token each; nothing is written yet."""
        memory, mask = self.encoder(source)
        return PairState(memory, mask, memory[:, :, :, :, :0])

    def step(self, tokens: Tensor, state: PairState) -> Tensor:
        """Ids (B,) of the next target token -> logits (B, V) for the one after it; moves the state on."""
        logits, state.past = self.decoder(tokens, state.memory, state.mask, state.past)
        return logits


def export_transformer(config: ExportConfig, source: str, folder: Path) -> None:
    """Write a sequence model as two ONNX files in a folder; arguments and errors as `export`.

    The encoder takes source ids (B, S), each source with its end token and padded with `pad_id`, and gives memory and
    mask. The decoder takes the ids (B,) of one token, `bos_id` at first, with both and the past, N = 0 at first; it
    gives the logits of the next token, and the past for the next step. The ids and `max_length`, the most tokens of
    either side, stand in both files' metadata_props.
    """
    check_destination(folder, folder.suffix not in FILES, "a folder, as which sequence models are written")
    for name, value in (("quantize", config.quantize), ("evaluate", config.evaluate)):
        if value:
            raise ValueError(f"{name}=true is for models for images, and {source} is one for sequences")
    check_packages()
    path = weights_file(Path(source))
    model, description, stored = load_transformer(path)
    longest = stored.data.max_length
    heads, head_dim = model.decoder.heads, model.decoder.dim // model.decoder.heads
    print(
        f"{source}: {sum(p.numel() for p in model.parameters()):,} parameters, vocabulary "
        f"{description['model']['vocabulary']}, at most {longest} tokens"
    )
    ids = {"bos_id": BOS, "eos_id": EOS, "pad_id": PAD, "max_length": longest}
    about = {name: str(value) for name, value in ids.items()}
    batch, sources, length = Dim("batch"), Dim("source", max=longest), Dim("length", max=longest - 1)
    memory_shape = {2: batch, 4: sources}
    both = model.decoder.depth, 2, 2, heads
    examples = {
        "encoder": (Beginning(model), (torch.ones(2, 3, dtype=torch.long),), ({0: batch, 1: sources},)),
        "decoder": (
            Step(model),
            (
                torch.ones(2, dtype=torch.long),
                torch.zeros(*both, 3, head_dim),
                torch.ones(2, 1, 3, dtype=torch.bool),
                torch.zeros(*both, 4, head_dim),
            ),
            ({0: batch}, memory_shape, {0: batch, 2: sources}, {2: batch, 4: length}),
        ),
    }
    names = {
        "encoder": (["source"], ["memory", "mask"]),
        "decoder": (["token", "memory", "mask", "past"], ["logits", "present"]),
    }
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.absolute().parent) as temporary:
        complete = Path(temporary) / folder.name
        complete.mkdir()
        for part, (module, inputs, dynamic_shapes) in examples.items():
            program = torch.export.export(module.eval(), inputs, dynamic_shapes=dynamic_shapes)
            write_onnx(program, complete / f"{part}.onnx", *names[part], dynamic_shapes, about)
        if description["tokenizer"] is not None:
            (complete / "tokenizer.json").write_text(description["tokenizer"], encoding="utf-8")
        check_decoding(model, OnnxTransformer(complete), description["model"]["vocabulary"], longest)
        os.replace(complete, folder)  # all of it or nothing
    for file in sorted(folder.iterdir()):
        print(f"wrote {file} ({file.stat().st_size / 1e6:.2f} MB)")


def check_decoding(model: Transformer, exported: OnnxTransformer, vocabulary: int, longest: int) -> None:
    """Decode random sources greedily with both, and print how they differ. Raises RuntimeError where they do."""
    generator = torch.Generator().manual_seed(0)
    first, room = len(SPECIAL_TOKENS), min(LENGTHS[-1], longest - 1)
    lengths = [min(length, room) for length in LENGTHS]
    sources = [torch.randint(first, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    batch = pad([source_ids(source) for source in sources])
    expected, found = (greedy(m, batch, bos_id=BOS, eos_id=EOS, max_length=room) for m in (model, exported))
    for source, a, b in zip(sources, expected, found, strict=True):
        if a.tokens != b.tokens:
            raise RuntimeError(f"the exported model makes {b.tokens} of {source}, and the model itself {a.tokens}")
    pairs = [(a.log_probability, b.log_probability) for a, b in zip(expected, found, strict=True)]
    difference = max(abs(a - b) for a, b in pairs)
    print(
        f"greedy decoding of {len(sources)} random sources gives the same {sum(len(h.tokens) for h in found)} tokens; "
        f"largest difference of their log-probabilities: {difference:.1e}"
    )
    check_difference(difference, max(abs(a) for a, _ in pairs))
