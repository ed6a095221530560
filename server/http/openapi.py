"""The description of the protocol as an OpenAPI document, made from the table of routes and the models.

Of a reply it names the message of gRPC whose JSON it is: protos/ describes the fields.
"""

import re
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from attention_serving.server import NAME, VERSION
from attention_serving.server.http.routes import METHODS, ROUTES, Route

PARAMETER = re.compile(r"\{(\w+)\}")
JSON, BINARY = "application/json", "application/octet-stream"
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
BYTES = {"schema": {"type": "string", "format": "binary"}}
HEADERS = (
    ("Inference-Header-Content-Length", "Size of the JSON in bytes, if binary tensors follow it.", INTEGER),
    ("Content-Encoding", "How the body is compressed.", {"enum": ["identity", "gzip", "deflate"]}),
)
ABOUT = "The Open Inference Protocol over HTTP, with Triton's extensions, and endpoints for text models."
REFUSED = "The request was refused. The error is a text; for text models, an object as OpenAI's API has it."


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    bodies: list[tuple[type[BaseModel], Literal["validation"]]] = []
    for route in ROUTES:
        if route.body is not None:
            bodies.append((route.body, "validation"))
        for path in route.paths:
            paths.setdefault(path, {})[route.verb.lower()] = _operation(route, path)
    _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
    error = {"type": "object", "properties": {"error": {}}}
    refused = {"description": REFUSED, "content": {JSON: {"schema": error}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": NAME, "version": VERSION, "description": ABOUT},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "responses": {"Error": refused}},
    }


def _operation(route: Route, path: str) -> dict[str, Any]:
    names = PARAMETER.findall(path)
    parameters = [
        {"name": name, "in": "path", "required": True, "description": "", "schema": STRING} for name in names
    ]
    parameters += [{"name": name, "in": "query", "description": "", "schema": STRING} for name in route.query]
    method = METHODS.get(route.name)
    described = "As in its API." if method is None else f"The JSON of {method.output_type.full_name}."
    reply: dict[str, Any] = {"description": described, "content": {JSON: {}}}
    done = "200"
    if route.verb == "DELETE":
        done, reply = "204", {"description": "It was removed."}
    operation: dict[str, Any] = {
        # The same route has several paths, and an identifier for each.
        "operationId": "_".join([route.name, route.verb.lower(), *names]),
        "summary": route.summary,
        "parameters": parameters,
        "responses": {done: reply, "default": {"$ref": "#/components/responses/Error"}},
    }
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        operation["requestBody"] = {"content": {JSON: {"schema": schema}}}
    if route.name in ("ModelInfer", "PutContext"):
        for name, about, kind in HEADERS:
            parameters.append({"name": name, "in": "header", "description": about, "schema": kind})
        operation["requestBody"]["content"][BINARY] = BYTES
        if route.name == "ModelInfer":
            reply["content"][BINARY] = BYTES
        else:
            reply["description"] = "The JSON of attention.v1.Context."
    return operation
