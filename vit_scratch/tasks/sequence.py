"""Sequence tasks: trains an encoder-decoder on made-up sequences or on text, evaluates it, and translates with it.

Shapes: B batch, N target tokens, S source tokens, V vocabulary.
"""

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_scratch.config import (
    DecodeConfig,
    DecodeOverrides,
    EvaluateConfig,
    SequenceConfig,
    SequenceDataConfig,
    SequenceModelConfig,
    TranslateConfig,
    build_from_dict,
)
from vit_scratch.data.sequences import BOS, EOS, PAD, SPECIAL_TOKENS, SequenceLoader, pad, source_ids
from vit_scratch.data.toy import toy_pairs
from vit_scratch.evaluation.attention import attention_maps
from vit_scratch.evaluation.plots import plot_attention
from vit_scratch.evaluation.sequences import evaluate_tokens, exact_matches, translation_scores, write_results
from vit_scratch.tasks.run import (
    check_folder,
    load_model,
    open_run,
    refuse_overrides,
    train_model,
    weights_file,
    write_json,
)
from vit_scratch.training import distributed
from vit_scratch.training.checkpoint import replacing
from vit_scratch.training.device import pick_device, pick_precision, use_deterministic_algorithms
from vit_scratch.transformer.decoder import Decoder
from vit_scratch.transformer.encoder import Encoder
from vit_scratch.transformer.generation import beam_search, greedy
from vit_scratch.transformer.transformer import Transformer

TOY_PAIRS = 1000
"""Made-up sequences to select models on, and as many for testing."""
GENERATION_BATCH = 256
"""Sequences per step of generation during training, as `EvaluateConfig` has it."""


