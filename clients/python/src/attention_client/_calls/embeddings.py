"""Encodes calls for embeddings and for scores, and decodes their responses.

Notation: B texts or sequences of token ids, T tokens of one, d elements of an embedding, L labels.
"""

import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise, starmap
from typing import Any, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attention_client._calls.arrays import as_array, as_integers, items_of, widen
from attention_client._calls.attention import (
    EncodedCall,
    fill_text_options,
    request_of,
    result_of,
    with_context,
)
from attention_client._calls.contexts import Context
from attention_client._calls.sequences import (
    MAX_SEQUENCES,
    InputForm,
    fill_texts,
    integers,
    split_texts,
    texts,
)
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import (
    MAX_INDEX,
    Array,
    Arrays,
    AttentionResult,
    EmbeddingInputs,
    Embeddings,
    FloatArray,
    Output,
    Ranking,
    RequestOptions,
    SparseVector,
    Texts,
    TokenizedText,
    type_name,
    whole_number,
)
from attention_client.errors import invalid

# Characters of one request whose response has a vector for each token: a text has at most one for each, and
# some for special tokens, the prompt and query expansion. With 1,024 elements each, they make 64 MiB.
MAX_VECTOR_CHARACTERS, ADDED_TOKENS = 16 << 10, 32
OUTPUTS: tuple[str, ...] = get_args(Output)
# Options that need a certain output.
OPTIONS_OF_OUTPUTS = {"dimensions": "dense", "normalised": "dense", "top_k": "sparse"}
TEXT_OPTIONS = ("prompt", "truncate", "input_kind", "truncation_side")
# Start and exclusive end of each part of one text; and those of several texts.
SpanList: TypeAlias = Sequence[tuple[int, int]] | NDArray[Any]
SpanLists: TypeAlias = Sequence[SpanList] | NDArray[Any]
Spans: TypeAlias = NDArray[np.int64]
EmbedInputs: TypeAlias = str | Texts | Arrays
# The types of embeddings on the wire; of float32 that of all real numbers.
OUTPUT_TYPES: dict[str, pb.DataType.ValueType | None] = {
    "float32": None,
    "int8": pb.DATA_TYPE_INT8,
    "uint8": pb.DATA_TYPE_UINT8,
    "binary": pb.DATA_TYPE_BITS,
    "ubinary": pb.DATA_TYPE_BITS,
}


class TextTruncatedWarning(UserWarning):
    """The model cut texts that have more tokens than it takes."""


def encode_embeddings(
    options: RequestOptions,
    embed: EmbeddingInputs,
    spans: SpanList | SpanLists | None = None,
    *,
    streams: bool = False,
) -> EncodedCall[Any]:
    """Encodes a call with texts or token ids, as one request or several.

    Its result is an array of embeddings, or a list of arrays with spans; with `outputs`, `Embeddings`.

    Args:
        options: What every request states.
        embed: The inputs, and what the call states beside them; None leaves it to the model.
        spans: The parts of the texts that get an embedding each.
        streams: Whether it is one request of a stream, whose result states itself which texts were cut.

    Raises:
        InvalidArgumentError: An argument has a wrong type or value.
    """
    if embed.output_type not in OUTPUT_TYPES:
        raise invalid("output_type", f"one of {', '.join(OUTPUT_TYPES)}", repr(embed.output_type))
    outputs = _read_outputs(embed, spans)
    form, items, unit = _read_inputs(embed)
    sizes = list(map(len, items))
    arrays = _read_spans(spans, sizes, unit, form)
    if "token_vectors" in outputs and not streams:
        parts = split_texts([size + ADDED_TOKENS for size in sizes], most=MAX_VECTOR_CHARACTERS)
    else:
        parts = split_texts(sizes, arrays)
    requests = tuple(
        _request(options, embed, outputs, items[part], None if arrays is None else arrays[part])
        for part in parts
    )

    def decode_dense(responses: Sequence[pb.AttendResponse], _: Any) -> Array | list[Array]:
        vectors = as_output_type(_decode(responses, requests), embed.output_type)
        if arrays is None:
            return vectors
        ends = accumulate(map(len, arrays), initial=0)
        return [vectors[start:end] for start, end in pairwise(ends)]

    decoders: dict[str, Callable[..., Any]]
    decoders = {"dense": decode_dense, "sparse": _decode_sparse, "token_vectors": _decode_token_vectors}

    def decode(responses: Sequence[pb.AttendResponse]) -> Any:
        _warn(responses, warns=not streams and embed.truncate is None)
        decoded = {output: decoders[output](responses, requests) for output in outputs}
        if form is InputForm.SINGLE:
            decoded = {output: rows[0] for output, rows in decoded.items()}
        return Embeddings(**decoded) if embed.outputs is not None else decoded[outputs[0]]

    return EncodedCall(requests, decode)


