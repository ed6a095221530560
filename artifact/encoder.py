"""What the manifest of a text encoder or text classifier states beside its graphs."""

from collections.abc import Container, Mapping
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat

from attention_serving.artifact.tolerance import Record, Size, Tolerance

EMBEDDING = "embedding"
CONTEXT_VECTORS = "context_vectors"
ATTENTION_WEIGHTS = "attention_weights"
SCORES, LOGITS = "scores", "logits"
# The types of integers that embeddings are quantised to, and what INT8 has in place of the largest value.
QUANTISED: Final[Mapping[str, type[Any]]] = {"INT8": np.int8, "UINT8": np.uint8, "BITS": np.uint8}
LARGEST_INTEGER: Final = 127
LEAST_NORM: Final = 1e-12


class EncoderFacts(Record):
    """A text encoder."""

    family: str
    """The family of the model, such as bert."""
    layers: Size
    """Number of layers."""
    width: Size
    """Width of a token vector."""
    embedding_width: Size
    """Width of an embedding."""
    row_elements: Size
    """Elements that a run holds at a time for each token, attention scores excluded."""
    pooling: tuple[str, ...]
    """How an embedding is made of the token vectors."""
    normalised: bool
    """Whether embeddings have length 1."""
    dimensions: tuple[Size, ...] = ()
    """The numbers of leading elements that embeddings can be shortened to."""
    prompts: dict[str, str] = Field(default_factory=dict)
    """Texts that a request may put before its texts, by name."""
    default_prompt: str = ""
    """Name of the prompt of requests that do not name one; empty for none."""
    truncates: bool = False
    """Whether texts with more tokens than the model takes are cut, unless a request says otherwise. Otherwise
    they are refused."""
    truncation_side: Literal["right", "left"] = "right"
    """Which end of a text that is cut loses tokens, unless a request says otherwise."""
    quantisation_ranges: dict[Size, PositiveFloat] = Field(default_factory=dict)
    """By number of elements, the largest absolute value of the embeddings of the proof's texts. Empty in
    earlier manifests, and without a reference."""


class ClassifierFacts(Record):
    """A text classifier or reranker: a model whose output is `scores` (B, L) for texts or pairs of texts."""

    family: str
    """The family of the model, such as bert."""
    labels: Annotated[tuple[str, ...], Field(min_length=1)]
    """The name of each of the L scores."""
    activation: Literal["sigmoid", "softmax", "identity"]
    """What the graph applies to the logits, which are an output of their own unless it is the identity."""
    truncates: bool = False
    """As `EncoderFacts.truncates`."""
    truncation_side: Literal["right", "left"] = "right"
    """As `EncoderFacts.truncation_side`."""
    row_elements: Size = 1
    """As `EncoderFacts.row_elements`."""


def tolerance_of(output: str, outputs: Container[str], tolerance: Tolerance) -> Tolerance:
    """The tolerance of an output: of logits beside scores, with four times the absolute difference.

    The slope of a sigmoid is 1/4 at most, so that logits differ by four times as much as scores, and more.
    """
    return tolerance.scaled(4) if output == LOGITS and SCORES in outputs else tolerance


def shorten(embeddings: NDArray[Any], dimensions: int, *, normalises: bool) -> NDArray[Any]:
    """Embeddings (..., d) cut to (..., dimensions), or whole if that is 0; and then normalised."""
    cut = embeddings[..., : dimensions or None]
    return cut / np.maximum(np.linalg.norm(cut, axis=-1, keepdims=True), LEAST_NORM) if normalises else cut


def quantise(embeddings: NDArray[Any], data_type: str, largest: float) -> NDArray[Any]:
    """Embeddings (..., d) as integers of a type of `QUANTISED`: (..., d), or (..., ceil(d / 8)) of bits.

    INT8 is round(127 x / largest), clipped to -127..127; UINT8 is the same plus 128; BITS are 1 for elements
    above 0.
    """
    if data_type == "BITS":
        return np.packbits(embeddings > 0, axis=-1)
    scaled = np.rint(embeddings * np.float32(LARGEST_INTEGER / largest))
    integers = np.clip(scaled, -LARGEST_INTEGER, LARGEST_INTEGER).astype(np.int8)
    # Bytes wrap: 255 + 128 is 127, as -1 + 128.
    return integers if data_type == "INT8" else integers.view(np.uint8) + np.uint8(LARGEST_INTEGER + 1)
