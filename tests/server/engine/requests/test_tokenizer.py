"""Texts become the token ids of their tokenizer within limits, and tokens know their characters."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from attention_serving.server.engine.errors import DeadlineExceededError, LimitExceededError
from attention_serving.server.engine.requests.tokenizer import EncodedTexts, Side, TextLimits, TextTokenizer
from tests.support.refusals import expect_refusal

UNK = "[UNK]"
SPECIALS = [("<s>", 0), ("</s>", 1)]
LETTERS = "eLi人生 \t\u0301\u00e9\ufb01\U0001f370x"
SIDES: tuple[Side, ...] = "right", "left"
Offsets = list[tuple[int, int]]


def byte_level() -> Tokenizer:
    """As RoBERTa's: tokens of bytes, spaces trimmed from the offsets."""
    pieces = ["<s>", "<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġe", "Ġx"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "e"), ("Ġ", "x")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>"])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True)
    return tokenizer


def byte_level_in_two_steps() -> Tokenizer:
    """As Qwen's: one processor trims spaces, another adds special tokens."""
    tokenizer = byte_level()
    template = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    trimming = processors.ByteLevel(trim_offsets=True)
    tokenizer.post_processor = processors.Sequence([trimming, template])
    return tokenizer


def unigram() -> Tokenizer:
    """As XLM-R's: compatibility characters normalised, words marked."""
    pieces = ["▁", "Li", "fe", "e", "\u00e9", "t", "t\u00e9", "人", "生", "fi", "n", "x"]
    scores = [("<s>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), *((piece, -3.0) for piece in pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, 2))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=SPECIALS)
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT's: lower case without accents, each Chinese character a word."""
    pieces = ["<s>", "</s>", "<unk>", "li", "##fe", "ete", "人", "生", "x", "e"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))  # noqa: S106 - a token of texts
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=SPECIALS
    )
    return tokenizer


