"""Descriptions of models."""

import dataclasses

from attention_client import CostInfo, EncoderInfo, ModelInfo, ParityInfo, PatternInfo, TensorInfo
from attention_client._generated.attention.v1 import attention_pb2 as pb


def test_every_field_is_read():
    axes = [
        pb.Axis(name="batch"),
        pb.Axis(name="length", max_length=512, length_multiple=8),
        pb.Axis(size=768),
    ]
    found = ModelInfo.from_proto(
        pb.Model(
            name="m",
            state=pb.Model.STATE_READY,
            inputs=[
                pb.Tensor(name="query", data_type=pb.DATA_TYPE_FP32, axes=axes),
                pb.Tensor(name="ids", data_type=pb.DATA_TYPE_INT64, exclusive_upper_bounds=[10, 20]),
            ],
            parity=pb.Parity(relative_tolerance=1e-4, absolute_tolerance=1e-5, measured_max_abs_error=2e-7),
            cost=pb.Cost(flops_per_query=1, flops_per_key=2, flops_per_pair=3),
            text_encoder=pb.TextEncoder(num_layers=2, embedding_width=32, dimensions=[8], prompts=["query"]),
            attention_patterns=[pb.AttentionPattern(causal=True, window=3)],
        )
    )
    query = TensorInfo("query", "float32", ("batch", "length", 768), optional=False)
    ids = TensorInfo("ids", "int64", (), optional=False, exclusive_upper_bounds=(10, 20))
    assert (found.name, found.state, found.inputs) == (
        "m", "ready",
        (dataclasses.replace(query, max_lengths={"length": 512}, length_multiples={"length": 8}), ids),
    )  # fmt: skip
    assert (found.parity, found.cost) == (ParityInfo(1e-4, 1e-5, 2e-7), CostInfo(1, 2, 3))
    assert found.text_encoder == EncoderInfo(2, 32, False, (8,), ("query",), "", False)  # noqa: FBT003
    assert found.attention_patterns == (PatternInfo(causal=True, window=3),)
    described = {field.name for field in dataclasses.fields(ModelInfo)}
    assert described == {field.name for field in pb.Model.DESCRIPTOR.fields}


def test_what_a_model_does_not_state_is_none_and_every_data_type_has_a_name():
    model = ModelInfo.from_proto(pb.Model(name="m", state=pb.Model.STATE_FAILED, cost=pb.Cost()))
    assert (model.state, model.parity, model.cost, model.num_heads) == ("failed", None, None, None)
    found = [TensorInfo.from_proto(pb.Tensor(data_type=kind)).data_type for kind in pb.DataType.values()]
    of_tensors = ["unknown", "float32", "float16", "bfloat16", "int64", "bool", "str"]
    assert found == [*of_tensors, *["unknown"] * 3]  # of embeddings only
