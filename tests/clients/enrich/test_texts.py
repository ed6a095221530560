"""Texts of rows: made by templates, and cut into passages with tokenizers of several kinds."""

from itertools import pairwise
from pathlib import Path

import pytest
from attention_client.enrich import EnrichError
from attention_client.enrich.texts import Passage, PassageSplitter, TextTemplate, count_tokens, load_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece

from tests.support.encoders import make_tokenizer

TEXT = (
    "Life is short, eat dessert first. Das Leben ist kurz: iß den Nachtisch zuerst! "
    "人生短暂 先吃甜点 \U0001f370\U0001f370"
)


def word_pieces() -> Tokenizer:
    """Words and their letters, in lower case without accents, as BERT splits them."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    unknown = "[UNK]"
    words = [unknown, "dessert", "first", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(WordPiece({word: number for number, word in enumerate(words)}, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def whole_text() -> Tokenizer:
    """Letters of a text that is not split into words first, with a mark for spaces, as Llama has them."""
    letters = sorted({*TEXT, "▁"})
    unknown = "<unk>"
    vocabulary = {letter: number for number, letter in enumerate([unknown, *letters])}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token=unknown))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


TOKENIZERS = {"bytes": make_tokenizer(), "word pieces": word_pieces(), "whole text": whole_text()}
named = pytest.mark.parametrize("name", TOKENIZERS)


def split(name: str, text: str, room: int, overlap: int = 0) -> list[Passage]:
    (found,) = PassageSplitter(TOKENIZERS[name], room, overlap).split([text])
    assert isinstance(found, list), found
    return found


def check(name: str, text: str, room: int, overlap: int, passages: list[Passage]) -> None:
    """Every passage fits and is where it says, and nothing but what has no token is left out."""
    for passage in passages:
        assert text[passage.start : passage.end] == passage.text
        assert count_tokens(TOKENIZERS[name], passage.text) <= room
    for (_, start, end), (_, following, following_end) in pairwise(passages):
        assert start < following
        assert end < following_end
        assert count_tokens(TOKENIZERS[name], text[following:end]) <= overlap + 1  # a mark for its start
        if following > end:
            assert count_tokens(TOKENIZERS[name], text[end:following].strip()) == 0
    assert not text[: passages[0].start].strip()
    assert not text[passages[-1].end :].strip()


@named
def test_passages_fit_and_cover_the_text(name: str) -> None:
    for room, overlap in ((16, 8), (17, 0), (40, 3)):
        passages = split(name, TEXT, room, overlap)
        assert len(passages) > 1
        check(name, TEXT, room, overlap, passages)


@named
def test_words_are_whole_where_they_fit_and_texts_that_fit_are_unchanged(name: str) -> None:
    words = ["dessert", "first", "eat", "short"] * 9
    passages = split(name, " ".join(words), 20, 6)
    assert {word for passage in passages for word in passage.text.split()} == set(words)
    for text in ("", "  \n", " eat ", "dessert first"):
        assert split(name, text, 16) == [Passage(text, 0, len(text))]


def test_a_character_is_never_divided() -> None:
    text = "\U0001f370" * 7  # four tokens each
    passages = split("bytes", text, 10)
    assert [passage.text for passage in passages] == ["\U0001f370" * 2] * 3 + ["\U0001f370"]
    (found,) = PassageSplitter(TOKENIZERS["bytes"], 3, 0).split(["ab" + text])
    assert isinstance(found, EnrichError)
    assert str(found) == "the character at 2 has more tokens than the 3 of a passage"


@pytest.mark.filterwarnings("error")
@given(
    text=st.text(st.sampled_from("ab é人\U0001f370\n.,"), max_size=120),
    room=st.integers(4, 30),
    share=st.floats(0, 0.5),
)
@example(text="a" * 50, room=4, share=0.5)
@example(text="a.\U0001f370", room=4, share=0.5)
def test_any_text_is_covered(text: str, room: int, share: float) -> None:
    overlap = int(room * share)
    passages = split("bytes", text, room, overlap)
    check("bytes", text, room, overlap, passages)
    covered = {place for passage in passages for place in range(passage.start, passage.end)}
    assert covered == set(range(len(text)))  # each of its characters has a token


def test_a_tokenizer_is_a_file_or_a_folder_with_one(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert count_tokens(load_tokenizer(path), "dessert") == 7
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EnrichError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_a_null_counts_as_an_empty_text_and_a_row_of_nulls_as_null() -> None:
    cells: dict[str, list[str | None]] = {"title": ["A", None, "", None], "body": ["b", "c", None, None]}
    rendered = TextTemplate.parse("{{{body}}}: {title}, {body}!").render(cells)
    assert rendered == ["{b}: A, b!", "{c}: , c!", "{}: , !", None]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{title", "expected '}' before end of string; write {{ and }} for braces"),
        ("{title!r}", "has a format or a conversion after 'title'"),
        ("{{title}}", "names no column; a name in braces does, as in {title}"),
    ],
)
def test_a_template_that_cannot_be_read_is_refused(template: str, words: str) -> None:
    with pytest.raises(EnrichError) as caught:
        TextTemplate.parse(template)
    assert str(caught.value).startswith(f"template {template!r}")
    assert words in str(caught.value)
