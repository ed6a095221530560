"""The options of texts that `attention-client enrich` and `python -m clients.enrich` share."""

from pathlib import Path
from typing import Annotated

import typer

from attention_client.enrich.text_options import PassageLayout, TextOptions

TEXTS, PASSAGES = "Texts", "Passages of texts"


def text_arguments(
    *,
    text_column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Column of texts, for models that take text.", rich_help_panel=TEXTS
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help='Text of each row, with names of columns in braces: "{title}: {body}". A null counts as an '
            "empty text; a row of nulls only is null. {{ and }} are braces of the text, \\n is a new line.",
            rich_help_panel=TEXTS,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help='Name of the prompt that is put before each text; "" for none. Default: the model\'s own.',
            rich_help_panel=TEXTS,
            show_default=False,
        ),
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            min=1,
            help="Number of leading elements of each embedding, normalised again if the model normalises. "
            "Default: all.",
            rich_help_panel=TEXTS,
        ),
    ] = None,
    truncate: Annotated[
        bool | None,
        typer.Option(
            "--truncate/--no-truncate",
            help="Cut texts with more tokens than the model takes, or refuse them. Default: the model's "
            "setting.",
            rich_help_panel=TEXTS,
            show_default=False,
        ),
    ] = None,
    passage_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            help="Cut texts into passages of at most this many tokens, special tokens and prompt included "
            "(chunking). Default: texts are not cut.",
            rich_help_panel=PASSAGES,
        ),
    ] = None,
    passage_overlap: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=0,
            help="Tokens that a passage repeats of the one before, at most; up to half of a passage. "
            "Default: 0.",
            rich_help_panel=PASSAGES,
        ),
    ] = None,
    passages: Annotated[
        PassageLayout | None,
        typer.Option(
            help="One row for each passage, without the columns of the text (rows, the default), or lists of "
            "passages in each row (lists).",
            rich_help_panel=PASSAGES,
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Tokenizer of the model, tokenizer.json or a folder with it. Passages on servers need it.",
            rich_help_panel=PASSAGES,
        ),
    ] = None,
) -> TextOptions:
    """Collects the options of texts."""
    of_passages = {"--passage-overlap": passage_overlap, "--passages": passages, "--tokenizer": tokenizer}
    for option, value in of_passages.items():
        if value is not None and passage_tokens is None:
            raise typer.BadParameter(f"{option} needs --passage-tokens")
    return TextOptions(
        text_column=text_column,
        template=None if template is None else template.replace("\\n", "\n"),
        prompt=prompt,
        dimensions=dimensions,
        truncate=truncate,
        passage_tokens=passage_tokens,
        passage_overlap=passage_overlap,
        passages=passages,
        tokenizer=tokenizer,
    )