def encode_scores(
    options: RequestOptions, first: str | Texts, pairs: str | Texts | None = None, **text_options: Any
) -> EncodedCall[FloatArray]:
    """Encodes a call for scores, (L,) of one text or pair and (B, L) of several, as one request or several.

    `text_options` are those of `fill_text_options`.

    Raises:
        InvalidArgumentError: An argument has a wrong type, or the second texts are not as many as the first.
    """
    form, firsts = texts("texts", first)
    columns = [firsts] if pairs is None else [firsts, texts("pairs", pairs)[1]]
    if len(columns[-1]) != len(firsts):
        raise invalid("pairs", f"as many texts as texts, {len(firsts)}", len(columns[-1]))
    requests = list[pb.AttendRequest]()
    for part in split_texts([sum(map(len, row)) for row in zip(*columns, strict=True)]):
        request = request_of(options)
        for field, column in zip(("texts", "pairs"), columns, strict=False):
            fill_texts(field, getattr(request.text, field), column[part])
        fill_text_options(request.text, **text_options)
        requests.append(request)

    def decode(responses: Sequence[pb.AttendResponse]) -> FloatArray:
        _warn(responses, warns=text_options.get("truncate") is None)
        scores = _decode(responses, requests)
        return scores[0] if form is InputForm.SINGLE else scores

    return EncodedCall(tuple(requests), decode)


def encode_rerank(
    options: RequestOptions,
    query: str,
    documents: Texts | None,
    top_n: int | None,
    context: Context | str | None = None,
    **text_options: Any,
) -> EncodedCall[list[Ranking]]:
    """Encodes a call for the rankings of documents, or of those of a context.

    `text_options` are those of `fill_text_options`.

    Raises:
        InvalidArgumentError: An argument has a wrong type or value.
    """
    if not isinstance(query, str):
        raise invalid("query", "a str", type_name(query))
    most = None if top_n is None else whole_number("top_n", top_n, 1, MAX_INDEX)
    if (documents is None) == (context is None):
        actual = "neither" if context is None else "both"
        raise invalid("texts", "texts or a context", actual)
    second = None if documents is None else texts("texts", documents)[1]
    call = encode_scores(options, [query] * len(second or [query]), second, **text_options)

    def decode(responses: Sequence[pb.AttendResponse]) -> list[Ranking]:
        rows = call.decoder(responses)
        if (labels := rows.shape[1]) > 1:
            raise invalid("model", "a reranker, which has one label", f"a model with {labels} labels")
        order = np.argsort(-rows[:, 0], kind="stable")[:most]
        return [Ranking(int(index), float(rows[index, 0])) for index in order]

    rankings = EncodedCall(call.requests, decode)
    return rankings if context is None else with_context(rankings, context)


def _warn(responses: Sequence[pb.AttendResponse], *, warns: bool) -> None:
    if warns and (cut := sum(len(response.truncated) for response in responses)):
        message = f"the model cut {cut} texts to the tokens that it takes"
        warnings.warn(message, TextTruncatedWarning, stacklevel=4)


