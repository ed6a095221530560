"""The images in real containers. Needs a Docker engine that has them: `make images`."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packaging.utils import canonicalize_name

from scripts.export_demo_models import DEMO_MODELS
from tests.chaos.servers import docker
from tests.deploy.images import (
    CLIENT,
    ENRICH,
    HARDENED,
    SENTENCE,
    SERVER,
    START_SECONDS,
    logs,
    needs,
    wait_until_healthy,
)
from tests.deploy.test_requirements import pins


@pytest.fixture(scope="module")
def container(models: Path) -> Iterator[str]:
    """A ready server; its id."""
    volume, environment = f"--volume={models}:/models:ro", "--env=ATTENTION_INSECURE=true"
    found = docker("run", "--detach", *HARDENED, volume, environment, "--health-interval=1s", SERVER)
    try:
        wait_until_healthy(found)
        yield found
    finally:
        docker("rm", "--force", found)


def python(container: str, code: str) -> str:
    return docker("exec", container, "python", "-c", code)


@needs(SERVER)
def test_the_server_is_a_user_without_rights_on_a_read_only_file_system(container: str) -> None:
    assert python(container, "import os; print(os.getuid(), os.getgid())") == "10001 10001"
    for path in ("/app/file", "/file", "/models/file", "/opt/venv/file"):
        with pytest.raises(RuntimeError, match="Read-only file system"):
            python(container, f"open({path!r}, 'w')")
    rights = python(container, "print(*[line for line in open('/proc/1/status') if line.startswith('Cap')])")
    assert set(rights.split()) - {"CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"} == {"0" * 16}


@needs(SERVER)
@pytest.mark.parametrize("program", ["sh", "bash", "apt-get", "dpkg", "pip"])
def test_the_image_has_neither_a_shell_nor_a_package_manager(program: str) -> None:
    with pytest.raises(RuntimeError, match="not found"):
        docker("run", "--rm", f"--entrypoint={program}", SERVER)


@needs(SERVER)
def test_the_server_is_process_1_and_ends_by_itself_when_it_is_stopped(models: Path) -> None:
    volume, environment = f"--volume={models}:/models:ro", "--env=ATTENTION_INSECURE=true"
    found = docker("run", "--detach", *HARDENED, volume, environment, SERVER)
    try:
        until = time.monotonic() + START_SECONDS
        while " serving " not in logs(found):
            assert time.monotonic() < until, logs(found)
            time.sleep(0.1)
        assert "server" in python(found, "print(open('/proc/1/cmdline').read())")
        docker("stop", "--time=50", found)
        assert docker("inspect", "--format={{.State.ExitCode}}", found) == "0"
        assert "signal=SIGTERM" in logs(found)
        assert " drained " in logs(found)
    finally:
        docker("rm", "--force", found)


@needs(SERVER)
def test_the_probe_of_the_image_tells_whether_the_server_serves(container: str) -> None:
    docker("exec", container, "python", "-m", "server.probe")
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        docker("exec", container, "python", "-m", "server.probe", "127.0.0.1:1")


@needs(SERVER)
def test_the_image_holds_the_locked_packages_and_no_others(container: str) -> None:
    code = """
        import json
        from importlib import metadata
        print(json.dumps([[each.name, each.version] for each in metadata.distributions()]))
    """
    found = json.loads(python(container, dedent(code)))
    assert {canonicalize_name(name): version for name, version in found} == pins("server")


@needs(SERVER)
def test_files_name_their_debian_packages(container: str) -> None:
    names = python(container, "import os; print(*os.listdir('/var/lib/dpkg/status.d'))").split()
    assert {"libc6", "libstdc++6"} <= set(names)


@needs(SERVER)
def test_labels_describe_the_image() -> None:
    labels = json.loads(docker("image", "inspect", "--format={{json .Config.Labels}}", SERVER))
    assert labels["org.opencontainers.image.title"] == "attention-serving"
    for name in ("version", "revision", "licenses"):
        assert labels[f"org.opencontainers.image.{name}"]


@needs(SERVER, CLIENT)
def test_the_client_asks_the_server(container: str) -> None:
    network = f"--network=container:{container}"
    answer = docker("run", "--rm", network, *HARDENED, CLIENT, "text", "--model", DEMO_MODELS[0], SENTENCE)
    assert "dessert" in answer


@needs(SERVER, ENRICH)
def test_a_mounted_table_is_enriched(container: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.standard_normal((length, 768)).tolist() for length in (6, 1)]
    pq.write_table(pa.table({"id": [1, 2], "embeddings": sequences}), tmp_path / "in.parquet")
    tmp_path.chmod(0o777)
    docker(
        "run",
        "--rm",
        f"--network=container:{container}",
        *HARDENED,
        f"--volume={tmp_path}:/data",
        ENRICH,
        "/data/in.parquet",
        "/data/out.parquet",
        "--model=multi-head-768x12",
        "--column=embeddings",
        "--server=127.0.0.1:8001",
    )
    assert pq.read_table(tmp_path / "out.parquet").num_columns == 3
