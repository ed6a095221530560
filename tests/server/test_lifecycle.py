"""How a process ends: signals, the last step, and its end by force."""

import signal
import subprocess
import sys

import pytest

from tests.server.samples import ROOT

IMPORTS = """import ctypes, signal, threading, time
from attention_serving.server import lifecycle"""


def run(program: str, redirections: str = "") -> "subprocess.CompletedProcess[str]":
    program = "\n".join([IMPORTS, program])
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirections}', sys.executable, program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        # A thread that does not return is left.
        ("threading.Thread(target=time.sleep, args=[60]).start(); print(7); lifecycle.end(3)", 3, "7\n"),
        # Native code that keeps the interpreter: no thread of Python can run.
        ("lifecycle.end_after(0.1); ctypes.PyDLL(None).sleep(50)", 1, "Timeout (0:00:00.100000)!"),
    ],
    ids=["at once", "after a time"],
)
def test_the_process_ends_with_its_status(program: str, status: int, said: str) -> None:
    ended = run(program)
    assert ended.returncode == status
    assert said in ended.stdout + ended.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_closed_stream_does_not_hold_up_the_end(closed: str) -> None:
    status = run("lifecycle.end_after(0.1); time.sleep(60)", closed).returncode
    assert status == (-signal.SIGALRM if closed.startswith("2") else 1)
    assert run("print(7); lifecycle.end(3)", closed).returncode == 3


@pytest.mark.parametrize(
    ("hangup", "expected"), [("SIG_IGN", "['SIGTERM']"), ("SIG_DFL", "['SIGHUP', 'SIGTERM']")]
)
def test_a_hangup_that_was_ignored_at_startup_stays_ignored(hangup: str, expected: str) -> None:
    program = f"""
requests = []
signal.signal(signal.SIGHUP, signal.{hangup})
lifecycle.handle_signals(requests.append)
signal.raise_signal(signal.SIGHUP)
signal.raise_signal(signal.SIGTERM)
print([request["signal"] for request in requests])
"""
    assert run(program).stdout == f"{expected}\n"


def test_a_signal_that_does_not_wake_the_main_thread_is_handled() -> None:
    """It is given to another thread; one that arrives just before the thread sleeps has the same effect."""
    program = """
inbox = lifecycle.Inbox()
lifecycle.handle_signals(inbox.put)
def send():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    time.sleep(60)
threading.Thread(target=send, daemon=True).start()
assert isinstance(inbox.wait(), lifecycle.StopRequest)
"""
    assert run(program).returncode == 0
