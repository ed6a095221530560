"""Runs clients of other projects against one server; ends with status 0 if every call of them worked.

`python -m scripts.interop --repository model_repository`. The clients are installed under build/interop/.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from attention_client import AttentionClient

from scripts.export_demo_models import export_demo_models
from scripts.local_server import ROOT, ServerProcess, serving

ENVIRONMENTS = ROOT / "build" / "interop"
CLIENTS = Path(__file__).with_name("clients.py")
# The function of clients.py, and the package that it needs in an environment of its own.
PACKAGES = {"kserve": "kserve==0.21.0", "mlserver": "mlserver==1.7.1"}
MODEL = "multi-head-768x12"
ROWS, WIDTH = 6, 768
CLIENT_SECONDS = 300


def main() -> int:
    """Runs all clients and returns the exit status."""
    parser = argparse.ArgumentParser(description="Runs clients of other projects against a live server.")
    parser.add_argument("--repository", type=Path, required=True, help="folder of the demo's models")
    repository = parser.parse_args().repository
    export_demo_models(repository)
    for client, package in PACKAGES.items():
        _install(client, package)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(repository, folder / "log", "--http-port=0") as server:
            statuses = [_run(client, server, folder / "data.npz") for client in PACKAGES]
    return 1 if any(statuses) else 0


def _install(client: str, package: str) -> None:
    """Makes the environment of a client, unless it is there."""
    environment = ENVIRONMENTS / client
    if not (environment / package).exists():
        pip = (environment / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)  # noqa: S603
        subprocess.run([*pip, package], check=True)  # noqa: S603 - commands of this file
        (environment / package).touch()


def _run(client: str, server: ServerProcess, data: Path) -> int:
    """Runs a client, which prints each call that works; returns its exit status."""
    rows = np.random.default_rng(0).standard_normal((1, ROWS, WIDTH)).astype(np.float32)
    with AttentionClient(server.target) as own:
        np.savez(data, query=rows, context_vectors=own.attend(MODEL, rows).context_vectors)
    (http_port,) = re.findall(r" serving .*\bhttp_port=(\d+)", server.log.read_text())
    command: list[str | Path] = [ENVIRONMENTS / client / "bin/python", CLIENTS, client, server.target]
    command += [f"http://127.0.0.1:{http_port}", MODEL, data]
    print(PACKAGES[client], flush=True)
    return subprocess.run(command, timeout=CLIENT_SECONDS, check=False).returncode  # noqa: S603 - a program of this folder


if __name__ == "__main__":
    sys.exit(main())
