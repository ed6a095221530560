"""The description of the protocol as an OpenAPI document, made from the table of routes and the models."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from attention_serving.server import NAME, VERSION
from attention_serving.server.http import embeddings, schemas
from attention_serving.server.http.backend import SERVICE
from attention_serving.server.http.methods import INFER_PATHS, METHODS, Method, to_json

PARAMETER = re.compile(r"\{(\w+)\}")
DESCRIPTIONS = {
    "model": "Name of a model.",
    "version": "Version of the model. Without one, the highest that is ready.",
    "region": "Name of a region of shared memory.",
    "repository": "Name of a repository. The server has one, without a name.",
}
ERRORS = {
    "400": "The request is wrong, or the server or model is not ready.",
    "401": "The gRPC server asks for a token.",
    "403": "The token does not permit this.",
    "404": "The model, version, region or path does not exist.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The Content-Encoding is not supported.",
    "429": "The gRPC server is at a limit. Retry after the seconds of Retry-After.",
    "500": "The server failed; its log has the details.",
    "501": "The server does not support this method.",
    "503": "This process is at a limit, or the gRPC server drains or cannot be reached. See Retry-After.",
    "504": "The deadline passed.",
}
STRING, INTEGER, SIZE = {"type": "string"}, {"type": "integer"}, {"type": "integer", "minimum": 0}
BINARY, TEXT = {"type": "string", "format": "binary"}, {"type": ["string", "null"]}
# JSON types of the fields of messages; integers for the others.
KINDS: dict[int, dict[str, Any]] = {
    FieldDescriptor.TYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.TYPE_STRING: STRING,
    FieldDescriptor.TYPE_BYTES: STRING,
    FieldDescriptor.TYPE_ENUM: STRING,
    FieldDescriptor.TYPE_FLOAT: {"type": "number"},
    FieldDescriptor.TYPE_DOUBLE: {"type": "number"},
}
PARAMETERS = {"type": "object", "additionalProperties": {"type": ["boolean", "integer", "number", "string"]}}
SETTINGS = {
    "type": "object",
    "additionalProperties": {"type": ["boolean", "integer", "string", "array", "null"]},
}
HEADERS = (
    ("Inference-Header-Content-Length", "Size of the JSON in bytes, if binary tensors follow it.", INTEGER),
    ("Content-Encoding", "How the body is compressed.", {"enum": ["identity", "gzip", "deflate"]}),
)


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _schema(message: Descriptor) -> dict[str, Any]:
    """What `to_json` makes of a message."""
    return _object(**{field.name: _field(field) for field in message.fields})


def _field(field: FieldDescriptor) -> dict[str, Any]:
    kind = _schema(field.message_type) if field.message_type else KINDS.get(field.type, INTEGER)
    return _array(kind) if field.is_repeated else kind


OUTPUT = _object(
    name=STRING, datatype=STRING, shape=_array(SIZE), parameters=PARAMETERS, data={"type": "array"}
)
EMBEDDING = _object(object=STRING, index=SIZE, embedding={"type": ["array", "string"]})
ENCODER = _object(id=STRING, object=STRING, created=SIZE, owned_by=STRING)
TRUNCATED = _array(SIZE) | {"description": "Indices of the texts that were cut."}
USAGE = _object(prompt_tokens=SIZE, total_tokens=SIZE)
# Replies that are not the messages of gRPC.
REPLIES = {
    "Error": _object(error=STRING),
    "InferenceResponse": _object(
        model_name=STRING, model_version=STRING, id=STRING, parameters=PARAMETERS, outputs=_array(OUTPUT)
    ),
    "EmbeddingResponse": _object(
        object=STRING, data=_array(EMBEDDING), model=STRING, usage=USAGE, truncated=TRUNCATED
    ),
    "Encoder": ENCODER,
    "EncoderList": _object(object=STRING, data=_array(ENCODER)),
    "EmbeddingError": _object(error=_object(message=STRING, type=STRING, param=TEXT, code=TEXT)),
}


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {path: {"post": _inference(path)} for path in INFER_PATHS}
    for method in METHODS:
        for path in method.paths:
            paths.setdefault(path, {})[method.verb.lower()] = _method(method, path)
    openai = dict.fromkeys(ERRORS, _content("The request was refused.", _reference("EmbeddingError")))
    summary = "Computes the embeddings of texts, as OpenAI's API does."
    reply = _content("The embeddings.", _reference("EmbeddingResponse"))
    operation = _operation("Embeddings", "post", embeddings.PATH, summary, {"200": reply, **openai})
    paths[embeddings.PATH] = {"post": operation | _request(schemas.EmbeddingRequest)}
    for path, name in zip(embeddings.MODEL_PATHS, ("EncoderList", "Encoder"), strict=True):
        summary = "The text encoders that are ready, as OpenAI's API does."
        reply = _content("The models.", _reference(name))
        paths[path] = {"get": _operation("EncoderModels", "get", path, summary, {"200": reply, **openai})}
    bodies: set[type[BaseModel]] = {schemas.InferenceRequest, schemas.EmbeddingRequest}
    bodies |= {method.body for method in METHODS if method.body}
    inputs: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (model, "validation") for model in sorted(bodies, key=lambda model: model.__name__)
    ]
    _, found = models_json_schema(inputs, ref_template="#/components/schemas/{model}")
    error = _reference("Error")
    return {
        "openapi": "3.1.0",
        "info": {
            "title": NAME,
            "version": VERSION,
            "description": "The Open Inference Protocol over HTTP, with Triton's extensions, and OpenAI's"
            " embeddings.",
        },
        "paths": paths,
        "components": {
            "schemas": {**found["$defs"], **REPLIES},
            "responses": {f"Error{status}": _content(text, error) for status, text in ERRORS.items()},
        },
    }


def _method(method: Method, path: str) -> dict[str, Any]:
    responses = {"200": _content("The reply.", _reply(method)), **_errors()}
    operation = _operation(method.rpc, method.verb.lower(), path, method.summary, responses)
    return operation | (_request(method.body) if method.body else {})


def _reply(method: Method) -> dict[str, Any]:
    reply = SERVICE.methods_by_name[method.rpc].output_type
    if method.answer is to_json:
        return _schema(reply)
    # Otherwise it is the one member of the message: settings, the values of another map, or a list.
    (field,) = reply.fields
    if field.name == "settings":
        return SETTINGS
    if field.message_type.GetOptions().map_entry:
        return _array(_schema(field.message_type.fields_by_name["value"].message_type))
    return _field(field)


def _inference(path: str) -> dict[str, Any]:
    outputs = _content("The outputs.", _reference("InferenceResponse"))
    outputs["content"]["application/octet-stream"] = {"schema": BINARY}
    operation = _operation(
        "ModelInfer", "post", path, "Computes the outputs of a model.", {"200": outputs, **_errors()}
    )
    operation["parameters"] += [
        {"name": name, "in": "header", "description": description, "schema": schema}
        for name, description, schema in HEADERS
    ]
    request = _request(schemas.InferenceRequest)
    request["requestBody"]["content"]["application/octet-stream"] = {"schema": BINARY}
    return operation | request


def _operation(rpc: str, verb: str, path: str, summary: str, responses: Mapping[str, Any]) -> dict[str, Any]:
    names = PARAMETER.findall(path)
    return {
        # The same method has several paths, and an identifier for each.
        "operationId": "_".join([rpc, verb, *names]),
        "summary": summary,
        "parameters": [
            {
                "name": name,
                "in": "path",
                "required": True,
                "description": DESCRIPTIONS[name],
                "schema": STRING,
            }
            for name in names
        ],
        "responses": responses,
    }


def _request(model: type) -> dict[str, Any]:
    return {"requestBody": {"content": {"application/json": {"schema": _reference(model.__name__)}}}}


def _content(description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _errors() -> dict[str, Any]:
    return {status: {"$ref": f"#/components/responses/Error{status}"} for status in ERRORS}
