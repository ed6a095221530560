"""Every method but inference: one table of its routes, what its body must be, and the JSON of its reply.

Paths and bodies are those of Triton's HTTP protocol, which contain those of KServe.
"""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from attention_serving.server.http import schemas
from attention_serving.server.http.backend import SERVICE, TIMEOUT_SECONDS
from attention_serving.server.http.schemas import Body

# The field of the message that a parameter of the path is; the first that the message has.
FIELDS = {
    "model": ("model_name", "name"),
    "version": ("version",),
    "repository": ("repository_name",),
    "region": ("name",),
}
# The one setting of traces that always is an array.
TRACE_LEVEL = "trace_level"


def to_json(message: Message) -> dict[str, Any]:
    """The members of a message without maps, by the names of the proto file.

    A member of a message type that is not set is left out. protobuf's own JSON writes integers of 64 bits as
    strings, which clients of the protocol do not expect.
    """
    return {
        field.name: _member(getattr(message, field.name), field)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _member(value: Any, field: FieldDescriptor) -> Any:
    return [_value(each, field) for each in value] if field.is_repeated else _value(value, field)


def _value(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return to_json(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def value_of(message: Any) -> Any:
    """The value of a message with the oneof `parameter_choice`; None if it has none."""
    choice = message.WhichOneof("parameter_choice")
    return None if choice is None else getattr(message, choice)


def _trace_settings(reply: Any) -> dict[str, Any]:
    settings = {name: list(setting.value) for name, setting in reply.settings.items()}
    return {
        name: values if name == TRACE_LEVEL or len(values) != 1 else values[0]
        for name, values in settings.items()
    }


def _log_settings(reply: Any) -> dict[str, Any]:
    return {name: value_of(setting) for name, setting in reply.settings.items()}


@dataclass(frozen=True)
class Method:
    """A method of the gRPC service, as HTTP offers it.

    Attributes:
        rpc: Its name.
        paths: Its paths, with parameters in braces.
        summary: What it does.
        body: What the JSON of a POST must be; None for a GET.
        answer: Makes the JSON from the reply.
        timeout_seconds: Deadline of the call.
    """

    rpc: str
    paths: tuple[str, ...]
    summary: str
    body: type[Body | schemas.TraceSettings | schemas.LogSettings] | None = None
    answer: Callable[[Any], Any] = to_json
    timeout_seconds: float | None = TIMEOUT_SECONDS

    @property
    def verb(self) -> str:
        """GET or POST."""
        return "GET" if self.body is None else "POST"

    @property
    def full_name(self) -> str:
        """As gRPC calls it."""
        return f"/{SERVICE.full_name}/{self.rpc}"

    def message(self, paths: Mapping[str, str], body: Any) -> bytes:
        """The request of gRPC, serialized.

        Args:
            paths: The parameters of the path.
            body: The body, of the type `body`; None for a GET.

        Raises:
            InvalidRequestError: The body cannot be expressed.
        """
        message = GetMessageClass(SERVICE.methods_by_name[self.rpc].input_type)()
        for name, value in paths.items():
            known = next(field for field in FIELDS[name] if field in message.DESCRIPTOR.fields_by_name)
            setattr(message, known, value)
        if body is not None:
            body.fill(message)
        return message.SerializeToString()

    def reply(self, data: bytes) -> tuple[Any, int]:
        """The JSON and the status of a serialized reply. The protocol reports "not ready" as status 400."""
        reply: Any = GetMessageClass(SERVICE.methods_by_name[self.rpc].output_type).FromString(data)
        return self.answer(reply), 200 if getattr(reply, "ready", True) else 400


MODEL = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
REPOSITORY = ("/v2/repository", "/v2/repository/{repository}")
TRACES = ("/v2/trace/setting", "/v2/models/{model}/trace/setting")


def _after(paths: tuple[str, ...], end: str) -> tuple[str, ...]:
    return tuple(f"{path}{end}" for path in paths)


def _shared_memory(kind: str, path: str, region: type[Body]) -> tuple[Method, ...]:
    some = (f"/v2/{path}", f"/v2/{path}/region/{{region}}")
    return (
        Method(
            f"{kind}SharedMemoryStatus",
            _after(some, "/status"),
            "One registered region of shared memory, or all.",
            answer=lambda reply: [to_json(entry) for entry in reply.regions.values()],
        ),
        Method(
            f"{kind}SharedMemoryRegister",
            (f"{some[1]}/register",),
            "Registers a region of shared memory.",
            body=region,
        ),
        Method(
            f"{kind}SharedMemoryUnregister",
            _after(some, "/unregister"),
            "Unregisters one region of shared memory, or all.",
            body=Body,
        ),
    )


METHODS = (
    Method("ServerLive", ("/v2/health/live",), "Whether the server is live."),
    Method(
        "ServerReady",
        ("/v2/health/ready",),
        "Whether the server is ready for requests; status 400 if it is not.",
    ),
    Method("ServerMetadata", ("/v2",), "Name, version and extensions of the server."),
    # Before the paths of a model, which would take "stats" for a name.
    Method(
        "ModelStatistics",
        ("/v2/models/stats", *_after(MODEL, "/stats")),
        "Statistics of one model, or of all.",
    ),
    Method(
        "ModelReady",
        _after(MODEL, "/ready"),
        "Whether a model is ready for requests; status 400 if it is not.",
    ),
    Method("ModelMetadata", MODEL, "Versions, inputs and outputs of a model."),
    Method(
        "ModelConfig",
        _after(MODEL, "/config"),
        "A model as a Triton model configuration.",
        answer=lambda reply: to_json(reply.config),
    ),
    Method(
        "RepositoryIndex",
        _after(REPOSITORY, "/index"),
        "The models of the repository and their states.",
        body=schemas.RepositoryIndex,
        answer=lambda reply: [to_json(entry) for entry in reply.models],
    ),
    # Waiting for models to load or to unload is not bounded: they may be large.
    Method(
        "RepositoryModelLoad",
        _after(REPOSITORY, "/models/{model}/load"),
        "Loads a model, or loads it again.",
        body=schemas.RepositoryChange,
        timeout_seconds=None,
    ),
    Method(
        "RepositoryModelUnload",
        _after(REPOSITORY, "/models/{model}/unload"),
        "Unloads every version of a model.",
        body=schemas.RepositoryChange,
        timeout_seconds=None,
    ),
    Method("TraceSetting", TRACES, "The settings of traces.", answer=_trace_settings),
    Method(
        "TraceSetting",
        TRACES,
        "Changes the settings of traces.",
        body=schemas.TraceSettings,
        answer=_trace_settings,
    ),
    Method("LogSettings", ("/v2/logging",), "What the server logs.", answer=_log_settings),
    Method(
        "LogSettings",
        ("/v2/logging",),
        "Changes what the server logs.",
        body=schemas.LogSettings,
        answer=_log_settings,
    ),
    *_shared_memory("System", "systemsharedmemory", schemas.SystemRegion),
    *_shared_memory("Cuda", "cudasharedmemory", schemas.CudaRegion),
)
INFER_PATHS = _after(MODEL, "/infer")
