"""Pairs of plain-text files, one sentence a line, and the byte-pair tokenizer that is learned from them."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from vit_scratch.data.sequences import SPECIAL_TOKENS


class TextError(ValueError):
    """A text file that can't be used; the message says which, where and why."""


def read_sentences(path: Path) -> list[str]:
    """The lines of a UTF-8 file, without the white space around them; empty ones are kept.

    Raises:
        TextError: no such file, or bytes that are no UTF-8.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TextError(f"{path} can't be read: {error.strerror}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        content = error.object  # without a byte order mark
        line = content[: error.start].count(b"\n") + 1
        raise TextError(
            f"{path}, line {line}, is not UTF-8 (byte 0x{content[error.start]:02x}); convert the file, for example "
            f"with: iconv -f latin1 -t utf-8 {path.name}"
        ) from error
    # Not splitlines(), which breaks lines at characters that may stand within a sentence, such as U+2028.
    lines = text.split("\n")
    return [line.strip() for line in (lines[:-1] if lines[-1] == "" else lines)]


def read_pairs(
    root: Path, name: str, source: str, target: str, *, skip_empty: bool = False
) -> tuple[list[str], list[str], list[str]]:
    """Sentences of ROOT/NAME.SOURCE and their translations in ROOT/NAME.TARGET.

    Args:
        root: folder of the files.
        name: what both files' names begin with, such as "train".
        source, target: what they end with, such as "en" and "de".
        skip_empty: leave out pairs of which a side is empty.

    Returns:
        Both sides, and a note on what was left out, if anything.

    Raises:
        TextError: a file that is not there or can't be read, files of different lengths or without a sentence, or an
            empty line.
    """
    if not root.is_dir():
        raise TextError(f"data.root={str(root)!r}: there is no such folder")
    for argument, language in (("data.source", source), ("data.target", target)):
        path = root / f"{name}.{language}"
        if not path.is_file():
            begin = f"{Path(name).name}."
            there = sorted(p.name.removeprefix(begin) for p in path.parent.glob(f"{begin}*"))
            languages = f"of {name} there is: {', '.join(there)}" if there else f"there is nothing called {name}.*"
            raise TextError(f"{argument}={language!r}: {path} does not exist; {languages}")
    paths = root / f"{name}.{source}", root / f"{name}.{target}"
    sources, targets = (read_sentences(path) for path in paths)
    if len(sources) != len(targets):
        raise TextError(
            f"{paths[0]} has {len(sources)} lines and {paths[1]} has {len(targets)}; "
            "line i of one must be the translation of line i of the other"
        )
    empty = [i for i, pair in enumerate(zip(sources, targets, strict=True)) if not all(pair)]
    notes = []
    if empty:
        side = paths[0] if not sources[empty[0]] else paths[1]
        what = f"{side}, line {empty[0] + 1}, is empty" + (f", and so are {len(empty) - 1} more" if empty[1:] else "")
        if not skip_empty:
            raise TextError(f"{what}; remove the line in both files, or leave such pairs out with data.skip_empty=true")
        notes = [f"left out {len(empty)} {name} pairs with an empty line ({what})"]
        gone = set(empty)
        sources, targets = ([s for i, s in enumerate(side) if i not in gone] for side in (sources, targets))
    if not sources:
        raise TextError(f"{paths[0]} holds no sentence")
    return sources, targets, notes


def train_tokenizer(sentences: list[str], vocabulary: int) -> Tokenizer:
    """Learn a byte-pair tokenizer ("Neural Machine Translation of Rare Words with Subword Units").

    It works on bytes, so that there is no text it can't write.

    Args:
        sentences: what to learn from.
        vocabulary: number of tokens at most, the special ones and 256 for the bytes included.

    Raises:
        ValueError: a vocabulary without room for the bytes.
    """
    least = len(SPECIAL_TOKENS) + 256
    if vocabulary < least:
        raise ValueError(f"data.vocabulary={vocabulary} is too small; it must be at least {least}, one for each byte")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return load_tokenizer(tokenizer.to_str())


def load_tokenizer(text: str) -> Tokenizer:
    """The tokenizer whose `to_str()` this is. Raises ValueError for anything else."""
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"the stored tokenizer can't be used: {error}") from error
    if [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] != list(range(len(SPECIAL_TOKENS))):
        raise ValueError(f"the stored tokenizer does not begin with {', '.join(SPECIAL_TOKENS)}")
    tokenizer.encode_special_tokens = True  # a sentence that happens to contain the text "</s>" does not end there
    return tokenizer


def encode(tokenizer: Tokenizer, sentences: list[str]) -> list[list[int]]:
    """Ids of each sentence, without start and end."""
    return [encoding.ids for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False)]


def decode(tokenizer: Tokenizer, sequences: list[list[int]]) -> list[str]:
    """The sentence of each sequence of ids, on one line whatever a model wrote."""
    texts = tokenizer.decode_batch(sequences, skip_special_tokens=True)
    return [text.replace("\r", " ").replace("\n", " ").strip() for text in texts]


def words(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[str, list[int]]]:
    """The words of a sentence, each with the places of its tokens: punctuation stands by itself."""

    def is_mark(piece: str) -> bool:
        return not any(c.isalnum() or c == "\N{REPLACEMENT CHARACTER}" for c in piece)

    groups: list[tuple[str, list[int]]] = []
    last = ""
    for place, token in enumerate(ids):
        piece = tokenizer.decode([token], skip_special_tokens=True)
        # A token that is a space and nothing else belongs to what follows.
        if not groups or (not last.isspace() and (piece.startswith(" ") or is_mark(piece) or is_mark(last))):
            groups.append(("", []))
        groups[-1][1].append(place)
        last = piece
    return [(tokenizer.decode([ids[p] for p in places]).strip(), places) for _, places in groups]
