"""Rows of a batch packed into requests: similar lengths together, each request of bounded size.

Notation: R rows of a batch, Tq query rows, Tk key rows, d elements of a row.
"""

from collections.abc import Iterator, Mapping

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


def pack(
    rows: Array, lengths: Mapping[Role, Array], model: ModelSpec, *, weights: bool
) -> Iterator[list[int]]:
    """Groups rows into requests.

    Args:
        rows: Numbers of the rows to compute, integers (n,).
        lengths: For each input the length of each row's sequence, integers (R,).
        model: The model.
        weights: Whether attention weights are computed too.

    Yields:
        The numbers of the rows of one request.
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
    width = max(model.output_width, *(width or 1 for width in model.input_widths.values()))
    longest = np.maximum(np.maximum(query, key), 1)
    most: Array = np.minimum(REQUEST_SEQUENCES, REQUEST_BYTES // (longest * width * FLOAT_BYTES))
    if weights:
        most = np.minimum(most, REQUEST_PAIRS // np.maximum(query * key, 1))
    return np.maximum(most, 1)
