"""The table of all routes: what answers each, and the JSON of its reply.

Paths and bodies are those of Triton's HTTP protocol, which contain those of KServe, and those of OpenAI.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.message_factory import GetMessageClass

from attention_serving.protos.inference.open_inference_pb2 import DESCRIPTOR
from attention_serving.server.http import embeddings, infer, schemas
from attention_serving.server.http.exchange import TIMEOUT_SECONDS, Exchange, Reply
from attention_serving.server.http.schemas import Body, to_json, values_of

Handler: TypeAlias = "Callable[[Exchange], Awaitable[Reply]]"

SERVICE = DESCRIPTOR.services_by_name["GRPCInferenceService"]
# The field of the message that a parameter of the path is; the first that the message has.
FIELDS = {
    "model": ("model_name", "name"),
    "version": ("version",),
    "repository": ("repository_name",),
    "region": ("name",),
}
# The one setting of traces that always is an array.
TRACE_LEVEL = "trace_level"


class Route(NamedTuple):
    """What answers one verb on some paths, in which names of parameters are in braces."""

    verb: str
    paths: tuple[str, ...]
    handle: Handler


def _rpc(rpc: str, paths: tuple[str, ...], body: Any = None, answer: Callable[[Any], Any] = to_json) -> Route:
    """A route that calls a method of gRPC.

    Args:
        rpc: Name of the method.
        paths: Its paths.
        body: The model of the JSON of a POST; None for a GET.
        answer: Makes the JSON of the answer from the reply.
    """
    # Waiting for models to load or to unload is not bounded: they may be large.
    timeout_seconds = None if rpc in ("RepositoryModelLoad", "RepositoryModelUnload") else TIMEOUT_SECONDS
    described, method = SERVICE.methods_by_name[rpc], f"/{SERVICE.full_name}/{rpc}"
    request_type, reply_type = map(GetMessageClass, (described.input_type, described.output_type))

    def message(parameters: Mapping[str, str], data: bytearray | None = None) -> bytes:
        request: Any = request_type()
        for name, value in parameters.items():
            known = next(field for field in FIELDS[name] if field in request.DESCRIPTOR.fields_by_name)
            setattr(request, known, value)
        if data is not None:
            schemas.parse(data, body).fill(request)
        return bytes(request.SerializeToString())

    async def handle(exchange: Exchange) -> Reply:
        if body is None:
            sent = message(exchange.parameters)
        else:
            await exchange.authorize(method)
            data = await exchange.read()
            sent = await exchange.decoded(data, len(data), partial(message, exchange.parameters))
        reply: Any = reply_type.FromString(await exchange.call(method, sent, timeout_seconds))
        # The protocol reports "not ready" as status 400.
        return Reply.of_json(answer(reply), 200 if getattr(reply, "ready", True) else 400)

    return Route("GET" if body is None else "POST", paths, handle)


def _trace_settings(reply: Any) -> dict[str, Any]:
    settings = {name: list(setting.value) for name, setting in reply.settings.items()}
    return {
        name: values if name == TRACE_LEVEL or len(values) != 1 else values[0]
        for name, values in settings.items()
    }


def _log_settings(reply: Any) -> dict[str, Any]:
    return values_of(reply.settings)


def _regions(reply: Any) -> list[Any]:
    return [to_json(region) for region in reply.regions.values()]


def _models(reply: Any) -> list[Any]:
    return [to_json(model) for model in reply.models]


def _config(reply: Any) -> Any:
    return to_json(reply.config)


def _after(paths: tuple[str, ...], end: str) -> tuple[str, ...]:
    return tuple(f"{path}{end}" for path in paths)


def _shared_memory(kind: str, path: str, region: type[Body]) -> tuple[Route, ...]:
    name, some = f"{kind}SharedMemory", (f"/v2/{path}", f"/v2/{path}/region/{{region}}")
    return (
        _rpc(f"{name}Status", _after(some, "/status"), answer=_regions),
        _rpc(f"{name}Register", (f"{some[1]}/register",), region),
        _rpc(f"{name}Unregister", _after(some, "/unregister"), Body),
    )


MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
REPOSITORY = ("/v2/repository", "/v2/repository/{repository}")
NAMED = ("/v2/repository/models/{model}", "/v2/repository/{repository}/models/{model}")
STATISTICS = ("/v2/models/stats", *_after(MODEL, "/stats"))
TRACES, LOGGING = ("/v2/trace/setting", "/v2/models/{model}/trace/setting"), ("/v2/logging",)
# The first path that fits is taken: the busiest first, and those of a model later, which would take "stats".
ROUTES = (
    Route("POST", _after(MODEL, "/infer"), infer.infer),
    Route("POST", ("/v1/embeddings",), embeddings.embed),
    Route("GET", ("/v1/models", "/v1/models/{model}"), embeddings.models),
    _rpc("ServerLive", ("/v2/health/live",)),
    _rpc("ServerReady", ("/v2/health/ready",)),
    _rpc("ServerMetadata", ("/v2",)),
    _rpc("ModelStatistics", STATISTICS),
    _rpc("ModelReady", _after(MODEL, "/ready")),
    _rpc("ModelMetadata", MODEL),
    _rpc("ModelConfig", _after(MODEL, "/config"), answer=_config),
    _rpc("RepositoryIndex", _after(REPOSITORY, "/index"), schemas.RepositoryIndex, _models),
    _rpc("RepositoryModelLoad", _after(NAMED, "/load"), schemas.RepositoryChange),
    _rpc("RepositoryModelUnload", _after(NAMED, "/unload"), schemas.RepositoryChange),
    _rpc("TraceSetting", TRACES, answer=_trace_settings),
    _rpc("TraceSetting", TRACES, schemas.TraceSettings, _trace_settings),
    _rpc("LogSettings", LOGGING, answer=_log_settings),
    _rpc("LogSettings", LOGGING, schemas.LogSettings, _log_settings),
    *_shared_memory("System", "systemsharedmemory", schemas.SystemRegion),
    *_shared_memory("Cuda", "cudasharedmemory", schemas.CudaRegion),
)
