"""Checks the Grafana dashboard and Prometheus' rules against real servers under load.

`python -m scripts.check_dashboard --repository model_repository` serves the models twice, by one process and
by two workers, lets Prometheus scrape them while requests of every kind arrive, and then evaluates every
query of the dashboard and every rule. It ends with status 1 if one of them fails or returns nothing.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import grpc
import numpy as np
import yaml
from attention_client import AttendInputs, AttentionClient, AttentionClientError, ModelInfo

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from benchmarks.processes import free_ports
from scripts.local_server import ROOT, serving

DASHBOARD = ROOT / "deploy/dashboards/grafana/attention.json"
CONFIGURATION = ROOT / "deploy/dashboards/prometheus/prometheus.yml"
# The environment variable that names each program, if it is not on PATH.
PROGRAMS = {"prometheus": "PROMETHEUS", "promtool": "PROMTOOL"}
START_SECONDS = 60
# Values of the dashboard's variables: everything, and a short window of rates.
VARIABLES = {"$job": ".*", "$instance": ".*", "$model": ".*", "$__rate_interval": "10s"}
INTERVAL_SECONDS = 1
# A limit that the callers exceed now and then, and a short period, so that every model is replayed.
OPTIONS = ("--max-concurrent-calls=12", "--canary-seconds=10")
CALLERS = 16
METRIC = re.compile(r"\b(?:attention|process)_\w+|\bjob(?:_model)?:\w+:\w+|\bup\b")
# Metrics that exist with certain settings only, which the servers of this check do not have.
CONDITIONAL = "attention_tls_"
SWAP_SECONDS = 6.0
LONGEST = 96
INPUTS = ("query", "key", "value")
# Asks Prometheus' HTTP API: a path, and parameters.
Ask = Callable[..., Any]


class ProgramNotFoundError(Exception):
    """A program of Prometheus is not installed."""


class Finding(NamedTuple):
    """What a query, by its panel's title, or a rule returned; `problem` is empty if nothing is wrong."""

    name: str
    expression: str
    problem: str


def main() -> None:
    """Checks, and ends with the exit status."""
    parser = argparse.ArgumentParser(description="Checks the dashboard and the rules under a real load.")
    parser.add_argument("--repository", type=Path, required=True, help="models to serve; it is not changed")
    parser.add_argument("--seconds", type=float, default=120, help="how long the load lasts, in seconds")
    arguments = parser.parse_args()
    try:
        findings = check(arguments.repository, arguments.seconds)
    except ProgramNotFoundError as error:
        parser.error(str(error))
    failed = [each for each in findings if each.problem]
    for each in failed:
        print(f"{each.name}: {each.problem}\n    {each.expression.strip()}")
    print(f"{len(findings)} queries and rules checked, {len(failed)} failed")
    sys.exit(bool(failed))


def check(repository: Path, seconds: float) -> list[Finding]:
    """Serves a copy of the models, sends a load for some seconds, and evaluates everything.

    Raises:
        ProgramNotFoundError: Prometheus is not installed.
    """
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        models = folder / "models"
        shutil.copytree(repository, models)
        (name, *_) = sorted(path.name for path in models.iterdir() if path.is_dir())
        shutil.copytree(models / name, models / "damaged")  # its manifest describes another model
        explicit = ("--model-control=explicit", "--load-model=*", *OPTIONS)
        one = stack.enter_context(serving(models, folder / "one.log", *explicit))
        workers = stack.enter_context(serving(models, folder / "workers.log", "--workers=2", *OPTIONS))
        targets = [f"127.0.0.1:{server.metrics_port}" for server in (one, workers)]
        ask = stack.enter_context(scraping(folder, targets))
        start, ended = time.time(), threading.Event()
        works = [
            *(partial(_call, own.target, seed) for seed in range(CALLERS) for own in (one, workers)),
            partial(_swap, one.target, name),
        ]
        with ThreadPoolExecutor(len(works)) as threads:
            running = [threads.submit(work, ended) for work in works]
            time.sleep(seconds / 2)
            pids = re.findall(r" worker started .*\bpid=(\d+)", workers.log.read_text())
            os.kill(int(pids[-1]), signal.SIGKILL)
            time.sleep(seconds / 2)
            ended.set()
        for work in running:
            work.result()
        return [*_panels(ask, start, time.time()), *_rules(ask)]


def find_program(name: str) -> str:
    """The path of `prometheus` or `promtool`.

    Raises:
        ProgramNotFoundError: It is neither on PATH nor where its environment variable says.
    """
    if found := shutil.which(os.environ.get(PROGRAMS[name]) or name):
        return found
    raise ProgramNotFoundError(f"{name} is neither on PATH nor what {PROGRAMS[name]} says")


