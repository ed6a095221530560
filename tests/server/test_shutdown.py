"""The last step of a process, also without standard output or error."""

import subprocess
import sys

import pytest

from tests.test_structure import ROOT


@pytest.mark.parametrize("closed", ["", ">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("shutdown.end(3)", 3),
        ("shutdown.end_after(0.1); time.sleep(60)", 1),
        ("shutdown.end_after(1e30); shutdown.end(0)", 0),
    ],
    ids=["at once", "after a time", "after a time without end"],
)
def test_the_process_ends_with_its_status(code: str, status: int, closed: str) -> None:
    program = f"import time; from attention_serving.server import shutdown; {code}"
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=50, check=False)
    assert ended.returncode == status
    assert b"Traceback" not in ended.stderr


def test_what_was_printed_is_written_first() -> None:
    program = "from attention_serving.server import shutdown; print(7); shutdown.end(0)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True)
    assert ended.stdout == b"7\n"


def test_a_thread_that_does_not_return_is_left() -> None:
    program = """\
import threading, time
from attention_serving.server import shutdown
threading.Thread(target=time.sleep, args=[60]).start()
shutdown.end(0)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=50, check=True)


def test_a_signal_that_does_not_wake_the_main_thread_is_handled() -> None:
    """It is given to another thread; one that arrives just before the thread sleeps has the same effect."""
    program = """\
import signal, threading, time
from attention_serving.server import shutdown
inbox = shutdown.Inbox()
shutdown.handle_signals(inbox.put)
def send():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    time.sleep(60)
threading.Thread(target=send, daemon=True).start()
assert isinstance(inbox.get(), shutdown.StopRequest)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=50, check=True)
