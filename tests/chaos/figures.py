"""The figures of a case: collected with their bounds, printed as a table, and appended to a report."""

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from benchmarks.processes import now
from tests.chaos import scale

REPORT_VARIABLE = "CHAOS_REPORT"
MIB = 1 << 20


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    name: str
    value: str
    bound: str = ""
    holds: bool = True


class Figures:
    """Collects the figures of one case. Leaving the block prints them and fails if a bound is missed.

    A missed bound does not end the case, so that the report holds every figure that could be measured.
    """

    def __init__(self, case: str) -> None:
        self._case = case
        self._figures: list[Figure] = []

    def note(self, name: str, value: object) -> None:
        """Adds a figure that has no bound."""
        self._figures.append(Figure(name, _text(value)))

    def at_most(self, name: str, value: float, bound: float) -> None:
        """Adds a figure that must not exceed a bound."""
        self._figures.append(Figure(name, _text(value), f"≤ {_text(bound)}", value <= bound))

    def at_least(self, name: str, value: float, bound: float) -> None:
        """Adds a figure that must reach a bound."""
        self._figures.append(Figure(name, _text(value), f"≥ {_text(bound)}", value >= bound))

    def equal(self, name: str, value: object, expected: object) -> None:
        """Adds a figure that must have one value."""
        self._figures.append(Figure(name, _text(value), f"= {_text(expected)}", value == expected))

    def among(self, name: str, counts: dict[str, int], allowed: set[str]) -> None:
        """Adds counts by outcome; no outcome may occur that is not allowed."""
        self._figures.append(
            Figure(name, _text(counts), f"only {', '.join(sorted(allowed))}", set(counts) <= allowed)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error:
            self._figures.append(
                Figure("the case ended early", f"{type(error).__name__}: {error}"[:200], "", holds=False)
            )
        table = self._table()
        print(f"\n{table}")  # noqa: T201 - the table is what the case is run for
        if path := os.environ.get(REPORT_VARIABLE):
            report = Path(path)
            report.parent.mkdir(parents=True, exist_ok=True)
            with report.open("a") as file:
                file.write(f"{table}\n\n")
        missed = [figure for figure in self._figures if not figure.holds]
        if missed and error is None:
            texts = (f"{figure.name}: {figure.value}, must be {figure.bound}" for figure in missed)
            pytest.fail("; ".join(texts), pytrace=False)

    def _table(self) -> str:
        rows = [("figure", "measured", "bound", "")] + [
            (figure.name, figure.value, figure.bound, "" if figure.holds else "MISSED")
            for figure in self._figures
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "| " + " | ".join(cell.ljust(widths[at]) for at, cell in enumerate(row)) + " |" for row in rows
        ]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return "\n".join([f"### {self._case} ({scale.current().name}, {now()})", "", *lines])


def mib(size: float) -> float:
    """Bytes as MiB."""
    return size / MIB


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {count:,}" for key, count in sorted(value.items())) or "none"
    return str(value)
