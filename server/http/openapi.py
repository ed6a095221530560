"""The description of the protocol as an OpenAPI document, made from the table of routes and the models."""

import re
from functools import cache
from typing import Any, Literal

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from attention_serving.server import NAME, VERSION
from attention_serving.server.http.routes import ROUTES, SERVICE, Route, regions
from attention_serving.server.http.schemas import to_json

PARAMETER = re.compile(r"\{(\w+)\}")
STRING, INTEGER, OBJECT = {"type": "string"}, {"type": "integer"}, {"type": "object"}
BINARY = {"type": "string", "format": "binary"}
# JSON types of the fields of messages by their types in C++; integers for the others.
KINDS = {
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_FLOAT: "number",
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
    FieldDescriptor.CPPTYPE_STRING: "string",
    FieldDescriptor.CPPTYPE_ENUM: "string",
}
HEADERS = (
    ("Inference-Header-Content-Length", "Size of the JSON in bytes, if binary tensors follow it.", INTEGER),
    ("Content-Encoding", "How the body is compressed.", {"enum": ["identity", "gzip", "deflate"]}),
)


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _schema(message: Descriptor) -> dict[str, Any]:
    """What `to_json` makes of a message."""
    return _object(**{field.name: _field(field) for field in message.fields})


def _field(field: FieldDescriptor) -> dict[str, Any]:
    kind = {"type": KINDS.get(field.cpp_type, "integer")}
    if field.message_type is not None:
        kind = OBJECT if field.message_type.GetOptions().map_entry else _schema(field.message_type)
    return _array(kind) if field.is_repeated and kind is not OBJECT else kind


ENCODER = _object(id=STRING, object=STRING, created=INTEGER, owned_by=STRING)
EMBEDDING = _object(object=STRING, index=INTEGER, embedding={"type": ["array", "string"]})
OUTPUT = _object(name=STRING, datatype=STRING, shape=_array(INTEGER), parameters=OBJECT, data=_array({}))
NAMES = {"model_name": STRING, "model_version": STRING, "id": STRING}
# Replies that are not the messages of gRPC.
REPLIES = {
    "ModelInfer": _object(**NAMES, parameters=OBJECT, outputs=_array(OUTPUT)),
    "Embeddings": _object(
        object=STRING, data=_array(EMBEDDING), model=STRING, usage=OBJECT, truncated=_array(INTEGER)
    ),
    "EncoderModels": {"anyOf": [_object(object=STRING, data=_array(ENCODER)), ENCODER]},
}
REFUSED = "The request was refused. The error is a text; for /v1, an object as OpenAI's API has it."


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        for path in route.paths:
            paths.setdefault(path, {})[route.verb.lower()] = _operation(route, path)
    bodies = {route.body for route in ROUTES if route.body is not None}
    inputs: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (model, "validation") for model in sorted(bodies, key=lambda model: model.__name__)
    ]
    _, found = models_json_schema(inputs, ref_template="#/components/schemas/{model}")
    about = "The Open Inference Protocol over HTTP, with Triton's extensions, and OpenAI's embeddings."
    return {
        "openapi": "3.1.0",
        "info": {"title": NAME, "version": VERSION, "description": about},
        "paths": paths,
        "components": {
            "schemas": found["$defs"],
            "responses": {"Error": _content(REFUSED, _object(error={}))},
        },
    }


def _operation(route: Route, path: str) -> dict[str, Any]:
    names = PARAMETER.findall(path)
    reply = _content("The reply.", _reply(route))
    parameters: list[Any] = [
        {"name": name, "in": "path", "required": True, "description": "", "schema": STRING} for name in names
    ]
    operation: dict[str, Any] = {
        # The same route has several paths, and an identifier for each.
        "operationId": "_".join([route.name, route.verb.lower(), *names]),
        "summary": route.summary,
        "parameters": parameters,
        "responses": {"200": reply, "default": {"$ref": "#/components/responses/Error"}},
    }
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    if route.name == "ModelInfer":
        parameters += [
            {"name": name, "in": "header", "description": about, "schema": schema}
            for name, about, schema in HEADERS
        ]
        for content in (reply["content"], operation["requestBody"]["content"]):
            content["application/octet-stream"] = {"schema": BINARY}
    return operation


def _reply(route: Route) -> dict[str, Any]:
    if route.name in REPLIES:
        return REPLIES[route.name]
    reply = SERVICE.methods_by_name[route.name].output_type
    if route.answer is to_json:
        return _schema(reply)
    # Otherwise it is the one member of the message: settings, or the regions of a map as a list.
    (field,) = reply.fields
    return _array({}) if route.answer is regions else _field(field)


def _content(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
