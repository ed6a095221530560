"""Text to token ids, with the artifact's own tokenizer."""

from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE

from server.engine.errors import InvalidRequestError
from server.engine.types import Ragged

FIELD = "text"


class TextEncoder:
    """Encodes the texts of a request."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        # Lengths are the server's to limit, and padding the scheduler's.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Other models raise on what they do not know and have no token for; this one leaves it out.
        model = self._tokenizer.model
        self._drops_unknown = isinstance(model, BPE) and model.unk_token is None

    def encode(self, texts: tuple[str, ...]) -> Ragged:
        """One sequence of ids for each text.

        Raises:
            InvalidRequestError: A text has no tokens, or has a word that the vocabulary lacks while the
                tokenizer has no token for unknown words.
        """
        ids = [self._encode(text).ids for text in texts]
        for index, sequence in enumerate(ids):
            if not sequence:
                raise InvalidRequestError(FIELD, f"text {index} has no words")
        lengths = tuple(map(len, ids))
        return Ragged(np.array([i for sequence in ids for i in sequence], dtype=np.int64), lengths)

    def _encode(self, text: str) -> Encoding:
        try:
            encoding = self._tokenizer.encode(text)
        except Exception as error:  # the library raises no narrower type
            raise InvalidRequestError(FIELD, self._unknown(text) or str(error)) from error
        if self._drops_unknown and (unknown := self._unknown(text)):
            raise InvalidRequestError(FIELD, unknown)
        return encoding

    def _unknown(self, text: str) -> str:
        """Names the words of a text that have no token; empty where all have one."""
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
