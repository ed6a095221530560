"""docs/security.md: its certificates for a trial work, and it names every setting and metric of TLS."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from attention_client import AttentionClient, TlsFiles

from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.settings.sections import Security
from scripts.local_server import serving
from tests.server.samples import ROOT

PAGE = (ROOT / "docs/security.md").read_text()
COMMANDS = next(block for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "openssl" in block)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_certificates_for_a_trial_work(artifacts: Path, tmp_path: Path) -> None:
    subprocess.run(["sh", "-e", "-c", COMMANDS], cwd=tmp_path, check=True, capture_output=True)  # noqa: S607
    tls = tmp_path / "tls"
    files = {"certificate": "server.crt", "key": "server.key", "client-ca": "ca.crt"}
    options = [f"--tls-{name}={tls / file}" for name, file in files.items()]
    credentials = TlsFiles(ca=tls / "ca.crt", certificate=tls / "client.crt", key=tls / "client.key")
    with (
        serving(artifacts, tmp_path / "log", *options) as server,
        AttentionClient(server.target, credentials=credentials) as client,
    ):
        assert client.models()


@pytest.mark.parametrize("name", Security.model_fields)
def test_every_setting_is_on_the_page(name: str) -> None:
    assert f"| `{name}` |" in PAGE


def test_every_metric_is_on_the_page() -> None:
    for metric in Metrics().registry.collect():
        if metric.name.startswith("attention_tls"):
            name = metric.name + ("_total" if metric.type == "counter" else "")
            assert f"| `{name}{{" in PAGE