def smoothed_cross_entropy(
    smoothing: float, model: nn.Module, inputs: tuple[Tensor, Tensor], targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropy over the tokens of a batch, padding left out, and how many are predicted right.

    Args:
        smoothing: share of each label that goes to all tokens alike ("Rethinking the Inception Architecture").
        inputs: source (B, S) and target so far (B, N).
        targets: next tokens (B, N).
    """
    logits = model(*inputs)  # (B, N, V)
    loss = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, label_smoothing=smoothing, reduction="sum"
    )
    return loss, ((logits.argmax(dim=-1) == targets) & (targets != PAD)).sum()


@dataclass
class Part:
    """The pairs of one part of the data.

    Attributes:
        sources, targets: ids without start and end.
        texts: the targets as text, for scores; None for made-up sequences.
    """

    sources: list[list[int]]
    targets: list[list[int]]
    texts: list[str] | None = None

    def loader(self, batch_tokens: int, device: torch.device, seed: int | None = None) -> SequenceLoader:
        """Its pairs in batches; arguments as `SequenceLoader`."""
        share = distributed.process()
        return SequenceLoader(self.sources, self.targets, batch_tokens, seed=seed, device=device, share=share)


@dataclass
class Data:
    """All parts of the data, and what was found.

    Attributes:
        parts: "train", "val" and those for testing, by name.
        vocabulary: number of ids.
        tokenizer: of text, None for made-up sequences.
        notes: what the user should know.
    """

    parts: dict[str, Part]
    vocabulary: int
    tokenizer: Any = None
    notes: list[str] = field(default_factory=list)

    def identity(self) -> dict[str, Any]:
        """What tells these data from others."""
        digest = hashlib.sha256()
        for part in ("train", "val"):
            for side in (self.parts[part].sources, self.parts[part].targets):
                digest.update(repr(side).encode())
        return {"train": len(self.parts["train"].sources), "data": digest.hexdigest()}


def prepare(config: SequenceDataConfig, seed: int, names: Iterable[str], tokenizer: Any = None) -> Data:
    """Read or make the parts of the data that are asked for.

    Args:
        config: which data.
        seed: of made-up sequences.
        names: of the parts: "train", "val", and "test" or the configured test files.
        tokenizer: of text; learned from the training part where None.

    Raises:
        ValueError: files that are not there, or don't fit together.
    """
    names = list(names)
    if config.kind != "text":
        counts = {"train": config.count, "val": TOY_PAIRS, "test": TOY_PAIRS}
        made = toy_pairs(config.kind, [*counts.values()], symbols=config.symbols, longest=config.longest, seed=seed)
        first = len(SPECIAL_TOKENS)
        ids = [[[[first + symbol for symbol in s] for s in side] for side in sides] for sides in made]
        parts = {name: Part(sources, targets) for name, (sources, targets) in zip(counts, ids, strict=True)}
        return Data({name: parts[name] for name in names}, first + config.symbols)

    try:
        from vit_scratch.data import text
    except ImportError as error:
        raise ValueError("data.kind=text needs a package that is missing; pip install 'vit-scratch[text]'") from error
    translation_scores(["."], ["."])  # says now, not after the first epoch, that its package is missing
    pairs, notes = {}, []
    for name in names:
        *pairs[name], faults = text.read_pairs(
            Path(config.root), name, config.source, config.target, skip_empty=config.skip_empty
        )
        notes += faults
    if tokenizer is None:
        tokenizer = text.train_tokenizer([*pairs["train"][0], *pairs["train"][1]], config.vocabulary)
    parts = {}
    limit = config.max_length - 1  # a source has its end as well, a target its start
    for name, sides in pairs.items():
        sources, targets = (text.encode(tokenizer, side) for side in sides)
        long = [i for i, pair in enumerate(zip(sources, targets, strict=True)) if max(map(len, pair)) > limit]
        texts = sides[1]
        if long and name == "train":
            gone = set(long)
            kept = [i for i in range(len(sources)) if i not in gone]
            sources, targets, texts = [sources[i] for i in kept], [targets[i] for i in kept], [texts[i] for i in kept]
        if long:
            place = f"pair {long[0] + 1} of those that are not empty" if config.skip_empty else f"line {long[0] + 1}"
            notes.append(
                f"{'left out' if name == 'train' else 'cut'} {len(long)} {name} pairs with more than "
                f"data.max_length={config.max_length} tokens; the first is {place}"
            )
        if not sources:
            raise ValueError(f"no {name} pair has at most data.max_length={config.max_length} tokens; raise it")
        parts[name] = Part([s[:limit] for s in sources], [t[:limit] for t in targets], texts)
    return Data(parts, tokenizer.get_vocab_size(), tokenizer, notes)


def testing_parts(config: SequenceDataConfig) -> list[str]:
    """The parts for testing."""
    return list(config.test) if config.kind == "text" else ["test"]


def create_transformer(
    *,
    dim: int,
    encoder_depth: int,
    decoder_depth: int,
    heads: int,
    hidden_dim: int | None,
    activation: str,
    norm_first: bool,
    dropout: float,
    tie: str,
    vocabulary: int,
    max_length: int,
) -> Transformer:
    """The encoder-decoder of a configuration, both sides with the same vocabulary; arguments as its fields."""
    options: dict[str, Any] = {
        "hidden_dim": hidden_dim,
        "activation": activation,
        "norm_first": norm_first,
        "dropout": dropout,
    }
    return Transformer(
        Encoder(dim, encoder_depth, heads, **options),
        Decoder(dim, decoder_depth, heads, **options),
        source_vocabulary=vocabulary,
        target_vocabulary=vocabulary,
        pad_id=PAD,
        dropout=dropout,
        max_length=max_length,
        tie=tie,
    )


def model_arguments(config: SequenceModelConfig, vocabulary: int, max_length: int) -> dict[str, Any]:
    """All arguments of `create_transformer`."""
    return asdict(config) | {"vocabulary": vocabulary, "max_length": max_length}


@torch.inference_mode()
def generate(
    model: Transformer, sources: list[list[int]], decode: DecodeConfig, max_length: int, batch_size: int
) -> list[list[int]]:
    """The target that the model makes of each source, in their order.

    A target may have at most about twice as many tokens as its source, and ten more: a function of its source alone,
    so that the batches don't matter.

    Args:
        model: left in the mode (train or eval) it came in.
        sources: ids without end.
        decode: beam search, or greedy for one beam.
        max_length: the most tokens of a target, its start included.
        batch_size: sources per step.
    """
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    found: list[list[int]] = [[] for _ in sources]
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for eights, group in groupby(order, key=lambda i: -(-len(sources[i]) // 8)):
        limit = min(max_length - 1, 2 * 8 * eights + 10)
        numbers = list(group)
        for first in range(0, len(numbers), batch_size):
            chunk = numbers[first : first + batch_size]
            source = pad([source_ids(sources[i]) for i in chunk], device)
            if decode.beams == 1:
                hypotheses = greedy(model, source, bos_id=BOS, eos_id=EOS, max_length=limit)
            else:
                hypotheses = beam_search(
                    model,
                    source,
                    bos_id=BOS,
                    eos_id=EOS,
                    max_length=limit,
                    beams=decode.beams,
                    length_penalty=decode.length_penalty,
                )
            for i, hypothesis in zip(chunk, hypotheses, strict=True):
                found[i] = hypothesis.tokens
    model.train(was_training)
    return found


def generate_together(
    model: Transformer, sources: list[list[int]], decode: DecodeConfig, max_length: int, batch_size: int
) -> list[list[int]]:
    """As `generate`, where each process does a part of the work and gets all of the result."""
    number, processes = distributed.process()
    found: list[list[int]] = [[] for _ in sources]
    parts = distributed.gather(generate(model, sources[number::processes], decode, max_length, batch_size))
    for number, part in enumerate(parts):
        found[number::processes] = part
    return found


def scores(part: Part, hypotheses: list[list[int]], tokenizer: Any) -> tuple[dict[str, Any], list[str]]:
    """How good generated targets are: exact matches, or for text BLEU and chrF; and the targets as lines."""
    if part.texts is None:
        correct = exact_matches(hypotheses, part.targets)
        lines = [" ".join(str(i - len(SPECIAL_TOKENS)) for i in h) for h in hypotheses]
        return {"exact_match": correct / len(hypotheses), "correct": correct}, lines
    from vit_scratch.data.text import decode

    lines = decode(tokenizer, hypotheses)
    return translation_scores(lines, part.texts), lines


def train(config: SequenceConfig, out: Path, *, resume: bool = False) -> int | None:
    """Train an encoder-decoder and report how it does on the test parts, which are read once, at the end.

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
    with torch.device("meta"):  # refuses a wrong model in no time, before data are read
        create_transformer(**model_arguments(config.model, len(SPECIAL_TOKENS) + 1, config.data.max_length))
    states = open_run(config, out, resume)
    if config.train.deterministic:
        use_deterministic_algorithms()

    tests = testing_parts(config.data)
    data = prepare(config.data, config.seed, ["train", "val", *tests])
    states.identity = data.identity()
    torch.manual_seed(config.seed)
    arguments = model_arguments(config.model, data.vocabulary, config.data.max_length)
    model = create_transformer(**arguments).to(device)
    loader = data.parts["train"].loader(config.train.batch_tokens, device, config.seed)
    held_out = data.parts["val"]
    val_loader = held_out.loader(config.train.batch_tokens, device)
    metric = "exact_match" if held_out.texts is None else "bleu"

    def validate(network: nn.Module) -> dict[str, float]:
        assert isinstance(network, Transformer)
        tokens = evaluate_tokens(network, val_loader.batches(), PAD, distributed.total)
        hypotheses = generate_together(
            network, held_out.sources, DecodeConfig(beams=1), config.data.max_length, GENERATION_BATCH
        )
        value = scores(held_out, hypotheses, data.tokenizer)[0][metric]
        return {"loss": tokens.loss, "accuracy": tokens.accuracy, metric: value}

    counts = {name: len(part.sources) for name, part in data.parts.items()}
    stopped, summary = train_model(
        config,
        out,
        model,
        loader,
        partial(smoothed_cross_entropy, config.train.label_smoothing),
        validate,
        states=states,
        resume=resume,
        device=device,
        precision=precision,
        items="tokens",
        about=[
            *[f"note: {note}" for note in data.notes],
            f"{config.data.kind}: " + ", ".join(f"{count} {name}" for name, count in counts.items()) + " pairs, "
            f"{int(loader.lengths[:, 0].sum())} target tokens in {len(loader)} batches, vocabulary {data.vocabulary}",
        ],
        description={
            "task": "sequence",
            "model": arguments,
            "tokenizer": None if data.tokenizer is None else data.tokenizer.to_str(),
        },
        select=metric,
    )
    if stopped is not None:
        return stopped

    finals = [("last", "test", "evaluation")]  # its sentences are the last lines that are printed
    if config.train.ema_decay:
        finals.insert(0, ("ema", "test_ema", "evaluation_ema"))
    parts = {test: data.parts[test] for test in tests}
    for name, key, folder in finals:
        path = out / f"{name}.safetensors"
        print(f"{path}:")
        written, _, _ = load_transformer(path)
        summary[key] = report(path, written, data.tokenizer, config, parts, out / folder, device, GENERATION_BATCH)
    if distributed.is_first():
        write_json(out / "summary.json", summary)
    return None


def load_transformer(path: Path) -> tuple[Transformer, dict[str, Any], SequenceConfig]:
    """The model in a weights file, in eval mode on the CPU, the file's description and the configuration in it.

    Raises:
        ValueError: a file that is not there, damaged, not ours, of another task, or whose weights are another model's.
    """
    needs = {"model", "tokenizer", "config"}
    model, description = load_model(path, "sequence", lambda d: create_transformer(**d["model"]), needs)
    config: SequenceConfig = build_from_dict(SequenceConfig, description["config"])
    if config.data.kind == "text" and description["tokenizer"] is None:
        raise ValueError(f"{path} holds a model for text without its tokenizer")
    return model, description, config


def stored_tokenizer(description: dict[str, Any]) -> Any:
    """The tokenizer in a weights file's description, None where it needs none. Raises ValueError where it can't be."""
    if description["tokenizer"] is None:
        return None
    try:
        from vit_scratch.data.text import load_tokenizer
    except ImportError as error:
        raise ValueError("text needs a package that is missing; pip install 'vit-scratch[text]'") from error
    tokenizer, vocabulary = load_tokenizer(description["tokenizer"]), description["model"]["vocabulary"]
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"the stored tokenizer has {tokenizer.get_vocab_size()} tokens, and its model {vocabulary}")
    return tokenizer


