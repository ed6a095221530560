"""Encodes calls for embeddings, and decodes their responses.

Notation: B texts or sequences of token ids, d elements of an embedding.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from attention_client._arrays import items_of
from attention_client._encoding import request_of
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._sequences import InputForm, integers, texts
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


@dataclass(frozen=True, slots=True, eq=False)
class EncodedEmbeddings:
    """A call for embeddings.

    Attributes:
        requests: One or several; their responses together are the answer.
        is_one: Whether the caller gave one text or sequence, and not a list.
        warns: Whether to warn of texts that were cut.
    """

    requests: tuple[pb.AttendRequest, ...]
    is_one: bool
    warns: bool


def encode_embeddings(options: RequestOptions, inputs: EmbedInputs, embed: EmbedOptions) -> EncodedEmbeddings:
    """Encodes a call with texts or token ids.

    Raises:
        InvalidArgumentError: An argument has a wrong type or value.
    """
    if _are_texts(inputs):
        given: Any = inputs  # only texts are left
        form, strings = texts("inputs", given)
        requests = [_text_request(options, part, embed) for part in _parts(strings)]
    else:
        if embed.prompt is not None or embed.truncate is not None:
            field = "prompt" if embed.prompt is not None else "truncate"
            raise invalid(field, "None, because token ids are not texts", getattr(embed, field))
        form, requests = _token_requests(options, inputs, embed)
    return EncodedEmbeddings(tuple(requests), form is InputForm.ONE, embed.truncate is None)


def decode_embeddings(responses: Sequence[pb.AttendResponse], call: EncodedEmbeddings) -> FloatArray:
    """(d,) for one text or sequence, otherwise (B, d): float32, writable.

    Raises:
        InternalError: A response contradicts itself or its request.
    """
    parts = []
    for response, request in zip(responses, call.requests, strict=True):
        vectors = response.context_vectors
        expected = len(request.text.texts) or len(request.token_ids.lengths)
        flat = widen("context_vectors", vectors.data_type, vectors.data)
        if list(vectors.lengths) != [1] * expected or flat.size != expected * vectors.width:
            raise unreadable("context_vectors", f"it does not contain {expected} embeddings")
        parts.append(flat.reshape(expected, vectors.width))
    cut = sum(len(response.truncated) for response in responses)
    if cut and call.warns:
        warnings.warn(f"the model cut {cut} texts to its first tokens", TextTruncatedWarning, stacklevel=3)
    found = np.concatenate(parts).astype(np.float32)
    return found[0] if call.is_one else found


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


def _parts(strings: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts in portions for one request each."""
    start, characters = 0, 0
    for index, text in enumerate(strings):
        is_full = index - start == MAX_SEQUENCES or characters + len(text) > MAX_TEXT_CHARACTERS
        if is_full and index > start:
            yield strings[start:index]
            start, characters = index, 0
        characters += len(text)
    yield strings[start:]


def _text_request(options: RequestOptions, strings: Sequence[str], embed: EmbedOptions) -> pb.AttendRequest:
    request = _request(options, embed)
    try:
        request.text.texts.extend(strings)
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
    requests, at = [], 0
    for start in range(0, len(lengths), MAX_SEQUENCES):
        own = lengths[start : start + MAX_SEQUENCES]
        request = _request(options, embed)
        request.token_ids.lengths.extend(own)
        request.token_ids.ids.extend(numbers[at : at + sum(own)])
        at += sum(own)
        requests.append(request)
    return sequences.form, requests


def _request(options: RequestOptions, embed: EmbedOptions) -> pb.AttendRequest:
    request = request_of(options)
    request.embedding.SetInParent()
    if embed.dimensions is not None:
        request.embedding.dimensions = whole_number("dimensions", embed.dimensions, 1, MAX_DIMENSIONS)
    return request
