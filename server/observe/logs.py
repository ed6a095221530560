"""The log: one event per line, as key=value pairs or as JSON; and which calls have a line, or spans.

The line of a request says what it was, how large, where its time went, and how it ended. Nothing of its
content is logged, and nothing that its caller sent but its identifiers.
"""

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from attention_serving.server.engine.events import Timeline
from attention_serving.server.observe.records import CallRecord

if TYPE_CHECKING:  # OpenTelemetry is imported only if traces are on, and the supervisor needs no gRPC
    from attention_serving.server.observe.traces import Traces
    from attention_serving.server.transport.call import Call

T = TypeVar("T")
log = logging.getLogger(__name__)
# The lines of requests, which are written whatever the level of the log is.
requests = logging.getLogger("attention_serving.server.requests")
requests.setLevel(logging.INFO)
DISABLED, EXPORTER = "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
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
        head = {"time": self.formatTime(record), "level": record.levelname, "event": record.getMessage()}
        if record.exc_info:
            head["exception"] = self.formatException(record.exc_info)
        fields = {key: _plain(value) for key, value in _fields(record).items()}
        return json.dumps({**head, **fields, **head})  # head first, and no field replaces a part of it


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
        reported = 0
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            data = f"{line}\n".encode(errors="backslashreplace")
            with suppress(OSError):  # its reader has gone
                while data and self._descriptor is not None:
                    data = data[os.write(self._descriptor, data) :]
            if self._lines.empty() and (dropped := self.dropped) > reported:
                log.warning("log lines dropped", extra={"lines": dropped - reported})
                reported = dropped


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
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    handler.addFilter(add)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Everything on standard error has one format: Python's warnings become events, and gRPC's core, which has
    # a log of its own, is silent unless the variable asks for it. What it calls errors its callers report.
    logging.captureWarnings(capture=True)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    # Some libraries, such as Ray, add attributes to every record. Their names begin with an underscore.
    attributes = vars(record).items()
    return {key: value for key, value in attributes if key not in _STANDARD and not key.startswith("_")}


def _quoted(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if text.isprintable() and " " not in text and text else repr(text)


def _plain(value: Any) -> bool | int | float | str | list[Any] | None:
    """A value that JSON can express; text for every other. Lists are of texts."""
    if value is None or isinstance(value, (bool, int, str, list)):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def are_traces_on(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether OpenTelemetry's variables ask for traces."""
    if environment.get(DISABLED, "").strip().lower() == "true":
        return False
    exporters = {name.strip() for name in environment.get(EXPORTER, "").split(",")} - {""}
    return exporters & {"otlp", "none"} == {"otlp"} if exporters else any(map(environment.get, ENDPOINTS))


class Recorder:
    """Records calls over gRPC, and hands the records to the log and to the traces.

    Attributes:
        is_on: Whether anything may be recorded.
    """

    def __init__(self, log_requests: str, *, host: str = "", port: int = 0) -> None:
        """Starts the exporter of traces, if they are on.

        Args:
            log_requests: Requests that have a line: all, failed or none.
            host: The address that the server listens on, for traces.
            port: The port; 0 if it is not known.
        """
        self._logs, self._failed_only = log_requests != "none", log_requests == "failed"
        self._traces: Traces | None = None
        if are_traces_on():
            from attention_serving.server.observe import traces  # noqa: PLC0415 - only if traces are on

            self._traces = traces.Traces(host=host, port=port)
        self.is_on = self._logs or self._traces is not None

    def __call__(self, call: "Call", is_stream: bool) -> CallRecord | None:  # noqa: FBT001 - as the dispatcher calls it
        """The record of a new call over gRPC; None if it is neither logged nor traced."""
        traces = self._traces
        span = traces and _safely(partial(traces.begin, call.method, call.metadata))
        if span is None and not self._logs:
            return None
        # Traces, and a log of failures, need the identifier of few calls. It is sent once it was read.
        is_named = self._logs and (is_stream or not self._failed_only)
        record = CallRecord(
            call.method,
            call.ensure_request_id() if is_named else "",
            call.metadata,
            is_stream=is_stream,
            report=self._ended,
            start_span=lambda stream: traces and _safely(partial(traces.start_request, stream)),
        )
        record.span = span
        return record

    def close(self) -> None:
        """Sends the last spans."""
        if self._traces is not None:
            self._traces.close()

    def _ended(self, call: CallRecord, timeline: Timeline | None) -> None:
        """A call over gRPC has ended, or a request of a stream."""
        if self._logs and not (self._failed_only and call.subject(timeline).code == "OK"):
            event = "stream" if call.is_stream and timeline is None else "request"
            requests.info(event, extra=fields(call, timeline))
        if self._traces is not None:
            _safely(partial(self._traces.ended, call, timeline))


def _safely(step: Callable[[], T]) -> T | None:
    """What a step returns; None if it fails, which is logged: what observes calls must not break them."""
    try:
        return step()
    except Exception:
        log.exception("not recorded")
        return None


def fields(call: CallRecord, timeline: Timeline | None) -> dict[str, object]:
    """The fields of the line of a call over gRPC, without those that nothing is known of.

    Args:
        call: The call.
        timeline: That of the request; None at the end of a stream, and if it never arrived.
    """
    values: dict[str, object] = {"request_id": call.request_id, "method": call.method}
    values |= {"caller": call.caller, "trace_id": call.trace_id}
    if timeline is None:
        values |= {"requests": call.requests} if call.is_stream else {}
    else:
        values |= {"model": timeline.model, "version": timeline.version}
        values |= {"sequences": timeline.sequences or "", "rows": timeline.rows or ""}
    sizes, subject = call if timeline is None else timeline, call.subject(timeline)
    values |= {"bytes_in": sizes.received_bytes, "bytes_out": sizes.sent_bytes}
    stages = () if timeline is None else timeline.stages()
    values |= {f"{stage}_ms": milliseconds(end - start) for stage, start, end in stages}
    values |= {"total_ms": milliseconds(subject.ended_at - subject.arrived_at)}
    values |= {"code": subject.code, "reason": subject.reason}
    return {name: value for name, value in values.items() if value != ""}


def milliseconds(seconds: float) -> float:
    """A duration, as the lines of requests have it."""
    return round(1000 * max(0.0, seconds), 3)
