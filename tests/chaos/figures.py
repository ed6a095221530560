"""How long the cases run (CHAOS=quick or full), and their figures: printed, and appended to a report."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from benchmarks.markdown import table, text
from benchmarks.processes import now

NAME = os.environ.get("CHAOS") or "quick"


def scaled(quick: int, full: int) -> int:
    """Seconds or repetitions, for the extent that CHAOS names."""
    return {"quick": quick, "full": full}[NAME]


@dataclass
class Figures:
    """Collects the figures of one case. Leaving the block prints them and fails if a bound is missed.

    A missed bound does not end the case, so that the report holds every figure that could be measured.
    """

    case: str
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)

    def note(self, name: str, value: object, bound: str = "", *, holds: bool = True) -> None:
        """Adds a figure, with its bound if it has one."""
        self.rows.append((name, text(value), bound, "" if holds else "MISSED"))

    def at_most(self, name: str, value: float, bound: float) -> None:
        """Adds a figure that must not exceed a bound."""
        self.note(name, value, f"≤ {text(bound)}", holds=value <= bound)

    def at_least(self, name: str, value: float, bound: float) -> None:
        """Adds a figure that must reach a bound."""
        self.note(name, value, f"≥ {text(bound)}", holds=value >= bound)

    def equal(self, name: str, value: object, expected: object) -> None:
        """Adds a figure that must have one value."""
        self.note(name, value, f"= {text(expected)}", holds=value == expected)

    def among(self, name: str, counts: dict[str, int], allowed: set[str]) -> None:
        """Adds counts by outcome; no outcome may occur that is not allowed."""
        self.note(name, counts, f"only {', '.join(sorted(allowed))}", holds=counts.keys() <= allowed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error:
            self.note("the case ended early", f"{type(error).__name__}: {error}"[:200], holds=False)
        found = table(("figure", "measured", "bound", ""), self.rows)
        report = f"### {self.case} ({NAME}, {now()})\n\n{found}\n\n"
        print(f"\n{report}")  # noqa: T201 - the table is what the case is run for
        if path := os.environ.get("CHAOS_REPORT"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with Path(path).open("a") as file:
                file.write(report)
        missed = [f"{name}: {value}, must be {bound}" for name, value, bound, word in self.rows if word]
        if missed and error is None:
            pytest.fail("; ".join(missed), pytrace=False)
