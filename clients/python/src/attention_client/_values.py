"""The values that go into a call and come out of it.

Notation: "..." the leading axes of a batch, T rows of a sequence, Tq query rows, Tk key rows, H heads,
d elements of a row.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attention_client.errors import invalid

FloatArray: TypeAlias = NDArray[np.float32]
Array: TypeAlias = NDArray[Any]
# One array is one sequence or, with leading axes, a batch of equally long ones. A list, a tuple or a pandas
# Series holds one sequence per item, unless its items are the rows of a single one.
Arrays: TypeAlias = ArrayLike | Sequence[ArrayLike]
Texts: TypeAlias = list[str] | tuple[str, ...] | Array
Version: TypeAlias = int | str
# The type in which real numbers are sent.
Wire: TypeAlias = Literal["fp32", "fp16", "bf16"]
# The type of embeddings, by the names of sentence-transformers.
OutputType: TypeAlias = Literal["float32", "int8", "uint8", "binary", "ubinary"]
# What a text encoder computes of a text, all of it in one run.
Output: TypeAlias = Literal["dense", "sparse", "token_vectors"]
MAX_INDEX = 2**32 - 1
MAX_VERSION = 2**63 - 1
ArraysT = TypeVar("ArraysT", FloatArray, list[FloatArray])


@dataclass(frozen=True, slots=True, eq=False)
class AttentionResult(Generic[ArraysT]):
    """The result of one call, in the form of its query.

    The arrays are writable and belong to the caller. Those of a list are views of one buffer: each keeps
    the memory of all of them in use.

    Attributes:
        context_vectors: float32; (Tq, d) for one sequence, (..., Tq, d) for a batch, a list of (Tq_i, d) for
            a list. Rows past a length are zeros.
        attention_weights: float32, or None if they were not requested; (H, Tq, Tk), (..., H, Tq, Tk) or a
            list of (H, Tq_i, Tk_i). Rows and columns past a length are zeros.
        model_name: Name of the model that computed the result.
        model_version: Version of that model.
        offsets: int64, or None if they were not requested; (T, 2) for one text, a list of (T_i, 2) for a
            list. Where each token begins in its text and the exclusive end, in characters of the str, so
            that `text[start:end]` is what the token stands for. Special tokens, and those of a prompt, have
            (0, 0); other tokens without characters have an end that equals their start.
        token_counts: For texts to a text encoder or classifier, the number of tokens of each, with its prompt
            and after truncation; otherwise empty.
        truncated: For texts to a text encoder or classifier, the indices of those that were cut.
        model_digest: Digest of the model that computed the result; see `ModelInfo`.
    """

    context_vectors: ArraysT
    attention_weights: ArraysT | None
    model_name: str
    model_version: str
    offsets: NDArray[np.int64] | list[NDArray[np.int64]] | None = None
    token_counts: tuple[int, ...] = ()
    truncated: tuple[int, ...] = ()
    model_digest: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class InferResult:
    """The outputs of one call by name, in the form of its inputs.

    The arrays are writable and belong to the caller. Those of a list are views of one buffer: each keeps
    the memory of all of them in use.

    Attributes:
        outputs: By name, in the order of the request or of the model: an array of float32, int64 or bool with
            the axes that `model()` lists, without the batch for one sequence; if an input is a list, a list
            with one array for each sequence.
        model_name: Name of the model that computed the result.
        model_version: Version of that model.
        model_digest: Digest of that model; see `ModelInfo`.
    """

    outputs: Mapping[str, Any]
    model_name: str
    model_version: str
    model_digest: str = ""


class Ranking(NamedTuple):
    """One text of a `rerank`.

    Attributes:
        index: Its place among the texts.
        score: Its relevance to the query: the higher, the better. NaN if the model computes NaN.
    """

    index: int  # type: ignore[assignment]  # in place of the method of tuples
    score: float


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """The sparse embedding of one text: a weight for each of n token ids. That of all others is 0.

    Attributes:
        indices: int64 (n,): the token ids, ascending.
        values: float32 (n,): their weights.
    """

    indices: NDArray[np.int64]
    values: FloatArray

    def to_dict(self) -> dict[int, float]:
        """The weights by their token ids."""
        return dict(zip(self.indices.tolist(), self.values.tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """The outputs of an `embed` with `outputs`, in the form of its inputs; None for those not requested.

    Attributes:
        dense: float32, or integers of the output type: (d,) for one text, otherwise (B, d).
        sparse: A `SparseVector` for one text, otherwise a list of them.
        token_vectors: float32: (T, d) for one text, otherwise a list of (T_i, d).
    """

    dense: Any = None
    sparse: Any = None
    token_vectors: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedText:
    """The T tokens of one text.

    Attributes:
        ids: int64 (T,).
        tokens: The text of each token, or its name in the vocabulary if it has none.
        offsets: int64 (T, 2): the first and the exclusive last character of each token, in characters of the
            `str`; (0, 0) for special tokens and those of a prompt.
        special: bool (T,): whether the model adds the token to each text.
    """

    ids: NDArray[np.int64]
    tokens: tuple[str, ...]
    offsets: NDArray[np.int64]
    special: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """One request of a stream with token ids: the arguments of `AttentionClient.attend_tokens`."""

    token_ids: Arrays
    mask: Arrays | None = None
    lengths: ArrayLike | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TextInputs:
    """One request of a stream with texts: the arguments of `AttentionClient.attend_text`."""

    text: str | Texts
    mask: Arrays | None = None
    return_offsets: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingInputs:
    """One request of a stream for embeddings: the arguments of `AttentionClient.embed`, at most 1,024 texts.

    The context vectors of its result are what `embed` returns: the embeddings, (d,) for one text, otherwise
    (B, d), or, if `sparse`, those; with `outputs`, `Embeddings`.
    """

    inputs: str | Texts | Arrays
    prompt: str | None = None
    dimensions: int | None = None
    truncate: bool | None = None
    input_kind: str | None = None
    truncation_side: str | None = None
    output_type: OutputType = "float32"
    normalised: bool | None = None
    sparse: bool = False
    outputs: Sequence[Output] | None = None
    top_k: int | None = None


# The requests of one stream may differ in form, and so may its results.
AnyResult: TypeAlias = AttentionResult[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSelection:
    """Which attention weights are returned, as `return_weights=` of a call: the answer has no others.

    Attributes:
        layers: Layers of a text encoder, counted from 0, in the order of the result; empty for all.
        heads: Heads, likewise.
    """

    layers: Sequence[int] = ()
    heads: Sequence[int] = ()


ReturnWeights: TypeAlias = bool | HeadSelection


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What a request states in addition to its inputs."""

    model: str
    version: str = ""
    return_weights: ReturnWeights = False
    wire: Wire = "fp32"


