"""Findings of the steps, a JSON object on each line: a step that is cut off leaves what it had found."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Records:
    """The findings of one step."""

    path: Path

    def add(self, **fields: Any) -> None:
        """Appends a finding."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")

    def read(self) -> list[Record]:
        """All findings; none if the step has not begun. A line that was cut off is skipped."""
        return list(self._lines()) if self.path.exists() else []

    def _lines(self) -> Iterator[Record]:
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
