"""The images in real containers. Needs a Docker engine that has them: `make images`."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attention_client import AttentionClient
from packaging.utils import canonicalize_name

from scripts.export_demo_models import DEMO_MODELS
from scripts.local_server import ROOT
from tests.deploy.test_requirements import pins
from tests.server.seams import wait_until
from tests.support.artifacts import cached_repositories
from tests.support.processes import free_ports
from tests.support.repository import DEMO

pytestmark = pytest.mark.thorough
SERVER, CLIENT, ENRICH = "attention-serving:latest", "attention-client:latest", "attention-enrich:latest"
HARDENED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges")
INSECURE = "--env=ATTENTION_INSECURE=true"
COMMAND_SECONDS = START_SECONDS = 60.0
QUESTION = ("text", "--model", DEMO_MODELS[0], "Life is short, eat dessert first")


def docker(*arguments: str, program: str = "docker") -> str:
    """Runs a command of Docker, or of another program, and returns what it printed.

    Raises:
        RuntimeError: It failed; the message says why.
    """
    command = [shutil.which(program) or program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{program} {' '.join(arguments)}: {done.stderr.strip()}")
    return f"{done.stdout}{done.stderr if arguments[0] == 'logs' else ''}".strip()


def needs(*images: str) -> pytest.MarkDecorator:
    """Skips a test unless an engine runs here that has these images."""
    lacking = True
    with suppress(RuntimeError, OSError, subprocess.TimeoutExpired):
        lacking = not docker("image", "inspect", *images)
    return pytest.mark.skipif(
        lacking, reason=f"no Docker engine with {', '.join(images)}: `make images` builds them"
    )


@contextmanager
def healthy(image: str, *options: str) -> Iterator[str]:
    """A container whose health check succeeds; its id."""
    found = docker("run", "--detach", *HARDENED, "--health-interval=1s", *options, image)
    try:
        until = time.monotonic() + START_SECONDS
        while docker("inspect", "--format={{.State.Health.Status}}", found) != "healthy":
            assert time.monotonic() < until, docker("logs", found)
            time.sleep(0.2)
        yield found
    finally:
        docker("rm", "--force", found)


def readable(folder: Path) -> str:
    """The option that mounts a folder, readable by the user of the images, at the path of its own name."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return f"--volume={folder}:/{folder.name}:ro"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The option that mounts the models of the demo."""
    (cached,) = cached_repositories(DEMO)
    return readable(shutil.copytree(cached, tmp_path_factory.mktemp("demo") / "models"))


@pytest.fixture(scope="module")
def container(models: str) -> Iterator[str]:
    with healthy(SERVER, models, INSECURE) as found:
        yield found


def python(container: str, code: str) -> str:
    return docker("exec", container, "python", "-c", code)


def beside(server: str, *command: str) -> str:
    """Runs a command of another image in the network of a server."""
    return docker("run", "--rm", f"--network=container:{server}", *HARDENED, *command)


@needs(SERVER)
def test_the_server_is_a_user_without_rights_on_a_read_only_file_system(container: str) -> None:
    assert python(container, "import os; print(os.getuid(), os.getgid())") == "10001 10001"
    for path in ("/app/file", "/file", "/models/file", "/opt/venv/file"):
        with pytest.raises(RuntimeError, match="Read-only file system"):
            python(container, f"open({path!r}, 'w')")
    rights = python(container, "print(*[line for line in open('/proc/1/status') if line.startswith('Cap')])")
    assert {word for word in rights.split() if not word.startswith("Cap")} == {"0" * 16}
    for program in ("sh", "bash", "apt-get", "dpkg", "pip"):
        with pytest.raises(RuntimeError, match="not found"):
            docker("run", "--rm", f"--entrypoint={program}", SERVER)


@needs(SERVER)
def test_the_server_is_process_1_and_ends_by_itself_when_it_is_stopped(models: str) -> None:
    with healthy(SERVER, models, INSECURE) as found:
        assert "server" in python(found, "print(open('/proc/1/cmdline').read())")
        docker("stop", "-t", "50", found)
        assert docker("inspect", "--format={{.State.ExitCode}}", found) == "0"
        log = docker("logs", found)
        assert "signal=SIGTERM" in log
        assert " drained " in log


@needs(SERVER)
def test_the_image_names_the_locked_packages_and_no_others(container: str) -> None:
    code = "import importlib.metadata as m; print(*[f'{d.name}=={d.version}' for d in m.distributions()])"
    found = dict(each.split("==") for each in python(container, code).split())
    assert {canonicalize_name(name): version for name, version in found.items()} == pins("server")


@needs(SERVER, CLIENT)
def test_the_client_asks_the_server(container: str) -> None:
    assert "dessert" in beside(container, CLIENT, *QUESTION)


@needs(SERVER, ENRICH)
def test_a_mounted_table_is_enriched(container: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.standard_normal((length, 768)).tolist() for length in (6, 1)]
    pq.write_table(pa.table({"id": [1, 2], "embeddings": sequences}), tmp_path / "in.parquet")
    tmp_path.chmod(0o777)
    options = ("--model=multi-head-768x12", "--column=embeddings", "--server=127.0.0.1:8001")
    beside(container, f"--volume={tmp_path}:/data", ENRICH, "/data/in.parquet", "/data/out.parquet", *options)
    assert pq.read_table(tmp_path / "out.parquet").num_columns == 3


def http_status(port: int, path: str) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=COMMAND_SECONDS)
    connection.request("GET", path)
    return connection.getresponse().status


@needs(SERVER)
@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_compose_serves_a_folder_of_the_user_and_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, http_port, metrics_port = free_ports(3)
    folder, ready = tmp_path / "models", "/v2/health/ready"
    for name, value in {
        "ATTENTION_PORT": port,
        "ATTENTION_HTTP_PORT": http_port,
        "ATTENTION_METRICS_PORT": metrics_port,
        "ATTENTION_MODELS": folder,
        "COMPOSE_FILE": ROOT / "docker-compose.yml",
        "COMPOSE_PROJECT_NAME": f"test{os.getpid()}",
    }.items():
        monkeypatch.setenv(name, str(value))
    compose = partial(docker, program="docker-compose")
    try:
        with pytest.raises(RuntimeError, match="bind source path does not exist"):
            compose("up", "--detach")
        readable(tmp_path)
        folder.mkdir()
        compose("up", "--detach")
        with AttentionClient(f"127.0.0.1:{port}") as client:
            client.wait_until_ready(START_SECONDS)
            assert http_status(http_port, ready) == 400
            assert "that user 10001 can read" in compose("logs")
            (cached,) = cached_repositories(DEMO)
            readable(shutil.copytree(cached / DEMO_MODELS[0], folder / DEMO_MODELS[0]))
            wait_until(lambda: http_status(http_port, ready) == 200)
            assert client.attend_text(DEMO_MODELS[0], "eat dessert").context_vectors.shape == (2, 16)
    finally:
        compose("down", "--volumes")
