"""Text to token ids, with the tokenizer of the artifact."""

import math
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from server.engine.errors import DeadlineExceededError, InvalidRequestError, LimitExceededError
from server.engine.tokenizer_facts import drops_unknown, ends_words_at_spaces
from server.engine.types import Ragged, Text
from server.engine.unknown_words import UnknownWords

# Name of the request field that contains texts.
TEXT = "text"
SPACE = " "
# Words are longer than this on average, so that most texts within the limit are encoded once.
CHARACTERS_PER_TOKEN = 4


class TextLimits(NamedTuple):
    """Bounds that hold while texts are encoded, not afterwards.

    Attributes:
        text_bytes: UTF-8 bytes of one text.
        text_tokens: Tokens of one text, special tokens included.
        tokens: Tokens of all texts.
    """

    text_bytes: int = sys.maxsize
    text_tokens: int = sys.maxsize
    tokens: int = sys.maxsize


class TextEncoder:
    """Encodes the texts of a request. May be used by several threads."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        # The server limits lengths, and batches pad.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._drops_unknown = drops_unknown(self._tokenizer)
        self._ends_words_at_spaces = ends_words_at_spaces(self._tokenizer)
        self._unknown_words = UnknownWords(self._tokenizer)

    def encode(
        self, texts: tuple[Text, ...], limits: TextLimits | None = None, deadline: float = math.inf
    ) -> Ragged:
        """Encodes each text as one sequence of token ids.

        Args:
            texts: The texts. One that is given as UTF-8 is decoded when it is encoded, so that only one text
                at a time needs memory beside the request.
            limits: Bounds of the texts.
            deadline: When the caller stops waiting, on `time.monotonic`'s clock.

        Raises:
            InvalidRequestError: A text is empty or not UTF-8, or contains a word outside the vocabulary and
                the tokenizer lacks a token for unknown words.
            LimitExceededError: A text is too long, or all of them are.
            DeadlineExceededError: The deadline passed before all texts were encoded.
        """
        limits = limits or TextLimits()
        ids, lengths = array("q"), []
        for index, text in enumerate(texts):
            if time.monotonic() > deadline:
                raise DeadlineExceededError("the deadline passed before the texts were encoded")
            own = self._ids(f"text {index}", text, limits)
            ids.extend(own)
            lengths.append(len(own))
            if len(ids) > limits.tokens:
                raise LimitExceededError(
                    TEXT,
                    f"texts 0 to {index} have {len(ids)} tokens; the limit of one request is {limits.tokens}",
                )
        return Ragged(np.frombuffer(ids, np.int64) if ids else np.empty(0, np.int64), tuple(lengths))

    def _ids(self, name: str, given: Text, limits: TextLimits) -> list[int]:
        text = _decoded(name, given, limits.text_bytes)
        for prefix in self._prefixes(text, limits.text_tokens):
            self._check_tokens(name, len(self._tokens(prefix, special=False)), limits)
        tokens = self._tokens(text, special=True)
        self._check_tokens(name, len(tokens), limits)
        if self._drops_unknown and (unknown := self._unknown_words.of(text)):
            raise InvalidRequestError(TEXT, unknown)
        if not tokens:
            raise InvalidRequestError(TEXT, f"{name} does not contain any words")
        return tokens

    def _prefixes(self, text: str, most: int) -> Iterator[str]:
        """Parts of a long text, each twice as long as the one before, that have no more tokens than the text.

        A text that is far too long is refused for the first of them. If the tokenizer does not end its
        words at every space, the text may have fewer tokens than a part of it, and there are no parts.
        """
        size = most * CHARACTERS_PER_TOKEN
        while self._ends_words_at_spaces and size < len(text):
            if (end := _end_of_word(text, size)) > 0:
                yield text[:end]
            size *= 2

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        try:
            # Unlike `encode`, this does not compute where in the text each token comes from.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        except Exception as error:  # the library does not raise a narrower type
            raise InvalidRequestError(TEXT, self._unknown_words.of(text) or str(error)) from error
        return list(encoding.ids)

    def _check_tokens(self, name: str, count: int, limits: TextLimits) -> None:
        if count > limits.text_tokens:
            raise LimitExceededError(
                TEXT, f"{name} has {count} or more tokens; the limit is {limits.text_tokens}"
            )


def _end_of_word(text: str, before: int) -> int:
    """Where the last word ends that a space before that position follows; at most 0 if there is none."""
    end = text.rfind(SPACE, 0, before)
    while end > 0 and text[end - 1].isspace():  # white space in a row may become one token
        end = text.rfind(SPACE, 0, end)
    return end


def _decoded(name: str, text: Text, limit: int) -> str:
    """A text, after the check of its size: a string may take four times the memory of its bytes."""
    size = len(text)
    if isinstance(text, str) and not text.isascii():
        size = len(text.encode(errors="replace"))
    if size > limit:
        raise LimitExceededError(TEXT, f"{name} has {size} bytes; the limit is {limit}")
    if isinstance(text, str):
        return text
    try:
        return str(text, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(TEXT, f"{name} is not UTF-8: {error}") from error
