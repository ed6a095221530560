"""Inference with a scripted server: the message that it receives, and outputs that no model here has."""

from tritonclient import http as triton

from attention_serving.protos.inference import open_inference_pb2 as pb
from tests.server.http.clients import ask, binary_body, tensor
from tests.server.http.scripted import Scripted
from tests.server.http.test_inference import QUERY

BINARY_OUTPUT = {"binary_data_output": True}


def test_inference_becomes_raw_contents(server: Scripted, front_port: int) -> None:
    shared = {"shared_memory_region": "a", "shared_memory_byte_size": 96, "shared_memory_offset": 4}
    described = {"shape": [2, 3, 4], "datatype": "FP32"}
    body, headers = binary_body(
        {
            "id": "7",
            "parameters": {"timeout": 5, "a": True, "b": 1.5, "c": "x", "d": 2**64 - 1, **BINARY_OUTPUT},
            "inputs": [
                tensor("json", QUERY),
                {"name": "shared", **described, "parameters": shared},
                {"name": "binary", **described, "parameters": {"binary_data_size": 96, "p": -3}},
                {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["ä", ""]},
            ],
            "outputs": [
                {"name": "x", "parameters": {"binary_data": False, "datatype": "FP16"}},
                {"name": "y", "parameters": shared},
            ],
        },
        (-QUERY).tobytes(),
    )
    assert ask(front_port, "/v2/models/m/versions/2/infer", body, headers).status == 200
    request: pb.ModelInferRequest = server.next().request
    assert (request.model_name, request.model_version, request.id) == ("m", "2", "7")
    values = {name: (each.WhichOneof("parameter_choice"), each) for name, each in request.parameters.items()}
    assert {name: choice for name, (choice, _) in values.items()} == {
        "timeout": "int64_param",
        "a": "bool_param",
        "b": "double_param",
        "c": "string_param",
        "d": "uint64_param",
    }
    assert [each.name for each in request.inputs] == ["json", "shared", "binary", "text"]
    assert request.inputs[1].parameters["shared_memory_offset"].int64_param == 4
    assert dict(request.inputs[2].parameters) == {"p": pb.InferParameter(int64_param=-3)}
    assert list(request.raw_input_contents) == [
        QUERY.tobytes(),
        (-QUERY).tobytes(),
        b"\x02\0\0\0\xc3\xa4\0\0\0\0",
    ]
    assert dict(request.outputs[0].parameters) == {"datatype": pb.InferParameter(string_param="FP16")}
    assert set(request.outputs[1].parameters) == set(shared)


def test_outputs_of_every_kind(server: Scripted, front_port: int) -> None:
    output = pb.ModelInferResponse.InferOutputTensor
    region = {"shared_memory_region": pb.InferParameter(string_param="a")}
    reply = pb.ModelInferResponse(
        model_name="m",
        model_version="2",
        id="7",
        parameters={"p": pb.InferParameter(int64_param=2)},
        outputs=[
            output(name="shared", datatype="FP32", shape=[3], parameters=region),
            output(name="binary", datatype="FP16", shape=[2]),
            output(name="text", datatype="BYTES", shape=[2]),
            output(name="flags", datatype="BOOL", shape=[2]),
            output(name="large", datatype="UINT64", shape=[1]),
        ],
        raw_output_contents=[b"", b"abcd", b"\x02\0\0\0\xc3\xa4\0\0\0\0", b"\1\0", b"\xff" * 8],
    )
    server.behaviours["ModelInfer"] = lambda _request, _context: reply
    outputs = [
        {"name": "shared", "parameters": {"shared_memory_region": "a"}},
        {"name": "binary", "parameters": {"binary_data": True}},
        *({"name": name} for name in ("text", "flags", "large")),
    ]
    answer = ask(front_port, "/v2/models/m/infer", {"inputs": [], "outputs": outputs})
    assert answer.headers["content-type"] == "application/octet-stream"
    size = int(answer.headers["inference-header-content-length"])
    assert answer.body[size:] == b"abcd"
    assert triton.InferResult.from_response_body(answer.body, header_length=size).get_response() == {
        "model_name": "m",
        "model_version": "2",
        "id": "7",
        "parameters": {"p": 2},
        "outputs": [
            {"name": "shared", "datatype": "FP32", "shape": [3], "parameters": {"shared_memory_region": "a"}},
            {"name": "binary", "datatype": "FP16", "shape": [2], "parameters": {"binary_data_size": 4}},
            {"name": "text", "datatype": "BYTES", "shape": [2], "data": ["ä", ""]},
            {"name": "flags", "datatype": "BOOL", "shape": [2], "data": [True, False]},
            {"name": "large", "datatype": "UINT64", "shape": [1], "data": [2**64 - 1]},
        ],
    }
