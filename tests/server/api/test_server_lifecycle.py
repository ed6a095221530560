"""The life of a server: bind, start, health, drain, stop."""

import threading
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2 as reflection_pb

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.api.methods import REFLECTION, REFLECTION_V1, REFLECTIONS, SERVICES
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import Repository
from attention_serving.server.grpc_server import RpcServer
from tests.server.api.messages import attend_request
from tests.server.api.test_server_limits import OPTIONS
from tests.server.samples import CROSS, SELF
from tests.server.seams import PATIENCE_SECONDS, Calls, Served

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Stopping:
    """Stops a server on another thread."""

    def __init__(self, served: Served, grace: float) -> None:
        self.seconds: list[float] = []
        self._thread = threading.Thread(target=lambda: self.seconds.append(served.server.stop(grace)))
        self._thread.start()

    @property
    def goes_on(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert len(self.seconds) == 1


def watch(served: Served, service: str) -> Any:
    """Watches the health of a service."""
    message = health_pb2.HealthCheckRequest(service=service)
    return health_pb2_grpc.HealthStub(served.channel).Watch(message, timeout=PATIENCE_SECONDS)


def wait_until_refused(served: Served) -> None:
    """Waits until several calls in a row, each on a connection of its own, fail."""
    refused = 0
    while refused < 5:
        with served.connect() as channel:
            stub = AttentionServiceStub(channel)
            call = stub.ListModels.future(pb.ListModelsRequest(), timeout=PATIENCE_SECONDS)
            assert call.code() in {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
            refused += call.code() is not grpc.StatusCode.OK


def test_calls_before_the_start_wait_for_it(self_model: LoadedModel) -> None:
    server = RpcServer(OPTIONS, Calls())
    with grpc.insecure_channel(f"{OPTIONS.host}:{server.bind()}") as channel:
        waiting = AttentionServiceStub(channel).Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS)
        engine = Engine(Repository([self_model]))
        server.start(engine)
        assert list(waiting.result(PATIENCE_SECONDS).context_vectors.lengths) == [2]
    server.stop(PATIENCE_SECONDS)
    engine.close()


def test_a_server_that_stops_before_its_start_fails_the_calls_that_wait() -> None:
    server = RpcServer(OPTIONS, Calls())
    with grpc.insecure_channel(f"{OPTIONS.host}:{server.bind()}") as channel:
        waiting = AttentionServiceStub(channel).Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS)
        server.stop(PATIENCE_SECONDS)
        assert waiting.code() is grpc.StatusCode.UNAVAILABLE


