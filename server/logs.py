"""One clear line for each event: time, level, event, then key=value."""

import logging
import sys
import time
from typing import Any

# What a record has of its own; everything else came as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class EventFormatter(logging.Formatter):
    """2026-01-31T12:00:00.123Z INFO model ready model=self-attention version=1."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback follows it where there is one."""
        fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        event = record.getMessage()
        words = [self.formatTime(record), record.levelname, event if event.isprintable() else repr(event)]
        line = " ".join(words + [f"{key}={_quoted(value)}" for key, value in fields.items()])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _quoted(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and text else repr(text)


def configure(level: str, **fields: object) -> None:
    """Sends every event from the given level on to standard error.

    Args:
        level: The least that is sent.
        fields: What every event of this process says beside its own.
    """

    def add(record: logging.LogRecord) -> bool:
        vars(record).update(fields)
        return True

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter())
    handler.addFilter(add)
    logging.basicConfig(level=level, handlers=[handler], force=True)
