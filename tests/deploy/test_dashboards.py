"""Prometheus' rules and the Grafana dashboard: valid, complete, and about metrics that exist."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from attention_serving.server.observe.metrics import SECONDS
from scripts.check_dashboard import CONFIGURATION, check, queries
from scripts.generate_operations_page import metrics
from tests.support.prometheus import required

FOLDER = CONFIGURATION.parent
RULES = sorted((FOLDER / "rules").glob("*.yml"))
UNIT_TESTS = sorted((FOLDER / "tests").glob("*.yml"))
METRIC = re.compile(r"\b(?:attention|process)_\w+|\bjob(?:_model)?:\w+:\w+")
LABELS = re.compile(r"\b(?:by|on|group_left|ignoring) \(([^)]*)\)|\{([^}]*)\}")
PART_OF_HISTOGRAM = re.compile(r"_(?:bucket|sum|count)$")
LOAD_SECONDS = 24


def rules() -> list[dict[str, Any]]:
    groups = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def run(*arguments: str | Path) -> str:
    """Runs promtool, and returns what it says."""
    found = subprocess.run([required("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_configuration_and_rules_are_valid_and_do_what_their_unit_tests_say() -> None:
    assert f"{len(RULES)} rule files found" in run("check", "config", CONFIGURATION)
    assert "SUCCESS" in run("test", "rules", *UNIT_TESTS)


@pytest.mark.thorough
def test_every_query_and_rule_returns_data(artifacts: Path) -> None:
    required("prometheus")
    findings = check(artifacts, LOAD_SECONDS)
    assert [each for each in findings if each.problem] == []
    assert len(findings) == len(rules()) + len(queries())


def test_every_alert_fires_in_a_unit_test() -> None:
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert alerts == set(re.findall(r'alertname="(\w+)"', (FOLDER / "tests/alerts.yml").read_text()))


def test_queries_and_rules_read_metrics_that_exist() -> None:
    known = {name for name, *_ in metrics()} | {rule["record"] for rule in rules() if "record" in rule}
    expressions = [expression for _, expression in queries()] + [rule["expr"] for rule in rules()]
    read = {name for each in expressions for name in METRIC.findall(LABELS.sub("", each))}
    assert len(read) > 40
    assert {name for name in read if not {name, PART_OF_HISTOGRAM.sub("", name)} & known} == set()


def test_bounds_of_the_rules_are_buckets() -> None:
    bounds = {float(bound) for rule in rules() for bound in re.findall(r'le="([^"]+)"', rule["expr"])}
    assert bounds
    assert bounds <= set(SECONDS)
