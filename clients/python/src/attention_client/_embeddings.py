"""Encodes calls for embeddings, and decodes their responses.

Notation: B texts or sequences of token ids, d elements of an embedding.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np

from attention_client._arrays import items_of
from attention_client._encoding import request_of
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._sequences import InputForm, integers, texts
from attention_client._text_spans import SpanList, SpanLists, Spans, fill, read_spans
from attention_client._validation import type_name, whole_number
from attention_client._values import (
    Arrays,
    AttentionResult,
    EmbeddingInputs,
    FloatArray,
    RequestOptions,
    Texts,
)
from attention_client._wire import unreadable, widen
from attention_client.errors import invalid

# A call with more sequences is split into several, because servers limit those of one request.
MAX_SEQUENCES = 1024
MAX_TEXT_CHARACTERS = 4 << 20
MAX_SPANS = 4096
MAX_DIMENSIONS = 2**31 - 1
EmbedInputs: TypeAlias = str | Texts | Arrays


class TextTruncatedWarning(UserWarning):
    """The model cut texts that have more tokens than it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions:
    """What a call for embeddings states beside its inputs; None leaves it to the model."""

    prompt: str | None = None
    dimensions: int | None = None
    truncate: bool | None = None
    spans: SpanList | SpanLists | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EncodedEmbeddings:
    """A call for embeddings.

    Attributes:
        requests: One or several; their responses together are the answer.
        is_one: Whether the caller gave one text or sequence, and not a list.
        warns: Whether to warn of texts that were cut.
        has_spans: Whether each text or sequence has several embeddings.
    """

    requests: tuple[pb.AttendRequest, ...]
    is_one: bool
    warns: bool
    has_spans: bool


def encode_embeddings(options: RequestOptions, inputs: EmbedInputs, embed: EmbedOptions) -> EncodedEmbeddings:
    """Encodes a call with texts or token ids.

    Raises:
        InvalidArgumentError: An argument has a wrong type or value.
    """
    if _are_texts(inputs):
        given: Any = inputs  # only texts are left
        form, strings = texts("inputs", given)
        spans = _spans(embed, list(map(len, strings)), "character", form)
        requests = [_text_request(options, strings, part, embed, spans) for part in _parts(strings, spans)]
    else:
        if embed.prompt is not None or embed.truncate is not None:
            field = "prompt" if embed.prompt is not None else "truncate"
            raise invalid(field, "None, because token ids are not texts", getattr(embed, field))
        form, requests = _token_requests(options, inputs, embed)
    is_one, warns = form is InputForm.ONE, embed.truncate is None
    return EncodedEmbeddings(tuple(requests), is_one, warns, has_spans=embed.spans is not None)


