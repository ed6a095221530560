"""Calls for context vectors: encodes their arguments, and decodes responses in the form of the query.

Notation: "..." the leading axes of a batch, Tq query rows, Tk key rows, L layers, H heads,
d elements of a row.
"""

import math
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attention_client._calls.arrays import DATA_TYPES, narrow, split, widen
from attention_client._calls.sequences import InputForm, Sequences, encode_mask, integers, texts, vectors
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import (
    Arrays,
    AttendInputs,
    AttentionResult,
    Context,
    FloatArray,
    RequestOptions,
    TextInputs,
    TokenInputs,
    Wire,
    encodable,
    type_name,
)
from attention_client.errors import InternalError, InvalidArgumentError, ModelChangedError, invalid

_ResultT = TypeVar("_ResultT")
_Shape: TypeAlias = tuple[int, ...]
Offsets: TypeAlias = NDArray[np.int64]
# How many lengths a message shows at most.
_SHOWN = 8


@dataclass(frozen=True, slots=True, eq=False)
class EncodedCall(Generic[_ResultT]):
    """The requests of a call, usually one, and what decodes their responses.

    Attributes:
        requests: The requests.
        decoder: Decodes their responses.
        context: The context that the request names, if its rows can be put again.
        puts: How often they had been put.
    """

    requests: tuple[pb.AttendRequest, ...]
    decoder: Callable[[Sequence[pb.AttendResponse]], _ResultT]
    context: Context | None = None
    puts: int = 0

    def decode(self, responses: Sequence[pb.AttendResponse]) -> _ResultT:
        """Decodes the responses.

        Raises:
            InternalError: One contradicts itself or its request.
            InvalidArgumentError: One shows that an argument is wrong.
        """
        try:
            return self.decoder(responses)
        except InvalidArgumentError:  # only the response shows that an argument is wrong
            raise
        except (ValueError, LookupError) as error:
            raise InternalError(f"the server's response cannot be read: {error}") from error


class ModelDigests:
    """The digest of each model that has answered, by name and version."""

    def __init__(self) -> None:
        self._digests: dict[tuple[str, str], str] = {}

    def check(self, answer: pb.AttendResponse | AttentionResult[Any]) -> None:
        """Compares the digest of an answer with that of the first one of the same model and version.

        Raises:
            ModelChangedError: They differ.
        """
        name, version, digest = answer.model_name, answer.model_version, answer.model_digest
        first = self._digests.setdefault((name, version), digest)
        if digest != first:
            raise ModelChangedError(
                f"model {name!r} version {version} has changed: there are answers with the digests "
                f"{first or 'unknown'} and {digest or 'unknown'}. Serve one artifact everywhere, and repeat "
                "the call or the stream with a new client",
                reason="MODEL_CHANGED",
            )


@dataclass(frozen=True, slots=True)
class ResponseShape:
    """The form and the sizes that the result takes from the query.

    Attributes:
        form: The form of the query.
        leading: Sizes of its leading axes; see Sequences.
        query_rows: Tq of a batch, including padding; otherwise unused.
        key_rows: Tk of a batch, including padding; 0 if only the server knows it, and otherwise unused.
    """

    form: InputForm
    leading: tuple[int, ...]
    query_rows: int = 0
    key_rows: int = 0


def encode_vectors(options: RequestOptions, inputs: AttendInputs) -> EncodedCall[AttentionResult[Any]]:
    """Encodes a call with vectors.

    Lengths cut the key and value sequences and, in self-attention, the query and its positions.

    Raises:
        InvalidArgumentError: An argument has a wrong type or shape, or two do not match.
    """
    query_lengths = inputs.lengths if inputs.key is None else None
    query = vectors("query", inputs.query, query_lengths)
    key, value = _key_and_value(inputs, query)
    request = request_of(options)
    fill_vectors(request.query, query, options.wire)
    if key is not None:
        fill_vectors(request.key, key, options.wire)
    if value is not None:
        fill_vectors(request.value, value, options.wire)
    if inputs.positions is not None:
        request.positions.extend(_positions(inputs.positions, query, query_lengths))
    if inputs.context is not None:
        return _attending_to(inputs, request, query)
    return _finish(request, query, key or query, inputs.mask)


def _attending_to(
    inputs: AttendInputs, request: pb.AttendRequest, query: Sequences
) -> EncodedCall[AttentionResult[Any]]:
    """A call with a context; only the server knows how many rows a mask must cover."""
    context = inputs.context
    for name in ("key", "lengths"):
        if getattr(inputs, name) is not None:
            raise invalid(name, "None, because the context has the keys", type_name(getattr(inputs, name)))
    if inputs.mask is not None:
        request.mask.CopyFrom(encode_mask(inputs.mask, query.form, query.leading))
    call = _call(request, ResponseShape(query.form, query.leading, query.rows[0]))
    if isinstance(context, str) and context:
        request.context_id = encodable("context", context)
        return call
    if not isinstance(context, Context) or context.model_name != request.model_name:
        found = f"one of {context.model_name}" if isinstance(context, Context) else type_name(context)
        raise invalid("context", f"a Context of model {request.model_name}, or its id", found)
    request.context_id = context.id
    # A call without a version takes that of the context, which may be the highest that is ready as well.
    request.model_version = request.model_version or context._source.options.version
    return replace(call, context=context, puts=context._source.puts)