def request_options(
    model: str, version: Version, *, return_weights: ReturnWeights, wire: Wire = "fp32"
) -> RequestOptions:
    """Validates what every call takes.

    Raises:
        InvalidArgumentError: The model is not a str, the version is not a positive integer or a str, or a
            layer or head is not an integer from 0 on.
    """
    if not isinstance(model, str):
        raise invalid("model", "a str, the model's name", type_name(model))
    text = version if isinstance(version, str) else str(whole_number("version", version, 1, MAX_VERSION))
    if isinstance(return_weights, HeadSelection):
        layers = [
            whole_number("return_weights.layers", index, 0, MAX_INDEX) for index in return_weights.layers
        ]
        heads = [whole_number("return_weights.heads", index, 0, MAX_INDEX) for index in return_weights.heads]
        return_weights = HeadSelection(layers=layers, heads=heads)
    return RequestOptions(
        model=encodable("model", model),
        version=encodable("version", text),
        return_weights=return_weights,
        wire=wire,
    )


def whole_number(field: str, value: Any, lowest: int, highest: int) -> int:
    """An integer within a range.

    Raises:
        InvalidArgumentError: The value is not an integer or lies outside the range.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not lowest <= number <= highest:
        raise invalid(field, f"an integer from {lowest} to {highest}", repr(value))
    return int(number)


def type_name(value: object) -> str:
    """The value's type, for messages that must not contain a value that is secret or long."""
    return f"a value of type {type(value).__name__}"


def encodable(field: str, text: str) -> str:
    """The text, if UTF-8 can encode it.

    Raises:
        InvalidArgumentError: It contains a surrogate without its other half.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(field, "text that UTF-8 can encode", error) from None
    return text
