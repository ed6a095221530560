"""LangChain's OpenAIEmbeddings, unchanged, on an attention server.

    python -m server --model-repository model_repository --http-port 8000
    python -m examples.langchain_embeddings "What is sweet?" --model my-bert

Needs `pip install langchain-openai`. Two arguments are necessary: `base_url`, and
`check_embedding_ctx_length=False`, because LangChain otherwise splits texts into tokens of OpenAI's own
vocabulary, which mean nothing to another model. `api_key` may be any text, or the server's bearer token.

Exit status: 0 if the search succeeded, 1 if the server refused it or did not answer.
"""

import argparse
import sys
from collections.abc import Sequence

import openai
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings
from pydantic import SecretStr

TEXTS = ["Life is short, eat dessert first", "Ice cream melts", "The Elbe flows through Dresden"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Embeds texts, searches them, prints what was found, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Search texts with LangChain and an attention server.")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="(default: %(default)s)")
    parser.add_argument("--model", required=True, help="name of a text encoder")
    parser.add_argument("--api-key", default="unused", help="bearer token of the server, if it asks for one")
    options = parser.parse_args(arguments)
    embeddings = OpenAIEmbeddings(
        model=options.model,
        base_url=options.url,
        api_key=SecretStr(options.api_key),
        check_embedding_ctx_length=False,
    )
    store = InMemoryVectorStore(embeddings)
    try:
        store.add_texts(TEXTS)
        results = store.similarity_search_with_score(options.question, k=len(TEXTS))
    except openai.OpenAIError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for document, score in results:
        print(f"{score:.4f}  {document.page_content}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
