"""Text to token ids, with the tokenizer of the artifact."""

import json
import math
import re
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from attention_serving.server.engine.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LimitExceededError,
)
from attention_serving.server.engine.types import Array, Ragged, Text

# Name of the request field that contains texts.
TEXT = "text"
SPACE, WHITE_SPACE = " ", " \n\t\r"
# Words are longer than this on average, so that most texts within the limit are encoded once.
CHARACTERS_PER_TOKEN = 4
# Stands for bytes that are not a whole character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_ID = 2**32 - 1
# More texts than this, however short they are, or more bytes of text take several milliseconds.
FEW_TEXTS, LITTLE_TEXT_BYTES = 256, 32 << 10
# How much of a text is split into words at a time, in characters: each word is an object, and no other thread
# runs while the library makes them.
PIECE_CHARACTERS = 1 << 14
# A longer word is looked at character by character, each once.
LONG_WORD = 256
MAX_NAMED = 10
BYTES = range(256)
# Pre-tokenizers that never join what is before a space to what follows the space.
SPLITS_AT_SPACES = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "ByteLevel", "Metaspace")
# Normalizers that change what is before a space without regard to what follows the space.
KEEPS_SPACES = (
    "BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Strip",
    "StripAccents",
)  # fmt: skip
# A part of a tokenizer, in its serialized form.
Part = Mapping[str, Any]


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


UNLIMITED = TextLimits()


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
        offsets: Their characters (T, 2); None if they were not asked for.
        is_cut: Whether they are only the first ones.
        end: With offsets, the number of characters of the text that they stand for.
    """

    ids: list[int]
    offsets: Array | None
    is_cut: bool
    end: int


class TextEncoder:
    """Encodes the texts of a request. May be used by several threads."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        # The server limits lengths, and batches pad.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        parts: Part = json.loads(self._tokenizer.to_str())
        self._drops_unknown = _drops_unknown(self._tokenizer, parts)
        self._ends_words_at_spaces = _ends_words_at_spaces(parts)
        self._special_tokens = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        self._unknown_words = _UnknownWords(self._tokenizer)

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
        self,
        texts: tuple[Text, ...],
        limits: TextLimits = UNLIMITED,
        deadline: float = math.inf,
        *,
        prefix: str = "",
        truncates: bool = False,
        offsets: bool = False,
    ) -> EncodedTexts:
        """Encodes each text as one sequence of token ids.

        Args:
            texts: The texts. One that is given as UTF-8 is decoded when it is encoded, so that only one text
                at a time needs memory beside the request.
            limits: Bounds of the texts.
            deadline: When the caller stops waiting, on `time.monotonic`'s clock.
            prefix: Is put before each text.
            truncates: Whether a text with too many tokens is cut to its first ones, special tokens included.
            offsets: Whether the result contains the characters of each token.

        Raises:
            InvalidRequestError: A text is empty or not UTF-8, or contains a word outside the vocabulary and
                the tokenizer lacks a token for unknown words.
            LimitExceededError: A text is too long, or all of them are.
            DeadlineExceededError: The deadline passed before all texts were encoded.
        """
        ids, lengths, truncated = array("q"), [], []
        characters, ends = [], []
        for index, text in enumerate(texts):
            if time.monotonic() > deadline:
                raise DeadlineExceededError("the deadline passed before the texts were encoded")
            name = f"text {index}"
            given = prefix + _decoded(name, text, limits.text_bytes)
            tokens = self._tokens(name, given, limits.text_tokens, truncates=truncates, offsets=offsets)
            if tokens.is_cut:
                truncated.append(index)
            ids.extend(tokens.ids)
            lengths.append(len(tokens.ids))
            if tokens.offsets is not None:
                characters.append(np.maximum(tokens.offsets - len(prefix), 0).astype(np.uint32))
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

    def _tokens(self, name: str, text: str, most: int, *, truncates: bool, offsets: bool) -> _Tokens:
        room = most - self._special_tokens
        # Of a text that is far too long, a part has enough tokens.
        for part in self._prefixes(text, most):
            encoding = self._encoding(part, offsets=offsets)
            if len(encoding) > room:
                break
        else:
            encoding = self._encoding(text, offsets=offsets)
        end, is_cut = len(text), len(encoding) > room
        if is_cut and not truncates:
            count = len(encoding) + self._special_tokens
            raise LimitExceededError(TEXT, f"{name} has {count} or more tokens; the limit is {most}")
        if is_cut:
            room = max(0, room)
            if offsets:
                end, _ = encoding.token_to_chars(room) or (end, end)
            encoding.truncate(room)
        if self._drops_unknown and (unknown := self._unknown_words.of(text)):
            raise InvalidRequestError(TEXT, unknown)
        processed = self._tokenizer.post_process(encoding, add_special_tokens=True)
        if not processed:
            raise InvalidRequestError(TEXT, f"{name} does not contain any words")
        return _Tokens(processed.ids, _offsets(processed, encoding) if offsets else None, is_cut, end)

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

    def _encoding(self, text: str, *, offsets: bool) -> Encoding:
        """The tokens of a text, without special tokens."""
        # The fast one does not compute where in the text each token comes from.
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        try:
            (encoding,) = encode([text], add_special_tokens=False)
        except Exception as error:  # the library does not raise a narrower type
            raise InvalidRequestError(TEXT, self._unknown_words.of(text) or str(error)) from error
        return encoding


