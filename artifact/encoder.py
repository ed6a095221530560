"""What the manifest of a text encoder or text classifier states beside its graphs."""

from typing import Annotated, Literal

from pydantic import Field

from attention_serving.artifact.tolerance import Record, Size

EMBEDDING = "embedding"
CONTEXT_VECTORS = "context_vectors"
ATTENTION_WEIGHTS = "attention_weights"
SCORES = "scores"


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


class ClassifierFacts(Record):
    """A text classifier or reranker: a model whose output is `scores` (B, L) for texts or pairs of texts."""

    family: str
    """The family of the model, such as bert."""
    labels: Annotated[tuple[str, ...], Field(min_length=1)]
    """The name of each of the L scores."""
    activation: Literal["sigmoid", "softmax", "identity"]
    """What the graph applies to the logits."""
    truncates: bool = False
    """As `EncoderFacts.truncates`."""
    truncation_side: Literal["right", "left"] = "right"
    """As `EncoderFacts.truncation_side`."""
    row_elements: Size = 1
    """As `EncoderFacts.row_elements`."""
