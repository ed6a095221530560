"""The table of all routes: what answers each, what its body must be, and the JSON of its reply.

Paths and bodies are those of Triton's HTTP protocol, which contain those of KServe, and those of OpenAI,
Cohere and TEI.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias

from google.protobuf.message_factory import GetMessageClass
from pydantic import BaseModel
from starlette.datastructures import QueryParams

from attention_serving.protos.attention.v1 import attention_pb2
from attention_serving.protos.inference import open_inference_pb2
from attention_serving.server.engine.errors import InvalidRequestError, quoted
from attention_serving.server.http import contexts, infer, schemas, text_models
from attention_serving.server.http.exchange import TIMEOUT_SECONDS, Exchange, Reply
from attention_serving.server.http.schemas import Body, to_json

Handler: TypeAlias = "Callable[[Exchange], Awaitable[Reply]]"

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
    """What answers one verb on some paths.

    Attributes:
        verb: The verb.
        name: Its name in the description; that of the method of gRPC if it calls one.
        paths: Its paths, with parameters in braces.
        summary: What it does.
        handle: Answers a request.
        body: What the JSON of a POST must be; None for a GET.
        query: Names of its parameters after the path.
    """

    verb: str
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
    verb: str = "",
    query: tuple[str, ...] = (),
) -> Route:
    """A route that calls a method of gRPC; `answer` makes the JSON from its reply, except for DELETE."""
    verb = verb or ("GET" if body is None else "POST")
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

    async def handle(exchange: Exchange) -> Reply:
        if body is None:
            pairs = QueryParams(exchange.scope["query_string"]).items() if query else ()
            sent = message(exchange.parameters | {name: value for name, value in pairs if name in query})
        else:
            data = await exchange.read(method)
            sent = await exchange.decode_body(data, len(data), partial(message, exchange.parameters))
        reply: Any = reply_type.FromString(await exchange.call(method, sent, timeout_seconds))
        if verb == "DELETE":
            return Reply([], HTTPStatus.NO_CONTENT)
        # The protocol reports "not ready" as status 400.
        return Reply.of_json(answer(reply), 200 if getattr(reply, "ready", True) else 400)

    return Route(verb, rpc, paths, summary, handle, body, query)


async def _health(exchange: Exchange) -> Reply:
    reply = await exchange.call("/inference.GRPCInferenceService/ServerReady", b"")
    ready = open_inference_pb2.ServerReadyResponse.FromString(reply).ready
    return Reply.of_json({}, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)


def _trace_settings(reply: Any) -> dict[str, Any]:
    return {name: list(setting.value) for name, setting in reply.settings.items()}


def _log_settings(reply: Any) -> Any:
    return to_json(reply)["settings"]


def _regions(reply: Any) -> list[Any]:
    return [to_json(region) for region in reply.regions.values()]


def _models(reply: Any) -> Any:
    return to_json(reply)["models"]


def _config(reply: Any) -> Any:
    return to_json(reply.config)


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
EMBEDDINGS, ENCODERS = ("/v1/embeddings",), ("/v1/models", "/v1/models/{model}")
INFER, STATISTICS = _after(MODEL, "/infer"), ("/v2/models/stats", *_after(MODEL, "/stats"))
CONTEXTS, PAGE = _after(MODEL, "/contexts"), ("page_size", "page_token")
INDEX, LOAD, UNLOAD = ("/v2/repository/index",), _after(REPOSITORY, "/load"), _after(REPOSITORY, "/unload")
TRACES, LOGGING = ("/v2/trace/setting", "/v2/models/{model}/trace/setting"), ("/v2/logging",)
OUTPUTS, VECTORS = "Computes the outputs of a model.", "Computes embeddings of texts."
RANKS, LABELS = "Sorts documents by relevance to a query.", "Scores the labels of texts or of pairs."
PUT = "Stores key and value rows as a context, or appends them to one."
NOT_READY = "ready for requests; status 400 if it is not."
# The first path that fits is taken: the busiest first, and those of a model later, which would take "stats".
ROUTES = (
    Route("POST", "ModelInfer", INFER, OUTPUTS, infer.infer, schemas.InferenceRequest),
    Route("POST", "Embeddings", EMBEDDINGS, VECTORS, text_models.embed, schemas.EmbeddingRequest),
    Route("POST", "Rerank", ("/v1/rerank",), RANKS, text_models.rerank, schemas.RerankRequest),
    Route("POST", "Predict", ("/predict",), LABELS, text_models.classify, schemas.ClassifyRequest),
    Route("POST", "Classify", ("/classify",), LABELS, text_models.classify, schemas.ClassifyRequest),
    Route("GET", "EncoderModels", ENCODERS, "The text models that are ready.", text_models.models),
    Route("GET", "Health", ("/health",), "Whether the server is ready; status 503 if it is not.", _health),
    Route("POST", "PutContext", CONTEXTS, PUT, contexts.put, schemas.ContextRequest),
    _rpc("ListContexts", CONTEXTS, "A page of the contexts that the caller may use.", query=PAGE),
    _rpc("DropContext", _after(CONTEXTS, "/{context}"), "Removes a context.", verb="DELETE"),
    _rpc("ServerLive", ("/v2/health/live",), "Whether the server is live."),
    _rpc("ServerReady", ("/v2/health/ready",), f"Whether the server is {NOT_READY}"),
    _rpc("ServerMetadata", ("/v2",), "Name, version and extensions of the server."),
    _rpc("ModelStatistics", STATISTICS, "Statistics of a model, or of all."),
    _rpc("ModelReady", _after(MODEL, "/ready"), f"Whether a model is {NOT_READY}"),
    _rpc("ModelMetadata", MODEL, "Versions, inputs and outputs of a model."),
    _rpc("ModelConfig", _after(MODEL, "/config"), "A model as Triton configures it.", answer=_config),
    _rpc("RepositoryIndex", INDEX, "All models and their states.", schemas.RepositoryIndex, _models),
    _rpc("RepositoryModelLoad", LOAD, "Loads a model, also again.", schemas.RepositoryChange),
    _rpc("RepositoryModelUnload", UNLOAD, "Unloads a model.", schemas.RepositoryChange),
    _rpc("TraceSetting", TRACES, "The settings of traces.", answer=_trace_settings),
    _rpc("LogSettings", LOGGING, "What the server logs.", answer=_log_settings),
    *_shared_memory("System", "systemsharedmemory", schemas.SystemRegion),
    *_shared_memory("Cuda", "cudasharedmemory", Body),  # whose registration the gRPC server refuses
)
