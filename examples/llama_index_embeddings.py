"""LlamaIndex's OpenAIEmbedding, unchanged, on an attention server.

    python -m server --model-repository model_repository --http-port 8000
    python -m examples.llama_index_embeddings "What is sweet?" --model my-bert

Needs `pip install llama-index-embeddings-openai`. The model's name is the argument `model_name`, because
`model` takes only names of OpenAI's own models. `api_key` may be any text, or the server's bearer token.

Exit status: 0 if the search succeeded, 1 if the server refused it or did not answer.
"""

import argparse
import sys
from collections.abc import Sequence

import openai
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.embeddings.openai import OpenAIEmbedding

TEXTS = ["Life is short, eat dessert first", "Ice cream melts", "The Elbe flows through Dresden"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Embeds texts, searches them, prints what was found, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Search texts with LlamaIndex and an attention server.")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="(default: %(default)s)")
    parser.add_argument("--model", required=True, help="name of a text encoder")
    parser.add_argument("--api-key", default="unused", help="bearer token of the server, if it asks for one")
    options = parser.parse_args(arguments)
    embedding = OpenAIEmbedding(model_name=options.model, api_base=options.url, api_key=options.api_key)
    try:
        index = VectorStoreIndex([TextNode(text=text) for text in TEXTS], embed_model=embedding)
        nodes = index.as_retriever(similarity_top_k=len(TEXTS)).retrieve(options.question)
    except openai.OpenAIError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for node in nodes:
        print(f"{node.get_score():.4f}  {node.get_content()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
