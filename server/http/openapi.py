"""The description of the protocol as an OpenAPI document, made from the table of routes and the models."""

import re
from functools import cache
from typing import Any, Literal

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from attention_serving.server import NAME, VERSION
from attention_serving.server.http.routes import ROUTES, SERVICE, Route
from attention_serving.server.http.schemas import to_json

PARAMETER = re.compile(r"\{(\w+)\}")
DESCRIPTIONS = {
    "model": "Name of a model.",
    "version": "Version of the model. Without one, the highest that is ready.",
    "region": "Name of a region of shared memory.",
    "repository": "Name of a repository. The server has one, without a name.",
}
STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
BINARY, TEXT = {"type": "string", "format": "binary"}, {"type": ["string", "null"]}
# JSON types of the fields of messages; integers for the others.
KINDS: dict[int, dict[str, Any]] = {
    FieldDescriptor.TYPE_BOOL: {"type": "boolean"},
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE), NUMBER),
    **dict.fromkeys(
        (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_ENUM), STRING
    ),
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
    kind = _schema(field.message_type) if field.message_type else KINDS.get(field.type, INTEGER)
    return _array(kind) if field.is_repeated else kind


SETTINGS = {"type": "object", "additionalProperties": True}
OUTPUT = _object(name=STRING, datatype=STRING, shape=_array(INTEGER), parameters=SETTINGS, data=_array({}))
EMBEDDING = _object(object=STRING, index=INTEGER, embedding={"type": ["array", "string"]})
USAGE = _object(prompt_tokens=INTEGER, total_tokens=INTEGER)
ENCODER = _object(id=STRING, object=STRING, created=INTEGER, owned_by=STRING)
# Replies that are not the messages of gRPC; a single model has the members of one of the list.
REPLIES = {
    "ModelInfer": _object(
        model_name=STRING, model_version=STRING, id=STRING, parameters=SETTINGS, outputs=_array(OUTPUT)
    ),
    "Embeddings": _object(
        object=STRING, data=_array(EMBEDDING), model=STRING, usage=USAGE, truncated=_array(INTEGER)
    ),
    "EncoderModels": {"anyOf": [_object(object=STRING, data=_array(ENCODER)), ENCODER]},
}
ERROR = {"anyOf": [STRING, _object(message=STRING, type=STRING, param=TEXT, code=TEXT)]}
REFUSED = "The request was refused. The error is a text, or an object as OpenAI's API has it on its paths."


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
            "responses": {"Error": _content(REFUSED, _object(error=ERROR))},
        },
    }


def _operation(route: Route, path: str) -> dict[str, Any]:
    names = PARAMETER.findall(path)
    reply = _content("The reply.", _reply(route))
    parameters: list[Any] = [
        {"name": name, "in": "path", "required": True, "description": DESCRIPTIONS[name], "schema": STRING}
        for name in names
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
    # Otherwise it is the one member of the message: settings, the values of another map, or a list.
    (field,) = reply.fields
    if field.name == "settings":
        return SETTINGS
    if field.message_type.GetOptions().map_entry:
        return _array(_schema(field.message_type.fields_by_name["value"].message_type))
    return _field(field)


def _content(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
