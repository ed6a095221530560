"""One line for each event."""

import logging
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.logs import EventFormatter
from tests.server.samples import ROOT


def line(event: str = "model ready", /, **fields: object) -> str:
    """What is written of one event."""
    record = logging.makeLogRecord(
        {"msg": event, "levelname": "INFO", "created": 1.5, "msecs": 500.0, **fields}
    )
    return EventFormatter().format(record)


@pytest.fixture
def far_from_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("far_from_utc")
def test_time_is_utc_wherever_the_server_stands() -> None:
    assert time.localtime(0).tm_hour != 0
    assert line() == "1970-01-01T00:00:01.500Z INFO model ready"


def test_fields_follow_the_event_in_their_order() -> None:
    assert line(model="a", version=1, error=0.5).endswith(" INFO model ready model=a version=1 error=0.5")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("two words", "'two words'"),
        ("", "''"),
        ("a\n1970-01-01T00:00:00.000Z INFO forged", "'a\\n1970-01-01T00:00:00.000Z INFO forged'"),
        ("a\nb", "'a\\nb'"),
        (None, "None"),
    ],
    ids=["word", "spaces", "empty", "forged line", "newline", "none"],
)
def test_a_value_is_one_word_of_one_line(value: object, shown: str) -> None:
    assert line(reason=value) == f"1970-01-01T00:00:01.500Z INFO model ready reason={shown}"


@given(value=st.text())
def test_no_value_begins_a_new_line_or_a_new_field(value: str) -> None:
    written = line(reason=value, last=1)
    assert "\n" not in written
    assert written.endswith(" last=1")


@pytest.mark.parametrize(
    "separator", ["\r", "\x0b", "\x0c", "\x85", "\u2028"], ids=["cr", "vt", "ff", "nel", "ls"]
)
def test_no_value_holds_what_readers_take_for_a_new_line(separator: str) -> None:
    assert len(line(reason=f"a{separator}forged").splitlines()) == 1


def test_no_event_begins_a_new_line() -> None:
    assert "\n" not in line("asked for %s", args=("a\nforged",))


def test_a_traceback_follows_its_event() -> None:
    try:
        raise ValueError("secret")  # noqa: TRY301 - for its traceback
    except ValueError:
        written = line("run failed", exc_info=sys.exc_info(), model="a")
    first, second, *_, last = written.splitlines()
    assert first.endswith("INFO run failed model=a")
    assert second == "Traceback (most recent call last):"
    assert last == "ValueError: secret"


def test_events_from_the_level_on_go_to_standard_error() -> None:
    code = (
        "import logging; from server import logs; logs.configure('WARNING');"
        "log = logging.getLogger('any'); log.info('hidden'); log.warning('shown', extra={'a': 1})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    (only,) = done.stderr.splitlines()
    assert only.endswith("Z WARNING shown a=1")


def test_a_process_adds_its_own_fields_to_every_event() -> None:
    code = (
        "import logging; from server import logs; logs.configure('INFO', worker=3);"
        "logging.getLogger('any').info('shown', extra={'a': 1})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.endswith("Z INFO shown a=1 worker=3\n")