def report(
    path: Path,
    model: Transformer,
    tokenizer: Any,
    config: SequenceConfig,
    parts: dict[str, Part],
    folder: Path,
    device: torch.device,
    batch_size: int,
) -> dict[str, Any]:
    """Evaluate the model of a weights file, write results and generated targets, and print the figures.

    Args:
        path: the weights file, as the results name it.
        model: what it holds.
        tokenizer: of the text, None for made-up sequences.
        config: of the model, with changes.
        parts: what to evaluate on, by name.
        folder: where results and targets go.
        device: where to compute.
        batch_size: sequences per step of generation.

    Returns:
        All results as plain values.
    """
    model.to(device)
    beams, penalty = config.decode.beams, config.decode.length_penalty
    decode = "greedy" if beams == 1 else f"beam search {beams}, length penalty {penalty:g}"
    values: dict[str, Any] = {"checkpoint": str(path), "decode": asdict(config.decode), "parts": {}}
    outputs, sentences = {}, []
    for name, part in parts.items():
        batches = part.loader(config.train.batch_tokens, device).batches()
        tokens = evaluate_tokens(model, batches, PAD, distributed.total)
        hypotheses = generate_together(model, part.sources, config.decode, config.data.max_length, batch_size)
        result, lines = scores(part, hypotheses, tokenizer)
        flat = name.replace("/", "_")  # a test file may stand in a folder
        outputs[f"{flat}.{config.data.target}" if part.texts else f"{flat}.txt"] = lines
        values["parts"][name] = {
            "count": len(part.sources),
            "loss": tokens.loss,
            "perplexity": tokens.perplexity,
            "token_accuracy": tokens.accuracy,
            "tokens": tokens.count,
        } | result
        print(
            f"{name}: loss {tokens.loss:.4f}, perplexity {tokens.perplexity:.3f}, token accuracy "
            f"{100 * tokens.accuracy:.2f} % ({tokens.correct}/{tokens.count})"
        )
        if part.texts:
            print(f"{name}: {result['bleu_signature']}; {result['chrf_signature']}")
            sentences.append(f"{name} BLEU {result['bleu']:.2f} chrF {result['chrf']:.2f}")
        else:
            share, correct = 100 * result["exact_match"], result["correct"]
            sentences.append(f"{name} exact match {share:.2f} % ({correct}/{len(part.sources)})")
    if distributed.is_first():
        write_results(folder, values, outputs)
    print(f"results and generated targets ({decode}): {folder}")
    for sentence in sentences:
        print(sentence)
    return values


