"""Checks text files, pairs and tokenizer: a line is a line, faults are named, no text is lost or taken for a mark."""

import json
import re
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="text needs the extra: pip install -e '.[text]'")

from vit_scratch.data.sequences import SPECIAL_TOKENS
from vit_scratch.data.text import (
    TextError,
    decode,
    encode,
    load_tokenizer,
    read_pairs,
    read_sentences,
    train_tokenizer,
    words,
)

SENTENCES = [
    *("A red dog sees a blue bird.", "Two men are sitting at the table.", "Ein roter Hund sieht einen blauen Vogel."),
    *("Zwei Männer sitzen am Tisch.", "It's </s> or <pad>, isn't it?", "日本語 and emoji 🐈!"),
] * 3


def bytes_in(folder, content, name="train.en"):
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"one\ntwo", ["one", "two"]),
        (b"\xef\xbb\xbfone\ntwo\n", ["one", "two"]),
        (b"one\n\n three \n", ["one", "", "three"]),
        (b"\n", [""]),
        (b"one\n\n", ["one", ""]),
        (b"", []),
        (b"\xef\xbb\xbf", []),
        ("a\u2028b\u2029c\nd\u0085e\x0cf\x0bg\x1ch\n".encode(), ["a\u2028b\u2029c", "d\u0085e\x0cf\x0bg\x1ch"]),
        (b"a\rb\n", ["a\rb"]),
        ("\u00a0Männer 日本\u2028\n".encode(), ["Männer 日本"]),
    ],
)
def test_a_line_ends_at_a_line_feed_and_nowhere_else(tmp_path, content, expected):
    assert read_sentences(bytes_in(tmp_path, content)) == expected


@pytest.mark.parametrize(
    ("content", "line", "byte"),
    [
        (b"\xe9", 1, "0xe9"),
        (b"one\ntwo\ncaf\xe9\nfour\n", 3, "0xe9"),
        (b"\xef\xbb\xbfone\ntwo\na\xffb\n", 3, "0xff"),
        (b"\xef\xbb\xbf\n\n\xff", 3, "0xff"),
        ("eins\nzwei".encode("utf-16"), 1, "0xff"),
        (b"one\n\xe6\x97", 2, "0xe6"),
    ],
)
def test_what_is_not_utf_8_is_named_with_file_line_byte_and_remedy(tmp_path, content, line, byte):
    path = bytes_in(tmp_path, content)
    with pytest.raises(TextError) as caught:
        read_sentences(path)
    assert str(caught.value).startswith(f"{path}, line {line}, is not UTF-8 (byte {byte}); convert the file")
    assert "iconv" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TextError, match=r"train\.en can't be read: No such file"):
        read_sentences(tmp_path / "train.en")
    with pytest.raises(TextError, match="can't be read: Is a directory"):
        read_sentences(tmp_path)


def files(folder, name="train", **sides):
    for language, text in sides.items():
        bytes_in(folder, text.encode(), f"{name}.{language}")
    return folder


def test_pairs_are_the_lines_of_both_files(tmp_path):
    files(tmp_path, en="a dog\na cat\n", de="ein Hund\r\neine Katze")
    assert read_pairs(tmp_path, "train", "en", "de") == (["a dog", "a cat"], ["ein Hund", "eine Katze"], [])
    assert read_pairs(tmp_path, "train", "de", "en")[:2] == (["ein Hund", "eine Katze"], ["a dog", "a cat"])


def test_files_of_different_lengths_are_refused_with_both_numbers(tmp_path):
    files(tmp_path, en="a\nb\nc\n", de="x\ny\n")
    with pytest.raises(TextError, match=r"train\.en has 3 lines and .*train\.de has 2; line i of one must be"):
        read_pairs(tmp_path, "train", "en", "de")
    with pytest.raises(TextError, match="has 3 lines"):  # nothing makes up for it
        read_pairs(tmp_path, "train", "en", "de", skip_empty=True)


@pytest.mark.parametrize(
    ("en", "de", "what"),
    [
        ("a\nb\n\nd\n", "w\nx\ny\nz\n", "train.en, line 3, is empty"),
        ("a\nb\nc\nd\n", "w\n \t\u2003\ny\nz\n", "train.de, line 2, is empty"),
        ("a\n\nc\nd\n", "w\n\ny\n\n", "train.en, line 2, is empty, and so are 1 more"),
        ("a\nb\nc\n\n", "\nx\n\nz\n", "train.de, line 1, is empty, and so are 2 more"),
    ],
)
def test_empty_lines_are_named_or_left_out_on_request(tmp_path, en, de, what):
    files(tmp_path, en=en, de=de)
    with pytest.raises(TextError) as caught:
        read_pairs(tmp_path, "train", "en", "de")
    assert str(caught.value).startswith(f"{tmp_path}/{what}; ")
    assert "data.skip_empty=true" in str(caught.value)
    sources, targets, (note,) = read_pairs(tmp_path, "train", "en", "de", skip_empty=True)
    lines = [(s.strip(), t.strip()) for s, t in zip(en.split("\n")[:-1], de.split("\n")[:-1], strict=True)]
    kept = [(s, t) for s, t in lines if s and t]
    assert list(zip(sources, targets, strict=True)) == kept
    assert note == f"left out {len(lines) - len(kept)} train pairs with an empty line ({tmp_path}/{what})"