@contextmanager
def scraping(folder: Path, targets: Sequence[str]) -> Iterator[Ask]:
    """Runs Prometheus with the committed configuration until the block ends.

    Args:
        folder: A folder for its files.
        targets: HOST:PORT of the servers' metrics.

    Raises:
        ProgramNotFoundError: Prometheus is not installed.
        RuntimeError: It does not start.
    """
    settings: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text())
    interval = f"{INTERVAL_SECONDS}s"
    settings["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
    settings["rule_files"] = [str(CONFIGURATION.parent / pattern) for pattern in settings["rule_files"]]
    for job in settings["scrape_configs"]:
        job["static_configs"] = [{"targets": list(targets)}]
    configuration, log = folder / "prometheus.yml", folder / "prometheus.log"
    configuration.write_text(yaml.safe_dump(settings))
    (port,) = free_ports()
    address = f"127.0.0.1:{port}"
    command = [find_program("prometheus"), f"--config.file={configuration}"]
    command += [f"--storage.tsdb.path={folder / 'prometheus'}", f"--web.listen-address={address}"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)  # noqa: S603 - found on PATH
    try:
        until = time.monotonic() + START_SECONDS
        while not _is_ready(address):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"Prometheus did not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield partial(_ask, address)
    finally:
        process.terminate()
        process.wait(timeout=60)


def _is_ready(address: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://{address}/-/ready"):
        return True
    return False


def _ask(address: str, path: str, **parameters: object) -> Any:
    """The data of an answer. Raises RuntimeError if Prometheus refuses the question."""
    try:
        with urllib.request.urlopen(f"http://{address}/api/v1/{path}?{urlencode(parameters)}") as response:
            return json.load(response)["data"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{path} {parameters}: {error.read().decode()}") from error


def queries() -> list[tuple[str, str]]:
    """The panel's title and the expression for Prometheus of every query of the dashboard."""
    text = DASHBOARD.read_text()
    for variable, value in VARIABLES.items():
        text = text.replace(variable, value)
    panels = json.loads(text)["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]


def _panels(ask: Ask, start: float, end: float) -> Iterator[Finding]:
    """Evaluates every query of the dashboard. Raises RuntimeError if Prometheus refuses one."""
    for title, expression in queries():
        found = ask("query_range", query=expression, start=start, end=end, step=INTERVAL_SECONDS)
        values = [float(value) for series in found["result"] for _, value in series["values"]]
        problem = "" if any(map(isfinite, values)) or CONDITIONAL in expression else "returns nothing"
        yield Finding(title, expression, problem)


def _rules(ask: Ask) -> Iterator[Finding]:
    """Reads how Prometheus has evaluated every rule.

    An alert that does not fire returns nothing: all metrics that it reads must exist.
    """
    existing = set(ask("label/__name__/values"))
    for rule in (rule for group in ask("rules")["groups"] for rule in group["rules"]):
        problem = rule.get("lastError", "") or ("" if rule["health"] == "ok" else f"is {rule['health']}")
        read = {name for name in METRIC.findall(rule["query"]) if CONDITIONAL not in name}
        if rule["type"] == "recording":
            read.add(rule["name"])
        if missing := sorted(read - existing):
            problem = problem or f"there is no {', '.join(missing)}"
        yield Finding(rule["name"], rule["query"], problem)


def _call(target: str, seed: int, ended: threading.Event) -> None:
    """Sends requests of every kind, most of them good, and ignores that some are refused."""
    rng = np.random.default_rng(seed)
    with AttentionClient(target, timeout=20.0) as client:
        vectors, texts = _ready_models(client)
        while not ended.is_set():
            model = vectors[rng.integers(len(vectors))]
            name, inputs = model.name, _inputs(model, rng)
            several: dict[str, Any] = {key: [rows] * 4 for key, rows in inputs.items()}
            requests: list[Callable[[], object]] = [
                *[partial(client.attend, name, **inputs)] * 20,
                *[partial(client.attend, name, **several)] * 5,
                partial(client.attend, name, **inputs, return_weights=True),
                partial(_stream, client, name, inputs),
                *[partial(client.attend_text, text, "Life is short, eat dessert first") for text in texts],
                partial(client.attend, name, np.ones((2, 3), np.float32)),  # of a wrong width
                partial(client.attend, f"unknown-{name}", **inputs),
                partial(client.attend, name, **inputs, timeout=0.002),
            ]
            for request in requests:
                with suppress(AttentionClientError):
                    request()


def _stream(client: AttentionClient, name: str, inputs: dict[str, Any]) -> None:
    for _ in client.attend_stream(name, [AttendInputs(**inputs)] * 8):
        pass


def _ready_models(client: AttentionClient) -> tuple[list[ModelInfo], list[str]]:
    """The models that take vectors, and the names of those that take text."""
    ready = [model for model in client.models() if model.state == "ready"]
    vectors = [own for own in ready if all(spec.name in INPUTS for spec in own.inputs if not spec.optional)]
    return vectors, [model.name for model in ready if model.accepts_text]


def _inputs(model: ModelInfo, rng: np.random.Generator) -> dict[str, Any]:
    """One sequence for each input of a model, as long as its axis."""
    lengths = {spec.axes[1]: int(rng.integers(1, LONGEST)) for spec in model.inputs if not spec.optional}
    return {
        spec.name: rng.standard_normal((lengths[spec.axes[1]], int(spec.axes[2])), dtype=np.float32)
        for spec in model.inputs
        if not spec.optional
    }


def _swap(target: str, name: str, ended: threading.Event) -> None:
    """Unloads and loads a model, again and again."""
    with grpc.insecure_channel(target) as channel:
        stub = GRPCInferenceServiceStub(channel)
        while not ended.wait(SWAP_SECONDS):
            with suppress(grpc.RpcError):
                stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=name))
                stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name))


if __name__ == "__main__":
    main()
