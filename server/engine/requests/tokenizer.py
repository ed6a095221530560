"""Text to token ids, with the tokenizer of the artifact."""

import math
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from tokenizers import Encoding, Tokenizer

from attention_serving.artifact.encoder import NO_QUERY, PairTemplate, QueryFacts
from attention_serving.server.engine.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LimitExceededError,
    quoted,
)
from attention_serving.server.engine.types import Array, Ragged, Text

# Names of the request fields that contain texts, and token ids.
TEXT, TOKEN_IDS = "text", "token_ids"
SPACE = " "
# Characters of the part of a text that is encoded first, for each token that a text may have: more than most
# tokens have, so that most texts within the limit are encoded once.
CHARACTERS_OF_PART = 8
# A part has the tokens that stay of a text if it has so many times as many: only those at its other end
# depend on the rest of the text.
PART_FACTOR = 2
# Marks special tokens of an encoding.
SPECIAL = "special_tokens_mask"
# Which end of a text is cut off.
Side: TypeAlias = Literal["right", "left"]
# Stands for bytes that are not a whole character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_ID = 2**32 - 1
# More texts than this, however short they are, or more bytes of text take several milliseconds.
INLINE_MAX_TEXTS, INLINE_MAX_BYTES = 256, 32 << 10
# How many unknown words an error names, and in how many characters of a text they are looked for: no other
# thread runs while the library splits it.
MAX_NAMED, MAX_SEARCHED = 10, 16384


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
        truncated: Indices of the texts that were cut.
        offsets: For each token the first and the exclusive last of its characters (2,), in the text without
            the prefix; (0, 0) for special tokens and those of the prefix. None if they were not asked for.
        ends: With offsets, the exclusive last character of each text that its tokens stand for.
        types: For each token, which of the two texts of a pair it belongs to. None if not asked for.
        starts: With offsets, the first character of each text that its tokens stand for.
        special: For each token, whether it was added as a special token. Empty if not asked for.
    """

    ids: Ragged
    truncated: tuple[int, ...] = ()
    offsets: Ragged | None = None
    ends: tuple[int, ...] = ()
    types: Ragged | None = None
    starts: tuple[int, ...] = ()
    special: Sequence[int] = ()


class TextTokenizer:
    """Turns the texts of a request into token ids. May be used by several threads."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        # The server limits lengths, and batches pad.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def texts_of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself.

        A token without a text of its own has its name in the vocabulary: a special token, or one that is a
        part of a character. An id outside the vocabulary has its number.
        """
        texts = {}
        for token_id in set(ids):
            name = self._tokenizer.id_to_token(token_id) if 0 <= token_id <= MAX_ID else None
            text = str(token_id) if name is None else self._tokenizer.decode([token_id])
            texts[token_id] = text if name is None or (text and REPLACEMENT not in text) else name
        return [texts[token_id] for token_id in ids]

    def decode(self, ids: Ragged, deadline: float = math.inf, *, keeps_special: bool) -> list[str]:
        """The text of each sequence of token ids of the vocabulary, with or without special tokens.

        Raises:
            DeadlineExceededError: The deadline passed before all ids were decoded.
        """
        texts, start = list[str](), 0
        for length in ids.lengths:
            if time.monotonic() > deadline:
                raise DeadlineExceededError("the deadline passed before the token ids were decoded")
            rows = ids.rows[start : start + length].tolist()
            texts.append(self._tokenizer.decode(rows, skip_special_tokens=not keeps_special))
            start += length
        return texts

    def text_bytes(self, ids: Array) -> int:
        """An upper bound of the bytes of the text of token ids (T,).

        Raises:
            InvalidRequestError: An id is not in the vocabulary.
        """
        size, (unique, counts) = 0, np.unique(ids, return_counts=True)
        for token_id, count in zip(unique.tolist(), counts.tolist(), strict=True):
            name = self._tokenizer.id_to_token(token_id) if 0 <= token_id <= MAX_ID else None
            if name is None:
                raise InvalidRequestError(TOKEN_IDS, f"contains id {token_id}, which no token has")
            size += count * (len(name.encode()) + len(SPACE))
        return size

    def encode(  # noqa: PLR0913 - one parameter is one option
        self,
        texts: tuple[Text, ...],
        limits: TextLimits = UNLIMITED,
        deadline: float = math.inf,
        *,
        second_texts: tuple[Text, ...] = (),
        template: PairTemplate | None = None,
        prefix: str = "",
        cut: Side | None = None,
        offsets: bool = False,
        types: bool = False,
        adds_special: bool = True,
        special: bool = False,
        query: QueryFacts = NO_QUERY,
    ) -> EncodedTexts:
        """Encodes each text, or each pair of texts, as one sequence of token ids.

        Args:
            texts: The texts. One that is given as UTF-8 is decoded when it is encoded, so that only one text
                at a time needs memory in addition to the request.
            limits: Bounds of the texts.
            deadline: When the caller stops waiting, on `time.monotonic`'s clock.
            second_texts: The second text of each pair, without offsets; empty for single texts.
            template: Makes one text of each pair, without special tokens beside its own.
            prefix: Is put before each text, if there is no template.
            cut: Which end of a text with too many tokens, special tokens included, is cut off: the left one
                begins with the prefix. Of a pair, the longer text is cut, and then both. None refuses them.
            offsets: Whether the result contains the characters of each token.
            types: Whether the result contains the type of each token.
            adds_special: Whether special tokens are added.
            query: How queries become token ids, if the texts are some. They are not expanded if no special
                tokens are to be added.
            special: Whether the result says which tokens are special.

        Raises:
            InvalidRequestError: A text is empty or not UTF-8, or contains a word outside the vocabulary and
                the tokenizer lacks a token for unknown words.
            LimitExceededError: A text is too long, or all of them are.
            DeadlineExceededError: The deadline passed before all texts were encoded.
        """
        ids, lengths, truncated, characters, starts, ends = array("q"), [], [], [], list[int](), list[int]()
        names = ["type_ids"] * types + [SPECIAL] * special
        adds_special &= template is None
        columns = {name: array("q") for name in names}
        query = query if adds_special else NO_QUERY
        adds_special &= query.adds_special
        prefix = prefix if template is None else ""
        finish = (
            query.expand if template is None else partial(template.restore_suffix, most=limits.text_tokens)
        )
        for index in range(len(texts)):
            if time.monotonic() > deadline:
                raise DeadlineExceededError("the deadline passed before the texts were encoded")
            name = f"text {index}"
            item = [text := prefix + _decode(name, texts[index], limits.text_bytes)]
            if second_texts:
                name_of_second = f"the second text of pair {index}"
                item.append(_decode(name_of_second, second_texts[index], limits.text_bytes))
            item = item if template is None else [template.render(*item)]
            added = self._tokenizer.num_special_tokens_to_add(len(item) > 1) if adds_special else 0
            encoding, second, begin, kept = self._tokens(
                name, item, limits.text_tokens, added, cut, offsets=offsets
            )
            if kept is not None:
                truncated.append(index)
            processed = self._tokenizer.post_process(encoding, second, add_special_tokens=adds_special)
            if not processed:
                raise InvalidRequestError(TEXT, f"{name} does not contain any words")
            expanded = finish(processed.ids)
            more = len(expanded) - len(processed)
            ids.extend(expanded)
            lengths.append(len(expanded))
            for column, values in columns.items():
                values.extend([*getattr(processed, column), *[int(column == SPECIAL)] * more])
            if offsets:
                token_offsets = _offsets(processed, encoding, begin - len(prefix))
                characters += [token_offsets, np.zeros((more, 2), token_offsets.dtype)]
                for bounds, character in zip((starts, ends), kept or (0, len(text)), strict=True):
                    bounds.append(max(0, character - len(prefix)))
            if len(ids) > limits.tokens:
                problem = f"texts 0 to {index} have {len(ids)} tokens"
                raise LimitExceededError(TEXT, f"{problem}; the limit of one request is {limits.tokens}")
        row_counts = tuple(lengths)
        return EncodedTexts(
            Ragged(np.asarray(ids, np.int64), row_counts),
            tuple(truncated),
            Ragged(np.concatenate(characters), row_counts) if offsets else None,
            tuple(ends),
            Ragged(np.asarray(columns["type_ids"], np.int64), row_counts) if types else None,
            tuple(starts),
            columns.get(SPECIAL, ()),
        )

    def _tokens(
        self, name: str, texts: Sequence[str], most: int, added: int, side: Side | None, *, offsets: bool
    ) -> tuple[Encoding, Encoding | None, int, tuple[int, int] | None]:
        """The tokens of a text, or of both of a pair, to which some special tokens are added later.

        Returns:
            Those of both; the character of the first text that its offsets count from; and the first and
            exclusive last of its characters that stay, None if nothing is cut.
        """
        room = max(0, most - added)
        parts = [self._part(text, most, room, side, offsets=offsets) for text in texts]
        (encoding, begin), second = parts[0], parts[1][0] if len(parts) > 1 else None
        count = sum(len(part) for part, _ in parts)
        if count <= room:
            return encoding, second, begin, None
        if side is None:
            message = f"{name} has {count + added} or more tokens; the limit is {most}"
            raise LimitExceededError(
                TEXT, message if second is None else f"{message} for both texts of a pair"
            )
        kept = room
        if second is not None:
            kept, second_room = longest_first(len(encoding), len(second), room)
            second.truncate(second_room, direction=side)
        # The characters of the token that is cut off beside those that stay.
        at = kept if side == "right" else len(encoding) - kept - 1
        start, end = (encoding.token_to_chars(at) if offsets else None) or (len(texts[0]), 0)
        encoding.truncate(kept, direction=side)
        return encoding, second, begin, (0, start) if side == "right" else (begin + end, len(texts[0]))

    def _part(
        self, text: str, most: int, room: int, side: Side | None, *, offsets: bool
    ) -> tuple[Encoding, int]:
        """All tokens of a text; of one that is far too long, those of a part, which are too many as well.

        The part has whole words of the end that stays.

        Returns:
            The tokens, and the character of the text that their offsets count from.
        """
        size = CHARACTERS_OF_PART * most
        if size < len(text):
            is_left = side == "left"
            begin, end = (text.find(SPACE, -size), len(text)) if is_left else (0, text.rfind(SPACE, 0, size))
            part = self._encoding(text[begin:end], offsets=offsets) if 0 <= begin < end else None
            if part is not None and len(part) > PART_FACTOR * room:
                return part, begin
        return self._encoding(text, offsets=offsets), 0

    def _encoding(self, text: str, *, offsets: bool) -> Encoding:
        # The fast one does not compute where in the text each token comes from.
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        try:
            (encoding,) = encode([text], add_special_tokens=False)
        except Exception as error:  # the library does not raise a narrower type
            words = ", ".join(map(quoted, islice(self._unknown_words(text), MAX_NAMED)))
            raise InvalidRequestError(TEXT, f"unknown words: {words}" if words else str(error)) from error
        return encoding

    def _unknown_words(self, text: str) -> Iterator[str]:
        """The words of a text that the tokenizer lacks a token for, each once."""
        normalizer, splitter = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        content = text[:MAX_SEARCHED]
        content = normalizer.normalize_str(content) if normalizer else content
        words = [word for word, _ in splitter.pre_tokenize_str(content)] if splitter else [content]
        for word in dict.fromkeys(words):
            try:
                self._tokenizer.model.tokenize(word)
            except Exception:  # the library does not raise a narrower type
                yield word


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each text of a pair stay, as `tokenizers` counts them for the strategy of this name.

    The longer text is cut until both are equally long, and then both; an odd token stays with the longer one,
    and with the second of equal ones.
    """
    least = min(first, second, room // 2)
    return (least, room - least) if first <= second else (room - least, least)


def _offsets(processed: Encoding, encoding: Encoding, shift: int) -> Array:
    """The shifted offsets (T, 2) of tokens to which special tokens were added, and which had others before.

    Those of `processed` are not used: they were processed a second time, which trims some of them twice.
    """
    offsets = iter(encoding.offsets)
    pairs = [(-shift, -shift) if sequence is None else next(offsets) for sequence in processed.sequence_ids]
    return np.maximum(np.array(pairs, np.int64).reshape(-1, 2) + shift, 0).astype(np.uint32)


def _decode(name: str, text: Text, limit: int) -> str:
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
