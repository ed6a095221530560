"""The methods: complete, of the kinds that the protos state; and how models are described."""

import dataclasses
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from attention_serving.artifact.manifest import Cost, GraphKind
from attention_serving.protos.attention.v1 import attention_pb2
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.inference import open_inference_pb2
from attention_serving.protos.tei.v1 import tei_pb2
from attention_serving.server.api.attention.responses import describe
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.method import Method
from attention_serving.server.api.methods import REFLECTION_V1, SERVICES, HealthService, all_methods
from attention_serving.server.api.open_inference.handlers import Handlers
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import FailedModel
from attention_serving.server.security.peers import ACCESS_CHECK
from tests.server.api.scripted import ScriptedCall, calls_of
from tests.server.samples import HEADS, TEXT
from tests.server.seams import unchanged

FILES: list[Any] = [attention_pb2, open_inference_pb2, tei_pb2, health_pb2, reflection_pb2]
KINDS = {
    (False, False): "unary",
    (True, True): "ordered stream",
    (False, True): "server stream",
    (True, False): "client stream",
}


def test_every_method_of_every_service_is_answered_as_its_kind(engine: Engine, threads: CodecThreads) -> None:
    services = HealthService(), unchanged(engine.repository), SharedMemory()
    table = all_methods(engine, threads, *services, authenticate=lambda *_: None)
    expected = {
        f"/{service.full_name}/{method.name}": KINDS[method.client_streaming, method.server_streaming]
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    expected[f"/{REFLECTION_V1}/ServerReflectionInfo"] = "ordered stream"
    expected[ACCESS_CHECK] = "unary"
    assert {name: method.kind for name, method in table.items()} == expected
    # Calls of our services are counted, and those of gRPC's are not.
    ours = tuple(f"/{service}/" for service in SERVICES)
    assert all(method.is_counted == name.startswith(ours) for name, method in table.items())


def test_each_change_is_sent_to_those_that_watch_and_nothing_is_kept_of_them() -> None:
    service, call = HealthService(), ScriptedCall()
    method = Method(kind="server stream", handle=service.watch, right=None)
    call.begin(calls_of(method).serve)
    call.deliver(health_pb2.HealthCheckRequest(service="x" * 5000).SerializeToString())
    unknown = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
    assert call.sent == [unknown.SerializeToString()]
    call.complete_send()
    service.set_models({"x" * 5000})
    service.set_models({"x" * 5000})
    serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    assert call.sent == [unknown.SerializeToString(), serving.SerializeToString()]
    call.complete_send()
    assert list(service._watchers) == [call]
    call.cancel()
    del call
    assert not service._watchers


def test_the_batch_axis_of_texts_is_part_of_their_shape(engine: Engine) -> None:
    handlers = Handlers(engine, lambda: True, unchanged(engine.repository), SharedMemory())
    config = handlers.config(open_inference_pb2.ModelConfigRequest(name=TEXT), ScriptedCall()).config
    assert (config.max_batch_size, [list(tensor.dims) for tensor in config.input]) == (0, [[-1]])


UNKNOWN_COST = Cost(flops_per_query=0, flops_per_key=0, flops_per_pair=0)


def test_an_attention_model_is_described_with_heads_and_cost(self_model: LoadedModel) -> None:
    described = describe(self_model)
    assert (described.state, described.num_heads, described.causal) == (pb.Model.STATE_READY, HEADS, True)
    cost = {field.name: value for field, value in described.cost.ListFields()}
    assert cost == {name: value for name, value in self_model.manifest.cost.model_dump().items() if value}
    optional = [tensor.name for tensor in (*described.inputs, *described.outputs) if tensor.optional]
    assert (
        optional == ["attention_mask", described.attention_weights] == ["attention_mask", "attention_weights"]
    )


def test_the_ids_that_a_model_takes_are_described(text_model: LoadedModel) -> None:
    bounds = [list(tensor.exclusive_upper_bounds) for tensor in describe(text_model).inputs]
    assert bounds[0] == [text_model.inputs[0].exclusive_upper_bound]


def test_what_is_unknown_of_a_model_is_absent(self_model: LoadedModel) -> None:
    graphs = {GraphKind.PLAIN: self_model.manifest.graphs[GraphKind.PLAIN]}
    unknown = {"num_heads": 0, "cost": UNKNOWN_COST, "graphs": graphs}
    manifest = self_model.manifest.model_copy(update=unknown)
    described = describe(dataclasses.replace(self_model, manifest=manifest))
    assert [described.HasField(name) for name in ("num_heads", "cost", "parity")] == [False, False, True]
    failed = pb.Model(name="name", version="2", state=pb.Model.STATE_FAILED, state_reason="the reason")
    assert describe(FailedModel("name", "2", "the reason")) == failed


def test_the_limits_of_lengths_are_stated(cross_model: LoadedModel) -> None:
    limits = {"max_lengths": {"key_length": 512}, "min_lengths": {"key_length": 8}}
    limits["length_multiples"] = {"query_length": 4}
    manifest = cross_model.manifest.model_copy(update=limits)
    described = describe(dataclasses.replace(cross_model, manifest=manifest))
    axes = {axis.name: axis for tensor in described.inputs for axis in tensor.axes if axis.name}
    stated = {name: (axis.max_length, axis.min_length, axis.length_multiple) for name, axis in axes.items()}
    none = (0, 0, 0)
    expected = {"batch": none, "query_length": (0, 0, 4), "key_length": (512, 8, 0), "mask_heads": none}
    assert stated == expected
