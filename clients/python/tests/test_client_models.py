"""Descriptions of models."""

import dataclasses

import pytest

from attention_client import CostInfo, ModelInfo, ParityInfo, TensorInfo
from attention_client._generated.attention.v1 import attention_pb2 as pb

QUERY = pb.Tensor(
    name="query",
    data_type=pb.DATA_TYPE_FP32,
    axes=[pb.Axis(name="batch"), pb.Axis(name="query_length", max_length=512), pb.Axis(size=768)],
)
MODEL = pb.Model(
    name="m",
    version="3",
    state=pb.Model.STATE_READY,
    inputs=[QUERY],
    num_heads=12,
    causal=True,
    parity=pb.Parity(relative_tolerance=1e-4, absolute_tolerance=1e-5, measured_max_abs_error=2e-7),
    parameters=2**40,
    cost=pb.Cost(flops_per_query=1, flops_per_key=2, flops_per_pair=3),
    provider="CPUExecutionProvider",
)


def test_every_field_is_read():
    assert ModelInfo.from_proto(MODEL) == ModelInfo(
        name="m",
        version="3",
        state="ready",
        state_reason="",
        description="",
        inputs=(
            TensorInfo(
                "query",
                "float32",
                ("batch", "query_length", 768),
                optional=False,
                max_lengths={"query_length": 512},
            ),
        ),
        outputs=(),
        num_heads=12,
        causal=True,
        accepts_text=False,
        parity=ParityInfo(1e-4, 1e-5, 2e-7),
        parameters=2**40,
        cost=CostInfo(1, 2, 3),
        provider="CPUExecutionProvider",
    )
    assert {field.name for field in dataclasses.fields(ModelInfo)} == {
        field.name for field in pb.Model.DESCRIPTOR.fields
    }


def test_what_a_failed_model_does_not_state_is_none():
    model = ModelInfo.from_proto(
        pb.Model(name="m", state=pb.Model.STATE_FAILED, state_reason="missed tolerance")
    )
    assert (model.state, model.state_reason) == ("failed", "missed tolerance")
    assert model.parity is None
    assert model.cost is None
    assert model.num_heads is None


def test_a_cost_of_zero_operations_is_unknown():
    assert ModelInfo.from_proto(pb.Model(name="m", cost=pb.Cost())).cost is None


@pytest.mark.parametrize(
    ("data_type", "name"),
    list(
        zip(
            pb.DataType.values(),
            ["unknown", "float32", "float16", "bfloat16", "int64", "bool", "str"],
            strict=True,
        )
    ),
)
def test_every_data_type_has_a_name(data_type: pb.DataType.ValueType, name: str):
    assert TensorInfo.from_proto(pb.Tensor(data_type=data_type)).data_type == name