def _decode(responses: Sequence[pb.AttendResponse], requests: Sequence[pb.AttendRequest]) -> Array:
    """The embeddings or scores (n, d), writable: float32, or integers as they were sent.

    Raises:
        ValueError: A response contradicts itself or its request.
    """
    parts = []
    for response, request in zip(responses, requests, strict=True):
        vectors, expected = response.context_vectors, [1] * _count(request)
        if request.embedding.HasField("spans"):
            expected = list(request.embedding.spans.lengths)
        if request.context_id:  # only the server knows how many documents it has
            expected = list(vectors.lengths)
        flat = widen(vectors.data_type, vectors.data)
        width = -(-vectors.width // 8) if vectors.data_type == pb.DATA_TYPE_BITS else vectors.width
        if list(vectors.lengths) != expected and not request.HasField("embedding"):
            raise invalid("model", "a text classifier or reranker", "a model with a vector for each token")
        if list(vectors.lengths) != expected or flat.size != sum(expected) * width:
            raise ValueError(f"it does not contain {sum(expected)} rows")
        parts.append(flat.reshape(sum(expected), width))
    return np.concatenate(parts)


def _decode_sparse(
    responses: Sequence[pb.AttendResponse], requests: Sequence[pb.AttendRequest]
) -> list[SparseVector]:
    """As `_decode`, the sparse embedding of each text or sequence."""
    rows: list[SparseVector] = []
    for response, request in zip(responses, requests, strict=True):
        message = response.sparse_embeddings
        arrays = np.array(message.indices, np.int64), np.array(message.values, np.float32)
        rows += map(SparseVector, *(_split_rows(array, message.lengths, request) for array in arrays))
    return rows


def _decode_token_vectors(
    responses: Sequence[pb.AttendResponse], requests: Sequence[pb.AttendRequest]
) -> list[FloatArray]:
    """As `_decode`, the token vectors (T, d) of each text or sequence."""
    rows: list[FloatArray] = []
    for response, request in zip(responses, requests, strict=True):
        message = response.token_vectors
        vectors = widen(message.data_type, message.data).reshape(-1, message.width)
        rows += _split_rows(vectors, message.lengths, request)
    return rows


def _split_rows(rows: Array, lengths: Sequence[int], request: pb.AttendRequest) -> list[Array]:
    """The rows of each text or sequence of a request, by their numbers."""
    if len(lengths) != _count(request) or sum(lengths) != len(rows):
        raise ValueError(f"it does not contain {sum(lengths)} values of {_count(request)} texts")
    return np.split(rows, [*accumulate(lengths)][:-1])


def _count(request: pb.AttendRequest) -> int:
    return len(request.text.texts or request.token_ids.lengths)


def as_output_type(rows: Array, output_type: str) -> Array:
    """Rows as they are on the wire in their type: "binary" is bytes less 128, as int8."""
    return (rows ^ np.uint8(1 << 7)).view(np.int8) if output_type == "binary" else rows


def encode_stream_item(options: RequestOptions, item: EmbeddingInputs) -> EncodedCall[AttentionResult[Any]]:
    """Encodes one request of a stream, whose result states itself which texts were cut.

    Raises:
        InvalidArgumentError: As `encode_embeddings`, or there are more inputs than one request takes.
    """
    call = encode_embeddings(options, item, streams=True)
    if len(call.requests) > 1:
        raise invalid("inputs", f"at most {MAX_SEQUENCES} texts of 4 MiB in all", "more for one request")

    def decode(responses: Sequence[pb.AttendResponse]) -> AttentionResult[Any]:
        return result_of(responses[0], call.decoder(responses))

    return EncodedCall(call.requests, decode)


def encode_tokenize(
    options: RequestOptions, inputs: str | Texts, *, omits_special: bool, **text_options: Any
) -> tuple[pb.TokenizeRequest, Callable[[pb.TokenizeResponse], Any]]:
    """The request for the tokens of one text or of several, and what decodes its response.

    Raises:
        InvalidArgumentError: An argument has a wrong type or value.
    """
    form, strings = texts("texts", inputs)
    request = pb.TokenizeRequest(model_name=options.model, model_version=options.version)
    request.omit_special_tokens = omits_special
    fill_texts("texts", request.text.texts, strings)
    fill_text_options(request.text, **text_options)

    def decode(response: pb.TokenizeResponse) -> Any:
        ends, bounds = accumulate(response.token_ids.lengths, initial=0), response.token_offsets
        ids, special = np.array(response.token_ids.ids, np.int64), np.array(response.special, np.bool_)
        offsets = np.array([bounds.starts, bounds.ends], np.int64).T
        tokenized = [
            TokenizedText(ids[part], tuple(response.tokens[part]), offsets[part], special[part])
            for part in starmap(slice, pairwise(ends))
        ]
        return tokenized[0] if form is InputForm.SINGLE else tokenized

    return request, decode


def _read_outputs(embed: EmbeddingInputs, spans: Any) -> Sequence[str]:
    """What is computed of each text; checks the options that go with it."""
    if embed.sparse and embed.outputs is not None:
        raise invalid("sparse", "False, because `outputs` names what to return", embed.sparse)
    outputs = ["sparse" if embed.sparse else "dense"] if embed.outputs is None else items_of(embed.outputs)
    if not outputs or not all(isinstance(output, str) and output in OUTPUTS for output in outputs):
        raise invalid("outputs", f"one or more of {', '.join(OUTPUTS)}, in a list", repr(embed.outputs))
    for field, output in OPTIONS_OF_OUTPUTS.items():
        if getattr(embed, field) is not None and output not in outputs:
            raise invalid(field, f"None without {output} embeddings", repr(getattr(embed, field)))
    if spans is not None and {*outputs} != {"dense"}:
        raise invalid("spans", "None, because only dense embeddings have parts", type_name(spans))
    return outputs


def _read_inputs(embed: EmbeddingInputs) -> tuple[InputForm, Sequence[Any], str]:
    """The form of the inputs, the texts or the ids of each sequence, and what their spans count."""
    inputs: Any = embed.inputs
    items = [inputs] if isinstance(inputs, str) else items_of(inputs)
    if items and isinstance(items[0], str):
        if not isinstance(embed.prompt, str | None):
            raise invalid("prompt", "a str, the name of a prompt", type_name(embed.prompt))
        return *texts("inputs", inputs), "character"
    for field in TEXT_OPTIONS:
        if getattr(embed, field) is not None:
            raise invalid(field, "None, because token ids are not texts", getattr(embed, field))
    sequences = integers("inputs", inputs)
    if len(sequences.leading) > 1:
        raise invalid("inputs", "(T,), (B, T) or a list of (T,)", f"leading axes {sequences.leading}")
    ids, ends = sequences.numbers, accumulate(sequences.lengths, initial=0)
    return sequences.form, [ids[start:end] for start, end in pairwise(ends)], "token"


def _request(
    options: RequestOptions,
    embed: EmbeddingInputs,
    outputs: Sequence[str],
    items: Sequence[Any],
    spans: Sequence[Spans] | None,
) -> pb.AttendRequest:
    """The request of some of the texts, or of the ids of some sequences."""
    request = request_of(options)
    if "dense" in outputs:
        request.embedding.SetInParent()
    if "sparse" in outputs:
        request.sparse.SetInParent()
        request.sparse.top_k = 0 if embed.top_k is None else whole_number("top_k", embed.top_k, 1, MAX_INDEX)
    request.return_token_vectors = "token_vectors" in outputs
    if (data_type := OUTPUT_TYPES[embed.output_type]) is not None:
        request.output_data_type = data_type
    if embed.normalised is not None:
        request.embedding.normalised = bool(embed.normalised)
    if embed.dimensions is not None:
        request.embedding.dimensions = whole_number("dimensions", embed.dimensions, 1, 2**31 - 1)
    if spans is not None:
        rows = np.concatenate(spans)
        request.embedding.spans.lengths.extend(map(len, spans))
        request.embedding.spans.starts.extend(rows[:, 0].tolist())
        request.embedding.spans.ends.extend(rows[:, 1].tolist())
    if not isinstance(items[0], str):
        request.token_ids.lengths.extend(map(len, items))
        request.token_ids.ids.extend(chain.from_iterable(items))
        return request
    fill_texts("inputs", request.text.texts, items)
    fill_text_options(request.text, **{name: getattr(embed, name) for name in TEXT_OPTIONS})
    return request


def _read_spans(spans: Any, ends: Sequence[int], unit: str, form: InputForm) -> list[Spans] | None:
    """The spans of each text or sequence, (n, 2); None without spans.

    Args:
        spans: Pairs of start and end: a list of them for one text, otherwise a list of lists.
        ends: The exclusive upper bound of the spans of each text.
        unit: What they count, for errors.
        form: The form of the inputs.

    Raises:
        InvalidArgumentError: They are not integers in pairs, are for more or fewer texts, or one of them is
            empty or reversed or not within its text.
    """
    if spans is None:
        return None
    if form is InputForm.SINGLE:
        return [_read_pairs("spans", spans, ends[0], unit)]
    items = list(spans) if isinstance(spans, np.ndarray) and spans.ndim > 1 else items_of(spans)
    if items is None or len(items) != len(ends):
        actual = type_name(spans) if items is None else len(items)
        raise invalid("spans", f"a list of (start, end) for each input, {len(ends)}", actual)
    pairs = enumerate(zip(items, ends, strict=True))
    return [_read_pairs(f"spans[{index}]", item, end, unit) for index, (item, end) in pairs]


def _read_pairs(field: str, spans: ArrayLike, end: int, unit: str) -> Spans:
    array = as_array(field, spans)
    rows = np.empty((0, 2), np.int64) if array.shape[:1] == (0,) else as_integers(field, array)
    if rows.shape[1:] != (2,):
        raise invalid(field, "a list of (start, end)", f"shape {rows.shape}")
    (wrong,) = np.nonzero((rows[:, 0] < 0) | (rows[:, 0] >= rows[:, 1]) | (rows[:, 1] > end))
    if wrong.size:
        expected = f"0 <= start < end <= {end}, the number of {unit}s"
        raise invalid(f"{field}[{wrong[0]}]", expected, tuple(rows[wrong[0]].tolist()))
    return rows
