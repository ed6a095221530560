"""Periodic threads, and files that change while they are in use: what is taken, refused and reported."""

import logging
import queue
import threading
from functools import partial
from pathlib import Path

import pytest

from attention_serving.server.errors import ServerError
from attention_serving.server.threads import PeriodicThread, Watched, read_bytes
from tests.server.seams import wait_until
from tests.server.security.samples import looking_often

BAD = "bad"


class Followed:
    """A file of one line, and what was reported of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reported: list[object] = []
        self.usable = False
        path.write_text("one")
        with looking_often():
            self.watched = Watched("line", partial(read_bytes, path), self._parse, self._report)

    def looks(self, content: str | None, count: int = 1) -> str:
        """Writes the file, or removes it, and looks; returns the value."""
        if content is None:
            self.path.unlink(missing_ok=True)
        else:
            self.path.write_text(content, errors="surrogateescape")
        for _ in range(count):
            self.watched.poll_once()
        return self.watched.value

    def _report(self, _what: str, value: object) -> None:
        self.reported.append(value)

    def _parse(self, content: bytes) -> str:
        text = content.decode()
        if text == BAD and not self.usable:
            raise ServerError("is bad")
        return text


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path / "line")


def test_a_change_is_taken_at_once_and_reported_once(followed: Followed) -> None:
    first = followed.watched.value
    assert followed.looks("one", 3) is first
    assert followed.reported == []
    followed.looks(BAD)  # written in two steps
    assert followed.looks("two") == "two"
    followed.looks("two", 3)
    assert followed.reported == ["two"]
    with pytest.raises(ServerError, match="is bad"):
        Watched("line", BAD.encode, followed._parse)


@pytest.mark.parametrize("content", [BAD, None, "\udcff"], ids=["bad", "absent", "unexpected"])
def test_what_cannot_be_used_changes_nothing_and_is_reported_once_it_stays(
    followed: Followed, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    followed.looks(content)
    assert (followed.watched.value, followed.reported) == ("one", [])
    for _ in range(3):
        followed.watched.poll_once()
    assert (followed.watched.value, followed.reported) == ("one", [None])
    assert [record.message for record in caplog.records] == ["not reloaded; what is in use is kept"]
    followed.usable = True  # without a change: what was refused is tried again
    if content == BAD:
        followed.watched.poll_once()
        assert followed.reported == [None, BAD]
    assert followed.looks("two") == "two"
    assert followed.reported[-1] == "two"


def test_work_is_repeated_after_a_time_and_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    calls: queue.Queue[str] = queue.Queue()

    def work() -> None:
        calls.put(threading.current_thread().name)
        thread.seconds = 0.0 if calls.qsize() < 3 else 3600.0
        raise ValueError("of the work")

    thread = PeriodicThread("counts", work, 0.0)
    thread.start()
    wait_until(lambda: calls.qsize() == 3)
    thread.close()
    assert [calls.get() for _ in range(3)] == ["counts"] * 3
    assert "periodic work failed" in caplog.text
    assert "of the work" in caplog.text
    PeriodicThread("idle", lambda: pytest.fail("called"), 0.0).close()  # which was not started