def _offsets(processed: Encoding, encoding: Encoding) -> Array:
    """The offsets (T, 2) of tokens to which special tokens were added, and which had others before.

    Those of `processed` are not used: they were processed a second time, which trims some of them twice.
    """
    own = iter(encoding.offsets)
    found = [(0, 0) if sequence is None else next(own) for sequence in processed.sequence_ids]
    return np.array(found, np.int64).reshape(-1, 2)


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


class _UnknownWords:
    """Names words without a token. Time grows with the length of the text, and memory does not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        contents = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        contents.sort(key=len, reverse=True)  # of two tokens that begin alike, the longer is replaced
        self._added = re.compile("|".join(map(re.escape, contents))) if contents else None

    def of(self, text: str) -> str:
        """A message that names the first words without a token; empty if every word has one."""
        unknown: list[str] = []
        seen: set[str] = set()
        for word in self._words(text):
            if word not in seen and not self._is_known(word):
                unknown.append(word)
            if len(unknown) > MAX_NAMED:
                break
            seen.add(word)
        if not unknown:
            return ""
        named = [word if len(word) <= LONG_WORD else f"{word[:LONG_WORD]}..." for word in unknown[:MAX_NAMED]]
        others = " and others" if len(unknown) > MAX_NAMED else ""
        return f"unknown words: {', '.join(map(repr, named))}{others}"

    def _words(self, text: str) -> Iterator[str]:
        for piece in _pieces(text):
            content = self._added.sub(SPACE, piece) if self._added else piece
            if self._tokenizer.normalizer is not None:
                content = self._tokenizer.normalizer.normalize_str(content)
            if self._tokenizer.pre_tokenizer is None:
                yield content
            else:
                yield from (word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(content))

    def _is_known(self, word: str) -> bool:
        if len(word) > LONG_WORD:
            if self._tokenizer.model.token_to_id(word) is not None:
                return True
            word = "".join(dict.fromkeys(word))
        try:
            tokens = self._tokenizer.model.tokenize(word)
        except Exception:  # the library does not raise a narrower type
            return False
        covered: int = sum(end - start for start, end in (token.offsets for token in tokens))  # in bytes
        return covered == len(word.encode())


def _pieces(text: str) -> Iterator[str]:
    """The text in parts that begin at white space, if there is any near enough."""
    start = 0
    while start < len(text):
        end = start + PIECE_CHARACTERS
        if end < len(text):
            space = max(text.rfind(character, start + 1, end) for character in WHITE_SPACE)
            end = space if space > 0 else end
        yield text[start:end]
        start = end


def _ends_words_at_spaces(parts: Part) -> bool:
    """Whether the tokens before a space that follows another character are the same for every continuation.

    Then a part of a text that ends there has no more tokens than the text. False if that is not certain.
    """
    first = next(_steps(parts["pre_tokenizer"], "pretokenizers"), None)
    return (
        first is not None
        and first["type"] in SPLITS_AT_SPACES
        and first.get("use_regex", True)
        and first.get("split", True)
        and all(_keeps_spaces(step) for step in _steps(parts["normalizer"], "normalizers"))
        and not any(SPACE in token["content"] for token in parts["added_tokens"])
    )


def _steps(part: Part | None, key: str) -> Iterator[Part]:
    """A pre-tokenizer or normalizer, or those of a sequence, in their order."""
    if part is not None and part["type"] == "Sequence":
        for inner in part[key]:
            yield from _steps(inner, key)
    elif part is not None:
        yield part


def _keeps_spaces(normalizer: Part) -> bool:
    if normalizer["type"] == "Replace":
        pattern: str | None = normalizer["pattern"].get("String")
        return pattern is not None and pattern != "" and SPACE not in pattern
    return normalizer["type"] in KEEPS_SPACES


def _drops_unknown(tokenizer: Tokenizer, parts: Part) -> bool:
    """Whether the tokenizer may drop characters without a token, instead of raising an error.

    Of the tokenizer models only BPE does, unless it has an unknown token or a token for every byte.
    """
    model = tokenizer.model
    return isinstance(model, BPE) and model.unk_token is None and not _has_every_byte(model, parts)


def _has_every_byte(model: BPE, parts: Part) -> bool:
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if model.byte_fallback and all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in BYTES):
        return True
    steps = _steps(parts["pre_tokenizer"], "pretokenizers")
    return any(step["type"] == "ByteLevel" for step in steps) and all(
        model.token_to_id(character) is not None for character in ByteLevel.alphabet()
    )
