"""Checks the Grafana dashboard and Prometheus' rules against real servers under load.

`python -m scripts.check_dashboard --repository model_repository` serves the models twice, by one process and
by two workers, lets Prometheus scrape them while requests of every kind arrive, and then evaluates every
query of the dashboard and every rule. It ends with status 1 if one of them fails or returns nothing.
`--picture FILE` draws the panels from the same data.
"""

import argparse
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

from scripts.dashboard.load import mixed_load
from scripts.dashboard.panels import panels
from scripts.dashboard.picture import draw
from scripts.dashboard.programs import ProgramNotFoundError
from scripts.dashboard.prometheus import Prometheus, scraping
from scripts.local_server import ServerProcess, serving

INTERVAL_SECONDS, RATE_INTERVAL = 1, "10s"
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
    parser.add_argument("--picture", type=Path, help="file to draw the panels into")
    arguments = parser.parse_args()
    try:
        findings = check(arguments.repository, arguments.seconds, arguments.picture)
    except ProgramNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = [each for each in findings if each.problem]
    for each in failed:
        print(f"{each.name}: {each.problem}\n    {each.expression.strip()}")
    print(f"{len(findings)} queries and rules checked, {len(failed)} failed")
    return 1 if failed else 0


def check(repository: Path, seconds: float, picture: Path | None = None) -> list[Finding]:
    """Serves, sends a load, and evaluates everything.

    Args:
        repository: The models. A copy of them is served.
        seconds: How long the load lasts.
        picture: Where to draw the panels; None for nowhere.

    Raises:
        ProgramNotFoundError: Prometheus is not installed.
    """
    with _measured(repository, seconds) as (prometheus, start, end):
        if picture is not None:
            draw(prometheus, start, end, RATE_INTERVAL, picture)
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


def _panels(prometheus: Prometheus, start: float, end: float) -> Iterator[Finding]:
    """Evaluates every query of the dashboard."""
    for panel in panels():
        for query in panel.queries:
            expression = query.expanded(RATE_INTERVAL)
            try:
                found = prometheus.query_range(expression, start, end, INTERVAL_SECONDS)
            except RuntimeError as error:
                yield Finding(panel.title, expression, str(error))
                continue
            values = [value for series in found for _, value in series.points if isfinite(value)]
            problem = "" if values or _is_conditional(expression) else "returns nothing"
            yield Finding(panel.title, expression, problem)


def _rules(prometheus: Prometheus) -> Iterator[Finding]:
    """Reads how Prometheus has evaluated every rule.

    An alert that does not fire returns nothing: all metrics that it reads must exist.
    """
    existing = {series.labels["__name__"] for series in prometheus.query('{__name__!=""}')}
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
