"""Mutated calls of every method of gRPC and every route of HTTP: each is answered or refused, none fails.

MUTATED_CALLS is how many there are of both together, and MUTATED_CALLS_SEED the seed of the changes.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import numpy as np
import pytest
from attention_client import AttentionClient

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.server.http.routes import ROUTES
from scripts.local_server import ServerProcess
from tests.encoders.classifiers import CLASSIFIER, CLASSIFIERS, RERANKER
from tests.encoders.repository import SENTENCE
from tests.server.api.messages import vectors
from tests.server.http.clients import ask, tensor
from tests.server.samples import CROSS
from tests.support.artifacts import cached_repositories
from tests.support.contradictions import (
    TYPES,
    WORDS,
    Body,
    contradicted_body,
    contradicted_call,
    good_bodies,
)
from tests.support.mutations import ATTEND, Good, good_requests
from tests.support.processes import serving_models

CALLS = int(os.environ.get("MUTATED_CALLS", "2000"))
SEED = int(os.environ.get("MUTATED_CALLS_SEED", "1"))
QUERY, KEY, VALUE = (np.ones(shape, np.float32) for shape in ((2, 4), (3, 6), (3, 5)))
SERVICE = ATTEND.rpartition("/")[0]
# Of gRPC, by number, and of HTTP.
FAILURES = {"UNKNOWN", "INTERNAL", "DATA_LOSS", "2", "13", "15", "500", "502"}


@pytest.fixture(scope="module")
def server(
    artifacts: Path, sentence_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of all kinds of models, with everything on that callers may use."""
    (classifiers,), folder = cached_repositories(CLASSIFIERS), tmp_path_factory.mktemp("mutated")
    models = [path for models in (artifacts, sentence_repository, classifiers) for path in models.iterdir()]
    contexts = folder / "contexts"
    contexts.mkdir()
    options = ("--http-port=0", "--allow-shared-memory", f"--context-folder={contexts}")
    with serving_models(folder, models, *options) as process:
        yield process


def good_calls(context: str) -> list[Good]:
    """A good message, or an empty one, of each method."""
    rows: dict[str, Any] = {"model_name": CROSS, "key": vectors(KEY), "value": vectors(VALUE)}
    mask = typed.AttentionMask(kind=typed.AttentionMask.KIND_KEYS, bits=b"\5")
    requests, streams = good_requests(), list[Good]()
    messages: list[tuple[str, Any]] = [
        ("Attend", typed.AttendRequest(model_name=CROSS, query=vectors(QUERY), context_id=context)),
        ("PutContext", typed.PutContextRequest(**rows, mask=mask, ttl_seconds=60, shared=True)),
        ("AppendContext", typed.AppendContextRequest(**rows, id=context, ttl_seconds=60)),
        ("DropContext", typed.DropContextRequest(model_name=CROSS, id=context)),
    ]
    for good in requests:
        if good.method == ATTEND:
            request = typed.AttendRequest.FromString(good.data)
            messages.append(("AttendStream", typed.AttendStreamRequest(id="1", request=request)))
        else:
            streams.append(Good(good.method.replace("ModelInfer", "ModelStreamInfer"), good.data))
    requests += streams + [
        Good(f"{SERVICE}/{name}", message.SerializeToString()) for name, message in messages
    ]
    methods = {good.method for good in requests}
    return requests + [Good(method, b"") for method in TYPES if method not in methods]


def further_bodies(context: str) -> list[Body]:
    """A good body of each route that takes one, except those of `good_bodies`."""
    inputs, contexts = [tensor("key", KEY), tensor("value", VALUE)], f"/v2/models/{CROSS}/contexts"
    queries, texts = [tensor("query", QUERY[None])], ["Life is short", "eat"]
    region = {"key": "/mutated", "offset": 0, "byte_size": 64}
    return [
        Body("/v1/rerank", {"model": RERANKER, "query": "eat", "documents": texts, "top_n": 1}),
        Body("/predict", {"model": CLASSIFIER, "inputs": [texts, texts]}),
        Body("/v1/embeddings", {"model": SENTENCE, "input": texts, "truncate": True, "prompt": "query"}),
        Body(contexts, {"inputs": inputs, "parameters": {"ttl_seconds": 60, "shared": True}}),
        Body(contexts, {"inputs": inputs, "parameters": {"append_to": context}}),
        Body(f"/v2/models/{CROSS}/infer", {"inputs": queries, "parameters": {"context_id": context}}),
        Body("/v2/repository/index", {"ready": True}),
        Body("/v2/repository/models/m/load", {"parameters": {"unload_dependents": False}}),
        Body("/v2/systemsharedmemory/region/a/register", region),
    ]


def call(channel: grpc.Channel, good: Good, rng: random.Random) -> str:
    """Sends a mutated message, or a stream of three; returns the status."""
    changed = [contradicted_call(good, rng).data for _ in range(3)]
    try:
        if "Stream" not in good.method:
            unary: Any = channel.unary_unary(good.method)
            unary(changed[0], timeout=30)
            return "OK"
        stream: Any = channel.stream_stream(good.method)
        replies = list(stream(iter(changed), timeout=30))
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code.name
    if not good.method.startswith(SERVICE):
        return "OK"
    codes = {typed.AttendStreamResponse.FromString(reply).error.code for reply in replies}
    return next((str(code) for code in codes if str(code) in FAILURES), "OK")


def request(port: int, body: Body, rng: random.Random) -> str:
    """Sends a mutated request; returns the status, or "closed"."""
    sent, verb = contradicted_body(body, rng), "POST"
    path = sent.method
    if rng.random() < 0.2:  # any route, with any parameters
        route = rng.choice(ROUTES)
        parameters = {name: quote(rng.choice(WORDS), safe="") or "a" for name in ("model", "version")}
        parameters |= {"context": rng.choice(("a", "%00", "%2F")), "region": rng.choice(WORDS) or "a"}
        path = rng.choice(route.paths).format(**parameters)
        verb = rng.choice((route.http_method, "GET", "POST", "DELETE", "HEAD", "PUT"))
    try:
        return str(ask(port, path, sent.data, sent.headers, method=verb).status)
    except (HTTPException, OSError):  # the server closes connections of some bad requests
        return "closed"


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_no_mutated_call_fails(server: ServerProcess) -> None:
    rng, port, statuses = random.Random(SEED), server.http_port, Counter[str]()  # noqa: S311
    with AttentionClient(server.target) as client, grpc.insecure_channel(server.target) as channel:
        for number in range(CALLS // 2):
            if number % 1000 == 0:  # some calls drop the context
                context = client.context(CROSS, KEY, VALUE).id
                calls, bodies = good_calls(context), [*good_bodies(), *further_bodies(context)]
            statuses[call(channel, rng.choice(calls), rng)] += 1
            statuses[request(port, rng.choice(bodies), rng)] += 1
        assert client.attend(CROSS, QUERY, KEY, VALUE).context_vectors.shape == QUERY.shape
    assert not statuses.keys() & FAILURES, statuses
    assert " ERROR " not in server.log.read_text()