def decode_embeddings(
    responses: Sequence[pb.AttendResponse], call: EncodedEmbeddings
) -> FloatArray | list[FloatArray]:
    """(d,) for one text or sequence, otherwise (B, d): float32, writable.

    With spans, (n, d) for one text or sequence, otherwise a list of (n_i, d).

    Raises:
        InternalError: A response contradicts itself or its request.
    """
    parts, lengths = [], []
    for response, request in zip(responses, call.requests, strict=True):
        vectors, expected = response.context_vectors, _expected_rows(request)
        flat = widen("context_vectors", vectors.data_type, vectors.data)
        if list(vectors.lengths) != expected or flat.size != sum(expected) * vectors.width:
            raise unreadable("context_vectors", f"it does not contain {sum(expected)} embeddings")
        parts.append(flat.reshape(sum(expected), vectors.width))
        lengths += expected
    cut = sum(len(response.truncated) for response in responses)
    if cut and call.warns:
        warnings.warn(f"the model cut {cut} texts to its first tokens", TextTruncatedWarning, stacklevel=3)
    found = np.concatenate(parts).astype(np.float32)
    if call.is_one:
        return found if call.has_spans else found[0]
    if not call.has_spans:
        return found
    return [found[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def _expected_rows(request: pb.AttendRequest) -> list[int]:
    """The number of embeddings of each text or sequence of a request."""
    if request.embedding.HasField("spans"):
        return list(request.embedding.spans.lengths)
    return [1] * (len(request.text.texts) or len(request.token_ids.lengths))


def _spans(embed: EmbedOptions, ends: Sequence[int], unit: str, form: InputForm) -> list[Spans] | None:
    if embed.spans is None:
        return None
    return read_spans(embed.spans, ends, unit, is_one=form is InputForm.ONE)


def encode_stream_item(options: RequestOptions, item: EmbeddingInputs) -> EncodedEmbeddings:
    """Encodes one request of a stream.

    Raises:
        InvalidArgumentError: As `encode_embeddings`, or there are more inputs than one request takes.
    """
    asked = EmbedOptions(prompt=item.prompt, dimensions=item.dimensions, truncate=item.truncate)
    call = encode_embeddings(options, item.inputs, asked)
    if len(call.requests) > 1:
        raise invalid("inputs", f"at most {MAX_SEQUENCES} texts of 4 MiB in all", "more for one request")
    return replace(call, warns=False)  # the result of a stream states what was cut


def decode_stream_item(response: pb.AttendResponse, call: EncodedEmbeddings) -> AttentionResult[Any]:
    """Decodes the response to one request of a stream.

    Raises:
        InternalError: The response contradicts itself or its request.
    """
    return AttentionResult(
        context_vectors=decode_embeddings([response], call),
        attention_weights=None,
        model_name=response.model_name,
        model_version=response.model_version,
        token_counts=tuple(response.token_counts),
        truncated=tuple(response.truncated),
    )


def _are_texts(inputs: Any) -> bool:
    if isinstance(inputs, str) or (isinstance(inputs, np.ndarray) and inputs.dtype.kind == "U"):
        return True
    items = items_of(inputs)
    return items is not None and len(items) > 0 and isinstance(items[0], str)


def _parts(items: Sequence[Any], spans: Sequence[Spans] | None) -> Iterator[slice]:
    """The texts or sequences in portions for one request each."""
    start = size = count = 0
    for index, item in enumerate(items):
        own = 0 if spans is None else len(spans[index])
        is_large = size + len(item) > MAX_TEXT_CHARACTERS or count + own > MAX_SPANS
        if index > start and (is_large or index - start == MAX_SEQUENCES):
            yield slice(start, index)
            start, size, count = index, 0, 0
        size, count = size + len(item), count + own
    yield slice(start, len(items))


def _text_request(
    options: RequestOptions,
    strings: Sequence[str],
    part: slice,
    embed: EmbedOptions,
    spans: Sequence[Spans] | None,
) -> pb.AttendRequest:
    request = _request(options, embed, None if spans is None else spans[part])
    try:
        request.text.texts.extend(strings[part])
    except UnicodeEncodeError as error:  # a surrogate without its other half
        raise invalid("inputs", "text that UTF-8 can encode", error) from error
    if embed.prompt is not None:
        if not isinstance(embed.prompt, str):
            raise invalid("prompt", "a str, the name of a prompt", type_name(embed.prompt))
        request.text.prompt = embed.prompt
    if embed.truncate is not None:
        request.text.truncate = bool(embed.truncate)
    return request


def _token_requests(
    options: RequestOptions, ids: Any, embed: EmbedOptions
) -> tuple[InputForm, list[pb.AttendRequest]]:
    sequences = integers("inputs", ids)
    if len(sequences.leading) > 1:
        raise invalid("inputs", "(T,), (B, T) or a list of (T,)", f"leading axes {sequences.leading}")
    numbers, lengths = sequences.numbers, sequences.lengths
    spans = _spans(embed, lengths, "token", sequences.form)
    requests, at = [], 0
    for part in _parts([range(length) for length in lengths], spans):
        own = lengths[part]
        request = _request(options, embed, None if spans is None else spans[part])
        request.token_ids.lengths.extend(own)
        request.token_ids.ids.extend(numbers[at : at + sum(own)])
        at += sum(own)
        requests.append(request)
    return sequences.form, requests


def _request(options: RequestOptions, embed: EmbedOptions, spans: Sequence[Spans] | None) -> pb.AttendRequest:
    request = request_of(options)
    request.embedding.SetInParent()
    if spans is not None:
        fill(request.embedding.spans, spans)
    if embed.dimensions is not None:
        request.embedding.dimensions = whole_number("dimensions", embed.dimensions, 1, MAX_DIMENSIONS)
    return request
