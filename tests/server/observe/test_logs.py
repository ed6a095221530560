"""The log: one line for each event, as text or as JSON, and what happens if nobody reads it."""

import json
import logging
import re
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_serving.server.observe import logs
from attention_serving.server.observe.logs import JsonFormatter, TextFormatter
from tests.server.samples import ROOT, SELF
from tests.support.processes import run_python

# What readers may take for the end of a line.
ENDS = [f"a{end}forged" for end in "\r\x0b\x0c\x85\u2028"]


def record(event: str = "model ready", /, **fields: object) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"msg": event, "levelname": "INFO", "created": 1.5, "msecs": 500.0, **fields}
    )


def line(event: str = "model ready", /, **fields: object) -> str:
    return TextFormatter().format(record(event, **fields))


def json_line(event: str = "model ready", /, **fields: object) -> str:
    return JsonFormatter().format(record(event, **fields))


def test_a_line_has_time_in_utc_event_and_fields_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        shown = "1970-01-01T00:00:01.500Z INFO model ready model=a port=1 reason='two words' none=''"
        assert line(model="a", port=1, reason="two words", none="") == shown
        assert line(versions=["1", "2"]).endswith(" versions=1,2")
        assert '"versions": ["1", "2"]' in json_line(versions=["1", "2"])
        assert json_line(model="a", port=1) == (
            '{"time": "1970-01-01T00:00:01.500Z", "level": "INFO", "event": "model ready", "model": "a",'
            ' "port": 1}'
        )
    time.tzset()


@given(
    value=st.one_of(
        st.text(), st.floats(), st.integers(), st.binary(), st.none(), st.booleans(), st.sampled_from(ENDS)
    ),
    name=st.sampled_from(["reason", "time", "level", "event"]),
)
def test_no_value_begins_a_new_line_or_a_new_field(value: object, name: str) -> None:
    written, as_json = line(**{name: value}, last=1), json_line(**{name: value})
    assert len(written.splitlines()) == len(as_json.splitlines()) == 1
    assert written.endswith(" last=1")
    found = json.loads(as_json, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert (found["level"], found["event"]) == ("INFO", "model ready")
    assert "\n" not in line("requested %s", args=("a\nforged",))


def test_a_traceback_follows_its_event() -> None:
    try:
        raise ValueError("secret")  # noqa: TRY301 - for its traceback
    except ValueError:
        written = line("run failed", exc_info=sys.exc_info(), model="a")
        as_json = json.loads(json_line("run failed", exc_info=sys.exc_info(), model="a"))
    first, second, *_, last = written.splitlines()
    assert first.endswith("INFO run failed model=a")
    assert (second, last) == ("Traceback (most recent call last):", "ValueError: secret")
    assert as_json["exception"].splitlines()[-1] == "ValueError: secret"
    assert as_json["model"] == "a"


def logged(code: str) -> str:
    """Standard error of a process that logs."""
    done = run_python("-c", f"import logging; from attention_serving.server.observe import logs\n{code}")
    assert (done.returncode, done.stdout) == (0, "")
    return done.stderr


@pytest.mark.parametrize(
    ("style", "shown", "warned", "end"),
    [
        ("text", "Z WARNING shown a=1", "Z WARNING '<string>:3: UserWarning: one\\ntwo", " worker=3"),
        ("json", '"event": "shown", "a": 1', "UserWarning: one\\ntwo", ', "worker": 3}'),
    ],
)
def test_events_and_warnings_are_lines_of_the_process(style: str, shown: str, warned: str, end: str) -> None:
    first, second = logged(
        f"import warnings; logs.configure('WARNING', {style!r}, worker=3); log = logging.getLogger('any');"
        "log.info('hidden'); log.warning('shown', extra={'a': 1})\n"
        "warnings.warn('one\\ntwo')"
    ).splitlines()
    assert first.endswith(f"{shown}{end}")
    assert warned in second
    assert second.endswith(end)


def test_the_runtime_and_grpc_write_nothing_beside_the_log(artifacts: Path, tmp_path: Path) -> None:
    """A graph that the runtime warns about, a run that fails, and a port in use."""
    model = onnx.load(artifacts / SELF / "1/model.onnx")
    model.graph.initializer.add(name="unused", dims=[1], data_type=1, raw_data=bytes(4))
    onnx.save(model, tmp_path / "model.onnx")
    code = f"""
logs.configure('INFO')
import grpc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.run.session import Session
session = Session(Path({str(tmp_path / "model.onnx")!r}), Device(threads=1))
with suppress(Exception):
    session.run({{}})
server = grpc.server(ThreadPoolExecutor(1), options=[('grpc.so_reuseport', 0)])
port = server.add_insecure_port('127.0.0.1:0')
with suppress(RuntimeError):
    server.add_insecure_port(f'127.0.0.1:{{port}}')
logging.getLogger('any').info('ended')
"""
    assert re.fullmatch(r"\S+ INFO ended\n", logged(code.lstrip()))


LINES = 30_000
FLOOD = f"""
import logging, sys, time
from attention_serving.server.observe import logs
from attention_serving.server.lifecycle import end
logs.configure('INFO')
log, started = logging.getLogger('any'), time.monotonic()
for number in range({LINES}):
    log.info('event', extra={{'number': number}})
print(time.monotonic() - started, logging.getLogger().handlers[0].dropped, flush=True)
"""


def test_a_reader_that_stops_delays_nobody_and_learns_later_what_it_missed() -> None:
    command = [sys.executable, "-c", f"{FLOOD}sys.stdin.readline()\nend(0)"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        seconds, dropped = map(float, process.stdout.readline().split())
        assert seconds < 20  # the pipe holds 64 KiB of 1.5 MB, and nobody reads it
        numbers, missed = [], ""
        while not missed:
            written = process.stderr.readline()
            numbers += [int(number) for number in re.findall(r" event number=(\d+)$", written)]
            missed = "".join(re.findall(r" WARNING log lines dropped lines=(\d+)$", written))
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(timeout=60) == 0
    # Once the queue is full, each line that the thread has written makes place for one.
    assert numbers[: logs.MAX_LINES] == list(range(logs.MAX_LINES))
    assert numbers == sorted(set(numbers))
    assert int(missed) == dropped == LINES - len(numbers) > 0