def test_a_server_without_calls_stops_at_once(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        Stopping(served, PATIENCE_SECONDS).wait()


def test_a_server_can_be_stopped_twice(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        for _ in range(2):
            Stopping(served, PATIENCE_SECONDS).wait()


def test_stopping_waits_for_open_calls_and_accepts_no_others(self_model: LoadedModel) -> None:
    with Served.held(self_model) as served:
        stub = AttentionServiceStub(served.channel)
        held = stub.Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS)
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        news = watch(served, "")
        assert next(news).status == SERVING
        stopping = Stopping(served, PATIENCE_SECONDS)
        assert next(news).status == NOT_SERVING
        news.cancel()
        wait_until_refused(served)
        assert stopping.goes_on
        assert not held.done()
        served.gate.open()
        assert list(held.result(PATIENCE_SECONDS).context_vectors.lengths) == [2]
        stopping.wait()


def test_calls_that_outlast_the_grace_end_with_unavailable(self_model: LoadedModel) -> None:
    with Served.held(self_model) as served:
        stub = AttentionServiceStub(served.channel)
        held = stub.Attend.future(attend_request([2]), timeout=PATIENCE_SECONDS)
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        waiting = stub.Attend.future(attend_request([3]), timeout=PATIENCE_SECONDS)
        opened = stub.AttendStream(iter([pb.AttendStreamRequest(request=attend_request([2]))] * 2))
        assert served.engine.has_queued(4)
        Stopping(served, 0).wait()
        for call in (held, waiting, opened):
            assert call.code() is grpc.StatusCode.UNAVAILABLE
        ended = served.calls.ended(3)
        assert ended == {("Attend", "UNAVAILABLE"): 2, ("AttendStream", "UNAVAILABLE"): 1}
    assert [run.tokens for run in served.engine.recorder.runs] == [2]


@pytest.mark.parametrize("service", ["", *SERVICES])
def test_watchers_receive_the_start_and_the_stop(self_model: LoadedModel, service: str) -> None:
    with Served(self_model) as served:
        news = watch(served, service)
        assert next(news).status == SERVING
        stopping = Stopping(served, PATIENCE_SECONDS)
        assert next(news).status == NOT_SERVING
        news.cancel()
        stopping.wait()


def test_watchers_do_not_count_for_the_limit_of_calls(self_model: LoadedModel) -> None:
    with Served(self_model, max_concurrent_calls=1, max_streams=1) as served:
        watching = [watch(served, "") for _ in range(3)]
        assert [next(news).status for news in watching] == [SERVING] * 3
        AttentionServiceStub(served.channel).Attend(attend_request([2]), timeout=PATIENCE_SECONDS)
        for news in watching:
            news.cancel()


def test_the_health_of_an_unknown_service_is_unknown(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=PATIENCE_SECONDS)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        news = watch(served, "nobody")
        assert next(news).status == SERVICE_UNKNOWN
        news.cancel()


@pytest.mark.parametrize("service", [REFLECTION, REFLECTION_V1], ids=["v1alpha", "v1"])
def test_reflection_lists_the_services_and_describes_their_files(
    self_model: LoadedModel, service: str
) -> None:
    asked = [
        reflection_pb.ServerReflectionRequest(list_services=""),
        reflection_pb.ServerReflectionRequest(file_containing_symbol=SERVICES[0]),
        reflection_pb.ServerReflectionRequest(file_containing_symbol="nobody"),
        reflection_pb.ServerReflectionRequest(file_containing_symbol=service),
    ]
    with Served(self_model) as served:
        method: Any = served.channel.stream_stream(
            f"/{service}/ServerReflectionInfo",
            reflection_pb.ServerReflectionRequest.SerializeToString,
            reflection_pb.ServerReflectionResponse.FromString,
        )
        listed, described, unknown, itself = method(iter(asked), timeout=PATIENCE_SECONDS)
    names = {service.name for service in listed.list_services_response.service}
    assert names == {*SERVICES, "grpc.health.v1.Health", *REFLECTIONS}
    assert pb.DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    (content,) = itself.file_descriptor_response.file_descriptor_proto
    file = descriptor_pb2.FileDescriptorProto.FromString(content)
    assert f"{file.package}.{file.service[0].name}" == service
    assert file.service[0].method[0].input_type == f".{file.package}.ServerReflectionRequest"


def test_two_servers_in_one_process_are_independent(
    self_model: LoadedModel, cross_model: LoadedModel
) -> None:
    with Served.held(self_model) as first:
        held = AttentionServiceStub(first.channel).Attend.future(
            attend_request([2]), timeout=PATIENCE_SECONDS
        )
        assert first.gate.entered.wait(PATIENCE_SECONDS)
        with Served(cross_model) as second:
            listed = [names(served) for served in (first, second)]
        assert listed == [[SELF], [CROSS]]
        assert names(first) == [SELF]
        assert not held.done()
        first.gate.open()
        assert list(held.result(PATIENCE_SECONDS).context_vectors.lengths) == [2]


def names(served: Served) -> list[str]:
    stub = AttentionServiceStub(served.channel)
    return [model.name for model in stub.ListModels(pb.ListModelsRequest(), timeout=PATIENCE_SECONDS).models]
