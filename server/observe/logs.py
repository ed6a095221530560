"""The log: one event per line, as key=value pairs or as JSON."""

import json
import logging
import math
import os
import sys
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Literal

from attention_serving.server.threads import publish_name

log = logging.getLogger(__name__)
# Lines that may wait for the reader of standard error; 3 to 4 MB of the lines of requests.
MAX_LINES = 10_000
# How long the end of the process waits for the reader, in seconds.
FLUSH_SECONDS = 1.0

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


class QueuedHandler(logging.Handler):
    """Writes lines to standard error on a thread of its own, so that no other thread waits for the reader.

    Lines beyond `MAX_LINES` are dropped. Once the reader has caught up, a line says how many.

    Attributes:
        dropped: Number of lines that were dropped.
    """

    def __init__(self) -> None:
        """Starts the thread."""
        super().__init__()
        self.dropped = 0
        # Signal handlers log too: of the standard library's queues, only this one may be used there.
        self._lines: SimpleQueue[str | threading.Event] = SimpleQueue()
        # Written to without Python's buffer, whose lock would be held while the reader does not read.
        self._descriptor = sys.stderr.fileno() if sys.stderr is not None else None
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Formats a record here, because its fields may change later."""
        if self._lines.qsize() < MAX_LINES:
            self._lines.put(self.format(record))
        else:
            self.dropped += 1

    def flush(self) -> None:
        """Waits until the lines so far are written, but only for a time."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(FLUSH_SECONDS)

    def _run(self) -> None:
        """Body of the thread."""
        publish_name()
        reported = 0
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            with suppress(OSError):  # nobody will ever read it
                self._write(f"{line}\n".encode(errors="backslashreplace"))
            if self._lines.empty() and (dropped := self.dropped) > reported:
                log.warning("log lines dropped", extra={"lines": dropped - reported})
                reported = dropped

    def _write(self, data: bytes) -> None:
        while data and self._descriptor is not None:
            data = data[os.write(self._descriptor, data) :]


def dropped_lines() -> int:
    """Number of lines of this process that were dropped so far."""
    return sum(
        handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, QueuedHandler)
    )


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

    handler = QueuedHandler()
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
