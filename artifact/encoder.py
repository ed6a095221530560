"""What the manifest of a text encoder or text classifier states beside its graphs.

A text encoder has up to three heads: dense embeddings, sparse embeddings and token vectors.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, model_validator

from attention_serving.artifact.tolerance import Record, Size, Tolerance

EMBEDDING = "embedding"
CONTEXT_VECTORS = "context_vectors"
ATTENTION_WEIGHTS = "attention_weights"
SCORES, LOGITS = "scores", "logits"
# The keys and values of the tokens that the pairs of a request begin with.
PREFIX: Final = ("prefix_keys", "prefix_values")
# Sparse embeddings, one way or the other: a weight of each token id (B, V), most of which are 0; or a weight
# of each token (B, T), of which each token id has the largest.
SPARSE_EMBEDDING = "sparse_embedding"
TOKEN_WEIGHTS = "token_weights"  # noqa: S105 - the name of an output
# The types of integers that embeddings are quantised to, and what INT8 has in place of the largest value.
QUANTISED: Final[Mapping[str, type[Any]]] = {"INT8": np.int8, "UINT8": np.uint8, "BITS": np.uint8}
LARGEST_INTEGER: Final = 127
LEAST_NORM: Final = 1e-12


# A number that may be 0.
SizeOrZero: TypeAlias = Annotated[int, Field(ge=0, le=2**31 - 1)]


class SparseFacts(Record):
    """The sparse embeddings of a text encoder: weights of token ids."""

    width: Size
    """Exclusive upper bound of the token ids."""
    max_active: SizeOrZero = 0
    """Largest number of weights of a text, of which the largest stay; 0 for no bound. Graphs do not apply
    it."""
    hidden_ids: tuple[SizeOrZero, ...] = ()
    """Token ids without weights, such as those of special tokens."""


class LateInteractionFacts(Record):
    """How a multi-vector encoder compares texts: by all vectors of their tokens."""

    similarity: Literal["maxsim", "meanmaxsim"]
    """The sum or the mean, over the token vectors of a query, of the largest dot product with a token vector
    of the document."""
    skipped_ids: tuple[SizeOrZero, ...] = ()
    """Token ids without vectors, such as those of punctuation."""
    skipped_kinds: tuple[Literal["query", "document"], ...] = ("document",)
    """The kinds of texts that they are skipped in. Texts that are not queries are documents."""
    skips_first: bool = False
    """Whether the first token of each text is skipped, whatever the kind of the text."""


class QueryFacts(Record):
    """How queries become token ids, where this differs from other texts."""

    adds_special: bool = True
    """Whether special tokens are added."""
    expansion_id: SizeOrZero = 0
    """The token id that is added to queries with fewer tokens than `expanded_length`. The first id beyond the
    vocabulary stands for a token that others do not attend to."""
    expanded_length: SizeOrZero = 0
    """See `expansion_id`; 0 if nothing is added."""

    def expand(self, ids: list[int]) -> list[int]:
        """The token ids of a query, filled up to `expanded_length`."""
        return ids + [self.expansion_id] * (self.expanded_length - len(ids))


# How other texts become token ids.
NO_QUERY: Final = QueryFacts()


class EncoderFacts(Record):
    """A text encoder."""

    family: str
    """The family of the model, such as bert."""
    layers: Size
    """Number of layers."""
    width: Size
    """Width of a token vector."""
    embedding_width: SizeOrZero
    """Width of a dense embedding; 0 if it has none."""
    row_elements: Size
    """Elements that a run holds at a time for each token, attention scores excluded."""
    pooling: tuple[str, ...]
    """How a dense embedding is made of the token vectors; empty if it has none."""
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
    sparse: SparseFacts | None = None
    """For encoders with sparse embeddings."""
    late_interaction: LateInteractionFacts | None = None
    """For multi-vector encoders."""
    query: QueryFacts = NO_QUERY
    """How queries become token ids."""
    token_limits: dict[Literal["query", "document", ""], Size] = Field(default_factory=dict)
    """By kind of texts, and by the empty name for those of no kind, the largest number of tokens, if it is
    below that of the model."""


class PairTemplate(Record):
    """How a causal reranker makes one text of a pair: what its chat template writes around the two texts."""

    before: str
    """The text before the query."""
    between: str
    """The text between query and document."""
    after: str
    """The text after the document."""
    strips: bool = False
    """Whether white space around the query and around the document is removed."""
    suffix_ids: tuple[SizeOrZero, ...] = ()
    """The last token ids of every pair. Those of a pair that is cut are put in place of its last ids."""

    def render(self, query: str, document: str) -> str:
        """The text of a pair, to which no special tokens are added."""
        if self.strips:
            query, document = query.strip(), document.strip()
        return f"{self.before}{query}{self.between}{document}{self.after}"

    def restore_suffix(self, ids: Sequence[int], most: int) -> list[int]:
        """The token ids of a text that was cut to `most`: as many, of which the last are `suffix_ids`.

        Fewer ids were not cut, and stay. Exactly as many may have been, and are treated alike.
        """
        suffix = self.suffix_ids[-most:] if len(ids) >= most else ()
        return [*ids[: len(ids) - len(suffix)], *suffix]


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
    prompts: dict[str, str] = Field(default_factory=dict)
    """Texts that a request may put before the first text of each pair, by name; with a template, instructions
    that it may put into the template."""
    default_prompt: str = ""
    """As `EncoderFacts.default_prompt`."""
    templates: dict[str, PairTemplate] = Field(default_factory=dict)
    """Of causal rerankers with a chat template: the template of each prompt, and without a prompt that of the
    empty name. Such rerankers take pairs only."""

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        names = {"", *self.prompts}
        if self.default_prompt not in names:
            raise ValueError(f"default_prompt: {self.default_prompt!r} is not among the prompts")
        if self.templates and self.templates.keys() != names:
            raise ValueError("templates: there must be one for each prompt, and one without")
        return self


def tolerance_of(output: str, outputs: Container[str], tolerance: Tolerance) -> Tolerance:
    """The tolerance of an output: of logits beside scores, with four times the absolute difference.

    The slope of a sigmoid is 1/4 at most, so that logits differ by four times as much as scores, and more. So
    do the keys and values of a prefix, which are intermediate results of a run. Weights of tokens have no
    cosine: a text may have a single token, whose weight may be 0.
    """
    if output == TOKEN_WEIGHTS:
        return tolerance.model_copy(update={"cosine": None})
    is_wider = output in PREFIX or (output == LOGITS and SCORES in outputs)
    return tolerance.scaled(4) if is_wider else tolerance


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


def select_weights(
    ids: NDArray[Any], weights: NDArray[Any], facts: SparseFacts, most: int = 0
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The token ids and weights of a sparse embedding.

    Args:
        ids: Token ids (n,), ascending.
        weights: Their weights (n,), some of which may be 0.
        facts: Those of the model.
        most: Number of weights that stay: the largest by their absolute values, and of equal ones those of
            the lowest ids. 0 for all. NaN counts as the largest value, so that it is not lost.
    """
    (kept,) = np.nonzero((weights != 0) & ~np.isin(ids, facts.hidden_ids))
    if 0 < most < len(kept):
        sizes = np.nan_to_num(np.abs(weights[kept]), nan=np.inf, posinf=np.inf)
        kept = np.sort(kept[np.argsort(-sizes, kind="stable")[:most]])
    return ids[kept], weights[kept]


def largest_weights(ids: NDArray[Any], weights: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The token ids (n,) of some tokens, ascending, and for each the largest of its tokens' weights (T,)."""
    distinct, places = np.unique(ids, return_inverse=True)
    largest = np.full(len(distinct), -np.inf, weights.dtype)
    with np.errstate(invalid="ignore"):  # NaN, which stays
        np.maximum.at(largest, places, weights)
    return distinct, largest


def has_vectors(ids: NDArray[Any], facts: LateInteractionFacts, kind: str) -> NDArray[np.bool_]:
    """Which tokens (T,) of a text have vectors; `kind` is query for queries, and anything for documents."""
    is_kept = np.ones(len(ids), np.bool_)
    if facts.skipped_ids and ("query" if kind == "query" else "document") in facts.skipped_kinds:
        is_kept = ~np.isin(ids, facts.skipped_ids)
    if facts.skips_first:
        is_kept[:1] = False
    return is_kept
