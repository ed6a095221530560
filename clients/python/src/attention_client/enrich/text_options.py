"""The options of texts, as `enrich()` takes them."""

from enum import StrEnum
from os import PathLike
from typing import TypedDict


class PassageLayout(StrEnum):
    """Where the passages of a text are stored."""

    ROWS = "rows"
    """One row for each passage, without the columns of the text."""
    LISTS = "lists"
    """One row for each row of the table, with lists of passages and of embeddings."""


class TextOptions(TypedDict, total=False):
    """Keyword arguments of `enrich` for models that take text.

    Attributes:
        text_column: Column of texts, for models that take text.
        template: Text of each row, with the names of columns in braces, as in "{title}: {body}".
        prompt: For text encoders: name of the prompt that is put before each text, "" for none; default:
            the model's own.
        dimensions: For text encoders: number of leading elements of each embedding, normalised again if the
            model normalises; default: all.
        truncate: For text encoders: whether texts with more tokens than the model takes are cut rather than
            refused; default: the model's setting.
        passage_tokens: For text encoders: cuts texts into passages of at most this many tokens, special
            tokens and prompt included; default: texts are not cut.
        passage_overlap: Tokens that a passage repeats of the one before at most; default: 0.
        passages: rows (default) stores one row for each passage, without the columns of the text; lists
            stores lists of passages in each row.
        tokenizer: For passages on servers: the model's tokenizer, `tokenizer.json` or a folder with it.
    """

    text_column: str | None
    template: str | None
    prompt: str | None
    dimensions: int | None
    truncate: bool | None
    passage_tokens: int | None
    passage_overlap: int | None
    passages: PassageLayout | str | None
    tokenizer: str | PathLike[str] | None
