"""Texts of rows: columns joined by a template, and cut into passages at boundaries of the model's tokens.

Notation: T tokens of a text, N tokens of a passage at most.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from attention_client.enrich.outcome import EnrichError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

BRACES = "write {{ and }} for braces that belong to the text"
# Texts that are tokenized together, in characters, so that their tokens need little memory.
GROUP_CHARACTERS = 1 << 18
# The tokens of a longer text need too much memory.
MAX_CHARACTERS = 4 << 20
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class TextTemplate:
    """Literal texts between columns.

    Attributes:
        parts: Literal texts, each with the column that follows it; the last one may lack a column.
    """

    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    def parse(cls, template: str) -> "TextTemplate":
        """Reads a template such as "{title}: {body}".

        Raises:
            EnrichError: It has a brace without its other half, a field that is not the name of a column, or
                no column at all.
        """
        parts: list[tuple[str, str | None]] = []
        try:
            for literal, column, form, conversion in Formatter().parse(template):
                if form or conversion:
                    raise EnrichError(
                        f"template {template!r} has a format or a conversion after {column!r}; only the name "
                        "of a column may stand in braces"
                    )
                parts.append((literal, column))
        except ValueError as error:
            raise EnrichError(f"template {template!r}: {str(error).lower()}; {BRACES}") from error
        if all(column is None for _, column in parts):
            raise EnrichError(
                f"template {template!r} names no column; a name in braces does, as in {{title}}"
            )
        return cls(tuple(parts))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns, each once."""
        return tuple(dict.fromkeys(column for _, column in self.parts if column is not None))

    def render(self, texts: "dict[str, list[str | None]]") -> list[str | None]:
        """One text for each row. A null counts as an empty text; a row of nulls only has none.

        Args:
            texts: The cells of each of the columns.
        """
        rows = zip(*(texts[column] for column in self.columns), strict=True)
        return [self._render_row(dict(zip(self.columns, row, strict=True))) for row in rows]

    def _render_row(self, cells: dict[str, str | None]) -> str | None:
        if all(cell is None for cell in cells.values()):
            return None
        return "".join(literal + ((cells[column] or "") if column else "") for literal, column in self.parts)


class Passage(NamedTuple):
    """A part of a text.

    Attributes:
        text: The part.
        start: Where it begins in the text, in characters (Unicode code points).
        end: Where it ends.
    """

    text: str
    start: int
    end: int


# The passages of a text, or why it cannot be cut.
Cut: TypeAlias = "list[Passage] | EnrichError"


class PassageSplitter:
    """Cuts texts at boundaries of tokens, between words where it can.

    A passage that is tokenized by itself has no more tokens than allowed, so that its embedding is that of
    its text.
    """

    def __init__(self, tokenizer: "Tokenizer", room: int, overlap: int) -> None:
        """Takes a loaded tokenizer and the bounds of a passage.

        Args:
            tokenizer: Tokenizer of the model, without truncation and padding.
            room: Tokens of a passage without special tokens and prompt, 1 or more.
            overlap: Tokens at the end of a passage that the next one repeats at most, 0 to half of `room`.
        """
        self._tokenizer = tokenizer
        self._room = room
        self._overlap = overlap

    def split(self, texts: Sequence[str]) -> Iterator[Cut]:
        """The passages of each text, in order. A text that fits is one passage, unchanged."""
        for group in _groups(texts):
            short = [text if len(text) <= MAX_CHARACTERS else "" for text in group]
            # The library releases the interpreter's lock meanwhile.
            encodings = self._tokenizer.encode_batch(short, add_special_tokens=False)
            for text, encoding in zip(group, encodings, strict=True):
                yield self._passages(text, encoding)

    def _passages(self, text: str, encoding: "Encoding") -> Cut:
        if len(text) > MAX_CHARACTERS:
            return EnrichError(
                f"it has {len(text):,} characters; passages are cut of at most {MAX_CHARACTERS:,}"
            )
        if len(encoding.ids) <= self._room:
            return [Passage(text, 0, len(text))]
        boundaries = _Boundaries.of(text, encoding)
        passages, first, last = [], 0, 0
        while last < len(encoding.ids):
            end, passage = self._fitting(text, boundaries, first)
            if passage is None:
                return EnrichError(
                    f"the character at {boundaries.starts[first]} has more tokens than the {self._room} of a "
                    "passage"
                )
            following = first + 1
            if end > last:  # otherwise it would repeat a part of the one before and add nothing
                passages.append(passage)
                last = end
                following = max(end - self._overlap, following)
            first = boundaries.first_from(following, last)
        return passages

    def _fitting(self, text: str, boundaries: "_Boundaries", first: int) -> tuple[int, Passage | None]:
        """The longest passage from a token on that has few enough tokens, and the token after it."""
        least = first + self._room // 2
        end = boundaries.last_until(first, first + self._room, least)
        while end > first:
            start, stop = boundaries.starts[first], boundaries.ends[end - 1]
            part = text[start:stop]
            # Cut out of its text, a part of a word may have more tokens.
            if count_tokens(self._tokenizer, part) <= self._room:
                return end, Passage(part, start, stop)
            end = boundaries.last_until(first, end - 1, least)
        return first, None


