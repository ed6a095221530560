"""MaxSim of one query with stored documents: a server over gRPC, beside NumPy on arrays of this process.

Does not tell how a server fares with several callers, or whose query is longer than its run.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from attention_client import AttentionClient

LETTERS = np.array([*"abcdefghijklmnopqrstuvwxyz", *" " * 6])
CHARACTERS = 16  # at most, of a token
TIMEOUT = 600


def compare(
    target: str, model: str, documents: int, tokens: int, query_tokens: int, rounds: int
) -> dict[str, float]:
    """Measures both in turn; the query is encoded in each call of the server.

    Args:
        target: HOST:PORT of the server.
        model: Name of a multi-vector encoder.
        documents: Number of stored documents.
        tokens: Tokens of each.
        query_tokens: Tokens of the query.
        rounds: Calls of each.

    Returns:
        The medians in milliseconds, by name.
    """
    noise = np.random.default_rng(0)
    with AttentionClient(target, timeout=TIMEOUT) as client:

        def text(count: int, kind: Any) -> str:
            """A text of so many tokens, as far as they end between two characters."""
            letters = "".join(noise.choice(LETTERS, CHARACTERS * count))
            return letters[: client.tokenize(model, letters, input_kind=kind).offsets[count - 2, 1]]

        texts = [text(tokens, "document") for _ in range(documents)]
        query, stored = text(query_tokens, "query"), client.context(model, texts=texts, truncate=True)
        (spec,) = (spec for spec in client.model(model).outputs if spec.name == "context_vectors")
        width = int(spec.axes[-1])
        rows = noise.standard_normal((stored.rows, width), np.float32)
        queries = noise.standard_normal((query_tokens, width), np.float32)
        starts = np.linspace(0, stored.rows, documents, endpoint=False).astype(int)
        calls: dict[str, Callable[[], object]] = {
            "server": lambda: client.rerank(model, query, context=stored, truncate=True),
            "numpy": lambda: np.maximum.reduceat(queries @ rows.T, starts, axis=1).sum(axis=0),
        }
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - started)
        stored.drop()
    return {name: 1000 * median(durations) for name, durations in seconds.items()}
