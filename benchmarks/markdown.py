"""Tables of reports, in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; all columns but the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text(value: Any) -> str:
    """A cell: a number with three significant digits and thousands separators, or counts by name."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004 - has three digits
    if isinstance(value, dict):
        return ", ".join(f"{key} {count:,}" for key, count in sorted(value.items())) or "none"
    return "-" if value is None else str(value)
