"""Encodes a call's arguments into a request.

Notation: "..." the leading axes of a batch, Tq query rows, Tk key rows, d elements of a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from numpy.typing import ArrayLike

from attention_client._decoding import ResponseShape, decode_result
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._masks import MaskExtent, encode_mask
from attention_client._sequences import InputForm, Sequences, integers, texts, vectors
from attention_client._values import Arrays, AttendInputs, AttentionResult, RequestOptions, Texts, Wire
from attention_client._wire import DATA_TYPES, narrow
from attention_client.errors import invalid

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, slots=True, eq=False)
class EncodedCall(Generic[_ResultT]):
    """The requests of a call, usually one, and what decodes their responses."""

    requests: tuple[pb.AttendRequest, ...]
    decode: Callable[[Sequence[pb.AttendResponse]], _ResultT]


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
    _fill(request.query, query, options.wire)
    if key is not None:
        _fill(request.key, key, options.wire)
    if value is not None:
        _fill(request.value, value, options.wire)
    if inputs.positions is not None:
        request.positions.extend(_positions(inputs.positions, query, query_lengths))
    return _finish(request, query, key or query, inputs.mask)


def encode_tokens(
    options: RequestOptions, ids: Arrays, *, mask: Arrays | None = None, lengths: ArrayLike | None = None
) -> EncodedCall[AttentionResult[Any]]:
    """Encodes a call with token ids: (T,), (..., T) or a list of (T_i,) integers.

    Raises:
        InvalidArgumentError: An argument has a wrong type or shape, or two do not match.
    """
    sequences = integers("token_ids", ids, lengths)
    request = request_of(options)
    request.token_ids.lengths.extend(sequences.lengths)
    request.token_ids.ids.extend(sequences.numbers)
    return _finish(request, sequences, sequences, mask)


def encode_texts(
    options: RequestOptions,
    text: str | Texts,
    *,
    mask: Arrays | None = None,
    return_offsets: bool = False,
) -> EncodedCall[AttentionResult[Any]]:
    """Encodes a call with texts; only the server knows how many tokens a mask must cover.

    Raises:
        InvalidArgumentError: An argument has a wrong type.
    """
    form, strings = texts("text", text)
    leading = () if form is InputForm.ONE else (len(strings),)
    request = request_of(options)
    request.return_offsets = bool(return_offsets)
    try:
        request.text.texts.extend(strings)
    except UnicodeEncodeError as error:  # a surrogate without its other half
        raise invalid("text", "text that UTF-8 can encode", error) from error
    if mask is not None:
        request.mask.CopyFrom(encode_mask(mask, form, leading, [None] * len(strings)))
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
        expected = f"as many rows as the {other.field}, {_brief(other.rows)}"
        raise invalid(found.field, expected, _brief(found.rows))


def _fill(message: pb.VectorSequences, sequences: Sequences, wire: Wire) -> None:
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
        given = zip(query.rows, key.rows, strict=True)
        valid = zip(query.lengths, key.lengths, strict=True)
        extents = [MaskExtent(given=rows, valid=lengths) for rows, lengths in zip(given, valid, strict=True)]
        request.mask.CopyFrom(encode_mask(mask, query.form, query.leading, extents))
    return _call(request, ResponseShape(query.form, query.leading, query.rows[0], key.rows[0]))


def _call(request: pb.AttendRequest, shape: ResponseShape) -> EncodedCall[AttentionResult[Any]]:
    return EncodedCall((request,), lambda responses: decode_result(responses[0], shape))


def _brief(rows: tuple[int, ...], limit: int = 8) -> str:
    return str(list(rows[:limit]))[:-1] + (", ...]" if len(rows) > limit else "]")
