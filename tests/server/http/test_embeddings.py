"""Endpoints of text models: messages of requests, errors as OpenAI's clients read them, and models listed.

tests/encoders/test_openai.py has the client of OpenAI.
"""

import base64
import json
from typing import Any

import grpc
import numpy as np
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.text_bodies import (
    REFUSED,
    SYNONYMS,
    ClassifyRequest,
    CohereEmbedV2Request,
    EmbedAllRequest,
    EmbeddingRequest,
    RerankRequest,
    TextBody,
)
from tests.server.http.clients import Answer, answer_on, ask, connected, head
from tests.server.http.scripted import Scripted
from tests.server.samples import ROOT

PATH, INVALID = "/v1/embeddings", "invalid_request_error"
ROWS = np.arange(4, dtype=np.float32).reshape(2, 2)
REPLY = pb.AttendResponse(
    context_vectors=pb.VectorSequences(data=ROWS.tobytes(), width=2, lengths=[1, 1]),
    token_counts=[3, 4],
    truncated=[1],
    model_digest="d1",
)
BODIES: dict[str, tuple[dict[str, Any], type[TextBody]]] = {
    PATH: ({"model": "m", "input": "a"}, EmbeddingRequest),
    "/v1/rerank": ({"model": "m", "query": "q", "documents": ["a"]}, RerankRequest),
    "/predict": ({"model": "m", "inputs": "a"}, ClassifyRequest),
    "/v2/embed": ({"model": "m", "texts": ["a"]}, CohereEmbedV2Request),
    "/embed_all": ({"model": "m", "inputs": "a"}, EmbedAllRequest),
}
ONE_TEXT = pb.TextSequences(texts=["a"])
TEXTS = pb.TextSequences(texts=["a", "b"], prompt="query", truncate=False)


@pytest.mark.parametrize(
    ("members", "fields"),
    [
        # Members that other servers take.
        ({"input": "a", "input_type": None, "encoding_format": None, "extra": {}}, {"text": ONE_TEXT}),
        ({"input": ["a", "b"], "prompt": "query", "truncate": False}, {"text": TEXTS}),
        ({"input": ["a", "b"], "prompt_name": "query", "truncation": False}, {"text": TEXTS}),
        ({"input": [1, 2], "user": "someone"}, {"token_ids": pb.TokenSequences(ids=[1, 2], lengths=[2])}),
        ({"input": [[1, 2], [3]]}, {"token_ids": pb.TokenSequences(ids=[1, 2, 3], lengths=[2, 1])}),
    ],
    ids=["text", "texts", "synonyms", "tokens", "lists of tokens"],
)
def test_requests(scripted: Scripted, port: int, members: dict[str, Any], fields: dict[str, Any]) -> None:
    scripted.answer("Attend", REPLY)
    answer = ask(port, PATH, {"model": "m", "dimensions": 8, **members})
    assert (answer.status, answer.json["truncated"]) == (200, [1])
    assert answer.headers["x-model-digest"] == "d1"
    options = pb.EmbeddingOptions(dimensions=8)
    assert scripted.next().request == pb.AttendRequest(model_name="m", embedding=options, **fields)


