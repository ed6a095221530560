"""MaxSim of one query with stored documents: a server over gRPC, beside NumPy on arrays of this process.

Does not tell how a server fares with several callers, or whose query is longer than its run.
"""

import time
from collections.abc import Callable
from statistics import median

import numpy as np
from attention_client import AttentionClient

DOCUMENTS, TOKENS, QUERY_TOKENS, ROUNDS = 1000, 180, 32, 25
LETTERS = np.array([*"abcdefghijklmnopqrstuvwxyz", *" " * 6])
TIMEOUT = 600


def compare(target: str, model: str) -> str:
    """Calls both in turn, and returns their medians as text; the server encodes the query in each call."""
    noise = np.random.default_rng(0)
    long = ["".join(noise.choice(LETTERS, 16 * TOKENS)) for _ in range(DOCUMENTS)]
    with AttentionClient(target, timeout=TIMEOUT) as client:
        tokenized = [client.tokenize(model, text, input_kind="document") for text in long]
        documents = [text[: row.offsets[TOKENS - 2, 1]] for text, row in zip(long, tokenized, strict=True)]
        query = documents[0][: 4 * QUERY_TOKENS]
        stored = client.context(model, texts=documents, truncate=True)
        width = client.embed(model, query, outputs=["token_vectors"], truncate=True).token_vectors.shape[1]
        rows = noise.standard_normal((stored.rows, width), np.float32)
        queries = noise.standard_normal((QUERY_TOKENS, width), np.float32)
        starts = np.linspace(0, stored.rows, DOCUMENTS, endpoint=False).astype(int)
        calls: dict[str, Callable[[], object]] = {
            "server": lambda: client.rerank(model, query, context=stored, truncate=True),
            "numpy": lambda: np.maximum.reduceat(queries @ rows.T, starts, axis=1).sum(axis=0),
        }
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - started)
        stored.drop()
    server, numpy = (1000 * median(seconds[name]) for name in ("server", "numpy"))
    rate = f"the server has {numpy / server:.2f} of NumPy's rate"
    return f"server {server:.1f} ms, NumPy {numpy:.1f} ms: {rate}"
