"""The methods: complete, and of the kinds that the protos state."""

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from attention_serving.protos.attention.v1 import attention_pb2
from attention_serving.protos.inference import open_inference_pb2
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.method import CallKind
from attention_serving.server.api.methods import REFLECTION_V1, SERVICES, HealthService, all_methods
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.security.peers import ACCESS_CHECK
from tests.server.seams import WatchedEngine

FILES: list[Any] = [attention_pb2, open_inference_pb2, health_pb2, reflection_pb2]
KINDS = {
    (False, False): CallKind.UNARY,
    (True, True): CallKind.ORDERED_STREAM,
    (False, True): CallKind.SERVER_STREAMING,
}


def services() -> Iterator[ServiceDescriptor]:
    for file in FILES:
        yield from file.DESCRIPTOR.services_by_name.values()


@pytest.fixture
def engine(self_model: LoadedModel) -> Iterator[WatchedEngine]:
    engine = WatchedEngine([self_model], Limits())
    yield engine
    engine.close()


def test_every_method_of_every_service_is_answered_as_its_kind(
    engine: WatchedEngine, threads: CodecThreads
) -> None:
    table = all_methods(engine, threads, HealthService(SERVICES), lambda: True, identify=lambda *_: None)
    expected = {
        f"/{service.full_name}/{method.name}": KINDS[method.client_streaming, method.server_streaming]
        for service in services()
        for method in service.methods
    }
    expected[f"/{REFLECTION_V1}/ServerReflectionInfo"] = CallKind.ORDERED_STREAM
    expected[ACCESS_CHECK] = CallKind.UNARY
    assert {name: method.kind for name, method in table.items()} == expected


def test_calls_of_our_services_are_counted_and_those_of_grpc_are_not(
    engine: WatchedEngine, threads: CodecThreads
) -> None:
    table = all_methods(engine, threads, HealthService(SERVICES), lambda: True, identify=lambda *_: None)
    assert {name for name, method in table.items() if method.is_counted} == {
        name for name in table if name.startswith(tuple(f"/{service}/" for service in SERVICES))
    }
