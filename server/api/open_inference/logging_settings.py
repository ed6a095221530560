"""What the server logs, as the settings of Triton's logging extension; and the settings of its traces.

Triton switches each severity by itself. This server has one level: the lowest severity that is on.
"""

import logging

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.transport.call import Call

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


# The field of a setting's value by its type.
FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}


class LogService:
    """Reads and changes the settings."""

    def log_settings(self, request: pb.LogSettingsRequest, call: Call) -> pb.LogSettingsResponse:
        """Changes the level of the log, and returns all settings.

        Raises:
            InvalidRequestError: A setting is unknown, has a value of the wrong type, or cannot be changed
                while the server runs. Nothing was changed.
        """
        root = logging.getLogger()
        current = _current(root.level)
        wanted = dict(current)
        for name, setting in request.settings.items():
            wanted[name] = _checked(name, setting, current)
        if request.settings:
            on = [level for name, level in SEVERITIES.items() if wanted[name]]
            root.setLevel(logging.DEBUG if wanted[VERBOSE] else min(on, default=NOTHING))
        response = pb.LogSettingsResponse()
        for name, value in _current(root.level).items():
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


def _current(level: int) -> dict[str, bool | int | str]:
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
