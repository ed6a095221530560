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
from attention_serving.server.http.text_models import (
    REFUSED,
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    TextBody,
)
from tests.server.http.clients import answer_on, ask, connected, head
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


@pytest.mark.parametrize("path", BODIES)
def test_members_that_would_change_the_result_are_refused_by_name(
    scripted: Scripted, port: int, path: str
) -> None:
    rows = pb.VectorSequences(data=np.ones(1, np.float32).tobytes(), width=1)
    scripted.answer("Attend", pb.AttendResponse(context_vectors=rows, labels=["x"]))
    body, takes = BODIES[path]
    for name, (advice, *neutral) in REFUSED.items():
        if name in (*takes.model_fields, *takes.synonyms):
            continue
        answer = ask(port, path, body | {name: "other"})
        error = answer.json["error"]
        assert (answer.status, error["param"]) == (400, name)
        assert error["message"] == f"{name}: is not supported; {advice}"
        for value in (None, *neutral):
            assert ask(port, path, body | {name: value}).status == 200
    answer = ask(port, path, body | dict.fromkeys(("truncate", "truncation"), True))
    assert answer.json["error"]["message"].startswith("truncate: has two names in the request")


def test_the_page_has_every_member_that_is_refused_or_has_another_name() -> None:
    table = (ROOT / "docs/http.md").read_text().partition("## Members of requests")[2].partition("\n## ")[0]
    names = {"truncation", *REFUSED} | {name for _, takes in BODIES.values() for name in takes.synonyms}
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
    refusal = answer.json["error"]
    assert (answer.status, refusal["param"]) == (400, error.partition(":")[0])
    assert (scripted.calls.get().method, scripted.calls.empty()) == ("Attend", True)
    assert refusal["message"].startswith(error)
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
