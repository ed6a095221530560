"""Descriptions of models."""

import dataclasses

from attention_client import CostInfo, EncoderInfo, ModelInfo, ParityInfo, PatternInfo, TensorInfo
from attention_client._generated.attention.v1 import attention_pb2 as pb


def test_every_field_is_read():
    axes = [pb.Axis(name="batch"), pb.Axis(name="query_length", max_length=512), pb.Axis(size=768)]
    model = pb.Model(
        name="m",
        version="3",
        state=pb.Model.STATE_READY,
        inputs=[pb.Tensor(name="query", data_type=pb.DATA_TYPE_FP32, axes=axes)],
        num_heads=12,
        causal=True,
        parity=pb.Parity(relative_tolerance=1e-4, absolute_tolerance=1e-5, measured_max_abs_error=2e-7),
        parameters=2**40,
        cost=pb.Cost(flops_per_query=1, flops_per_key=2, flops_per_pair=3),
        provider="CPUExecutionProvider",
        text_encoder=pb.TextEncoder(num_layers=2, embedding_width=32, dimensions=[8], prompts=["query"]),
        attention_patterns=[pb.AttentionPattern(causal=True, window=3)],
    )
    lengths = {"query_length": 512}
    query = TensorInfo(
        "query", "float32", ("batch", "query_length", 768), optional=False, max_lengths=lengths
    )
    assert ModelInfo.from_proto(model) == ModelInfo(
        name="m",
        version="3",
        state="ready",
        state_reason="",
        description="",
        inputs=(query,),
        outputs=(),
        num_heads=12,
        causal=True,
        accepts_text=False,
        parity=ParityInfo(1e-4, 1e-5, 2e-7),
        parameters=2**40,
        cost=CostInfo(1, 2, 3),
        provider="CPUExecutionProvider",
        text_encoder=EncoderInfo(2, 32, False, (8,), ("query",), "", False),  # noqa: FBT003
        attention_patterns=(PatternInfo(causal=True, window=3),),
    )
    described = {field.name for field in dataclasses.fields(ModelInfo)}
    assert described == {field.name for field in pb.Model.DESCRIPTOR.fields}


def test_what_a_model_does_not_state_is_none_and_every_data_type_has_a_name():
    model = ModelInfo.from_proto(pb.Model(name="m", state=pb.Model.STATE_FAILED, cost=pb.Cost()))
    assert model.state == "failed"
    assert (model.parity, model.cost, model.num_heads, model.text_encoder) == (None, None, None, None)
    found = [TensorInfo.from_proto(pb.Tensor(data_type=kind)).data_type for kind in pb.DataType.values()]
    assert found == ["unknown", "float32", "float16", "bfloat16", "int64", "bool", "str"]
