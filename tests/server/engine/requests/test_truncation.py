"""Texts that are cut to the tokens that a model takes, against the tokenizers library's own truncation."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.requests.tokenizer import TextEncoder, TextLimits
from tests.support.encoders import make_tokenizer

MOST = 6
LIMITS = TextLimits(text_tokens=MOST)


def words() -> Tokenizer:
    """A token for each of few words, between special tokens."""
    vocabulary = {word: index for index, word in enumerate(("<s>", "</s>", "?", "eat", "dessert", "first"))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))  # noqa: S106 - a token of texts
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


TOKENIZERS = {"words": words, "bytes": make_tokenizer, "end only": lambda: make_tokenizer(begin=False)}


@pytest.fixture(params=TOKENIZERS, scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TextEncoder, Tokenizer]:
    """The server's encoder, and the library's tokenizer with truncation."""
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    make: Any = TOKENIZERS[request.param]
    reference: Tokenizer = make()
    reference.save(str(path))
    reference.enable_truncation(MOST)
    return TextEncoder(path), reference


@given(texts=st.lists(st.text(st.sampled_from("eat first  \t☕é")), min_size=1, max_size=4))
def test_the_ids_are_those_of_the_library(pair: tuple[TextEncoder, Tokenizer], texts: list[str]) -> None:
    encoder, reference = pair
    found = encoder.encode(tuple(texts), LIMITS, truncates=True)
    expected = [reference.encode(text) for text in texts]
    assert found.ids.rows.tolist() == [number for each in expected for number in each.ids]
    assert found.ids.lengths == tuple(len(each.ids) for each in expected)
    assert found.truncated == tuple(index for index, each in enumerate(expected) if each.overflowing)


def test_a_text_far_too_long_is_cut_to_the_same_tokens(pair: tuple[TextEncoder, Tokenizer]) -> None:
    encoder, reference = pair
    text = "first dessert  eat " * 5000
    found = encoder.encode((text.encode(),), LIMITS, truncates=True)
    assert found.ids.rows.tolist() == reference.encode(text).ids
    assert found.truncated == (0,)


def test_without_it_the_text_is_refused(pair: tuple[TextEncoder, Tokenizer]) -> None:
    encoder, _ = pair
    with pytest.raises(LimitExceededError, match=rf"text 1 has \d+ or more tokens; the limit is {MOST}"):
        encoder.encode(("eat", "eat " * 9), LIMITS)


def test_the_prefix_counts_as_text(pair: tuple[TextEncoder, Tokenizer]) -> None:
    encoder, reference = pair
    found = encoder.encode(("first", "eat first eat first"), LIMITS, prefix="eat ", truncates=True)
    expected = [reference.encode(f"eat {text}").ids for text in ("first", "eat first eat first")]
    assert found.ids.rows.tolist() == [number for ids in expected for number in ids]


def test_a_truncated_text_must_still_be_utf_8(pair: tuple[TextEncoder, Tokenizer]) -> None:
    with pytest.raises(InvalidRequestError, match="text 0 is not UTF-8"):
        pair[0].encode((b"\xff",), LIMITS, truncates=True)
