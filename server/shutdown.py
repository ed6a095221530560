"""Requests to stop: what they carry, and how signals become one."""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# How long a process may take to end after the grace, when every call has been cancelled. Then it is ended.
EXIT_SECONDS = 3.0
# Messages to the main thread. A signal handler may run while the main thread is inside `get`, and of the
# standard library's means of waiting only this queue allows `put` there.
Inbox = SimpleQueue[object]


@dataclass(frozen=True)
class StopRequest:
    """The process is to finish the calls in progress and end.

    Attributes:
        fields: The cause, as fields of a log event.
    """

    fields: dict[str, str] = field(default_factory=dict)


def handle_signals(stop: Callable[[StopRequest], None]) -> None:
    """Turns SIGTERM, SIGINT and SIGHUP into requests to stop.

    SIGHUP stays ignored if it was ignored at startup, as under nohup.

    Args:
        stop: Called on the main thread, between any two instructions of it.
    """
    for number in SIGNALS:
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        signal.signal(number, lambda received, _frame: stop(_request(received)))


def _request(number: int) -> StopRequest:
    return StopRequest({"signal": signal.Signals(number).name})
