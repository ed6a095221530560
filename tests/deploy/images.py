"""The images that tests run in containers, which `make images` builds; and the command docker."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SERVER, CLIENT, ENRICH = "attention-serving:latest", "attention-client:latest", "attention-enrich:latest"
HARDENED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges")
INSECURE = "--env=ATTENTION_INSECURE=true"
COMMAND_SECONDS = START_SECONDS = 60.0


def docker(*arguments: str) -> str:
    """Runs a command of Docker and returns what it printed.

    Raises:
        RuntimeError: It failed; the message says why.
    """
    command = [shutil.which("docker") or "docker", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"docker {' '.join(arguments)}: {done.stderr.strip()}")
    return f"{done.stdout}{done.stderr if arguments[0] == 'logs' else ''}".strip()


def has_image(image: str) -> bool:
    """Whether an engine runs here that has this image."""
    try:
        docker("image", "inspect", image)
    except (RuntimeError, OSError, subprocess.TimeoutExpired):
        return False
    return True


def needs(*images: str) -> pytest.MarkDecorator:
    missing = [image for image in images if not has_image(image)]
    return pytest.mark.skipif(
        bool(missing), reason=f"no Docker engine with {', '.join(missing)}: `make images` builds them"
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
