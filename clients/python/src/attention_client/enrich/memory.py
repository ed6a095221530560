"""The memory of a job: key and value rows of one sequence, to which every row of the table attends."""

import io
import posixpath
from collections.abc import Mapping
from contextlib import closing

import numpy as np
import pyarrow as pa

from attention_client._values import Array
from attention_client.enrich.cells import read_numbers
from attention_client.enrich.options import EnrichOptions, Role
from attention_client.enrich.outcome import EnrichError
from attention_client.enrich.tables import Location, locate, open_table, refuse_table_log


def read_memory(options: EnrichOptions, widths: Mapping[Role, int | None]) -> list[Array]:
    """Reads the file that the option `context` names: the key, and the value if the model takes one.

    The rows of a table are joined in their order. The key is the value too unless another column is named.

    Args:
        options: Options of the job.
        widths: For each input of the model, the elements of a row; None for token ids and texts.

    Returns:
        (T, d) float32 for each of the two; nothing without the option.

    Raises:
        EnrichError: The file is missing or damaged, or its rows do not fit the model.
    """
    if options.context is None:
        return []
    location, width = locate(options.context), widths.get(Role.KEY, widths[Role.QUERY])
    if width is None:
        raise EnrichError(f"model {options.model!r} takes no vectors, and has no context")
    rows = [_read(location, options.key_column, width)]
    if (value_width := widths.get(Role.VALUE)) is not None:
        rows.append(_read(location, options.value_column or options.key_column, value_width))
    return rows


def _read(location: Location, column: str | None, width: int) -> Array:
    is_array = posixpath.splitext(location.path)[1].lower() == ".npy"
    try:
        rows = _read_array(location, width) if is_array else _read_column(location, column, width)
    except (EnrichError, EOFError, KeyError, OSError, ValueError, pa.ArrowException) as error:
        raise EnrichError(f"the context {location} cannot be used: {error}") from error
    if not len(rows):
        raise EnrichError(f"the context {location} has no rows")
    return rows


def _read_array(location: Location, width: int) -> Array:
    with location.open() as file:
        rows: Array = np.load(io.BytesIO(file.read()), allow_pickle=False)
    if rows.shape[1:] != (width,):
        raise EnrichError(f"its shape is {rows.shape}; the model takes (rows, {width})")
    return rows.astype(np.float32)


def _read_column(location: Location, column: str | None, width: int) -> Array:
    refuse_table_log(location)
    pieces = [np.empty((0, width), np.float32)]
    with closing(open_table(location)) as table:
        names = table.schema.names
        name = names[0] if column is None and len(names) == 1 else column
        if name not in names:
            raise EnrichError(f"name one of its columns {', '.join(names)} with --key-column (key_column)")
        for first, batch in table.batches(0, table.rows):
            values, refused = read_numbers(batch.column(name), width)
            for index, piece in enumerate(values):
                if piece is None:
                    reason = refused.get(index, "it is null")
                    raise EnrichError(f"column {name!r}, row {first + index}: {reason}")
                pieces.append(piece)
    return np.concatenate(pieces)
