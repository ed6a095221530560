"""A gRPC server in this process, whose answers a test chooses."""

import re
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._generated.attention.v1 import attention_pb2_grpc as pb_grpc

Behaviour = Callable[[grpc.ServicerContext], None]


HEADS = 3
READY = pb.Model(name="m", version="3", state=pb.Model.STATE_READY)


class Service(pb_grpc.AttentionServiceServicer):
    """Returns the query, or zeros, as the context vectors; records each attempt; `before` may abort it.

    The words and commas of a text are its tokens. Weights count up by 0.01; the model `mute` has none.

    Attributes:
        attempts: The metadata of each attempt that arrived.
        requests: The requests of Attend.
        digests: Those of the models that answer, in turn.
    """

    def __init__(self, before: Behaviour = lambda _: None, models: Sequence[pb.Model] = (READY,)) -> None:
        self.attempts: list[dict[str, Any]] = []
        self.requests: list[pb.AttendRequest] = []
        self.digests: Iterator[str] = repeat("")
        self._before, self._models = before, {model.name: model for model in models}

    def ListModels(self, request: pb.ListModelsRequest, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        self._begin(context)
        return pb.ListModelsResponse(models=self._models.values())

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._begin(context)
        model = self._models.get(request.name)
        if model is None or request.version not in ("", model.version):
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.name} {request.version}")
        return pb.GetModelResponse(model=model)

    def Attend(self, request: pb.AttendRequest, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self._begin(context)
        self.requests.append(request)
        return answer(request, next(self.digests))

    def AttendStream(  # noqa: N802
        self, requests: Iterator[pb.AttendStreamRequest], context: grpc.ServicerContext
    ) -> Any:
        self._begin(context)
        for item in requests:
            yield pb.AttendStreamResponse(id=item.id, response=answer(item.request, next(self.digests)))

    def _begin(self, context: grpc.ServicerContext) -> None:
        self.attempts.append(dict(context.invocation_metadata()))
        self._before(context)


def answer(request: pb.AttendRequest, digest: str = "") -> pb.AttendResponse:
    """See Service."""
    vectors = request.query
    tokens = [[word.span() for word in re.finditer(r",|[^\s,]+", text)] for text in request.text.texts]
    if not request.HasField("query"):
        lengths = list(map(len, tokens)) or list(request.token_ids.lengths)
        data = bytes(28 * sum(lengths))
        vectors = pb.VectorSequences(data_type=pb.DATA_TYPE_FP32, width=7, lengths=lengths, data=data)
    version = request.model_version or "3"
    response = pb.AttendResponse(
        model_name=request.model_name, model_version=version, context_vectors=vectors, model_digest=digest
    )
    if request.return_offsets:
        starts, ends = zip(*chain(*tokens), strict=True)
        response.token_offsets.CopyFrom(pb.Spans(lengths=vectors.lengths, starts=starts, ends=ends))
    if request.return_weights and request.model_name != "mute":
        keys = request.key.lengths or vectors.lengths
        count = sum(HEADS * tq * tk for tq, tk in zip(vectors.lengths, keys, strict=True))
        weights = response.attention_weights
        weights.data_type, weights.num_heads = pb.DATA_TYPE_FP32, HEADS
        weights.query_lengths.extend(vectors.lengths)
        weights.key_lengths.extend(keys)
        weights.data = (np.arange(count, dtype="<f4") / 100).tobytes()
    return response


def unavailable(times: int) -> Behaviour:
    """Answers the first attempts with UNAVAILABLE."""
    remaining = iter(range(times))

    def fail(context: grpc.ServicerContext) -> None:
        if next(remaining, None) is not None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")

    return fail


@contextmanager
def running(
    service: Service,
    *,
    port: int = 0,
    credentials: grpc.ServerCredentials | None = None,
    options: list[tuple[str, Any]] | None = None,
) -> Iterator[str]:
    """Serves until the block ends; yields HOST:PORT."""
    checks = health.HealthServicer()
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    server = grpc.server(ThreadPoolExecutor(8), options=options)
    pb_grpc.add_AttentionServiceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    address = f"127.0.0.1:{port}"
    bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        server.stop(None).wait()


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that refuses connections until a server is started on it."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC's servers do
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
