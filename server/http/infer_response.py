"""A ModelInferResponse as the body of an HTTP response."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.http import parameters, tensors
from attention_serving.server.http.infer_request import OutputForm
from attention_serving.server.http.parameters import BINARY_DATA_SIZE

JSON, BINARY = "application/json", "application/octet-stream"
HEADER_LENGTH = "inference-header-content-length"
# The longest element in JSON for its size: false, with a comma, for one byte.
JSON_BYTES_PER_BYTE = 6


class Encoded(NamedTuple):
    """The body of a response in parts, and its headers."""

    parts: list[bytes]
    headers: Mapping[str, str]


def encode(reply: bytes, form: OutputForm, reservation: Reservation) -> Encoded:
    """Encodes a reply.

    Args:
        reply: The serialized ModelInferResponse.
        form: How the client wants the outputs.
        reservation: Takes the memory of the body.

    Raises:
        InvalidRequestError: An output has no form in JSON and was not requested as binary data.
        OverloadedError: The memory is not available.
    """
    message = pb.ModelInferResponse.FromString(reply)
    document: dict[str, Any] = {"model_name": message.model_name, "model_version": message.model_version}
    if message.id:
        document["id"] = message.id
    if message.parameters:
        document["parameters"] = parameters.decode(message.parameters)
    binary: list[bytes] = []
    document["outputs"] = [
        _output(output, data, form, binary, reservation)
        for output, data in zip(message.outputs, message.raw_output_contents, strict=True)
    ]
    json = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    size = len(json) + sum(map(len, binary))
    headers = {"content-length": str(size), "content-type": BINARY if binary else JSON}
    if binary:
        headers[HEADER_LENGTH] = str(len(json))
    return Encoded([json, *binary], headers)


def _output(
    output: pb.ModelInferResponse.InferOutputTensor,
    data: bytes,
    form: OutputForm,
    binary: list[bytes],
    reservation: Reservation,
) -> dict[str, Any]:
    """The JSON of one output. Its binary data, if it has any, are appended to `binary`."""
    described: dict[str, Any] = {
        "name": output.name,
        "datatype": output.datatype,
        "shape": list(output.shape),
    }
    own = parameters.decode(output.parameters)
    if form.is_binary(output.name) and output.name not in form.shared:
        own[BINARY_DATA_SIZE] = len(data)
        reservation.add(len(data))
        binary.append(data)
    elif output.name not in form.shared:
        reservation.add(JSON_BYTES_PER_BYTE * len(data))
        described["data"] = tensors.to_json(f"outputs[{output.name}]", data, output.datatype)
    return {**described, **({"parameters": own} if own else {})}
