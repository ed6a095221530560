"""Text to token ids, with the tokenizer of the artifact."""

from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE

from server.engine.errors import InvalidRequestError
from server.engine.types import Ragged

# Name of the request field that contains texts.
TEXT = "text"


class TextEncoder:
    """Encodes the texts of a request."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        # The server limits lengths, and batches pad.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Other tokenizer models raise if they lack a token for a word; BPE silently drops it.
        model = self._tokenizer.model
        self._drops_unknown = isinstance(model, BPE) and model.unk_token is None

    def encode(self, texts: tuple[str, ...]) -> Ragged:
        """Encodes each text as one sequence of token ids.

        Raises:
            InvalidRequestError: A text is empty, or contains a word outside the vocabulary and the tokenizer
                lacks a token for unknown words.
        """
        ids = [self._encode(text).ids for text in texts]
        for index, sequence in enumerate(ids):
            if not sequence:
                raise InvalidRequestError(TEXT, f"text {index} does not contain any words")
        lengths = tuple(map(len, ids))
        return Ragged(np.array([i for sequence in ids for i in sequence], dtype=np.int64), lengths)

    def _encode(self, text: str) -> Encoding:
        try:
            encoding = self._tokenizer.encode(text)
        except Exception as error:  # the library does not raise a narrower type
            raise InvalidRequestError(TEXT, self._unknown(text) or str(error)) from error
        if self._drops_unknown and (unknown := self._unknown(text)):
            raise InvalidRequestError(TEXT, unknown)
        return encoding

    def _unknown(self, text: str) -> str:
        """A message that lists the words without a token; empty if every word has one."""
        for token in self._tokenizer.get_added_tokens_decoder().values():
            text = text.replace(token.content, " ")
        if self._tokenizer.normalizer is not None:
            text = self._tokenizer.normalizer.normalize_str(text)
        words = [text]
        if self._tokenizer.pre_tokenizer is not None:
            words = [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        unknown = [word for word in dict.fromkeys(words) if not self._is_known(word)]
        return f"unknown words: {', '.join(map(repr, unknown))}" if unknown else ""

    def _is_known(self, word: str) -> bool:
        try:
            tokens = self._tokenizer.model.tokenize(word)
        except Exception:  # as above
            return False
        covered: int = sum(end - start for start, end in (token.offsets for token in tokens))  # in bytes
        return covered == len(word.encode())
