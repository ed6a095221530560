"""The description of the HTTP protocol as an OpenAPI document, made from the routes."""

import re
from functools import cache
from typing import Any

from attention_serving.server import NAME, VERSION
from attention_serving.server.http.embeddings import MODEL_PATHS
from attention_serving.server.http.embeddings import PATH as EMBEDDINGS
from attention_serving.server.http.methods import INFER_PATHS, METHODS, Method
from attention_serving.server.http.schemas import BODIES, REPLIES, SCHEMAS

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


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for path in INFER_PATHS:
        paths.setdefault(path, {})["post"] = _inference(path)
    for method in METHODS:
        for path in method.paths:
            paths.setdefault(path, {})[method.verb.lower()] = _operation(method, path)
    paths[EMBEDDINGS] = {"post": _embeddings()}
    for path, schema in zip(MODEL_PATHS, ("EncoderList", "Encoder"), strict=True):
        paths[path] = {"get": _encoders(path, schema)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": NAME,
            "version": VERSION,
            "description": "The Open Inference Protocol over HTTP, with Triton's extensions, and OpenAI's"
            " embeddings.",
        },
        "paths": paths,
        "components": {"schemas": SCHEMAS, "responses": _errors()},
    }


def _operation(method: Method, path: str) -> dict[str, Any]:
    reply = REPLIES.get(method.rpc, {"type": "object"})
    operation = {
        **_head(method.rpc, method.verb, path, method.summary),
        "responses": {"200": _content("The reply.", {"application/json": reply}), **_error_references()},
    }
    body = BODIES.get(method.rpc) if method.verb == "POST" else None
    return operation | ({"requestBody": {"content": {"application/json": {"schema": body}}}} if body else {})


def _inference(path: str) -> dict[str, Any]:
    header = {
        "name": "Inference-Header-Content-Length",
        "in": "header",
        "description": "Size of the JSON in bytes, if binary tensors follow it.",
        "schema": {"type": "integer", "minimum": 1},
    }
    encoding = {
        "name": "Content-Encoding",
        "in": "header",
        "description": "How the body is compressed.",
        "schema": {"enum": ["identity", "gzip", "deflate"]},
    }
    head = _head("ModelInfer", "POST", path, "Computes the outputs of a model.")
    head["parameters"] += [header, encoding]
    binary = {"type": "string", "format": "binary"}
    return {
        **head,
        "requestBody": {"required": True, "content": _media(_reference("InferenceRequest"), binary)},
        "responses": {
            "200": {
                "description": "The outputs.",
                "content": _media(_reference("InferenceResponse"), binary),
            },
            **_error_references(),
        },
    }


def _embeddings() -> dict[str, Any]:
    return {
        **_head("Embeddings", "POST", EMBEDDINGS, "Computes the embeddings of texts, as OpenAI's API does."),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _reference("EmbeddingRequest")}},
        },
        "responses": {
            "200": _content("The embeddings.", {"application/json": _reference("EmbeddingResponse")}),
            **_openai_errors(),
        },
    }


def _encoders(path: str, schema: str) -> dict[str, Any]:
    return {
        **_head("EncoderModels", "GET", path, "The text encoders that are ready, as OpenAI's API does."),
        "responses": {
            "200": _content("The models.", {"application/json": _reference(schema)}),
            **_openai_errors(),
        },
    }


def _openai_errors() -> dict[str, Any]:
    """Errors of OpenAI's endpoints, which have a form of their own."""
    error = _content("The request was refused.", {"application/json": _reference("EmbeddingError")})
    return dict.fromkeys(ERRORS, error)


def _head(rpc: str, verb: str, path: str, summary: str) -> dict[str, Any]:
    names = PARAMETER.findall(path)
    return {
        # The same method has several paths, and an identifier for each.
        "operationId": "_".join([rpc, verb.lower(), *names]),
        "summary": summary,
        "parameters": [
            {
                "name": name,
                "in": "path",
                "required": True,
                "description": DESCRIPTIONS[name],
                "schema": {"type": "string"},
            }
            for name in names
        ],
    }


def _media(json: Any, binary: Any) -> dict[str, Any]:
    return {"application/json": {"schema": json}, "application/octet-stream": {"schema": binary}}


def _content(description: str, schemas: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": description,
        "content": {kind: {"schema": schema} for kind, schema in schemas.items()},
    }


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _errors() -> dict[str, Any]:
    error = {"application/json": _reference("Error")}
    return {f"Error{status}": _content(description, error) for status, description in ERRORS.items()}


def _error_references() -> dict[str, Any]:
    return {status: {"$ref": f"#/components/responses/Error{status}"} for status in ERRORS}
