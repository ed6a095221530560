"""The model of a job and its memory: key and value rows to which every row of the table attends.

Notation: B sequences, T rows of a sequence, d elements of a row.
"""

import io
import posixpath
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from attention_client import ModelInfo
from attention_client._values import Array
from attention_client.enrich.cells import FLOAT32, read_numbers
from attention_client.enrich.options import EnrichOptions, Role
from attention_client.enrich.outcome import EnrichError
from attention_client.enrich.tables import Location, locate, open_table, refuse_table_log

# Axes of vectors: sequences, their rows, elements of a row. A pooled output lacks the rows.
VECTORS_RANK, POOLED_RANK = 3, 2
# The output of a text encoder with a vector for each token.
CONTEXT_VECTORS = "context_vectors"


@dataclass(frozen=True, kw_only=True)
class JobModel(ModelInfo):
    """The model of a job.

    Attributes:
        memory_rows: Key rows of the job's memory; 0 if the table has the key.
        output: Axes of the first output: (B, T, d), or (B, d) for a model that pools.
        dtype: The type of its elements.
    """

    memory_rows: int
    output: Sequence[str | int]
    dtype: np.dtype[Any] = FLOAT32

    @classmethod
    def read(cls, info: ModelInfo, options: EnrichOptions) -> tuple["JobModel", list[Array]]:
        """The model that a server describes, and the memory of the job: see `read_memory`.

        Raises:
            EnrichError: The model is not ready, has an input without a sequence axis, or cannot attend to the
                memory; or its server is too old to state its digest.
        """
        if info.state != "ready":
            raise EnrichError(f"model {info.name!r} is not ready: {info.state_reason}")
        if not info.digest:
            raise EnrichError(
                f"the server of model {info.name!r} does not state its digest, without which a table could "
                "become that of two models: update the server"
            )
        for tensor in info.inputs:
            if not tensor.optional and not any(isinstance(axis, str) for axis in tensor.axes[1:2]):
                raise EnrichError(
                    f"input {tensor.name!r} of model {info.name!r} has no sequence axis; enrichment takes "
                    "sequences and texts: call `infer` for each part of the table"
                )
        values = {attribute.name: getattr(info, attribute.name) for attribute in fields(info)}
        output = info.outputs[0].axes
        if info.text_encoder is not None:
            output = (output[0], info.text_encoder.embedding_width)
        model = cls(**values, memory_rows=0, output=output)
        memory = read_memory(options, model.input_widths)
        return replace(model, memory_rows=sum(map(len, memory[:1]))), memory

    @cached_property
    def input_widths(self) -> Mapping[Role, int | None]:
        """For each required input, the elements of a row; None for token ids and texts."""
        inputs = (tensor.axes for tensor in self.inputs if not tensor.optional)
        widths = (int(axes[-1]) if len(axes) == VECTORS_RANK else None for axes in inputs)
        return dict(zip(Role, widths, strict=False))

    @property
    def output_width(self) -> int:
        """Elements of a context vector: d."""
        return int(self.output[-1])

    @property
    def token_width(self) -> int:
        """Elements of a token vector, of a text encoder that returns them."""
        return next(int(tensor.axes[-1]) for tensor in self.outputs if tensor.name == CONTEXT_VECTORS)

    @property
    def pooled(self) -> bool:
        """Whether the model returns one vector (d,) for each sequence rather than (Tq, d)."""
        return len(self.output) == POOLED_RANK

    @property
    def max_tokens(self) -> int | None:
        """Largest number of tokens of a text; None for no limit. For text encoders."""
        return min(self.inputs[0].max_lengths.values(), default=None)

    def check(self, digest: str) -> None:
        """Checks that an answer is that of this model.

        Raises:
            EnrichError: The digest is another one.
        """
        if digest != self.digest:
            raise EnrichError(
                f"model {self.name!r} version {self.version} is not that of the job: its digest is "
                f"{digest or 'unknown'}; it must be {self.digest}. Finished chunks are kept: serve that "
                "artifact again, and --resume (resume=True) continues the job"
            )


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
