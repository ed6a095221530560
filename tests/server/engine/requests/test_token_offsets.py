"""Which tokens of a text are kept, and the characters of each as it was sent, for every kind of tokenizer."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from attention_serving.server.engine.requests.tokenizer import EncodedTexts, TextEncoder, TextLimits

SPECIALS = [("<s>", 0), ("</s>", 1)]
# An emoji of two code points, a letter with a combining accent, two scripts, a ligature, spaces.
TEXT = "Life \U0001f44d\U0001f3fd e\u0301t\u00e9 人生 \ufb01n  x"
LETTERS = "eLi人生 \t\u0301\u00e9\ufb01\U0001f370x"
# The characters of its bytes, of which " e" and " x" are one token.
BYTES = [
    "", *"Life", "", *["\U0001f44d"] * 4, *["\U0001f3fd"] * 4, "e", "\u0301", "\u0301", "t", "\u00e9",
    "\u00e9", "", *["人"] * 3, *["生"] * 3, "", *["\ufb01"] * 3, "n", "", "x", "",
]  # fmt: skip
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
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=SPECIALS)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level in two steps": byte_level_in_two_steps,
    "unigram": unigram,
    "word-piece": word_piece,
}


def encoder_of(tokenizer: Tokenizer, folder: Path) -> TextEncoder:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return TextEncoder(path)


@pytest.fixture(params=TOKENIZERS, scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TextEncoder, Tokenizer]:
    """The server's encoder, and the library's tokenizer."""
    tokenizer = TOKENIZERS[request.param]()
    return encoder_of(tokenizer, tmp_path_factory.mktemp("tokenizer")), tokenizer


def offsets_of(found: EncodedTexts) -> list[Offsets]:
    """The offsets of each text."""
    assert found.offsets is not None
    assert found.offsets.lengths == found.ids.lengths
    rows = iter(map(tuple, found.offsets.rows.tolist()))
    return [[next(rows) for _ in range(length)] for length in found.offsets.lengths]


@settings(max_examples=40)
@given(texts=st.lists(st.text(st.sampled_from(LETTERS)), min_size=1, max_size=4), as_bytes=st.booleans())
def test_offsets_are_those_of_the_library_and_the_ids_do_not_change(
    pair: tuple[TextEncoder, Tokenizer], texts: list[str], as_bytes: bool
) -> None:
    encoder, reference = pair
    given_texts = tuple(text.encode() if as_bytes else text for text in texts)
    found = encoder.encode(given_texts, TextLimits(), offsets=True)
    plain = encoder.encode(given_texts, TextLimits())
    assert found.ids.rows.tolist() == plain.ids.rows.tolist()
    assert plain.offsets is None
    assert offsets_of(found) == [reference.encode(text).offsets for text in texts]
    assert found.ends == tuple(map(len, texts))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("byte-level", BYTES),
        (
            "word-piece",
            ["", "Li", "fe", "\U0001f44d\U0001f3fd", "e\u0301t\u00e9", "人", "生", "\ufb01n", "x", ""],
        ),
    ],
)
def test_the_characters_of_tokens_outside_ascii(name: str, expected: list[str], tmp_path: Path) -> None:
    found = encoder_of(TOKENIZERS[name](), tmp_path).encode((TEXT,), TextLimits(), offsets=True)
    (offsets,) = offsets_of(found)
    assert [TEXT[start:end] for start, end in offsets] == expected
    assert (offsets[0], offsets[-1]) == ((0, 0), (0, 0))


@settings(max_examples=40)
@given(text=st.text(st.sampled_from(LETTERS), max_size=12), prefix=st.sampled_from(["", "q: ", "é人"]))
def test_tokens_of_a_prefix_have_no_characters(
    pair: tuple[TextEncoder, Tokenizer], text: str, prefix: str
) -> None:
    encoder, reference = pair
    found = encoder.encode((text,), TextLimits(), prefix=prefix, offsets=True)
    own = len(prefix)
    expected = [(max(0, a - own), max(0, b - own)) for a, b in reference.encode(prefix + text).offsets]
    assert offsets_of(found) == [expected]
    assert found.ends == (len(text),)


@settings(max_examples=40)
@given(text=st.text(st.sampled_from(LETTERS), max_size=200))
def test_a_text_that_is_cut_ends_where_its_next_token_begins(
    pair: tuple[TextEncoder, Tokenizer], text: str
) -> None:
    encoder, reference = pair
    most = 6
    found = encoder.encode((text,), TextLimits(text_tokens=most), truncates=True, offsets=True)
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
