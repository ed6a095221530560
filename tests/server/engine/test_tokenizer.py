"""Text to ids with the artifact's tokenizer."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from server.engine.errors import InvalidRequestError
from server.engine.model import LoadedModel
from server.engine.tokenizer import TextEncoder
from tests.server.samples import WORDS

VOCABULARY = sorted(WORDS)


@pytest.fixture(scope="session")
def encoder(text_model: LoadedModel) -> TextEncoder:
    assert text_model.text_encoder is not None
    return text_model.text_encoder


@given(texts=st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=9), min_size=1, max_size=5))
def test_each_word_becomes_its_place_in_the_vocabulary(encoder: TextEncoder, texts: list[list[str]]) -> None:
    ragged = encoder.encode(tuple(" ".join(words) for words in texts))
    assert list(ragged.lengths) == [len(words) for words in texts]
    assert ragged.rows.tolist() == [VOCABULARY.index(word) for words in texts for word in words]
    assert ragged.rows.dtype == np.int64


def test_commas_and_spaces_make_no_words(encoder: TextEncoder) -> None:
    assert encoder.encode(("  Life,  is\tshort,",)).rows.tolist() == [0, 4, 5]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("Life is long, and long",), "text: unknown words: 'long', 'and'"),
        (("Life", "life"), "text: unknown words: 'life'"),
        (("Life", ""), "text: text 1 does not contain any words"),
        ((" , ",), "text: text 0 does not contain any words"),
    ],
    ids=["each once and in order", "case counts", "empty", "only commas"],
)
def test_a_refusal_says_which_words_or_which_text(
    encoder: TextEncoder, texts: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        encoder.encode(texts)
    assert caught.value.field == "text"
    assert caught.value.message == message


def test_a_tokenizer_with_an_unknown_token_refuses_no_word(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"?": 0, "a": 1}, unk_token="?"))  # noqa: S106 - not a password
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextEncoder(tmp_path / "tokenizer.json").encode(("a b a",)).rows.tolist() == [1, 0, 1]