@pytest.mark.parametrize(("text", "skip_empty"), [("", False), ("", True), ("\n\n", True)])
def test_files_without_a_sentence_are_refused(tmp_path, text, skip_empty):
    files(tmp_path, en=text, de=text)
    with pytest.raises(TextError, match=r"train\.en holds no sentence"):
        read_pairs(tmp_path, "train", "en", "de", skip_empty=skip_empty)


def test_an_unknown_language_is_refused_and_those_that_are_there_are_named(tmp_path):
    files(tmp_path, **{"en": "a\n", "de": "b\n", "pt.tok": "c\n"})
    files(tmp_path, name="val", fr="d\n")
    with pytest.raises(TextError) as caught:
        read_pairs(tmp_path, "train", "en", "fr")
    expected = f"data.target='fr': {tmp_path}/train.fr does not exist; of train there is: de, en, pt.tok"
    assert str(caught.value) == expected
    with pytest.raises(TextError, match=r"data\.source='EN': .*of train there is: de, en, pt\.tok"):
        read_pairs(tmp_path, "train", "EN", "de")
    assert read_pairs(tmp_path, "train", "pt.tok", "de")[0] == ["c"]
    for name in ("test", "sub/test", f"{tmp_path}/test"):
        with pytest.raises(TextError, match=re.escape(f"there is nothing called {name}.*")):
            read_pairs(tmp_path, name, "en", "de")


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(TextError, match=r"data\.root='.*/nowhere': there is no such folder"):
        read_pairs(tmp_path / "nowhere", "train", "en", "de")


TOKENIZERS = {"trained": train_tokenizer(SENTENCES, 400)}
TOKENIZERS["loaded"] = load_tokenizer(TOKENIZERS["trained"].to_str())


@pytest.fixture
def tokenizer():
    return TOKENIZERS["trained"]


def round_trip(tokenizer, text):
    """What becomes of a text, and what may become of it: NFC, no outer white space, on one line."""
    ids = encode(tokenizer, [text])[0]
    assert not any(i < len(SPECIAL_TOKENS) for i in ids)
    expected = unicodedata.normalize("NFC", text).replace("\n", " ").replace("\r", " ").strip()
    return unicodedata.normalize("NFC", decode(tokenizer, [ids])[0]), expected


# No surrogates, which are no text, and no characters that this Python knows less of than the library may.
CHARACTERS = st.characters(exclude_categories=["Cs", "Cn"])


@given(
    st.text(CHARACTERS)
    | st.lists(st.sampled_from([*SPECIAL_TOKENS, " ", "a", "</", "s>", "🐈", "é", "e\u0301"])).map("".join)
)
def test_any_text_comes_back_and_holds_no_special_tokens(text):
    for tokenizer in (TOKENIZERS["trained"], TOKENIZERS["loaded"]):
        found, expected = round_trip(tokenizer, text)
        assert found == expected


@pytest.mark.parametrize("text", ["</s>", "<pad>", "a <s> b", "one</s>two", "</s></s>", "<pad> <pad>"])
@pytest.mark.parametrize("which", ["trained", "loaded"])
def test_the_text_of_a_special_token_is_no_special_token(which, text):
    ids = encode(TOKENIZERS[which], [text])[0]
    assert len(ids) > 1
    assert min(ids) >= len(SPECIAL_TOKENS)
    assert decode(TOKENIZERS[which], [ids]) == [text]
    assert [TOKENIZERS[which].token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]


def test_special_ids_are_not_written_and_lines_stay_lines(tokenizer):
    ids = encode(tokenizer, ["A red dog."])[0]
    assert decode(tokenizer, [[1, *ids, 2, 0, 0]]) == ["A red dog."]
    assert decode(tokenizer, [[], [2]]) == ["", ""]
    line_feed = [tokenizer.token_to_id(token) for token in ("Ċ", "č")]  # the bytes 10 and 13 on this alphabet
    assert decode(tokenizer, [[*ids, *line_feed, *ids]]) == ["A red dog.   A red dog."]


def test_both_ways_to_write_an_accent_are_the_same(tokenizer):
    assert encode(tokenizer, ["Ma\u0308nner"]) == encode(tokenizer, ["Männer"])
    assert decode(tokenizer, encode(tokenizer, ["Ma\u0308nner"])) == ["M\u00e4nner"]


