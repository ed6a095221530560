"""Asks one document many questions: its keys and values are projected once and stored, as a context.

    python -m export cross-768x12 --out model_repository
    python -m server --model-repository model_repository
    python -m examples.stored_context --server 127.0.0.1:8001 --model cross-768x12

A question is a sequence of 6 query rows, and the document has 2,048 key and value rows. A sample of the
questions is also asked plainly: each request then carries the document, and the server projects it again.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from attention_client import AttendInputs, AttentionClient

QUESTION_ROWS, IN_FLIGHT = 6, 8


def ask(client: AttentionClient, model: str, questions: list[AttendInputs]) -> tuple[float, list[Any]]:
    """Questions per second with 8 in flight, and the context vectors."""
    started = time.perf_counter()
    results = list(client.attend_stream(model, questions, max_in_flight=IN_FLIGHT))
    rate = len(questions) / (time.perf_counter() - started)
    return rate, [result.context_vectors for result in results]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures both ways, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Ask one document many questions, with a stored context.")
    parser.add_argument("--server", default="127.0.0.1:8001", help="HOST:PORT (default: %(default)s)")
    parser.add_argument("--model", default="cross-768x12", help="of cross-attention (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=2048, help="of the document (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=1000, help="with the context (default: %(default)s)")
    parser.add_argument("--plain", type=int, default=40, help="asked plainly too (default: %(default)s)")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    with AttentionClient(options.server) as client:
        query, *tensors = (tensor for tensor in client.model(options.model).inputs if not tensor.optional)
        if not tensors:
            parser.error(f"{options.model} does not compute cross-attention")
        document: list[Any] = [
            rng.standard_normal((options.rows, int(tensor.axes[-1])), np.float32) for tensor in tensors
        ]
        questions = rng.standard_normal((options.questions, QUESTION_ROWS, int(query.axes[-1])), np.float32)

        sample = [AttendInputs(question, *document) for question in questions[: options.plain]]
        plain, expected = ask(client, options.model, sample)
        with client.context(options.model, *document) as memory:
            requests = [AttendInputs(question, context=memory) for question in questions]
            stored, results = ask(client, options.model, requests)
    difference = max(float(np.abs(a - b).max()) for a, b in zip(results, expected, strict=False))
    print(f"plain: {plain:,.0f} questions/s")
    print(f"with a context of {memory.rows:,} rows: {stored:,.0f} questions/s")
    print(f"ratio: {stored / plain:.1f}")
    print(f"largest difference: {difference:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
