"""The interface between a job and whatever computes for it: servers, or an engine in this process.

Notation: T rows of a sequence, Tq query rows, Tk key rows, H heads, d elements of a row.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from attention_client._values import AttentionResult
from attention_client.enrich.outcome import EnrichError

Array: TypeAlias = NDArray[Any]
Axes: TypeAlias = Sequence[str | int]
# Sequences that are computed together, for each input: (T, d) float32, (T,) int64, or texts.
BackendRequest: TypeAlias = "Mapping[Role, Sequence[Any]]"
# Their results in the same order. A model that pools returns (d,) or (1, d) for each.
BackendResult: TypeAlias = AttentionResult[Any]
# Axes of vectors: sequences, their rows, elements of a row. A pooled output lacks the rows.
VECTORS_RANK, POOLED_RANK = 3, 2


class Role(StrEnum):
    """The model input that a column feeds."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"


@dataclass(frozen=True)
class EncoderSpec:
    """What sets a text encoder apart.

    Attributes:
        prompts: Names of its prompts.
        dimensions: The numbers of elements that its embeddings can be shortened to.
        max_tokens: Largest number of tokens of a text; None for no limit.
    """

    prompts: Sequence[str]
    dimensions: Sequence[int]
    max_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a job needs to know about the model.

    Attributes:
        name: Name of the model.
        version: Version of the model.
        accepts_text: Whether the model has a tokenizer; its query is then a text.
        inputs: Axes of each required input in the order query, key, value: sizes of fixed axes, names of
            dynamic ones.
        output: Axes of the first output: (B, T, d), or (B, d) for a model that pools.
        parity_error: Largest absolute difference from eager PyTorch that the backend measured; None if
            unknown.
        encoder: What sets a text encoder apart; None for any other model.

    Raises:
        EnrichError: The output has other axes.
    """

    name: str
    version: str
    accepts_text: bool
    inputs: Sequence[Axes]
    output: Axes
    parity_error: float | None
    encoder: EncoderSpec | None = None

    def __post_init__(self) -> None:
        if len(self.output) not in (VECTORS_RANK, POOLED_RANK) or not isinstance(self.output[-1], int):
            found = ", ".join(map(str, self.output))
            raise EnrichError(
                f"model {self.name!r} has an output of axes ({found}); enrichment takes (batch, length, "
                "width) or (batch, width) with a fixed width"
            )

    @cached_property
    def input_widths(self) -> Mapping[Role, int | None]:
        """For each input, the elements of a row; None for token ids and texts."""
        widths = (int(axes[-1]) if len(axes) == VECTORS_RANK else None for axes in self.inputs)
        return dict(zip(Role, widths, strict=False))

    @property
    def output_width(self) -> int:
        """Elements of a context vector: d."""
        return int(self.output[-1])

    @property
    def pooled(self) -> bool:
        """Whether the model returns one vector (d,) for each sequence rather than (Tq, d)."""
        return len(self.output) == POOLED_RANK

    def shortened(self, dimensions: int | None) -> "ModelSpec":
        """The model with embeddings of that many elements; None for all of them.

        Raises:
            EnrichError: The model does not allow it.
        """
        if dimensions is None or self.encoder is None:  # options of texts are checked with the table
            return self
        allowed = [*self.encoder.dimensions, self.output_width]
        if dimensions not in allowed:
            listed = ", ".join(map(str, allowed))
            raise EnrichError(f"dimensions is {dimensions}; model {self.name!r} allows {listed}")
        return replace(self, output=(*self.output[:-1], dimensions))


class Backend(Protocol):
    """Computes requests, several at the same time.

    Attributes:
        model: The model.
        concurrency: How many requests it computes at the same time, 1 or more. The job submits a few more
            than that, so that the backend is never idle.
        tokenizer: File or folder of the model's tokenizer; None if it has none here.
    """

    model: ModelSpec
    concurrency: int
    tokenizer: Path | None

    def encode_texts(self, texts: Sequence[str]) -> tuple[Sequence[Any], Collection[int]]:
        """Encodes texts before they are submitted, on the thread of the caller, while requests are computed.

        A backend that computes elsewhere returns the texts as they are.

        Returns:
            For each text what a request has: its token ids (T,) int64, or the text itself; or a RefusedError.
            And the positions of the texts that were cut.
        """

    def count_tokens(self, text: str, *, prompt: str | None) -> int:
        """Tokens of a text as a text encoder computes it, with special tokens and the prompt of that name.

        Raises:
            EnrichError: The model refuses the text or the prompt.
        """

    def submit(self, request: BackendRequest) -> Callable[[], BackendResult]:
        """Starts to compute a request.

        Returns:
            Waits for the result. It raises `RefusedError` if the model refuses the request, and any other
            error if the job cannot continue.
        """

    def close(self) -> None:
        """Cancels requests that have not started, and releases all resources."""
