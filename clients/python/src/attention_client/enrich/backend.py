"""The interface between a job and whatever computes for it: servers, or an engine in this process.

Notation: T rows of a sequence, Tq query rows, Tk key rows, H heads, d elements of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

from numpy.typing import NDArray

from attention_client.enrich.outcome import EnrichError, RefusedError

Array: TypeAlias = NDArray[Any]
Axes: TypeAlias = Sequence[str | int]
# Sequences that are computed together, for each input: (T, d) float32, (T,) int64, or texts.
BackendRequest: TypeAlias = "Mapping[Role, Sequence[Any]]"
# Axes of vectors: sequences, their rows, elements of a row. A pooled output lacks the rows.
VECTORS_RANK, POOLED_RANK = 3, 2


class Role(StrEnum):
    """The model input that a column feeds."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"


@dataclass(frozen=True, kw_only=True)
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
        input_widths: For each input, the elements of a row; None for token ids and texts.
        output_width: Elements of a context vector: d.
        pooled: Whether the model returns one vector (d,) for each sequence rather than (Tq, d).
        parity_error: Largest absolute difference from eager PyTorch that the backend measured; None if
            unknown.
        encoder: What sets a text encoder apart; None for any other model.
    """

    name: str
    version: str
    accepts_text: bool
    input_widths: Mapping[Role, int | None]
    output_width: int
    pooled: bool
    parity_error: float | None
    encoder: EncoderSpec | None = None

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
        encoder: EncoderSpec | None = None,
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
            encoder: What sets a text encoder apart.

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
            encoder=encoder,
        )

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
        return replace(self, output_width=dimensions)


def _row_width(axes: Axes) -> int | None:
    return int(axes[-1]) if len(axes) == VECTORS_RANK else None


@dataclass(frozen=True, slots=True, eq=False)
class BackendResult:
    """The results of a request, in the order of its sequences.

    Attributes:
        context_vectors: (Tq, d) for each sequence; (d,) or (1, d) if the model pools.
        attention_weights: (H, Tq, Tk) for each sequence; None if they were not requested.
        token_counts: Tokens of each text; empty if the request had no texts, or they are not known.
        truncated: Positions of the texts that were cut.
    """

    context_vectors: Sequence[Array]
    attention_weights: Sequence[Array] | None
    token_counts: Sequence[int] = ()
    truncated: Sequence[int] = ()


@dataclass(frozen=True, slots=True, eq=False)
class EncodedTexts:
    """Texts as requests carry them.

    Attributes:
        values: For each text its token ids (T,) int64, or the text itself; None if it is refused.
        refused: The reason for each text that is refused, by its position.
        truncated: Positions of the texts that were cut.
    """

    values: Sequence[Any]
    refused: Mapping[int, RefusedError] = field(default_factory=dict)
    truncated: Sequence[int] = ()


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

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """Encodes texts before they are submitted, on the thread of the caller, while requests are computed.

        A backend that computes elsewhere returns the texts as they are.
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
