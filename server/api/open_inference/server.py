"""The methods of the Open Inference Protocol about the server: its state, logs, traces and shared memory."""

import logging
from collections.abc import Callable

from google.protobuf.message import Message

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server import VERSION
from attention_serving.server.api.method import require
from attention_serving.server.api.shared_memory import SHARED_MEMORY_IS_OFF, SharedMemory
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError, InvalidRequestError, UnsupportedError
from attention_serving.server.model_control import ModelControl
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

SERVER_NAME = "attention-serving"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters", "statistics", "logging")
# Triton switches each severity by itself. This server has one level: the lowest severity that is on.
SEVERITIES = {"log_info": logging.INFO, "log_warning": logging.WARNING, "log_error": logging.ERROR}
VERBOSE, FILE, FORMAT = "log_verbose_level", "log_file", "log_format"
# The field of a setting's value by its type.
FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}
TRACE_SETTINGS = {
    "trace_level": "OFF",
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
NO_CUDA = "CUDA shared memory is not supported by this server; use system shared memory, or send the tensors"


class ServerMethods:
    """Describe the server and change its settings."""

    def __init__(
        self,
        engine: Engine,
        is_serving: Callable[[], bool],
        control: ModelControl | None,
        memory: SharedMemory | None,
    ) -> None:
        """Creates the methods; the arguments are those of `open_inference.service.methods`."""
        self._engine, self._is_serving, self._memory = engine, is_serving, memory
        self._extensions = list(EXTENSIONS)
        if control is not None and control.is_explicit:
            self._extensions.append("model_repository")
        if memory is not None:
            self._extensions.append("system_shared_memory")

    def live(self, request: pb.ServerLiveRequest, call: Call) -> pb.ServerLiveResponse:
        """Replies true: a server that replies is live."""
        return pb.ServerLiveResponse(live=True)

    def ready(self, request: pb.ServerReadyRequest, call: Call) -> pb.ServerReadyResponse:
        """Replies true from the end of the self-test until the drain."""
        return pb.ServerReadyResponse(ready=self._is_serving())

    def model_ready(self, request: pb.ModelReadyRequest, call: Call) -> pb.ModelReadyResponse:
        """Replies true for a loaded model, and false for an unknown one, as Triton does."""
        require(call, Right.READ, request.name)
        try:
            self._engine.model(request.name, request.version)
        except EngineError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._is_serving())

    def metadata(self, request: pb.ServerMetadataRequest, call: Call) -> pb.ServerMetadataResponse:
        """Describes the server."""
        return pb.ServerMetadataResponse(name=SERVER_NAME, version=VERSION, extensions=self._extensions)

    def log_settings(self, request: pb.LogSettingsRequest, call: Call) -> pb.LogSettingsResponse:
        """Changes the level of the log, and returns all settings.

        Raises:
            InvalidRequestError: A setting is unknown, has a value of the wrong type, or cannot be changed
                while the server runs. Nothing was changed.
        """
        root = logging.getLogger()
        current = _log_settings(root.level)
        wanted = current | {
            name: _checked(name, setting, current) for name, setting in request.settings.items()
        }
        if request.settings:
            on = [level for name, level in SEVERITIES.items() if wanted[name]]
            root.setLevel(logging.DEBUG if wanted[VERBOSE] else min(on, default=logging.CRITICAL))
        response = pb.LogSettingsResponse()
        for name, value in _log_settings(root.level).items():
            setattr(response.settings[name], FIELDS[type(value)], value)
        return response

    def trace_settings(self, request: pb.TraceSettingRequest, call: Call) -> pb.TraceSettingResponse:
        """Returns the settings of Triton's own traces, which are off.

        Raises:
            InvalidRequestError: A setting would be changed: neither reset nor set to its value.
        """
        for name, setting in request.settings.items():
            field = f"settings[{name}]"
            if name not in TRACE_SETTINGS:
                known = ", ".join(TRACE_SETTINGS)
                raise InvalidRequestError(field, f"is unknown; the settings are: {known}")
            if list(setting.value) not in ([], [TRACE_SETTINGS[name]]):
                raise InvalidRequestError(field, "cannot be changed: this server does not write such traces")
        response = pb.TraceSettingResponse()
        for name, value in TRACE_SETTINGS.items():
            response.settings[name].value.append(value)
        return response

    def register(self, request: pb.SystemSharedMemoryRegisterRequest, call: Call) -> None:
        """Registers a region of shared memory."""
        if self._memory is None:
            raise UnsupportedError(SHARED_MEMORY_IS_OFF)
        self._memory.register(request.name, request.key, request.offset, request.byte_size)

    def unregister(self, request: pb.SystemSharedMemoryUnregisterRequest, call: Call) -> None:
        """Unregisters a region, or all of them. One that is not registered is no error."""
        if self._memory is not None:
            self._memory.unregister(request.name)

    def regions(
        self, request: pb.SystemSharedMemoryStatusRequest, call: Call
    ) -> pb.SystemSharedMemoryStatusResponse:
        """Lists the registered regions, or the one of a name."""
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._memory.regions(request.name) if self._memory else ():
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.size
        return response

    def register_cuda(self, request: pb.CudaSharedMemoryRegisterRequest, call: Call) -> None:
        """Refuses."""
        raise UnsupportedError(NO_CUDA)

    def without_cuda(self, request: Message, call: Call) -> None:
        """Lists and unregisters no regions. Load generators call it before they begin."""


def _log_settings(level: int) -> dict[str, bool | int | str]:
    severities = {name: level <= severity for name, severity in SEVERITIES.items()}
    return {**severities, VERBOSE: int(level <= logging.DEBUG), FILE: "", FORMAT: "default"}


def _checked(
    name: str, setting: pb.LogSettingsRequest.SettingValue, current: dict[str, bool | int | str]
) -> bool | int | str:
    """The value of a setting that may be changed to it."""
    field = f"settings[{name}]"
    if name not in current:
        raise InvalidRequestError(field, f"is unknown; the settings are: {', '.join(current)}")
    choice, kind = setting.WhichOneof("parameter_choice"), type(current[name])
    if choice != FIELDS[kind]:
        raise InvalidRequestError(field, f"must be of type {kind.__name__}")
    value: bool | int | str = getattr(setting, FIELDS[kind])
    if name in {FILE, FORMAT} and value != current[name]:
        raise InvalidRequestError(field, "cannot be changed while the server runs")
    return value
