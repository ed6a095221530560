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
from itertools import groupby, islice
from operator import itemgetter

import numpy as np

from attention_serving.artifact.encoder import CONTEXT_VECTORS, SCORES, LateInteractionFacts, has_vectors
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests import validation
from attention_serving.server.engine.requests.outputs import FLOAT_BYTES
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

DOCUMENT = "document"
# The score of a document without vectors, as in sentence-transformers.
EMPTY_SCORE = np.float32(-1e9)
# Numbers of a block, which stay in the cache: vectors of documents, or their products with a query. And
# products of a step, which take about ten milliseconds.
BLOCK_NUMBERS, STEP_PRODUCTS = 1 << 19, 1 << 22
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
        token_counts: Number of tokens of each pair or query.
        truncated: Indices of the pairs or queries that were cut.
        context: The documents that queries are compared with; None for pairs.
    """

    facts: LateInteractionFacts
    places: Sequence[tuple[int, ...]]
    token_counts: Sequence[int]
    truncated: Sequence[int]
    context: Context | None = None

    def steps(self, result: Result) -> Iterator[Callable[[], object]]:
        """What computes the scores, of which the result consists from the first step on.

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
        for place, pairs in groupby(indices, itemgetter(0)):
            documents = [vectors[document] for _, document in pairs]
            column, scores = scores[: len(documents), 0, 0], scores[len(documents) :]
            window = partial(_concatenate, documents)
            yield from self._compare(vectors[place], np.array([*map(len, documents)]), window, column)

    def _compare(
        self, query: Array, lengths: Array, window: Callable[[slice, int, int], Array], scores: Array
    ) -> Iterator[Callable[[], object]]:
        """What sets the scores (N,) of a query (Tq, d) with documents of so many vectors (N,).

        `window` returns the vectors of a block of documents.
        """

        def score(block: tuple[slice, int, int]) -> None:
            scores[block[0]] = score_documents(query, window(*block), lengths[block[0]])
            if self.facts.similarity == "meanmaxsim":
                scores[block[0]] /= max(1, len(query))

        def run(step: Sequence[tuple[slice, int, int]]) -> None:
            for _ in POOL.map(score, step):
                pass

        most = max(BLOCK_NUMBERS // max(query.shape), int(lengths.max()))
        parts, count = blocks(np.cumsum(lengths), most), STEP_PRODUCTS // (most * max(1, len(query)))
        while step := list(islice(parts, max(THREADS, count))):
            yield partial(run, step)


def blocks(ends: Array, most: int) -> Iterator[tuple[slice, int, int]]:
    """Divides documents into blocks with at most so many vectors: no document has more.

    Args:
        ends: The cumulative sum of the number of vectors of each document (N,).
        most: Largest number of vectors of a block.

    Returns:
        The documents of each block, and the first and exclusive last of its vectors.
    """
    first, start = 0, 0
    while first < len(ends):
        last = int(np.searchsorted(ends, start + most, side="right"))
        end = int(ends[last - 1])
        yield slice(first, last), start, end
        first, start = last, end


def _concatenate(documents: Sequence[Array], part: slice, _start: int, _end: int) -> Array:
    return np.concatenate(documents[part])


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
    kind, facts = decoded.input_kind or DOCUMENT, _facts(model)
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
    (spec,), facts, context, count = model.inputs, _facts(model), model.context, len(decoded.texts)
    columns = {validation.QUERY: decoded.texts, DOCUMENT: decoded.second_texts}
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
    sequences, cut = list[list[int]](), set[int]()
    for kind, texts in columns.items():
        places = {text: len(kinds) + at for at, text in enumerate(dict.fromkeys(texts))}
        try:
            encoded = _tokenize(decoded, tuple(places), kind, model, limits, reservation)
        except InvalidRequestError:  # whose index should be that among all texts
            _tokenize(decoded, texts, kind, model, limits, reservation)
            raise
        sequences.append([places[text] for text in texts])
        cut |= {len(kinds) + at for at in encoded.truncated}
        kinds += [kind] * len(places)
        ids.append(encoded.inputs[spec.name])
    lengths = [length for part in ids for length in part.lengths]
    counts = ids[-1].lengths if context is None else context.tensors[DOCUMENT_LENGTHS]
    numbers = max(
        int(model.outputs[CONTEXT_VECTORS].axes[-1]), *ids[0].lengths
    )  # of a vector or its products
    block = min(numbers * int(sum(counts)), max(BLOCK_NUMBERS, numbers * int(max(counts))))
    reservation.add(2 * THREADS * FLOAT_BYTES * block + 2 * size)
    pairs = list(zip(*sequences, strict=True))
    comparison = Comparison(
        facts=facts,
        places=pairs,
        token_counts=[sum(lengths[at] for at in pair) for pair in pairs],
        truncated=[at for at, pair in enumerate(pairs) if cut.intersection(pair)],
        context=context,
    )
    inputs = {spec.name: Ragged(np.concatenate([part.rows for part in ids]), tuple(lengths))}
    return replace(encoded, inputs=inputs, kinds=tuple(kinds)), comparison


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
        output_names=(CONTEXT_VECTORS,),
        encoder_outputs=EncoderOutputs(frozenset({CONTEXT_VECTORS}), kind=kind),
        max_result_bytes=size,
    )
    return validation.tokenize_texts(request, model, replace(limits, max_result_bytes=size), reservation)
