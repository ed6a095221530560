"""Embeddings as integers and with or without their normalisation, against sentence-transformers."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attention_client import AttentionClient, EmbeddingInputs, InvalidArgumentError
from attention_client._calls.attention import EncodedCall
from attention_client._generated.attention.v1 import attention_pb2 as client_pb
from attention_client.enrich import EnrichError
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.util.quantization import quantize_embeddings

from attention_serving.artifact.encoder import EMBEDDING
from attention_serving.enrich import enrich
from attention_serving.server.api.attention.requests import quantisation_range
from attention_serving.server.api.tensors import OutputPlaceholder
from scripts.local_server import ServerProcess
from tests.encoders.repository import POOLED, POOLED_MODELS, SENTENCE, UNNORMALISED, save_pooled
from tests.encoders.texts import ATOL, RTOL, TEXTS
from tests.server.engine.requests.test_text_spans import facts
from tests.support.artifacts import cached_repositories
from tests.support.processes import serving_models
from tests.support.refusals import expect_refusal

TYPES: Any = ("int8", "uint8", "binary", "ubinary")


@pytest.fixture(scope="module")
def server(sentence_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of models that normalise, and of one that does not."""
    (pooled,), folder = cached_repositories(POOLED_MODELS), tmp_path_factory.mktemp("pooled")
    with serving_models(folder, [*pooled.iterdir(), *sentence_repository.iterdir()]) as process:
        yield process


@pytest.mark.parametrize("name", [POOLED, UNNORMALISED])
def test_embeddings_before_and_after_normalisation_equal_the_library(
    client: AttentionClient, tmp_path: Path, name: str
) -> None:
    library = SentenceTransformer(str(save_pooled(name, tmp_path)), device="cpu")
    raw = SentenceTransformer(modules=[*library][:2], device="cpu").encode(list(TEXTS))
    assert raw.shape[1] == (6 if name == POOLED else 1) * 32  # every pooling
    expected = {
        False: raw,
        True: raw / np.linalg.norm(raw, axis=1, keepdims=True),
        None: library.encode(list(TEXTS)),
    }
    for normalised, vectors in expected.items():
        for embeddings in (
            client.embed(name, list(TEXTS), normalised=normalised),
            *(
                item.context_vectors
                for item in client.attend_stream(name, [EmbeddingInputs(list(TEXTS), normalised=normalised)])
            ),
        ):
            assert_allclose(embeddings, vectors, rtol=RTOL, atol=ATOL)


def sent(**fields: Any) -> Any:
    """A call that the client does not make."""
    text = client_pb.TextSequences(texts=["a"])
    request = client_pb.AttendRequest(
        model_name=SENTENCE, text=text, output_data_type=client_pb.DATA_TYPE_INT8, **fields
    )
    return lambda client: client._answer(EncodedCall((request,), list), None)


def by_rule(embeddings: NDArray[np.float32], largest: float) -> dict[Any, NDArray[Any]]:
    integers = np.clip(np.round(127 * embeddings / np.float32(largest)), -127, 127)
    bits: Any = {kind: quantize_embeddings(embeddings, kind) for kind in TYPES[2:]}
    return {"int8": integers.astype(np.int8), "uint8": (integers + 128).astype(np.uint8), **bits}


@pytest.mark.parametrize("name", [SENTENCE, UNNORMALISED])
def test_integers_follow_the_range_that_the_model_states(client: AttentionClient, name: str) -> None:
    texts, encoder = list(TEXTS), client.model(name).text_encoder
    assert encoder is not None
    ranges, width = dict(encoder.quantisation_ranges), encoder.embedding_width
    assert set(ranges) == {width, *encoder.dimensions}
    cases: list[tuple[dict[str, Any], float]] = [
        ({}, ranges[width]),
        ({"spans": [[(0, 1)]] * len(texts)}, ranges[width]),
        ({"normalised": True}, ranges[width] if encoder.normalised else 1.0),
        *(({"dimensions": size}, ranges[size]) for size in encoder.dimensions),
    ]
    texts = [text or "a" for text in texts]
    for options, largest in cases:
        embeddings = np.reshape(client.embed(name, texts, **options), (len(texts), -1))
        for kind, expected in by_rule(embeddings, largest).items():
            found = client.embed(name, texts, output_type=kind, **options)
            assert_array_equal(np.reshape(found, expected.shape), expected)
            assert {array.dtype for array in found} == {expected.dtype}
    assert client.embed(name, "a", output_type="ubinary").shape == (width // 8,)


@pytest.mark.parametrize("kind", TYPES)
def test_a_column_has_the_bytes_of_embed(
    client: AttentionClient, server: ServerProcess, sentence_repository: Path, tmp_path: Path, kind: Any
) -> None:
    texts = [*TEXTS, None]
    source, target = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table({"text": texts}), source)
    options: dict[str, Any] = {"model": SENTENCE, "text_column": "text", "output_type": kind, "dimensions": 8}
    expected = client.embed(SENTENCE, list(TEXTS), output_type=kind, dimensions=8)
    column = pa.array([*expected, None], pa.list_(pa.from_numpy_dtype(expected.dtype), expected.shape[1]))
    for backend in ({"servers": [server.target]}, {"model_repository": sentence_repository}):
        enrich(source, target, overwrite=True, **options, **backend)
        assert pq.read_table(target)["embedding"].combine_chunks().equals(column)
    with pytest.raises(EnrichError, match="is not the result of this job"):
        enrich(source, target, resume=True, **{**options, "output_type": None}, servers=[server.target])


def test_earlier_artifacts_and_nan_are_refused() -> None:
    earlier: Any = {
        is_unit: SimpleNamespace(name="a", encoder=facts("mean", normalised=is_unit))
        for is_unit in (True, False)
    }
    for asked, is_unit in ((None, True), (True, True), (True, False)):
        assert quantisation_range(earlier[is_unit], "INT8", normalised=asked) == 1.0
    with expect_refusal("output_data_type: INT8 needs a range of model 'a': export it again"):
        quantisation_range(earlier[False], "INT8")
    rows = [np.ones(4, np.float32), np.full(4, np.nan, np.float32)]
    with expect_refusal("output_data_type: is BITS, but embedding 1 contains NaN or infinity"):
        OutputPlaceholder(EMBEDDING, "BITS").parts(rows)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda c: c.embed(SENTENCE, "a", output_type="int8", normalised=False),
            "embeddings before its normalisation have none",
        ),
        (sent(), "is for embeddings: the request must have `embedding`, and not return_weights"),
        (sent(embedding=client_pb.EmbeddingOptions(), return_weights=True), "and not return_weights"),
        (lambda c: c.embed(SENTENCE, "a", output_type="int4"), "output_type: expected one of float32, int8"),
    ],
)
def test_what_has_no_integers_is_refused(client: AttentionClient, call: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        call(client)
