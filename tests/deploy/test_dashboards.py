"""Prometheus' rules and the Grafana dashboard: valid, complete, and about metrics that exist."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from attention_serving.server.observe.metrics import SECONDS
from scripts.generate_operations_page import metrics
from scripts.local_server import ROOT
from tests.support.prometheus import required

DASHBOARD = ROOT / "deploy/dashboards/grafana/attention.json"
FOLDER = ROOT / "deploy/dashboards/prometheus"
CONFIGURATION = FOLDER / "prometheus.yml"
RULES = sorted((FOLDER / "rules").glob("*.yml"))
UNIT_TESTS = sorted((FOLDER / "tests").glob("*.yml"))
# What Grafana puts in place of the dashboard's variables.
VARIABLES = {"$job": ".*", "$instance": ".*", "$model": ".*", "$__rate_interval": "1m"}
METRIC = re.compile(r"\b(?:attention|process)_\w+|\bjob(?:_model)?:\w+:\w+")
LABELS = re.compile(r"\b(?:by|on|group_left|ignoring) \(([^)]*)\)|\{([^}]*)\}")
SELECTOR = re.compile(r"\b((?:attention|process)_\w+)\{([^}]*)\}")
PART_OF_HISTOGRAM = re.compile(r"_(?:bucket|sum|count)$")
# Labels that Prometheus adds.
ADDED = {"job", "instance", "le"}


def rules() -> list[dict[str, Any]]:
    groups = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> list[str]:
    """The expression for Prometheus of every query of the dashboard."""
    text = DASHBOARD.read_text()
    for variable, value in VARIABLES.items():
        text = text.replace(variable, value)
    return [target["expr"] for panel in json.loads(text)["panels"] for target in panel.get("targets", ())]


EXPRESSIONS = [*queries(), *(rule["expr"] for rule in rules())]


def run(*arguments: str | Path) -> str:
    """Runs promtool, and returns what it says."""
    found = subprocess.run([required("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_configuration_and_rules_are_valid_and_do_what_their_unit_tests_say() -> None:
    assert f"{len(RULES)} rule files found" in run("check", "config", CONFIGURATION)
    assert "SUCCESS" in run("test", "rules", *UNIT_TESTS)


def test_queries_of_the_dashboard_are_valid(tmp_path: Path) -> None:
    group = {"name": "dashboard", "rules": [{"record": "panel", "expr": each} for each in queries()]}
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [group]}))
    run("check", "rules", "--lint=none", tmp_path / "rules.yml")


def test_every_alert_fires_in_a_unit_test() -> None:
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert alerts == set(re.findall(r'alertname="(\w+)"', (FOLDER / "tests/alerts.yml").read_text()))


def test_queries_and_rules_read_metrics_that_exist() -> None:
    known = {name for name, *_ in metrics()} | {rule["record"] for rule in rules() if "record" in rule}
    read = {name for each in EXPRESSIONS for name in METRIC.findall(LABELS.sub("", each))}
    assert len(read) > 40
    assert {name for name in read if not {name, PART_OF_HISTOGRAM.sub("", name)} & known} == set()


def test_selectors_name_labels_that_the_metrics_have() -> None:
    labels = {name: {*own, *ADDED} for name, _, own, *_ in metrics()}
    selectors = {found for each in EXPRESSIONS for found in SELECTOR.findall(each)}
    assert len(selectors) > 20
    for name, selector in selectors:
        known = labels.get(name) or labels[PART_OF_HISTOGRAM.sub("", name)]
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= known, (name, selector)


def test_bounds_of_the_rules_are_buckets() -> None:
    bounds = {float(bound) for rule in rules() for bound in re.findall(r'le="([^"]+)"', rule["expr"])}
    assert bounds
    assert bounds <= set(SECONDS)