def decoding(config: DecodeConfig, overrides: DecodeOverrides) -> DecodeConfig:
    """How to generate: as configured, but for what is given. Raises ValueError for values out of range."""
    return replace(config, **{k: v for k, v in asdict(overrides).items() if v is not None})


def evaluate(config: EvaluateConfig, source: str) -> None:
    """Evaluate a trained model.

    Args:
        config: on which data, and where the results go.
        source: the folder of a run, or a weights file.

    Raises:
        ValueError: a checkpoint or data that are not there or don't fit; before any work is done.
    """
    images_only = {"data.kind", "data.skip_broken", "data.allow_missing_classes", "data.workers"}
    refuse_overrides(config, images_only, "sequences")
    device, path = distributed.join(config.device), weights_file(Path(source))
    model, description, stored = load_transformer(path)
    tokenizer = stored_tokenizer(description)
    changed = {k: v for k, v in asdict(config.data).items() if v is not None}
    if stored.data.kind != "text":
        refuse_overrides(config, {"data.root", "data.test", "data.skip_empty"}, "made-up sequences")
    used = replace(stored, data=replace(stored.data, **changed), decode=decoding(stored.decode, config.decode))
    names = ["val"] if config.split == "val" else testing_parts(used.data)
    if not names:
        raise ValueError(
            "there are no test files in the configuration; name them with --data.test, or take --split val"
        )
    data = prepare(used.data, used.seed, names, tokenizer)
    for note in [*[f"data.{k} is {v}, other than in training" for k, v in changed.items()], *data.notes]:
        print(f"note: {note}")
    name = ["evaluation", *[p for p in (path.stem, config.split) if p not in ("last", "test")]]
    name += [Path(str(changed["root"])).name] if "root" in changed else []
    name += [n.replace("/", "-") for n in changed.get("test", [])]
    name += [f"{k}-{v}" for k, v in asdict(config.decode).items() if v is not None]
    folder = Path(config.out) if config.out else path.parent / "_".join(name)
    values = report(path, model, tokenizer, used, data.parts, folder, device, config.batch_size)
    if config.json and distributed.is_first():
        write_json(Path(config.json), values)


