"""Text to token ids with the tokenizer of the artifact."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.tokenizer import TextEncoder
from tests.server.samples import WORDS

VOCABULARY = sorted(WORDS)


@pytest.fixture(scope="session")
def encoder(text_model: LoadedModel) -> TextEncoder:
    assert text_model.text_encoder is not None
    return text_model.text_encoder


@given(texts=st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=9), min_size=1, max_size=5))
def test_each_word_becomes_its_index_in_the_vocabulary(encoder: TextEncoder, texts: list[list[str]]) -> None:
    ragged = encoder.encode(tuple(" ".join(words) for words in texts)).ids
    assert list(ragged.lengths) == [len(words) for words in texts]
    assert ragged.rows.tolist() == [VOCABULARY.index(word) for words in texts for word in words]
    assert ragged.rows.dtype == np.int64


def test_commas_and_spaces_are_not_words(encoder: TextEncoder) -> None:
    assert encoder.encode(("  Life,  is\tshort,",)).ids.rows.tolist() == [0, 4, 5]


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
def test_a_refusal_names_the_words_or_the_text(
    encoder: TextEncoder, texts: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        encoder.encode(texts)
    assert caught.value.field == "text"
    assert caught.value.message == message


def test_a_tokenizer_with_an_unknown_token_accepts_every_word(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"?": 0, "a": 1}, unk_token="?"))  # noqa: S106 - not a password
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextEncoder(tmp_path / "tokenizer.json").encode(("a b a",)).ids.rows.tolist() == [1, 0, 1]


def test_the_texts_of_tokens(tmp_path: Path) -> None:
    """A token with a text of its own has that, spaces included; any other has its name or its number."""
    vocabulary = {"[CLS]": 0, "Ġeat": 1, "Ã": 2, "##ing": 3}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[CLS]"))  # noqa: S106 - a word
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(["[CLS]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = TextEncoder(tmp_path / "tokenizer.json").texts_of([0, 1, 2, 3, 4, -1, 2**40])
    assert found == ["[CLS]", " eat", "Ã", "##ing", "4", "-1", str(2**40)]
