"""When a worker's place is filled again, and what each worker serves with."""

import os
import pickle
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

from server import cores
from server.settings import Settings
from server.workers.assignment import Word
from server.workers.member import Member
from server.workers.supervisor import assignments


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five cores, time enough on four of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5, 6})
    monkeypatch.setattr(cores, "available", lambda: 4)


def settings(**options: object) -> Settings:
    return Settings.model_validate({"model_repository": "models", **options})


def member() -> Member:
    (only,) = assignments(settings(), Path("metrics"))
    return Member(only)


def test_each_has_its_cores_and_a_thread_for_each_that_the_quota_grants() -> None:
    found = list(assignments(settings(workers=2), Path("metrics")))
    assert [one.worker for one in found] == [0, 1]
    assert [one.cores for one in found] == [{0, 1}, {4, 5, 6}]
    assert [one.settings.threads for one in found] == [2, 2]


def test_threads_that_are_given_are_kept() -> None:
    found = assignments(settings(workers=3, threads=7), Path("metrics"))
    assert [one.settings.threads for one in found] == [7, 7, 7]


def test_more_workers_than_cores_have_one_each() -> None:
    found = list(assignments(settings(workers=7), Path("metrics")))
    assert {len(one.cores) for one in found} == {1}
    assert {one.settings.threads for one in found} == {1}


@pytest.mark.parametrize(
    "repository", ["with space=and\nnewline", os.fsdecode(b"not \xff UTF-8")], ids=["odd", "bytes"]
)
def test_settings_arrive_as_they_are(repository: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(model_repository=Path(repository), grace_seconds=float("inf"), host="::1", workers=2)
    one, _ = assignments(given, Path("metrics"))
    monkeypatch.setenv("ATTENTION_HOST", "elsewhere")
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301 - its own
    assert one.settings.model_repository == Path(repository)


def test_the_wait_doubles_up_to_the_longest_while_processes_keep_dying() -> None:
    place = member()
    assert [place.postpone() for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize(("served", "delay"), [(29.0, 4), (31.0, 0.5)], ids=["briefly", "long"])
def test_the_wait_is_short_again_after_long_service(
    monkeypatch: pytest.MonkeyPatch, served: float, delay: float
) -> None:
    place = member()
    for _ in range(3):
        place.postpone()
    place.link, worker = Pipe()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    worker.send(Word.SERVING)
    assert place.hear()
    monkeypatch.setattr(time, "monotonic", lambda: now + served)
    assert place.postpone() == delay


def test_the_next_process_is_due_after_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    place = member()
    place.postpone()
    assert place.due == 100.5