def word_level() -> Tokenizer:
    """Two words, without a token for others."""
    tokenizer = Tokenizer(models.WordLevel({"low": 0, "x": 1}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def words_with_a_space() -> Tokenizer:
    """A token has two words and the space between them."""
    tokenizer = Tokenizer(models.WordLevel({UNK: 0, "</s>": 1, "x": 2}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens(["x x"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level in two steps": byte_level_in_two_steps,
    "unigram": unigram,
    "word-piece": word_piece,
    "words with a space": words_with_a_space,
}


def text_tokenizer(tokenizer: Tokenizer, folder: Path) -> TextTokenizer:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return TextTokenizer(path)


@pytest.fixture(params=TOKENIZERS, scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TextTokenizer, Tokenizer]:
    """The server's tokenizer, and the library's tokenizer."""
    tokenizer = TOKENIZERS[request.param]()
    return text_tokenizer(tokenizer, tmp_path_factory.mktemp("tokenizer")), tokenizer


def offsets_of(found: EncodedTexts) -> list[Offsets]:
    """The offsets of each text."""
    assert found.offsets is not None
    assert found.offsets.lengths == found.ids.lengths
    rows = iter(map(tuple, found.offsets.rows.tolist()))
    return [[next(rows) for _ in range(length)] for length in found.offsets.lengths]


@settings(max_examples=80)
@given(
    texts=st.lists(st.text(st.sampled_from(LETTERS)), min_size=1, max_size=4),
    prefix=st.sampled_from(["", "q: ", "é人"]),
    as_bytes=st.booleans(),
)
def test_offsets_are_those_of_the_library_without_the_prefix_and_the_ids_do_not_change(
    pair: tuple[TextTokenizer, Tokenizer], texts: list[str], prefix: str, as_bytes: bool
) -> None:
    tokenizer, reference = pair
    given_texts = tuple(text.encode() if as_bytes else text for text in texts)
    found = tokenizer.encode(given_texts, TextLimits(), prefix=prefix, offsets=True)
    plain = tokenizer.encode(given_texts, TextLimits(), prefix=prefix)
    assert found.ids.rows.tolist() == plain.ids.rows.tolist()
    assert plain.offsets is None
    own = len(prefix)
    expected = [reference.encode(prefix + text).offsets for text in texts]
    assert offsets_of(found) == [[(max(0, a - own), max(0, b - own)) for a, b in each] for each in expected]
    assert found.ends == tuple(map(len, texts))


@settings(max_examples=40)
@given(text=st.text(st.sampled_from(LETTERS), max_size=200), prefix=st.sampled_from(["", "q: "]))
def test_a_text_cut_on_the_left_begins_where_the_token_before_it_ends(
    pair: tuple[TextTokenizer, Tokenizer], text: str, prefix: str
) -> None:
    tokenizer, reference = pair[0], Tokenizer.from_str(pair[1].to_str())
    most = 6
    found = tokenizer.encode(
        (text,), TextLimits(text_tokens=most), prefix=prefix, cut="left", offsets=True, special=True
    )
    whole = reference.encode(prefix + text, add_special_tokens=False)
    dropped = max(0, len(whole) - most + reference.num_special_tokens_to_add(is_pair=False))
    everything, own = reference.encode(prefix + text), len(prefix)
    marks = zip(everything.offsets, everything.special_tokens_mask, strict=True)
    kept = iter([bounds for bounds, is_special in marks if not is_special][dropped:])
    reference.enable_truncation(most, direction="left")
    expected = reference.encode(prefix + text)
    assert (found.ids.rows.tolist(), [*found.special]) == (expected.ids, expected.special_tokens_mask)
    # Not those of `expected`: the library trims the space of the first token that stays in another way.
    bounds = [(own, own) if is_special else next(kept) for is_special in expected.special_tokens_mask]
    assert offsets_of(found) == [[(max(0, a - own), max(0, b - own)) for a, b in bounds]]
    start = max(0, whole.offsets[dropped - 1][1] - own) if dropped else 0
    assert (found.starts, found.ends) == ((start,), (len(text),))


@settings(max_examples=40)
@given(text=st.text(st.sampled_from(LETTERS), max_size=200))
def test_a_cut_text_ends_where_its_next_token_begins(
    pair: tuple[TextTokenizer, Tokenizer], text: str
) -> None:
    tokenizer, reference = pair
    most = 6
    found = tokenizer.encode((text,), TextLimits(text_tokens=most), cut="right", offsets=True)
    whole = reference.encode(text, add_special_tokens=False)
    everything = reference.encode(text)
    (offsets,) = offsets_of(found)
    room = most - reference.num_special_tokens_to_add(is_pair=False)
    if len(whole) <= room:
        assert (found.truncated, found.ends) == ((), (len(text),))
        assert offsets == everything.offsets
        return
    assert found.ids.rows.tolist() == [*everything.ids[: most - 1], everything.ids[-1]]
    assert offsets == [*everything.offsets[: most - 1], (0, 0)]
    assert (found.truncated, found.ends) == ((0,), (whole.offsets[room][0],))


@settings(max_examples=60)
@given(text=st.text(st.sampled_from(LETTERS), max_size=80), limit=st.integers(2, 12))
def test_only_too_many_tokens_are_refused(
    pair: tuple[TextTokenizer, Tokenizer], text: str, limit: int
) -> None:
    tokenizer, reference = pair
    length = len(reference.encode(text))
    try:
        found = tokenizer.encode((text,), TextLimits(text_tokens=limit))
    except LimitExceededError:
        assert length > limit
    else:
        assert found.ids.lengths == (length,)
        assert length <= limit


def test_a_part_of_a_long_text_is_enough_to_cut_or_refuse_it(
    pair: tuple[TextTokenizer, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, reference = pair[0], pair[1].to_str()
    seen, encode = list[int](), tokenizer._encoding

    def watch(text: str, **options: Any) -> Any:
        seen.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "_encoding", watch)
    text, limits = "q: " + "x Life é人生 eLi x x " * 10_000 + "xe", TextLimits(text_tokens=100)
    with pytest.raises(LimitExceededError, match=r"^text: .* the limit is 100"):
        tokenizer.encode((text,), limits)
    for side in SIDES:
        found = tokenizer.encode((text,), limits, prefix="q: ", cut=side, offsets=True)
        library = Tokenizer.from_str(reference)
        library.enable_truncation(100, direction=side)
        expected = library.encode(f"q: {text}")
        assert found.ids.rows.tolist() == expected.ids
        assert offsets_of(found) == [[(max(0, a - 3), max(0, b - 3)) for a, b in expected.offsets]]
    assert max(seen) < 1000


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("texts", [("人 Life " * 9, "ete x"), ("e", "Life ete " * 400), ("x e " * 500,) * 2])
def test_texts_are_cut_as_transformers_cuts_them(texts: tuple[str, str], side: Side, tmp_path: Path) -> None:
    options: dict[str, Any] = {"truncation_side": side, "model_max_length": 12}
    reader: Any = PreTrainedTokenizerFast(tokenizer_object=word_piece(), **options)  # type: ignore[no-untyped-call]
    tokenizer, limits = text_tokenizer(word_piece(), tmp_path), TextLimits(text_tokens=12)
    for second in ((), texts[1:]):
        found = tokenizer.encode(texts[:1], limits, second_texts=second, cut=side)
        assert found.ids.rows.tolist() == reader(*texts[:1], *second, truncation=True)["input_ids"]


EMPTY = "text: text 1 does not contain any words"
WORDS = [f"w{number}" for number in range(9)]
UNKNOWN = " ".join(["low", *WORDS, WORDS[0], "x" * 5000, "other"])
# Texts, the second of a pair, and what is refused of them.
INVALID: list[tuple[Any, Any, str]] = [
    (("low", ""), (), EMPTY),
    (("low", " \t\n"), (), EMPTY),
    (("low", memoryview(b"\xff")), (), "text: text 1 is not UTF-8: 'utf-8' codec"),
    (("low",), (b"\xff",), "text: the second text of pair 0 is not UTF-8"),
    ((UNKNOWN,), (), f"text: unknown words: {', '.join(map(repr, [*WORDS, 'x' * 128 + '...']))}"),
]
LIMITED: list[tuple[Any, Any, str]] = [
    (("low", "low low low"), {"text_tokens": 2}, "text: text 1 has 3 or more tokens; the limit is 2"),
    (("low low", b"low low"), {"tokens": 3}, "text: texts 0 to 1 have 4 tokens; the limit of one request is"),
    (("low", b"lowlow"), {"text_bytes": 5}, "text: text 1 has 6 bytes; the limit is 5"),
    (("\u00e9\u00e9\u00e9",), {"text_bytes": 5}, "text: text 0 has 6 bytes; the limit is 5"),
]


@pytest.mark.parametrize(("texts", "pairs", "message"), INVALID)
def test_invalid_texts_are_refused(texts: Any, pairs: Any, message: str, tmp_path: Path) -> None:
    with expect_refusal(message):
        text_tokenizer(word_level(), tmp_path).encode(texts, second_texts=pairs)


@pytest.mark.parametrize(("texts", "limits", "message"), LIMITED)
def test_texts_beyond_a_limit_are_refused(texts: Any, limits: Any, message: str, tmp_path: Path) -> None:
    with expect_refusal(message, LimitExceededError):
        text_tokenizer(word_level(), tmp_path).encode(texts, TextLimits(**limits))


def test_texts_are_not_encoded_after_their_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceededError):
        text_tokenizer(word_level(), tmp_path).encode(("low",), deadline=0.0)


def test_the_texts_of_tokens(tmp_path: Path) -> None:
    """A token with a text of its own has that, spaces included; any other has its name or its number."""
    vocabulary = {"[CLS]": 0, "Ġeat": 1, "Ã": 2, "##ing": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[CLS]"))  # noqa: S106 - a word
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["[CLS]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = TextTokenizer(tmp_path / "tokenizer.json").texts_of([0, 1, 2, 3, 4, -1, 2**40])
    assert found == ["[CLS]", " eat", "Ã", "##ing", "4", "-1", str(2**40)]


@settings(max_examples=150)
@given(
    st.tuples(*[st.text(st.sampled_from(LETTERS), max_size=60)] * 2),
    st.integers(4, 30),
    st.sampled_from(SIDES),
)
def test_a_pair_is_encoded_and_cut_as_the_library_does(
    pair: tuple[TextTokenizer, Tokenizer], texts: tuple[str, str], most: int, side: Side
) -> None:
    tokenizer, reference = pair[0], Tokenizer.from_str(pair[1].to_str())
    count, limits = len(reference.encode(*texts)), TextLimits(text_tokens=most)
    assume(count)  # otherwise the pair is refused
    reference.enable_truncation(most, strategy="longest_first", direction=side)
    expected = reference.encode(*texts)
    found = tokenizer.encode(texts[:1], limits, second_texts=texts[1:], cut=side, types=True)
    assert found.types is not None
    assert (found.ids.rows.tolist(), found.types.rows.tolist()) == (expected.ids, expected.type_ids)
    assert found.truncated == ((0,) if count > most else ())
    if count > most:
        with pytest.raises(LimitExceededError) as refusal:
            tokenizer.encode(texts[:1], limits, second_texts=texts[1:])
        count_in_error = re.search(r"text 0 has (\d+) or more tokens", str(refusal.value))
        assert count_in_error is not None
        assert most < int(count_in_error[1]) <= count  # of a long text, no more than its beginning is encoded