def encode_tokens(options: RequestOptions, inputs: TokenInputs) -> EncodedCall[AttentionResult[Any]]:
    """Encodes a call with token ids: (T,), (..., T) or a list of (T_i,) integers.

    Raises:
        InvalidArgumentError: An argument has a wrong type or shape, or two do not match.
    """
    sequences = integers("token_ids", inputs.token_ids, inputs.lengths)
    request = request_of(options)
    request.token_ids.lengths.extend(sequences.lengths)
    request.token_ids.ids.extend(sequences.numbers)
    return _finish(request, sequences, sequences, inputs.mask)


def encode_texts(options: RequestOptions, inputs: TextInputs) -> EncodedCall[AttentionResult[Any]]:
    """Encodes a call with texts; only the server knows how many tokens a mask must cover.

    Raises:
        InvalidArgumentError: An argument has a wrong type.
    """
    form, strings = texts("text", inputs.text)
    leading = () if form is InputForm.ONE else (len(strings),)
    request = request_of(options)
    request.return_offsets = bool(inputs.return_offsets)
    fill_texts("text", request.text.texts, strings)
    if inputs.mask is not None:
        request.mask.CopyFrom(encode_mask(inputs.mask, form, leading))
    return _call(request, ResponseShape(form, leading))


def request_of(options: RequestOptions) -> pb.AttendRequest:
    """A request without inputs."""
    request = pb.AttendRequest(
        model_name=options.model,
        model_version=options.version,
        return_weights=options.return_weights,
        output_data_type=DATA_TYPES[options.wire] if options.wire != "fp32" else pb.DATA_TYPE_UNSPECIFIED,
    )
    if (selection := options.head_selection) is not None:
        request.head_selection.SetInParent()
        request.head_selection.layers.extend(selection.layers)
        request.head_selection.heads.extend(selection.heads)
    return request


def fill_texts(field: str, target: MutableSequence[str], strings: Sequence[str]) -> None:
    """Adds texts to a repeated field of a message.

    Raises:
        InvalidArgumentError: A text contains a surrogate without its other half.
    """
    try:
        target.extend(strings)
    except UnicodeEncodeError as error:
        raise invalid(field, "text that UTF-8 can encode", error) from error


def _key_and_value(inputs: AttendInputs, query: Sequences) -> tuple[Sequences | None, Sequences | None]:
    if inputs.key is None:
        if inputs.value is not None:
            raise invalid("value", "a key as well", "a value without a key")
        return None, None
    key = vectors("key", inputs.key, inputs.lengths, like=query.form)
    _check_alike(key, query)
    if inputs.value is None:
        return key, None
    value = vectors("value", inputs.value, inputs.lengths, like=query.form)
    _check_alike(value, key)
    _check_rows(value, key)
    return key, value


def _positions(positions: Arrays, query: Sequences, lengths: ArrayLike | None) -> list[int]:
    sequences = integers("positions", positions, lengths, like=query.form)
    _check_alike(sequences, query)
    _check_rows(sequences, query)
    return sequences.numbers


def _check_alike(found: Sequences, other: Sequences) -> None:
    """Checks that both have the same form and the same leading axes."""
    if found.form is not other.form:
        raise invalid(found.field, f"{other.form.value}, because the {other.field} is one", found.form.value)
    if found.leading != other.leading:
        if other.form is InputForm.LIST:
            expected = f"as many sequences as the {other.field}, {len(other.rows)}"
            raise invalid(found.field, expected, len(found.rows))
        raise invalid(found.field, f"the {other.field}'s leading axes, {other.leading}", found.leading)


def _check_rows(found: Sequences, other: Sequences) -> None:
    if found.rows != other.rows:
        expected = f"as many rows as the {other.field}, {other.rows[:_SHOWN]}"
        raise invalid(found.field, expected, found.rows[:_SHOWN])


def fill_vectors(message: pb.VectorSequences, sequences: Sequences, wire: Wire) -> None:
    """Fills the message in place, because copying one message into another copies its data again."""
    message.data_type = DATA_TYPES[wire]
    message.width = sequences.width
    message.lengths.extend(sequences.lengths)
    pieces = tuple(narrow(sequences.field, piece, wire) for piece in sequences.pieces)
    message.data = replace(sequences, pieces=pieces).flat


