"""Every method but inference: its routes, the message that a request becomes, and the JSON of the reply.

Paths and bodies are those of Triton's HTTP protocol, which contain those of KServe.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.http import settings_json as settings
from attention_serving.server.http.messages import to_json
from attention_serving.server.http.method_requests import (
    cuda_region,
    index,
    load,
    model,
    nothing,
    region,
    system_region,
    unload,
)

# The parameters of a path, and the JSON of a body, which is empty if there is none.
Paths = dict[str, str]
Document = dict[str, Any]
# Waiting for models to load is not bounded: they may be large. Everything else is answered at once.
TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of the gRPC service, as HTTP offers it.

    Attributes:
        rpc: Its name.
        verb: GET or POST.
        paths: Its paths, with parameters in braces.
        summary: What it does.
        request: Makes the message from the parameters of the path and the body.
        reply: Parses the reply.
        answer: Makes the JSON from the reply.
        status: Makes the HTTP status from the reply.
        timeout_seconds: Deadline of the call.
    """

    rpc: str
    verb: str
    paths: tuple[str, ...]
    summary: str
    request: Callable[[Paths, Document], Message]
    reply: Callable[[bytes], Any]
    answer: Callable[[Any], Any] = to_json
    status: Callable[[Any], int] = lambda _reply: 200
    timeout_seconds: float | None = TIMEOUT_SECONDS


def _ready(reply: Any) -> int:
    # The protocol reports "not ready" as a status of 4xx.
    return 200 if reply.ready else 400


def _empty(_reply: Any) -> dict[str, Any]:
    return {}


MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
REPOSITORY = ("/v2/repository", "/v2/repository/{repository}")


def _of_model(end: str) -> tuple[str, ...]:
    return tuple(f"{path}{end}" for path in MODEL)


def _in_repository(end: str) -> tuple[str, ...]:
    return tuple(f"{path}{end}" for path in REPOSITORY)


def _regions(kind: str, end: str) -> tuple[str, ...]:
    return (f"/v2/{kind}/{end}", f"/v2/{kind}/region/{{region}}/{end}")


SERVER = (
    Method(
        rpc="ServerLive",
        verb="GET",
        paths=("/v2/health/live",),
        summary="Whether the server is live.",
        request=nothing(pb.ServerLiveRequest),
        reply=pb.ServerLiveResponse.FromString,
    ),
    Method(
        rpc="ServerReady",
        verb="GET",
        paths=("/v2/health/ready",),
        summary="Whether the server is ready for requests; status 400 if it is not.",
        request=nothing(pb.ServerReadyRequest),
        reply=pb.ServerReadyResponse.FromString,
        status=_ready,
    ),
    Method(
        rpc="ServerMetadata",
        verb="GET",
        paths=("/v2",),
        summary="Name, version and extensions of the server.",
        request=nothing(pb.ServerMetadataRequest),
        reply=pb.ServerMetadataResponse.FromString,
    ),
)
MODELS = (
    # Before the paths of a model, which would take "stats" for a name.
    Method(
        rpc="ModelStatistics",
        verb="GET",
        paths=("/v2/models/stats", *_of_model("/stats")),
        summary="Statistics of one model, or of all.",
        request=model(pb.ModelStatisticsRequest),
        reply=pb.ModelStatisticsResponse.FromString,
    ),
    Method(
        rpc="ModelReady",
        verb="GET",
        paths=_of_model("/ready"),
        summary="Whether a model is ready for requests; status 400 if it is not.",
        request=model(pb.ModelReadyRequest),
        reply=pb.ModelReadyResponse.FromString,
        status=_ready,
    ),
    Method(
        rpc="ModelMetadata",
        verb="GET",
        paths=MODEL,
        summary="Versions, inputs and outputs of a model.",
        request=model(pb.ModelMetadataRequest),
        reply=pb.ModelMetadataResponse.FromString,
    ),
    Method(
        rpc="ModelConfig",
        verb="GET",
        paths=_of_model("/config"),
        summary="A model as a Triton model configuration.",
        request=model(pb.ModelConfigRequest),
        reply=pb.ModelConfigResponse.FromString,
        answer=lambda reply: to_json(reply.config),
    ),
)
REPOSITORIES = (
    Method(
        rpc="RepositoryIndex",
        verb="POST",
        paths=_in_repository("/index"),
        summary="The models of the repository and their states.",
        request=index,
        reply=pb.RepositoryIndexResponse.FromString,
        answer=lambda reply: [to_json(entry) for entry in reply.models],
    ),
    Method(
        rpc="RepositoryModelLoad",
        verb="POST",
        paths=_in_repository("/models/{model}/load"),
        summary="Loads a model, or loads it again.",
        request=load,
        reply=pb.RepositoryModelLoadResponse.FromString,
        answer=_empty,
        timeout_seconds=None,
    ),
    Method(
        rpc="RepositoryModelUnload",
        verb="POST",
        paths=_in_repository("/models/{model}/unload"),
        summary="Unloads every version of a model.",
        request=unload,
        reply=pb.RepositoryModelUnloadResponse.FromString,
        answer=_empty,
        timeout_seconds=None,
    ),
)
SETTINGS = tuple(
    Method(
        rpc="TraceSetting",
        verb=verb,
        paths=("/v2/trace/setting", "/v2/models/{model}/trace/setting"),
        summary=summary,
        request=settings.trace,
        reply=pb.TraceSettingResponse.FromString,
        answer=settings.trace_answer,
    )
    for verb, summary in (("GET", "The settings of traces."), ("POST", "Changes the settings of traces."))
) + tuple(
    Method(
        rpc="LogSettings",
        verb=verb,
        paths=("/v2/logging",),
        summary=summary,
        request=settings.log,
        reply=pb.LogSettingsResponse.FromString,
        answer=settings.log_answer,
    )
    for verb, summary in (("GET", "What the server logs."), ("POST", "Changes what the server logs."))
)


def _shared_memory(
    kind: str, path: str, register: Callable[[Paths, Document], Message]
) -> tuple[Method, ...]:
    messages: Any = pb
    return (
        Method(
            rpc=f"{kind}SharedMemoryStatus",
            verb="GET",
            paths=_regions(path, "status"),
            summary="One registered region of shared memory, or all.",
            request=region(getattr(messages, f"{kind}SharedMemoryStatusRequest")),
            reply=getattr(messages, f"{kind}SharedMemoryStatusResponse").FromString,
            answer=lambda reply: [to_json(entry) for entry in reply.regions.values()],
        ),
        Method(
            rpc=f"{kind}SharedMemoryRegister",
            verb="POST",
            paths=(f"/v2/{path}/region/{{region}}/register",),
            summary="Registers a region of shared memory.",
            request=register,
            reply=getattr(messages, f"{kind}SharedMemoryRegisterResponse").FromString,
            answer=_empty,
        ),
        Method(
            rpc=f"{kind}SharedMemoryUnregister",
            verb="POST",
            paths=_regions(path, "unregister"),
            summary="Unregisters one region of shared memory, or all.",
            request=region(getattr(messages, f"{kind}SharedMemoryUnregisterRequest")),
            reply=getattr(messages, f"{kind}SharedMemoryUnregisterResponse").FromString,
            answer=_empty,
        ),
    )


SHARED_MEMORY = (
    *_shared_memory("System", "systemsharedmemory", system_region),
    *_shared_memory("Cuda", "cudasharedmemory", cuda_region),
)
METHODS = (*SERVER, *MODELS, *REPOSITORIES, *SETTINGS, *SHARED_MEMORY)
INFER_PATHS = _of_model("/infer")
