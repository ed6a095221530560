"""The Open Inference Protocol: the names, numbers and types that existing clients depend on."""

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from protos.inference.open_inference_pb2 import DESCRIPTOR

TENSOR = "name=1 datatype=2 shape[]=3 parameters[]=4 contents=5"
MODEL = "name=1 version=2"
# Fields and their numbers; [] is a repeated field or a map.
MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live=1",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready=1",
    "ModelReadyRequest": MODEL,
    "ModelReadyResponse": "ready=1",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name=1 version=2 extensions[]=3",
    "ModelMetadataRequest": MODEL,
    "ModelMetadataResponse": "name=1 versions[]=2 platform=3 inputs[]=4 outputs[]=5",
    "ModelMetadataResponse.TensorMetadata": "name=1 datatype=2 shape[]=3",
    "InferParameter": "bool_param=1 int64_param=2 string_param=3 double_param=4 uint64_param=5",
    "InferTensorContents": (
        "bool_contents[]=1 int_contents[]=2 int64_contents[]=3 uint_contents[]=4 "
        "uint64_contents[]=5 fp32_contents[]=6 fp64_contents[]=7 bytes_contents[]=8"
    ),
    "ModelInferRequest": (
        "model_name=1 model_version=2 id=3 parameters[]=4 inputs[]=5 outputs[]=6 raw_input_contents[]=7"
    ),
    "ModelInferRequest.InferInputTensor": TENSOR,
    "ModelInferRequest.InferRequestedOutputTensor": "name=1 parameters[]=2",
    "ModelInferResponse": (
        "model_name=1 model_version=2 id=3 parameters[]=4 outputs[]=5 raw_output_contents[]=6"
    ),
    "ModelInferResponse.InferOutputTensor": TENSOR,
    # Of Triton's configuration, what load generators read.
    "ModelInput": "name=1 data_type=2 dims[]=4",
    "ModelOutput": "name=1 data_type=2 dims[]=3",
    "ModelConfig": "name=1 platform=2 max_batch_size=4 input[]=5 output[]=6",
    "ModelConfigRequest": MODEL,
    "ModelConfigResponse": "config=1",
}
DATA_TYPES = (
    "BOOL=1 UINT8=2 UINT16=3 UINT32=4 UINT64=5 INT8=6 INT16=7 INT32=8 INT64=9 FP16=10 FP32=11 FP64=12"
)
BOOL, INT32, INT64 = FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64
UINT32, UINT64 = FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64
FLOAT, DOUBLE = FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE
STRING, BYTES = FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES
MESSAGE, ENUM = FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_ENUM
# Types by name, which no two messages use differently.
TYPES = {
    "live": BOOL, "ready": BOOL, "id": STRING, "platform": STRING, "extensions": STRING,
    "name": STRING, "version": STRING, "versions": STRING, "model_name": STRING, "model_version": STRING,
    "datatype": STRING, "shape": INT64, "inputs": MESSAGE, "outputs": MESSAGE,
    "parameters": MESSAGE, "contents": MESSAGE, "config": MESSAGE, "input": MESSAGE, "output": MESSAGE,
    "data_type": ENUM, "dims": INT64, "max_batch_size": INT32,
    "raw_input_contents": BYTES, "raw_output_contents": BYTES,
    "bool_param": BOOL, "int64_param": INT64, "string_param": STRING, "double_param": DOUBLE,
    "uint64_param": UINT64,
    "bool_contents": BOOL, "int_contents": INT32, "int64_contents": INT64, "uint_contents": UINT32,
    "uint64_contents": UINT64, "fp32_contents": FLOAT, "fp64_contents": DOUBLE, "bytes_contents": BYTES,
}  # fmt: skip
METHODS = {
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelConfig",
    "ModelInfer",
}


def message(name: str) -> Descriptor:
    outer, *inner = name.split(".")
    found: Descriptor = DESCRIPTOR.message_types_by_name[outer]
    for nested in inner:
        found = found.nested_types_by_name[nested]
    return found


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_the_protocol_s_fields_and_numbers(name: str) -> None:
    fields = message(name).fields
    written = " ".join(f"{field.name}{'[]' * field.is_repeated}={field.number}" for field in fields)
    assert written == MESSAGES[name]


@pytest.mark.parametrize("name", MESSAGES)
def test_a_field_has_the_protocol_s_type(name: str) -> None:
    types = {field.name: field.type for field in message(name).fields}
    assert types == {field: TYPES[field] for field in types}


@pytest.mark.parametrize("name", [name for name, fields in MESSAGES.items() if "parameters[]" in fields])
def test_parameters_are_a_map_of_text_to_one_parameter(name: str) -> None:
    entry = message(name).fields_by_name["parameters"].message_type
    assert entry.GetOptions().map_entry
    assert entry.fields_by_name["key"].type == STRING
    assert entry.fields_by_name["value"].message_type.full_name == "inference.InferParameter"


def test_a_parameter_is_one_of_its_values() -> None:
    (choice,) = message("InferParameter").oneofs
    assert choice.name == "parameter_choice"
    assert [field.number for field in choice.fields] == [1, 2, 3, 4, 5]


def test_element_types_have_triton_s_numbers() -> None:
    values = DESCRIPTOR.enum_types_by_name["DataType"].values_by_number
    written = " ".join(f"{values[number].name.removeprefix('TYPE_')}={number}" for number in range(1, 13))
    assert written == DATA_TYPES
    assert [values[number].name for number in (0, 13, 14)] == ["TYPE_INVALID", "TYPE_STRING", "TYPE_BF16"]


def test_every_message_is_listed_above() -> None:
    outer = DESCRIPTOR.message_types_by_name
    inner = {
        f"{name}.{nested.name}"
        for name, found in outer.items()
        for nested in found.nested_types
        if not nested.GetOptions().map_entry
    }
    assert {*outer, *inner} == set(MESSAGES)


def test_the_service_has_the_protocol_s_name_and_methods() -> None:
    service = DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert service.full_name == "inference.GRPCInferenceService"
    assert set(service.methods_by_name) >= METHODS


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_has_a_request_and_a_response_of_its_name(name: str) -> None:
    method = DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[name]
    assert method.input_type.full_name == f"inference.{name}Request"
    assert method.output_type.full_name == f"inference.{name}Response"
    assert not method.client_streaming
    assert not method.server_streaming
