"""The images that tests run in containers. `make images` builds them."""

import subprocess
import time

import pytest

from tests.chaos.servers import docker, has_image

SERVER, CLIENT, ENRICH = "attention-serving:latest", "attention-client:latest", "attention-enrich:latest"
SERVER_CUDA = "attention-serving-cuda:latest"
HARDENED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges")
START_SECONDS = 60.0
SENTENCE = "Life is short, eat dessert first"


def needs(*images: str) -> pytest.MarkDecorator:
    missing = [image for image in images if not has_image(image)]
    return pytest.mark.skipif(
        bool(missing), reason=f"no Docker engine with {', '.join(missing)}: `make images` builds them"
    )


def logs(container: str) -> str:
    done = subprocess.run(["docker", "logs", container], capture_output=True, text=True, check=True)  # noqa: S607
    return done.stdout + done.stderr


def wait_until_healthy(container: str) -> None:
    until = time.monotonic() + START_SECONDS
    while docker("inspect", "--format={{.State.Health.Status}}", container) != "healthy":
        assert time.monotonic() < until, logs(container)
        time.sleep(0.2)
