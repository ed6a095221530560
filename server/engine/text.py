"""Text to token ids, with the artifact's own tokenizer."""

from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from server.engine.errors import InvalidRequestError
from server.engine.values import Ragged

FIELD = "text"


class TextEncoder:
    """Encodes the texts of a request."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))

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
        lengths = np.array([len(sequence) for sequence in ids], dtype=np.int64)
        return Ragged(np.array([i for sequence in ids for i in sequence], dtype=np.int64), lengths)

    def _encode(self, text: str) -> Encoding:
        try:
            return self._tokenizer.encode(text)
        except Exception as error:  # the library raises no narrower type
            unknown = self._unknown_words(text)
            message = f"unknown words: {', '.join(map(repr, unknown))}" if unknown else str(error)
            raise InvalidRequestError(FIELD, message) from error

    def _unknown_words(self, text: str) -> list[str]:
        if self._tokenizer.normalizer is not None:
            text = self._tokenizer.normalizer.normalize_str(text)
        if self._tokenizer.pre_tokenizer is None:
            return []
        words = [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return [word for word in dict.fromkeys(words) if self._tokenizer.token_to_id(word) is None]
