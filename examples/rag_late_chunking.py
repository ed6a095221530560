"""Retrieval with late chunking: passages are embedded in the context of their whole text.

    python -m examples.rag_late_chunking "How long is the Elbe?" --model my-bert FILE...
    python -m examples.rag_late_chunking "How long is the Elbe?" --model my-bert      # two short texts

Embedded alone, "It is 1,094 kilometres long." does not say what is long. Here each text goes through the
encoder once, as a whole, and the vector of a passage is pooled from the vectors of its own tokens, which have
attended to all of the text. The question is compared with every passage by the cosine, in NumPy. The passages
that are printed are those to put into the prompt of a language model.

Exit status: 0 if passages were found; 1 if there are none, or if the server refuses a text.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from attention_client import AttentionClient, AttentionClientError
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
TEXTS = {
    "Elbe": "The Elbe rises in the Giant Mountains. It flows through Dresden and Hamburg. It is 1,094 "
    "kilometres long. Near Cuxhaven it reaches the North Sea.",
    "Inn": "The Inn begins at a lake near the Maloja Pass. It gave Innsbruck its name. It is 518 kilometres "
    "long. In Passau it flows into the Danube.",
}
# Ends with a mark before a space, or with the text.
SENTENCE = re.compile(r"\S.*?(?:[.!?]+(?=\s|\Z)|(?=\s*\Z))", re.DOTALL)


class Passage(NamedTuple):
    """A part of a text."""

    source: str
    text: str


def split(text: str, length: int) -> list[tuple[int, int]]:
    """Offsets, in characters, of passages: sentences, joined until they have `length` characters."""
    spans: list[tuple[int, int]] = []
    for sentence in SENTENCE.finditer(text):
        start, end = spans[-1] if spans else (0, length)
        if end - start < length:
            spans[-1] = (start, sentence.end())
        else:
            spans.append(sentence.span())
    return spans


def embed_passages(
    client: AttentionClient, model: str, texts: Mapping[str, str], length: int
) -> tuple[list[Passage], Vectors]:
    """The passages of all texts, and their vectors (passages, d) of length 1."""
    spans = {name: offsets for name, text in texts.items() if (offsets := split(text, length))}
    passages = [Passage(name, texts[name][start:end]) for name in spans for start, end in spans[name]]
    if not passages:
        raise ValueError("the texts are empty")
    vectors = client.embed(model, [texts[name] for name in spans], spans=list(spans.values()))
    return passages, normalise(np.concatenate(vectors))


def normalise(vectors: Vectors) -> Vectors:
    """Vectors (..., d) divided by their lengths."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches, prints the best passages, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Find passages, each embedded in the context of its text.")
    parser.add_argument("question")
    parser.add_argument("files", type=Path, nargs="*", help="texts (default: two short ones)")
    parser.add_argument("--server", default="127.0.0.1:8001", help="HOST:PORT (default: %(default)s)")
    parser.add_argument("--model", required=True, help="name of a text encoder")
    parser.add_argument("--length", type=int, default=20, help="characters (default: %(default)s)")
    parser.add_argument("--top", type=int, default=3, help="passages to print (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        texts = {str(path): path.read_text(encoding="utf-8") for path in options.files} or TEXTS
        with AttentionClient(options.server) as client:
            passages, vectors = embed_passages(client, options.model, texts, options.length)
            question = normalise(client.embed(options.model, options.question))
    except (AttentionClientError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    scores = vectors @ question  # (passages,)
    for index in np.argsort(-scores, kind="stable")[: options.top]:
        print(f"{scores[index]:.3f}  {passages[index].source}: {passages[index].text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
