"""The settings of traces and logs: JSON objects and messages. null, or an empty array, resets a setting."""

from typing import Any

from google.protobuf.message import Message

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.http import fields
from attention_serving.server.http.parameters import value_of

# The one setting of traces that always is an array.
TRACE_LEVEL = "trace_level"
MAX_UINT32 = 2**32 - 1
TraceValue = pb.TraceSettingRequest.SettingValue
LogValue = pb.LogSettingsRequest.SettingValue


def trace(paths: dict[str, str], document: dict[str, Any]) -> Message:
    """{"trace_level": ["OFF"], "trace_rate": "1000"}."""
    fields.bounded("body", document)
    settings = {name: TraceValue(value=_texts(name, value)) for name, value in document.items()}
    return pb.TraceSettingRequest(model_name=paths.get("model", ""), settings=settings)


def trace_answer(reply: pb.TraceSettingResponse) -> dict[str, Any]:
    """A string for each setting; arrays where a setting has several values."""
    return {
        name: list(setting.value) if name == TRACE_LEVEL or len(setting.value) != 1 else setting.value[0]
        for name, setting in reply.settings.items()
    }


def log(_paths: dict[str, str], document: dict[str, Any]) -> Message:
    """{"log_info": true, "log_verbose_level": 0, "log_format": "default"}."""
    fields.bounded("body", document)
    return pb.LogSettingsRequest(settings={name: _log_value(name, value) for name, value in document.items()})


def log_answer(reply: pb.LogSettingsResponse) -> dict[str, Any]:
    """The value of each setting."""
    return {name: value_of(setting) for name, setting in reply.settings.items()}


def _texts(name: str, value: Any) -> list[str]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    fields.bounded(name, values)
    return [fields.checked(name, each, str) for each in values]


def _log_value(name: str, value: Any) -> LogValue:
    if isinstance(value, bool):
        return LogValue(bool_param=value)
    if isinstance(value, int):
        return LogValue(uint32_param=fields.natural(name, value, MAX_UINT32))
    if isinstance(value, str):
        return LogValue(string_param=value)
    raise InvalidRequestError(name, "must be a boolean, an integer or a string")
