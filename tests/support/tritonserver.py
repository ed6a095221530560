"""A real tritonserver with its C++ backend for ONNX Runtime, on what `--target triton` has written."""

import os
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import free_ports

# What tests/support/install_peers.sh installs. The backend is in no Python package: copy backends/onnxruntime
# from NVIDIA's image, with the ONNX Runtime that it links to.
PEERS = Path(os.environ.get("PEERS_HOME") or Path.home() / ".cache/attention-peers").resolve()
BACKENDS = PEERS / "triton-onnxruntime/backends"
START_SECONDS = 300


def is_installed() -> bool:
    return (PEERS / "triton/bin/python").exists() and (BACKENDS / "onnxruntime").exists()


@contextmanager
def serving(repository: Path, log: Path, *options: str) -> Iterator[str]:
    """Starts tritonserver, and waits until its models are loaded. Yields its address."""
    (site,) = PEERS.glob("triton/lib/python3*/site-packages")
    tree, port = site / "pytriton/tritonserver", free_ports()[0]
    command: list[str | Path] = [
        tree / "bin/tritonserver",
        f"--model-repository={repository}",
        f"--backend-directory={BACKENDS}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={port}",
        "--allow-http=false",
        "--allow-metrics=false",
        *options,
    ]
    libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries))}
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process,
    ):
        try:
            until = time.monotonic() + START_SECONDS
            while "Started GRPCInferenceService" not in log.read_text():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"tritonserver did not start:\n{log.read_text()}")
                time.sleep(0.2)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
