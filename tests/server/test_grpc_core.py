"""The environment variables of gRPC's core, and what they do to a server."""

import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import grpc
import pytest

from scripts.local_server import serving
from server import grpc_core


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    yield monkeypatch
    for name in ("GRPC_EXPERIMENTS", "GRPC_VERBOSITY"):
        os.environ.pop(name, None)


def test_the_installed_release_is_known() -> None:
    """Measure a new release with and without the switch, before it is added."""
    assert version("grpcio").startswith(grpc_core.KNOWN_RELEASES)


@pytest.mark.usefixtures("environment")
def test_the_core_has_no_polling_threads_on_a_completion_queue() -> None:
    grpc_core.configure(completion_queue=True)
    assert os.environ["GRPC_EXPERIMENTS"] == grpc_core.WITHOUT_POLLING_THREADS


def test_the_other_transport_and_other_releases_keep_the_defaults(environment: pytest.MonkeyPatch) -> None:
    grpc_core.configure(completion_queue=False)
    assert "GRPC_EXPERIMENTS" not in os.environ
    environment.setattr(grpc_core, "version", lambda _: "2.0.0")
    grpc_core.configure(completion_queue=True)
    assert "GRPC_EXPERIMENTS" not in os.environ


def test_variables_that_are_set_stay_as_they_are(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("GRPC_EXPERIMENTS", "")
    environment.setenv("GRPC_VERBOSITY", "INFO")
    grpc_core.configure(completion_queue=True)
    assert (os.environ["GRPC_EXPERIMENTS"], os.environ["GRPC_VERBOSITY"]) == ("", "INFO")


def test_a_server_has_fewer_threads_without_them(
    artifacts: Path, tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    without = polling_threads(artifacts, tmp_path / "without.log")
    environment.setenv("GRPC_EXPERIMENTS", "")
    assert without < polling_threads(artifacts, tmp_path / "with.log")


def polling_threads(repository: Path, log: Path) -> int:
    """The threads of the core in a server that answers a call."""
    with serving(repository, log) as server, grpc.insecure_channel(server.target) as channel:
        grpc.channel_ready_future(channel).result(timeout=60)
        tasks = Path(f"/proc/{server.process.pid}/task")
        names = [(task / "comm").read_text() for task in tasks.iterdir()]
    return sum(name.startswith("event_engine") for name in names)
