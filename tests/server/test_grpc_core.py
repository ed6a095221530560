"""The environment variables of gRPC's core, and what they do to a server."""

import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scripts.local_server import serving
from server import grpc_core

CALLS = 200


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


def test_threads_of_the_core_have_no_part_in_calls(
    artifacts: Path, tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    assert wake_ups(artifacts, tmp_path / "without.log") < CALLS / 4
    environment.setenv("GRPC_EXPERIMENTS", "")
    assert wake_ups(artifacts, tmp_path / "with.log") > CALLS / 2


def wake_ups(repository: Path, log: Path) -> int:
    """How often the threads of the core were woken in a server that answered some calls."""
    with serving(repository, log) as server, grpc.insecure_channel(server.target) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        check(health_pb2.HealthCheckRequest(), timeout=60)
        before = switches(server.process.pid)
        for _ in range(CALLS):
            check(health_pb2.HealthCheckRequest(), timeout=60)
        return switches(server.process.pid) - before


def switches(pid: int) -> int:
    statuses = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    own = [status for status in statuses if status.startswith("Name:\tevent_engine")]
    return sum(int(re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.M)[0]) for status in own)
