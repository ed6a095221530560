"""Containers with TLS, and those of the image for GPUs on a machine that has none. Need the images."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.export_demo_models import DEMO_MODELS
from tests.chaos.servers import docker
from tests.deploy.images import (
    CLIENT,
    HARDENED,
    SENTENCE,
    SERVER,
    SERVER_CUDA,
    logs,
    needs,
    wait_until_healthy,
)

ROOT = Path(__file__).resolve().parents[2]
INSECURE = "--env=ATTENTION_INSECURE=true"
# The image for GPUs sets ATTENTION_PROVIDER=cuda.
REASON = "--provider cuda: NVIDIA's driver is not installed, or not visible in this container"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.crt, server.crt and server.key, as docker-compose.yml makes them."""
    folder = tmp_path_factory.mktemp("certificates")
    program = ROOT / "deploy/compose/certificates.py"
    subprocess.run([sys.executable, program, folder, "localhost"], check=True)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture(scope="module")
def with_tls(models: Path, certificates: Path) -> Iterator[str]:
    """A ready server that speaks TLS; its id."""
    found = docker(
        "run",
        "--detach",
        *HARDENED,
        f"--volume={models}:/models:ro",
        f"--volume={certificates}:/certificates:ro",
        "--env=ATTENTION_TLS_CERTIFICATE=/certificates/server.crt",
        "--env=ATTENTION_TLS_KEY=/certificates/server.key",
        "--health-interval=1s",
        SERVER,
    )
    try:
        wait_until_healthy(found)
        yield found
    finally:
        docker("rm", "--force", found)


def ask(server: str, certificates: Path, *options: str) -> str:
    volume, network = f"--volume={certificates}:/certificates:ro", f"--network=container:{server}"
    question = ("--server", "localhost:8001", *options, "text", "--model", DEMO_MODELS[0], SENTENCE)
    return docker("run", "--rm", network, *HARDENED, volume, CLIENT, *question)


@needs(SERVER, CLIENT)
def test_a_client_that_knows_the_authority_asks_over_tls(with_tls: str, certificates: Path) -> None:
    assert "dessert" in ask(with_tls, certificates, "--ca", "/certificates/ca.crt")


@needs(SERVER, CLIENT)
@pytest.mark.parametrize("options", [(), ("--tls",)], ids=["without TLS", "other authorities"])
def test_other_clients_are_refused(with_tls: str, certificates: Path, options: tuple[str, ...]) -> None:
    with pytest.raises(RuntimeError, match="error"):
        ask(with_tls, certificates, "--timeout", "2", *options)


@needs(SERVER)
def test_the_probe_of_the_image_speaks_tls(with_tls: str) -> None:
    docker("exec", with_tls, "python", "-m", "server.probe")


needs_no_gpu = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")


@needs(SERVER_CUDA)
@needs_no_gpu
def test_the_image_for_gpus_refuses_to_start_without_one(models: Path) -> None:
    with pytest.raises(RuntimeError) as refusal:
        docker("run", "--rm", *HARDENED, f"--volume={models}:/models:ro", INSECURE, SERVER_CUDA)
    assert REASON in str(refusal.value)


@needs(SERVER_CUDA)
@needs_no_gpu
def test_the_image_for_gpus_serves_on_the_cpu_where_it_may(models: Path) -> None:
    automatic = ("--env=ATTENTION_PROVIDER=auto", "--health-interval=1s")
    volume = f"--volume={models}:/models:ro"
    found = docker("run", "--detach", *HARDENED, volume, INSECURE, *automatic, SERVER_CUDA)
    try:
        wait_until_healthy(found)
        assert "provider=CPUExecutionProvider" in logs(found)
    finally:
        docker("rm", "--force", found)
