"""The table of all routes: what answers each, what its body must be, and the JSON of its reply.

Paths and bodies are those of Triton's HTTP protocol, which contain those of KServe, and those of OpenAI,
Cohere and TEI. The table is also described as an OpenAPI document. Of a reply, that names the message of gRPC
whose JSON it is: protos/ describes the fields.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from http import HTTPStatus
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qsl

from google.protobuf.message_factory import GetMessageClass
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from attention_serving.protos.attention.v1 import attention_pb2
from attention_serving.protos.inference import open_inference_pb2
from attention_serving.server import NAME, VERSION
from attention_serving.server.api import schemas, text_bodies
from attention_serving.server.api.schemas import Body, to_json
from attention_serving.server.api.text_bodies import TextBody
from attention_serving.server.engine.errors import InvalidRequestError, quoted
from attention_serving.server.http import infer, text_models
from attention_serving.server.http.connection import JSON, TIMEOUT_SECONDS, HttpRequest, Reply
from attention_serving.server.http.infer import BINARY_MEDIA_TYPE
from attention_serving.server.http.text_models import answer

Handler: TypeAlias = "Callable[[HttpRequest], Awaitable[Reply]]"

# A parameter of a path.
PARAMETER = re.compile(r"\{(\w+)\}")

METHODS = {
    **open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name,
    **attention_pb2.DESCRIPTOR.services_by_name["AttentionService"].methods_by_name,
}
# The field of the message that a parameter of the path is; the first that the message has.
FIELDS = {
    "model": ("model_name", "name"),
    "version": ("version", "model_version"),
    "context": ("id",),
    "region": ("name",),
}


@dataclass(frozen=True)
class Route:
    """What answers one HTTP method on some paths.

    Attributes:
        http_method: Such as GET.
        name: Its name in the description; that of the method of gRPC if it calls one.
        paths: Its paths, with parameters in braces.
        summary: What it does.
        handle: Answers a request.
        body: What the JSON of a POST must be; None for a GET.
        query: Names of its parameters after the path.
    """

    http_method: str
    name: str
    paths: tuple[str, ...]
    summary: str
    handle: Handler
    body: type[BaseModel] | None = None
    query: tuple[str, ...] = ()


def _rpc(
    rpc: str,
    paths: tuple[str, ...],
    summary: str,
    body: Any = None,
    answer: Callable[[Any], Any] = to_json,
    http_method: str = "",
    query: tuple[str, ...] = (),
) -> Route:
    """A route that calls a method of gRPC; `answer` makes the JSON from its reply, except for DELETE."""
    http_method = http_method or ("GET" if body is None else "POST")
    # Waiting for models to load or to unload is not bounded: they may be large.
    timeout_seconds = None if rpc in ("RepositoryModelLoad", "RepositoryModelUnload") else TIMEOUT_SECONDS
    descriptor = METHODS[rpc]
    method = f"/{descriptor.containing_service.full_name}/{rpc}"
    request_type, reply_type = map(GetMessageClass, (descriptor.input_type, descriptor.output_type))

    def message(parameters: Mapping[str, str], data: bytearray | None = None) -> bytes:
        request: Any = request_type()
        for name, value in parameters.items():
            names, fields = FIELDS.get(name, (name,)), request.DESCRIPTOR.fields_by_name
            field = next(field for field in names if field in fields)
            try:
                setattr(request, field, type(getattr(request, field))(value))
            except ValueError:
                message = f"is {quoted(value)}; must be a whole number of 32 bits"
                raise InvalidRequestError(name, message) from None
        if data is not None:
            schemas.parse(data, body).fill(request)
        return bytes(request.SerializeToString())

    async def handle(request: HttpRequest) -> Reply:
        if body is None:
            pairs = parse_qsl(request.query, keep_blank_values=True) if query else ()
            sent = message(dict([*request.parameters.items(), *(pair for pair in pairs if pair[0] in query)]))
        else:
            data = await request.read(method)
            sent = await request.decode_body(data, len(data), partial(message, request.parameters))
        reply: Any = reply_type.FromString(await request.call(method, sent, timeout_seconds))
        if http_method == "DELETE":
            return Reply([], HTTPStatus.NO_CONTENT)
        # The protocol reports "not ready" as status 400.
        return Reply.of_json(answer(reply), 200 if getattr(reply, "ready", True) else 400)

    return Route(http_method, rpc, paths, summary, handle, body, query)


def _text(paths: str, summary: str, body: type[TextBody], choose: Any = None) -> Route:
    """A route whose body is of a type, or of the one that `choose` returns for its members."""
    handle = partial(answer, choose or (lambda _: body))
    return Route("POST", body.__name__, tuple(paths.split()), summary, handle, body)


async def _health(request: HttpRequest) -> Reply:
    reply = await request.call("/inference.GRPCInferenceService/ServerReady", b"")
    ready = open_inference_pb2.ServerReadyResponse.FromString(reply).ready
    return Reply.of_json({}, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)


def _trace_settings(reply: Any) -> dict[str, Any]:
    return {name: list(setting.value) for name, setting in reply.settings.items()}


def _take(member: str) -> Callable[[Any], Any]:
    """What makes the JSON of one member of a reply."""
    return lambda reply: to_json(reply).get(member, {})


def _regions(reply: Any) -> list[Any]:
    return [to_json(region) for region in reply.regions.values()]


def _after(paths: tuple[str, ...], end: str) -> tuple[str, ...]:
    return tuple(f"{path}{end}" for path in paths)


def _shared_memory(kind: str, path: str, region: type[Body]) -> tuple[Route, ...]:
    name, some = f"{kind}SharedMemory", (f"/v2/{path}", f"/v2/{path}/region/{{region}}")
    status, end = "One registered region of shared memory, or all.", "Unregisters one region, or all."
    return (
        _rpc(f"{name}Status", _after(some, "/status"), status, answer=_regions),
        _rpc(f"{name}Register", (f"{some[1]}/register",), "Registers a region of shared memory.", region),
        _rpc(f"{name}Unregister", _after(some, "/unregister"), end, Body),
    )


MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
REPOSITORY = ("/v2/repository/models/{model}",)
ENCODERS = ("/v1/models", "/models", "/v1/models/{model}")
HEALTH, EMBEDS = ("/health", "/ping", "/"), "Computes embeddings of texts."
SORTS, BY_FORM = "Sorts documents by relevance to a query.", "As /embed, /similarity, /rerank or /predict."
INFER, STATISTICS = _after(MODEL, "/infer"), ("/v2/models/stats", *_after(MODEL, "/stats"))
CONTEXTS, PAGE = _after(MODEL, "/contexts"), ("page_size", "page_token")
INDEX, LOAD, UNLOAD = ("/v2/repository/index",), _after(REPOSITORY, "/load"), _after(REPOSITORY, "/unload")
TRACES, LOGGING = ("/v2/trace/setting", "/v2/models/{model}/trace/setting"), ("/v2/logging",)
OUTPUTS = "Computes the outputs of a model."
PUT = "Stores key and value rows as a context, or appends them to one."
NOT_READY = "ready for requests; status 400 if it is not."
# The first path that fits is taken: the busiest first, and those of a model later, which would take "stats".
ROUTES = (
    Route("POST", "ModelInfer", INFER, OUTPUTS, infer.infer, schemas.InferenceRequest),
    _text("/v1/embeddings /embeddings", EMBEDS, text_bodies.EmbeddingRequest),
    _text("/v1/embed", EMBEDS, text_bodies.CohereEmbedRequest),
    _text("/v2/embed", EMBEDS, text_bodies.CohereEmbedV2Request),
    _text("/embed", EMBEDS, text_bodies.EmbedRequest),
    _text("/embed_all", "Computes a vector for each token.", text_bodies.EmbedAllRequest),
    _text("/embed_sparse", "Computes sparse embeddings of texts.", text_bodies.EmbedSparseRequest),
    _text("/similarity", "Compares a sentence with others.", text_bodies.SimilarityRequest),
    _text("/v1/rerank /v2/rerank", SORTS, text_bodies.RerankRequest),
    _text("/rerank", SORTS, text_bodies.RankRequest, text_bodies.rerank_body),
    _text("/predict /classify", "Scores the labels of texts or of pairs.", text_bodies.ClassifyRequest),
    _text("/tokenize", "Turns texts into tokens.", text_bodies.TokenizeRequest),
    _text("/decode", "Turns token ids into texts.", text_bodies.DecodeRequest),
    Route("POST", "Any", ("/", "/invocations"), BY_FORM, text_models.answer_any, text_bodies.EmbedRequest),
    Route("GET", "Info", ("/info",), "The model that answers.", text_models.info),
    Route("GET", "EncoderModels", ENCODERS, "The text models that are ready.", text_models.models),
    Route("GET", "Health", HEALTH, "Whether the server is ready; status 503 if it is not.", _health),
    Route("POST", "PutContext", CONTEXTS, PUT, infer.put_context, schemas.ContextRequest),
    _rpc("ListContexts", CONTEXTS, "A page of the contexts that the caller may use.", query=PAGE),
    _rpc("DropContext", _after(CONTEXTS, "/{context}"), "Removes a context.", http_method="DELETE"),
    _rpc("ServerLive", ("/v2/health/live",), "Whether the server is live."),
    _rpc("ServerReady", ("/v2/health/ready",), f"Whether the server is {NOT_READY}"),
    _rpc("ServerMetadata", ("/v2",), "Name, version and extensions of the server."),
    _rpc("ModelStatistics", STATISTICS, "Statistics of a model, or of all."),
    _rpc("ModelReady", _after(MODEL, "/ready"), f"Whether a model is {NOT_READY}"),
    _rpc("ModelMetadata", MODEL, "Versions, inputs and outputs of a model."),
    _rpc("ModelConfig", _after(MODEL, "/config"), "A model as Triton configures it.", answer=_take("config")),
    _rpc("RepositoryIndex", INDEX, "All models and their states.", schemas.RepositoryIndex, _take("models")),
    _rpc("RepositoryModelLoad", LOAD, "Loads a model, also again.", schemas.RepositoryChange),
    _rpc("RepositoryModelUnload", UNLOAD, "Unloads a model.", schemas.RepositoryChange),
    _rpc("TraceSetting", TRACES, "The settings of traces.", answer=_trace_settings),
    _rpc("LogSettings", LOGGING, "What the server logs.", answer=_take("settings")),
    *_shared_memory("System", "systemsharedmemory", schemas.SystemRegion),
    *_shared_memory("Cuda", "cudasharedmemory", Body),  # whose registration the gRPC server refuses
)
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
BYTES = {"schema": {"type": "string", "format": "binary"}}
HEADERS = (
    ("Inference-Header-Content-Length", "Size of the JSON in bytes, if binary tensors follow it.", INTEGER),
    ("Content-Encoding", "How the body is compressed.", {"enum": ["identity", "gzip", "deflate"]}),
)
ABOUT = "The Open Inference Protocol over HTTP, with Triton's extensions, and endpoints for text models."
REFUSED = "The request was refused. The error is a text; for text models, an object as OpenAI's API has it."


@cache
def describe() -> dict[str, Any]:
    """The OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    bodies: list[tuple[type[BaseModel], Literal["validation"]]] = []
    for route in ROUTES:
        if route.body is not None:
            bodies.append((route.body, "validation"))
        for path in route.paths:
            paths.setdefault(path, {})[route.http_method.lower()] = _operation(route, path)
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
    if route.http_method == "DELETE":
        done, reply = "204", {"description": "It was removed."}
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.http_method.lower()}{path}"),
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
        operation["requestBody"]["content"][BINARY_MEDIA_TYPE] = BYTES
        if route.name == "ModelInfer":
            reply["content"][BINARY_MEDIA_TYPE] = BYTES
        else:
            reply["description"] = "The JSON of attention.v1.Context."
    return operation
