"""Prometheus' rules and the Grafana dashboard: valid, complete, and about metrics that exist."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from attention_serving.server.observe.metrics import SECONDS
from scripts.check_dashboard import DASHBOARD, queries
from scripts.operations_tables import metrics
from scripts.prometheus import CONFIGURATION

FOLDER = CONFIGURATION.parent
RULES = sorted((FOLDER / "rules").glob("*.yml"))
UNIT_TESTS = sorted((FOLDER / "tests").glob("*.yml"))
PROVISIONING = sorted((DASHBOARD.parent / "provisioning").glob("*/*.yml"))
METRIC = re.compile(r"\b(?:attention|process)_\w+|\bjob(?:_model)?:\w+:\w+")
LABELS = re.compile(r"\b(?:by|on|group_left|ignoring) \(([^)]*)\)|\{([^}]*)\}")
# Metrics of features of their own, by the beginning of their names.
OTHERS = ("attention_tls_", "attention_canary_")
GRID_WIDTH = 24


def rules() -> list[dict[str, Any]]:
    groups = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    """Every query of the dashboard and of the rules, without labels."""
    found = (*(expression for _, expression in queries()), *(rule["expr"] for rule in rules()))
    return [LABELS.sub("", each) for each in found]


def run(promtool: str, *arguments: str | Path) -> str:
    """Runs promtool, and returns what it says."""
    found = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_the_configuration_is_valid(promtool: str) -> None:
    assert f"{len(RULES)} rule files found" in run(promtool, "check", "config", CONFIGURATION)


@pytest.mark.parametrize("file", RULES, ids=lambda file: file.stem)
def test_the_rules_are_valid(promtool: str, file: Path) -> None:
    assert "SUCCESS" in run(promtool, "check", "rules", file)


@pytest.mark.parametrize("file", UNIT_TESTS, ids=lambda file: file.stem)
def test_the_rules_do_what_their_unit_tests_say(promtool: str, file: Path) -> None:
    assert "SUCCESS" in run(promtool, "test", "rules", file)


def test_a_wrong_expectation_fails(promtool: str, tmp_path: Path) -> None:
    """What the test above relies on."""
    text = (FOLDER / "tests/alerts.yml").read_text().replace("../rules", str(FOLDER / "rules"))
    wrong = tmp_path / "alerts.yml"
    wrong.write_text(text.replace("AttentionQueueStuck", "AttentionQueueLong"))
    found = subprocess.run([promtool, "test", "rules", wrong], capture_output=True, text=True, check=False)
    assert found.returncode != 0


def test_every_alert_fires_in_a_unit_test() -> None:
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    fired = re.findall(r'alertname="(\w+)"', (FOLDER / "tests/alerts.yml").read_text())
    assert alerts == set(fired)


def test_every_alert_has_a_severity_and_a_summary() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"page", "ticket"}
            assert rule["annotations"]["summary"].endswith(".")


def test_queries_and_rules_read_metrics_that_exist() -> None:
    known = {name for name, *_ in metrics()} | {rule["record"] for rule in rules() if "record" in rule}
    histograms = [name for name, kind, *_ in metrics() if kind == "histogram"]
    parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    read = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert {name for name in read - known - parts if not name.startswith(OTHERS)} == set()
    assert len(read) > 40


def test_bounds_of_the_rules_are_buckets() -> None:
    bounds = {bound for rule in rules() for bound in re.findall(r'le="([^"]+)"', rule["expr"])}
    assert bounds == {"0.25"}
    assert {float(bound) for bound in bounds} <= set(SECONDS)


def test_panels_have_all_that_a_reader_needs() -> None:
    found = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    shown = [panel for panel in found if panel["type"] != "row"]
    assert len({panel["title"] for panel in shown}) == len(shown) > 30
    for panel in shown:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"]
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= GRID_WIDTH
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_grafana_finds_the_data_source_and_the_dashboard() -> None:
    files = {file.parent.name: yaml.safe_load(file.read_text()) for file in PROVISIONING}
    (source,) = files["datasources"]["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    interval = yaml.safe_load(CONFIGURATION.read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    (provider,) = files["dashboards"]["providers"]
    assert provider["options"]["path"]
