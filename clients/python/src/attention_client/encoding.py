"""A call's arguments made into a request: changes with the request message.

Notation: B sequences, Tq query rows, Tk key rows, d elements of a row.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client.errors import invalid
from attention_client.masks import Span, encode_mask
from attention_client.sequences import Form, Sequences, texts, token_ids, vectors
from attention_client.values import Arrays, Ask, AttendInputs, Texts


@dataclass(frozen=True, slots=True)
class Layout:
    """How to answer in the kind of the query.

    Attributes:
        form: The kind of the query.
        count: Number of sequences: B.
        query_rows: Tq of a batch, padding included; unused otherwise.
        key_rows: Tk of a batch, padding included; unused otherwise.
    """

    form: Form
    count: int
    query_rows: int = 0
    key_rows: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class EncodedCall:
    """A request, and what is needed to read its answer."""

    request: pb.AttendRequest
    layout: Layout


def encode_vectors(ask: Ask, inputs: AttendInputs) -> EncodedCall:
    """Encodes a call with vectors.

    Lengths cut the key and value sequences; the query too where it is the key, in self-attention.

    Raises:
        InvalidArgumentError: An argument has a wrong type or shape, or two do not fit together.
    """
    key, value = _key_and_value(inputs)
    query = vectors("query", inputs.query, inputs.lengths if key is None else None)
    for field, other in (("key", key), ("value", value)):
        if other is not None:
            _check_alike(field, other, query)
    request = _request(ask)
    _fill(request.query, query)
    if key is not None:
        _fill(request.key, key)
    if value is not None:
        _fill(request.value, value)
    return _finish(request, query, key or query, inputs.mask)


def encode_tokens(
    ask: Ask, ids: Arrays, *, mask: Arrays | None = None, lengths: ArrayLike | None = None
) -> EncodedCall:
    """Encodes a call with token ids: (T,), (B, T) or a list of (T_i,) integers.

    Raises:
        InvalidArgumentError: An argument has a wrong type or shape, or two do not fit together.
    """
    sequences = token_ids("token_ids", ids, lengths)
    flat = np.concatenate([piece.ravel() for piece in sequences.pieces])
    request = _request(ask)
    request.token_ids.lengths.extend(sequences.lengths)
    request.token_ids.ids.extend(flat.tolist())
    return _finish(request, sequences, sequences, mask)


def encode_texts(ask: Ask, text: str | Texts, *, mask: Arrays | None = None) -> EncodedCall:
    """Encodes a call with texts; only the server can know how many tokens a mask must cover.

    Raises:
        InvalidArgumentError: An argument has a wrong type.
    """
    form, strings = texts("text", text)
    request = _request(ask)
    request.text.texts.extend(strings)
    if mask is not None:
        request.mask.CopyFrom(encode_mask(mask, form, [None] * len(strings)))
    return EncodedCall(request, Layout(form, len(strings)))


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
    if value.rows != key.rows:
        raise invalid("value", f"as many rows as the key, {_brief(key.rows)}", _brief(value.rows))
    return key, value


def _check_alike(field: str, other: Sequences, query: Sequences) -> None:
    if other.form is not query.form:
        raise invalid(field, f"{query.form.value}, as the query is", other.form.value)
    if len(other.lengths) != len(query.lengths):
        expected = f"as many sequences as the query, {len(query.lengths)}"
        raise invalid(field, expected, len(other.lengths))


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
        request.mask.CopyFrom(encode_mask(mask, query.form, spans))
    layout = Layout(query.form, len(query.lengths), query.rows[0], key.rows[0])
    return EncodedCall(request, layout)


def _brief(rows: tuple[int, ...], limit: int = 8) -> str:
    return str(list(rows[:limit]))[:-1] + (", ...]" if len(rows) > limit else "]")
