"""Text to token ids, with the tokenizer of the artifact."""

import math
import sys
import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from attention_serving.server.engine.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LimitExceededError,
)
from attention_serving.server.engine.tokenizer_facts import drops_unknown, ends_words_at_spaces
from attention_serving.server.engine.types import Array, Ragged, Text
from attention_serving.server.engine.unknown_words import UnknownWords

# Name of the request field that contains texts.
TEXT = "text"
SPACE = " "
# Words are longer than this on average, so that most texts within the limit are encoded once.
CHARACTERS_PER_TOKEN = 4
# Stands for bytes that are not a whole character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_ID = 2**32 - 1
# More texts than this take several milliseconds, however short they are.
FEW_TEXTS = 256


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


class EncodedTexts(NamedTuple):
    """The token ids of texts.

    Attributes:
        ids: One sequence for each text.
        truncated: Indices of the texts of which only the first tokens are there.
        offsets: For each token the first and the exclusive last of its characters (2,), in the text without
            the prefix; (0, 0) for special tokens and those of the prefix. None if they were not asked for.
        ends: With offsets, the number of characters of each text that its tokens stand for.
    """

    ids: Ragged
    truncated: tuple[int, ...] = ()
    offsets: Ragged | None = None
    ends: tuple[int, ...] = ()


class _Tokens(NamedTuple):
    """The tokens of one text.

    Attributes:
        ids: Their ids, special tokens included.
        offsets: Their characters; None if they were not asked for.
        is_cut: Whether they are only the first ones.
        end: With offsets, the number of characters of the text that they stand for.
    """

    ids: list[int]
    offsets: "list[tuple[int, int]] | None"
    is_cut: bool
    end: int


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

    def texts_of(self, ids: Iterable[int]) -> list[str]:
        """The text of each token by itself.

        A token without a text of its own has its name in the vocabulary: a special token, or one that is a
        part of a character. An id outside the vocabulary has its number.
        """
        return [self._text_of(each) for each in ids]

    def _text_of(self, token_id: int) -> str:
        name = self._tokenizer.id_to_token(token_id) if 0 <= token_id <= MAX_ID else None
        if name is None:
            return str(token_id)
        text = self._tokenizer.decode([token_id])
        return text if text and REPLACEMENT not in text else name

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
        return self.encode_all(texts, limits or TextLimits(), deadline).ids

    def encode_all(
        self,
        texts: tuple[Text, ...],
        limits: TextLimits,
        deadline: float = math.inf,
        *,
        prefix: str = "",
        truncates: bool = False,
        offsets: bool = False,
    ) -> EncodedTexts:
        """Encodes each text as `encode` does.

        Args:
            texts: The texts.
            limits: Bounds of the texts.
            deadline: When the caller stops waiting.
            prefix: Is put before each text.
            truncates: Whether a text with too many tokens is cut to its first ones, special tokens included.
            offsets: Whether the result contains the characters of each token.
        """
        ids, lengths, truncated = array("q"), [], []
        characters, ends = [], []
        for index, text in enumerate(texts):
            if time.monotonic() > deadline:
                raise DeadlineExceededError("the deadline passed before the texts were encoded")
            name = f"text {index}"
            given = prefix + _decoded(name, text, limits.text_bytes)
            tokens = self._tokenized(name, given, limits, truncates=truncates, offsets=offsets)
            if tokens.is_cut:
                truncated.append(index)
            ids.extend(tokens.ids)
            lengths.append(len(tokens.ids))
            if tokens.offsets is not None:
                characters.append(_without(len(prefix), np.array(tokens.offsets)))
                ends.append(max(0, tokens.end - len(prefix)))
            if len(ids) > limits.tokens:
                raise LimitExceededError(
                    TEXT,
                    f"texts 0 to {index} have {len(ids)} tokens; the limit of one request is {limits.tokens}",
                )
        rows = np.frombuffer(ids, np.int64) if ids else np.empty(0, np.int64)
        found = EncodedTexts(Ragged(rows, tuple(lengths)), tuple(truncated))
        if not offsets:
            return found
        return found._replace(offsets=Ragged(np.concatenate(characters), found.ids.lengths), ends=tuple(ends))

    def _tokenized(
        self, name: str, text: str, limits: TextLimits, *, truncates: bool, offsets: bool
    ) -> _Tokens:
        if truncates:
            tokens = self._first_tokens(text, limits.text_tokens, offsets=offsets)
        else:
            tokens = self._all_tokens(name, text, limits, offsets=offsets)
        if self._drops_unknown and (unknown := self._unknown_words.of(text)):
            raise InvalidRequestError(TEXT, unknown)
        if not tokens.ids:
            raise InvalidRequestError(TEXT, f"{name} does not contain any words")
        return tokens

    def _all_tokens(self, name: str, text: str, limits: TextLimits, *, offsets: bool) -> _Tokens:
        for prefix in self._prefixes(text, limits.text_tokens):
            self._check_tokens(name, len(self._encoding(prefix, special=False)), limits)
        encoding = self._encoding(text, special=True, offsets=offsets)
        self._check_tokens(name, len(encoding), limits)
        own = encoding.offsets if offsets else None
        return _Tokens(encoding.ids, own, is_cut=False, end=len(text))

    def _first_tokens(self, text: str, most: int, *, offsets: bool) -> _Tokens:
        """The first tokens of a text, with the special tokens."""
        room = max(0, most - self._tokenizer.num_special_tokens_to_add(is_pair=False))
        # Of a text that is far too long, a part has enough tokens.
        for part in self._prefixes(text, most):
            encoding = self._encoding(part, special=False, offsets=offsets)
            if len(encoding) > room:
                break
        else:
            encoding = self._encoding(text, special=False, offsets=offsets)
        end, is_cut = len(text), len(encoding) > room
        if is_cut:
            if offsets:
                end, _ = encoding.token_to_chars(room) or (end, end)
            encoding.truncate(room)
        processed = self._tokenizer.post_process(encoding, add_special_tokens=True)
        own = _processed_offsets(processed, encoding.offsets) if offsets else None
        return _Tokens(processed.ids, own, is_cut, end)

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

    def _encoding(self, text: str, *, special: bool, offsets: bool = False) -> Encoding:
        # The fast one does not compute where in the text each token comes from.
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        try:
            (encoding,) = encode([text], add_special_tokens=special)
        except Exception as error:  # the library does not raise a narrower type
            raise InvalidRequestError(TEXT, self._unknown_words.of(text) or str(error)) from error
        return encoding

    def _check_tokens(self, name: str, count: int, limits: TextLimits) -> None:
        if count > limits.text_tokens:
            raise LimitExceededError(
                TEXT, f"{name} has {count} or more tokens; the limit is {limits.text_tokens}"
            )


def _processed_offsets(processed: Encoding, offsets: "list[tuple[int, int]]") -> "list[tuple[int, int]]":
    """The offsets of tokens to which special tokens were added.

    Those of `processed` are not used: they were processed a second time, which trims some of them twice.
    """
    own = iter(offsets)
    return [(0, 0) if sequence is None else next(own) for sequence in processed.sequence_ids]


def _without(prefix: int, offsets: Array) -> Array:
    """The offsets (T, 2) in the text after a prefix of so many characters."""
    own: Array = np.maximum(offsets - prefix, 0).astype(np.uint32)
    return own.reshape(-1, 2)


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
