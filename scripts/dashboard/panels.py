"""The panels of the Grafana dashboard, with their queries as Prometheus takes them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy/dashboards/grafana/attention.json"
# Values of the dashboard's variables: everything.
VARIABLES = {"$job": ".*", "$instance": ".*", "$model": ".*"}
RATE_INTERVAL = "$__rate_interval"
# A label in a legend that a series does not have.
MISSING = re.compile(r"\{\{\w+\}\}")


@dataclass(frozen=True)
class Query:
    """One query of a panel.

    Attributes:
        expression: In PromQL, with Grafana's variables.
        legend: Name of a series, with its labels as `{{label}}`.
    """

    expression: str
    legend: str

    def expanded(self, rate_interval: str) -> str:
        """The expression for Prometheus.

        Args:
            rate_interval: The window of rates, such as `15s`.
        """
        expression = self.expression.replace(RATE_INTERVAL, rate_interval)
        for variable, value in VARIABLES.items():
            expression = expression.replace(variable, value)
        return expression

    def name(self, labels: dict[str, str]) -> str:
        """The name of a series with these labels."""
        name = self.legend
        for label, value in labels.items():
            name = name.replace(f"{{{{{label}}}}}", value)
        return MISSING.sub("none", name)


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: Its title.
        kind: Grafana's type: timeseries, heatmap or stat.
        unit: Grafana's name of the unit.
        place: Left edge, width and height on Grafana's grid, which is 24 wide.
        queries: What it shows.
    """

    title: str
    kind: str
    unit: str
    place: tuple[int, int, int]
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Row:
    """A part of the dashboard with a title.

    Attributes:
        title: Its title.
        lines: Its panels, line by line.
    """

    title: str
    lines: tuple[tuple[Panel, ...], ...]


def rows(file: Path = DASHBOARD) -> list[Row]:
    """The dashboard from top to bottom."""
    found: list[tuple[str, dict[int, list[Panel]]]] = []
    for each in json.loads(file.read_text())["panels"]:
        if each["type"] == "row":
            found.append((each["title"], {}))
        else:
            found[-1][1].setdefault(each["gridPos"]["y"], []).append(_panel(each))
    return [Row(title, tuple(tuple(lines[y]) for y in sorted(lines))) for title, lines in found]


def panels(file: Path = DASHBOARD) -> list[Panel]:
    """Every panel in the order of the dashboard, without the rows' titles."""
    return [panel for row in rows(file) for line in row.lines for panel in line]


def _panel(panel: dict[str, Any]) -> Panel:
    unit = panel["fieldConfig"]["defaults"].get("unit") or panel["options"]["yAxis"]["unit"]
    queries = tuple(Query(target["expr"], target["legendFormat"]) for target in panel["targets"])
    place = panel["gridPos"]["x"], panel["gridPos"]["w"], panel["gridPos"]["h"]
    return Panel(panel["title"], panel["type"], unit, place, queries)
