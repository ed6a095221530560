"""Scores of a multi-vector encoder: MaxSim of queries with documents, in one request or stored.

Queries and documents of a request run as its sequences, in batches with those of other requests. The scores
are computed afterwards, in steps, between which threads that do other work can do it.

Source: Khattab and Zaharia, "ColBERT: Efficient and Effective Passage Search via Contextualized Late
Interaction over BERT" (2020), section 3.3.

Shapes: Tq token vectors of a query, N documents, R token vectors of several documents, d width.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from attention_serving.artifact.encoder import CONTEXT_VECTORS, SCORES, LateInteractionFacts, has_vectors
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.outputs import FLOAT_BYTES
from attention_serving.server.engine.requests.tokenizer import TEXT
from attention_serving.server.engine.requests.validation import (
    INPUT_KIND,
    PAIRS,
    PROMPT,
    QUERY,
    tokenize_texts,
)
from attention_serving.server.engine.types import (
    DOCUMENT_LENGTHS,
    DOCUMENT_VECTORS,
    Array,
    Context,
    DecodedRequest,
    EncoderOutputs,
    Ragged,
    Result,
    Text,
)

# A part of the work after a run.
Step: TypeAlias = Callable[[], object]
# The vectors (R, d) of some documents, given their slice, and the first and exclusive last of the vectors.
Window: TypeAlias = Callable[[slice, int, int], Array]
DOCUMENT = "document"
# The score of a document without vectors, of which a mean is taken too, as in sentence-transformers.
EMPTY_SCORE = np.float32(-1e9)
# Numbers of a block, which stay in the cache: vectors of documents, or their products with a query. And
# products of a step, which take about two milliseconds of a core.
BLOCK_NUMBERS, STEP_PRODUCTS = 1 << 19, 1 << 19
# Threads that compute steps at a time.
THREADS = 2
# The part of the memory of requests that token vectors may take which are not returned.
RESULT_SHARE = 4


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """What is compared once the sequences of a request have run: pairs, or queries with a context.

    Attributes:
        facts: Those of the model.
        places: The sequences of each pair, or the one of each query.
        token_counts: Number of tokens of each pair or query.
        truncated: Indices of the pairs or queries that were cut.
        context: The documents that queries are compared with; None for pairs.
    """

    facts: LateInteractionFacts
    places: Sequence[tuple[int, ...]]
    token_counts: Sequence[int]
    truncated: Sequence[int]
    context: Context | None = None

    def steps(self, result: Result) -> Iterator[Step]:
        """What computes the scores, of which the result consists from the first step on; in any order.

        `SCORES` has an array (1, 1) for each pair, or (N, 1) for each query to a context. Equal pairs have
        equal scores.
        """
        vectors, context = result.outputs[CONTEXT_VECTORS], self.context
        if context is not None:
            rows, lengths = context.tensors[DOCUMENT_VECTORS], context.tensors[DOCUMENT_LENGTHS]
            scores = np.empty((len(vectors), len(lengths), 1), np.float32)
            result.outputs = {SCORES: [scores[at] for (at,) in self.places]}
            for query, column in zip(vectors, scores, strict=True):
                yield from self._compare(query, lengths, lambda _, start, end: rows[start:end], column[:, 0])
            return
        indices = {pair: at for at, pair in enumerate(sorted(set(self.places)))}
        scores = np.empty((len(indices), 1, 1), np.float32)
        result.outputs = {SCORES: [scores[indices[pair]] for pair in self.places]}
        for place, group in groupby(indices, itemgetter(0)):
            pairs = list(group)
            documents = [vectors[document] for _, document in pairs]
            window = partial(_concatenate, documents)
            column = scores[indices[pairs[0]] :][: len(pairs), 0, 0]
            yield from self._compare(vectors[place], np.array([*map(len, documents)]), window, column)

    def _compare(self, query: Array, lengths: Array, window: Window, scores: Array) -> Iterator[Step]:
        """What sets the scores (N,) of a query (Tq, d) with documents of so many vectors (N,)."""
        most, parts, products = BLOCK_NUMBERS // max(query.shape), list[tuple[slice, int, int]](), 0

        def score(parts: Sequence[tuple[slice, int, int]]) -> None:
            for part, start, end in parts:
                scores[part] = score_documents(query, window(part, start, end), lengths[part])
                if self.facts.similarity == "meanmaxsim":
                    scores[part] /= max(1, len(query))

        for part, start, end in blocks(np.cumsum(lengths), most):
            parts.append((part, start, end))
            products += len(query) * (end - start)
            if products >= STEP_PRODUCTS or part.stop == len(lengths):
                yield partial(score, parts)
                parts, products = [], 0


def _concatenate(documents: Sequence[Array], part: slice, _start: int, _end: int) -> Array:
    """A `Window` of documents."""
    return np.concatenate(documents[part])


def blocks(ends: Array, most: int) -> Iterator[tuple[slice, int, int]]:
    """Divides documents into slices with so many vectors, or with one document that has more.

    Args:
        ends: The cumulative sum of the number of vectors of each document (N,).
        most: Largest number of vectors of a slice.

    Returns:
        Each slice, and the first and exclusive last of its vectors.
    """
    first, start = 0, 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, start + most, side="right")))
        end = int(ends[last - 1])
        yield slice(first, last), start, end
        first, start = last, end


@np.errstate(over="ignore", invalid="ignore")
def score_documents(query: Array, rows: Array, lengths: Array) -> Array:
    """MaxSim: the sum, over the vectors of a query, of the largest dot product with a vector of a document.

    Args:
        query: (Tq, d).
        rows: The vectors of all documents, one after the other (R, d).
        lengths: Number of vectors of each document (N,).

    Returns:
        float32 (N,): `EMPTY_SCORE` for a document without vectors, otherwise 0 for a query without any.
    """
    scores, starts = np.full(len(lengths), EMPTY_SCORE), np.cumsum(lengths) - lengths
    (filled,) = np.nonzero(lengths)
    if filled.size:
        products = query @ rows.T  # (Tq, R)
        scores[filled] = np.maximum.reduceat(products, starts[filled], axis=1).sum(axis=0)
    return scores


def tokenize_documents(
    decoded: DecodedRequest, model: LoadedModel, limits: Limits, reservation: Reservation
) -> tuple[DecodedRequest, Array]:
    """The request with token ids in place of texts, which are documents unless their kind is set.

    Returns:
        The request, whose result is not to be returned; and the number of vectors of each text (N,).

    Raises:
        InvalidRequestError: It states what only other requests may state.
        EngineError: As `tokenize_texts`.
    """
    if decoded.second_texts:
        raise InvalidRequestError(PAIRS, "must be empty: each text is a document")
    kind, facts = decoded.input_kind or DOCUMENT, model.late_interaction
    if facts is None:
        raise ValueError(f"{model.name} is not a multi-vector encoder")
    encoded = _tokenize(decoded, decoded.texts, kind, model, limits, reservation)
    (ids,) = encoded.inputs.values()
    counts = np.array(ids.lengths, np.int64)
    kept, starts = has_vectors(ids.rows, facts, kind), counts.cumsum() - counts
    if facts.skips_first:
        kept[starts] = False
    return encoded, np.add.reduceat(kept, starts, dtype=np.int64)


def tokenize_comparison(
    decoded: DecodedRequest, model: LoadedModel, limits: Limits, reservation: Reservation
) -> tuple[DecodedRequest, Comparison]:
    """As `tokenize_documents`, of pairs of a query and a document, or of queries to the model's context.

    Each distinct text is one sequence.

    Returns:
        The request, and what is compared after its run.
    """
    (spec,), facts, context = model.inputs, model.late_interaction, model.context
    if facts is None or model.encoder is None:
        raise ValueError(f"{model.name} is not a multi-vector encoder")
    columns, count = {QUERY: decoded.texts, DOCUMENT: decoded.second_texts}, len(decoded.texts)
    limits.check_sequences(TEXT, count)
    if context is not None:
        if decoded.second_texts:
            raise InvalidRequestError(PAIRS, "cannot be combined with context_id, which has the documents")
        columns, count = {decoded.input_kind or QUERY: decoded.texts}, count * context.documents
    elif decoded.input_kind:
        raise InvalidRequestError(INPUT_KIND, "must not be set: each pair is a query and a document")
    elif len(decoded.second_texts) != count:
        raise InvalidRequestError(PAIRS, f"has {len(decoded.second_texts)} texts; text.texts has {count}")
    if (size := FLOAT_BYTES * count) > limits.max_result_bytes:
        problem = f"there would be {count} scores of {FLOAT_BYTES} bytes"
        raise LimitExceededError(TEXT, f"{problem}; the limit is {limits.max_result_bytes} bytes")
    rows, lengths, kinds = list[Array](), list[int](), list[str]()
    sequences, cut, longest = list[list[int]](), set[int](), list[int]()
    for kind, texts in columns.items():
        distinct = tuple(dict.fromkeys(texts))
        places = {text: len(lengths) + at for at, text in enumerate(distinct)}
        try:
            encoded = _tokenize(decoded, distinct, kind, model, limits, reservation)
        except InvalidRequestError:  # whose index should be that among all texts
            _tokenize(decoded, texts, kind, model, limits, reservation)
            raise
        ids = encoded.inputs[spec.name]
        sequences.append([places[text] for text in texts])
        cut |= {len(lengths) + at for at in encoded.truncated}
        lengths += ids.lengths
        kinds += [kind] * len(distinct)
        longest.append(max(ids.lengths))
        rows.append(ids.rows)
    if context is not None:
        longest.append(int(context.tensors[DOCUMENT_LENGTHS].max()))
    block = max(BLOCK_NUMBERS, longest[1] * max(longest[0], model.encoder.width))
    reservation.add(2 * THREADS * FLOAT_BYTES * block + 2 * size)
    places_of_texts = list(zip(*sequences, strict=True))
    comparison = Comparison(
        facts=facts,
        places=places_of_texts,
        token_counts=[sum(lengths[at] for at in places) for places in places_of_texts],
        truncated=[at for at, places in enumerate(places_of_texts) if cut.intersection(places)],
        context=context,
    )
    inputs = {spec.name: Ragged(np.concatenate(rows), tuple(lengths))}
    return dataclasses.replace(encoded, inputs=inputs, kinds=tuple(kinds)), comparison


def _tokenize(
    decoded: DecodedRequest,
    texts: tuple[Text, ...],
    kind: str,
    model: LoadedModel,
    limits: Limits,
    reservation: Reservation,
) -> DecodedRequest:
    """The request with the token ids of texts of a kind, whose vectors are not returned."""
    if decoded.prompt is not None:
        raise InvalidRequestError(PROMPT, "must not be set: queries and documents have those of the model")
    size = max(limits.max_result_bytes, limits.max_in_flight_bytes // RESULT_SHARE)
    request = dataclasses.replace(
        decoded,
        texts=texts,
        second_texts=(),
        input_kind=kind,
        output_names=(CONTEXT_VECTORS,),
        encoder_outputs=EncoderOutputs(frozenset({CONTEXT_VECTORS}), kind=kind),
        max_result_bytes=size,
    )
    return tokenize_texts(request, model, dataclasses.replace(limits, max_result_bytes=size), reservation)
