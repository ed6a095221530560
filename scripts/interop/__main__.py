"""Runs KServe's SDK against a server; ends with status 0 if every call worked.

`python -m scripts.interop --repository model_repository`. The SDK is installed under build/interop/.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from attention_client import AttentionClient

from scripts.export_demo_models import export_demo_models
from scripts.local_server import ROOT, serving

PACKAGE = "kserve==0.21.0"
ENVIRONMENT = ROOT / "build/interop" / PACKAGE
CLIENT = Path(__file__).with_name("kserve_client.py")
MODEL = "multi-head-768x12"
ROWS, WIDTH = 6, 768
CLIENT_SECONDS = 300


def main() -> int:
    """Runs the client and returns its exit status."""
    repository = export_demo_models("Runs KServe's SDK against a live server.")
    python = ENVIRONMENT / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)  # noqa: S603
    subprocess.run([python, "-m", "pip", "install", "--quiet", PACKAGE], check=True)  # noqa: S603
    rows = np.random.default_rng(0).standard_normal((1, ROWS, WIDTH)).astype(np.float32)
    with tempfile.TemporaryDirectory() as name:
        data, log = Path(name, "data.npz"), Path(name, "log")
        with serving(repository, log, "--http-port=0") as server, AttentionClient(server.target) as client:
            np.savez(data, query=rows, context_vectors=client.attend(MODEL, rows).context_vectors)
            where = (server.target, f"http://127.0.0.1:{server.http_port}", MODEL, data)
            command: list[str | Path] = [python, CLIENT, *where]
            return subprocess.run(command, timeout=CLIENT_SECONDS, check=False).returncode  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())
