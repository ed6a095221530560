"""What each worker is assigned."""

import os
import pickle
from pathlib import Path

import pytest

from attention_serving.server import machine
from attention_serving.server.settings import Settings
from attention_serving.server.workers import assignments


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five cores, with a quota of four."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5, 6})
    monkeypatch.setattr(machine, "available_cores", lambda: 4)


def settings(**options: object) -> Settings:
    return Settings.model_validate({"model_repository": "models", **options})


def test_each_worker_has_its_own_cores_and_its_share_of_the_quota_in_threads() -> None:
    found = list(assignments(settings(workers=2), Path("metrics")))
    assert [one.worker for one in found] == [0, 1]
    assert [one.cores for one in found] == [{0, 1}, {4, 5, 6}]
    assert [one.settings.threads for one in found] == [2, 2]


def test_a_given_number_of_threads_applies_to_each_worker() -> None:
    found = assignments(settings(workers=3, threads=7), Path("metrics"))
    assert [one.settings.threads for one in found] == [7, 7, 7]


def test_more_workers_than_cores_have_one_each() -> None:
    found = list(assignments(settings(workers=7), Path("metrics")))
    assert {len(one.cores) for one in found} == {1}
    assert {one.settings.threads for one in found} == {1}


@pytest.mark.parametrize(
    "repository", ["with space=and\nnewline", os.fsdecode(b"not \xff UTF-8")], ids=["odd", "bytes"]
)
def test_settings_arrive_unchanged(repository: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(model_repository=Path(repository), grace_seconds=float("inf"), host="::1", workers=2)
    one, _ = assignments(given, Path("metrics"))
    monkeypatch.setenv("ATTENTION_HOST", "elsewhere")
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301 - bytes of this test
    assert one.settings.model_repository == Path(repository)
