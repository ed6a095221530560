"""A server's life: it starts, says how it is, drains and stops; and it is not alone in its process."""

import threading
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2 as reflection_pb
from grpc_reflection.v1alpha import reflection_pb2_grpc

from protos.attention.v1 import attention_pb2 as pb
from protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from server.engine.engine import Engine
from server.engine.model import LoadedModel
from server.engine.repository import Repository
from server.rpc.routes import SERVICES
from server.rpc.server import RpcServer
from tests.server.rpc.test_server_limits import OPTIONS, request
from tests.server.samples import CROSS, SELF
from tests.server.seams import PATIENCE_SECONDS, Calls, Served

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GIVEN_UP = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Stopping:
    """Stops a server on a thread of its own, as a signal's handler would."""

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
    """News of a service's health; untyped as its generated code."""
    message = health_pb2.HealthCheckRequest(service=service)
    return health_pb2_grpc.HealthStub(served.channel).Watch(message, timeout=PATIENCE_SECONDS)


def wait_until_refused(served: Served) -> None:
    """Until several calls in a row, each on a connection of its own, found nobody who listens."""
    refused = 0
    while refused < 5:
        with served.connect() as channel:
            stub = AttentionServiceStub(channel)
            call = stub.ListModels.future(pb.ListModelsRequest(), timeout=PATIENCE_SECONDS)
            # CANCELLED is what gRPC's core says of a call that comes in the very moment.
            assert call.code() in {grpc.StatusCode.OK, *GIVEN_UP}
            refused += call.code() is not grpc.StatusCode.OK


def test_calls_before_the_start_wait_for_it(self_model: LoadedModel) -> None:
    server = RpcServer(OPTIONS, Calls())
    with grpc.insecure_channel(f"{OPTIONS.host}:{server.bind()}") as channel:
        waiting = AttentionServiceStub(channel).Attend.future(request([2]), timeout=PATIENCE_SECONDS)
        engine = Engine(Repository([self_model]))
        server.start(engine)
        assert list(waiting.result(PATIENCE_SECONDS).context_vectors.lengths) == [2]
    server.stop(PATIENCE_SECONDS)
    engine.close()


def test_a_server_that_stops_before_its_start_fails_the_calls_that_wait() -> None:
    server = RpcServer(OPTIONS, Calls())
    with grpc.insecure_channel(f"{OPTIONS.host}:{server.bind()}") as channel:
        waiting = AttentionServiceStub(channel).Attend.future(request([2]), timeout=PATIENCE_SECONDS)
        server.stop(PATIENCE_SECONDS)
        assert waiting.code() in GIVEN_UP


def test_stopping_before_any_call_is_done_at_once(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        Stopping(served, PATIENCE_SECONDS).wait()


def test_a_server_may_be_stopped_twice(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        for _ in range(2):
            Stopping(served, PATIENCE_SECONDS).wait()


def test_stopping_waits_for_the_calls_that_run_and_takes_no_others(self_model: LoadedModel) -> None:
    with Served.held(self_model) as served:
        stub = AttentionServiceStub(served.channel)
        held = stub.Attend.future(request([2]), timeout=PATIENCE_SECONDS)
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


def test_calls_that_outlast_the_grace_are_cancelled(self_model: LoadedModel) -> None:
    with Served.held(self_model) as served:
        stub = AttentionServiceStub(served.channel)
        held = stub.Attend.future(request([2]), timeout=PATIENCE_SECONDS)
        assert served.gate.entered.wait(PATIENCE_SECONDS)
        waiting = stub.Attend.future(request([3]), timeout=PATIENCE_SECONDS)
        opened = stub.AttendStream(iter([pb.AttendStreamRequest(request=request([2]))] * 2))
        assert served.engine.has_queued(4)
        Stopping(served, 0).wait()
        for call in (held, waiting, opened):
            assert call.code() in GIVEN_UP
        ended = served.calls.ended(3)
        assert ended == {("Attend", "CANCELLED"): 2, ("AttendStream", "CANCELLED"): 1}
    assert [run.tokens for run in served.engine.recorder.runs] == [2]


@pytest.mark.parametrize("service", ["", *SERVICES])
def test_who_watches_is_told_of_the_start_and_the_stop(self_model: LoadedModel, service: str) -> None:
    with Served(self_model) as served:
        news = watch(served, service)
        assert next(news).status == SERVING
        stopping = Stopping(served, PATIENCE_SECONDS)
        assert next(news).status == NOT_SERVING
        news.cancel()
        stopping.wait()


def test_more_may_watch_than_calls_may_be_held(self_model: LoadedModel) -> None:
    with Served(self_model, max_concurrent_calls=1, max_streams=1) as served:
        watching = [watch(served, "") for _ in range(3)]
        assert [next(news).status for news in watching] == [SERVING] * 3
        AttentionServiceStub(served.channel).Attend(request([2]), timeout=PATIENCE_SECONDS)
        for news in watching:
            news.cancel()


def test_the_health_of_a_service_that_is_not_there_is_unknown(self_model: LoadedModel) -> None:
    with Served(self_model) as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=PATIENCE_SECONDS)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        news = watch(served, "nobody")
        assert next(news).status == SERVICE_UNKNOWN
        news.cancel()


def test_reflection_lists_the_services_and_describes_their_files(self_model: LoadedModel) -> None:
    asked = [
        reflection_pb.ServerReflectionRequest(list_services=""),
        reflection_pb.ServerReflectionRequest(file_containing_symbol=SERVICES[0]),
        reflection_pb.ServerReflectionRequest(file_containing_symbol="nobody"),
    ]
    with Served(self_model) as served:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        listed, described, unknown = stub.ServerReflectionInfo(iter(asked), timeout=PATIENCE_SECONDS)
    names = {service.name for service in listed.list_services_response.service}
    assert names == {*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert pb.DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_two_servers_of_one_process_do_not_mix(self_model: LoadedModel, cross_model: LoadedModel) -> None:
    with Served.held(self_model) as first:
        held = AttentionServiceStub(first.channel).Attend.future(request([2]), timeout=PATIENCE_SECONDS)
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
