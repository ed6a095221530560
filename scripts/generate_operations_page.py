"""Writes the tables of docs/reference.md that follow from the code.

`python -m scripts.generate_operations_page` replaces what is between the markers `<!-- NAME -->` and
`<!-- end -->`.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.observe.prometheus import PROCESS, ProcessesCollector
from attention_serving.server.process.command_line import shown_default
from attention_serving.server.process.workers import supervisor_metrics
from attention_serving.server.settings import SECTIONS, Settings

PAGE = Path(__file__).resolve().parents[1] / "docs/reference.md"
MARKED = re.compile(r"<!-- (?P<name>[a-z ]+) -->\n.*?<!-- end -->", re.DOTALL)
# How the values of several workers become one, by prometheus_client's name of it.
# The supervisor has gauges of its own, of mode `all`.
SUPERVISOR, EACH_PROCESS = "supervisor", "each process"
AMONG_WORKERS = {"livesum": "sum", "livemax": "largest", "livemin": "smallest", "all": SUPERVISOR}
TYPES: dict[Any, str] = {
    bool: "switch",
    ByteSize: "bytes",
    Path: "path",
    Path | None: "path",
    str: "text",
    dict[str, str]: "table",
}
# Endings of the names of settings that have a unit.
UNITS = {"_jwks": "path or URL", "_seconds": "seconds", "_bytes": "bytes", "_port": "port", "_length": "rows"}


def main() -> None:
    """Writes the page."""
    PAGE.write_text(generated(PAGE.read_text()))


def generated(page: str) -> str:
    """The page with current tables."""
    return MARKED.sub(lambda mark: f"<!-- {mark[1]} -->\n{TABLES[mark[1]]()}\n<!-- end -->", page)


def settings_table() -> str:
    """Flag, variable, unit, default and meaning of every setting, below the name of its section."""
    rows = []
    for section, fields in SECTIONS.items():
        rows.append((f"**{section}**", "", "", "", ""))
        for name, field in fields.model_fields.items():
            flag, variable = f"`--{name.replace('_', '-')}`", f"`ATTENTION_{name.upper()}`"
            rows.append((flag, variable, _unit(name, field), _default(field), str(field.description)))
    return _table(("setting", "environment", "unit", "default", "meaning"), rows)


def metrics_table() -> str:
    """Every metric that a server publishes: name, type, labels, how workers are combined, and help."""
    rows = [
        (f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels), mode, text)
        for name, kind, labels, mode, text in metrics()
    ]
    return _table(("metric", "type", "labels", "workers", "meaning"), rows)


def metrics() -> list[tuple[str, str, tuple[str, ...], str, str]]:
    """Name, type, labels, combination of workers and help of every metric, in the order of their creation."""
    served, supervisor = Metrics(), CollectorRegistry()
    served.configured(Settings.model_validate({"model_repository": Path()}))
    supervisor_metrics(supervisor)
    rows = [_describe(metric) for metric in _collectors(served.registry)]
    rows += [_describe(metric, SUPERVISOR) for metric in _collectors(supervisor)]
    for family in ProcessesCollector(lambda: {"": os.getpid()}).collect():
        name = _published_name(family.name, family.type)
        rows.append((name, family.type, (PROCESS,), EACH_PROCESS, family.documentation))
    return rows


def _collectors(registry: CollectorRegistry) -> list[MetricWrapperBase]:
    return [metric for metric in registry._collector_to_names if isinstance(metric, MetricWrapperBase)]


def _describe(metric: Any, mode: str = "") -> tuple[str, str, tuple[str, ...], str, str]:
    mode = mode or AMONG_WORKERS[getattr(metric, "_multiprocess_mode", "livesum")]
    labels, kind = tuple(metric._labelnames), str(metric._type)
    return _published_name(metric._name, kind), kind, labels, mode, metric._documentation


def _published_name(name: str, kind: str) -> str:
    """The name as it is served."""
    return f"{name.removesuffix('_total')}_total" if kind == "counter" else name


def _unit(name: str, field: FieldInfo) -> str:
    kind: Any = field.annotation
    if get_origin(kind) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(kind))
    if kind in TYPES:
        return TYPES[kind]
    return next((unit for ending, unit in UNITS.items() if f"_{name}".endswith(ending)), "number")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    text = shown_default(field)
    if text is None:
        return "none"
    return text if isinstance(field.default, int | float) else f"`{text}`"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {"settings": settings_table, "metrics": metrics_table}


if __name__ == "__main__":
    main()
