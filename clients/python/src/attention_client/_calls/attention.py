"""Calls for context vectors: encodes their arguments, and decodes responses in the form of the query.

Notation: "..." the leading axes of a batch, Tq query rows, Tk key rows, L layers, H heads,
d elements of a row.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attention_client._calls.arrays import DATA_TYPES, split, widen
from attention_client._calls.contexts import Context
from attention_client._calls.sequences import (
    InputForm,
    Sequences,
    encode_mask,
    fill_texts,
    fill_vectors,
    integers,
    texts,
    vectors,
)
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import (
    Arrays,
    AttentionResult,
    FloatArray,
    HeadSelection,
    RequestOptions,
    TextInputs,
    TokenInputs,
    encodable,
    type_name,
)
from attention_client.errors import InternalError, InvalidArgumentError, ModelChangedError, invalid

_ResultT = TypeVar("_ResultT")
_Shape: TypeAlias = tuple[int, ...]
Offsets: TypeAlias = NDArray[np.int64]
# How many lengths a message shows at most.
_MAX_LENGTHS = 8


@dataclass(frozen=True, slots=True, eq=False)
class AttendInputs:
    """One request of a stream with more inputs than a query: the arguments of `AttentionClient.attend`."""

    query: Arrays
    key: Arrays | None = None
    value: Arrays | None = None
    mask: Arrays | None = None
    lengths: ArrayLike | None = None
    positions: Arrays | None = None
    context: Context | str | None = None


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
            raise InternalError(f"the server's response cannot be read: {error}") from None


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
class ResultForm:
    """The form and the sizes that the result takes from the query; decodes responses.

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

    def decode(self, response: pb.AttendResponse) -> AttentionResult[Any]:
        """Decodes a response; the arrays are writable copies that do not keep the response in memory.

        Raises:
            ValueError: The response contradicts itself or the request.
        """
        message, weights, offsets = response.context_vectors, None, None
        if response.HasField("attention_weights"):
            weights = self._decode_weights(response.attention_weights)
        if response.HasField("token_offsets"):
            offsets = self._decode_offsets(response.token_offsets)
        shapes = [(length, message.width) for length in message.lengths]  # (Tq_i, d)
        vectors = self._arrange(message, shapes, (self.query_rows, message.width))
        return result_of(response, vectors, weights, offsets)

    def _decode_weights(self, message: pb.AttentionWeights) -> FloatArray | list[FloatArray]:
        # (H, Tq_i, Tk_i), of an encoder (L, H, Tq_i, Tk_i).
        heads = (message.num_layers, message.num_heads) if message.num_layers else (message.num_heads,)
        lengths = zip(message.query_lengths, message.key_lengths, strict=True)
        key_rows = self.key_rows or max(message.key_lengths, default=0)
        return self._arrange(message, [heads + pair for pair in lengths], (*heads, self.query_rows, key_rows))

    def _decode_offsets(self, message: pb.Spans) -> Offsets | list[Offsets]:
        """(T, 2) for one text, otherwise a list of (T_i, 2)."""
        rows = np.array([message.starts, message.ends], np.int64).T.copy()
        if len(rows) != sum(message.lengths) or len(message.lengths) != math.prod(self.leading):
            raise ValueError("the offsets of tokens do not match the texts")
        if self.form is InputForm.SINGLE:
            return rows
        return [rows[start:end] for start, end in pairwise(accumulate(message.lengths, initial=0))]

    def _arrange(
        self, message: pb.VectorSequences | pb.AttentionWeights, shapes: Sequence[_Shape], padded: _Shape
    ) -> FloatArray | list[FloatArray]:
        """Splits the elements of all sequences into their shapes, in the form of the query.

        Those of a batch have the shape `padded`, or a larger one that all fit, with zeros past their own.
        """
        flat = widen(message.data_type, message.data)
        expected, size = math.prod(self.leading), sum(map(math.prod, shapes))
        if len(shapes) != expected or size != flat.size:
            sizes = f"{len(shapes)} sequences of {size} elements in all"
            raise ValueError(f"{sizes} do not match {expected} requested and {flat.size} received")
        if self.form is not InputForm.BATCH:
            parts = split(flat.astype(np.float32), shapes)  # views of the only copy
            return parts if self.form is InputForm.LIST else parts[0]
        padded = tuple(max(sizes) for sizes in zip(padded, *shapes, strict=True))
        if all(shape == padded for shape in shapes):
            return flat.astype(np.float32).reshape(*self.leading, *padded)
        batch = np.zeros((len(shapes), *padded), np.float32)
        for index, part in enumerate(split(flat, shapes)):
            batch[index][tuple(slice(size) for size in part.shape)] = part
        return batch.reshape(*self.leading, *padded)


def encode_vectors(options: RequestOptions, inputs: AttendInputs) -> EncodedCall[AttentionResult[Any]]:
    """Encodes a call with vectors.

    Lengths cut the key and value sequences and, in self-attention, the query and its positions.

    Raises:
        InvalidArgumentError: An argument has a wrong type or shape, or two do not match.
    """
    query_lengths = inputs.lengths if inputs.key is None else None
    key = query = vectors("query", inputs.query, query_lengths)
    request = request_of(options)
    fill_vectors(request.query, query, options.wire)
    if inputs.key is not None:
        key = vectors("key", inputs.key, inputs.lengths, like=query.form)
        _check_match(key, query, rows=False)
        fill_vectors(request.key, key, options.wire)
    if inputs.value is not None:
        if inputs.key is None:
            raise invalid("value", "a key as well", "a value without a key")
        value = vectors("value", inputs.value, inputs.lengths, like=query.form)
        _check_match(value, key)
        fill_vectors(request.value, value, options.wire)
    if inputs.positions is not None:
        positions = integers("positions", inputs.positions, query_lengths, like=query.form)
        _check_match(positions, query)
        request.positions.extend(positions.numbers)
    if inputs.context is not None:
        return _attend_context(inputs, request, query)
    result = ResultForm(query.form, query.leading, query.rows[0], key.rows[0])
    return _finish(request, result, inputs.mask, query, key)


