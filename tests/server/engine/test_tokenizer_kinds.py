"""Tokenizers of every model: text that one of them would lose is refused, by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from server.engine.errors import InvalidRequestError
from server.engine.tokenizer import TextEncoder

UNK = "[UNK]"
Build = Callable[[], Tokenizer]


def bpe(*, unk: str | None = None, fuse_unk: bool = False, split: bool = True) -> Tokenizer:
    """Knows l, o, w, e, r and the merges to "low" and "er"."""
    tokens = [*([unk] if unk else []), "l", "o", "w", "e", "r", "lo", "low", "er"]
    merges = [("l", "o"), ("lo", "w"), ("e", "r")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unk, fuse_unk=fuse_unk))
    if split:
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def bpe_lowercased() -> Tokenizer:
    tokenizer = bpe()
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def bpe_of_sentences() -> Tokenizer:
    return bpe(split=False)


def byte_level() -> Tokenizer:
    """All 256 bytes, as those of GPT-2."""
    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_piece() -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate((UNK, "low", "##er", "new"))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def word_level(unk: str | None = UNK) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate((UNK, "low", "new"))}
    tokenizer = Tokenizer(
        models.WordLevel(vocabulary, unk_token=unk) if unk else models.WordLevel(vocabulary)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([("low", -1.0), ("l", -3.0), ("o", -3.0), ("w", -3.0)], None))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def bpe_of_accents() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"é": 0, "l": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def bpe_of_marked_words() -> Tokenizer:
    """A word begins with a mark of three bytes."""
    tokenizer = Tokenizer(models.BPE({"▁": 0, "l": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def encoder(tokenizer: Tokenizer, folder: Path) -> TextEncoder:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return TextEncoder(path)


REFUSED: dict[str, tuple[Build, str, str]] = {
    "a word": (bpe, "low xyz er", "'xyz'"),
    "a character at the end of a word": (bpe, "low lower lowers", "'lowers'"),
    "a character at the beginning of a word": (bpe, "slow", "'slow'"),
    "a character inside a word": (bpe, "low lo-w", "'-'"),
    "a character of two bytes": (bpe, "low löw", "'löw'"),
    "a character of four bytes": (bpe, "low \N{GRINNING FACE}", "'\N{GRINNING FACE}'"),
    "capitals": (bpe, "low LOW er Er", "'LOW', 'Er'"),
    "after normalisation": (bpe_lowercased, "LOW LOWS", "'lows'"),
    "each once and in order": (bpe, "x y low x", "'x', 'y'"),
    "all of the text": (bpe, "xyz", "'xyz'"),
    "without a splitter": (bpe_of_sentences, "low er", "'low er'"),
    "no unknown token of words": (lambda: word_level(None), "low other", "'other'"),
    "no unknown token of a unigram": (unigram, "low lower", "'lower'"),
}


@pytest.mark.parametrize(("build", "text", "unknown"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_lost_is_refused_by_name(build: Build, text: str, unknown: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        encoder(build(), tmp_path).encode(("low", text))
    assert refusal.value.field == "text"
    assert refusal.value.message == f"text: unknown words: {unknown}"


@pytest.mark.parametrize(
    ("build", "text"),
    [(bpe_of_accents, "éx"), (bpe_of_marked_words, "xy")],
    ids=["beside a known character of two bytes", "beside a mark of three bytes"],
)
def test_what_would_be_lost_beside_long_characters_is_refused(
    build: Build, text: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match="unknown words"):
        encoder(build(), tmp_path).encode((text,))


def test_added_tokens_in_a_text_are_known(tmp_path: Path) -> None:
    tokenizer = bpe()
    tokenizer.add_tokens(["xyz"])
    tokenizer.add_special_tokens(["[SEP]"])
    ids = encoder(tokenizer, tmp_path).encode(("low xyz [SEP] er",)).rows.tolist()
    assert [tokenizer.id_to_token(i) for i in ids] == ["low", "xyz", "[SEP]", "er"]


ACCEPTED: dict[str, tuple[Build, str, list[str]]] = {
    "BPE of accents": (bpe_of_accents, "él é", ["é", "l", "é"]),
    "BPE of marked words": (bpe_of_marked_words, "l ll", ["▁", "l", "▁", "l", "l"]),
    "BPE": (bpe, "lower  low\ner", ["low", "er", "low", "er"]),
    "BPE, normalised": (bpe_lowercased, "LOW Er", ["low", "er"]),
    "BPE with an unknown token": (
        lambda: bpe(unk=UNK),
        "lowers xy low",
        ["low", "er", UNK, UNK, UNK, "low"],
    ),
    "BPE with a fused unknown token": (
        lambda: bpe(unk=UNK, fuse_unk=True),
        "lowers xy low",
        ["low", "er", UNK, UNK, "low"],
    ),
    "WordPiece": (word_piece, "lower low new", ["low", "##er", "low", "new"]),
    "WordPiece, unknown": (word_piece, "lower lowers öl new", ["low", "##er", UNK, UNK, "new"]),
    "WordLevel, unknown": (word_level, "low other new", ["low", UNK, "new"]),
    "WordLevel, all known": (lambda: word_level(None), "low new", ["low", "new"]),
}


@pytest.mark.parametrize(("build", "text", "tokens"), ACCEPTED.values(), ids=ACCEPTED)
def test_text_becomes_the_tokens_of_its_tokenizer(
    build: Build, text: str, tokens: list[str], tmp_path: Path
) -> None:
    tokenizer = build()
    ragged = encoder(tokenizer, tmp_path).encode((text, text))
    assert [tokenizer.id_to_token(i) for i in ragged.rows.tolist()] == [*tokens, *tokens]
    assert list(ragged.lengths) == [len(tokens)] * 2


@pytest.mark.parametrize(
    "text",
    [
        "plain text",
        "Größe, naïve",
        "日本語",
        "\N{GRINNING FACE} \N{COMBINING ACUTE ACCENT}",
        "\x00\t\n ",
    ],
    ids=["ascii", "latin", "japanese", "four bytes and combining", "control characters"],
)
def test_bytes_stand_for_any_text(text: str, tmp_path: Path) -> None:
    tokenizer = byte_level()
    ids = encoder(tokenizer, tmp_path).encode((text,)).rows.tolist()
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(text=st.text(min_size=1))
def test_bytes_stand_for_any_text_at_all(text: str, tmp_path: Path) -> None:
    tokenizer = byte_level()
    ids = encoder(tokenizer, tmp_path).encode((text,)).rows.tolist()
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("build", [bpe, word_piece, word_level], ids=["BPE", "WordPiece", "WordLevel"])
def test_special_tokens_of_the_post_processor_are_kept(build: Build, tmp_path: Path) -> None:
    tokenizer = build()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    special = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    ragged = encoder(tokenizer, tmp_path).encode(("low low", "low"))
    tokens = [tokenizer.id_to_token(i) for i in ragged.rows.tolist()]
    assert tokens == ["[CLS]", "low", "low", "[SEP]", "[CLS]", "low", "[SEP]"]
    assert list(ragged.lengths) == [4, 3]


@pytest.mark.parametrize("build", [bpe, word_piece, word_level, byte_level], ids=lambda build: build.__name__)
def test_an_empty_text_is_refused_by_its_index(build: Build, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        encoder(build(), tmp_path).encode(("low", ""))
    assert refusal.value.field == "text"
    assert refusal.value.message == "text: text 1 does not contain any words"


@pytest.mark.parametrize("build", [bpe, word_piece, word_level], ids=lambda build: build.__name__)
def test_a_text_of_spaces_is_refused(build: Build, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="text 0 does not contain any words"):
        encoder(build(), tmp_path).encode((" \t\n",))
