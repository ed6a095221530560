"""Envoy in front of the servers of the drill, with the configuration of deploy/envoy."""

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from attention_client import AttentionClient

CONFIGURATION = Path(__file__).resolve().parents[2] / "deploy/envoy/envoy.yaml"
START_SECONDS = 30.0
STOP_SECONDS = 10.0


@contextmanager
def envoy(program: str, targets: Sequence[str], logs: Path) -> Iterator[str]:
    """Runs Envoy on loopback until the block ends.

    Args:
        program: Its path.
        targets: HOST:PORT of each server.
        logs: Folder for its configuration and its log.

    Yields:
        HOST:PORT where it listens.
    """
    port = _free_port()
    file = logs / "envoy.yaml"
    file.write_text(yaml.safe_dump(configuration(targets, port)))
    with (logs / "envoy.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - the program that the caller names
            [program, "--config-path", str(file), "--concurrency", "1"], stdout=log, stderr=log
        )
    try:
        target = f"127.0.0.1:{port}"
        with AttentionClient(target) as client:
            client.wait_until_ready(START_SECONDS)
        yield target
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def configuration(targets: Sequence[str], port: int) -> dict[str, Any]:
    """The configuration with other servers, and on another port of loopback."""
    document: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text())
    resources = document["static_resources"]
    _set_address(resources["listeners"][0], f"127.0.0.1:{port}")
    _set_address(document["admin"], "127.0.0.1:0")
    endpoints: list[dict[str, Any]] = [{"endpoint": {"address": {"socket_address": {}}}} for _ in targets]
    for endpoint, target in zip(endpoints, targets, strict=True):
        _set_address(endpoint["endpoint"], target)
    resources["clusters"][0]["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    return document


def _set_address(owner: dict[str, Any], target: str) -> None:
    host, _, port = target.rpartition(":")
    owner["address"]["socket_address"] = {"address": host, "port_value": int(port)}


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port
