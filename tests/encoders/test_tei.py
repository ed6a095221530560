"""tei.v1 over gRPC and TEI's and Cohere's endpoints over HTTP, at one server, against the libraries."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message_factory import GetMessageClass
from numpy.testing import assert_allclose

from attention_serving.protos.tei.v1 import tei_pb2 as tei
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.run.provider import Device
from tests.encoders.classifiers import CLASSIFIER, CLASSIFIERS, LABELS, RERANKER, expected
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL, TEXTS, expected_of
from tests.server.http.clients import ask
from tests.server.http.scripted import front
from tests.server.samples import load_repository
from tests.server.seams import PATIENCE_SECONDS, Served
from tests.support import encoders
from tests.support.artifacts import cached_repositories

QUERY, DOCUMENTS = "what to eat?", [text for text in TEXTS[:5] if text]
SCORES = expected(RERANKER, *((QUERY, document) for document in DOCUMENTS))[:, 0]
ORDER = np.argsort(-SCORES).tolist()
METHODS = {
    method.name: method for service in tei.DESCRIPTOR.services_by_name.values() for method in service.methods
}


@pytest.fixture(scope="module")
def served(sentence_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, int]]:
    """The channel and the HTTP port of a server."""
    folders = [sentence_repository, *cached_repositories(CLASSIFIERS)]
    loaded = (model for folder in folders for model in load_repository(folder, Device(threads=1)))
    models = [model for model in loaded if isinstance(model, LoadedModel)]
    path = tmp_path_factory.mktemp("tei") / "grpc"
    with Served(*models, unix_socket=path) as served, front(f"unix:{path}") as running:
        yield served.channel, running.port


def call(channel: grpc.Channel, name: str, *members: dict[str, Any], model: str = "") -> list[Any]:
    """The replies of a method to requests, as a client generated from the contract sends them."""
    rpc = METHODS[name]
    kinds = ("unary", "stream")
    kind = f"{kinds[rpc.client_streaming]}_{kinds[rpc.server_streaming]}"
    request_type, reply_type = GetMessageClass(rpc.input_type), GetMessageClass(rpc.output_type)
    method: Any = getattr(channel, kind)(
        f"/{rpc.containing_service.full_name}/{name}",
        request_serializer=request_type.SerializeToString,
        response_deserializer=reply_type.FromString,
    )
    requests = [request_type(**each) for each in members]
    sent: Any = iter(requests) if rpc.client_streaming else requests[0]
    metadata = [("model-id", model)] if model else []
    reply = method(sent, metadata=metadata, timeout=PATIENCE_SECONDS)
    return list(reply) if rpc.server_streaming else [reply]


def close(found: Any, wanted: Any) -> None:
    assert_allclose(np.asarray(found, np.float32), wanted, rtol=RTOL, atol=ATOL)


def embedding(text: str) -> Any:
    return expected_of("bert", text, normalised=True).embedding.numpy()


def token_vectors(text: str) -> Any:
    return expected_of("bert", text).tokens.numpy()


def test_embeddings(served: tuple[Any, int]) -> None:
    channel, port = served
    (reply,) = call(channel, "Embed", {"inputs": TEXTS[0]})
    close(reply.embeddings, embedding(TEXTS[0]))
    tokens = len(encoders.tokenizer_of("bert").encode(TEXTS[0]).ids)
    assert (reply.metadata.compute_chars, reply.metadata.compute_tokens) == (len(TEXTS[0]), tokens)
    assert 0 < reply.metadata.total_time_ns < PATIENCE_SECONDS * 1e9
    replies = call(channel, "EmbedStream", *({"inputs": text} for text in TEXTS))
    close([reply.embeddings for reply in replies], [embedding(text) for text in TEXTS])
    for path, body in (("/embed", {"inputs": [*TEXTS]}), ("/", {"inputs": [*TEXTS], "truncate": None})):
        close(ask(port, path, body).json, [embedding(text) for text in TEXTS])
    assert ask(port, "/embed", {"inputs": "a"}, {"model-id": "absent"}).status == 404
    short = ask(port, "/invocations", {"inputs": "a", "parameters": {"dimensions": 8}}).json
    close(np.linalg.norm(short), 1)
    assert (len(short), len(short[0])) == (1, 8)
    sentences = {"source_sentence": TEXTS[0], "sentences": [*TEXTS[1:]]}
    cosines = [embedding(text) @ embedding(TEXTS[0]) for text in TEXTS[1:]]
    for path in ("/similarity", "/"):
        close(ask(port, path, {"inputs": sentences}).json, cosines)


def test_vectors_of_tokens(served: tuple[Any, int]) -> None:
    channel, port = served
    for reply, text in zip(
        call(channel, "EmbedAllStream", *({"inputs": text} for text in TEXTS)), TEXTS, strict=True
    ):
        close([token.embeddings for token in reply.token_embeddings], token_vectors(text))
    for found, text in zip(ask(port, "/embed_all", {"inputs": [*TEXTS]}).json, TEXTS, strict=True):
        close(found, token_vectors(text))


def test_scores(served: tuple[Any, int]) -> None:
    channel, port = served
    members = {"query": QUERY, "texts": DOCUMENTS, "return_text": True}
    (reply,) = call(channel, "Rerank", members, model=RERANKER)
    (streamed,) = call(
        channel, "RerankStream", *({"query": QUERY, "text": text} for text in DOCUMENTS), model=RERANKER
    )
    ranks = [ask(port, path, members, {"model-id": RERANKER}).json for path in ("/rerank", "/invocations")]
    for found in ([*reply.ranks], *([tei.Rank(**rank) for rank in each] for each in ranks)):
        assert [(rank.index, rank.text) for rank in found] == [(at, DOCUMENTS[at]) for at in ORDER]
        close([rank.score for rank in found], SCORES[ORDER])
    assert [(rank.index, rank.HasField("text")) for rank in streamed.ranks] == [(at, False) for at in ORDER]
    body = {"query": QUERY, "documents": DOCUMENTS, "model": RERANKER}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = ask(port, path, body | {"return_documents": True}).json["results"]
        close([each["relevance_score"] for each in found], SCORES[ORDER])
        best = DOCUMENTS[ORDER[0]]
        assert found[0]["document"] == (best if path == "/rerank" else {"text": best})
    for name, inputs in (("Predict", "eat"), ("PredictPair", ["eat", "a"])):
        texts = inputs if isinstance(inputs, str) else tuple(inputs)
        wanted = dict(zip(LABELS[CLASSIFIER], expected(CLASSIFIER, texts)[0], strict=True))
        single, *_ = call(channel, name, {"inputs": inputs}, model=CLASSIFIER)
        streamed, _ = call(channel, f"{name}Stream", {"inputs": inputs}, {"inputs": inputs}, model=CLASSIFIER)
        path = "/predict" if name == "Predict" else "/"
        labels = ask(port, path, {"inputs": inputs}, {"model-id": CLASSIFIER}).json
        assert [each.label for each in single.predictions] == sorted(wanted, key=lambda label: -wanted[label])
        for found in (
            single.predictions,
            streamed.predictions,
            [tei.Prediction(**label) for label in labels],
        ):
            close([each.score for each in found], sorted(wanted.values(), reverse=True))


def test_types_of_embeddings_and_raw_scores(served: tuple[Any, int]) -> None:
    channel, port = served
    body = {"texts": TEXTS, "embedding_types": ["float", "int8", "uint8", "binary", "ubinary"]}
    types = {kind: np.array(rows) for kind, rows in ask(port, "/v2/embed", body).json["embeddings"].items()}
    np.testing.assert_array_equal(types["uint8"], types["int8"] + 128)
    assert np.corrcoef(types["int8"].ravel(), types["float"].ravel())[0, 1] > 0.999
    np.testing.assert_array_equal(types["ubinary"], np.packbits(types["float"] > 0, axis=1))
    np.testing.assert_array_equal(types["binary"], types["ubinary"] - 128)
    members = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}
    (reply,) = call(channel, "Rerank", members, model=RERANKER)
    ranks = ask(port, "/rerank", members, {"model-id": RERANKER}).json
    for found in ([rank.score for rank in reply.ranks], [rank["score"] for rank in ranks]):
        close(1 / (1 + np.exp(-np.array(found))), SCORES[ORDER])


def test_tokens(served: tuple[Any, int]) -> None:
    channel, port = served
    library = encoders.tokenizer_of("bert")
    replies = call(
        channel, "TokenizeStream", *({"inputs": text, "add_special_tokens": True} for text in TEXTS)
    )
    over_http = ask(port, "/tokenize", {"inputs": [*TEXTS]}).json
    for reply, listed, text in zip(replies, over_http, TEXTS, strict=True):
        encoding = library.encode(text)
        assert [token.id for token in reply.tokens] == encoding.ids
        assert [tei.SimpleToken(**token) for token in listed] == [*reply.tokens]
        for token, special in zip(reply.tokens, encoding.special_tokens_mask, strict=True):
            assert (token.special, token.HasField("stop")) == (bool(special), not special)
            assert special or token.text == text[token.start : token.stop]
        (decoded,) = call(channel, "Decode", {"ids": encoding.ids, "skip_special_tokens": True})
        assert decoded.text == library.decode(encoding.ids)
        assert ask(port, "/decode", {"ids": encoding.ids}).json == [decoded.text]


def test_info(served: tuple[Any, int]) -> None:
    channel, port = served
    for name, kind in ((SENTENCE, "embedding"), (RERANKER, "reranker"), (CLASSIFIER, "classifier")):
        (reply,) = call(channel, "Info", {}, model="" if name == SENTENCE else name)
        shown = ask(port, "/info", headers={"model-id": name}).json
        assert shown["model_type"] == {kind: {}}
        assert tei.ModelType.Name(reply.model_type) == f"MODEL_TYPE_{kind.upper()}"
        assert {shown["model_id"], shown["served_model_name"], reply.model_id} == {name}
        assert (reply.model_dtype, reply.max_client_batch_size) == ("float32", Limits.max_sequences)
        assert (shown["model_sha"], shown["max_input_length"]) == (reply.model_sha, reply.max_input_length)


LONG = "dessert " * 2000
REFUSALS = [
    ("Embed", [{"inputs": LONG}], "INVALID_ARGUMENT", "text: text 0 has"),
    ("EmbedStream", [{"inputs": "a"}, {"inputs": LONG}], "INVALID_ARGUMENT", "text: text 0 has"),
    (
        "EmbedSparse",
        [{"inputs": "a"}],
        "INVALID_ARGUMENT",
        "sparse: model 'sentence' has no sparse embeddings",
    ),
    (
        "EmbedSparseStream",
        [{"inputs": "a"}],
        "INVALID_ARGUMENT",
        "sparse: model 'sentence' has no sparse embeddings",
    ),
    ("PredictPair", [{"inputs": ["a", "b", "c"]}], "INVALID_ARGUMENT", "inputs: must be a text, a pair"),
    ("Rerank", [{"query": "a"}], "INVALID_ARGUMENT", "is empty; at least one text is required"),
    (
        "Rerank",
        [{"query": "a" * 65_536, "texts": ["b"] * 4096}],
        "INVALID_ARGUMENT",
        "query: has 268435456 b",
    ),
    ("RerankStream", [{"query": "a", "text": "b"}] * 4097, "INVALID_ARGUMENT", "number 4097 of the stream"),
    ("RerankStream", [{"query": "a"}, {"query": "b"}], "INVALID_ARGUMENT", "query: is not the same in all"),
    ("RerankStream", [], "UNIMPLEMENTED", "without a request message"),
    ("Decode", [{}], "INVALID_ARGUMENT", "ids: must contain"),
    ("Predict", [{"inputs": "a"}], "INVALID_ARGUMENT", "2 text classifiers are ready"),
]


@pytest.mark.parametrize(("name", "members", "code", "words"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_what_is_refused(served: tuple[Any, int], name: str, members: Any, code: str, words: str) -> None:
    with pytest.raises(grpc.RpcError, match=words) as caught:
        call(served[0], name, *members)
    error: Any = caught.value
    assert error.code().name == code
