"""A call's arguments made into a request: changes with the request message.

Notation: "..." the leading axes of a batch, Tq query rows, Tk key rows, d elements of a row.
"""

from dataclasses import dataclass

from numpy.typing import ArrayLike

from attention_client._arrays import as_array
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._masks import Span, encode_mask
from attention_client._sequences import Form, Sequences, integers, texts, vectors
from attention_client._values import Arrays, Ask, AttendInputs, Texts
from attention_client.errors import invalid


@dataclass(frozen=True, slots=True)
class Layout:
    """How to answer in the kind of the query.

    Attributes:
        form: The kind of the query.
        leading: The axes that count its sequences; see Sequences.
        query_rows: Tq of a batch, padding included; unused otherwise.
        key_rows: Tk of a batch, padding included; unused otherwise.
    """

    form: Form
    leading: tuple[int, ...]
    query_rows: int = 0
    key_rows: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class EncodedCall:
    """A request, and what is needed to read its answer."""

    request: pb.AttendRequest
    layout: Layout


def encode_vectors(ask: Ask, inputs: AttendInputs) -> EncodedCall:
    """Encodes a call with vectors.

    Lengths cut the key and value sequences; the query and its positions too where the query is the key, in
    self-attention.

    Raises:
        InvalidArgumentError: An argument has a wrong type or shape, or two do not fit together.
    """
    key, value = _key_and_value(inputs)
    query_lengths = inputs.lengths if key is None else None
    query = vectors("query", inputs.query, query_lengths)
    if key is not None:
        _check_alike(key, query)
    request = _request(ask)
    _fill(request.query, query)
    if key is not None:
        _fill(request.key, key)
    if value is not None:
        _fill(request.value, value)
    if inputs.positions is not None:
        request.positions.extend(_positions(inputs.positions, query, query_lengths))
    return _finish(request, query, key or query, inputs.mask)


def encode_tokens(
    ask: Ask, ids: Arrays, *, mask: Arrays | None = None, lengths: ArrayLike | None = None
) -> EncodedCall:
    """Encodes a call with token ids: (T,), (..., T) or a list of (T_i,) integers.

    Raises:
        InvalidArgumentError: An argument has a wrong type or shape, or two do not fit together.
    """
    sequences = integers("token_ids", ids, lengths)
    request = _request(ask)
    request.token_ids.lengths.extend(sequences.lengths)
    request.token_ids.ids.extend(sequences.numbers)
    return _finish(request, sequences, sequences, mask)


def encode_texts(ask: Ask, text: str | Texts, *, mask: Arrays | None = None) -> EncodedCall:
    """Encodes a call with texts; only the server can know how many tokens a mask must cover.

    Raises:
        InvalidArgumentError: An argument has a wrong type.
    """
    form, strings = texts("text", text)
    leading = () if form is Form.ONE else (len(strings),)
    request = _request(ask)
    request.text.texts.extend(strings)
    if mask is not None:
        request.mask.CopyFrom(encode_mask(mask, form, leading, [None] * len(strings)))
    return EncodedCall(request, Layout(form, leading))


def _request(ask: Ask) -> pb.AttendRequest:
    return pb.AttendRequest(
        model_name=ask.model, model_version=ask.version, return_weights=ask.return_weights
    )


def _key_and_value(inputs: AttendInputs) -> tuple[Sequences | None, Sequences | None]:
    if inputs.key is None:
        if inputs.value is not None:
            raise invalid("value", "a key beside it", "a value alone")
        return None, None
    key = vectors("key", inputs.key, inputs.lengths)
    if inputs.value is None:
        return key, None
    value = vectors("value", inputs.value, inputs.lengths)
    _check_alike(value, key)
    _check_rows(value, key)
    return key, value


def _positions(positions: Arrays, query: Sequences, lengths: ArrayLike | None) -> list[int]:
    """Nested lists beside an array are an array; as of a mask, the query's kind says how to read them."""
    given = positions if query.form is Form.LIST else as_array("positions", positions)
    sequences = integers("positions", given, lengths)
    _check_alike(sequences, query)
    _check_rows(sequences, query)
    return sequences.numbers


def _check_alike(found: Sequences, other: Sequences) -> None:
    """Both are of one kind, and their sequences are counted by the same axes."""
    if found.form is not other.form:
        raise invalid(found.field, f"{other.form.value}, as the {other.field} is", found.form.value)
    if found.leading != other.leading:
        if other.form is Form.LIST:
            expected = f"as many sequences as the {other.field}, {len(other.rows)}"
            raise invalid(found.field, expected, len(found.rows))
        raise invalid(found.field, f"the {other.field}'s leading axes, {other.leading}", found.leading)


def _check_rows(found: Sequences, other: Sequences) -> None:
    if found.rows != other.rows:
        expected = f"as many rows as the {other.field}, {_brief(other.rows)}"
        raise invalid(found.field, expected, _brief(found.rows))


def _fill(message: pb.VectorSequences, sequences: Sequences) -> None:
    """Writes into the message in place: a message copied into another copies its data once more."""
    message.data_type = pb.DATA_TYPE_FP32
    message.width = sequences.width
    message.lengths.extend(sequences.lengths)
    message.data = sequences.flat


def _finish(request: pb.AttendRequest, query: Sequences, key: Sequences, mask: Arrays | None) -> EncodedCall:
    if mask is not None:
        given = zip(query.rows, key.rows, strict=True)
        valid = zip(query.lengths, key.lengths, strict=True)
        spans = [Span(given=rows, valid=lengths) for rows, lengths in zip(given, valid, strict=True)]
        request.mask.CopyFrom(encode_mask(mask, query.form, query.leading, spans))
    layout = Layout(query.form, query.leading, query.rows[0], key.rows[0])
    return EncodedCall(request, layout)


def _brief(rows: tuple[int, ...], limit: int = 8) -> str:
    return str(list(rows[:limit]))[:-1] + (", ...]" if len(rows) > limit else "]")
