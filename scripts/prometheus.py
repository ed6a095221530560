"""A real Prometheus on loopback, with the configuration of deploy/dashboards, and where its programs are."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION = ROOT / "deploy/dashboards/prometheus/prometheus.yml"
# The environment variable that names each program, if it is not on PATH.
VARIABLES = {"prometheus": "PROMETHEUS", "promtool": "PROMTOOL"}
START_SECONDS = 60
HOST = "127.0.0.1"


class ProgramNotFoundError(Exception):
    """A program of Prometheus is not installed."""


def find_program(name: str) -> str:
    """The path of `prometheus` or `promtool`.

    Raises:
        ProgramNotFoundError: It is neither on PATH nor where its environment variable says.
    """
    found = shutil.which(os.environ.get(VARIABLES[name]) or name)
    if found is None:
        raise ProgramNotFoundError(
            f"{name} is not installed: it is neither on PATH nor what {VARIABLES[name]} says"
        )
    return found


class Prometheus:
    """Asks a Prometheus over its HTTP API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def names(self) -> set[str]:
        """The names of all metrics that exist now."""
        return set(self._get("label/__name__/values"))

    def values(self, expression: str, start: float, end: float, step: float) -> list[float]:
        """The values of an expression from one time to another, every so many seconds, of all its series.

        Raises:
            RuntimeError: The expression is not valid.
        """
        found = self._get("query_range", query=expression, start=start, end=end, step=step)["result"]
        return [float(value) for series in found for _, value in series["values"]]

    def rules(self) -> list[dict[str, Any]]:
        """Every rule, with the health and the last error of its evaluation."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def is_ready(self) -> bool:
        """Whether it answers queries."""
        with suppress(OSError), urllib.request.urlopen(f"{self._url}/-/ready"):  # noqa: S310 - http on loopback
            return True
        return False

    def _get(self, path: str, **parameters: object) -> Any:
        url = f"{self._url}/api/v1/{path}?{urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url) as response:  # noqa: S310 - http on loopback
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path} {parameters}: {error.read().decode()}") from error


@contextmanager
def scraping(folder: Path, targets: Sequence[str], interval_seconds: int) -> Iterator[Prometheus]:
    """Runs Prometheus until the block ends.

    Args:
        folder: An empty folder for its files.
        targets: HOST:PORT of the servers' metrics.
        interval_seconds: How often they are scraped and the rules are evaluated.

    Raises:
        ProgramNotFoundError: Prometheus is not installed.
        RuntimeError: It does not start.
    """
    configuration = folder / "prometheus.yml"
    configuration.write_text(yaml.safe_dump(_configuration(targets, interval_seconds)))
    address, log = f"{HOST}:{_free_port()}", folder / "log"
    command = [
        find_program("prometheus"),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)  # noqa: S603 - found on PATH
    try:
        prometheus, until = Prometheus(f"http://{address}"), time.monotonic() + START_SECONDS
        while not prometheus.is_ready():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"Prometheus did not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield prometheus
    finally:
        process.terminate()
        process.wait(timeout=60)


def _configuration(targets: Sequence[str], interval_seconds: int) -> dict[str, Any]:
    """The committed configuration, with these targets and intervals."""
    found: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text())
    interval = f"{interval_seconds}s"
    found["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
    found["rule_files"] = [str(CONFIGURATION.parent / pattern) for pattern in found["rule_files"]]
    for job in found["scrape_configs"]:
        job["static_configs"] = [{"targets": list(targets)}]
    return found


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
