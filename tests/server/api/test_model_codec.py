"""Descriptions of models in attention.v1: what is known, and what is unknown."""

import dataclasses

from attention_serving.artifact.manifest import Cost
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.attention.model_codec import describe
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.repository import FailedModel
from tests.server.samples import HEADS

UNKNOWN_COST = Cost(flops_per_query=0, flops_per_key=0, flops_per_pair=0)


def test_an_attention_model_is_described_with_heads_and_cost(self_model: LoadedModel) -> None:
    described = describe(self_model)
    assert (described.state, described.num_heads, described.causal) == (pb.Model.STATE_READY, HEADS, True)
    cost = {field.name: value for field, value in described.cost.ListFields()}
    assert cost == {name: value for name, value in self_model.manifest.cost.model_dump().items() if value}
    optional = [tensor.name for tensor in (*described.inputs, *described.outputs) if tensor.optional]
    assert optional == ["attention_mask", "attention_weights"]


def test_unknown_heads_and_cost_are_absent(self_model: LoadedModel) -> None:
    manifest = self_model.manifest.model_copy(update={"num_heads": 0, "cost": UNKNOWN_COST})
    described = describe(dataclasses.replace(self_model, manifest=manifest))
    assert not described.HasField("num_heads")
    assert not described.HasField("cost")
    assert described.HasField("parity")


def test_a_failed_model_is_described_with_its_reason_only() -> None:
    described = describe(FailedModel("name", "2", "the reason"))
    assert described == pb.Model(
        name="name", version="2", state=pb.Model.STATE_FAILED, state_reason="the reason"
    )


def test_the_largest_length_of_an_axis_is_stated(cross_model: LoadedModel) -> None:
    manifest = cross_model.manifest.model_copy(update={"max_lengths": {"key_length": 512}})
    described = describe(dataclasses.replace(cross_model, manifest=manifest))
    largest = {axis.name: axis.max_length for tensor in described.inputs for axis in tensor.axes if axis.name}
    assert largest == {"batch": 0, "query_length": 0, "key_length": 512, "mask_heads": 0}