@dataclass(frozen=True)
class _Boundaries:
    """Where a text may be cut: before the tokens of these numbers, 0 to T.

    Attributes:
        starts: First character of each of the T tokens.
        ends: Character after the last of each token.
        characters: Boundaries that do not divide a character, ascending.
        words: Those of them that do not divide a word either, ascending.
    """

    starts: list[int]
    ends: list[int]
    characters: list[int]
    words: list[int]

    @classmethod
    def of(cls, text: str, encoding: "Encoding") -> "_Boundaries":
        starts, ends = (list(side) for side in zip(*encoding.offsets, strict=True))
        total, of_word = len(starts), encoding.word_ids
        # A character may have several tokens, all of which state the whole character as their place.
        characters = [0, *(at for at in range(1, total) if starts[at] >= ends[at - 1]), total]

        def begins_word(at: int) -> bool:
            if at in (0, total) or of_word[at] != of_word[at - 1]:
                return True
            before, after = text[starts[at] - 1 : starts[at]], text[starts[at] : starts[at] + 1]
            return before.isspace() or after.isspace()

        return cls(starts, ends, characters, [at for at in characters if begins_word(at)])

    def last_until(self, first: int, end: int, least: int) -> int:
        """The last boundary up to `end`, between words if one is after `least`; `first` if there is none."""
        word = self.words[bisect_right(self.words, end) - 1]
        return word if word > least else max(self.characters[bisect_right(self.characters, end) - 1], first)

    def first_from(self, first: int, end: int) -> int:
        """The first boundary from `first` up to `end`, between words if there is one."""
        word = self.words[bisect_left(self.words, first)]
        return word if word <= end else self.characters[bisect_left(self.characters, first)]


def load_tokenizer(path: Path) -> "Tokenizer":
    """Loads a tokenizer without truncation and padding.

    Args:
        path: A file of the `tokenizers` library, or a folder with `tokenizer.json`.

    Raises:
        EnrichError: The file does not exist or is not a tokenizer, or the library is not installed.
    """
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - needed for passages only
    except ImportError as error:
        raise EnrichError(f"{error}; install attention-client with its extra 'passages'") from error
    file = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library does not raise a narrower type
        raise EnrichError(f"the tokenizer {file} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def count_tokens(tokenizer: "Tokenizer", text: str, *, special: bool = False) -> int:
    """Tokens of a text."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=special)
    return len(encoding.ids)


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    ends = accumulate(map(len, texts))
    for _, group in groupby(zip(ends, texts, strict=True), key=lambda pair: pair[0] // GROUP_CHARACTERS):
        yield [text for _, text in group]
