"""OpenAI's endpoints: the message of a request, the JSON of a reply, and errors as its clients read them."""

import base64
import json
from typing import Any

import grpc
import numpy as np
import pytest

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from tests.server.http.clients import ask
from tests.server.http.scripted import Scripted

PATH, INVALID = "/v1/embeddings", "invalid_request_error"
ROWS = np.arange(4, dtype=np.float32).reshape(2, 2)
REPLY = pb.AttendResponse(
    context_vectors=pb.VectorSequences(data=ROWS.tobytes(), width=2, lengths=[1, 1]), token_counts=[3, 4]
)


TEXTS = pb.TextSequences(texts=["a", "b"], prompt="query", truncate=False)


@pytest.mark.parametrize(
    ("members", "fields"),
    [
        ({"input": "a"}, {"text": pb.TextSequences(texts=["a"])}),
        ({"input": ["a", "b"], "prompt": "query", "truncate": False}, {"text": TEXTS}),
        ({"input": [1, 2], "user": "someone"}, {"token_ids": pb.TokenSequences(ids=[1, 2], lengths=[2])}),
        ({"input": [[1, 2], [3]]}, {"token_ids": pb.TokenSequences(ids=[1, 2, 3], lengths=[2, 1])}),
    ],
    ids=["text", "texts", "tokens", "lists of tokens"],
)
def test_requests(scripted: Scripted, port: int, members: dict[str, Any], fields: dict[str, Any]) -> None:
    scripted.answer("Attend", REPLY)
    assert ask(port, PATH, {"model": "m", "dimensions": 8, **members}).status == 200
    options = pb.EmbeddingOptions(dimensions=8)
    assert scripted.next().request == pb.AttendRequest(model_name="m", embedding=options, **fields)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_a_reply(scripted: Scripted, port: int, form: str) -> None:
    scripted.answer("Attend", REPLY)
    found = ask(port, PATH, {"model": "m", "input": ["a", "b"], "encoding_format": form}).json
    vectors = (
        [base64.b64encode(row.tobytes()).decode() for row in ROWS] if form == "base64" else ROWS.tolist()
    )
    assert found == {
        "object": "list",
        "data": [{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(vectors)],
        "model": "m",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    scripted.answer("Attend", pb.AttendResponse(context_vectors=REPLY.context_vectors, truncated=[1]))
    found = ask(port, PATH, {"model": "m", "input": [[1, 2], [3]]}).json
    assert (found["truncated"], found["usage"]["prompt_tokens"]) == ([1], 3)


@pytest.mark.parametrize(
    ("members", "name", "error"),
    [
        ({}, "input", "input: is required"),
        ({"input": []}, "input", "input: must be a text, a list of texts, token ids or a list of them"),
        ({"input": ["a", [1]]}, "input", "input: must contain texts only, or non-empty lists of token ids"),
        ({"input": [[1], []]}, "input", "input: must contain texts only"),
        ({"input": [True]}, "input", "input: must contain texts only"),
        ({"input": [2**63]}, "input", "input: contains a token id of more than 64 bits"),
        ({"input": [1], "prompt": "p"}, "prompt", "prompt: needs texts; the request has token ids"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "encoding_format: "),
        ({"input": "a", "colour": 1}, None, "colour: is unknown"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions: must be greater than or equal to 1"),
    ],
)
def test_wrong_requests(
    scripted: Scripted, port: int, members: dict[str, Any], name: str | None, error: str
) -> None:
    answer = ask(port, PATH, {"model": "m", **members})
    found = answer.json["error"]
    assert (answer.status, found["type"], found["param"]) == (400, "invalid_request_error", name)
    assert found["message"].startswith(error)
    assert scripted.calls.empty()


@pytest.mark.parametrize(
    ("code", "details", "status", "error"),
    [
        ("NOT_FOUND", "model 'm' does not exist", 404, (INVALID, None, "model_not_found")),
        ("UNAUTHENTICATED", "who?", 401, (INVALID, None, "invalid_api_key")),
        ("RESOURCE_EXHAUSTED", "busy", 429, ("rate_limit_error", None, "rate_limit_exceeded")),
        ("INVALID_ARGUMENT", "text: is long", 400, (INVALID, "input", None)),
        ("FAILED_PRECONDITION", "embedding: m is not a text encoder", 400, (INVALID, "model", None)),
        ("INTERNAL", "failed", 500, ("server_error", None, None)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors(
    scripted: Scripted, port: int, code: str, details: str, status: int, error: tuple[str | None, ...]
) -> None:
    scripted.behaviours["Attend"] = lambda _, context: context.abort(grpc.StatusCode[code], details)
    answer = ask(port, PATH, {"model": "m", "input": "a"})
    found = answer.json["error"]
    assert (answer.status, (found["type"], found["param"], found["code"])) == (status, error)


def test_the_ready_text_encoders_are_listed(scripted: Scripted, port: int) -> None:
    encoder, ready = pb.TextEncoder(), pb.Model.STATE_READY
    models = [
        pb.Model(name="b", state=ready, text_encoder=encoder),
        pb.Model(name="a", state=ready, text_encoder=encoder),
        pb.Model(name="plain", state=ready),
        pb.Model(name="failed", state=pb.Model.STATE_FAILED, text_encoder=encoder),
    ]
    scripted.answer("ListModels", pb.ListModelsResponse(models=models))
    found = ask(port, "/v1/models").json
    assert (found["object"], [each["id"] for each in found["data"]]) == ("list", ["a", "b"])
    assert ask(port, "/v1/models/a").json == found["data"][0]
    for name in ("plain", "failed", "absent"):
        answer = ask(port, f"/v1/models/{name}")
        assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")
    assert "GET /v1/models lists them" in json.dumps(answer.json)
