"""The messages of requests other than inference, from the parameters of the path and the JSON of the body."""

import base64
import binascii
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.http import fields, parameters

Paths = dict[str, str]
Document = dict[str, Any]
Reader = Callable[[Paths, Document], Message]
# Parameters of a load that are files of the model, in base64.
FILE_PREFIX = "file:"


def nothing(message: Callable[[], Message]) -> Reader:
    """A reader of a request without content."""
    return lambda _paths, _document: message()


def model(message: Callable[..., Message]) -> Reader:
    """A reader of a request that names a model, or none, and a version, or none."""
    return lambda paths, _document: message(name=paths.get("model", ""), version=paths.get("version", ""))


def region(message: Callable[..., Message]) -> Reader:
    """A reader of a request that names a region of shared memory, or none."""
    return lambda paths, _document: message(name=paths.get("region", ""))


def index(paths: Paths, document: Document) -> Message:
    """{"ready": false}."""
    ready = fields.optional(document, "ready", bool, default=False)
    return pb.RepositoryIndexRequest(repository_name=paths.get("repository", ""), ready=ready)


def load(paths: Paths, document: Document) -> Message:
    """{"parameters": {"config": "...", "file:1/model.onnx": "base64"}}."""
    return pb.RepositoryModelLoadRequest(
        repository_name=paths.get("repository", ""),
        model_name=paths["model"],
        parameters=_repository_parameters(document),
    )


def unload(paths: Paths, document: Document) -> Message:
    """{"parameters": {"unload_dependents": false}}."""
    return pb.RepositoryModelUnloadRequest(
        repository_name=paths.get("repository", ""),
        model_name=paths["model"],
        parameters=_repository_parameters(document),
    )


def system_region(paths: Paths, document: Document) -> Message:
    """{"key": "/vectors", "offset": 0, "byte_size": 64}."""
    return pb.SystemSharedMemoryRegisterRequest(
        name=paths["region"],
        key=fields.required(document, "key", str),
        offset=fields.natural("offset", document.get("offset", 0), fields.MAX_UINT64),
        byte_size=_byte_size(document),
    )


def cuda_region(paths: Paths, document: Document) -> Message:
    """{"raw_handle": {"b64": "..."}, "device_id": 0, "byte_size": 64}."""
    handle = fields.required(document, "raw_handle", dict)
    encoded = fields.required(handle, "b64", str, "raw_handle.b64")
    return pb.CudaSharedMemoryRegisterRequest(
        name=paths["region"],
        raw_handle=_from_base64("raw_handle.b64", encoded),
        device_id=fields.natural("device_id", document.get("device_id", 0)),
        byte_size=_byte_size(document),
    )


def _byte_size(document: Document) -> int:
    return fields.natural("byte_size", fields.required(document, "byte_size", int), fields.MAX_UINT64)


def _repository_parameters(document: Document) -> dict[str, pb.ModelRepositoryParameter]:
    return {name: _parameter(name, value) for name, value in parameters.read(document).items()}


def _parameter(name: str, value: Any) -> pb.ModelRepositoryParameter:
    field = f"parameters[{name}]"
    if isinstance(value, bool):
        return pb.ModelRepositoryParameter(bool_param=value)
    if isinstance(value, int) and -fields.MAX_INT64 - 1 <= value <= fields.MAX_INT64:
        return pb.ModelRepositoryParameter(int64_param=value)
    if not isinstance(value, str):
        raise InvalidRequestError(field, "must be a boolean, an integer of 64 bits or a string")
    if name.startswith(FILE_PREFIX):
        return pb.ModelRepositoryParameter(bytes_param=_from_base64(field, value))
    return pb.ModelRepositoryParameter(string_param=value)


def _from_base64(field: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(field, f"is not base64: {error}") from None