@pytest.mark.parametrize(
    ("code", "details", "status", "error"),
    [
        ("NOT_FOUND", "model 'm' does not exist", 404, (INVALID, None, "model_not_found")),
        ("UNAUTHENTICATED", "who?", 401, (INVALID, None, "invalid_api_key")),
        ("RESOURCE_EXHAUSTED", "busy", 429, ("rate_limit_error", None, "rate_limit_exceeded")),
        ("INVALID_ARGUMENT", "text: is long", 400, (INVALID, "input", None)),
        ("INVALID_ARGUMENT", "dimensions: is 9", 400, (INVALID, "dimensions", None)),
        ("FAILED_PRECONDITION", "embedding: m is not a text encoder", 400, (INVALID, "model", None)),
        ("INTERNAL", "failed", 500, ("server_error", None, None)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors(scripted: Scripted, port: int, code: str, details: str, status: int, error: Any) -> None:
    scripted.behaviours["Attend"] = lambda _, context: context.abort(grpc.StatusCode[code], details)
    answer = ask(port, PATH, {"model": "m", "input": "a"})
    refusal = answer.json["error"]
    assert (answer.status, (refusal["type"], refusal["param"], refusal["code"])) == (status, error)


def message_of(answer: Answer) -> str:
    """The message of an error in the form of its path."""
    error = answer.json["error"]
    if isinstance(error, dict):
        assert error["param"] in (None, error["message"].partition(":")[0])
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("path", BODIES)
def test_members_that_would_change_the_result_are_refused_by_name(
    scripted: Scripted, port: int, path: str
) -> None:
    rows = pb.VectorSequences(data=np.ones(1, np.float32).tobytes(), width=1, lengths=[1])
    scripted.answer("Attend", pb.AttendResponse(context_vectors=rows, labels=["x"]))
    body, takes = BODIES[path]
    for name, (advice, *neutral) in REFUSED.items():
        if name in (*takes.model_fields, *takes.synonyms):
            continue
        answer = ask(port, path, body | {name: "other"})
        assert (answer.status, message_of(answer)) == (400, f"{name}: is not supported; {advice}")
        for value in (None, *neutral):
            assert ask(port, path, body | {name: value}).status == 200
    answer = ask(port, path, body | dict.fromkeys(("truncate", "truncation"), True))
    assert message_of(answer).startswith("truncate: has two names in the request")


def test_the_page_has_every_member_that_is_refused_or_has_another_name() -> None:
    table = (ROOT / "docs/http.md").read_text().partition("## Members of requests")[2].partition("\n## ")[0]
    names = {*SYNONYMS, *REFUSED} | {name for _, takes in BODIES.values() for name in takes.synonyms}
    assert not {name for name in names if f"`{name}`" not in table}


@pytest.mark.parametrize("path", ["/v1", "/v1/chat/completions", "/v1/models/"])
def test_unknown_paths_answer_as_openai_does(port: int, path: str) -> None:
    answer = ask(port, path, {})
    error = {"type": INVALID, "param": None, "code": None}
    assert (answer.status, answer.json["error"] | error) == (404, answer.json["error"])
    assert answer.json["error"]["message"].startswith(f"{path}: there is no such path")
    with connected(port) as connection:
        connection.sendall(head(f"{path}?a=b", "Content-Length: 1", "Content-Length: 1"))
        assert answer_on(connection).json["error"]["type"] == INVALID


EMBED = ("/v1/embeddings", {"input": ["a", "b"]}, 2, "input[1]: its embedding contains NaN or infinity")
RERANK = ("/v1/rerank", {"query": "q", "documents": ["a", "b"], "top_n": 1}, 1, "documents[1]: its score")
PREDICT = ("/predict", {"inputs": [["a"], ["b"]]}, 2, "inputs[1]: its score contains NaN or infinity")


@pytest.mark.parametrize("number", [np.nan, -np.inf])
@pytest.mark.parametrize(
    ("path", "members", "width", "error"), [EMBED, RERANK, PREDICT], ids=["embed", "rerank", "predict"]
)
def test_numbers_without_a_form_in_json_are_refused_with_their_index(
    scripted: Scripted, port: int, path: str, members: dict[str, Any], width: int, error: str, number: float
) -> None:
    rows = np.ones((2, width), np.float32)
    rows[1, -1] = number
    reply = pb.AttendResponse(context_vectors=pb.VectorSequences(data=rows.tobytes(), width=width))
    reply.labels.extend(["x", "y"])
    scripted.answer("Attend", reply)
    answer = ask(port, path, {"model": "m", **members})
    assert answer.status == 400
    assert (scripted.calls.get().method, scripted.calls.empty()) == ("Attend", True)
    assert message_of(answer).startswith(error)
    if path == EMBED[0]:  # as binary tensors are
        shown = ask(port, path, {"model": "m", **members, "encoding_format": "base64"}).json["data"]
        received = [np.frombuffer(base64.b64decode(row["embedding"]), np.float32) for row in shown]
        np.testing.assert_array_equal(received, rows)


def test_the_ready_text_encoders_and_classifiers_are_listed(scripted: Scripted, port: int) -> None:
    encoder, ready = pb.TextEncoder(), pb.Model.STATE_READY
    models = [
        pb.Model(name="b", state=ready, text_encoder=encoder),
        pb.Model(name="a", state=ready, text_encoder=encoder, aliases=["org/a"]),
        pb.Model(name="c", state=ready, text_classifier=pb.TextClassifier()),
        pb.Model(name="plain", state=ready),
        pb.Model(name="failed", state=pb.Model.STATE_FAILED, text_encoder=encoder),
    ]
    scripted.answer("ListModels", pb.ListModelsResponse(models=models))
    listed = ask(port, "/v1/models").json
    assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", ["a", "b", "c"])
    for name in ("a", "org/a", "org%2Fa"):
        assert ask(port, f"/v1/models/{name}").json == listed["data"][0]
    for name in ("plain", "failed", "absent"):
        answer = ask(port, f"/v1/models/{name}")
        assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")
    assert "GET /v1/models lists them" in json.dumps(answer.json)


def attend(*texts: str, embedding: pb.EmbeddingOptions | None = None, **text: Any) -> pb.AttendRequest:
    return pb.AttendRequest(model_name="m", text=pb.TextSequences(texts=texts, **text), embedding=embedding)


NORMALISED = pb.EmbeddingOptions(normalised=True)
SCORES = pb.AttendResponse(
    context_vectors=pb.VectorSequences(data=ROWS[:, 1].tobytes(), width=1), labels=["x"], token_counts=[3, 4]
)
LEFT: dict[str, Any] = {"truncate": True, "truncation_side": pb.TRUNCATION_SIDE_LEFT}
OPTIONS = {"normalize": False, "dimensions": 8, "prompt_name": "p", "truncation_direction": "Left"}
SHORT = pb.EmbeddingOptions(dimensions=8, normalised=False)
PAIR: dict[str, Any] = {"pairs": ["a", "b"], "raw_scores": True}
QUERY: dict[str, Any] = {"query": "q", "texts": ["a", "b"], "raw_scores": True, "return_text": True}
COHERE: dict[str, Any] = {"texts": ["a"], "input_type": "search_query", "truncate": "START"}
UNITS = {"billed_units": {"input_tokens": 7}, "tokens": {"input_tokens": 7}}
FLOATS = {"meta": UNITS, "response_type": "embeddings_floats", "embeddings": ROWS.tolist(), "texts": ["a"]}
RANKED = [{"index": 1, "score": 3.0, "text": "b"}, {"index": 0, "score": 1.0, "text": "a"}]
CUT = attend("a", embedding=SHORT, prompt="p", **LEFT)
SENTENCES = {"source_sentence": "a", "sentences": ["b"]}
LABELS = [[{"label": "x", "score": 1.0}], [{"label": "x", "score": 3.0}]]
QUERIES = attend("a", embedding=pb.EmbeddingOptions(), input_kind=pb.INPUT_KIND_QUERY, **LEFT)
ANSWERS: list[tuple[str, dict[str, Any], pb.AttendRequest, Any]] = [
    ("/embed", {"inputs": "a", "truncate": None}, attend("a", embedding=NORMALISED), ROWS.tolist()),
    ("/embed", {"inputs": ["a"], "truncate": True, **OPTIONS}, CUT, ROWS.tolist()),
    ("/embed", {"inputs": ["a"], "parameters": OPTIONS | {"truncate": True}}, CUT, ROWS.tolist()),
    ("/embed_all", {"inputs": ["a", "b"]}, attend("a", "b"), [[[0, 1]], [[2, 3]]]),
    ("/similarity", {"inputs": SENTENCES}, attend("a", "b", embedding=NORMALISED), [3]),
    ("/rerank", QUERY, attend("q", "q", **PAIR), RANKED),
    ("/predict", {"inputs": [["a"], ["b"]]}, attend("a", "b", return_labels=True), LABELS),
    ("/v1/embed", COHERE, QUERIES, FLOATS),
]


@pytest.mark.parametrize(("path", "body", "message", "expected"), ANSWERS, ids=[row[0] for row in ANSWERS])
def test_the_forms_of_tei_and_cohere(
    scripted: Scripted, port: int, path: str, body: dict[str, Any], message: pb.AttendRequest, expected: Any
) -> None:
    scripted.answer("Attend", SCORES if path in ("/rerank", "/predict") else REPLY)
    found = ask(port, path, body | {"model": "other"}, {"model-id": "m"}).json
    assert scripted.next().request == message
    if isinstance(found, dict):
        assert found.pop("id")
    assert found == expected


def test_every_type_of_embeddings_is_asked_for_once(scripted: Scripted, port: int) -> None:
    def reply(request: pb.AttendRequest, _context: object) -> pb.AttendResponse:
        data, width = {0: (ROWS[0].tobytes(), 2), 9: (b"\xa0", 3)}.get(
            request.output_data_type, (b"\x81\x7f", 2)
        )
        vectors = pb.VectorSequences(data=data, width=width, data_type=request.output_data_type, lengths=[1])
        return pb.AttendResponse(context_vectors=vectors)

    scripted.behaviours["Attend"] = reply
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    found = ask(port, "/v2/embed", {"texts": ["a"], "embedding_types": types}).json
    assert [scripted.next().request.output_data_type for _ in range(4)] == [0, 7, 8, 9]
    assert scripted.calls.empty()
    float_, base64_ = [[0.0, 1.0]], [base64.b64encode(ROWS[0].tobytes()).decode()]
    expected = [float_, [[-127, 127]], [[129, 127]], [[32]], [[160]], base64_]
    assert (found["response_type"], found["embeddings"]) == (
        "embeddings_by_type",
        dict(zip(types, expected, strict=True)),
    )
    for name in ("output_dtype", "embedding_type"):
        found = ask(port, "/embeddings", {"input": "a", name: "binary"}).json
        assert found["data"][0]["embedding"] == [32]


WRONG: list[tuple[str, Any, str, int, str, str]] = [
    ("/embed", {"inputs": []}, "", 400, "Empty", "inputs: is empty"),
    ("/embed", {"inputs": "a"}, "RESOURCE_EXHAUSTED", 429, "Overloaded", "inputs: wrong"),
    ("/embed", {"inputs": "a", "truncation_direction": "up"}, "", 400, "Validation", "truncation_side: m"),
    ("/embed_all", {"inputs": [1, "a"]}, "INTERNAL", 400, "Validation", "inputs: must contain texts only"),
    ("/embed_sparse", {"inputs": "a", "top_k": 0}, "", 400, "Validation", "top_k: must be greater"),
    ("/rerank", {"query": "q", "texts": []}, "", 400, "Empty", "texts: is empty"),
    ("/rerank", {"query": "q" * 1000, "texts": ["a"] * 1100}, "", 400, "Validation", "query: has 1100"),
    ("/predict", {"inputs": []}, "", 400, "Empty", "inputs: is empty"),
    ("/similarity", {"inputs": {"sentences": []}}, "", 400, "Validation", "inputs.source_sentence: i"),
    ("/tokenize", {"inputs": [1]}, "", 400, "Validation", "inputs[0]: must be a valid string"),
    ("/decode", {"ids": [2**63]}, "", 400, "Validation", "ids: contains a token id of more than 64"),
    ("/", {"inputs": "a"}, "UNAVAILABLE", 503, "Unhealthy", "inputs: wrong"),
    ("/v2/embed", {"texts": ["a"], "embedding_types": []}, "", 400, "", "embedding_types: List should have"),
    ("/v1/embed", {"texts": ["a"], "input_type": "image"}, "", 400, "", "input_type: String should match"),
    ("/v2/rerank", {"query": "q", "documents": []}, "", 400, "", "documents: is empty"),
    ("/embed", {"inputs": "a", "parameters": "x"}, "", 400, "Validation", "parameters: must be an object"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "code", "status", "kind", "words"), WRONG, ids=[row[0] for row in WRONG]
)
def test_errors_of_tei_and_cohere(
    scripted: Scripted, port: int, path: str, body: Any, code: str, status: int, kind: str, words: str
) -> None:
    if code:
        for name in ("Attend", "Info"):
            scripted.behaviours[name] = lambda _, call: call.abort(grpc.StatusCode[code], "text: wrong")
    answer = ask(port, path, body)
    assert (answer.status, answer.json.get("error_type", "")) == (status, kind)
    assert message_of(answer).startswith(words)
    if not kind or path == "/rerank":
        assert answer.json["message"] == message_of(answer)