def test_merges_are_those_of_the_algorithm():
    # Words with their space: 4 times _ab, 2 times _ac, once _b. Most frequent first: _a (6), then _ab (4).
    sentences = ["ab ab ab", "ac b", "ab ac"]
    merges = [("Ġ", "a"), ("Ġa", "b"), ("Ġa", "c")]
    for more in (0, 1, 2, 3):
        trained = train_tokenizer(sentences, 259 + more)
        model = json.loads(trained.to_str())["model"]
        assert [tuple(m) for m in model["merges"]] == merges[:more]
        assert trained.get_vocab_size() == 259 + more
    assert [trained.id_to_token(i) for i in encode(trained, ["abc ac"])[0]] == ["Ġab", "c", "Ġac"]


def test_it_learns_from_the_given_sentences_only():
    trained = train_tokenizer(["abba abba cc", "Hund"], 400)
    model = json.loads(trained.to_str())["model"]
    learned = {"".join(merge).replace("Ġ", " ") for merge in model["merges"]}
    assert {" abba", " Hund"} <= learned
    assert all(any(token in f" {s}" for s in ("abba abba cc", "Hund")) for token in learned)
    assert len(encode(trained, ["abba"])[0]) == 1
    assert len(encode(trained, ["Katze"])[0]) == len(" Katze")


def test_the_same_sentences_give_the_same_tokenizer():
    assert train_tokenizer(SENTENCES, 330).to_str() == train_tokenizer(list(SENTENCES), 330).to_str()
    assert train_tokenizer(SENTENCES, 330).to_str() != train_tokenizer(SENTENCES[1:], 331).to_str()


@pytest.mark.parametrize("vocabulary", [259, 260, 300])
def test_the_vocabulary_is_no_larger_than_asked_for(vocabulary):
    trained = train_tokenizer(SENTENCES, vocabulary)
    assert trained.get_vocab_size() == vocabulary
    assert max(i for ids in encode(trained, SENTENCES) for i in ids) < vocabulary


def test_few_sentences_make_a_smaller_vocabulary_with_ids_without_gaps():
    trained = train_tokenizer(["ab"], 8000)
    assert sorted(trained.get_vocab().values()) == list(range(trained.get_vocab_size())) == list(range(261))


@pytest.mark.parametrize("vocabulary", [258, 3, 0, -1])
def test_a_vocabulary_without_room_for_the_bytes_is_refused(vocabulary):
    with pytest.raises(ValueError, match=rf"data\.vocabulary={vocabulary} is too small; it must be at least 259"):
        train_tokenizer(SENTENCES, vocabulary)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "{}",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"merges"', '"nothing"'),
        lambda text: text.replace('"BPE"', '"ABC"'),
        lambda text: None,
        lambda text: 5,
        lambda text: {"model": {}},
    ],
)
def test_a_damaged_tokenizer_is_refused(tokenizer, damage):
    with pytest.raises(ValueError, match="the stored tokenizer can't be used: "):
        load_tokenizer(damage(tokenizer.to_str()))


def test_a_tokenizer_with_other_special_tokens_is_refused(tokenizer):
    with pytest.raises(ValueError, match="does not begin with <pad>, <s>, </s>"):
        load_tokenizer(tokenizer.to_str().replace("<pad>", "[PAD]"))


def test_a_stored_tokenizer_is_the_same(tokenizer):
    again = load_tokenizer(tokenizer.to_str())
    assert again.to_str() == tokenizer.to_str()
    assert encode(again, SENTENCES) == encode(tokenizer, SENTENCES)


@pytest.mark.parametrize("vocabulary", [259, 400, 2000])
@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("A red dog.", ["A", "red", "dog", "."]),
        ("one, two", ["one", ",", "two"]),
        ("a well-known (red) dog", ["a", "well", "-", "known", "(", "red", ")", "dog"]),
        ("Zwei Männer", ["Zwei", "Männer"]),
        ("日本 cat", ["日本", "cat"]),
        ("$5_000", ["$", "5", "_", "000"]),
        ("two  spaces", ["two", "spaces"]),
        ("", []),
    ],
)
def test_words_are_whole_and_punctuation_stands_by_itself(vocabulary, sentence, expected):
    trained = train_tokenizer([*SENTENCES, "one, two"], vocabulary)
    ids = encode(trained, [sentence])[0] if sentence else []
    groups = words(trained, ids)
    assert [word for word, _ in groups] == expected
    assert [place for _, places in groups for place in places] == list(range(len(ids)))


@given(st.text(CHARACTERS, max_size=20))
def test_words_hold_every_token_once_in_order(text):
    ids = encode(TOKENIZERS["trained"], [text])[0]
    groups = words(TOKENIZERS["trained"], ids)
    assert [place for _, places in groups for place in places] == list(range(len(ids)))
    assert all(places for _, places in groups)
    assert all(a[-1] + 1 == b[0] for (_, a), (_, b) in pairwise(groups))
