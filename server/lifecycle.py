"""The life of a process: how a child begins, requests to stop, the signals that become one, and the end."""

import faulthandler
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from attention_serving.server.errors import ServerError

log = logging.getLogger(__name__)
# How often a child that serves announces so, in seconds, as long as it takes calls.
HEARTBEAT_SECONDS = 1.0
# What it announces: how many requests it refused by itself since, by reason. A text is why it cannot serve.
SERVES: Mapping[str, int] = {}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# How long a process may take to end after the grace, when every call has been cancelled. Then it is ended.
EXIT_SECONDS = 3.0
# How much longer it may take to say so.
CANCEL_TIMEOUT_SECONDS = 2.0
# How late a signal may be handled that arrived just before the main thread fell asleep, or on another thread.
SIGNAL_SECONDS = 1.0


class Inbox(SimpleQueue[Any]):
    """Messages to the main thread, from any thread and from signal handlers.

    A signal handler may run while the main thread is inside `wait`, and of the standard library's means of
    waiting only `SimpleQueue` allows `put` there.
    """

    def wait(self) -> Any:
        """Waits for the next message. Wakes up now and then, because a signal may not wake the thread."""
        while True:
            with suppress(Empty):
                return self.get(timeout=SIGNAL_SECONDS)


class StopRequest(dict[str, str]):
    """The process is to finish the calls in progress and end; the cause, as fields of a log event."""


def handle_signals(stop: Callable[[StopRequest], None]) -> None:
    """Turns SIGTERM, SIGINT and SIGHUP into requests to stop.

    SIGHUP stays ignored if it was ignored at startup, as under nohup.

    Args:
        stop: Called on the main thread, between any two instructions of it.
    """
    for number in SIGNALS:
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        signal.signal(
            number, lambda received, _frame: stop(StopRequest({"signal": signal.Signals(received).name}))
        )


def end_after(seconds: float) -> None:
    """Ends the process with status 1 after a time, even if a run or a thread does not return.

    A thread of `faulthandler`, which does not need the interpreter, writes where each thread is and ends the
    process. If its output is not read, the system ends the process by SIGALRM.
    """
    with suppress(RuntimeError, OSError):  # standard error is closed
        faulthandler.dump_traceback_later(seconds, exit=True)
    signal.alarm(math.ceil(seconds + CANCEL_TIMEOUT_SECONDS))


def end(status: int) -> NoReturn:
    """Ends the process at once; what it used has been closed.

    The end of the interpreter would wait for threads that are inside gRPC or ONNX Runtime, perhaps for ever.
    """
    try:
        logging.shutdown()
        if sys.stdout is not None:  # it is None if it was closed when the process started
            sys.stdout.flush()
    finally:
        os._exit(status)


def run_child(serve: Callable[[Any, Any], None]) -> NoReturn:
    """Runs the program of a child process, and ends the process.

    Args:
        serve: Called with the child's end of the pipe to its parent, and with the parent's only message. Why
            it cannot serve, as a `ServerError`, is sent to the parent.
    """
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)  # noqa: FBT003 - takes no keyword
    status = 1
    try:
        serve(connection, connection.recv())
        status = 0
    except ServerError as error:
        with suppress(OSError):  # the parent has ended
            connection.send(str(error))
    except Exception:
        log.exception("failed")
    end(status)
