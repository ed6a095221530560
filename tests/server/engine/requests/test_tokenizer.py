"""Every kind of tokenizer: text that it would silently drop is refused, by word."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from attention_serving.server.engine.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LimitExceededError,
)
from attention_serving.server.engine.requests.tokenizer import TextEncoder, TextLimits

UNK = "[UNK]"
Build = Callable[[], Tokenizer]


def bpe(*, unk: str | None = None, split: bool = True) -> Tokenizer:
    """Knows l, o, w, e, r and the merges to "low" and "er"."""
    tokens = [*([unk] if unk else []), "l", "o", "w", "e", "r", "lo", "low", "er"]
    merges = [("l", "o"), ("lo", "w"), ("e", "r")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unk))
    if split:
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def changed(tokenizer: Tokenizer, **parts: object) -> Tokenizer:
    """The same tokenizer with other parts."""
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def with_token(tokenizer: Tokenizer, content: str) -> Tokenizer:
    tokenizer.add_tokens([content])
    return tokenizer


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


def encoder(tokenizer: Tokenizer, folder: Path) -> TextEncoder:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return TextEncoder(path)


REFUSED: dict[str, tuple[Build, str, str]] = {
    "a word": (bpe, "low xyz er", "'xyz'"),
    "a character at the end of a word": (bpe, "low lower lowers", "'lowers'"),
    "a character at the beginning of a word": (bpe, "slow", "'slow'"),
    "a character of four bytes": (bpe, "low \N{GRINNING FACE}", "'\N{GRINNING FACE}'"),
    "normalised": (lambda: changed(bpe(), normalizer=normalizers.Lowercase()), "LOW LOWS", "'lows'"),
    "without a splitter": (lambda: bpe(split=False), "low er", "'low er'"),
    "no unknown token of words": (lambda: word_level(None), "low other", "'other'"),
}


@pytest.mark.parametrize(("build", "text", "unknown"), REFUSED.values(), ids=REFUSED)
def test_words_that_would_be_dropped_are_refused(
    build: Build, text: str, unknown: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        encoder(build(), tmp_path).encode((text,))
    assert refusal.value.field == "text"
    assert refusal.value.message == f"text: unknown words: {unknown}"


ACCEPTED: dict[str, tuple[Build, str, list[str]]] = {
    "added tokens": (lambda: with_token(bpe(), "xyz"), "low xyz er", ["low", "xyz", "er"]),
    "BPE of marked words": (
        # A word begins with a mark of three bytes.
        lambda: changed(
            Tokenizer(models.BPE({"▁": 0, "l": 1}, [])), pre_tokenizer=pre_tokenizers.Metaspace()
        ),
        "l ll",
        ["▁", "l", "▁", "l", "l"],
    ),
    "BPE": (bpe, "lower  low\ner", ["low", "er", "low", "er"]),
    "BPE with an unknown token": (
        lambda: bpe(unk=UNK),
        "lowers xy low",
        ["low", "er", UNK, UNK, UNK, "low"],
    ),
    "WordPiece, unknown": (word_piece, "lower lowers öl new", ["low", "##er", UNK, UNK, "new"]),
    "WordLevel, unknown": (word_level, "low other new", ["low", UNK, "new"]),
}


@pytest.mark.parametrize(("build", "text", "tokens"), ACCEPTED.values(), ids=ACCEPTED)
def test_text_becomes_the_token_ids_of_its_tokenizer(
    build: Build, text: str, tokens: list[str], tmp_path: Path
) -> None:
    tokenizer = build()
    ragged = encoder(tokenizer, tmp_path).encode((text, text)).ids
    assert [tokenizer.id_to_token(i) for i in ragged.rows.tolist()] == [*tokens, *tokens]
    assert list(ragged.lengths) == [len(tokens)] * 2


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(text=st.text(min_size=1))
@example(text="\N{GRINNING FACE} \N{COMBINING ACUTE ACCENT}")
@example(text="\x00\t\n ")
def test_byte_level_encodes_every_text(text: str, tmp_path: Path) -> None:
    tokenizer = byte_level()
    ids = encoder(tokenizer, tmp_path).encode((text,)).ids.rows.tolist()
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_byte_fallback_encodes_every_text(tmp_path: Path) -> None:
    vocabulary = {token: index for index, token in enumerate(["l", *(f"<0x{n:02X}>" for n in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    ids = encoder(tokenizer, tmp_path).encode(("lé\x00\N{GRINNING FACE}",)).ids.rows.tolist()
    assert len(ids) == 1 + 2 + 1 + 4
    del vocabulary["<0xC3>"]
    lacking = Tokenizer(models.BPE({t: n for n, t in enumerate(vocabulary)}, [], byte_fallback=True))
    with pytest.raises(InvalidRequestError, match="unknown words: 'lé'"):
        encoder(lacking, tmp_path).encode(("lé",))


@pytest.mark.parametrize(
    ("build", "text"),
    [(bpe, ""), (word_piece, " \t\n"), (byte_level, "")],
    ids=["no characters", "spaces", "no bytes"],
)
def test_a_text_without_words_is_refused_by_its_index(build: Build, text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        encoder(build(), tmp_path).encode(("low", text))
    assert refusal.value.field == "text"
    assert refusal.value.message == "text: text 1 does not contain any words"


TEXT_ALPHABET = st.text(st.sampled_from("low erné\n\u00a0\u2581,LOW"), max_size=80)
MANY_KINDS: dict[str, Build] = {
    "BPE": lambda: bpe(unk=UNK),
    "BPE of sentences": lambda: bpe(unk=UNK, split=False),
    "byte level": byte_level,
    "WordPiece": word_piece,
    "WordLevel": word_level,
    "BPE of marked words": lambda: changed(bpe(unk=UNK), pre_tokenizer=pre_tokenizers.Metaspace()),
    "token with a space": lambda: with_token(word_level(), "low low low"),
}


@pytest.mark.parametrize("build", MANY_KINDS.values(), ids=MANY_KINDS)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(text=TEXT_ALPHABET, limit=st.integers(1, 12))
def test_a_text_is_refused_for_its_tokens_only_if_the_whole_of_it_has_too_many(
    text: str, limit: int, build: Build, tmp_path: Path
) -> None:
    unlimited = encoder(build(), tmp_path)
    try:
        (length,) = unlimited.encode((text,)).ids.lengths
    except InvalidRequestError:  # no words
        return
    try:
        found = unlimited.encode((text,), TextLimits(text_tokens=limit))
    except LimitExceededError:
        assert length > limit
    else:
        assert found.ids.lengths == (length,)
        assert length <= limit


def test_the_start_of_a_long_text_is_enough_to_refuse_it(tmp_path: Path) -> None:
    long = encoder(byte_level(), tmp_path)
    seen: list[int] = []
    encode = long._encoding
    long._encoding = lambda text, **options: seen.append(len(text)) or encode(text, **options)  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(LimitExceededError) as caught:
        long.encode(("low " * 100_000,), TextLimits(text_tokens=100))
    assert caught.value.field == "text"
    assert "the limit is 100" in caught.value.message
    assert max(seen) < 1000


@pytest.mark.parametrize(
    ("texts", "limits", "says"),
    [
        (
            ("low", "low low low"),
            TextLimits(text_tokens=2),
            "text: text 1 has 3 or more tokens; the limit is 2",
        ),
        (
            ("low low", b"low low"),
            TextLimits(tokens=3),
            "text: texts 0 to 1 have 4 tokens; the limit of one request is 3",
        ),
        (("low", b"lowlow"), TextLimits(text_bytes=5), "text: text 1 has 6 bytes; the limit is 5"),
        (("\u00e9\u00e9\u00e9",), TextLimits(text_bytes=5), "text: text 0 has 6 bytes; the limit is 5"),
    ],
    ids=["tokens of a text", "tokens of all texts", "bytes", "bytes of characters"],
)
def test_texts_beyond_a_limit_are_refused(
    texts: tuple[str | bytes, ...], limits: TextLimits, says: str, tmp_path: Path
) -> None:
    with pytest.raises(LimitExceededError) as caught:
        encoder(word_level(), tmp_path).encode(texts, limits)
    assert caught.value.message == says


def test_bytes_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="text 1 is not UTF-8: 'utf-8' codec"):
        encoder(word_level(), tmp_path).encode(("low", memoryview(b"\xff")))


def test_texts_are_not_encoded_after_their_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceededError):
        encoder(word_level(), tmp_path).encode(("low",), deadline=0.0)


def test_at_most_ten_unknown_words_are_named_and_long_ones_are_shortened(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(9)]
    with pytest.raises(InvalidRequestError) as caught:
        encoder(word_level(None), tmp_path).encode((" ".join([*words, "x" * 5000, "other"]),))
    named = ", ".join(map(repr, [*words, "x" * 128 + "..."]))
    assert caught.value.message == f"text: unknown words: {named}"


def test_an_unknown_word_far_into_a_long_text_is_found(tmp_path: Path) -> None:
    text = "\n".join(["low"] * 6_000 + ["far"] + ["low"] * 6_000)
    with pytest.raises(InvalidRequestError, match=r"text: unknown words: 'far'$"):
        encoder(bpe(), tmp_path).encode((text,))
    (length,) = encoder(bpe(), tmp_path).encode((text.replace("far", "low"),)).ids.lengths
    assert length == 12_001


def test_the_texts_of_tokens(tmp_path: Path) -> None:
    """A token with a text of its own has that, spaces included; any other has its name or its number."""
    vocabulary = {"[CLS]": 0, "Ġeat": 1, "Ã": 2, "##ing": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[CLS]"))  # noqa: S106 - a word
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["[CLS]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = TextEncoder(tmp_path / "tokenizer.json").texts_of([0, 1, 2, 3, 4, -1, 2**40])
    assert found == ["[CLS]", " eat", "Ã", "##ing", "4", "-1", str(2**40)]