def _finish(
    request: pb.AttendRequest, query: Sequences, key: Sequences, mask: Arrays | None
) -> EncodedCall[AttentionResult[Any]]:
    if mask is not None:
        request.mask.CopyFrom(
            encode_mask(
                mask,
                query.form,
                query.leading,
                given=zip(query.rows, key.rows, strict=True),
                valid=zip(query.lengths, key.lengths, strict=True),
            )
        )
    return _call(request, ResponseShape(query.form, query.leading, query.rows[0], key.rows[0]))


def _call(request: pb.AttendRequest, shape: ResponseShape) -> EncodedCall[AttentionResult[Any]]:
    return EncodedCall((request,), lambda responses: decode_result(responses[0], shape))


def decode_result(response: pb.AttendResponse, response_shape: ResponseShape) -> AttentionResult[Any]:
    """Decodes a response; the arrays are writable copies that do not keep the response in memory.

    Raises:
        ValueError: The response contradicts itself or the request.
    """
    weights = offsets = None
    if response.HasField("attention_weights"):
        weights = _weights(response.attention_weights, response_shape)
    if response.HasField("token_offsets"):
        offsets = _offsets(response.token_offsets, response_shape)
    return result_of(response, _context_vectors(response.context_vectors, response_shape), weights, offsets)


def result_of(
    response: pb.AttendResponse, vectors: Any, weights: Any = None, offsets: Any = None
) -> AttentionResult[Any]:
    """A result with what the response states beside its arrays."""
    return AttentionResult(
        context_vectors=vectors,
        attention_weights=weights,
        model_name=response.model_name,
        model_version=response.model_version,
        offsets=offsets,
        token_counts=tuple(response.token_counts),
        truncated=tuple(response.truncated),
        model_digest=response.model_digest,
    )


def _context_vectors(
    message: pb.VectorSequences, response_shape: ResponseShape
) -> FloatArray | list[FloatArray]:
    flat = widen(message.data_type, message.data)
    shapes = [(length, message.width) for length in message.lengths]  # (Tq_i, d)
    padded = (response_shape.query_rows, message.width)
    return _in_form(flat, shapes, response_shape=response_shape, padded=padded)


def _weights(message: pb.AttentionWeights, response_shape: ResponseShape) -> FloatArray | list[FloatArray]:
    heads, flat = message.num_heads, widen(message.data_type, message.data)
    lengths = zip(message.query_lengths, message.key_lengths, strict=True)
    # (H, Tq_i, Tk_i), of an encoder (L, H, Tq_i, Tk_i).
    leading = (message.num_layers, heads) if message.num_layers else (heads,)
    shapes = [(*leading, queries, keys) for queries, keys in lengths]
    key_rows = response_shape.key_rows or max(message.key_lengths, default=0)
    padded = (*leading, response_shape.query_rows, key_rows)
    return _in_form(flat, shapes, response_shape=response_shape, padded=padded)


def _offsets(message: pb.Spans, response_shape: ResponseShape) -> Offsets | list[Offsets]:
    """(T, 2) for one text, otherwise a list of (T_i, 2)."""
    rows = np.array([message.starts, message.ends], np.int64).T.copy()
    if len(rows) != sum(message.lengths) or len(message.lengths) != math.prod(response_shape.leading):
        raise ValueError("the offsets of tokens do not match the texts")
    if response_shape.form is InputForm.ONE:
        return rows
    return [rows[start:end] for start, end in pairwise(accumulate(message.lengths, initial=0))]


def _in_form(
    flat: FloatArray, shapes: Sequence[_Shape], *, response_shape: ResponseShape, padded: _Shape
) -> FloatArray | list[FloatArray]:
    """Splits the elements of all sequences into their shapes, in the form of the query."""
    expected, size = math.prod(response_shape.leading), sum(map(math.prod, shapes))
    if len(shapes) != expected or size != flat.size:
        sizes = f"{len(shapes)} sequences of {size} elements in all"
        raise ValueError(f"{sizes} do not match {expected} requested and {flat.size} received")
    if response_shape.form is InputForm.BATCH:
        return _batch(flat, shapes, padded=padded).reshape(*response_shape.leading, *padded)
    parts = split(flat.astype(np.float32), shapes)  # views of the only copy
    return parts if response_shape.form is InputForm.LIST else parts[0]


def _batch(flat: FloatArray, shapes: Sequence[_Shape], *, padded: _Shape) -> FloatArray:
    """(number of sequences, *padded), with zeros past each sequence's shape."""
    if all(shape == padded for shape in shapes):
        return flat.astype(np.float32).reshape(len(shapes), *padded)
    batch = np.zeros((len(shapes), *padded), np.float32)
    for index, part in enumerate(split(flat, shapes)):
        batch[index][tuple(slice(size) for size in part.shape)] = part
    return batch
