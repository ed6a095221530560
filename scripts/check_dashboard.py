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
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from scripts.local_server import ROOT, ServerProcess, serving
from scripts.mixed_load import mixed_load
from scripts.prometheus import ProgramNotFoundError, Prometheus, scraping

DASHBOARD = ROOT / "deploy/dashboards/grafana/attention.json"
# Values of the dashboard's variables: everything, and a short window of rates.
VARIABLES = {"$job": ".*", "$instance": ".*", "$model": ".*", "$__rate_interval": "10s"}
INTERVAL_SECONDS = 1
DAMAGED = "damaged-model"
# A small limit, so that it is reached, and a short period, so that every model is replayed.
OPTIONS = ("--max-concurrent-calls=24", "--canary-seconds=10")
METRIC = re.compile(r"\b(?:attention|process)_\w+|\bjob(?:_model)?:\w+:\w+|\bup\b")
# Metrics that exist with certain settings only, which the servers of this check do not have.
CONDITIONAL = ("attention_tls_",)


@dataclass(frozen=True)
class Finding:
    """What a query or a rule returned.

    Attributes:
        name: The panel's title, or the rule's name.
        expression: What was evaluated.
        problem: What is wrong; empty if nothing.
    """

    name: str
    expression: str
    problem: str


def main() -> int:
    """Checks, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Checks the dashboard and the rules under a real load.")
    parser.add_argument("--repository", type=Path, required=True, help="models to serve; it is not changed")
    parser.add_argument("--seconds", type=float, default=120, help="how long the load lasts, in seconds")
    arguments = parser.parse_args()
    try:
        findings = check(arguments.repository, arguments.seconds)
    except ProgramNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = [each for each in findings if each.problem]
    for each in failed:
        print(f"{each.name}: {each.problem}\n    {each.expression.strip()}")
    print(f"{len(findings)} queries and rules checked, {len(failed)} failed")
    return 1 if failed else 0


def check(repository: Path, seconds: float) -> list[Finding]:
    """Serves, sends a load, and evaluates everything.

    Args:
        repository: The models. A copy of them is served.
        seconds: How long the load lasts.

    Raises:
        ProgramNotFoundError: Prometheus is not installed.
    """
    with _measured(repository, seconds) as (prometheus, start, end):
        return [*_panels(prometheus, start, end), *_rules(prometheus)]


@contextmanager
def _measured(repository: Path, seconds: float) -> Iterator[tuple[Prometheus, float, float]]:
    """Yields a Prometheus that has scraped servers under load, and the times between which it did."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = folder / "models"
        shutil.copytree(repository, models)
        swapped = _damage_a_copy(models)
        one = stack.enter_context(
            serving(models, folder / "one.log", "--model-control=explicit", "--load-model=*", *OPTIONS)
        )
        workers = stack.enter_context(serving(models, folder / "workers.log", "--workers=2", *OPTIONS))
        targets = [f"127.0.0.1:{server.metrics_port}" for server in (one, workers)]
        (folder / "prometheus").mkdir()
        prometheus = stack.enter_context(scraping(folder / "prometheus", targets, INTERVAL_SECONDS))
        start = time.time()
        with mixed_load([one.target, workers.target], (one.target, swapped)):
            time.sleep(seconds / 2)
            _kill_a_worker(workers)
            time.sleep(seconds / 2)
        yield prometheus, start, time.time()


def _damage_a_copy(models: Path) -> str:
    """Adds a model that fails to load; returns the name of a good one."""
    (name, *_) = sorted(path.name for path in models.iterdir() if path.is_dir())
    shutil.copytree(models / name, models / DAMAGED)  # its manifest describes another model
    return name


def _kill_a_worker(server: ServerProcess) -> None:
    pids = re.findall(r" worker started .*\bpid=(\d+)", server.log.read_text())
    os.kill(int(pids[-1]), signal.SIGKILL)


def queries() -> list[tuple[str, str]]:
    """The panel's title and the expression for Prometheus of every query of the dashboard."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            found.append((panel["title"], expression))
    return found


def _panels(prometheus: Prometheus, start: float, end: float) -> Iterator[Finding]:
    """Evaluates every query of the dashboard."""
    for title, expression in queries():
        try:
            values = prometheus.values(expression, start, end, INTERVAL_SECONDS)
        except RuntimeError as error:
            yield Finding(title, expression, str(error))
            continue
        problem = "" if any(map(isfinite, values)) or _is_conditional(expression) else "returns nothing"
        yield Finding(title, expression, problem)


def _rules(prometheus: Prometheus) -> Iterator[Finding]:
    """Reads how Prometheus has evaluated every rule.

    An alert that does not fire returns nothing: all metrics that it reads must exist.
    """
    existing = prometheus.names()
    for rule in prometheus.rules():
        problem = rule.get("lastError", "") or ("" if rule["health"] == "ok" else f"is {rule['health']}")
        read = {name for name in METRIC.findall(rule["query"]) if not _is_conditional(name)}
        if rule["type"] == "recording":
            read.add(rule["name"])
        if missing := sorted(read - existing):
            problem = problem or f"there is no {', '.join(missing)}"
        yield Finding(rule["name"], rule["query"], problem)


def _is_conditional(expression: str) -> bool:
    return any(prefix in expression for prefix in CONDITIONAL)


if __name__ == "__main__":
    sys.exit(main())
