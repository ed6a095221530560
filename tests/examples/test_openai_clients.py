"""The examples with LangChain and LlamaIndex: what they find is what the vectors of the server say."""

import asyncio
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pytest
from attention_client import AttentionClient
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from scripts.local_server import ServerProcess
from tests.encoders.repository import SENTENCE
from tests.examples.running import run

QUESTION = "What is sweet?"
TOLERANCE = 2e-6
# More than one request of either library.
MANY = [f"{index} times dessert" for index in range(150)]


def shortened(server: ServerProcess) -> NDArray[np.float32]:
    """Embeddings of MANY with fewer elements, which differ by more than the tolerance."""
    with AttentionClient(server.target) as client:
        found = client.embed(SENTENCE, MANY, dimensions=8)
    distances = np.abs(found[:, None] - found).max(axis=-1) + np.eye(len(found))
    assert distances.min() > 10 * TOLERANCE
    return found


def check(example: ModuleType, server: ServerProcess, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs an example, and compares what it prints with the cosines of the server's embeddings."""
    name = example.__name__.rpartition(".")[2]
    assert run(name, QUESTION, "--url", url, "--model", SENTENCE) == 0
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    found = {text: float(score) for score, text in lines}
    texts: Sequence[str] = example.TEXTS
    with AttentionClient(server.target) as client:
        scores = client.embed(SENTENCE, list(texts)) @ client.embed(SENTENCE, QUESTION)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert [found[text] for text in texts] == pytest.approx(scores.tolist(), abs=1e-3)
    assert run(name, QUESTION, "--url", url, "--model", "absent") == 1
    assert "absent" in capsys.readouterr().err


def test_langchain(
    example_server: ServerProcess, openai_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    library = pytest.importorskip("langchain_openai")
    from examples import langchain_embeddings  # noqa: PLC0415 - needs langchain_openai

    check(langchain_embeddings, example_server, openai_url, capsys)
    own = library.OpenAIEmbeddings(
        model=SENTENCE, base_url=openai_url, api_key="unused", check_embedding_ctx_length=False, dimensions=8
    )
    expected = shortened(example_server)
    assert_allclose(own.embed_documents(MANY, chunk_size=100), expected, rtol=0, atol=TOLERANCE)
    assert_allclose(asyncio.run(own.aembed_documents(MANY)), expected, rtol=0, atol=TOLERANCE)


def test_llama_index(
    example_server: ServerProcess, openai_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    library = pytest.importorskip("llama_index.embeddings.openai")
    from examples import llama_index_embeddings  # noqa: PLC0415 - needs llama_index

    check(llama_index_embeddings, example_server, openai_url, capsys)
    own = library.OpenAIEmbedding(model_name=SENTENCE, api_base=openai_url, api_key="unused", dimensions=8)
    expected = shortened(example_server)
    assert_allclose(own.get_text_embedding_batch(MANY), expected, rtol=0, atol=TOLERANCE)
    found = asyncio.run(own.aget_text_embedding_batch(MANY))
    assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
