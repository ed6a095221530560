"""Scores of a multi-vector encoder: MaxSim of queries with documents, in one request or stored.

Queries and documents of a request run as its sequences, in batches with those of other requests. The scores
are computed afterwards, in steps, between which the threads of their caller can do other work.

Source: Khattab and Zaharia, "ColBERT: Efficient and Effective Passage Search via Contextualized Late
Interaction over BERT" (2020), section 3.3.

Shapes: Tq token vectors of a query, N documents, R token vectors of several documents, d width.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import call

import numpy as np

from attention_serving.artifact.encoder import CONTEXT_VECTORS, SCORES, LateInteractionFacts, has_vectors
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests import validation
from attention_serving.server.engine.requests.outputs import FLOAT_BYTES
from attention_serving.server.engine.requests.request import split
from attention_serving.server.engine.requests.tokenizer import TEXT
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

# The score of a document without vectors, as in sentence-transformers.
EMPTY_SCORE = np.float32(-1e9)
# Numbers of a block, which stay in the cache: vectors of documents, or their products with a query. And the
# blocks of a step, which takes about ten milliseconds.
BLOCK_NUMBERS, STEP_BLOCKS = 1 << 19, 16
# Blocks that are computed at a time, and the threads that do it. NumPy lets them run side by side.
THREADS = 2
POOL = ThreadPoolExecutor(THREADS, "maxsim")
# The part of the memory of requests that token vectors may take which are not returned.
RESULT_SHARE = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """What is compared once the sequences of a request have run: pairs, or queries with a context.

    Attributes:
        facts: Those of the model.
        places: The sequences of each pair, or the one of each query.
        context: The documents that queries are compared with; None for pairs.
    """

    facts: LateInteractionFacts
    places: Sequence[tuple[int, ...]]
    context: Context | None = None

    def steps(self, result: Result) -> Iterator[Callable[[], object]]:
        """What computes the scores, of which the result consists from the first step on.

        `SCORES` has an array (1, 1) for each pair, or (N, 1) for each query to a context.
        """
        count = 1 if self.context is None else self.context.documents
        scores = np.empty((len(self.places), count, 1), np.float32)
        blocks = self._blocks(result.outputs[CONTEXT_VECTORS], scores[..., 0])
        result.outputs = {SCORES: [*scores]}
        while step := list(islice(blocks, STEP_BLOCKS)):
            yield partial(_compute, step)

    def _blocks(self, vectors: Sequence[Array], scores: Array) -> Iterator[Callable[[], object]]:
        """What sets the scores (queries, N) or (pairs, 1), block by block."""
        if self.context is not None:
            rows, lengths = (self.context.tensors[name] for name in (DOCUMENT_VECTORS, DOCUMENT_LENGTHS))
            for (place,), row in zip(self.places, scores, strict=True):
                query = vectors[place]
                for part, window in divide(lengths, query):
                    yield partial(self._score, query, [rows[window]], lengths[part], row, part)
            return
        pairs_of_queries: dict[int, list[int]] = {}
        for at, (place, _) in enumerate(self.places):
            pairs_of_queries.setdefault(place, []).append(at)
        for place, pairs in pairs_of_queries.items():
            documents = [vectors[self.places[at][1]] for at in pairs]
            query, lengths = vectors[place], np.array([*map(len, documents)])
            for part, _ in divide(lengths, query):
                yield partial(self._score, query, documents[part], lengths[part], scores[:, 0], pairs[part])

    def _score(
        self, query: Array, parts: Sequence[Array], lengths: Array, scores: Array, at: slice | list[int]
    ) -> None:
        """Sets some of the scores of a query, with documents of these lengths in one array or several."""
        scores[at] = score_documents(query, np.concatenate(parts) if len(parts) > 1 else parts[0], lengths)
        if self.facts.similarity == "meanmaxsim":
            scores[at] /= max(1, len(query))


def _compute(step: Sequence[Callable[[], object]]) -> None:
    for _ in POOL.map(call, step):
        pass


def divide(lengths: Array, query: Array) -> Iterator[tuple[slice, slice]]:
    """Divides documents with so many vectors (N,) into blocks, for a query (Tq, d).

    Returns:
        The documents of each block, and their vectors.
    """
    most, ends = max(BLOCK_NUMBERS // max(query.shape), int(lengths.max())), np.cumsum(lengths)
    first, start = 0, 0
    while first < len(ends):
        last = int(np.searchsorted(ends, start + most, side="right"))
        end = int(ends[last - 1])
        yield slice(first, last), slice(start, end)
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
        raise InvalidRequestError(validation.PAIRS, "must be empty: each text is a document")
    kind, facts = decoded.input_kind or validation.DOCUMENT, _facts(model)
    encoded = _tokenize(decoded, decoded.texts, kind, model, limits, reservation)
    (ids,) = encoded.inputs.values()
    return encoded, np.array([has_vectors(part, facts, kind).sum() for part in split(ids.rows, ids.lengths)])


def tokenize_comparison(
    decoded: DecodedRequest, model: LoadedModel, limits: Limits, reservation: Reservation
) -> tuple[DecodedRequest, Comparison]:
    """As `tokenize_documents`, of pairs of a query and a document, or of queries to the model's context.

    Each distinct text is one sequence.

    Returns:
        The request, and what is compared after its run.
    """
    context, count = model.context, len(decoded.texts)
    columns = {validation.QUERY: decoded.texts, validation.DOCUMENT: decoded.second_texts}
    limits.check_sequences(TEXT, count)
    if context is not None:
        if decoded.second_texts:
            problem = "cannot be combined with context_id, which has the documents"
            raise InvalidRequestError(validation.PAIRS, problem)
        columns, count = {decoded.input_kind or validation.QUERY: decoded.texts}, count * context.documents
    elif decoded.input_kind:
        problem = "must not be set: each pair is a query and a document"
        raise InvalidRequestError(validation.INPUT_KIND, problem)
    elif len(decoded.second_texts) != count:
        problem = f"has {len(decoded.second_texts)} texts; text.texts has {count}"
        raise InvalidRequestError(validation.PAIRS, problem)
    if (size := FLOAT_BYTES * count) > limits.max_result_bytes:
        problem = f"{count} scores would have {size} bytes; the limit is {limits.max_result_bytes}"
        raise LimitExceededError(TEXT, problem)
    ids, kinds = list[Ragged](), list[str]()
    sequences, cut = list[list[int]](), list[int]()
    for kind, texts in columns.items():
        places = {text: len(kinds) + at for at, text in enumerate(dict.fromkeys(texts))}
        try:
            encoded = _tokenize(decoded, tuple(places), kind, model, limits, reservation)
        except InvalidRequestError:  # whose index should be that among all texts
            _tokenize(decoded, texts, kind, model, limits, reservation)
            raise
        sequences.append([places[text] for text in texts])
        cut += [len(kinds) + at for at in encoded.truncated]
        kinds += [kind] * len(places)
        ids += encoded.inputs.values()
    counts = np.array(ids[-1].lengths) if context is None else context.tensors[DOCUMENT_LENGTHS]
    # Of a vector, or of its products with a query.
    numbers = max(int(model.outputs[CONTEXT_VECTORS].axes[-1]), *ids[0].lengths)
    block = min(numbers * int(counts.sum()), max(BLOCK_NUMBERS, numbers * int(counts.max())))
    reservation.add(2 * THREADS * FLOAT_BYTES * block + 2 * size)
    lengths = tuple(length for part in ids for length in part.lengths)
    inputs = {model.inputs[0].name: Ragged(np.concatenate([part.rows for part in ids]), lengths)}
    request = replace(encoded, inputs=inputs, kinds=tuple(kinds), truncated=tuple(cut))
    return request, Comparison(facts=_facts(model), places=[*zip(*sequences, strict=True)], context=context)


def _facts(model: LoadedModel) -> LateInteractionFacts:
    if model.late_interaction is None:
        raise ValueError(f"{model.name} is not a multi-vector encoder")
    return model.late_interaction


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
        problem = "must not be set: queries and documents have those of the model"
        raise InvalidRequestError(validation.PROMPT, problem)
    size = max(limits.max_result_bytes, limits.max_in_flight_bytes // RESULT_SHARE)
    request = replace(
        decoded,
        texts=texts,
        second_texts=(),
        input_kind=kind,
        encoder_outputs=EncoderOutputs(frozenset({CONTEXT_VECTORS})),
        max_result_bytes=size,
    )
    return validation.tokenize_texts(request, model, replace(limits, max_result_bytes=size), reservation)
