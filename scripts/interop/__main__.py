"""Runs clients of other projects against one server, prints what worked, and ends with status 0 if all did.

`python -m scripts.interop --repository model_repository`. The clients are installed under build/interop/.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
BUF = ("npx", "--yes", "@bufbuild/buf@1.75.0", "curl", "--http2-prior-knowledge", "--protocol=grpc")
# Methods that buf calls, with the message as JSON and what the answer contains. It learns them by reflection.
BUF_CALLS = (
    ("grpc.health.v1.Health/Check", "{}", "SERVING"),
    ("inference.GRPCInferenceService/ServerMetadata", "{}", '"name"'),
    ("inference.GRPCInferenceService/ModelReady", f'{{"name": "{MODEL}"}}', '"ready":true'),
    ("attention.v1.AttentionService/ListModels", "{}", MODEL),
)


def main() -> int:
    """Runs all clients and returns the exit status."""
    parser = argparse.ArgumentParser(description="Runs clients of other projects against a live server.")
    parser.add_argument("--repository", type=Path, required=True, help="folder of the demo's models")
    repository = parser.parse_args().repository
    export_demo_models(repository)
    for client, package in PACKAGES.items():
        _install(client, package)
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(repository, folder / "log", "--http-port=0") as server:
            for client, call, problem in _outcomes(server, folder / "data.npz"):
                print(f"{client}, {call}: {problem or 'works'}")
                failed += bool(problem)
    return 1 if failed else 0


def _install(client: str, package: str) -> None:
    """Makes the environment of a client, unless it is there."""
    environment = ENVIRONMENTS / client
    if not (environment / package).exists():
        pip = (environment / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)  # noqa: S603
        subprocess.run([*pip, package], check=True)  # noqa: S603 - commands of this file
        (environment / package).touch()


def _outcomes(server: ServerProcess, data: Path) -> Iterator[tuple[str, str, str]]:
    """Name of a client, what it called, and why that failed; nothing if it worked."""
    rows = np.random.default_rng(0).standard_normal((1, ROWS, WIDTH)).astype(np.float32)
    with AttentionClient(server.target) as own:
        np.savez(data, query=rows, context_vectors=own.attend(MODEL, rows).context_vectors)
    (http_port,) = re.findall(r" serving .*\bhttp_port=(\d+)", server.log.read_text())
    for client in PACKAGES:
        python = ENVIRONMENTS / client / "bin/python"
        output, problem = _ask(
            python, CLIENTS, client, server.target, f"http://127.0.0.1:{http_port}", MODEL, data
        )
        yield from ((client, call, "") for call in output.splitlines())
        if problem:
            yield client, "the next", problem
    for method, message, expected in BUF_CALLS:
        output, problem = _ask(*BUF, "--reflect", "--data", message, f"http://{server.target}/{method}")
        if not problem and expected not in output.replace(" ", ""):
            problem = f"answered {output}"
        yield "buf", method, problem


def _ask(*command: str | Path) -> tuple[str, str]:
    """What a command printed, and why it failed; nothing if it did not."""
    try:
        done = subprocess.run(  # noqa: S603 - commands of this file
            command, capture_output=True, text=True, timeout=CLIENT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    problem = done.stderr.strip().splitlines()[-1:] or [f"ended with status {done.returncode}"]
    return done.stdout, problem[0] if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main())
