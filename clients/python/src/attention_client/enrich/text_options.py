"""The options of texts, as a job has read them, and whether they fit the model."""

from enum import StrEnum
from os import PathLike
from typing import TYPE_CHECKING, TypedDict

from attention_client.enrich.errors import EnrichError

if TYPE_CHECKING:
    from attention_client.enrich.backend import ModelSpec
    from attention_client.enrich.options import JobOptions

SMALLEST_PASSAGE = 1
ENCODER_ONLY = ("prompt", "dimensions", "truncate", "passage_tokens")


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


def check_text_options(options: "JobOptions") -> None:
    """Checks options of texts by themselves.

    Raises:
        EnrichError: Two of them contradict each other, or one has a value that is not allowed.
    """
    sources = {"column": options.column, "text_column": options.text_column, "template": options.template}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise EnrichError(f"exactly one of column, text_column and template is required; given: {found}")
    if options.dimensions is not None and options.dimensions < 1:
        raise EnrichError(f"dimensions is {options.dimensions}; it must be 1 or more")
    if options.passage_tokens is None:
        for name in ("passage_overlap", "passages", "tokenizer"):
            if getattr(options, name) is not None:
                raise EnrichError(f"{name} needs passage_tokens")
    elif options.passage_tokens < SMALLEST_PASSAGE:
        raise EnrichError(f"passage_tokens is {options.passage_tokens}; it must be 1 or more")
    if options.passage_overlap is not None and options.passage_overlap < 0:
        raise EnrichError(f"passage_overlap is {options.passage_overlap}; it must be 0 or more")


def check_model(options: "JobOptions", model: "ModelSpec") -> None:
    """Checks whether a model has what options of texts ask for.

    Raises:
        EnrichError: It does not take text, is not a text encoder, or lacks the prompt.
    """
    takes_text = options.text_column is not None or options.template is not None
    if takes_text and not model.accepts_text:
        raise EnrichError(
            f"model {model.name!r} does not take text; --column (column) names the column of its "
            f"{', '.join(model.input_widths)}"
        )
    if model.encoder is None:
        asked = [name for name in ENCODER_ONLY if getattr(options, name) is not None]
        if asked:
            raise EnrichError(f"{asked[0]} needs a text encoder, which model {model.name!r} is not")
        return
    if options.weights:
        raise EnrichError(
            f"model {model.name!r} is a text encoder, whose attention weights are not stored; attend_text of "
            "the client returns them"
        )
    if options.prompt and options.prompt not in model.encoder.prompts:
        known = ", ".join(model.encoder.prompts) or "no prompts"
        raise EnrichError(f"prompt is {options.prompt!r}; model {model.name!r} has {known}")
    most = model.encoder.max_tokens
    if options.passage_tokens and most and options.passage_tokens > most:
        raise EnrichError(
            f"passage_tokens is {options.passage_tokens}; model {model.name!r} takes at most {most} tokens"
        )
