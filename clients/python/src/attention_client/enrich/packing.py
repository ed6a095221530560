"""Sequences of a batch packed into requests: similar lengths together, each request of bounded size.

Notation: R sequences of a batch, Tq query rows, Tk key rows, d elements of a row.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from attention_client.enrich.backend import Array, ModelSpec, Role
from attention_client.enrich.tables import BATCH_BYTES

# A request holds at most this many sequences, and this many bytes of input or of result unless it holds one.
REQUEST_SEQUENCES = 64
REQUEST_BYTES = 1 << 20
# Attention weights per head of a request: 16 MiB for 16 heads.
REQUEST_PAIRS = 1 << 18
# How many requests a full batch makes at least.
BATCH_REQUESTS = BATCH_BYTES // REQUEST_BYTES
FLOAT_BYTES = 4
# Tokens of a request to a text encoder. Larger runs leave the caches, and each of their tokens takes longer.
REQUEST_TOKENS = 2048
# A guess, for texts that are not encoded here.
CHARACTERS_PER_TOKEN = 4


def sizes(values: Sequence[Any]) -> Array:
    """The length of each sequence, about that of a text; -1 if there is none."""
    return np.array([_size(value) for value in values], np.int64)


def _size(value: Any) -> int:
    if value is None:
        return -1
    return -(-len(value) // CHARACTERS_PER_TOKEN) if isinstance(value, str) else len(value)


def pack(
    rows: Array, lengths: Mapping[Role, Array], model: ModelSpec, *, weights: bool
) -> Iterator[list[int]]:
    """Groups sequences into requests.

    Args:
        rows: Numbers of the sequences to compute, integers (n,).
        lengths: For each input the length of each sequence, integers (R,).
        model: The model.
        weights: Whether attention weights are computed too.

    Yields:
        The numbers of the sequences of one request.
    """
    columns = list(lengths.values())
    query, key = columns[0][rows], columns[-1][rows]
    order = np.lexsort((key, query))
    most = _sequences_per_request(query[order], key[order], model, weights=weights)
    ordered, start = rows[order].tolist(), 0
    for index, limit in enumerate(most.tolist()):
        if index - start >= limit:
            yield ordered[start:index]
            start = index
    if ordered:
        yield ordered[start:]


def _sequences_per_request(query: Array, key: Array, model: ModelSpec, *, weights: bool) -> Array:
    """How many sequences of lengths Tq and Tk a request may hold; at least one."""
    longest = np.maximum(np.maximum(query, key), 1)
    if model.encoder is not None:
        few: Array = np.clip(REQUEST_TOKENS // longest, 1, REQUEST_SEQUENCES)
        return few
    width = max(model.output_width, *(width or 1 for width in model.input_widths.values()))
    most: Array = np.minimum(REQUEST_SEQUENCES, REQUEST_BYTES // (longest * width * FLOAT_BYTES))
    if weights:
        most = np.minimum(most, REQUEST_PAIRS // np.maximum(query * key, 1))
    return np.maximum(most, 1)
