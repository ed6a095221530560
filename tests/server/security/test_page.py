"""docs/security.md: its table of methods is that of the code, and its examples work."""

import re
import shlex
import shutil
import ssl
import subprocess
import sys
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest

from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.methods import HealthService, all_methods
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.security.token_file import read_file
from scripts.local_server import serving
from tests.server.samples import ROOT
from tests.server.seams import engine_of, unchanged, wait_until
from tests.support.certificates import client_context, presented

PAGE = (ROOT / "docs/security.md").read_text()


def test_the_page_states_the_right_of_every_method(threads: CodecThreads) -> None:
    stated: defaultdict[str, set[str]] = defaultdict(set)
    table = PAGE.partition("What each method needs")[2].partition("\n\n")[2].partition("\n\n")[0]
    for right, methods in re.findall(r"^\| `?(\w+)`? \| (`.*`) \|$", table, re.MULTILINE):
        stated[right] |= {name.rpartition("/")[2] for name in re.findall(r"`([^`]+)`", methods)}
    found: defaultdict[str, set[str]] = defaultdict(set)
    with closing(engine_of()) as engine:
        services = HealthService(), unchanged(engine.repository), SharedMemory()
        methods = all_methods(engine, threads, *services, authenticate=lambda *_: None)
    for path, method in methods.items():
        if not path.startswith("/attention.internal."):
            found[str(method.right or "none")].add(path.rpartition("/")[2])
    assert stated == found


def test_the_file_of_the_page_is_good(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "tokens.toml"
    path.write_text(block)
    assert [entry.name for entry in read_file(path).identities] == ["reports", "jobs"]


@pytest.mark.thorough
@pytest.mark.skipif(not (shutil.which("openssl") and shutil.which("curl")), reason="needs openssl and curl")
def test_the_first_trial_of_the_page(artifacts: Path, tmp_path: Path) -> None:
    """As printed, except for the paths and ports of a test."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.partition("## TLS")[2].partition("### ")[0], re.DOTALL)
    certificates, server, clients = blocks
    run(certificates, tmp_path)
    options = [str(tmp_path / part) if part.startswith("tls/") else part for part in shlex.split(server)[7:]]
    with serving(artifacts, tmp_path / "log", "--http-port=0", "--workers=2", *options) as process:
        ports = {"8000": process.http_port, "8002": process.metrics_port}
        for known, port in ports.items():
            clients = clients.replace(f"127.0.0.1:{known}", f"127.0.0.1:{port}")
        command = f"{Path(sys.executable).parent}/attention-client --server {process.target}"
        clients = clients.replace(".venv/bin/attention-client", command).replace(
            "curl ", "curl --fail --silent "
        )
        said = run(clients, tmp_path)
        run(certificates, tmp_path)  # of another authority
        wait_until(lambda: renewed(tmp_path, process.port, *ports.values()))
    assert "tiny-self" in said
    assert '{"ready":true}' in said
    assert "attention_tls_certificate_expiry_timestamp_seconds" in said


def renewed(folder: Path, *ports: int) -> bool:
    """Whether all faces, and each worker, show the certificate of the new authority."""
    context = client_context((folder / "tls/ca.crt").read_bytes())
    try:
        return all(presented(port, context) for port in ports * 4)
    except ssl.SSLCertVerificationError:
        return False


def run(commands: str, folder: Path) -> str:
    done = subprocess.run(
        ["/bin/sh", "-e", "-c", commands], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