def translate(config: TranslateConfig, path: Path, sentences: Iterable[str], batch_size: int = 1) -> None:
    """Print the translation of each sentence, a line each; an empty sentence gives an empty line.

    Args:
        config: how to translate, and whether to draw the first sentence's attention.
        path: a weights file.
        sentences: as people write them.
        batch_size: sentences that are waited for and translated together.

    Raises:
        ValueError: a checkpoint that is not there or not of text.
    """
    check_folder("attention", config.attention)
    device = pick_device(config.device)
    model, description, stored = load_transformer(path)
    tokenizer = stored_tokenizer(description)
    if tokenizer is None:
        raise ValueError(f"{path} holds a model for made-up sequences (data.kind={stored.data.kind}), not for text")
    from vit_scratch.data import text

    model.to(device)
    decode, limit = decoding(stored.decode, config.decode), stored.data.max_length - 1
    drawn = config.attention is None
    numbered = enumerate((s.strip() for s in sentences), 1)
    while chunk := list(islice(numbered, batch_size)):
        for number, sentence in chunk:
            try:
                sentence.encode()
            except UnicodeEncodeError as error:  # how Python holds arguments of other bytes
                raise ValueError(f"sentence {number} is not UTF-8; convert it first") from error
        sources = text.encode(tokenizer, [sentence for _, sentence in chunk])
        for (number, _), source in zip(chunk, sources, strict=True):
            if len(source) > limit:
                print(f"note: sentence {number} has {len(source)} tokens and is cut after {limit}", file=sys.stderr)
        sources = [source[:limit] for source in sources]
        written = [i for i, (_, sentence) in enumerate(chunk) if sentence]
        generated = generate(model, [sources[i] for i in written], decode, stored.data.max_length, batch_size)
        targets = dict(zip(written, generated, strict=True))
        lines = dict(zip(written, text.decode(tokenizer, generated), strict=True))
        for i in range(len(chunk)):
            print(lines.get(i, ""), flush=True)
        if not drawn and written:
            drawn = True
            draw_attention(model, tokenizer, sources[written[0]], targets[written[0]], Path(str(config.attention)))


def draw_attention(model: Transformer, tokenizer: Any, source: list[int], target: list[int], path: Path) -> None:
    """Draw what each word of a translation attended to, the mean over all heads of all layers."""
    from vit_scratch.data.text import words

    device = next(model.parameters()).device
    maps = attention_maps(model, pad([source_ids(source)], device), pad([[BOS, *target]], device))
    crossing = torch.stack([m[0].mean(dim=0) for n, m in maps.items() if n.endswith("cross_attention")])
    weights = crossing.mean(dim=0).cpu().numpy()  # (N, S): rows are the tokens that were written, then the end
    rows = [*words(tokenizer, target), ("end", [len(target)])]
    columns = [*words(tokenizer, source), ("end", [len(source)])]
    table = np.array([[weights[np.ix_(r, c)].sum(axis=1).mean() for _, c in columns] for _, r in rows])
    with replacing(path) as temporary:
        plot_attention(table, [w for w, _ in columns], [w for w, _ in rows], temporary)
    print(f"attention: {path}", file=sys.stderr)
