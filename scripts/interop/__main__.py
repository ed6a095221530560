"""Runs every client against one server, prints what worked, and ends with status 0 if all did.

`python -m scripts.interop --repository model_repository`. The clients are installed under build/interop/.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from attention_client import AttentionClient
from rich.console import Console
from rich.table import Table

from scripts.export_demo_models import export_demo_models
from scripts.local_server import ROOT, ServerProcess, serving

ENVIRONMENTS = ROOT / "build" / "interop"
HERE = Path(__file__).parent
MODEL = "multi-head-768x12"
ROWS, WIDTH = 6, 768
CLIENT_SECONDS = 300
console = Console(highlight=False)


@dataclass(frozen=True)
class PythonClient:
    """A client in Python.

    Attributes:
        package: What to install, with its version.
        script: A program of this folder that is run in the environment of the client.
    """

    package: str
    script: str

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return ENVIRONMENTS / self.script / "bin" / "python"

    def install(self) -> None:
        """Makes the environment, unless it is there."""
        done = self.python.parent.parent / self.package
        if done.exists():
            return
        _run(sys.executable, "-m", "venv", "--clear", self.python.parent.parent)
        _run(self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", self.package)
        done.touch()

    def command(self, server: ServerProcess, http_port: int, data: Path) -> list[str | Path]:
        """The command that asks the server, and compares the answer."""
        urls = server.target, f"http://127.0.0.1:{http_port}"
        return [self.python, HERE / f"{self.script}.py", *urls, MODEL, data]


PYTHON_CLIENTS = (
    PythonClient("kserve==0.21.0", "kserve_sdk"),
    PythonClient("mlserver==1.7.1", "mlserver_stubs"),
)
BUF = "@bufbuild/buf@1.75.0"
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
    for client in PYTHON_CLIENTS:
        client.install()
    table, failed = Table("client", "call", "result"), 0
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        with serving(repository, data / "log", "--http-port=0") as server:
            for name, call, problem in _outcomes(server, data):
                table.add_row(name, call, problem or "works")
                failed += bool(problem)
    console.print(table)
    return 1 if failed else 0


def _outcomes(server: ServerProcess, data: Path) -> list[tuple[str, str, str]]:
    """Name of a client, what it called, and why that failed; nothing if it worked."""
    rows = np.random.default_rng(0).standard_normal((1, ROWS, WIDTH)).astype(np.float32)
    with AttentionClient(server.target) as own:
        answer = own.attend(MODEL, rows).context_vectors
    np.savez(data / "data.npz", query=rows, context_vectors=answer)
    http_port = _http_port(server.log)
    found = []
    for client in PYTHON_CLIENTS:
        output, problem = _ask(*client.command(server, http_port, data / "data.npz"))
        found += [(client.package, call, "") for call in output.splitlines()]
        if problem:
            found.append((client.package, "the next", problem))
    for method, message, expected in BUF_CALLS:
        command = ["npx", "--yes", BUF, "curl", "--http2-prior-knowledge", "--protocol", "grpc", "--reflect"]
        output, problem = _ask(*command, "--data", message, f"http://{server.target}/{method}")
        if not problem and expected not in output.replace(" ", ""):
            problem = f"answered {output}"
        found.append((BUF, method, problem))
    return found


def _http_port(log: Path) -> int:
    port = re.search(r"\bhttp_port=(\d+)", log.read_text())
    if port is None:
        raise RuntimeError(f"the server does not serve HTTP:\n{log.read_text()}")
    return int(port[1])


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


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)  # noqa: S603 - commands of this file


if __name__ == "__main__":
    sys.exit(main())
