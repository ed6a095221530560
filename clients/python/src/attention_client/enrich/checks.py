"""Whether a model can compute a table with the options of a job."""

import pyarrow as pa

from attention_client.enrich.backend import ModelSpec, Role
from attention_client.enrich.cells import check_widths, read_ids, read_texts, read_vectors
from attention_client.enrich.errors import EnrichError
from attention_client.enrich.options import JobOptions
from attention_client.enrich.pooling import Pool
from attention_client.enrich.sources import TableSource
from attention_client.enrich.tables import BATCH_ROWS

ENCODER_ONLY = ("prompt", "dimensions", "truncate", "passage_tokens")


def check_model(options: JobOptions, model: ModelSpec) -> None:
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


def check_columns(schema: pa.Schema, model: ModelSpec, options: JobOptions) -> None:
    """Checks whether the table has a column of a fitting type for each input of the model.

    Raises:
        EnrichError: It does not.
    """
    if set(options.columns) != set(model.input_widths):
        takes, given = ", ".join(model.input_widths), ", ".join(options.columns)
        raise EnrichError(f"model {model.name!r} takes {takes}; columns are given for {given}")
    if model.pooled and options.pool is not Pool.NONE:
        raise EnrichError(
            f"model {model.name!r} already returns one vector per sequence: leave out pool={options.pool}"
        )
    columns = [(role, column) for role, column in options.columns.items() if not model.accepts_text]
    if model.accepts_text:
        columns = [(Role.QUERY, column) for column in options.text_template.columns]
    for role, column in columns:
        if schema.get_field_index(column) < 0:
            known, purpose = ", ".join(schema.names), "text" if model.accepts_text else role
            raise EnrichError(f"there is no column {column!r} for the {purpose}; the columns are {known}")
        _check_type(schema.field(column), model, role)


def _check_type(field: pa.Field, model: ModelSpec, role: Role) -> None:
    """Reads no rows of the column's type, which raises the error of a type that does not fit."""
    if pa.types.is_null(field.type):
        return
    none = _empty(field.type)
    width = model.input_widths[role]
    try:
        if model.accepts_text:
            read_texts(none)
        elif width is None:
            read_ids(none)
        else:
            read_vectors(none, width)
    except EnrichError as error:
        raise EnrichError(f"column {field.name!r} {error}") from error


def _empty(data_type: pa.DataType) -> pa.Array:
    if isinstance(data_type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(data_type, pa.array([], data_type.storage_type))
    return pa.array([], data_type)


def check_first_rows(source: TableSource, model: ModelSpec, options: JobOptions) -> None:
    """Lists state no width, so the widths of the first rows decide whether the column can fit.

    Raises:
        EnrichError: None of the first rows has vectors of the model's width.
    """
    widths = {role: width for role, width in model.input_widths.items() if width is not None}
    file = next((file for file in source.files if file.rows), None)
    if model.accepts_text or not widths or file is None:
        return
    table = source.open(file.name)
    try:
        rows = next(table.batches(0, min(file.rows, BATCH_ROWS))).rows
    finally:
        table.close()
    for role, width in widths.items():
        try:
            check_widths(rows.column(options.columns[role]), width)
        except EnrichError as error:
            where = "the first row" if rows.num_rows == 1 else f"each of the first {rows.num_rows:,} rows"
            raise EnrichError(f"column {options.columns[role]!r} {error}, in {where}") from error
