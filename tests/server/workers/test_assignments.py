"""What each worker is assigned."""

import os
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


@pytest.mark.parametrize(
    ("options", "cores", "threads"),
    [
        ({"workers": 2}, [{0, 1}, {4, 5, 6}], [2, 2]),
        ({"workers": 3, "threads": 7}, [{0}, {1, 4}, {5, 6}], [7, 7, 7]),
        ({"workers": 7}, [{0}, {0}, {1}, {4}, {4}, {5}, {6}], [1] * 7),
    ],
    ids=["divided", "given threads", "more than cores"],
)
def test_each_worker_has_its_own_cores_and_its_share_of_the_quota_in_threads(
    options: dict[str, int], cores: list[set[int]], threads: list[int]
) -> None:
    found = list(assignments(Settings.model_validate({"model_repository": "m", **options}), Path("metrics")))
    assert [one.worker for one in found] == list(range(options["workers"]))
    assert [one.cores for one in found] == cores
    assert [one.settings.threads for one in found] == threads
