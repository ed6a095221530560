"""Late interaction: texts are compared with a query token by token, as ColBERT does.

    python -m examples.late_interaction "What is sweet?" --model my-bert "Cakes are." "Lemons are not."

The server computes the vectors of all tokens. The score of a text is, for each token of the query, the
largest cosine with any token of the text, added up. Source: Khattab and Zaharia, "ColBERT: Efficient and
Effective Passage Search via Contextualized Late Interaction over BERT" (2020), section 3.3.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from attention_client import AttentionClient, AttentionClientError
from numpy.typing import NDArray

Vectors = NDArray[np.float32]


def unit(vectors: Vectors) -> Vectors:
    """The vectors (T, d) with length 1."""
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)


def max_sim(query: Vectors, text: Vectors) -> float:
    """The score of a text, from the unit vectors of its tokens (T, d) and of the query's (Tq, d)."""
    return float((query @ text.T).max(axis=1).sum())


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the texts, the most relevant first, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Sort texts by late interaction with a query.")
    parser.add_argument("query")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--server", default="127.0.0.1:8001", help="HOST:PORT (default: %(default)s)")
    parser.add_argument("--model", required=True, help="name of a text encoder")
    options = parser.parse_args(arguments)
    try:
        with AttentionClient(options.server) as client:
            query, *texts = client.attend_text(options.model, [options.query, *options.texts]).context_vectors
    except AttentionClientError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    scores = np.array([max_sim(unit(query), unit(text)) for text in texts])
    for index in np.argsort(-scores, kind="stable"):
        print(f"{scores[index]:.3f}  {options.texts[index]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