def _attend_context(
    inputs: AttendInputs, request: pb.AttendRequest, query: Sequences
) -> EncodedCall[AttentionResult[Any]]:
    """A call with a context; only the server knows how many rows a mask must cover."""
    for name in ("key", "lengths"):
        if getattr(inputs, name) is not None:
            raise invalid(name, "None, because the context has the keys", type_name(getattr(inputs, name)))
    call = _finish(request, ResultForm(query.form, query.leading, query.rows[0]), inputs.mask)
    return with_context(call, inputs.context)


def with_context(call: EncodedCall[_ResultT], context: Context | str | None) -> EncodedCall[_ResultT]:
    """A call of one request that names a context.

    Raises:
        InvalidArgumentError: It is not a context of the model.
    """
    (request,) = call.requests
    if isinstance(context, str) and context:
        request.context_id = encodable("context", context)
        return call
    if not isinstance(context, Context) or context.model_name != request.model_name:
        actual = f"one of {context.model_name}" if isinstance(context, Context) else type_name(context)
        raise invalid("context", f"a Context of model {request.model_name}, or its id", actual)
    request.context_id = context.id
    # A call without a version takes that of the context, which may be the highest that is ready as well.
    request.model_version = request.model_version or context._options.version
    return replace(call, context=context, puts=context._puts)


def encode_tokens(options: RequestOptions, inputs: TokenInputs) -> EncodedCall[AttentionResult[Any]]:
    """Encodes a call with token ids: (T,), (..., T) or a list of (T_i,) integers.

    Raises:
        InvalidArgumentError: An argument has a wrong type or shape, or two do not match.
    """
    sequences = integers("token_ids", inputs.token_ids, inputs.lengths)
    request = request_of(options)
    request.token_ids.lengths.extend(sequences.lengths)
    request.token_ids.ids.extend(sequences.numbers)
    rows = sequences.rows[0]
    result = ResultForm(sequences.form, sequences.leading, rows, rows)
    return _finish(request, result, inputs.mask, sequences, sequences)


def encode_texts(options: RequestOptions, inputs: TextInputs) -> EncodedCall[AttentionResult[Any]]:
    """Encodes a call with texts; only the server knows how many tokens a mask must cover.

    Raises:
        InvalidArgumentError: An argument has a wrong type.
    """
    form, strings = texts("text", inputs.text)
    request = request_of(options)
    request.return_offsets = bool(inputs.return_offsets)
    fill_texts("text", request.text.texts, strings)
    leading = () if form is InputForm.SINGLE else (len(strings),)
    return _finish(request, ResultForm(form, leading), inputs.mask)


def request_of(options: RequestOptions) -> pb.AttendRequest:
    """A request without inputs."""
    request = pb.AttendRequest(
        model_name=options.model,
        model_version=options.version,
        return_weights=bool(options.return_weights),
        output_data_type=DATA_TYPES[options.wire] if options.wire != "fp32" else pb.DATA_TYPE_UNSPECIFIED,
    )
    if isinstance(selection := options.return_weights, HeadSelection):
        request.head_selection.SetInParent()
        request.head_selection.layers.extend(selection.layers)
        request.head_selection.heads.extend(selection.heads)
    return request


def fill_text_options(text: pb.TextSequences, **options: Any) -> None:
    """Sets the options of texts that are not None; a side and a kind by their names, such as "left".

    Raises:
        InvalidArgumentError: A value is not one that the option has.
    """
    for field, value in options.items():
        if value is None:
            continue
        if (kind := text.DESCRIPTOR.fields_by_name[field].enum_type) is None:
            setattr(text, field, bool(value) if field == "truncate" else value)
            continue
        prefix = f"{field}_".upper()
        numbers = {item.name.removeprefix(prefix).lower(): item.number for item in kind.values[1:]}
        if value not in numbers:
            raise invalid(field, f"one of {', '.join(numbers)}", value)
        setattr(text, field, numbers[value])


def _check_match(sequences: Sequences, other: Sequences, *, rows: bool = True) -> None:
    """Checks that both have the same form, the same leading axes and, if asked, equal numbers of rows."""
    field, form = sequences.field, other.form
    if sequences.form is not form:
        raise invalid(field, f"{form.value}, because the {other.field} is one", sequences.form.value)
    if sequences.leading != other.leading:
        if form is InputForm.LIST:
            expected = f"as many sequences as the {other.field}, {len(other.rows)}"
            raise invalid(field, expected, len(sequences.rows))
        raise invalid(field, f"the {other.field}'s leading axes, {other.leading}", sequences.leading)
    if rows and sequences.rows != other.rows:
        expected = f"as many rows as the {other.field}, {other.rows[:_MAX_LENGTHS]}"
        raise invalid(field, expected, sequences.rows[:_MAX_LENGTHS])


def _finish(
    request: pb.AttendRequest, result: ResultForm, mask: Arrays | None, *sequences: Sequences
) -> EncodedCall[AttentionResult[Any]]:
    """Adds the mask. `sequences` are those of the query and the key, unless only the server knows them."""
    if mask is not None:
        request.mask.CopyFrom(encode_mask(mask, result.form, result.leading, *sequences))
    return EncodedCall((request,), lambda responses: result.decode(responses[0]))


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
