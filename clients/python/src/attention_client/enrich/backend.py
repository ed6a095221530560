"""The interface between a job and whatever computes for it: servers, or an engine in this process.

Notation: T rows of a sequence, Tq query rows, Tk key rows, H heads, d elements of a row.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, Self, TypeAlias

from numpy.typing import NDArray

from attention_client.enrich.errors import EnrichError

Array: TypeAlias = NDArray[Any]
Axes: TypeAlias = Sequence[str | int]
# Axes of vectors: sequences, their rows, elements of a row. A pooled output lacks the rows.
VECTORS_RANK, POOLED_RANK = 3, 2


class Role(StrEnum):
    """The model input that a column feeds."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a job needs to know about the model.

    Attributes:
        name: Name of the model.
        version: Version of the model.
        accepts_text: Whether the model has a tokenizer; its query is then a text.
        input_widths: For each input, the elements of a row; None for token ids and texts.
        output_width: Elements of a context vector: d.
        pooled: Whether the model returns one vector (d,) for each sequence rather than (Tq, d).
        parity_error: Largest absolute difference from eager PyTorch that the backend measured; None if
            unknown.
    """

    name: str
    version: str
    accepts_text: bool
    input_widths: Mapping[Role, int | None]
    output_width: int
    pooled: bool
    parity_error: float | None

    @classmethod
    def from_axes(
        cls,
        *,
        name: str,
        version: str,
        accepts_text: bool,
        inputs: Sequence[Axes],
        output: Axes,
        parity_error: float | None,
    ) -> Self:
        """Derives the widths from the axes that the model declares.

        Args:
            name: Name of the model.
            version: Version of the model.
            accepts_text: Whether the model has a tokenizer.
            inputs: Axes of each required input in the order query, key, value: sizes of fixed axes, names of
                dynamic ones.
            output: Axes of the first output: (B, T, d), or (B, d) for a model that pools.
            parity_error: Largest measured absolute difference from eager PyTorch; None if unknown.

        Raises:
            EnrichError: The output has other axes.
        """
        width = output[-1] if output else None
        if len(output) not in (VECTORS_RANK, POOLED_RANK) or not isinstance(width, int):
            found = ", ".join(map(str, output))
            raise EnrichError(
                f"model {name!r} has an output of axes ({found}); enrichment takes (batch, length, width) or "
                "(batch, width) with a fixed width"
            )
        return cls(
            name=name,
            version=version,
            accepts_text=accepts_text,
            input_widths={role: _row_width(axes) for role, axes in zip(Role, inputs, strict=False)},
            output_width=width,
            pooled=len(output) == POOLED_RANK,
            parity_error=parity_error,
        )


def _row_width(axes: Axes) -> int | None:
    return int(axes[-1]) if len(axes) == VECTORS_RANK else None


@dataclass(frozen=True, slots=True, eq=False)
class BackendRequest:
    """Sequences that are computed together.

    Attributes:
        inputs: For each input, one sequence per row of the table: (T, d) float32, (T,) int64 or a text.
    """

    inputs: Mapping[Role, Sequence[Any]]

    def __len__(self) -> int:
        return len(self.inputs[Role.QUERY])

    def only(self, index: int) -> "BackendRequest":
        """A request for one of the sequences."""
        return BackendRequest({role: [rows[index]] for role, rows in self.inputs.items()})


@dataclass(frozen=True, slots=True, eq=False)
class BackendResult:
    """The results of a request, in the order of its sequences.

    Attributes:
        context_vectors: (Tq, d) for each sequence; (d,) or (1, d) if the model pools.
        attention_weights: (H, Tq, Tk) for each sequence; None if they were not requested.
    """

    context_vectors: Sequence[Array]
    attention_weights: Sequence[Array] | None


class Backend(Protocol):
    """Computes requests, several at the same time.

    Attributes:
        model: The model.
        concurrency: How many requests it computes at the same time, 1 or more. The job submits a few more
            than that, so that the backend is never idle.
    """

    model: ModelSpec
    concurrency: int

    def submit(self, request: BackendRequest) -> Future[BackendResult]:
        """Starts to compute a request.

        Returns:
            A future of the result. It raises `RefusedError` if the model refuses the request, and any other
            error if the job cannot continue.
        """

    def close(self) -> None:
        """Cancels requests that have not started, and releases all resources."""
