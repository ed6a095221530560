"""What computes: a model as a job sees it, what it is asked, and what it answers.

Notation: T rows of a sequence, Tq query rows, Tk key rows, H heads, d elements of a row.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from attention_client._values import Array
from attention_client.enrich.errors import EnrichError

# Axes of vectors: sequences, their rows, elements of a row.
VECTORS_RANK = 3


class Role(StrEnum):
    """What a column is to the model."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model, and what a job must know of it.

    Attributes:
        takes_text: Whether it has a tokenizer, so that its query is texts.
        widths: What it takes: for each role the elements of a row, or None for token ids and texts.
        output_width: Elements of a context vector.
        parity_error: Largest difference from eager PyTorch that was measured where it runs; None if unknown.
    """

    name: str
    version: str
    takes_text: bool
    widths: Mapping[Role, int | None]
    output_width: int
    parity_error: float | None


def widths_of(inputs: Sequence[Sequence[str | int]]) -> dict[Role, int | None]:
    """What each role takes, of the axes of a model's inputs."""
    return {
        role: int(axes[-1]) if len(axes) == VECTORS_RANK else None
        for role, axes in zip(Role, inputs, strict=False)
    }


def output_width(model: str, output: str, axes: Sequence[str | int]) -> int:
    """Elements of a context vector, of the axes of a model's first output.

    Raises:
        EnrichError: The model makes no vectors of sequences.
    """
    width = axes[-1]
    if len(axes) != VECTORS_RANK or not isinstance(width, int):
        raise EnrichError(f"model {model!r} makes no vectors of sequences: its {output} has {axes}")
    return width


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Sequences that are computed together.

    Attributes:
        inputs: By role one sequence for each row of the table: (T, d) float32, (T,) int64 or a text.
    """

    inputs: Mapping[Role, Sequence[Any]]

    def __len__(self) -> int:
        return len(self.inputs[Role.QUERY])

    def only(self, index: int) -> "Request":
        """The same for one of its sequences."""
        return Request({role: [rows[index]] for role, rows in self.inputs.items()})


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The results of a request, in its order.

    Attributes:
        context_vectors: (Tq, d) for each sequence.
        attention_weights: (H, Tq, Tk) for each sequence, where they were asked for.
    """

    context_vectors: Sequence[Array]
    attention_weights: Sequence[Array] | None


class Computer(Protocol):
    """Computes requests, several at a time.

    Attributes:
        facts: Its model.
        windows_ahead: How many windows of rows keep it busy.
    """

    facts: ModelFacts
    windows_ahead: int

    def submit(self, request: Request) -> Future[Answer]:
        """Begins to compute a request.

        Returns:
            A future of its answer. It raises `RefusedError` where the model refuses the request, and any
            other error where the job cannot go on.
        """

    def close(self) -> None:
        """Ends what is under way."""
