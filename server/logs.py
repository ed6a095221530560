"""The log: one event per line, as key=value pairs or as JSON."""

import json
import logging
import math
import os
import sys
import time
from typing import Any, Literal

# Attributes of every record; all others were passed as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class _EventFormatter(logging.Formatter):
    """Times are in UTC with milliseconds: 2026-01-31T12:00:00.123Z."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


class TextFormatter(_EventFormatter):
    """2026-01-31T12:00:00.123Z INFO model ready model=self-attention version=1."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, followed by the traceback if there is one."""
        event = record.getMessage()
        words = [self.formatTime(record), record.levelname, event if event.isprintable() else repr(event)]
        line = " ".join(words + [f"{key}={_quoted(value)}" for key, value in _fields(record).items()])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(_EventFormatter):
    """{"time": "2026-01-31T12:00:00.123Z", "level": "INFO", "event": "model ready", "model": ...}."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback is the value of `exception`."""
        head = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "event": record.getMessage(),
        }
        if record.exc_info:
            head["exception"] = self.formatException(record.exc_info)
        fields = {key: _plain(value) for key, value in _fields(record).items()}
        return json.dumps({**head, **fields, **head})  # head first, and no field replaces a part of it


FORMATTERS = {"text": TextFormatter, "json": JsonFormatter}


def configure(level: str, style: Literal["text", "json"] = "text", **fields: object) -> None:
    """Writes every event of at least the given level to standard error.

    Args:
        level: The minimum level.
        style: The format of a line.
        fields: Fields added to every event of this process.
    """

    def add(record: logging.LogRecord) -> bool:
        vars(record).update(fields)
        return True

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[style]())
    handler.addFilter(add)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Everything on standard error has one format: Python's warnings become events, and gRPC's core, which has
    # a log of its own, is silent unless the variable asks for it. What it calls errors its callers report.
    logging.captureWarnings(capture=True)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _quoted(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and text else repr(text)


def _plain(value: Any) -> bool | int | float | str | None:
    """A value that JSON can express; text for every other."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)
