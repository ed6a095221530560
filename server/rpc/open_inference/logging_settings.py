"""What the server logs, as the settings of Triton's logging extension; and the settings of its traces.

Triton switches each severity by itself. This server has one level: the lowest severity that is on.
"""

import logging
from collections.abc import Iterable

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.rpc.transport.call import Call

# By setting, the level that is logged while it is on.
SEVERITIES = {"log_info": logging.INFO, "log_warning": logging.WARNING, "log_error": logging.ERROR}
VERBOSE, FILE, FORMAT = "log_verbose_level", "log_file", "log_format"
NOTHING = logging.CRITICAL
TRACE_SETTINGS = {
    "trace_level": "OFF",
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}


class LogService:
    """Reads and changes the settings."""

    def log_settings(self, request: pb.LogSettingsRequest, call: Call) -> pb.LogSettingsResponse:
        """Changes the level of the log, and returns all settings."""
        return change_logging(request)

    def trace_settings(self, request: pb.TraceSettingRequest, call: Call) -> pb.TraceSettingResponse:
        """Returns the settings of traces, which cannot be changed."""
        return trace_settings(request)


def change_logging(request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
    """Changes the level of the log, and returns all settings.

    Raises:
        InvalidRequestError: A setting is unknown, has a value of the wrong type, or cannot be changed while
            the server runs. Nothing was changed.
    """
    root = logging.getLogger()
    values = {name: _value(setting) for name, setting in request.settings.items()}
    current = _current(root.level)
    for name, value in values.items():
        _check(name, value, current)
    if values:
        wanted = current | values
        on = [level for name, level in SEVERITIES.items() if wanted[name]]
        root.setLevel(logging.DEBUG if wanted[VERBOSE] else min(on, default=NOTHING))
    return _response(_current(root.level))


def _check(name: str, value: object, current: dict[str, bool | int | str]) -> None:
    field = f"settings[{name}]"
    if name not in current:
        raise InvalidRequestError(field, f"is unknown; the settings are: {', '.join(current)}")
    if type(value) is not type(current[name]):
        raise InvalidRequestError(field, f"must be of type {type(current[name]).__name__}")
    if name in {FILE, FORMAT} and value != current[name]:
        raise InvalidRequestError(field, "cannot be changed while the server runs")


def _current(level: int) -> dict[str, bool | int | str]:
    severities = {name: level <= severity for name, severity in SEVERITIES.items()}
    return {**severities, VERBOSE: int(level <= logging.DEBUG), FILE: "", FORMAT: "default"}


def _value(setting: pb.LogSettingsRequest.SettingValue) -> bool | int | str | None:
    choice = setting.WhichOneof("parameter_choice")
    return None if choice is None else getattr(setting, choice)


def _response(values: dict[str, bool | int | str]) -> pb.LogSettingsResponse:
    response = pb.LogSettingsResponse()
    for name, value in values.items():
        setting = response.settings[name]
        if isinstance(value, bool):
            setting.bool_param = value
        elif isinstance(value, int):
            setting.uint32_param = value
        else:
            setting.string_param = value
    return response


def trace_settings(request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
    """The settings of Triton's own traces, which are off.

    Raises:
        InvalidRequestError: A setting would be changed.
    """
    for name, setting in request.settings.items():
        if name not in TRACE_SETTINGS:
            raise InvalidRequestError(
                f"settings[{name}]", f"is unknown; the settings are: {', '.join(TRACE_SETTINGS)}"
            )
        if not _is_unchanged(name, setting.value):
            raise InvalidRequestError(
                f"settings[{name}]", "cannot be changed: this server does not write such traces"
            )
    response = pb.TraceSettingResponse()
    for name, value in TRACE_SETTINGS.items():
        response.settings[name].value.append(value)
    return response


def _is_unchanged(name: str, values: Iterable[str]) -> bool:
    """Whether a setting is reset or keeps its value."""
    return list(values) in ([], [TRACE_SETTINGS[name]])
