"""JSON schemas of requests and replies."""

from typing import Any

STRING, BOOLEAN, INTEGER = {"type": "string"}, {"type": "boolean"}, {"type": "integer"}
SIZE = {"type": "integer", "minimum": 0}
PARAMETERS = {
    "type": "object",
    "additionalProperties": {"type": ["boolean", "integer", "number", "string"]},
}
SHAPE = {"type": "array", "items": SIZE}
DATATYPE = {"type": "string", "examples": ["FP32", "INT64", "BOOL", "BYTES"]}
DATA = {
    "type": "array",
    "description": "Elements, row-major: flat, or nested as the shape says. Not for FP16 and BF16. NaN and"
    " infinity cannot be expressed.",
}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"type": "object", "properties": properties}
    return described | ({"required": list(required)} if required else {})


def _array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


DURATION = _object(count=SIZE, ns=SIZE)
TENSOR_METADATA = _object(name=STRING, datatype=DATATYPE, shape=_array(INTEGER))
CONFIG_TENSOR = _object(name=STRING, data_type=STRING, dims=_array(INTEGER))
INPUT_PARAMETERS = PARAMETERS | {
    "description": "binary_data_size: the elements are that many bytes after the JSON. shared_memory_region,"
    " shared_memory_byte_size, shared_memory_offset: they are in shared memory."
}
OUTPUT_PARAMETERS = PARAMETERS | {
    "description": "binary_data: whether the elements follow the JSON. datatype: FP16, BF16 or FP32, the type"
    " in which real numbers are sent. The three parameters of shared memory, as for inputs."
}
REQUEST_PARAMETERS = PARAMETERS | {
    "description": "timeout: the deadline in microseconds. binary_data_output: whether all outputs are"
    " binary data."
}
SCHEMAS: dict[str, Any] = {
    "Error": _object(("error",), error=STRING),
    "InputTensor": _object(
        ("name", "datatype", "shape"),
        name=STRING,
        datatype=DATATYPE,
        shape=SHAPE,
        parameters=INPUT_PARAMETERS,
        data=DATA,
    ),
    "RequestedOutput": _object(("name",), name=STRING, parameters=OUTPUT_PARAMETERS),
    "InferenceRequest": _object(
        ("inputs",),
        id=STRING,
        parameters=REQUEST_PARAMETERS,
        inputs=_array(_reference("InputTensor")),
        outputs=_array(_reference("RequestedOutput")),
    ),
    "OutputTensor": _object(
        ("name", "datatype", "shape"),
        name=STRING,
        datatype=DATATYPE,
        shape=SHAPE,
        parameters=PARAMETERS,
        data=DATA,
    ),
    "InferenceResponse": _object(
        ("model_name", "model_version", "outputs"),
        model_name=STRING,
        model_version=STRING,
        id=STRING,
        parameters=PARAMETERS,
        outputs=_array(_reference("OutputTensor")),
    ),
    "ModelIndex": _object(name=STRING, version=STRING, state=STRING, reason=STRING),
    "ModelStatistics": _object(
        name=STRING,
        version=STRING,
        last_inference=SIZE,
        inference_count=SIZE,
        execution_count=SIZE,
        inference_stats={"type": "object", "additionalProperties": DURATION},
        batch_stats=_array(
            _object(batch_size=SIZE, compute_input=DURATION, compute_infer=DURATION, compute_output=DURATION)
        ),
    ),
}
EMBEDDING_INPUT = {
    "description": "A text, a list of texts, a list of token ids, or a list of such lists.",
    "anyOf": [
        STRING,
        _array(STRING),
        _array(INTEGER),
        _array(_array(INTEGER)),
    ],
}
SCHEMAS |= {
    "EmbeddingRequest": _object(
        ("model", "input"),
        model=STRING,
        input=EMBEDDING_INPUT,
        encoding_format={"enum": ["float", "base64"]},
        dimensions={"type": "integer", "minimum": 1},
        user=STRING,
        prompt=STRING | {"description": "Name of the prompt that is put before each text."},
        truncate=BOOLEAN | {"description": "Whether texts with too many tokens are cut."},
    ),
    "EmbeddingResponse": _object(
        ("object", "data", "model", "usage"),
        object=STRING,
        data=_array(_object(object=STRING, index=SIZE, embedding={"type": ["array", "string"]})),
        model=STRING,
        usage=_object(prompt_tokens=SIZE, total_tokens=SIZE),
        truncated=_array(SIZE) | {"description": "Indices of the texts that were cut."},
    ),
    "Encoder": _object(
        ("id", "object", "created", "owned_by"), id=STRING, object=STRING, created=SIZE, owned_by=STRING
    ),
    "EncoderList": _object(("object", "data"), object=STRING, data=_array(_reference("Encoder"))),
    "EmbeddingError": _object(
        ("error",),
        error=_object(
            ("message", "type"),
            message=STRING,
            type=STRING,
            param={"type": ["string", "null"]},
            code={"type": ["string", "null"]},
        ),
    ),
}
SETTINGS = {"type": "object", "additionalProperties": {"type": ["string", "array", "null"]}}
LOG_SETTINGS = {"type": "object", "additionalProperties": {"type": ["boolean", "integer", "string"]}}
SYSTEM_REGION = _object(("key", "byte_size"), key=STRING, offset=SIZE, byte_size=SIZE)
# Bodies and replies of the methods other than inference, by their names.
BODIES: dict[str, Any] = {
    "RepositoryIndex": _object(ready=BOOLEAN),
    "RepositoryModelLoad": _object(parameters=PARAMETERS),
    "RepositoryModelUnload": _object(parameters=PARAMETERS),
    "TraceSetting": SETTINGS,
    "LogSettings": LOG_SETTINGS,
    "SystemSharedMemoryRegister": SYSTEM_REGION,
    "CudaSharedMemoryRegister": _object(
        ("raw_handle", "byte_size"),
        raw_handle=_object(("b64",), b64=STRING),
        device_id=SIZE,
        byte_size=SIZE,
    ),
}
REPLIES: dict[str, Any] = {
    "ServerLive": _object(live=BOOLEAN),
    "ServerReady": _object(ready=BOOLEAN),
    "ModelReady": _object(ready=BOOLEAN),
    "ServerMetadata": _object(name=STRING, version=STRING, extensions=_array(STRING)),
    "ModelMetadata": _object(
        name=STRING,
        versions=_array(STRING),
        platform=STRING,
        inputs=_array(TENSOR_METADATA),
        outputs=_array(TENSOR_METADATA),
    ),
    "ModelConfig": _object(
        name=STRING,
        platform=STRING,
        max_batch_size=INTEGER,
        input=_array(CONFIG_TENSOR),
        output=_array(CONFIG_TENSOR),
        backend=STRING,
    ),
    "ModelStatistics": _object(model_stats=_array(_reference("ModelStatistics"))),
    "RepositoryIndex": _array(_reference("ModelIndex")),
    "TraceSetting": SETTINGS,
    "LogSettings": LOG_SETTINGS,
    "SystemSharedMemoryStatus": _array(_object(name=STRING, key=STRING, offset=SIZE, byte_size=SIZE)),
    "CudaSharedMemoryStatus": _array(_object(name=STRING, device_id=SIZE, byte_size=SIZE)),
}
